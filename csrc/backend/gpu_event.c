/* Operations in flight: a pool of CUDA events, and the list of those not yet seen to end. */
#include "backend/gpu_impl.h"

#include <stdlib.h>

static cd_status make_event(cd_gpu_backend *b, cd_event **out)
{
    cd_event *event = calloc(1, sizeof *event);
    if (!event)
        return cd_fail(CD_NO_MEMORY, "no memory for an event");
    cd_status status = cd_driver_check(&b->driver, b->driver.event_create(&event->cu, CD_CU_EVENT_DISABLE_TIMING),
                                       "cuEventCreate");
    if (status != CD_OK) {
        free(event);
        return status;
    }
    event->backend = b;
    *out = event;
    return CD_OK;
}

/* Under events_lock. */
static cd_event *pop(cd_gpu_backend *b)
{
    cd_event *event = b->pool;
    if (event)
        b->pool = event->next;
    return event;
}

cd_status cd_gpu_event_take(cd_gpu_backend *b, const cd_op *op, const cd_patience *patience, cd_event **out)
{
    cd_event *event = b->spare;
    b->spare = 0;
    if (!event) {
        pthread_mutex_lock(&b->events_lock);
        event = pop(b);
        pthread_mutex_unlock(&b->events_lock);
    }
    if (!event)
        CD_TRY(make_event(b, &event));
    event->next = 0;
    event->captured = false;
    event->deadline_ns = patience->deadline.at_ns;
    cd_op_descriptor(op, &event->op);
    atomic_store_explicit(&event->refs, 1, memory_order_relaxed);
    atomic_store_explicit(&event->state, CD_EVENT_PENDING, memory_order_relaxed);
    *out = event;
    return CD_OK;
}

/* Under events_lock. */
static void release_event(cd_gpu_backend *b, cd_event *event)
{
    /* Acquire and release: the last holder sees what the others wrote before it hands the event to the pool. */
    if (atomic_fetch_sub_explicit(&event->refs, 1, memory_order_acq_rel) != 1)
        return;
    event->next = b->pool;
    b->pool = event;
}

void cd_gpu_event_unref(cd_event *event)
{
    cd_gpu_backend *b = event->backend;
    pthread_mutex_lock(&b->events_lock);
    release_event(b, event);
    pthread_mutex_unlock(&b->events_lock);
}

/* Under events_lock: takes the oldest operation off the list, if it has ended. One that failed is not marked as done: its holder
 * reports it, and the group has ended. */
static bool drop_ended(cd_gpu_backend *b)
{
    if (b->running_count == 0)
        return false;
    cd_event *event = b->running[b->running_first];
    uint32_t state = CD_EVENT_RECORDED;
    /* Acquire: the record was made before. ASKED keeps claim_newest away, whose new record would make the answer untrue. */
    if (atomic_compare_exchange_strong_explicit(&event->state, &state, CD_EVENT_ASKED, memory_order_acquire,
                                                memory_order_acquire)) {
        cd_cu_result result = b->driver.event_query(event->cu);
        bool is_good = result == CD_CU_SUCCESS && !atomic_load_explicit(&b->aborted, memory_order_acquire);
        state = CD_EVENT_ASKED;
        /* Release, as all who mark it. A holder may have made it DONE meanwhile: that stays. */
        atomic_compare_exchange_strong_explicit(&event->state, &state, is_good ? CD_EVENT_DONE : CD_EVENT_RECORDED,
                                                memory_order_release, memory_order_relaxed);
        if (result == CD_CU_NOT_READY)
            return false;
    } else if (state == CD_EVENT_PENDING) {
        return false; /* its event still tells of an earlier record */
    }
    b->running_first = (b->running_first + 1) % CD_GPU_RUNNING;
    b->running_count--;
    release_event(b, event);
    return true;
}

cd_event *cd_gpu_events_reap(cd_gpu_backend *b)
{
    for (;;) {
        /* Taken anew for each: a query takes 1.5 µs (driver 580), and a caller may want to list its operation. */
        pthread_mutex_lock(&b->events_lock);
        bool dropped = drop_ended(b);
        cd_event *oldest = !dropped && b->running_count ? b->running[b->running_first] : 0;
        if (oldest)
            atomic_fetch_add_explicit(&oldest->refs, 1, memory_order_relaxed);
        pthread_mutex_unlock(&b->events_lock);
        if (!dropped)
            return oldest;
    }
}

/* Without events_lock: that costs two of the few atomic exchanges of an operation. */
static cd_event *claim_newest(cd_gpu_backend *b, cd_cu_stream stream, uint64_t deadline_ns)
{
    cd_event *newest = b->newest;
    uint32_t recorded = CD_EVENT_RECORDED;
    /* refs 1: the list's alone. Acquire: a holder that has let go marked it as done before. A deadline before the first one's is
     * far from it too. */
    if (!newest || newest->stream != stream || deadline_ns - newest->deadline_ns > CD_GPU_SLACK_NS ||
        atomic_load_explicit(&newest->refs, memory_order_acquire) != 1)
        return 0;
    /* Either drop_ended is at it (ASKED), or has taken it off the list (DONE), and we do not get it; or it does not get it and
     * sees PENDING until the new record is made. What it drops as failed has no refs, or belongs to a group that launches nothing
     * any more. Relaxed: the record is told of by the release of RECORDED. */
    bool is_ours = atomic_compare_exchange_strong_explicit(&newest->state, &recorded, CD_EVENT_PENDING, memory_order_relaxed,
                                                           memory_order_relaxed);
    return is_ours ? newest : 0;
}

cd_status cd_gpu_event_extend(cd_gpu_backend *b, cd_cu_stream stream, const cd_patience *patience, bool *done_p)
{
    *done_p = false;
    if (cd_gpu_is_captured(b, stream))
        return CD_OK;
    cd_event *newest = claim_newest(b, stream, patience->deadline.at_ns);
    if (!newest)
        return CD_OK;
    cd_cu_result result = b->driver.event_record(newest->cu, stream);
    /* Release: who sees RECORDED may query the event. Where the driver refused, the earlier record stands. */
    atomic_store_explicit(&newest->state, CD_EVENT_RECORDED, memory_order_release);
    *done_p = true;
    return cd_driver_check(&b->driver, result, "cuEventRecord");
}

cd_status cd_gpu_event_record(cd_gpu_backend *b, cd_event *event, cd_cu_stream stream, bool give)
{
    event->captured = cd_gpu_is_captured(b, stream);
    event->stream = stream;
    CD_TRY(cd_driver_check(&b->driver, b->driver.event_record(event->cu, stream), "cuEventRecord"));
    /* Release: who sees RECORDED may query the event. */
    atomic_store_explicit(&event->state, CD_EVENT_RECORDED, memory_order_release);
    if (event->captured) {
        if (give)
            cd_gpu_event_unref(event);
        return CD_OK;
    }
    pthread_mutex_lock(&b->events_lock);
    while (b->running_count == CD_GPU_RUNNING && drop_ended(b))
        ;
    /* Full of running ones: the oldest tells of a hang, the newest when all is over; one in between can go. */
    if (b->running_count == CD_GPU_RUNNING) {
        b->running_count--;
        release_event(b, b->running[(b->running_first + b->running_count) % CD_GPU_RUNNING]);
    }
    if (!give)
        atomic_fetch_add_explicit(&event->refs, 1, memory_order_relaxed);
    b->running[(b->running_first + b->running_count++) % CD_GPU_RUNNING] = event;
    b->newest = event;
    if (!b->spare)
        b->spare = pop(b);
    pthread_mutex_unlock(&b->events_lock);
    return CD_OK;
}

void cd_gpu_events_close(cd_gpu_backend *b)
{
    pthread_mutex_lock(&b->events_lock);
    while (b->running_count > 0) {
        cd_event *event = b->running[b->running_first];
        b->running_first = (b->running_first + 1) % CD_GPU_RUNNING;
        b->running_count--;
        release_event(b, event);
    }
    if (b->spare) {
        b->spare->next = b->pool;
        b->pool = b->spare;
    }
    cd_event *event = b->pool;
    b->pool = b->spare = 0;
    pthread_mutex_unlock(&b->events_lock);
    while (event) {
        cd_event *next = event->next;
        b->driver.event_destroy(event->cu);
        free(event);
        event = next;
    }
}

cd_status cd_gpu_event_done(cd_event *event, bool *done_p)
{
    cd_gpu_backend *b = event->backend;
    uint32_t state = atomic_load_explicit(&event->state, memory_order_acquire);
    *done_p = state == CD_EVENT_DONE || (state == CD_EVENT_RECORDED && event->captured);
    if (*done_p)
        return CD_OK;
    /* Once aborted, NCCL's kernels leave early: an event that fires then proves nothing. */
    if (atomic_load_explicit(&b->aborted, memory_order_acquire))
        return cd_gpu_cause(b);
    if (state == CD_EVENT_PENDING)
        return cd_cause_check(b->team->cause);
    cd_cu_result result = b->driver.event_query(event->cu);
    if (result == CD_CU_NOT_READY)
        return cd_cause_check(b->team->cause);
    CD_TRY(cd_driver_check(&b->driver, result, "cuEventQuery"));
    if (atomic_load_explicit(&b->aborted, memory_order_acquire))
        return cd_gpu_cause(b);
    atomic_store_explicit(&event->state, CD_EVENT_DONE, memory_order_release);
    *done_p = true;
    return CD_OK;
}

cd_status cd_gpu_event_wait_host(cd_event *event, const cd_patience *patience)
{
    cd_patience own = *patience;
    if (!own.cause)
        own.cause = event->backend->team->cause;
    cd_waiter waiter = cd_waiter_start(&own);
    for (;;) {
        bool done = false;
        CD_TRY(cd_gpu_event_done(event, &done));
        if (done)
            return CD_OK;
        cd_status status = cd_waiter_turn(&waiter);
        if (status == CD_TIMED_OUT)
            return cd_fail(CD_WAIT_EXPIRED, "%s is still running on the GPU", cd_kind_name((cd_kind)event->op.kind));
        if (status != CD_OK)
            return status;
    }
}

cd_status cd_gpu_event_join_stream(cd_event *event, void *stream)
{
    cd_gpu_backend *b = event->backend;
    if (atomic_load_explicit(&event->state, memory_order_acquire) == CD_EVENT_PENDING)
        return cd_fail(CD_BAD_ARGUMENT, "%s belongs to a coalesced group that has not ended yet",
                       cd_kind_name((cd_kind)event->op.kind));
    CD_TRY(cd_cause_check(b->team->cause)); /* published a moment before the abort */
    if (atomic_load_explicit(&b->aborted, memory_order_acquire))
        return cd_gpu_cause(b);
    bool pushed;
    CD_TRY(cd_gpu_enter(&b->gpu, &pushed));
    cd_cu_result result = b->driver.stream_wait_event(stream, event->cu, 0);
    cd_gpu_leave(&b->gpu, pushed);
    return cd_driver_check(&b->driver, result, "cuStreamWaitEvent");
}

void cd_gpu_event_free(cd_event *event)
{
    if (!event)
        return;
    cd_gpu_backend *b = event->backend;
    cd_gpu_event_unref(event);
    cd_gpu_backend_unref(b);
}
