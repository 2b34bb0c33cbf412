/* A step of the reducer: begin, ready, finish. */
#include "ddp/reducer_impl.h"

#include "simd/reduce.h"

#include <stdlib.h>
#include <string.h>

/* How long finish reduces in place what comes, before it takes a rank for one that may not come. */
#define SHORTLY_NS (50 * CD_NS_PER_MS)

/* The flag of a bucket, or NULL where it has none. */
static char *flag_of(const cd_bucket *b)
{
    size_t bytes = b->count * cd_dtype_bytes(b->dtype);
    return b->memory->bytes > bytes ? b->memory->memory + bytes : 0;
}

/* A launch on a GPU holds the lock for as long as NCCL waits, and may want what the caller holds (Python's interpreter lock). */
static cd_status lock(cd_reducer *r, const cd_patience *patience)
{
    CD_TRY(cd_group_check_fork(r->group)); /* what another thread of the parent held stays locked */
    if (!patience) {
        pthread_mutex_lock(&r->lock);
        return CD_OK;
    }
    cd_waiter waiter = cd_waiter_start(patience);
    while (cd_unlikely(pthread_mutex_trylock(&r->lock) != 0))
        CD_TRY(cd_waiter_turn(&waiter));
    return CD_OK;
}

cd_status cd_reducer_begin(cd_reducer *r, cd_step step, const cd_patience *patience)
{
    if (cd_unlikely(r->under_way)) {
        /* The others wait for the rest of that step: they get zeros and the flag. */
        cd_status status = cd_reducer_finish(r, false, patience);
        if (status != CD_OK && status != CD_BAD_ARGUMENT)
            return status;
    }
    for (int i = 0; i < r->piece_count; i++) {
        cd_piece_of_bucket *p = &r->pieces[i];
        if (p->work) {
            cd_status status = cd_work_wait(p->work, patience);
            if (status == CD_WAIT_EXPIRED || status == CD_INTERRUPTED || status == CD_NESTED)
                return status;
            cd_work_release(p->work);
            p->work = 0;
        }
        atomic_store_explicit(&p->unready, p->params, memory_order_relaxed);
    }
    for (int k = 0; k < r->bucket_count; k++) {
        char *flag = flag_of(&r->buckets[k]);
        if (flag)
            memset(flag, 0, cd_dtype_bytes(r->buckets[k].dtype));
    }
    for (int i = 0; i < r->count; i++)
        atomic_store_explicit(&r->pending[i], r->uses[i], memory_order_relaxed);
    memset(r->missing, 0, (size_t)r->count);
    /* Relaxed above, release here: begin returns before any ready() of this step starts, in this thread or
     * in one that it starts, so the order is the caller's; the store only keeps the counters in front of
     * `ordered`. */
    atomic_store_explicit(&r->ordered, 0, memory_order_release);
    CD_TRY(lock(r, patience));
    r->step = step;
    r->next = r->reduced = 0;
    atomic_store_explicit(&r->first_launch_ns, 0, memory_order_relaxed); /* a time for statistics: orders nothing */
    pthread_mutex_unlock(&r->lock);
    return CD_OK;
}

/* Where a piece begins in memory, and how many elements it has with the flag where it holds that. */
static char *memory_of(const cd_reducer *r, const cd_piece_of_bucket *p, size_t *count_p)
{
    const cd_bucket *b = &r->buckets[p->bucket];
    bool is_last = p == &r->pieces[b->first + b->pieces - 1];
    *count_p = p->count + (is_last && flag_of(b) ? 1 : 0);
    return b->memory->memory + p->at * cd_dtype_bytes(b->dtype);
}

static void scale_piece(const cd_reducer *r, const cd_piece_of_bucket *p)
{
    size_t count;
    char *data = memory_of(r, p, &count);
    const void *in[1] = {data};
    cd_reduce_func multiply = cd_reduce_find(CD_PREMUL_SUM, r->buckets[p->bucket].dtype);
    if (multiply)
        multiply(data, in, 1, p->count, r->scale);
}

/* How this step's sum becomes the result. */
static cd_redop redop_of(const cd_reducer *r, cd_device device, double *factor_p)
{
    if (r->scaled && device != CD_CPU) { /* NCCL multiplies by each rank's own factor */
        *factor_p = r->scale;
        return CD_PREMUL_SUM;
    }
    bool plain = r->mode == CD_REDUCE_SUM || r->divisor == 1.0;
    bool average = !plain && r->divisor == (double)cd_group_size(r->group);
    *factor_p = plain || average ? 1.0 : 1.0 / r->divisor;
    return plain ? CD_SUM : average ? CD_AVG : CD_PREMUL_SUM;
}

static cd_status issue(cd_reducer *r, const cd_bucket *b, cd_piece_of_bucket *p, const cd_patience *patience)
{
    size_t item = cd_dtype_bytes(b->dtype), count;
    char *data = memory_of(r, p, &count);
    cd_span span = {.data = data, .count = count, .item_bytes = (uint32_t)item};
    double factor;
    cd_redop redop = redop_of(r, b->device, &factor);
    cd_op op = {
        .kind = CD_ALL_REDUCE,
        .dtype = b->dtype,
        .redop = redop,
        .device = b->device,
        .root = -1,
        .peer = -1,
        .factor = factor,
        .in = {.list = &span, .spans = 1},
        .out = {.list = &span, .spans = 1},
        .count = count,
        .item_bytes = (uint32_t)item,
        .ndim = 1,
        .shape = {(int64_t)count},
        .stream = r->stream,
    };
    CD_TRY(cd_group_issue_patiently(r->group, &op, cd_group_timeout_ns(r->group), patience, &p->work));
    cd_bucket_memory_retain(b->memory);
    cd_work_set_owner(p->work, b->memory, cd_bucket_memory_release);
    return CD_OK;
}

/* Starts the reduction of piece p; the lock is held. */
static cd_status launch(cd_reducer *r, cd_piece_of_bucket *p, const cd_patience *patience)
{
    cd_bucket *b = &r->buckets[p->bucket];
    if (r->scale != 1.0 && b->device == CD_CPU)
        scale_piece(r, p);
    if (!atomic_load_explicit(&r->first_launch_ns, memory_order_relaxed))
        atomic_store_explicit(&r->first_launch_ns, cd_now_ns(), memory_order_relaxed);
    if (!r->inplace)
        CD_TRY(issue(r, b, p, patience));
    r->launched += p == &r->pieces[b->first + b->pieces - 1];
    r->launched_bytes += p->count * cd_dtype_bytes(b->dtype);
    return CD_OK;
}

/* In place: what this rank has launched and all others too, it reduces; but for what it leaves to others. The lock is held. */
static void advance(cd_reducer *r)
{
    if (r->reduced == r->next)
        return;
    double factor;
    cd_redop redop = redop_of(r, CD_CPU, &factor);
    for (; r->reduced < r->next; r->reduced++) {
        const cd_piece_of_bucket *p = &r->pieces[r->reduced];
        if (p->left)
            continue;
        if (!cd_inplace_is_common(r->inplace, r->reduced))
            break;
        const cd_bucket *b = &r->buckets[p->bucket];
        size_t count, item = cd_dtype_bytes(b->dtype);
        (void)memory_of(r, p, &count);
        cd_inplace_reduce(r->inplace, r->reduced, p->bucket, p->at * item, count * item, item, cd_reduce_find(redop, b->dtype),
                          factor);
    }
}

/* In place: tells of the pieces from `from` on that this rank has launched. The last rank to complete a piece leaves it to those
 * before it: at the end all would wait for the one that is behind. Two ranks of one speed take turns, since what one reduces
 * lets the other come first. A step of benchmarks/ddp.py's models, 2 ranks on a 2-core EPYC with its cores apart, fixed halves
 * and so: 36.9 and 35.1 ms, 55.1 and 53.2, 143.4 and 139.2. The lock is held. */
static void publish(cd_reducer *r, int from)
{
    for (int i = from; i < r->next; i++) {
        r->under_way = true;
        r->pieces[i].left = cd_inplace_publish(r->inplace, i);
    }
}

/* Acquire: pairs with the decrement in complete(), so that the gradients of other threads are seen by
 * whoever launches. */
static bool is_full(const cd_piece_of_bucket *p)
{
    return atomic_load_explicit(&p->unready, memory_order_acquire) == 0;
}

static bool is_full_bucket(const cd_reducer *r, const cd_bucket *b)
{
    for (int i = 0; i < b->pieces; i++)
        if (!is_full(&r->pieces[b->first + i]))
            return false;
    return true;
}

/* Launches every full piece that has none unlaunched before it. Whoever fills a piece comes here after
 * filling it, so the last of them to take the lock sees all that are full: none is forgotten. */
static cd_status launch_full(cd_reducer *r, const cd_patience *patience)
{
    cd_status status = CD_OK;
    CD_TRY(lock(r, patience));
    int before = r->next;
    while (status == CD_OK && r->next < r->piece_count && is_full(&r->pieces[r->next])) {
        status = launch(r, &r->pieces[r->next], patience);
        if (status == CD_OK)
            r->next++;
    }
    if (r->inplace) {
        publish(r, before);
        advance(r);
    }
    pthread_mutex_unlock(&r->lock);
    return status;
}

/* Parameter is ready: counts it; true when its piece is full now. */
static bool complete(cd_reducer *r, int param)
{
    int at = atomic_fetch_add_explicit(&r->ordered, 1, memory_order_relaxed);
    r->order[at] = param;
    /* Acquire-release: each decrement hands the gradients before it to the next, the last one hands all to
     * the launcher. */
    cd_piece_of_bucket *p = &r->pieces[r->piece_of[param]];
    return atomic_fetch_sub_explicit(&p->unready, 1, memory_order_acq_rel) == 1;
}

cd_status cd_reducer_ready(cd_reducer *r, int param, const cd_patience *patience)
{
    if (cd_unlikely(param < 0 || param >= r->count))
        return cd_fail(CD_BAD_ARGUMENT, "reducer: there is no gradient %d among %d", param, r->count);
    /* Acquire-release: of several calls for one gradient the last goes on, and what the earlier ones wrote
     * goes with it. */
    int left = atomic_fetch_sub_explicit(&r->pending[param], 1, memory_order_acq_rel) - 1;
    if (left > 0 || (left < 0 && r->step == CD_STEP_LOCAL))
        return CD_OK;
    if (cd_unlikely(left < 0))
        return cd_fail(CD_BAD_ARGUMENT, "reducer: gradient %d was marked ready more often than expected in this step", param);
    bool full = complete(r, param);
    if (r->step == CD_STEP_REDUCE && (full || r->inplace))
        return launch_full(r, patience);
    return CD_OK;
}

bool cd_reducer_completes(const cd_reducer *r, int param)
{
    /* Acquire: pairs with complete(). */
    return r->step != CD_STEP_LOCAL && atomic_load_explicit(&r->pending[param], memory_order_relaxed) == 1 &&
           atomic_load_explicit(&r->pieces[r->piece_of[param]].unready, memory_order_acquire) == 1;
}

int cd_reducer_seen(const cd_reducer *r, int param)
{
    return r->uses[param] - atomic_load_explicit(&r->pending[param], memory_order_acquire);
}

int cd_reducer_next_full(cd_reducer *r)
{
    int found = -1;
    pthread_mutex_lock(&r->lock);
    if (r->step == CD_STEP_HANDOUT && r->next < r->bucket_count && is_full_bucket(r, &r->buckets[r->next]))
        found = r->next++;
    pthread_mutex_unlock(&r->lock);
    return found;
}

/* Zeros in place of a gradient that did not come. */
static void fill_one(cd_reducer *r, int param, bool expected)
{
    cd_bucket *b = &r->buckets[r->bucket_of[param]];
    if (b->device == CD_CPU)
        memset(cd_reducer_view(r, param), 0, r->params[param].count * cd_dtype_bytes(b->dtype));
    if (!expected) {
        r->missing[param] = 1;
        char *flag = flag_of(b);
        if (flag)
            memset(flag, 0xFF, cd_dtype_bytes(b->dtype)); /* NaN in every float type */
    }
    atomic_store_explicit(&r->pending[param], 0, memory_order_relaxed);
    complete(r, param);
}

static cd_status fill(cd_reducer *r, bool expected, const cd_patience *patience, int *filled_p)
{
    int filled = 0;
    for (int i = 0; i < r->count; i++) {
        if (atomic_load_explicit(&r->pending[i], memory_order_relaxed) > 0) {
            fill_one(r, i, expected);
            filled++;
        }
    }
    *filled_p = filled;
    return r->step == CD_STEP_REDUCE ? launch_full(r, patience) : CD_OK;
}

cd_status cd_reducer_fill(cd_reducer *r, bool expected, int *filled_p)
{
    return fill(r, expected, NULL, filled_p);
}

/* True when a bucket's sum says that some rank had no gradient. */
static bool is_flagged(const cd_bucket *b)
{
    const char *flag = flag_of(b);
    for (size_t i = 0; flag && i < cd_dtype_bytes(b->dtype); i++)
        if (flag[i])
            return true;
    return false;
}

/* An operation whose only purpose is that every rank comes to it. */
static cd_op meeting(uint8_t *byte, cd_span *span)
{
    *span = (cd_span){.data = byte, .count = 1, .item_bytes = 1};
    return (cd_op){
        .kind = CD_ALL_REDUCE,
        .dtype = CD_UINT8,
        .redop = CD_MAX,
        .device = CD_CPU,
        .root = -1,
        .peer = -1,
        .factor = 1.0,
        .in = {.list = span, .spans = 1},
        .out = {.list = span, .spans = 1},
        .count = 1,
        .item_bytes = 1,
        .ndim = 1,
        .shape = {1},
    };
}

static cd_status meet(cd_reducer *r, const cd_patience *patience)
{
    uint8_t byte = 0;
    cd_span span;
    cd_op op = meeting(&byte, &span);
    cd_patience mine = *patience;
    mine.deadline = cd_deadline_earlier(mine.deadline, cd_deadline_after_ns(cd_group_timeout_ns(r->group)));
    return cd_group_run(r->group, &op, &mine);
}

static cd_status issue_meeting(cd_reducer *r)
{
    uint8_t *byte = calloc(1, 1);
    if (!byte)
        return cd_fail(CD_NO_MEMORY, "reducer: no memory for an operation");
    cd_span span;
    cd_op op = meeting(byte, &span);
    cd_status status = cd_group_issue(r->group, &op, cd_group_timeout_ns(r->group), &r->meeting);
    if (status == CD_OK)
        cd_work_set_owner(r->meeting, byte, free);
    else
        free(byte);
    return status;
}

/* From now on nothing is left to others: of what is not taken they have as much to do as this rank. */
static void take_all(cd_reducer *r)
{
    pthread_mutex_lock(&r->lock);
    r->reduced = 0;
    for (int i = 0; i < r->piece_count; i++)
        r->pieces[i].left = false;
    pthread_mutex_unlock(&r->lock);
}

/* Reduces what comes while the other ranks are a little behind. CD_TIMED_OUT: one is far behind. */
static cd_status advance_together(cd_reducer *r, const cd_patience *patience)
{
    cd_patience mine = *patience;
    mine.deadline = cd_deadline_earlier(mine.deadline, cd_deadline_after_ns(SHORTLY_NS));
    cd_waiter waiter = cd_waiter_start(&mine);
    take_all(r);
    for (;;) {
        pthread_mutex_lock(&r->lock);
        int before = r->reduced;
        advance(r);
        bool all = r->reduced == r->piece_count, some = r->reduced > before;
        pthread_mutex_unlock(&r->lock);
        if (all)
            return CD_OK;
        if (some)
            cd_waiter_reset(&waiter);
        CD_TRY(cd_waiter_turn(&waiter));
    }
}

/* The end of a step in place. Everybody comes to two operations of the group: after the first all gradients are complete, so that
 * nobody needs to wait in a way of its own, with its own errors, for a rank that does not come; after the second all are
 * reduced. */
static cd_status finish_inplace(cd_reducer *r, const cd_patience *patience)
{
    cd_status status = r->meeting ? CD_TIMED_OUT : advance_together(r, patience);
    if (status == CD_OK) {
        CD_TRY(meet(r, patience));
    } else if (status == CD_TIMED_OUT) {
        /* By the worker, so that the wait can be left and taken up again. */
        if (!r->meeting)
            CD_TRY(issue_meeting(r));
        CD_TRY(cd_work_wait(r->meeting, patience));
        cd_work_release(r->meeting);
        r->meeting = 0;
    } else {
        return status;
    }
    pthread_mutex_lock(&r->lock);
    advance(r);
    pthread_mutex_unlock(&r->lock);
    CD_TRY(meet(r, patience));
    cd_inplace_end_step(r->inplace);
    r->under_way = false;
    return CD_OK;
}

static cd_status finish_operations(cd_reducer *r, const cd_patience *patience)
{
    for (int i = 0; i < r->piece_count; i++) {
        cd_piece_of_bucket *p = &r->pieces[i];
        if (!p->work)
            continue;
        CD_TRY(r->buckets[p->bucket].device == CD_CPU ? cd_work_wait(p->work, patience)
                                                      : cd_work_join_stream(p->work, r->stream, patience));
        cd_work_release(p->work);
        p->work = 0;
    }
    return CD_OK;
}

/* After the first reduced step, the same on all ranks: whether the next ones go in place. */
static cd_status choose_way(cd_reducer *r, const cd_patience *patience)
{
    r->asked = true;
    if (r->given_memory || strcmp(cd_group_transport(r->group), "shm") != 0)
        return CD_OK;
    cd_bucket_memory **list = calloc((size_t)r->bucket_count + 1, sizeof *list);
    if (!list)
        return cd_fail(CD_NO_MEMORY, "reducer: no memory for %d buckets", r->bucket_count);
    for (int k = 0; k < r->bucket_count; k++)
        list[k] = r->buckets[k].memory;
    cd_patience mine = *patience;
    mine.deadline = cd_deadline_earlier(mine.deadline, cd_deadline_after_ns(cd_group_timeout_ns(r->group)));
    cd_status status = cd_inplace_open(r->group, list, r->bucket_count, r->piece_count, &mine, &r->inplace);
    free(list);
    return status;
}

cd_status cd_reducer_finish(cd_reducer *r, bool unready_expected, const cd_patience *patience)
{
    if (r->step == CD_STEP_LOCAL)
        return CD_OK;
    int filled;
    CD_TRY(fill(r, unready_expected, patience, &filled));
    if (r->step == CD_STEP_HANDOUT)
        return CD_OK;
    CD_TRY(r->under_way ? finish_inplace(r, patience) : finish_operations(r, patience));
    if (!r->asked && r->piece_count)
        CD_TRY(choose_way(r, patience));
    bool flagged = false;
    for (int k = 0; k < r->bucket_count; k++)
        flagged = flagged || is_flagged(&r->buckets[k]);
    if (flagged)
        return cd_fail(CD_BAD_ARGUMENT, "reducer: at least one rank has no gradient for some parameters");
    return CD_OK;
}

cd_status cd_reducer_gather_missing(cd_reducer *r, uint8_t *missing, cd_patience *patience)
{
    return cd_group_gather_bytes(r->group, r->missing, (size_t)r->count, missing, patience);
}

const int *cd_reducer_ready_order(const cd_reducer *r, int *count_p)
{
    *count_p = atomic_load_explicit(&r->ordered, memory_order_acquire);
    return r->order;
}

uint64_t cd_reducer_first_launch_ns(const cd_reducer *r)
{
    return atomic_load_explicit(&r->first_launch_ns, memory_order_relaxed);
}

void cd_reducer_launched(const cd_reducer *r, uint64_t *buckets_p, uint64_t *bytes_p)
{
    *buckets_p = r->launched;
    *bytes_p = r->launched_bytes;
}
