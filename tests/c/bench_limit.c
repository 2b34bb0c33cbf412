/* What an all_reduce of float32 between two cores of this machine costs at least: its copies and its additions, by two threads on
 * cores of their own that look at nothing but each other's progress.
 *   bench_limit [bytes…]          µs, the median and the best of several batches, for each way of writing to the ring
 * Each thread puts the other's half into its ring, slice by slice, reduces its own half from there, puts the result into the ring
 * and copies the other's result out: every byte passes between the cores once each way. What the library takes beyond is its own. */
#include "base/attr.h"
#include "base/clock.h"
#include "check.h"
#include "simd/copy.h"
#include "simd/reduce.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { SLOTS = 12, BATCHES = 15 };
#define BATCH_NS (20 * CD_NS_PER_MS)
#define RING_BYTES ((size_t)3 << 20)
#define ALIGNED ((size_t)2 << 20)

typedef void (*copy_func)(void *to, const void *from, size_t bytes);
typedef struct {
    _Atomic uint64_t staged, reduced, left; /* slices, since the run began */
    char pad[CD_LINE * 2 - 3 * sizeof(uint64_t)];
} progress;

static struct {
    _Alignas(CD_LINE) progress of[2];
    char *ring[2], *array[2];
    size_t bytes, slice; /* of an array, of half a slot */
    copy_func put;
    uint64_t rounds;     /* in all batches so far */
    int repeats;
    double us[2];
} run;

static void await(const _Atomic uint64_t *word, uint64_t value)
{
    while (atomic_load_explicit(word, memory_order_acquire) < value)
        cd_cpu_relax();
}

static void tell(_Atomic uint64_t *word, uint64_t value)
{
    atomic_store_explicit(word, value, memory_order_release);
}

static char *slot_of(int rank, uint64_t round, int half)
{
    return run.ring[rank] + (round % SLOTS * 2 + (uint64_t)half) * run.slice;
}

static char *slice_of(int rank, uint64_t index, int half)
{
    return run.array[rank] + (index * 2 + (uint64_t)half) * run.slice;
}

static void put(int rank, uint64_t first, uint64_t index)
{
    uint64_t round = first + index;
    if (round >= SLOTS)
        await(&run.of[!rank].left, round + 1 - SLOTS);
    run.put(slot_of(rank, round, !rank), slice_of(rank, index, !rank), run.slice);
    tell(&run.of[rank].staged, round + 1);
}

static void reduce(int rank, uint64_t first, uint64_t index)
{
    uint64_t round = first + index;
    await(&run.of[!rank].staged, round + 1);
    char *own = slice_of(rank, index, rank), *theirs = slot_of(!rank, round, rank);
    const void *in[2] = {rank ? theirs : own, rank ? own : theirs};
    cd_reduce_find(CD_SUM, CD_FLOAT32)(own, in, 2, run.slice / sizeof(float), 0);
    run.put(slot_of(rank, round, rank), own, run.slice);
    tell(&run.of[rank].reduced, round + 1);
}

static void take(int rank, uint64_t first, uint64_t index)
{
    uint64_t round = first + index;
    await(&run.of[!rank].reduced, round + 1);
    cd_copy_near(slice_of(rank, index, !rank), slot_of(!rank, round, !rank), run.slice);
    tell(&run.of[rank].left, round + 1);
}

static uint64_t all_reduce(int rank, uint64_t first)
{
    uint64_t count = run.bytes / (2 * run.slice);
    put(rank, first, 0);
    for (uint64_t i = 0; i <= count; i++) {
        if (i + 1 < count)
            put(rank, first, i + 1);
        if (i < count)
            reduce(rank, first, i);
        if (i)
            take(rank, first, i - 1);
    }
    return first + count;
}

static void *work(void *which)
{
    int rank = which == &run.of[1];
    cpu_set_t core;
    CPU_ZERO(&core);
    CPU_SET((size_t)rank, &core);
    sched_setaffinity(0, sizeof core, &core); /* where it may not, it runs where it is */
    uint64_t round = all_reduce(rank, run.rounds), began_ns = cd_now_ns();
    for (int i = 0; i < run.repeats; i++)
        round = all_reduce(rank, round);
    run.us[rank] = (double)(cd_now_ns() - began_ns) / 1e3 / run.repeats;
    return NULL;
}

/* µs an all_reduce of the slower thread. */
static double batch(int repeats)
{
    pthread_t threads[2];
    run.repeats = repeats;
    for (int rank = 0; rank < 2; rank++)
        CHECK(pthread_create(&threads[rank], NULL, work, &run.of[rank]) == 0);
    for (int rank = 0; rank < 2; rank++)
        pthread_join(threads[rank], NULL);
    run.rounds += (uint64_t)(repeats + 1) * (run.bytes / (2 * run.slice));
    return run.us[0] > run.us[1] ? run.us[0] : run.us[1];
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void measure(size_t bytes)
{
    static const struct {
        copy_func put;
        const char *name;
    } ways[] = {{cd_copy_near, "near"}, {cd_copy_far, "far"}};
    static double us[2][BATCHES];
    for (int rank = 0; rank < 2; rank++) {
        size_t room = (bytes + ALIGNED - 1) / ALIGNED * ALIGNED;
        CHECK((run.array[rank] = aligned_alloc(ALIGNED, room)) != NULL);
        madvise(run.array[rank], room, MADV_HUGEPAGE);
        memset(run.array[rank], 0, room);
    }
    run.bytes = bytes;
    run.slice = RING_BYTES / SLOTS / 2;
    while (run.slice > 64 && bytes < 8 * run.slice)
        run.slice /= 2;
    /* The ways in turn, since the machine is not the same from one second to the next. */
    for (int i = 0; i < BATCHES; i++)
        for (int way = 0; way < 2; way++) {
            run.put = ways[way].put;
            double once = batch(1);
            us[way][i] = batch(once * 1e3 > BATCH_NS ? 1 : (int)(BATCH_NS / (once * 1e3)));
        }
    printf("%10zu B", bytes);
    for (int way = 0; way < 2; way++) {
        qsort(us[way], BATCHES, sizeof us[way][0], by_size);
        printf("   %s %.1f (%.1f) µs", ways[way].name, us[way][BATCHES / 2], us[way][0]);
    }
    printf("\n");
    free(run.array[0]);
    free(run.array[1]);
}

int main(int argc, char **argv)
{
    for (int rank = 0; rank < 2; rank++) {
        run.ring[rank] = mmap(NULL, RING_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        CHECK(run.ring[rank] != MAP_FAILED);
        memset(run.ring[rank], 0, RING_BYTES);
    }
    static const size_t sizes[] = {(size_t)64 << 10, (size_t)1 << 20, (size_t)64 << 20};
    for (size_t i = 0; argc < 2 && i < sizeof sizes / sizeof *sizes; i++)
        measure(sizes[i]);
    for (int i = 1; i < argc; i++) {
        size_t bytes = strtoul(argv[i], NULL, 10);
        if (bytes < 1024 || bytes & (bytes - 1))
            fprintf(stderr, "%s: a power of two from 1024 on\n", argv[i]);
        else
            measure(bytes);
    }
    return 0;
}
