/* What the GPU backend keeps count of: devices and contexts, events in flight, blocks of memory, threads of its own. Each check
 * was written for a small change of the code that no other test saw. */
#include "gpu_ranks.h"

#include "../fake_nccl/fake_cuda.h"
#include "backend/gpu_impl.h"
#include "backend/gpu_types.h"

#include <signal.h>

static int (*make_stream)(void **, unsigned, int);
static int (*end_stream)(void *);
static void (*hold)(void *);
static void (*let_go)(void);
static void (*drain)(void *);

static cd_op reduce_of(cd_span *span, void *stream)
{
    return (cd_op){.kind = CD_ALL_REDUCE, .dtype = CD_FLOAT32, .device = CD_CUDA, .root = -1, .item_bytes = 4,
                   .in = {span, 0, 1}, .out = {span, 0, 1}, .ndim = 1, .shape = {(int64_t)span->count}, .stream = stream};
}

static gpu_group *alone(void)
{
    static gpu_group groups[16];
    static int used;
    CHECK(used < 16);
    gpu_group_init(&groups[used], 1);
    return &groups[used++];
}

static void *stream_of_its_own(void)
{
    void *stream = 0;
    CHECK(make_stream(&stream, 1, 0) == 0);
    return stream;
}

static bool is_busy(gpu_rank *r)
{
    return r->backend->ops->is_busy(r->backend);
}

static int open_without_a_number(void)
{
    gpu_rank r;
    cd_backend_env env = gpu_env(&r, alone(), 0);
    int32_t third = 3;
    r.team.world_ranks = &third;
    env.device_index = -1;
    CHECK_OK(cd_backend_open_gpu(&env, &r.backend));
    int index = cd_gpu_describe(r.backend).index;
    gpu_rank_close(&r);
    return index;
}

/* By the rank where nothing is current, else what is current; that stays current whatever the backend does. */
static void check_device(void)
{
    int (*retain)(void **, int) = FAKE_CUDA_CALL(int (*)(void **, int), cuDevicePrimaryCtxRetain);
    int (*let)(int) = FAKE_CUDA_CALL(int (*)(int), cuDevicePrimaryCtxRelease_v2);
    int (*push)(void *) = FAKE_CUDA_CALL(int (*)(void *), cuCtxPushCurrent_v2);
    int (*pop)(void **) = FAKE_CUDA_CALL(int (*)(void **), cuCtxPopCurrent_v2);
    int (*current)(void **) = FAKE_CUDA_CALL(int (*)(void **), cuCtxGetCurrent);
    void *context = 0, *seen = 0;
    gpu_rank r;
    CHECK(open_without_a_number() == 3);
    CHECK(current(&seen) == 0 && !seen);
    CHECK(retain(&context, 2) == 0 && push(context) == 0);
    CHECK(open_without_a_number() == 2);
    gpu_rank_open(&r, alone(), 0); /* on GPU 0 */
    cd_span span = {gpu_alloc(&r, 16), 4, 0, 4};
    cd_op op = reduce_of(&span, 0);
    CHECK_OK(r.backend->ops->run(r.backend, &op, &r.patience));
    CHECK(current(&seen) == 0 && seen == context);
    gpu_flush(&r);
    gpu_rank_close(&r);
    CHECK(current(&seen) == 0 && seen == context);
    CHECK(pop(&seen) == 0 && let(2) == 0);
}

/* An operation in one stream is not over because a later one in another is. */
static void check_streams_apart(void)
{
    gpu_rank r;
    gpu_rank_open(&r, alone(), 0);
    void *slow = stream_of_its_own(), *quick = stream_of_its_own();
    cd_span span = {gpu_alloc(&r, 16), 4, 0, 4};
    cd_op first = reduce_of(&span, slow), second = reduce_of(&span, quick);
    hold(slow);
    first.kind = second.kind = CD_ALL_REDUCE;
    CHECK_OK(r.backend->ops->run(r.backend, &first, &r.patience));
    /* The fake's jobs of a communicator take turns: the second's kernel waits for the first's, its event is what is looked at. */
    CHECK(is_busy(&r));
    CHECK_OK(r.backend->ops->run(r.backend, &second, &r.patience));
    CHECK(((cd_gpu_backend *)r.backend)->running_count == 2);
    CHECK_OK(r.backend->ops->run(r.backend, &second, &r.patience));
    CHECK(((cd_gpu_backend *)r.backend)->running_count == 2); /* neighbours of one stream share an event */
    let_go();
    drain(slow);
    drain(quick);
    CHECK(!is_busy(&r));
    gpu_rank_close(&r);
    CHECK(end_stream(slow) == 0 && end_stream(quick) == 0);
}

/* The event of an operation before a capture is not recorded into the graph. */
static void check_event_before_capture(void)
{
    gpu_rank r;
    gpu_rank_open(&r, alone(), 0);
    void *stream = stream_of_its_own();
    cd_span span = {gpu_alloc(&r, 16), 4, 0, 4};
    cd_op op = reduce_of(&span, stream);
    int before = FAKE_CUDA_CALL(int (*)(void), fake_capture_violations)();
    hold(stream);
    CHECK_OK(r.backend->ops->run(r.backend, &op, &r.patience));
    FAKE_CUDA_CALL(void (*)(void *), fake_capture_begin)(stream);
    CHECK_OK(r.backend->ops->run(r.backend, &op, &r.patience));
    (void)is_busy(&r);
    let_go();
    drain(stream);
    (void)is_busy(&r);
    FAKE_CUDA_CALL(void (*)(void *), fake_capture_end)(stream);
    CHECK(FAKE_CUDA_CALL(int (*)(void), fake_capture_violations)() == before);
    gpu_rank_close(&r);
    CHECK(end_stream(stream) == 0);
}

/* More operations in flight, each held, than the list has room for. */
static void check_many_in_flight(void)
{
    enum { MANY = CD_GPU_RUNNING + 100 };
    static cd_event *events[MANY];
    gpu_rank r;
    gpu_rank_open(&r, alone(), 0);
    cd_gpu_backend *b = (cd_gpu_backend *)r.backend;
    void *stream = stream_of_its_own();
    cd_span span = {gpu_alloc(&r, 16), 4, 0, 4};
    cd_op op = reduce_of(&span, stream);
    hold(stream);
    for (int i = 0; i < MANY; i++) {
        CHECK_OK(r.backend->ops->start(r.backend, &op, &r.patience, &events[i]));
        CHECK(b->running_count <= CD_GPU_RUNNING);
    }
    bool done = true;
    CHECK_OK(r.backend->ops->event_done(events[0], &done));
    CHECK(!done && is_busy(&r));
    let_go();
    for (int i = 0; i < MANY; i++) {
        CHECK_OK(r.backend->ops->event_wait_host(events[i], &r.patience));
        r.backend->ops->event_free(events[i]);
    }
    CHECK(!is_busy(&r));
    /* Full of what has ended: swept, so that the newest is listed. */
    for (int i = 0; i < MANY; i++) {
        CHECK_OK(r.backend->ops->start(r.backend, &op, &r.patience, &events[i]));
        CHECK_OK(r.backend->ops->event_wait_host(events[i], &r.patience));
    }
    CHECK(b->running_count == 0 || b->running[(b->running_first + b->running_count - 1) % CD_GPU_RUNNING] == events[MANY - 1]);
    for (int i = 0; i < MANY; i++)
        r.backend->ops->event_free(events[i]);
    gpu_rank_close(&r);
    CHECK(end_stream(stream) == 0);
}

/* What ends because of an abort is no success, whoever sees it first; a cause counts before the abort does. */
static void aborted_main(int rank, void *ctx)
{
    gpu_rank r;
    cd_event *event = 0;
    bool done = false;
    gpu_rank_open(&r, ctx, rank);
    cd_span span = {gpu_alloc(&r, 16), 4, 0, 4};
    cd_op op = reduce_of(&span, 0);
    CHECK_OK(r.backend->ops->run(r.backend, &op, &r.patience));
    gpu_flush(&r);
    if (rank == 0) {
        cd_gpu_backend *b = (cd_gpu_backend *)r.backend;
        CHECK_OK(r.backend->ops->start(r.backend, &op, &r.patience, &event));
        r.backend->ops->abort(r.backend);
        while (!atomic_load(&b->raised))
            cd_sleep_ns(CD_NS_PER_MS);
        drain(b->stream);
        CHECK(!is_busy(&r)); /* takes it off the list */
        CHECK_FAILS(r.backend->ops->event_done(event, &done), CD_ABORTED);
        CHECK(!done);
        r.backend->ops->event_free(event);
    }
    pthread_barrier_wait(&r.group->barrier);
    gpu_rank_close(&r);
}

static void check_cause_before_abort(void)
{
    gpu_rank r;
    cd_event *event = 0;
    gpu_rank_open(&r, alone(), 0);
    cd_span span = {gpu_alloc(&r, 16), 4, 0, 4};
    cd_op op = reduce_of(&span, 0);
    CHECK_OK(r.backend->ops->start(r.backend, &op, &r.patience, &event));
    CHECK_OK(r.backend->ops->event_wait_host(event, &r.patience));
    cd_fail_rank(CD_PEER_LOST, 1, "rank 1 died");
    cd_cause_publish(r.team.cause, cd_last_error());
    CHECK_FAILS(r.backend->ops->event_join_stream(event, 0), CD_PEER_LOST);
    r.backend->ops->event_free(event);
    gpu_rank_close(&r);
}

static void *run_elsewhere(void *arg)
{
    gpu_rank *r = arg;
    cd_span span = {r->memory[0], 4, 0, 4};
    cd_op op = reduce_of(&span, 0);
    CHECK_FAILS(r->backend->ops->run(r->backend, &op, &r->patience), CD_BAD_ARGUMENT);
    CHECK(strstr(cd_last_error()->text, "another thread has a coalesced group"));
    return 0;
}

/* A coalesced group: other threads are refused; its operations are in flight when it has ended. */
static void check_coalesced(void)
{
    gpu_rank r;
    pthread_t thread;
    gpu_rank_open(&r, alone(), 0);
    void *stream = stream_of_its_own();
    cd_span span = {gpu_alloc(&r, 16), 4, 0, 4};
    cd_op op = reduce_of(&span, stream);
    hold(stream);
    CHECK_OK(r.backend->ops->group_begin(r.backend, &r.patience));
    CHECK(pthread_create(&thread, 0, run_elsewhere, &r) == 0);
    pthread_join(thread, 0);
    CHECK_OK(r.backend->ops->run(r.backend, &op, &r.patience));
    CHECK(!is_busy(&r));
    CHECK_OK(r.backend->ops->group_end(r.backend, &r.patience));
    CHECK(is_busy(&r));
    let_go();
    drain(stream);
    CHECK(!is_busy(&r));
    gpu_rank_close(&r);
    CHECK(end_stream(stream) == 0);
}

/* Memory is released once, and unregistered before it is given back. */
static void check_blocks(void)
{
    int (*registered)(void) = FAKE_NCCL_CALL(int (*)(void), fake_nccl_registered);
    enum { MUCH = 300 << 20 };
    gpu_rank r;
    void *much = 0, *other = 0;
    gpu_rank_open(&r, alone(), 0);
    cd_gpu_backend *b = (cd_gpu_backend *)r.backend;
    int before = registered();
    CHECK_OK(cd_gpu_alloc(r.backend, MUCH, &r.patience, &much));
    CHECK(registered() == before + 1);
    uint32_t refs = atomic_load(&b->refs);
    for (int i = 0; i < 2; i++) {
        cd_gpu_release(r.backend, much);
        CHECK(b->released_bytes == MUCH && atomic_load(&b->refs) == refs - 1);
    }
    CHECK_OK(r.backend->ops->group_begin(r.backend, &r.patience));
    CHECK_OK(cd_gpu_alloc_plain(r.backend, 16, &r.patience, &other));
    CHECK(b->released_bytes == MUCH); /* what it launches may yet use it */
    cd_gpu_release(r.backend, other);
    CHECK_OK(r.backend->ops->group_end(r.backend, &r.patience));
    CHECK_OK(cd_gpu_alloc_plain(r.backend, 16, &r.patience, &other));
    CHECK(b->released_bytes == 0 && registered() == before);
    cd_gpu_release(r.backend, other);
    gpu_rank_close(&r);
}

static cd_status see_signals(void *arg)
{
    sigset_t *blocked = arg;
    return pthread_sigmask(SIG_SETMASK, 0, blocked) == 0 ? CD_OK : CD_GPU;
}

/* A thread of ours takes no signals; what it answers is the caller's. */
static void check_errand(void)
{
    sigset_t blocked;
    cd_patience patience = {.deadline = cd_deadline_after_ns(10 * CD_NS_PER_S)};
    sigemptyset(&blocked);
    CHECK_OK(cd_gpu_errand(see_signals, 0, &blocked, &patience));
    CHECK(sigismember(&blocked, SIGINT) == 1 && sigismember(&blocked, SIGTERM) == 1 && sigismember(&blocked, SIGALRM) == 1);
}

static void check_factors(void)
{
    uint16_t half = 0;
    double whole = 0;
    cd_gpu_scalar(CD_NCCL_BFLOAT16, 1.0 / 3, &half);
    CHECK(half == 0x3eab); /* rounded, not cut */
    cd_gpu_scalar(CD_NCCL_FLOAT16, 1.0 / 3, &half);
    CHECK(half == 0x3555);
    cd_gpu_scalar(CD_NCCL_FLOAT64, 1.0 / 3, &whole);
    CHECK(whole == 1.0 / 3);
    cd_gpu_type type;
    CHECK_OK(cd_gpu_type_of(CD_ALL_REDUCE, CD_SUM, CD_COMPLEX128, 16, 0, &type));
    CHECK(type.type == CD_NCCL_FLOAT64 && type.per_item == 2);
}

int main(void)
{
    static gpu_group pair;
    gpu_use_fakes();
    make_stream = FAKE_CUDA_CALL(int (*)(void **, unsigned, int), cuStreamCreateWithPriority);
    end_stream = FAKE_CUDA_CALL(int (*)(void *), cuStreamDestroy_v2);
    hold = FAKE_CUDA_CALL(void (*)(void *), fake_stream_hold);
    let_go = FAKE_CUDA_CALL(void (*)(void), fake_streams_let_go);
    drain = FAKE_CUDA_CALL(void (*)(void *), fake_stream_drain);
    check_device();
    check_streams_apart();
    check_event_before_capture();
    check_many_in_flight();
    gpu_group_init(&pair, 2);
    check_on_ranks(2, aborted_main, &pair);
    check_cause_before_abort();
    check_coalesced();
    check_blocks();
    check_errand();
    check_factors();
    CHECK(FAKE_NCCL_CALL(int (*)(void), fake_nccl_left)() == 0);
    CHECK(FAKE_CUDA_CALL(long (*)(void), fake_cuda_left)() == 0);
    puts("test_cuda_life: ok");
    return 0;
}
