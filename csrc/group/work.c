#include "group/stall.h"
#include "group/work_impl.h"

#include "base/host.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Copies spans and dims of a block list behind each other into `next`; returns the end. */
static char *copy_blocks(cd_blocks *blocks, int world, char *next)
{
    cd_span *list = (cd_span *)next;
    next += (size_t)blocks->spans * sizeof *list;
    for (int i = 0; i < blocks->spans; i++)
        list[i] = blocks->list[i];
    if (blocks->counts) {
        size_t bytes = (size_t)world * sizeof *blocks->counts;
        memcpy(next, blocks->counts, bytes);
        blocks->counts = (const size_t *)next;
        next += bytes;
    }
    for (int i = 0; i < blocks->spans; i++)
        if (list[i].dims) {
            memcpy(next, list[i].dims, sizeof *list[i].dims);
            list[i].dims = (const cd_dims *)next;
            next += sizeof *list[i].dims;
        }
    blocks->list = list;
    return next;
}

static size_t blocks_bytes(const cd_blocks *blocks, int world)
{
    size_t bytes = (size_t)blocks->spans * sizeof(cd_span);
    if (blocks->counts)
        bytes += (size_t)world * sizeof *blocks->counts;
    for (int i = 0; i < blocks->spans; i++)
        bytes += blocks->list[i].dims ? sizeof(cd_dims) : 0;
    return bytes;
}

/* Lists of an operation with one input and one output, such as all messages. Works with no more are used again: many messages
 * under way at once are more than malloc keeps at hand, and it took a tenth of the time of 64 of 4 B each way (2-core Xeon). */
#define USUAL_BYTES (2 * sizeof(cd_span))
#define SPARES_MOST 128

static cd_work *take_spare(cd_group *group)
{
    pthread_mutex_lock(&group->spares_lock);
    cd_work *work = group->spares;
    if (work) {
        group->spares = work->next;
        group->spare_count--;
    }
    pthread_mutex_unlock(&group->spares_lock);
    return work;
}

/* The last touch of a work. Frees it in a forked child, where a thread that is not there may hold the lock. */
static void free_memory(cd_work *work)
{
    cd_group *group = work->group;
    bool keep = false;
    if (work->is_usual && !cd_world_forked(group->world)) {
        pthread_mutex_lock(&group->spares_lock);
        keep = group->spare_count < SPARES_MOST;
        if (keep) {
            work->next = group->spares;
            group->spares = work;
            group->spare_count++;
        }
        pthread_mutex_unlock(&group->spares_lock);
    }
    if (!keep)
        free(work);
    cd_group_release(group);
}

void cd_spares_free(cd_group *group)
{
    for (cd_work *work = group->spares, *next; work; work = next) {
        next = work->next;
        free(work);
    }
}

cd_status cd_work_create(cd_group *group, const cd_op *op, uint64_t timeout_ns, cd_work **out)
{
    /* The lists lie behind the work. */
    size_t bytes = blocks_bytes(&op->in, group->size) + blocks_bytes(&op->out, group->size);
    bool is_usual = bytes <= USUAL_BYTES;
    cd_work *work = is_usual ? take_spare(group) : NULL;
    if (!work)
        work = malloc(sizeof *work + (is_usual ? USUAL_BYTES : bytes));
    if (!work)
        return cd_fail(CD_NO_MEMORY, "no memory to queue %s", cd_kind_name(op->kind));
    memset(work, 0, offsetof(cd_work, error)); /* which is a kilobyte and read after failures only */
    work->is_usual = is_usual;
    atomic_init(&work->refs, 1);
    work->group = cd_group_retain(group);
    work->op = *op;
    if (bytes)
        copy_blocks(&work->op.out, group->size, copy_blocks(&work->op.in, group->size, (char *)(work + 1)));
    work->timeout_ns = timeout_ns;
    work->queued_ns = cd_now_ns();
    *out = work;
    return CD_OK;
}

cd_work *cd_work_retain(cd_work *work)
{
    atomic_fetch_add_explicit(&work->refs, 1, memory_order_relaxed);
    return work;
}

/* By a forked child: nothing of it goes on here, and what moves it (connections, rings, locks) is the parent's. */
static bool is_inherited(const cd_work *work)
{
    return cd_world_forked(work->group->world);
}

static void destroy(cd_work *work)
{
    if (work->event && !is_inherited(work))
        work->event_ops->event_free(work->event);
    if (work->release_owner)
        work->release_owner(work->owner);
    cd_xfer_clear(&work->xfer);
    free(work->packed);
    free_memory(work);
}

static bool uses_memory_alone(cd_work *work)
{
    return (work->is_p2p || (work->event && !work->joined)) &&
           atomic_load_explicit(&work->refs, memory_order_acquire) == 1;
}

void cd_work_release(cd_work *work)
{
    if (!work)
        return;
    /* A transfer that still moves, or a GPU that is still at work and that nothing was made to wait for, uses this memory: the
     * group keeps it until it is through. The last holder's view of `done` is enough, since only the completion could change it,
     * and asking takes no reference. */
    if (!is_inherited(work) && uses_memory_alone(work) && !cd_work_is_done(work)) {
        cd_group *group = work->group;
        pthread_mutex_lock(&group->orphans_lock);
        bool keep = !atomic_load_explicit(&group->closed, memory_order_acquire);
        if (keep) {
            work->next = atomic_load_explicit(&group->orphans, memory_order_relaxed);
            atomic_store_explicit(&group->orphans, work, memory_order_relaxed);
        }
        pthread_mutex_unlock(&group->orphans_lock);
        if (keep)
            return;
        if (work->is_p2p)
            cd_mesh_cancel(group->world->mesh, &work->xfer);
    }
    if (atomic_fetch_sub_explicit(&work->refs, 1, memory_order_acq_rel) == 1)
        destroy(work);
}

void cd_work_set_owner(cd_work *work, void *owner, void (*release)(void *owner))
{
    work->owner = owner;
    work->release_owner = release;
}

void cd_work_complete(cd_work *work, cd_status status)
{
    work->status = status;
    if (status != CD_OK)
        work->error = *cd_last_error();
    work->done_ns = cd_now_ns();
    /* Who ran for less than this knows when it ended from when it began. */
    bool waited = work->done_ns - work->queued_ns > CD_NS_PER_MS;
    if (work->record)
        cd_record_end(work->record, work->ticket, status == CD_OK, waited);
    bool is_p2p = work->is_p2p;
    /* Release: who sees done sees the fields above and the data. */
    atomic_store_explicit(&work->done, 1, memory_order_release);
    if (!is_p2p) /* who waits for a message moves it, or sleeps in the mesh */
        cd_bell_ring(&work->bell);
}

static bool poll_event(cd_work *work)
{
    bool done = false;
    cd_status status = work->event_ops->event_done(work->event, &done);
    if (status == CD_OK && !done)
        return false;
    uint32_t free_right = 0;
    if (atomic_compare_exchange_strong_explicit(&work->finishing, &free_right, 1, memory_order_acq_rel, memory_order_acquire))
        cd_work_complete(work, status == CD_OK ? CD_OK : cd_group_settle(work->group, &work->op, status));
    return atomic_load_explicit(&work->done, memory_order_acquire) != 0;
}

bool cd_work_is_done(cd_work *work)
{
    if (atomic_load_explicit(&work->done, memory_order_acquire))
        return true;
    if (is_inherited(work))
        return false;
    if (work->event)
        return poll_event(work);
    return work->is_p2p && cd_mesh_test(work->group->world->mesh, &work->xfer) && cd_p2p_finish(work);
}

/* The failure of a complete work, which its owner knows from here on. */
static cd_status fail_done(cd_work *work)
{
    if (work->is_p2p && !is_inherited(work))
        cd_mesh_tell(work->group->world->mesh, &work->xfer);
    return cd_fail_with(&work->error);
}

cd_status cd_work_status(cd_work *work)
{
    return !cd_work_is_done(work) || work->status == CD_OK ? CD_OK : fail_done(work);
}

static cd_status wait_message(cd_work *work, cd_patience *patience)
{
    cd_group *g = work->group;
    cd_xfer *xfer = &work->xfer;
    cd_watch watch;
    patience->cause = g->cause;
    patience->gone = g->world->gone;
    /* Nobody else watches over a message: who sets no limit to the wait gets the one it was issued with. */
    if (patience->deadline.at_ns == UINT64_MAX)
        patience->deadline = cd_deadline_after_ns(work->timeout_ns);
    cd_watch_begin(&watch, g, &work->op, work->op.peer < 0 ? -2 : g->world_ranks[work->op.peer], patience);
    cd_status status = cd_mesh_wait(g->world->mesh, &xfer, 1, patience);
    cd_watch_end(&watch, patience);
    if (atomic_load_explicit(&xfer->done, memory_order_acquire) && cd_p2p_finish(work))
        return CD_OK;
    if (status == CD_PEER_LOST || status == CD_ABORTED)
        return cd_p2p_explain(g, &work->op, status);
    if (status != CD_TIMED_OUT)
        return status;
    cd_error missing = *cd_last_error();
    char late[640];
    int rank = cd_watch_blame(&watch, missing.rank, late, sizeof late);
    return cd_fail_rank(CD_TIMED_OUT, rank, "%s; %s", missing.text, late);
}

static cd_status wait_done(cd_work *work, cd_patience *patience)
{
    if (work->event) {
        cd_status status = work->event_ops->event_wait_host(work->event, patience);
        if (status == CD_OK || cd_status_is_sticky(status))
            poll_event(work);
        return status;
    }
    if (work->is_p2p)
        return wait_message(work, patience);
    CD_TRY(cd_group_refuse_nested(work->group, work->op.kind));
    /* Each rank has a worker that needs the core more than we do, who only wait for it: where cores are fewer than both, sleep
     * at once. */
    patience->bell = &work->bell;
    if (2 * cd_world_local_size(work->group->world) > cd_host_cores())
        patience->spin = patience->yields = 0;
    return cd_wait_at_least(&work->done, 1, -1, patience);
}

static cd_status explain_expired(const cd_work *work)
{
    char late[900] = "";
    if (work->is_p2p)
        snprintf(late, sizeof late, "; %.890s", cd_last_error()->text);
    return cd_fail_rank(CD_WAIT_EXPIRED, cd_last_error()->rank, "%s: not complete yet, the operation goes on%s",
                        cd_kind_name(work->op.kind), late);
}

cd_status cd_work_wait(cd_work *work, const cd_patience *patience)
{
    if (!cd_work_is_done(work)) {
        if (is_inherited(work))
            return cd_world_refuse_fork(work->group->world);
        cd_patience mine = *patience;
        /* No worker ends a message at its deadline. It counts from here, since a receive may be posted long before. */
        if (work->is_p2p && mine.deadline.at_ns == CD_NEVER.at_ns)
            mine.deadline = cd_deadline_after_ns(work->timeout_ns);
        cd_status status = wait_done(work, &mine);
        if (status == CD_TIMED_OUT && !cd_work_is_done(work))
            return explain_expired(work);
        if (status != CD_OK && !cd_work_is_done(work))
            return status;
    }
    return work->status == CD_OK ? CD_OK : fail_done(work);
}

cd_status cd_work_join_stream(cd_work *work, void *stream, const cd_patience *patience)
{
    if (!work->event || is_inherited(work))
        return cd_work_wait(work, patience);
    CD_TRY(cd_work_status(work));
    CD_TRY(work->event_ops->event_join_stream(work->event, stream));
    work->joined = true; /* who frees the memory in that stream's order comes after us */
    return CD_OK;
}

const cd_op *cd_work_op(const cd_work *work)
{
    return &work->op;
}

int cd_work_source(const cd_work *work)
{
    return atomic_load_explicit(&work->done, memory_order_acquire) ? work->xfer.source : -1;
}

uint64_t cd_work_duration_ns(const cd_work *work)
{
    return atomic_load_explicit(&work->done, memory_order_acquire) ? work->done_ns - work->started_ns : 0;
}
