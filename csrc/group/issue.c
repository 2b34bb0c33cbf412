/* Running and queueing of operations: in the caller's thread when nothing is before them, else by the group's worker. */
#include "group/stall.h"
#include "group/work_impl.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

cd_status cd_group_check_fork(const cd_group *g)
{
    return cd_world_forked(g->world) ? cd_world_refuse_fork(g->world) : CD_OK;
}

cd_status cd_group_refuse(cd_group *g)
{
    CD_TRY(cd_group_check_fork(g));
    if (atomic_load_explicit(&g->closed, memory_order_acquire))
        return cd_fail_rank(CD_ABORTED, g->world->rank, CD_DESTROYED_TEXT);
    return cd_cause_check(g->cause);
}

cd_status cd_group_status(cd_group *g)
{
    return cd_group_refuse(g);
}

/* One look at all reasons not to start. The second half of a cache line of flags that hardly ever change. */
static inline bool is_usable(const cd_group *g)
{
    return cd_likely(atomic_load_explicit(g->alive, memory_order_relaxed) &&
                     !atomic_load_explicit(&g->closed, memory_order_relaxed) &&
                     atomic_load_explicit(&g->cause->state, memory_order_relaxed) == CD_CAUSE_NONE);
}

/* Who fails because of another rank's end leaves too, and its closed connection may be seen before the news of the first. */
#define FIRST_CAUSE_NS (300 * CD_NS_PER_MS)
/* Who leaves tells why first; another thread may be about to publish it. */
#define LEFT_CAUSE_NS (20 * CD_NS_PER_MS)

/* Whether the error says so already: by a word in the group's own memory, also of a rank that left this group alone. */
static bool says_that_it_left(const cd_error *error)
{
    char begin[48];
    snprintf(begin, sizeof begin, "rank %d left the group", error->rank);
    return strncmp(error->text, begin, strlen(begin)) == 0;
}

cd_status cd_group_first_cause(cd_group *g, cd_status status)
{
    cd_error error = *cd_last_error();
    int peer = error.rank;
    bool known = peer >= 0 && peer < g->world->world;
    cd_world *w = g->world;
    /* Once for each peer, and not when the group is closed: then nobody will be told. */
    bool waits = !(known && atomic_load_explicit(&w->unexplained[peer], memory_order_relaxed)) &&
                 !atomic_load_explicit(&g->closed, memory_order_acquire);
    bool caused = false, gone = says_that_it_left(&error), told = gone;
    cd_deadline grace = cd_deadline_after_ns(!waits ? 0 : told ? LEFT_CAUSE_NS : FIRST_CAUSE_NS);
    for (;;) {
        /* Acquire, and before the cause is looked at: a cause that made the rank leave is told before its goodbye. */
        bool is_gone = told || (known && atomic_load_explicit(&w->gone[peer], memory_order_acquire));
        if (is_gone && !gone && waits)
            grace = cd_deadline_after_ns(LEFT_CAUSE_NS);
        gone = is_gone;
        caused = atomic_load_explicit(&g->cause->state, memory_order_acquire) != CD_CAUSE_NONE;
        if (caused || cd_deadline_passed(grace))
            break;
        cd_sleep_ns(CD_NS_PER_MS / 4);
    }
    if (caused && cd_cause_check(g->cause) != CD_OK)
        return cd_last_error()->code;
    if (known)
        atomic_store_explicit(&w->unexplained[peer], 1, memory_order_relaxed);
    if (gone && !told)
        return cd_fail_rank(CD_PEER_LOST, peer, "rank %d left the group: %s", peer, error.text);
    if (!gone && known && status == CD_PEER_LOST && peer != w->rank)
        return cd_fail_rank(CD_PEER_LOST, peer, "%s; no word of the end of rank %d has come: the connection may have been cut",
                            error.text, peer);
    cd_fail_with(&error);
    return status;
}

/* "all_reduce (sequence 7)", "send"; an operation that was cut off in the queue has no number yet. */
static const char *place_of(const cd_op *op, char *out, size_t bytes)
{
    if (op->sequence)
        snprintf(out, bytes, "%s (sequence %llu)", cd_kind_name(op->kind), (unsigned long long)op->sequence);
    else
        snprintf(out, bytes, "%s%s", cd_kind_name(op->kind), op->kind >= CD_SEND ? "" : " (queued)");
    return out;
}

static cd_status name_place(const cd_group *g, const cd_op *op)
{
    char place[64];
    return cd_fail_prefix("rank %d in %s: ", g->world->rank, place_of(op, place, sizeof place));
}

/* For an operation that has no place in any order yet. */
static cd_status refuse(cd_group *g, cd_kind kind)
{
    cd_status status = cd_group_refuse(g);
    if (status == CD_ABORTED && atomic_load_explicit(&g->closed, memory_order_acquire))
        cd_fail_prefix("rank %d in %s: ", g->world->rank, cd_kind_name(kind));
    return status;
}

cd_status cd_group_settle(cd_group *g, const cd_op *op, cd_status status)
{
    char place[64];
    if (status == CD_OK)
        return CD_OK;
    cd_error error = *cd_last_error();
    if (status == CD_INTERRUPTED) {
        cd_error why = {.code = CD_ABORTED, .rank = g->world->rank};
        snprintf(why.text, sizeof why.text, "rank %d was interrupted in %s", g->world->rank,
                 place_of(op, place, sizeof place));
        cd_group_abort(g, &why);
        return cd_fail_with(&error);
    }
    if (!cd_status_is_sticky(status))
        return status;
    bool by_peer = status == CD_PEER_LOST || status == CD_ABORTED;
    if (by_peer && !atomic_load_explicit(&g->closed, memory_order_acquire)) {
        status = cd_group_first_cause(g, status);
        error = *cd_last_error();
    }
    if (atomic_load_explicit(&g->cause->state, memory_order_acquire) == CD_CAUSE_NONE &&
        !atomic_load_explicit(&g->closed, memory_order_acquire)) {
        name_place(g, op);
        error = *cd_last_error();
        error.code = status;
        cd_group_abort(g, &error);
    }
    /* The first cause speaks on all ranks alike. */
    if (!atomic_load_explicit(&g->closed, memory_order_acquire)) {
        cd_status cause = cd_cause_check(g->cause);
        if (cause != CD_OK)
            return cause;
    }
    cd_fail_with(&error);
    return status == CD_ABORTED ? name_place(g, op) : status;
}

static cd_status run_on_backend(cd_group *g, const cd_op *op, const cd_patience *patience)
{
    if (cd_unlikely(op->device == CD_CUDA)) {
        cd_backend *gpu = cd_group_gpu(g);
        if (!gpu)
            return cd_fail(CD_UNSUPPORTED, "%s: this group has no GPU backend", cd_kind_name(op->kind));
        return gpu->ops->run(gpu, op, patience);
    }
    return g->cpu->ops->run(g->cpu, op, patience);
}

/* Who is missing, told once by the rank that finds that the time is up. */
static void add_missing(const cd_watch *watch)
{
    cd_error error = *cd_last_error();
    char text[640];
    int behind = cd_watch_first_missing(watch, error.rank);
    if (behind != error.rank)
        snprintf(error.text, sizeof error.text, "rank %d is behind: it did not come or go on before the deadline", behind);
    cd_watch_describe(watch, behind, text, sizeof text);
    cd_fail_rank(error.code, behind, "%s; %s", error.text, text);
}

/* A rank of the host that has not yet seen the end may still be writing to an output that lies in the arena: whoever gets its
 * memory next would find that in it. */
static void retire_outputs(cd_group *g, const cd_op *op)
{
    cd_arena *arena = g->shm ? cd_world_arena(g->world) : NULL;
    for (int i = 0; arena && i < op->out.spans; i++)
        cd_arena_retire(arena, op->out.list[i].data);
}

static bool is_message(const cd_op *op)
{
    return op->kind == CD_SEND || op->kind == CD_RECV;
}

/* Collectives have numbers, which all ranks give alike; messages, of which the other ranks know nothing, have none. */
static void count(cd_group *g, cd_op *op)
{
    op->sequence = is_message(op) ? 0 : ++g->sequence;
}

cd_status cd_group_execute(cd_group *g, cd_op *op, cd_patience *patience, cd_record *record, uint64_t ticket)
{
    count(g, op);
    if (record) {
        cd_record_start(record, ticket, op->sequence);
    } else {
        record = cd_record_begin(g->page, op, g->context, op->root, CD_RECORD_RUNNING);
        ticket = atomic_load_explicit(&record->ticket, memory_order_relaxed);
    }
    cd_watch watch;
    cd_watch_begin(&watch, g, op, is_message(op) && op->peer >= 0 ? g->world_ranks[op->peer] : -1, patience);
    patience->cause = g->template.cause;
    patience->gone = g->template.gone;
    patience->world_ranks = g->template.world_ranks;
    patience->spin = g->template.spin;
    patience->yields = g->template.yields;
    cd_status status = run_on_backend(g, op, patience);
    if (cd_unlikely(status != CD_OK)) {
        if (status == CD_TIMED_OUT && !is_message(op) &&
            atomic_load_explicit(&g->cause->state, memory_order_acquire) == CD_CAUSE_NONE)
            add_missing(&watch);
        status = cd_group_settle(g, op, status);
        if (status == CD_INTERRUPTED || cd_status_is_sticky(status))
            retire_outputs(g, op);
    }
    cd_record_end(record, ticket, status == CD_OK, watch.started_ns != 0);
    cd_watch_end(&watch, patience);
    return status;
}

/* ---- the right to run ---- */

/* Its address tells the threads of this process apart. */
static _Thread_local char this_thread;

/* An uncontended exchange: the one atomic read-modify-write on the way of an operation; it lets several threads use a group. */
static inline bool try_claim(cd_group *g)
{
    if (atomic_exchange_explicit(&g->busy, 1, memory_order_acquire) != 0)
        return false;
    atomic_store_explicit(&g->holder, &this_thread, memory_order_relaxed);
    return true;
}

/* Release: the next owner sees `sequence` and the backend's state. */
static inline void give_back(cd_group *g)
{
    atomic_store_explicit(&g->holder, NULL, memory_order_relaxed);
    atomic_store_explicit(&g->busy, 0, memory_order_release);
}

static bool is_worker(cd_group *g)
{
    pthread_mutex_lock(&g->queue_lock);
    bool is = g->worker_runs && pthread_equal(g->worker, pthread_self());
    pthread_mutex_unlock(&g->queue_lock);
    return is;
}

cd_status cd_group_refuse_nested(cd_group *g, cd_kind kind)
{
    const char *name = cd_kind_name(kind);
    char before[48] = "an operation";
    cd_record_view running;
    /* Relaxed: only this thread writes its own address, and takes it away. */
    if (atomic_load_explicit(&g->holder, memory_order_relaxed) == &this_thread) {
        if (cd_record_find(g->page, g->context, &running))
            cd_record_name(&running, before, sizeof before);
        return cd_fail_rank(CD_NESTED, g->world->rank,
                            "rank %d in %s: this thread is still in %s of the same group, which would wait for itself; a signal "
                            "handler, __del__ or callback that runs meanwhile should only note what is to be done afterwards",
                            g->world->rank, name, before);
    }
    if (is_worker(g))
        return cd_fail_rank(CD_NESTED, g->world->rank,
                            "rank %d in %s: this thread runs the group's queued operations and would wait for itself; the "
                            "__del__ of an array should make no collective call", g->world->rank, name);
    return CD_OK;
}

/* ---- behind the queue ---- */

static cd_status issue(cd_group *g, const cd_op *op, uint64_t timeout_ns, cd_deadline latest, const cd_patience *look,
                       cd_work **out);

static bool has_begun(const cd_work *work)
{
    return atomic_load_explicit(&work->begun, memory_order_relaxed); /* for a text and a second's patience: orders nothing */
}

/* The time is up while operations before this one are not through: the rank that the one that runs waits for is at fault. */
static cd_status fail_behind(cd_group *g, cd_kind kind)
{
    cd_record_view running;
    cd_fail(CD_TIMED_OUT, "the deadline of %s passed while operations before it were not complete", cd_kind_name(kind));
    if (!cd_record_find(g->page, g->context, &running))
        return CD_TIMED_OUT;
    const cd_op before = {.kind = CD_BARRIER, .root = -1, .sequence = running.sequence};
    const cd_watch watch = {.group = g, .op = &before, .peer = -1, .started_ns = running.started_ns};
    add_missing(&watch);
    return CD_TIMED_OUT;
}

/* The group ends with what ended the wait, and the caller's arrays are its own again when the worker has let go of them. With a
 * cause in place each operation before this one ends at its next look, and this one is refused or ends at its own: what remains
 * to wait for is work in memory, as if the caller had run the operation itself. Hence no deadline and no look at signals, whose
 * handlers must not run while the exception of the first one is under way. */
static cd_status give_up(cd_group *g, const cd_op *op, cd_work *work, const cd_patience *patience, cd_status status)
{
    if (status == CD_WAIT_EXPIRED)
        status = has_begun(work) ? cd_fail(CD_TIMED_OUT, "%s did not end at its deadline", cd_kind_name(op->kind))
                                 : fail_behind(g, op->kind);
    status = cd_group_settle(g, op, status);
    cd_error why = *cd_last_error();
    /* An interrupted caller may hold what the worker needs before it comes to us (Python: the GIL, to let go of arrays). */
    if (status == CD_INTERRUPTED && patience->idle)
        (void)patience->idle(patience->idle_ctx);
    cd_patience still = cd_patience_until(CD_NEVER, g->size);
    still.bell = &work->bell;
    if (cd_wait_at_least(&work->done, 1, -1, &still) == CD_OK)
        cd_fail_with(&why);
    return status;
}

static cd_status run_behind_queue(cd_group *g, const cd_op *op, const cd_patience *patience)
{
    cd_work *work;
    CD_TRY(cd_group_refuse_nested(g, op->kind));
    CD_TRY(issue(g, op, cd_deadline_left_ns(patience->deadline), patience->deadline, patience, &work));
    cd_status status = cd_work_wait(work, patience);
    if (status == CD_WAIT_EXPIRED && has_begun(work)) {
        /* Its own deadline, which is the same, ends it with an error that says more. */
        cd_patience longer = *patience;
        longer.deadline = cd_deadline_after_ns(CD_NS_PER_S);
        status = cd_work_wait(work, &longer);
    }
    bool done = cd_work_is_done(work);
    if (!done && op->device == CD_CPU)
        status = give_up(g, op, work, patience, status);
    else if (!done)
        cd_group_settle(g, op, status == CD_INTERRUPTED ? status : CD_TIMED_OUT);
    else if (status == CD_WAIT_EXPIRED) /* it ended just after the look */
        status = cd_work_status(work);
    cd_work_release(work);
    return status;
}

cd_status cd_group_run(cd_group *g, cd_op *op, cd_patience *patience)
{
    if (!is_usable(g))
        CD_TRY(refuse(g, op->kind));
    if (is_message(op) && op->device == CD_CPU)
        return cd_p2p_run(g, op, patience);
    if (cd_likely(atomic_load_explicit(&g->pending, memory_order_acquire) == 0 && try_claim(g))) {
        cd_status status = cd_group_execute(g, op, patience, NULL, 0);
        give_back(g);
        return status;
    }
    return run_behind_queue(g, op, patience);
}

bool cd_group_is_quick(cd_group *g, const cd_op *op)
{
    if (op->device != CD_CPU)
        return false;
    if (op->kind >= CD_SEND)
        return cd_record_op_bytes(op) <= CD_MESH_EAGER; /* a copy; who must wait drops the GIL after its spin */
    return g->cpu->ops->is_quick(g->cpu, op);
}

/* ---- the worker ---- */

static void run_queued(cd_group *g, cd_work *work)
{
    work->started_ns = cd_now_ns();
    atomic_store_explicit(&work->begun, true, memory_order_relaxed);
    cd_deadline own = cd_deadline_after_ns(work->timeout_ns);
    cd_patience patience = cd_patience_until(own.at_ns < work->latest.at_ns ? own : work->latest, g->size);
    cd_status status = refuse(g, work->op.kind);
    if (status == CD_OK) {
        /* A caller that runs an operation of its own in another thread has it for at most that operation. */
        cd_waiter waiter = cd_waiter_start(&patience);
        while (status == CD_OK && !try_claim(g))
            status = cd_waiter_turn(&waiter);
        if (status == CD_OK) {
            status = cd_group_execute(g, &work->op, &patience, work->record, work->ticket);
            give_back(g);
        } else if (status == CD_TIMED_OUT) {
            status = fail_behind(g, work->op.kind);
        }
    }
    cd_work_complete(work, status);
    /* Release after done: who sees 0 pending sees the work complete. */
    atomic_fetch_sub_explicit(&g->pending, 1, memory_order_release);
    cd_work_release(work);
}

static void *worker_main(void *arg)
{
    cd_group *g = arg;
    for (;;) {
        pthread_mutex_lock(&g->queue_lock);
        while (!g->queue_head && !g->worker_stop)
            pthread_cond_wait(&g->queue_filled, &g->queue_lock);
        cd_work *work = g->queue_head;
        if (work) {
            g->queue_head = work->next;
            if (!g->queue_head)
                g->queue_tail = 0;
        }
        pthread_mutex_unlock(&g->queue_lock);
        if (!work)
            return 0;
        run_queued(g, work);
    }
}

static cd_status start_worker(cd_group *g)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&g->worker, 0, worker_main, g);
    pthread_sigmask(SIG_SETMASK, &before, 0);
    if (error)
        return cd_fail_errno(CD_NO_MEMORY, error,
                             "cannot start the group's worker thread (see ulimit -u, and pids.max of the container)");
    g->worker_runs = true;
    return CD_OK;
}

static cd_status push(cd_group *g, cd_work *work)
{
    pthread_mutex_lock(&g->queue_lock);
    cd_status status = g->worker_stop ? cd_fail_rank(CD_ABORTED, g->world->rank, CD_DESTROYED_TEXT) : CD_OK;
    if (status == CD_OK && !g->worker_runs)
        status = start_worker(g);
    if (status == CD_OK) {
        work->next = 0;
        if (g->queue_tail)
            g->queue_tail->next = work;
        else
            g->queue_head = work;
        g->queue_tail = work;
        atomic_fetch_add_explicit(&g->pending, 1, memory_order_relaxed);
        pthread_cond_signal(&g->queue_filled);
    }
    pthread_mutex_unlock(&g->queue_lock);
    return status;
}

void cd_queue_stop(cd_group *g)
{
    pthread_mutex_lock(&g->queue_lock);
    bool runs = g->worker_runs;
    g->worker_stop = true;
    g->worker_runs = false;
    pthread_cond_broadcast(&g->queue_filled);
    pthread_mutex_unlock(&g->queue_lock);
    /* Queued works are refused one by one (the group is closed), the running one ends at its next look. */
    if (runs && !cd_world_forked(g->world))
        pthread_join(g->worker, 0);
}

/* `look`: whose idle is called meanwhile, or NULL. */
static cd_status start_on_gpu(cd_group *g, cd_work *work, const cd_patience *look)
{
    cd_backend *gpu = cd_group_gpu(g);
    if (!gpu)
        return cd_fail(CD_UNSUPPORTED, "%s: this group has no GPU backend", cd_kind_name(work->op.kind));
    if (atomic_load_explicit(&g->orphans, memory_order_relaxed))
        cd_orphans_reap(g, false);
    cd_patience patience = cd_patience_until(cd_deadline_after_ns(work->timeout_ns), g->size);
    patience.cause = g->cause;
    if (look) {
        patience.idle = look->idle;
        patience.idle_ctx = look->idle_ctx;
    }
    cd_waiter waiter = cd_waiter_start(&patience);
    while (!try_claim(g)) {
        CD_TRY(cd_group_refuse_nested(g, work->op.kind));
        CD_TRY(cd_waiter_turn(&waiter));
    }
    count(g, &work->op);
    work->started_ns = cd_now_ns();
    cd_record_start(work->record, work->ticket, work->op.sequence);
    work->event_ops = gpu->ops;
    cd_status status = gpu->ops->start(gpu, &work->op, &patience, &work->event);
    if (status != CD_OK)
        status = cd_group_settle(g, &work->op, status);
    give_back(g);
    return status;
}

static cd_status issue(cd_group *g, const cd_op *op, uint64_t timeout_ns, cd_deadline latest, const cd_patience *look,
                       cd_work **out)
{
    CD_TRY(refuse(g, op->kind));
    cd_work *work;
    CD_TRY(cd_work_create(g, op, timeout_ns, &work));
    work->latest = latest;
    bool is_p2p = is_message(op);
    int peer = !is_p2p ? op->root : op->peer < 0 ? -1 : g->world_ranks[op->peer];
    bool begins = is_p2p && op->device != CD_CUDA;
    work->record = cd_record_begin(g->page, op, g->context, peer, begins ? CD_RECORD_RUNNING : CD_RECORD_QUEUED);
    work->ticket = atomic_load_explicit(&work->record->ticket, memory_order_relaxed);
    cd_status status;
    if (op->device == CD_CUDA) {
        status = start_on_gpu(g, work, look);
    } else if (is_p2p) {
        status = cd_p2p_start(g, work);
    } else {
        cd_work_retain(work); /* the queue's */
        status = push(g, work);
        if (status != CD_OK)
            cd_work_release(work);
    }
    if (status != CD_OK) {
        cd_work_release(work);
        return status;
    }
    *out = work;
    return CD_OK;
}

cd_status cd_group_issue(cd_group *g, const cd_op *op, uint64_t timeout_ns, cd_work **out)
{
    return issue(g, op, timeout_ns, CD_NEVER, NULL, out);
}

cd_status cd_group_issue_patiently(cd_group *g, const cd_op *op, uint64_t timeout_ns, const cd_patience *patience, cd_work **out)
{
    return issue(g, op, timeout_ns, CD_NEVER, patience, out);
}
