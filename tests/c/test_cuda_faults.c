/* What goes wrong around the GPU backend: missing libraries, shared GPUs, late and dead ranks, errors of NCCL, aborts, splits. */
#include "gpu_ranks.h"

#include "../fake_nccl/fake_cuda.h"
#include "backend/gpu_impl.h"

#include <signal.h>

static bool error_has(const char *part)
{
    if (strstr(cd_last_error()->text, part))
        return true;
    fprintf(stderr, "expected \"%s\" in \"%s\"\n", part, cd_last_error()->text);
    return false;
}

static cd_op reduce_of(cd_span *span)
{
    return (cd_op){.kind = CD_ALL_REDUCE, .dtype = CD_FLOAT32, .device = CD_CUDA, .root = -1, .item_bytes = 4,
                   .in = {span, 0, 1}, .out = {span, 0, 1}, .ndim = 1, .shape = {(int64_t)span->count}};
}

typedef struct {
    gpu_group group;
    cd_status wanted;
    const char *text;
    int device[GPU_RANKS_MOST];
} refusal;

static void refused_main(int rank, void *ctx)
{
    refusal *f = ctx;
    gpu_rank r;
    cd_backend_env env = gpu_env(&r, &f->group, rank);
    env.device_index = f->device[rank];
    cd_backend *backend = 0;
    CHECK_FAILS(cd_backend_open_gpu(&env, &backend), f->wanted);
    CHECK(!backend);
    CHECK(error_has(f->text));
}

static void check_refusal(int world, cd_status wanted, const char *text, const int *devices)
{
    static refusal f;
    memset(&f, 0, sizeof f);
    gpu_group_init(&f.group, world);
    f.wanted = wanted;
    f.text = text;
    for (int i = 0; i < world; i++)
        f.device[i] = devices ? devices[i] : i;
    check_on_ranks(world, refused_main, &f);
}

static void check_libraries(void)
{
    char nccl[PATH_MAX], cuda[PATH_MAX], text[PATH_MAX + 64];
    snprintf(nccl, sizeof nccl, "%s", getenv("CDIST_NCCL_LIB"));
    snprintf(cuda, sizeof cuda, "%s", getenv("CDIST_CUDA_LIB"));
    setenv("CDIST_NCCL_LIB", "/nowhere/libnccl.so.2", 1);
    check_refusal(2, CD_UNSUPPORTED, "CDIST_NCCL_LIB names /nowhere/libnccl.so.2 (not there)", 0);
    unsetenv("CDIST_NCCL_LIB");
    check_refusal(1, CD_UNSUPPORTED, "NCCL was not found; looked at: this process (not loaded), nvidia/nccl/lib", 0);
    check_refusal(1, CD_UNSUPPORTED, "libnccl.so.2 (not there)", 0);
    setenv("CDIST_NCCL_LIB", nccl, 1);
    setenv("FAKE_NCCL_VERSION", "21705", 1);
    snprintf(text, sizeof text, "NCCL 2.17 (%s) is too old: 2.18 or later is needed", nccl);
    check_refusal(1, CD_UNSUPPORTED, text, 0);
    setenv("FAKE_NCCL_VERSION", "2708", 1);
    snprintf(text, sizeof text, "NCCL 2.7 (%s) is too old", nccl);
    check_refusal(1, CD_UNSUPPORTED, text, 0);
    unsetenv("FAKE_NCCL_VERSION");
    setenv("FAKE_CUDA_DEVICES", "0", 1);
    check_refusal(2, CD_UNSUPPORTED, "sees no GPU", 0);
    unsetenv("FAKE_CUDA_DEVICES");
    setenv("CDIST_NCCL_LIB", "/proc/self/status", 1);
    check_refusal(1, CD_UNSUPPORTED, "CDIST_NCCL_LIB names /proc/self/status (", 0);
    setenv("CDIST_NCCL_LIB", cuda, 1);
    snprintf(text, sizeof text, "%s is not NCCL: it has no ncclGetVersion", cuda);
    check_refusal(1, CD_UNSUPPORTED, text, 0);
    setenv("CDIST_NCCL_LIB", nccl, 1);
    /* The fake NCCL has the fake driver's functions too, by its own dependency; the C library has none. */
    setenv("CDIST_CUDA_LIB", "libm.so.6", 1);
    check_refusal(1, CD_UNSUPPORTED, "libm.so.6) has no cuInit: CUDA 11.4 or later is needed", 0);
    setenv("CDIST_CUDA_LIB", cuda, 1);
}

static void check_devices(void)
{
    check_refusal(3, CD_BAD_ARGUMENT, "ranks 1 and 2 both use the GPU at 0000:02:00.0", (const int[]){0, 1, 1});
    /* Rank 1 asks for a GPU that is not there: it says so, and so does everybody else. */
    check_refusal(1, CD_BAD_ARGUMENT, "there is no GPU 9: this process sees 4", (const int[]){9});
}

static void lone_bad_main(int rank, void *ctx)
{
    gpu_rank r;
    cd_backend_env env = gpu_env(&r, ctx, rank);
    cd_backend *backend = 0;
    env.device_index = rank == 1 ? 9 : rank;
    CHECK_FAILS(cd_backend_open_gpu(&env, &backend), rank == 1 ? CD_BAD_ARGUMENT : CD_UNSUPPORTED);
    CHECK(error_has(rank == 1 ? "there is no GPU 9" : "rank 1 on "));
    CHECK(error_has("there is no GPU 9"));
    CHECK(rank == 1 || cd_last_error()->rank == 1);
}

/* Bad arguments leave the group as it was. */
static void bad_calls_main(int rank, void *ctx)
{
    gpu_rank r, other;
    static gpu_group single[2];
    static float host[4];
    gpu_rank_open(&r, ctx, rank);
    gpu_group_init(&single[rank], 1);
    cd_backend_env env = gpu_env(&other, &single[rank], 0);
    env.device_index = rank + 2;
    CHECK_OK(cd_backend_open_gpu(&env, &other.backend));
    cd_span wrong = {gpu_alloc(&other, 16), 4, 0, 4}, outside = {host, 4, 0, 4}, good = {gpu_alloc(&r, 16), 4, 0, 4};
    cd_op op = reduce_of(&wrong);
    CHECK_FAILS(r.backend->ops->run(r.backend, &op, &r.patience), CD_BAD_ARGUMENT);
    CHECK(error_has(rank ? "lies on GPU 3, but this rank's part of the group runs on GPU 1"
                         : "lies on GPU 2, but this rank's part of the group runs on GPU 0"));
    op = reduce_of(&outside);
    CHECK_FAILS(r.backend->ops->run(r.backend, &op, &r.patience), CD_BAD_ARGUMENT);
    op = reduce_of(&good);
    op.redop = CD_BXOR;
    op.dtype = CD_INT32;
    CHECK_FAILS(r.backend->ops->run(r.backend, &op, &r.patience), CD_UNSUPPORTED);
    CHECK_FAILS(r.backend->ops->supports(CD_ALL_REDUCE, CD_SUM, CD_INT16), CD_UNSUPPORTED);
    CHECK_OK(r.backend->ops->supports(CD_BROADCAST, CD_SUM, CD_INT16));
    op.redop = CD_SUM;
    *(int *)good.data = rank + 1;
    CHECK_OK(r.backend->ops->run(r.backend, &op, &r.patience));
    gpu_flush(&r);
    CHECK(*(int *)good.data == 3);
    gpu_release(&other, wrong.data);
    gpu_rank_close(&other);
    gpu_rank_close(&r);
}

/* Rank 1 never comes: the operation's deadline passes on the GPU, the watch aborts, and all that waits ends. */
static void late_main(int rank, void *ctx)
{
    gpu_rank r;
    gpu_rank_open(&r, ctx, rank);
    cd_span span = {gpu_alloc(&r, 16), 4, 0, 4};
    cd_op op = reduce_of(&span);
    CHECK_OK(r.backend->ops->run(r.backend, &op, &r.patience)); /* both: connected */
    gpu_flush(&r);
    if (rank == 0) {
        cd_event *event = 0;
        cd_patience brief = r.patience;
        brief.deadline = cd_deadline_after_ns(300 * CD_NS_PER_MS);
        CHECK_OK(r.backend->ops->start(r.backend, &op, &brief, &event));
        cd_patience shorter = r.patience;
        shorter.deadline = cd_deadline_after_ns(20 * CD_NS_PER_MS);
        CHECK_FAILS(r.backend->ops->event_wait_host(event, &shorter), CD_WAIT_EXPIRED);
        CHECK_FAILS(r.backend->ops->event_wait_host(event, &r.patience), CD_TIMED_OUT);
        CHECK(error_has("all_reduce(SUM) of float32 (4,)"));
        CHECK_FAILS(r.backend->ops->run(r.backend, &op, &r.patience), CD_TIMED_OUT);
        CHECK_FAILS(r.backend->ops->event_join_stream(event, 0), CD_TIMED_OUT);
        gpu_rank_close(&r); /* before its event: that stays valid */
        r.backend->ops->event_free(event);
        pthread_barrier_wait(&r.group->barrier);
        return;
    }
    pthread_barrier_wait(&r.group->barrier);
    gpu_rank_close(&r);
}

/* Operations that nobody keeps share an event: rank 1 takes part in the first alone, and the second is missed all the same. */
static void late_second_main(int rank, void *ctx)
{
    gpu_rank r;
    gpu_rank_open(&r, ctx, rank);
    cd_span span = {gpu_alloc(&r, 16), 4, 0, 4};
    cd_op op = reduce_of(&span);
    CHECK_OK(r.backend->ops->run(r.backend, &op, &r.patience));
    gpu_flush(&r);
    cd_patience brief = r.patience;
    brief.deadline = cd_deadline_after_ns(300 * CD_NS_PER_MS);
    CHECK_OK(r.backend->ops->run(r.backend, &op, &brief));
    if (rank == 0) {
        CHECK_OK(r.backend->ops->run(r.backend, &op, &brief));
        cd_deadline limit = cd_deadline_after_ns(5 * CD_NS_PER_S);
        while (cd_cause_check(r.team.cause) == CD_OK && !cd_deadline_passed(limit))
            cd_sleep_ns(CD_NS_PER_MS);
        CHECK_FAILS(cd_cause_check(r.team.cause), CD_TIMED_OUT);
        CHECK(error_has("did not end on the GPU"));
        CHECK(cd_deadline_passed(brief.deadline));
    }
    pthread_barrier_wait(&r.group->barrier);
    gpu_rank_close(&r);
}

/* A cause from elsewhere (a peer died) ends running work within the watch's period, also a host that waits. */
static void cause_main(int rank, void *ctx)
{
    gpu_rank r;
    gpu_rank_open(&r, ctx, rank);
    cd_span span = {gpu_alloc(&r, 16), 4, 0, 4};
    cd_op op = reduce_of(&span);
    CHECK_OK(r.backend->ops->run(r.backend, &op, &r.patience)); /* both: connected */
    gpu_flush(&r);
    if (rank == 0) {
        cd_event *event = 0;
        CHECK_OK(r.backend->ops->start(r.backend, &op, &r.patience, &event));
        cd_fail_rank(CD_PEER_LOST, 1, "rank 1 died");
        cd_cause_publish(r.team.cause, cd_last_error());
        uint64_t before = cd_now_ns();
        CHECK_FAILS(r.backend->ops->event_wait_host(event, &r.patience), CD_PEER_LOST);
        CHECK_FAILS(r.backend->ops->run(r.backend, &op, &r.patience), CD_PEER_LOST);
        void (*drain)(void *) = FAKE_CUDA_CALL(void (*)(void *), fake_stream_drain);
        drain(0);
        CHECK(cd_now_ns() - before < 5 * CD_NS_PER_S);
        r.backend->ops->event_free(event);
    }
    pthread_barrier_wait(&r.group->barrier);
    gpu_rank_close(&r);
}

/* abort() without a cause, from another thread, while the host waits in a barrier. */
static void *abort_soon(void *arg)
{
    gpu_rank *r = arg;
    cd_sleep_ns(100 * CD_NS_PER_MS);
    r->backend->ops->abort(r->backend);
    return 0;
}

static void abort_main(int rank, void *ctx)
{
    gpu_rank r;
    gpu_rank_open(&r, ctx, rank);
    if (rank == 0) {
        pthread_t thread;
        cd_op op = {.kind = CD_BARRIER, .device = CD_CUDA, .root = -1};
        CHECK(pthread_create(&thread, 0, abort_soon, &r) == 0);
        CHECK_FAILS(r.backend->ops->run(r.backend, &op, &r.patience), CD_ABORTED);
        pthread_join(thread, 0);
        CHECK_FAILS(r.backend->ops->group_begin(r.backend, &r.patience), CD_ABORTED);
    }
    pthread_barrier_wait(&r.group->barrier);
    gpu_rank_close(&r);
}

/* NCCL's own late error becomes the cause. */
static void async_error_main(int rank, void *ctx)
{
    void (*fail)(int, int) = FAKE_NCCL_CALL(void (*)(int, int), fake_nccl_fail);
    gpu_rank r;
    gpu_rank_open(&r, ctx, rank);
    pthread_barrier_wait(&r.group->barrier);
    if (rank == 0) {
        fail(0, 6);
        cd_op op = {.kind = CD_BARRIER, .device = CD_CUDA, .root = -1};
        CHECK_FAILS(r.backend->ops->run(r.backend, &op, &r.patience), CD_PEER_LOST);
        CHECK(error_has("remote process exited"));
        fail(0, 0);
    }
    pthread_barrier_wait(&r.group->barrier);
    gpu_rank_close(&r);
}

/* Connecting that does not end in time. */
static void open_late_main(int rank, void *ctx)
{
    gpu_rank r;
    cd_backend_env env = gpu_env(&r, ctx, rank);
    cd_backend *backend = 0;
    r.patience.deadline = (cd_deadline){0};
    r.patience.spin = 0;
    CHECK_FAILS(cd_backend_open_gpu(&env, &backend), CD_TIMED_OUT);
    CHECK(error_has("NCCL was still waiting for another rank"));
}

typedef struct {
    gpu_group whole, part[6];
} parts_ctx;

/* Opens a group of `count` ranks of `whole`, tries it, closes it. */
static void try_part(gpu_rank *whole, gpu_group *group, const int *members, int count)
{
    gpu_rank part;
    int mine = 0, sum = 0, rank = whole->team.rank;
    for (int i = 0; i < count; i++) {
        mine = members[i] == rank ? i : mine;
        sum += members[i] + 5;
    }
    cd_backend_env env = gpu_env(&part, group, mine);
    env.parent = whole->backend;
    env.parent_ranks = members;
    env.device_index = rank;
    CHECK_OK(cd_backend_open_gpu(&env, &part.backend));
    int32_t *x = gpu_alloc(&part, 16);
    x[0] = rank + 5;
    cd_span span = {x, 1, 0, 4};
    cd_op op = reduce_of(&span);
    op.dtype = CD_INT32;
    CHECK_OK(part.backend->ops->run(part.backend, &op, &part.patience));
    gpu_flush(&part);
    CHECK(x[0] == sum);
    op.kind = CD_BROADCAST;
    op.root = 0;
    op.in = (cd_blocks){mine == 0 ? &span : 0, 0, mine == 0};
    op.out = (cd_blocks){mine == 0 ? 0 : &span, 0, mine != 0};
    x[0] = rank;
    CHECK_OK(part.backend->ops->run(part.backend, &op, &part.patience));
    gpu_flush(&part);
    CHECK(x[0] == members[0]);
    gpu_rank_close(&part);
}

/* By members alone: in another order and from a busy parent anew, in the parent's order by a shrink, all of them by a split. */
static void parts_main(int rank, void *ctx)
{
    parts_ctx *c = ctx;
    gpu_rank whole;
    gpu_rank_open(&whole, &c->whole, rank);
    if (rank == 0 || rank == 2)
        try_part(&whole, &c->part[0], (const int[]){2, 0}, 2);
    if (rank == 1)
        try_part(&whole, &c->part[1], (const int[]){1}, 1);
    if (rank % 2 == 0)
        try_part(&whole, &c->part[2], (const int[]){0, 2}, 2);
    else
        try_part(&whole, &c->part[3], (const int[]){1, 3}, 2);
    try_part(&whole, &c->part[4], (const int[]){3, 2, 1, 0}, 4);
    gpu_flush(&whole); /* connected */
    if (rank == 0) {
        cd_span span = {gpu_alloc(&whole, 16), 1, 0, 4};
        cd_op op = reduce_of(&span);
        op.kind = CD_BARRIER;
        cd_event *event = 0;
        CHECK_OK(whole.backend->ops->start(whole.backend, &op, &whole.patience, &event));
        try_part(&whole, &c->part[5], (const int[]){0, 1}, 2);
        CHECK_OK(whole.backend->ops->event_wait_host(event, &whole.patience));
        whole.backend->ops->event_free(event);
    } else {
        if (rank == 1)
            try_part(&whole, &c->part[5], (const int[]){0, 1}, 2);
        gpu_flush(&whole);
    }
    gpu_flush(&whole);
    gpu_rank_close(&whole);
}

/* Rank 1 never comes to the first collective: rank 0 waits inside NCCL, until the deadline, a cause, or an abort from another
 * thread ends it. The communicator is freed only after the call has come out. */
enum { BY_DEADLINE, BY_CAUSE, BY_ABORT, WAYS };

typedef struct {
    gpu_rank *rank;
    int way;
} ending;

static void *end_soon(void *arg)
{
    ending *e = arg;
    int (*waiting)(void) = FAKE_NCCL_CALL(int (*)(void), fake_nccl_waiting);
    while (waiting() == 0)
        cd_sleep_ns(CD_NS_PER_MS);
    if (e->way == BY_CAUSE) {
        cd_fail_rank(CD_PEER_LOST, 1, "rank 1 died");
        cd_cause_publish(e->rank->team.cause, cd_last_error());
    }
    if (e->way == BY_ABORT)
        e->rank->backend->ops->abort(e->rank->backend);
    return 0;
}

static void connect_alone(gpu_rank *r, int way, bool coalesced)
{
    static const cd_status wanted[] = {CD_TIMED_OUT, CD_PEER_LOST, CD_ABORTED};
    cd_span span = {gpu_alloc(r, 16), 4, 0, 4};
    cd_op op = reduce_of(&span);
    pthread_t thread;
    ending e = {r, way};
    cd_patience brief = r->patience;
    brief.cause = 0; /* the backend knows the group's */
    if (way == BY_DEADLINE)
        brief.deadline = cd_deadline_after_ns(200 * CD_NS_PER_MS);
    CHECK(pthread_create(&thread, 0, end_soon, &e) == 0);
    uint64_t before = cd_now_ns();
    if (coalesced) {
        CHECK_OK(r->backend->ops->group_begin(r->backend, &r->patience));
        CHECK_OK(r->backend->ops->run(r->backend, &op, &brief));
        CHECK_FAILS(r->backend->ops->group_end(r->backend, &brief), wanted[way]);
    } else {
        CHECK_FAILS(r->backend->ops->run(r->backend, &op, &brief), wanted[way]);
    }
    CHECK(cd_now_ns() - before < 5 * CD_NS_PER_S);
    pthread_join(thread, 0);
    CHECK(r->backend->ops->run(r->backend, &op, &r->patience) != CD_OK);
}

static void lonely_main(int rank, void *ctx)
{
    static int way, coalesced;
    gpu_rank r;
    gpu_rank_open(&r, ctx, rank);
    if (rank == 0) {
        connect_alone(&r, way, coalesced);
        coalesced += ++way == WAYS;
        way %= WAYS;
    }
    pthread_barrier_wait(&r.group->barrier);
    gpu_rank_close(&r);
}

/* Ctrl-C, that is the idle callback, ends a wait for the others to connect. */
static cd_status interrupt(void *ctx)
{
    int *calls = ctx;
    return ++*calls < 3 ? CD_OK : cd_fail(CD_INTERRUPTED, "interrupted");
}

static void interrupted_main(int rank, void *ctx)
{
    gpu_rank r;
    int calls = 0;
    gpu_rank_open(&r, ctx, rank);
    if (rank == 0) {
        cd_span span = {gpu_alloc(&r, 16), 4, 0, 4};
        cd_op op = reduce_of(&span);
        cd_patience with_idle = r.patience;
        with_idle.idle = interrupt;
        with_idle.idle_ctx = &calls;
        CHECK_FAILS(r.backend->ops->run(r.backend, &op, &with_idle), CD_INTERRUPTED);
        CHECK(((cd_gpu_backend *)r.backend)->broken);
    }
    pthread_barrier_wait(&r.group->barrier);
    gpu_rank_close(&r);
}

/* A split that takes longer than the patience: the group it is made from ends with it. */
static void slow_split_main(int rank, void *ctx)
{
    gpu_rank r, part;
    gpu_rank_open(&r, ctx, rank);
    pthread_barrier_wait(&r.group->barrier);
    setenv("FAKE_NCCL_INIT_MS", "3000", 1);
    pthread_barrier_wait(&r.group->barrier);
    cd_backend_env env = gpu_env(&part, r.group, rank);
    cd_backend *backend = 0;
    cd_cause own = {0};
    part.team.cause = &own;
    part.patience.cause = &own;
    part.patience.deadline = cd_deadline_after_ns(300 * CD_NS_PER_MS);
    env.parent = r.backend;
    env.parent_ranks = (const int[]){0, 1};
    CHECK_FAILS(cd_backend_open_gpu(&env, &backend), CD_TIMED_OUT);
    CHECK(error_has("ncclCommSplit: NCCL was still waiting for another rank"));
    CHECK(cd_cause_check(&r.group->cause[rank]) == CD_TIMED_OUT);
    pthread_barrier_wait(&r.group->barrier);
    unsetenv("FAKE_NCCL_INIT_MS");
    gpu_rank_close(&r);
}

/* What NCCL hands out of a making that failed is freed, and the group that it was made from has ended. */
static void broken_making(int rank, gpu_group *g, const int *members, int mine, const char *what)
{
    void (*break_making)(int) = FAKE_NCCL_CALL(void (*)(int), fake_nccl_break);
    static gpu_group part[2];
    gpu_rank r, child;
    cd_backend *backend = 0;
    cd_cause own = {0};
    bool shrinks = g->world == 3;
    gpu_rank_open(&r, g, rank);
    if (rank == 0)
        gpu_group_init(&part[shrinks], 2);
    break_making(1);
    pthread_barrier_wait(&g->barrier);
    if (mine >= 0) {
        cd_backend_env env = gpu_env(&child, &part[shrinks], mine);
        child.team.cause = child.patience.cause = &own;
        env.device_index = rank;
        env.parent = r.backend;
        env.parent_ranks = members;
        CHECK_FAILS(cd_backend_open_gpu(&env, &backend), CD_GPU);
        CHECK(error_has(what));
        CHECK(cd_cause_check(&g->cause[rank]) == CD_GPU);
    }
    pthread_barrier_wait(&g->barrier);
    break_making(0);
    gpu_rank_close(&r);
}

static void broken_split_main(int rank, void *ctx)
{
    broken_making(rank, ctx, (const int[]){0, 1}, rank, "ncclCommSplit: fake error");
}

static void broken_shrink_main(int rank, void *ctx)
{
    broken_making(rank, ctx, (const int[]){0, 2}, rank == 1 ? -1 : rank / 2, "ncclCommShrink: fake error");
}

static void wait_until_given_back(long before)
{
    long (*left)(void) = FAKE_CUDA_CALL(long (*)(void), fake_cuda_left);
    cd_deadline limit = cd_deadline_after_ns(20 * CD_NS_PER_S);
    while (left() > before && !cd_deadline_passed(limit))
        cd_sleep_ns(CD_NS_PER_MS);
    CHECK(left() == before);
}

/* A kernel that does not end: neither the group's end nor the last release waits for it, and what they leave is given back when
 * it ends after all. */
static void check_farewell(void)
{
    void (*hold)(void *) = FAKE_CUDA_CALL(void (*)(void *), fake_stream_hold);
    void (*let_go)(void) = FAKE_CUDA_CALL(void (*)(void), fake_streams_let_go);
    long before = FAKE_CUDA_CALL(long (*)(void), fake_cuda_left)();
    static gpu_group g[2];
    gpu_rank r;
    for (int keeps = 0; keeps < 2; keeps++) {
        gpu_group_init(&g[keeps], 1);
        gpu_rank_open(&r, &g[keeps], 0);
        if (keeps)
            gpu_alloc(&r, 16);
        bool pushed;
        cd_gpu_backend *b = (cd_gpu_backend *)r.backend;
        CHECK_OK(cd_gpu_enter(&b->gpu, &pushed));
        hold(0);
        cd_gpu_leave(&b->gpu, pushed);
        gpu_rank_close(&r);
        CHECK(FAKE_CUDA_CALL(long (*)(void), fake_cuda_left)() > before);
        let_go();
        wait_until_given_back(before);
    }
}

/* The end of a group whose communicator has to be aborted, since it does not close or is broken, behind a kernel that does not
 * end: it is over within seconds, and nothing is left when the kernel ends after all. */
static void check_aborted_farewell(void)
{
    void (*hold)(void *) = FAKE_CUDA_CALL(void (*)(void *), fake_stream_hold);
    void (*let_go)(void) = FAKE_CUDA_CALL(void (*)(void), fake_streams_let_go);
    void (*hang)(int) = FAKE_NCCL_CALL(void (*)(int), fake_nccl_hang_finalize);
    int (*made)(void) = FAKE_NCCL_CALL(int (*)(void), fake_nccl_left);
    int (*aborts)(void) = FAKE_NCCL_CALL(int (*)(void), fake_nccl_aborts);
    long before = FAKE_CUDA_CALL(long (*)(void), fake_cuda_left)();
    static gpu_group g[2];
    gpu_rank r;
    bool pushed;
    for (int is_broken = 0; is_broken < 2; is_broken++) {
        gpu_group_init(&g[is_broken], 1);
        gpu_rank_open(&r, &g[is_broken], 0);
        cd_gpu_backend *b = (cd_gpu_backend *)r.backend;
        atomic_store(&b->broken, is_broken);
        hang(!is_broken);
        CHECK_OK(cd_gpu_enter(&b->gpu, &pushed));
        hold(0);
        cd_gpu_leave(&b->gpu, pushed);
        int aborts_before = aborts();
        gpu_rank_close(&r); /* hung for ever */
        CHECK(aborts() == aborts_before + 1);
        CHECK(made() == 1);
        let_go();
        hang(0);
        wait_until_given_back(before);
        CHECK(made() == 0);
    }
}

/* Memory that was released is not waited for longer than the caller's patience, nor against Ctrl-C. */
static void check_reclaim(void)
{
    enum { MUCH = 300 << 20 };
    void (*hold)(void *) = FAKE_CUDA_CALL(void (*)(void *), fake_stream_hold);
    void (*let_go)(void) = FAKE_CUDA_CALL(void (*)(void), fake_streams_let_go);
    static gpu_group g;
    gpu_rank r;
    int calls = 0;
    bool pushed;
    void *much, *other = 0;
    gpu_group_init(&g, 1);
    gpu_rank_open(&r, &g, 0);
    cd_gpu_backend *b = (cd_gpu_backend *)r.backend;
    CHECK_OK(cd_gpu_enter(&b->gpu, &pushed));
    CHECK_OK(cd_gpu_alloc_plain(r.backend, MUCH, &r.patience, &much));
    void *registered = gpu_alloc(&r, 16);
    hold(0);
    cd_gpu_release(r.backend, much);
    gpu_release(&r, registered);
    cd_patience brief = r.patience, interrupted = r.patience;
    brief.deadline = cd_deadline_after_ns(100 * CD_NS_PER_MS);
    interrupted.idle = interrupt;
    interrupted.idle_ctx = &calls;
    CHECK_FAILS(cd_gpu_alloc(r.backend, 16, &brief, &other), CD_WAIT_EXPIRED);
    CHECK(error_has("rank 0: an allocation on GPU 0 waited to its deadline"));
    CHECK_FAILS(cd_gpu_alloc(r.backend, 16, &interrupted, &other), CD_INTERRUPTED);
    let_go();
    CHECK_OK(cd_gpu_alloc(r.backend, 16, &r.patience, &other));
    CHECK(b->released_bytes < MUCH);
    cd_gpu_release(r.backend, other);
    cd_gpu_leave(&b->gpu, pushed);
    gpu_rank_close(&r);
}

/* An older NCCL, whose abort flag cannot be raised alone: communicators do not block, calls are polled for. */
static void check_older(void)
{
    static gpu_group groups[2];
    setenv("FAKE_NCCL_VERSION", "21805", 1);
    gpu_group_init(&groups[0], 2);
    check_on_ranks(2, late_main, &groups[0]);
    gpu_group_init(&groups[1], 2);
    check_on_ranks(2, abort_main, &groups[1]);
    unsetenv("FAKE_NCCL_VERSION");
}

static void on_group(int world, check_rank_func body)
{
    static gpu_group groups[24];
    static int used;
    gpu_group *g = &groups[used++];
    gpu_group_init(g, world);
    check_on_ranks(world, body, g);
}

int main(void)
{
    static parts_ctx parts;
    static const int sizes[] = {2, 1, 2, 2, 4, 2};
    gpu_use_fakes();
    check_libraries();
    check_devices();
    on_group(3, lone_bad_main);
    on_group(2, bad_calls_main);
    on_group(2, late_main);
    on_group(2, late_second_main);
    on_group(2, cause_main);
    on_group(2, abort_main);
    on_group(2, async_error_main);
    setenv("FAKE_NCCL_INIT_MS", "300", 1);
    on_group(2, open_late_main);
    unsetenv("FAKE_NCCL_INIT_MS");
    for (int i = 0; i < 2 * WAYS; i++)
        on_group(2, lonely_main);
    on_group(2, interrupted_main);
    on_group(2, slow_split_main);
    on_group(2, broken_split_main);
    on_group(3, broken_shrink_main);
    check_farewell();
    check_aborted_farewell();
    check_reclaim();
    check_older();
    gpu_group_init(&parts.whole, 4);
    for (int i = 0; i < 6; i++)
        gpu_group_init(&parts.part[i], sizes[i]);
    check_on_ranks(4, parts_main, &parts);
    CHECK(FAKE_NCCL_CALL(int (*)(void), fake_nccl_splits)() == 2 + 2 + 4);
    CHECK(FAKE_NCCL_CALL(int (*)(void), fake_nccl_shrinks)() == 2 + 1 + 2 + 2);
    CHECK(FAKE_NCCL_CALL(int (*)(void), fake_nccl_aborts)() >= 4);
    CHECK(FAKE_NCCL_CALL(int (*)(void), fake_nccl_left)() == 0);
    CHECK(FAKE_NCCL_CALL(int (*)(void), fake_nccl_early_calls)() == 0);
    CHECK(FAKE_NCCL_CALL(int (*)(void), fake_nccl_pulled)() == 0);
    CHECK(FAKE_CUDA_CALL(long (*)(void), fake_cuda_left)() == 0);
    puts("test_cuda_faults: ok");
    return 0;
}
