/* Times of the shared-memory algorithms between processes: bench_coll_shm [ranks [kind [path [bytes…]]]]; path "plan" is the
 * plan's choice. For each size the best and the median of several batches on rank 0, in microseconds, and bytes of the buffer
 * over the median time. With BENCH_PIN=1 each rank stays on a core of its own; with BENCH_SHARE=1 all begin on one core, free
 * to leave it. With BENCH_ARENA=1 the buffers lie in the arena, as they do for the path shm_arena. */
#include "shm_ranks.h"

#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define BATCHES 9
#define BATCH_NS (20 * CD_NS_PER_MS)

typedef struct {
    shm_ranks *g;
    int rank;
    uint64_t sequence;
    cd_patience patience;
} bench_rank;

/* As NumPy allocates: huge pages from 4 MiB on. */
static char *user_memory(size_t bytes)
{
    size_t room = cd_round_up(bytes + 4096, 2u << 20);
    char *memory = aligned_alloc(2u << 20, room);
    CHECK(memory);
    if (bytes >= 4u << 20)
        madvise(memory, room, MADV_HUGEPAGE);
    memset(memory, 0, room);
    return memory + 16; /* as its large arrays lie */
}

static char *arena_memory(cd_arena *arena, size_t bytes)
{
    void *memory;
    CHECK_OK(cd_arena_alloc(arena, bytes, &memory));
    memset(memory, 0, bytes);
    return memory;
}

static double copy_rate(void)
{
    size_t bytes = (size_t)64 << 20;
    char *from = user_memory(bytes), *to = user_memory(bytes);
    double best = 0;
    for (int i = 0; i < 7; i++) {
        uint64_t start = cd_now_ns();
        memcpy(to, from, bytes);
        double rate = (double)bytes / (double)(cd_now_ns() - start);
        best = rate > best ? rate : best;
    }
    return best;
}

static void run_one(bench_rank *b, cd_coll_func run, cd_op *op)
{
    cd_team *team = &b->g->teams[b->rank];
    op->sequence = ++b->sequence;
    CHECK_OK((run ? run : cd_plan_find(team, op)->run)(team, op, &b->patience));
}

static uint64_t run_batch(bench_rank *b, cd_coll_func run, cd_op *op, size_t rounds)
{
    uint64_t start = cd_now_ns();
    for (size_t i = 0; i < rounds; i++)
        run_one(b, run, op);
    return cd_now_ns() - start;
}

/* All ranks must do the same number of rounds: rank 0 measures and tells. */
static size_t agree_on_rounds(bench_rank *b, cd_coll_func run, cd_op *op, _Atomic uint64_t *shared)
{
    uint64_t ns = run_batch(b, run, op, 2);
    ns = run_batch(b, run, op, 2) / 2 + 1;
    cd_op barrier = {.kind = CD_BARRIER, .root = -1};
    if (b->rank == 0) {
        uint64_t rounds = BATCH_NS / ns;
        atomic_store(shared, rounds < 2 ? 2 : rounds > 50000 ? 50000 : rounds);
    }
    run_one(b, cd_shm_small_run, &barrier);
    size_t rounds = (size_t)atomic_load(shared);
    run_one(b, cd_shm_small_run, &barrier);
    return rounds;
}

static int by_value(const void *a, const void *b)
{
    const double *x = a, *y = b;
    return *x < *y ? -1 : *x > *y;
}

static void bench_size(bench_rank *b, cd_kind kind, const char *path, size_t bytes, char *in, char *out, _Atomic uint64_t *shared)
{
    size_t world = (size_t)b->g->world, count = bytes / 4, block = count / world;
    bool rooted = kind == CD_REDUCE || kind == CD_BROADCAST || kind == CD_GATHER || kind == CD_SCATTER;
    cd_span whole_in = shm_span(in, count, 4), whole_out = shm_span(out, count, 4);
    cd_span block_in = shm_span(in, block, 4), block_out = shm_span(out, block, 4);
    cd_op op = {.kind = kind, .dtype = CD_FLOAT32, .redop = CD_SUM, .root = rooted ? 0 : -1, .count = count, .item_bytes = 4,
                .ndim = 1, .shape = {(int64_t)count}};
    bool many_in = kind >= CD_SCATTER && kind <= CD_ALL_TO_ALL, many_out = kind == CD_ALL_GATHER || kind == CD_GATHER;
    op.in = shm_one(many_out ? &block_in : &whole_in);
    op.out = shm_one(kind == CD_ALL_REDUCE || kind == CD_REDUCE ? &whole_in
                     : many_in && kind != CD_ALL_TO_ALL         ? &block_out
                                                                : &whole_out);
    if (kind == CD_BROADCAST && b->rank == 0)
        op.out.spans = 0;
    cd_coll_func run = path ? shm_path(kind, path) : NULL;
    size_t rounds = agree_on_rounds(b, run, &op, shared);
    double us[BATCHES];
    for (int i = 0; i < BATCHES; i++)
        us[i] = (double)run_batch(b, run, &op, rounds) / (double)rounds / 1000;
    qsort(us, BATCHES, sizeof *us, by_value);
    if (b->rank == 0)
        printf("%-14s %-10s %10zu B  best %10.3f  median %10.3f us  %7.2f GB/s\n", cd_kind_name(kind),
               path ? path : cd_plan_find(&b->g->teams[0], &op)->name, bytes, us[0], us[BATCHES / 2],
               (double)bytes / us[BATCHES / 2] / 1000);
}

static size_t sizes[32] = {4, 64, 1024, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 1 << 20, 4 << 20, 16 << 20, 64 << 20};
static size_t sizes_count = 14;

static void place(int rank)
{
    if (!getenv("BENCH_PIN") && !getenv("BENCH_SHARE"))
        return;
    cpu_set_t all, one;
    CHECK(sched_getaffinity(0, sizeof all, &all) == 0);
    CPU_ZERO(&one);
    CPU_SET(getenv("BENCH_PIN") ? (size_t)(rank % cd_host_cores()) : 0, &one);
    CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
    if (getenv("BENCH_SHARE"))
        CHECK(sched_setaffinity(0, sizeof all, &all) == 0);
}

static void bench_rank_main(shm_ranks *g, int rank, const char *only, const char *path, _Atomic uint64_t *shared)
{
    size_t most = 4096;
    for (size_t i = 0; i < sizes_count; i++)
        most = sizes[i] > most ? sizes[i] : most;
    bench_rank b = {.g = g, .rank = rank, .patience = shm_ranks_patience(g, 600 * CD_NS_PER_S)};
    place(rank);
    /* The team was opened by the parent, whose memory is another. All have a card of their own before any looks at it. */
    cd_op barrier = {.kind = CD_BARRIER, .root = -1};
    cd_reach_offer(&g->shm[rank]->rows[rank].card, &g->shm[rank]->token);
    run_one(&b, cd_shm_small_run, &barrier);
    bool in_arena = getenv("BENCH_ARENA") || (path && strcmp(path, "shm_arena") == 0);
    char *in = in_arena ? arena_memory(g->arenas[rank], most) : user_memory(most);
    char *out = in_arena ? arena_memory(g->arenas[rank], most) : user_memory(most);
    for (int kind = CD_BARRIER; kind <= CD_ALL_TO_ALL; kind++) {
        if (only && strcmp(only, "all") != 0 && strcmp(only, cd_kind_name((cd_kind)kind)) != 0)
            continue;
        for (size_t i = 0; i < sizes_count; i++) {
            if ((kind == CD_BARRIER && i) ||
                (path && strcmp(path, "shm_small") == 0 && sizes[i] > cd_shm_small_limit(g->world)))
                break;
            bench_size(&b, (cd_kind)kind, path, sizes[i], in, out, shared);
        }
    }
}

int main(int argc, char **argv)
{
    int ranks = argc > 1 ? atoi(argv[1]) : 2;
    CHECK(ranks >= 1 && ranks <= MOST_RANKS);
    for (int i = 4; i < argc && i < 4 + 32; i++)
        sizes[(sizes_count = (size_t)i - 3) - 1] = (size_t)atoll(argv[i]);
    const char *path = argc > 3 && strcmp(argv[3], "plan") != 0 ? argv[3] : NULL;
    static shm_ranks g;
    shm_ranks_make(&g, ranks, (size_t)256 << 20);
    cd_segment shared;
    CHECK_OK(cd_segment_create(4096, &shared));
    printf("%d ranks, %d cores, ring %zu KiB, kernels %s; one core copies 64 MiB at %.2f GB/s\n", ranks, cd_host_cores(),
           g.shm[0]->slot_bytes * CD_SHM_SLOTS / 1024, cd_simd_name(), copy_rate());
    fflush(stdout);
    for (int rank = 0; rank < ranks; rank++)
        if (fork() == 0) {
            bench_rank_main(&g, rank, argc > 2 ? argv[2] : NULL, path, shared.base);
            fflush(stdout);
            _exit(0);
        }
    int state, failed = 0;
    while (wait(&state) > 0)
        failed |= state;
    shm_ranks_free(&g);
    cd_segment_free(&shared);
    return failed != 0;
}
