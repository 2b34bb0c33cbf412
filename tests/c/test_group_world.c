/* Worlds whose ranks are threads: meeting, groups, order, point-to-point, departure, death, refusal. */
#include "check.h"
#include "table_store.h"

#include "group/group.h"

#include <stdatomic.h>
#include <unistd.h>

static table_store store = {.lock = PTHREAD_MUTEX_INITIALIZER};
static bool use_tcp;
static int world_size;

static cd_patience soon(uint64_t ms)
{
    return cd_patience_until(cd_deadline_after_ns(ms * CD_NS_PER_MS), 1);
}

static cd_status open_world(int rank, int world, uint64_t ms, cd_world **out)
{
    cd_world_config config = {.rank = rank, .world = world, .prefix = "test", .timeout_ns = 10 * CD_NS_PER_S, .force_tcp = use_tcp};
    cd_patience patience = soon(ms);
    return cd_world_open(&config, &store.base, &patience, out);
}

static cd_op sum_of(cd_span *span)
{
    return (cd_op){.kind = CD_ALL_REDUCE, .dtype = CD_FLOAT32, .redop = CD_SUM, .root = -1, .in = {span, 0, 1}, .out = {span, 0, 1},
                   .count = span->count, .item_bytes = 4, .ndim = 1, .shape = {(int64_t)span->count}};
}

static cd_status add_up(cd_group *group, float *values, size_t count, uint64_t ms)
{
    cd_span span = {values, count, 0, 4};
    cd_op op = sum_of(&span);
    cd_patience patience = soon(ms);
    return cd_group_run(group, &op, &patience);
}

static cd_status meet(cd_group *group, uint64_t ms)
{
    cd_op op = {.kind = CD_BARRIER, .root = -1};
    cd_patience patience = soon(ms);
    return cd_group_run(group, &op, &patience);
}

static void everything(int rank, void *ctx)
{
    (void)ctx;
    int world = world_size;
    cd_world *w;
    CHECK_OK(open_world(rank, world, 10000, &w));
    cd_group *g = cd_world_group(w);
    CHECK(cd_group_rank(g) == rank && cd_group_size(g) == world);
    CHECK(strcmp(cd_group_transport(g), world == 1 ? "self" : use_tcp ? "tcp" : "shm") == 0);
    float total = 0;
    for (int r = 0; r < world; r++)
        total += (float)r;
    for (size_t count = 0; count <= 100000; count = count ? count * 10 : 1) {
        float *x = malloc((count + 1) * sizeof *x);
        for (size_t i = 0; i < count; i++)
            x[i] = (float)rank;
        CHECK_OK(add_up(g, x, count, 10000));
        for (size_t i = 0; i < count; i++)
            CHECK(x[i] == total);
        free(x);
    }
    /* Asynchronous ones keep the order of calls. */
    float values[8];
    cd_span spans[8];
    cd_work *works[8];
    for (int i = 0; i < 8; i++) {
        values[i] = (float)(rank + i);
        spans[i] = (cd_span){&values[i], 1, 0, 4};
        cd_op op = sum_of(&spans[i]);
        CHECK_OK(cd_group_issue(g, &op, 10 * CD_NS_PER_S, &works[i]));
    }
    CHECK_OK(meet(g, 10000));
    for (int i = 0; i < 8; i++) {
        cd_patience patience = soon(10000);
        CHECK(cd_work_is_done(works[i]));
        CHECK_OK(cd_work_wait(works[i], &patience));
        CHECK(values[i] == total + (float)(i * world));
        cd_work_release(works[i]);
    }
    /* Groups of members alone; the same set twice keeps traffic apart. */
    if (world > 2 && rank != 1) {
        int members[16];
        int count = 0;
        for (int r = world - 1; r >= 0; r--)
            if (r != 1)
                members[count++] = r;
        cd_group *a, *b;
        cd_patience patience = soon(10000);
        CHECK_OK(cd_group_create(w, members, count, CD_NS_PER_S, &patience, &a));
        CHECK_OK(cd_group_create(w, members, count, CD_NS_PER_S, &patience, &b));
        CHECK(cd_group_rank(a) == (rank == 0 ? count - 1 : world - 1 - rank));
        float one = 1, two = 2;
        CHECK_OK(add_up(b, &two, 1, 10000));
        CHECK_OK(add_up(a, &one, 1, 10000));
        CHECK(one == (float)count && two == (float)(2 * count));
        cd_group_close(a);
        cd_group_release(a);
        CHECK_OK(meet(b, 10000));
        cd_group_close(b);
        cd_group_release(b);
    }
    /* Point-to-point around the ring. */
    if (world > 1) {
        int64_t mine = rank * 100, other = -1;
        cd_span out = {&mine, 1, 0, 8}, in = {&other, 1, 0, 8};
        cd_op send = {.kind = CD_SEND, .dtype = CD_INT64, .root = -1, .in = {&out, 0, 1}, .peer = (rank + 1) % world, .tag = 3,
                      .count = 1, .item_bytes = 8};
        cd_op recv = {.kind = CD_RECV, .dtype = CD_INT64, .root = -1, .out = {&in, 0, 1}, .peer = -1, .tag = 3, .count = 1,
                      .item_bytes = 8};
        cd_work *work;
        CHECK_OK(cd_group_issue(g, &send, CD_NS_PER_S, &work));
        cd_patience patience = soon(10000);
        CHECK_OK(cd_group_run(g, &recv, &patience));
        CHECK(other == (rank + world - 1) % world * 100 && recv.peer == (rank + world - 1) % world);
        CHECK_OK(cd_work_wait(work, &patience));
        cd_work_release(work);
    }
    cd_patience patience = soon(10000);
    CHECK_OK(cd_group_monitored_barrier(g, true, &patience, 0));
    cd_world_close(w);
    cd_world_release(w);
}

static void test_everything(void)
{
    for (world_size = 1; world_size <= 5; world_size++)
        check_on_ranks(world_size, everything, 0);
}

static void cycles(int rank, void *ctx)
{
    (void)ctx;
    unsigned seed = (unsigned)rank;
    for (int i = 0; i < 25; i++) {
        cd_world *w;
        CHECK_OK(open_world(rank, world_size, 10000, &w));
        float one = 1;
        CHECK_OK(add_up(cd_world_group(w), &one, 1, 10000));
        CHECK(one == (float)world_size);
        cd_world_close(w);
        cd_world_release(w);
        usleep((useconds_t)(rand_r(&seed) % 3000));
    }
}

static void leaving(int rank, void *ctx)
{
    (void)ctx;
    cd_world *w;
    CHECK_OK(open_world(rank, 3, 10000, &w));
    if (rank == 1) {
        float one = 1;
        CHECK_OK(add_up(cd_world_group(w), &one, 1, 10000));
    } else {
        float one = 1;
        CHECK_OK(add_up(cd_world_group(w), &one, 1, 10000));
        CHECK_FAILS(add_up(cd_world_group(w), &one, 1, 10000), CD_PEER_LOST);
        CHECK(cd_last_error()->rank == 1);
        CHECK_FAILS(meet(cd_world_group(w), 10000), CD_PEER_LOST);
    }
    cd_world_close(w);
    cd_world_release(w);
}

static void dying(int rank, void *ctx)
{
    (void)ctx;
    cd_world *w;
    CHECK_OK(open_world(rank, 3, 10000, &w));
    if (rank == 2) {
        cd_world_announce_death(w, "ValueError: no good");
    } else {
        CHECK_FAILS(meet(cd_world_group(w), 10000), CD_PEER_LOST);
        CHECK(cd_last_error()->rank == 2 && strstr(cd_last_error()->text, "no good"));
    }
    cd_world_close(w);
    cd_world_release(w);
}

static void late(int rank, void *ctx)
{
    (void)ctx;
    cd_world *w;
    CHECK_OK(open_world(rank, 2, 10000, &w));
    if (rank == 0) {
        CHECK_FAILS(meet(cd_world_group(w), 100), CD_TIMED_OUT);
        CHECK(cd_last_error()->rank == 1);
    } else {
        usleep(300000);
        CHECK_FAILS(meet(cd_world_group(w), 10000), CD_TIMED_OUT);
        CHECK(cd_last_error()->rank == 1);
    }
    cd_world_close(w);
    cd_world_release(w);
}

static void alone(int rank, void *ctx)
{
    (void)ctx;
    cd_world *w;
    CHECK_FAILS(open_world(rank, 3, 300, &w), CD_TIMED_OUT);
    CHECK(rank == 0 ? cd_last_error()->rank == 2 && strstr(cd_last_error()->text, "[2]") : cd_last_error()->text[0] != 0);
}

static void sizes_differ(int rank, void *ctx)
{
    (void)ctx;
    cd_world *w;
    CHECK_FAILS(open_world(rank, 2 + rank, 5000, &w), CD_REFUSED);
    CHECK(strstr(cd_last_error()->text, "world_size 3"));
}

static void same_rank(int rank, void *ctx)
{
    (void)ctx;
    (void)rank;
    cd_world *w;
    CHECK_FAILS(open_world(0, 2, 5000, &w), CD_REFUSED);
    CHECK(strstr(cd_last_error()->text, "two processes claim rank 0"));
}

int main(void)
{
    cd_store_init(&store.base, &table_ops);
    for (int tcp = 0; tcp < 2; tcp++) {
        use_tcp = tcp;
        test_everything();
        world_size = 3;
        check_on_ranks(3, cycles, 0);
        check_on_ranks(3, leaving, 0);
        check_on_ranks(3, dying, 0);
        check_on_ranks(2, late, 0);
        check_on_ranks(2, alone, 0);
        check_on_ranks(2, sizes_differ, 0);
        check_on_ranks(2, same_rank, 0);
    }
    free(store.value);
    puts("group world: ok");
    return 0;
}
