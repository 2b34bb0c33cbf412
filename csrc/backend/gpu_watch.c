/* The thread that looks after a GPU group while the host is elsewhere: operations past their deadline, errors that NCCL reports
 * later, and the group's cause, on which it aborts the communicator so that kernels which wait for a dead peer leave the GPU. */
#include "backend/gpu_impl.h"

#include <time.h>

#define LOOK_NS (20 * CD_NS_PER_MS)

static void publish(cd_gpu_backend *b)
{
    cd_cause_publish(b->team->cause, cd_last_error());
}

/* Without a lock: this thread alone frees the communicator, and NCCL's answer is one atomic word. */
static void look_for_errors(cd_gpu_backend *b)
{
    cd_nccl_comm comm = atomic_load(&b->comm);
    cd_nccl_result result = CD_NCCL_SUCCESS;
    if (comm && b->nccl.comm_async_error(comm, &result) == CD_NCCL_SUCCESS && result != CD_NCCL_SUCCESS &&
        result != CD_NCCL_IN_PROGRESS) {
        cd_nccl_fail(&b->nccl, comm, result, "NCCL stopped");
        publish(b);
    }
}

/* A caller that is still inside NCCL after its deadline. Told at the second look, so that the last microsecond of a call, or a
 * deadline that had passed before the call, is no reason to end the group. */
static void look_inside(cd_gpu_backend *b)
{
    /* Acquire, twice: the loads stay in this order. The same number on both sides of `until` is that of its visit, since a visit
     * counts itself before its word is taken away, and who goes in next has seen that. */
    uint64_t visit = atomic_load_explicit(&b->visits, memory_order_acquire);
    uint64_t until = atomic_load_explicit(&b->inside_until, memory_order_acquire);
    bool is_of_visit = atomic_load_explicit(&b->visits, memory_order_relaxed) == visit;
    if (until == 0 || !is_of_visit || cd_now_ns() < until) {
        b->late_visit = 0;
    } else if (b->late_visit != visit + 1) {
        b->late_visit = visit + 1;
    } else {
        cd_fail(CD_TIMED_OUT, "rank %d: %s was still inside NCCL at its deadline: a rank does not take part",
                cd_gpu_rank(b, b->rank),
                cd_kind_name((cd_kind)atomic_load_explicit(&b->inside_kind, memory_order_relaxed)));
        publish(b);
    }
}

static void look_for_late(cd_gpu_backend *b)
{
    cd_event *oldest = cd_gpu_events_reap(b);
    if (!oldest)
        return;
    uint64_t deadline = oldest->deadline_ns;
    /* Operations up to that much later may share the event. */
    if (cd_now_ns() >= (deadline > UINT64_MAX - CD_GPU_SLACK_NS ? deadline : deadline + CD_GPU_SLACK_NS)) {
        char text[256];
        cd_fail(CD_TIMED_OUT, "rank %d: %s did not end on the GPU before its deadline: a rank does not take part, or its GPU is "
                              "busy", cd_gpu_rank(b, b->rank), cd_descriptor_text(&oldest->op, text, sizeof text));
        publish(b);
    }
    cd_gpu_event_unref(oldest);
}

/* Sleeps until the next look or a wake-up; says whether to stop and whether an abort was asked for. */
static bool pause_until_next(cd_gpu_backend *b, bool *abort_p)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    uint64_t at = (uint64_t)until.tv_nsec + LOOK_NS;
    until.tv_sec += (time_t)(at / CD_NS_PER_S);
    until.tv_nsec = (long)(at % CD_NS_PER_S);
    pthread_mutex_lock(&b->watch_lock);
    if (!b->watch_stop && !b->abort_wanted)
        pthread_cond_timedwait(&b->watch_wake, &b->watch_lock, &until);
    bool stop = b->watch_stop;
    *abort_p = b->abort_wanted;
    b->abort_wanted = false;
    pthread_mutex_unlock(&b->watch_lock);
    return stop;
}

static void *watch_main(void *arg)
{
    cd_gpu_backend *b = arg;
    bool pushed, wanted;
    /* Other threads may be capturing a CUDA graph; our queries must not spoil it. */
    int mode = CD_CU_CAPTURE_MODE_RELAXED;
    b->driver.exchange_capture_mode(&mode);
    bool entered = cd_gpu_enter(&b->gpu, &pushed) == CD_OK;
    while (entered && !pause_until_next(b, &wanted)) {
        if (!atomic_load(&b->comm))
            continue;
        if (atomic_load_explicit(&b->team->cause->state, memory_order_acquire) == CD_CAUSE_NONE && !wanted) {
            look_for_errors(b);
            look_for_late(b);
            look_inside(b);
        }
        if (wanted || atomic_load_explicit(&b->team->cause->state, memory_order_acquire) != CD_CAUSE_NONE)
            cd_gpu_abort_comm(b);
    }
    if (entered)
        cd_gpu_leave(&b->gpu, pushed);
    /* Release: who sees it comes after the watch's last use of the communicator. */
    atomic_store_explicit(&b->watch_over, 1, memory_order_release);
    cd_gpu_backend_unref(b);
    return 0;
}

cd_status cd_gpu_watch_start(cd_gpu_backend *b)
{
    atomic_fetch_add_explicit(&b->refs, 1, memory_order_relaxed); /* the watch's own */
    int error = pthread_create(&b->watch, 0, watch_main, b);
    if (error)
        atomic_fetch_sub_explicit(&b->refs, 1, memory_order_relaxed); /* the caller has one */
    if (error)
        return cd_fail_errno(CD_NO_MEMORY, error, "the thread that watches the GPU cannot be started");
    b->watching = true;
    return CD_OK;
}

static void wake(cd_gpu_backend *b, _Atomic bool *flag)
{
    pthread_mutex_lock(&b->watch_lock);
    *flag = true;
    pthread_cond_signal(&b->watch_wake);
    pthread_mutex_unlock(&b->watch_lock);
}

void cd_gpu_watch_stop(cd_gpu_backend *b)
{
    if (!b->watching)
        return;
    wake(b, &b->watch_stop);
    b->watching = false;
    /* It may be freeing an aborted communicator, for which the driver waits until other work on the GPU has ended. */
    cd_error kept = *cd_last_error();
    cd_patience patience = {.deadline = cd_deadline_after_ns(CD_GPU_FAREWELL_NS), .yields = 1};
    if (cd_wait_at_least(&b->watch_over, 1, -1, &patience) == CD_OK)
        pthread_join(b->watch, 0);
    else
        pthread_detach(b->watch);
    cd_fail_with(&kept);
}

void cd_gpu_watch_abort(cd_gpu_backend *b)
{
    wake(b, &b->abort_wanted);
}
