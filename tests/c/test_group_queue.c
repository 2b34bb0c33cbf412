/* Operations that wait behind the queue and are cut off there: on return nobody touches the caller's array any more. */
#include "check.h"
#include "table_store.h"

#include "group/group.h"

#include <stdatomic.h>

/* Long enough for a worker to be in the midst of it when its caller gives up, 50 ms after it began to wait. */
#define MANY ((size_t)(CHECK_BRIEF ? 1 << 21 : 1 << 24))

typedef enum { INTERRUPTED, EXPIRED, ABORTED } ending;

static table_store store = {.lock = PTHREAD_MUTEX_INITIALIZER};
static bool use_tcp;
static _Atomic int stage;

static cd_world *open_world(int rank)
{
    cd_world_config config = {.rank = rank, .world = 2, .prefix = "test", .timeout_ns = 20 * CD_NS_PER_S, .force_tcp = use_tcp};
    cd_patience patience = cd_patience_until(cd_deadline_after_ns(20 * CD_NS_PER_S), 1);
    cd_world *w;
    CHECK_OK(cd_world_open(&config, &store.base, &patience, &w));
    return w;
}

static cd_op sum_of(cd_span *span)
{
    return (cd_op){.kind = CD_ALL_REDUCE, .dtype = CD_FLOAT32, .redop = CD_SUM, .root = -1, .in = {span, 0, 1}, .out = {span, 0, 1},
                   .count = span->count, .item_bytes = 4, .ndim = 1, .shape = {(int64_t)span->count}};
}

/* What the caller does while it waits behind the queue. */
typedef struct {
    cd_group *group;
    ending how;
    int looks, after;
} caller;

static cd_status look(void *ctx)
{
    caller *c = ctx;
    atomic_store(&stage, 1);
    if (++c->looks <= c->after || c->how == EXPIRED)
        return CD_OK;
    if (c->how == INTERRUPTED)
        return cd_fail(CD_INTERRUPTED, "interrupted by a signal");
    cd_error why = {.code = CD_ABORTED, .rank = 0, .text = "enough"};
    cd_group_abort(c->group, &why);
    return CD_OK;
}

/* Runs an operation behind one that waits for rank 1, and gives its array away at once. */
static cd_status run_behind(cd_group *g, ending how, size_t count, int after)
{
    float first = 1;
    cd_span small = {&first, 1, 0, 4}, large = {calloc(count, 4), count, 0, 4};
    cd_op before = sum_of(&small), op = sum_of(&large);
    cd_work *work;
    caller me = {.group = g, .how = how, .after = after};
    CHECK_OK(cd_group_issue(g, &before, 20 * CD_NS_PER_S, &work));
    cd_patience patience = cd_patience_until(cd_deadline_after_ns((how == EXPIRED ? 100 : 20000) * CD_NS_PER_MS), 2);
    patience.idle = look;
    patience.idle_ctx = &me;
    cd_status status = cd_group_run(g, &op, &patience);
    free(large.data);
    CHECK(me.looks > after);
    cd_patience some = cd_patience_until(cd_deadline_after_ns(20 * CD_NS_PER_S), 2);
    cd_status of_first = cd_work_wait(work, &some); /* into this function's frame */
    CHECK(of_first != CD_WAIT_EXPIRED);
    cd_work_release(work);
    return status;
}

/* Rank 1 does not come for the first one, so that the second is never begun. */
static void cut_off_in_the_queue(int rank, void *ctx)
{
    ending how = *(ending *)ctx;
    cd_world *w = open_world(rank);
    cd_group *g = cd_world_group(w);
    if (rank == 0) {
        static const cd_status answers[] = {CD_INTERRUPTED, CD_TIMED_OUT, CD_ABORTED};
        CHECK_FAILS(run_behind(g, how, 1000, 1), answers[how]);
        if (how == EXPIRED)
            CHECK(cd_last_error()->rank == 1 && strstr(cd_last_error()->text, "missing ranks: [1]"));
        CHECK(cd_group_status(g) == (how == EXPIRED ? CD_TIMED_OUT : CD_ABORTED));
        atomic_store(&stage, 2);
    } else {
        while (atomic_load(&stage) < 2)
            cd_sleep_ns(CD_NS_PER_MS);
        CHECK(cd_group_status(g) != CD_OK || use_tcp); /* over TCP the news may still be on its way */
    }
    cd_world_close(w);
    cd_world_release(w);
}

/* Rank 1 comes for both, so that the worker is at the second one, or done with it. */
static void cut_off_at_work(int rank, void *ctx)
{
    ending how = *(ending *)ctx;
    cd_world *w = open_world(rank);
    cd_group *g = cd_world_group(w);
    if (rank == 0) {
        cd_status status = run_behind(g, how, MANY, how == EXPIRED ? 0 : 1);
        CHECK(status == CD_OK || status == CD_INTERRUPTED || status == CD_TIMED_OUT || status == CD_ABORTED);
    } else {
        while (atomic_load(&stage) < 1)
            cd_sleep_ns(CD_NS_PER_MS);
        float one = 1;
        cd_span small = {&one, 1, 0, 4}, large = {calloc(MANY, 4), MANY, 0, 4};
        cd_op first = sum_of(&small), second = sum_of(&large);
        cd_patience patience = cd_patience_until(cd_deadline_after_ns(20 * CD_NS_PER_S), 2);
        if (cd_group_run(g, &first, &patience) == CD_OK)
            (void)cd_group_run(g, &second, &patience);
        free(large.data);
    }
    cd_world_close(w);
    cd_world_release(w);
}

static void test_both(ending how)
{
    atomic_store(&stage, 0);
    check_on_ranks(2, cut_off_in_the_queue, &how);
    atomic_store(&stage, 0);
    check_on_ranks(2, cut_off_at_work, &how);
}

int main(void)
{
    cd_store_init(&store.base, &table_ops);
    for (int tcp = 0; tcp < 2; tcp++) {
        use_tcp = tcp;
        test_both(INTERRUPTED);
        test_both(EXPIRED);
        test_both(ABORTED);
    }
    free(store.value);
    puts("group queue: ok");
    return 0;
}
