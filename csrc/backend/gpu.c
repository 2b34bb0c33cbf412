/* NCCL in the caller's stream (run) or in the group's own (start). This file: life and the entry points of the contract. */
#include "backend/gpu_impl.h"

#include <stdlib.h>
#include <unistd.h>

enum { EVENTS_MADE_AHEAD = 16 };

static cd_gpu_backend *of(cd_backend *backend)
{
    return (cd_gpu_backend *)backend;
}

/* Being inside, and the context, around each entry point. */
typedef struct {
    bool entered, pushed;
} visit;

/* The caller may hold what the present owner needs to go on (Python's interpreter lock): patience gives it up. */
cd_status cd_gpu_go_in(cd_gpu_backend *b, cd_kind kind, cd_deadline deadline, const cd_patience *patience)
{
    cd_waiter waiter = cd_waiter_start(patience);
    while (!cd_gpu_try_go_in(b, kind, deadline))
        CD_TRY(cd_waiter_turn(&waiter));
    return CD_OK;
}

/* An operation's place among those of another thread's coalesced group would be a matter of luck. */
static cd_status go_in_for_operation(cd_gpu_backend *b, cd_kind kind, const cd_patience *patience)
{
    cd_waiter waiter = cd_waiter_start(patience);
    while (!cd_gpu_try_go_in(b, kind, patience->deadline)) {
        if (b->grouping)
            return cd_fail(CD_BAD_ARGUMENT, "another thread has a coalesced group of this process group open");
        CD_TRY(cd_waiter_turn(&waiter));
    }
    return CD_OK;
}

static cd_status visit_begin(cd_gpu_backend *b, cd_kind kind, const cd_patience *patience, visit *v)
{
    v->entered = !cd_gpu_owns_group(b);
    if (v->entered)
        CD_TRY(go_in_for_operation(b, kind, patience));
    cd_status status = cd_gpu_enter(&b->gpu, &v->pushed);
    if (cd_unlikely(status != CD_OK) && v->entered)
        cd_gpu_come_out(b);
    return status;
}

static void visit_end(cd_gpu_backend *b, const visit *v, cd_status status)
{
    if (cd_unlikely(cd_status_is_sticky(status) || status == CD_INTERRUPTED))
        atomic_store(&b->broken, true);
    cd_gpu_leave(&b->gpu, v->pushed);
    if (v->entered)
        cd_gpu_come_out(b);
}

static bool gpu_is_quick(cd_backend *backend, const cd_op *op)
{
    (void)backend;
    (void)op;
    return false; /* a launch waits while the GPU's queue is full */
}

/* Event and listing of an operation that was just enqueued; one that nobody keeps shares those of its neighbours. Inside a group
 * it is listed by the group's end. */
static cd_status note_running(cd_gpu_backend *b, const cd_op *op, const cd_patience *patience, cd_event **keep)
{
    cd_event *event = 0;
    bool extended = false;
    if (!keep)
        CD_TRY(cd_gpu_event_extend(b, op->stream, patience, &extended));
    if (extended)
        return CD_OK;
    CD_TRY(cd_gpu_event_take(b, op, patience, &event));
    cd_status status = cd_gpu_event_record(b, event, op->stream, !keep);
    if (cd_unlikely(status != CD_OK))
        cd_gpu_event_unref(event);
    else if (keep)
        *keep = event;
    return status;
}

/* Inside a group: one event for all, recorded by its end in the stream of the last, since NCCL joins the streams of a group. */
static cd_status note_grouped(cd_gpu_backend *b, const cd_op *op, const cd_patience *patience)
{
    if (!b->grouped_run)
        CD_TRY(cd_gpu_event_take(b, op, patience, &b->grouped_run));
    b->grouped_run->stream = op->stream;
    return CD_OK;
}

static cd_status gpu_run(cd_backend *backend, const cd_op *op, const cd_patience *patience)
{
    cd_gpu_backend *b = of(backend);
    cd_event *barrier = 0;
    visit v;
    CD_TRY(visit_begin(b, op->kind, patience, &v));
    cd_status status = cd_gpu_launch(b, op, op->stream, patience);
    if (cd_likely(status == CD_OK))
        status = b->grouping ? note_grouped(b, op, patience)
                             : note_running(b, op, patience, op->kind == CD_BARRIER ? &barrier : 0);
    visit_end(b, &v, status);
    /* The one operation without data that a stream could order: the host itself waits. */
    if (barrier && !barrier->captured)
        status = cd_gpu_event_wait_host(barrier, patience);
    if (barrier)
        cd_gpu_event_unref(barrier);
    if (status == CD_WAIT_EXPIRED)
        status = cd_fail(CD_TIMED_OUT, "a rank did not arrive before the deadline");
    return status;
}

/* Our stream waits for the caller's, runs the operation, records its end. */
static cd_status start_in_own_stream(cd_gpu_backend *b, const cd_op *op, const cd_patience *patience, cd_event *event)
{
    CD_TRY(cd_driver_check(&b->driver, b->driver.event_record(b->fork, op->stream), "cuEventRecord"));
    CD_TRY(cd_driver_check(&b->driver, b->driver.stream_wait_event(b->stream, b->fork, 0), "cuStreamWaitEvent"));
    CD_TRY(cd_gpu_launch(b, op, b->stream, patience));
    if (!b->grouping)
        return cd_gpu_event_record(b, event, b->stream, false);
    atomic_fetch_add_explicit(&event->refs, 1, memory_order_relaxed);
    event->next = b->grouped;
    b->grouped = event;
    return CD_OK;
}

static cd_status gpu_start(cd_backend *backend, const cd_op *op, const cd_patience *patience, cd_event **out)
{
    cd_gpu_backend *b = of(backend);
    cd_event *event = 0;
    visit v;
    CD_TRY(visit_begin(b, op->kind, patience, &v));
    cd_status status = cd_gpu_event_take(b, op, patience, &event);
    if (status == CD_OK)
        status = start_in_own_stream(b, op, patience, event);
    visit_end(b, &v, status);
    if (cd_unlikely(status != CD_OK)) {
        if (event)
            cd_gpu_event_unref(event);
        return status;
    }
    atomic_fetch_add_explicit(&b->refs, 1, memory_order_relaxed);
    *out = event;
    return CD_OK;
}

static cd_status gpu_group_begin(cd_backend *backend, const cd_patience *patience)
{
    cd_gpu_backend *b = of(backend);
    if (cd_gpu_owns_group(b))
        return cd_fail(CD_BAD_ARGUMENT, "a coalesced group is already open in this thread");
    /* Inside until the group ends, since NCCL remembers the communicator until then: an abort meanwhile frees nothing. */
    CD_TRY(cd_gpu_go_in(b, CD_BARRIER, CD_NEVER, patience));
    if (!atomic_load(&b->comm) || b->nccl.group_start() != CD_NCCL_SUCCESS) {
        cd_gpu_come_out(b);
        return cd_gpu_cause(b);
    }
    b->group_owner = pthread_self();
    b->grouping = true;
    return CD_OK;
}

/* Records the events of the operations that were started inside the group. */
static cd_status record_grouped(cd_gpu_backend *b, cd_status status)
{
    while (b->grouped) {
        cd_event *event = b->grouped;
        b->grouped = event->next;
        if (status == CD_OK)
            status = cd_gpu_event_record(b, event, b->stream, false);
        cd_gpu_event_unref(event);
    }
    cd_event *run = b->grouped_run;
    b->grouped_run = 0;
    if (run && status == CD_OK && (status = cd_gpu_event_record(b, run, run->stream, true)) == CD_OK)
        return CD_OK;
    if (run)
        cd_gpu_event_unref(run);
    return status;
}

static cd_status gpu_group_end(cd_backend *backend, const cd_patience *patience)
{
    cd_gpu_backend *b = of(backend);
    bool pushed;
    if (!cd_gpu_owns_group(b))
        return cd_fail(CD_BAD_ARGUMENT, "no coalesced group is open in this thread");
    b->grouping = false;
    /* From here on with a deadline, as another visit. Release: the watch does not take it for that of the one before. */
    cd_gpu_count_visit(b);
    atomic_store_explicit(&b->inside_kind, CD_SEND, memory_order_relaxed);
    atomic_store_explicit(&b->inside_until, patience->deadline.at_ns ? patience->deadline.at_ns : 1, memory_order_release);
    cd_status status = cd_gpu_enter(&b->gpu, &pushed);
    cd_nccl_result result = b->nccl.group_end();
    cd_nccl_comm comm = atomic_load(&b->comm);
    if (status == CD_OK)
        status = comm ? cd_gpu_settle(b, comm, result, "coalesced operations", patience) : cd_gpu_cause(b);
    cd_status after = cd_gpu_finish_deferred(b, status == CD_OK);
    status = record_grouped(b, status == CD_OK ? after : status);
    visit_end(b, &(visit){.entered = true, .pushed = pushed}, status);
    return status;
}

static bool gpu_is_busy(cd_backend *backend)
{
    cd_event *running = cd_gpu_events_reap(of(backend));
    if (running)
        cd_gpu_event_unref(running);
    return running != 0;
}

static void gpu_abort(cd_backend *backend)
{
    cd_gpu_watch_abort(of(backend));
}

static cd_status take_down(void *arg)
{
    cd_gpu_backend *b = arg;
    bool pushed;
    cd_gpu_events_close(b);
    if (b->gpu.context) {
        if (cd_gpu_enter(&b->gpu, &pushed) == CD_OK) {
            cd_gpu_blocks_close(b);
            if (b->fork)
                b->driver.event_destroy(b->fork);
            if (b->word)
                b->driver.mem_free(b->word);
            if (b->stream)
                b->driver.stream_destroy(b->stream);
            cd_kernels_close(&b->kernels);
            cd_gpu_leave(&b->gpu, pushed);
        }
        cd_gpu_close(&b->gpu);
    }
    cd_nccl_close(&b->nccl);
    cd_driver_close(&b->driver);
    pthread_mutex_destroy(&b->events_lock);
    pthread_mutex_destroy(&b->watch_lock);
    pthread_mutex_destroy(&b->blocks_lock);
    pthread_cond_destroy(&b->watch_wake);
    free(b);
    return CD_OK;
}

void cd_gpu_backend_unref(cd_gpu_backend *b)
{
    /* Acquire and release: the last one sees all that the others did. */
    if (atomic_fetch_sub_explicit(&b->refs, 1, memory_order_acq_rel) != 1)
        return;
    if (!b->gpu.context) { /* it never came to a GPU: nothing waits */
        take_down(b);
        return;
    }
    /* Giving memory back waits until the GPU is through, also with what is not ours: in a thread that may be left. Where there
     * can be none, the memory ends with the process. */
    cd_error kept = *cd_last_error();
    cd_patience patience = {.deadline = cd_deadline_after_ns(CD_GPU_FAREWELL_NS)};
    (void)cd_gpu_errand(take_down, 0, b, &patience);
    cd_fail_with(&kept);
}

static void gpu_free(cd_backend *backend)
{
    if (!backend)
        return;
    cd_gpu_backend *b = of(backend);
    bool pushed = false;
    /* First: from here on nobody else touches the communicator; closing looks at the cause itself. */
    cd_gpu_watch_stop(b);
    if (b->gpu.context && cd_gpu_enter(&b->gpu, &pushed) == CD_OK) {
        cd_gpu_close_comm(b);
        cd_gpu_leave(&b->gpu, pushed);
    }
    atomic_store(&b->closed, true);
    cd_gpu_backend_unref(b);
}

static const cd_backend_ops gpu_ops = {
    .name = "nccl",
    .device = CD_CUDA,
    .supports = cd_gpu_supports,
    .is_quick = gpu_is_quick,
    .run = gpu_run,
    .start = gpu_start,
    .event_done = cd_gpu_event_done,
    .event_wait_host = cd_gpu_event_wait_host,
    .event_join_stream = cd_gpu_event_join_stream,
    .event_free = cd_gpu_event_free,
    .group_begin = gpu_group_begin,
    .group_end = gpu_group_end,
    .is_busy = gpu_is_busy,
    .abort = gpu_abort,
    .free = gpu_free,
};

/* What this rank needs for itself; context stays current until the caller leaves it. */
static cd_status prepare(cd_gpu_backend *b, const cd_backend_env *env, bool *pushed_p)
{
    int fallback = cd_gpu_rank(b, b->rank);
    CD_TRY(cd_driver_open(&b->driver));
    CD_TRY(cd_nccl_open(&b->nccl));
    CD_TRY(cd_gpu_open(&b->gpu, &b->driver, env->device_index, fallback));
    CD_TRY(cd_gpu_enter(&b->gpu, pushed_p));
    const cd_driver *d = &b->driver;
    int least = 0, greatest = 0;
    CD_TRY(cd_driver_check(d, d->ctx_priorities(&least, &greatest), "cuCtxGetStreamPriorityRange"));
    CD_TRY(cd_driver_check(d, d->stream_create(&b->stream, CD_CU_STREAM_NON_BLOCKING, greatest), "cuStreamCreate"));
    CD_TRY(cd_driver_check(d, d->event_create(&b->fork, CD_CU_EVENT_DISABLE_TIMING), "cuEventCreate"));
    CD_TRY(cd_driver_check(d, d->mem_alloc(&b->word, sizeof(uint64_t)), "cuMemAlloc"));
    CD_TRY(cd_driver_check(d, d->set_bytes_async(b->word, 0, sizeof(uint64_t), b->stream), "cuMemsetD8Async"));
    cd_kernels_open(&b->kernels, &b->gpu);
    return CD_OK;
}

static cd_status fill_pool(cd_gpu_backend *b)
{
    cd_event *made[EVENTS_MADE_AHEAD];
    cd_op none = {.kind = CD_BARRIER};
    cd_patience never = {.deadline = CD_NEVER};
    cd_status status = CD_OK;
    int n = 0;
    while (n < EVENTS_MADE_AHEAD && (status = cd_gpu_event_take(b, &none, &never, &made[n])) == CD_OK)
        n++;
    while (n > 0)
        cd_gpu_event_unref(made[--n]);
    return status;
}

static void init_locks(cd_gpu_backend *b)
{
    pthread_condattr_t attributes;
    pthread_mutex_init(&b->events_lock, 0);
    pthread_mutex_init(&b->watch_lock, 0);
    pthread_mutex_init(&b->blocks_lock, 0);
    b->process = getpid();
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&b->watch_wake, &attributes);
    pthread_condattr_destroy(&attributes);
}

cd_status cd_backend_open_gpu(const cd_backend_env *env, cd_backend **out)
{
    cd_gpu_backend *b = calloc(1, sizeof *b);
    if (!b)
        return cd_fail(CD_NO_MEMORY, "no memory for the GPU side of a group");
    b->base.ops = &gpu_ops;
    b->team = env->team;
    b->rank = env->team->rank;
    b->world = env->team->world;
    atomic_store(&b->refs, 1);
    init_locks(b);
    bool pushed = false;
    cd_status status = cd_gpu_connect(b, env, prepare(b, env, &pushed), env->patience);
    if (status == CD_OK)
        status = fill_pool(b);
    if (status == CD_OK)
        status = cd_gpu_watch_start(b);
    if (pushed)
        cd_gpu_leave(&b->gpu, true);
    if (status != CD_OK) {
        cd_error kept = *cd_last_error();
        gpu_free(&b->base);
        return cd_fail_with(&kept);
    }
    *out = &b->base;
    return CD_OK;
}

