#include "ddp/reducer.h"

#include "base/log.h"
#include "simd/reduce.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    cd_bucket_memory *memory;
    size_t count; /* elements of all gradients, without the flag */
    cd_dtype dtype;
    cd_device device;
    int params;
    _Atomic int unready;
    cd_work *work; /* while launched and not finished; written under the lock */
} bucket;

struct cd_reducer {
    cd_group *group;
    cd_reducer_param *params;
    int *bucket_of;
    size_t *offset;        /* bytes from the start of the bucket */
    int *uses;             /* calls of ready() that make a parameter ready */
    _Atomic int *pending;  /* of them still to come; below 0: too many */
    uint8_t *missing;      /* filled in this step though that was not expected */
    int *order;
    _Atomic int ordered;   /* entries of order */
    bucket *buckets;
    int count, bucket_count;
    cd_reduce_mode mode;
    cd_step step;
    double divisor, scale;
    void *stream;
    pthread_mutex_t lock;  /* next and the launching itself */
    int next;              /* first bucket that was not launched or handed out */
    uint64_t launched, launched_bytes;
};

static cd_status check_spec(const cd_reducer_spec *spec)
{
    for (int i = 0; i < spec->count; i++) {
        const cd_reducer_param *param = &spec->params[i];
        if (!cd_dtype_is_float(param->dtype) && !cd_dtype_is_complex(param->dtype))
            return cd_fail(CD_BAD_TYPE, "reducer: gradient %d is of %s; gradients are real or complex floats", i,
                           cd_dtype_name(param->dtype));
        if (spec->bucket_of[i] < 0 || spec->bucket_of[i] >= spec->buckets)
            return cd_fail(CD_BAD_ARGUMENT, "reducer: gradient %d is assigned to bucket %d of %d", i, spec->bucket_of[i],
                           spec->buckets);
    }
    return CD_OK;
}

static cd_status allocate_tables(cd_reducer *r, const cd_reducer_spec *spec)
{
    size_t n = (size_t)spec->count + 1, m = (size_t)spec->buckets + 1;
    r->params = calloc(n, sizeof *r->params);
    r->bucket_of = calloc(n, sizeof *r->bucket_of);
    r->offset = calloc(n, sizeof *r->offset);
    r->uses = calloc(n, sizeof *r->uses);
    r->pending = calloc(n, sizeof *r->pending);
    r->missing = calloc(n, 1);
    r->order = calloc(n, sizeof *r->order);
    r->buckets = calloc(m, sizeof *r->buckets);
    if (!r->params || !r->bucket_of || !r->offset || !r->uses || !r->pending || !r->missing || !r->order || !r->buckets)
        return cd_fail(CD_NO_MEMORY, "reducer: no memory for %d parameters", spec->count);
    r->count = spec->count;
    r->bucket_count = spec->buckets;
    return CD_OK;
}

static cd_status lay_out(cd_reducer *r, const cd_reducer_spec *spec)
{
    for (int i = 0; i < r->count; i++) {
        const cd_reducer_param *param = &spec->params[i];
        bucket *b = &r->buckets[spec->bucket_of[i]];
        if (b->params && (b->dtype != param->dtype || b->device != param->device))
            return cd_fail(CD_BAD_ARGUMENT, "reducer: bucket %d would hold %s and %s", spec->bucket_of[i],
                           cd_dtype_name(b->dtype), cd_dtype_name(param->dtype));
        r->params[i] = *param;
        r->bucket_of[i] = spec->bucket_of[i];
        r->offset[i] = b->count * cd_dtype_bytes(param->dtype);
        r->uses[i] = 1;
        b->dtype = param->dtype;
        b->device = param->device;
        b->count += param->count;
        b->params++;
    }
    cd_arena *arena = cd_world_arena(cd_group_world(r->group));
    for (int k = 0; k < r->bucket_count; k++) {
        bucket *b = &r->buckets[k];
        if (!b->params)
            return cd_fail(CD_BAD_ARGUMENT, "reducer: bucket %d of %d is empty", k, r->bucket_count);
        if (b->device != CD_CPU && !spec->memory)
            return cd_fail(CD_BAD_ARGUMENT, "reducer: memory of GPU buckets is the caller's to give");
        size_t flag = spec->memory ? 0 : 1;
        CD_TRY(cd_bucket_memory_create(arena, (b->count + flag) * cd_dtype_bytes(b->dtype),
                                       spec->memory ? spec->memory[k] : 0, &b->memory));
    }
    return CD_OK;
}

cd_status cd_reducer_create(cd_group *group, const cd_reducer_spec *spec, cd_reducer **out)
{
    CD_TRY(check_spec(spec));
    cd_reducer *r = calloc(1, sizeof *r);
    if (!r)
        return cd_fail(CD_NO_MEMORY, "reducer: no memory");
    r->group = cd_group_retain(group);
    r->mode = spec->mode;
    r->divisor = (double)cd_group_size(group);
    r->scale = 1.0;
    pthread_mutex_init(&r->lock, 0);
    cd_status status = allocate_tables(r, spec);
    if (status == CD_OK)
        status = lay_out(r, spec);
    if (status != CD_OK) {
        cd_reducer_free(r);
        return status;
    }
    for (int i = 0; i < r->count; i++)
        atomic_init(&r->pending[i], r->uses[i]);
    cd_log_about("ddp", "reducer of %d gradients in %d buckets", r->count, r->bucket_count);
    *out = r;
    return CD_OK;
}

void cd_reducer_free(cd_reducer *r)
{
    if (!r)
        return;
    for (int k = 0; k < r->bucket_count; k++) {
        cd_work_release(r->buckets[k].work);
        cd_bucket_memory_release(r->buckets[k].memory);
    }
    pthread_mutex_destroy(&r->lock);
    free(r->buckets);
    free(r->order);
    free(r->missing);
    free(r->pending);
    free(r->uses);
    free(r->offset);
    free(r->bucket_of);
    free(r->params);
    cd_group_release(r->group);
    free(r);
}

int cd_reducer_buckets(const cd_reducer *r)
{
    return r->bucket_count;
}

void *cd_reducer_view(const cd_reducer *r, int param)
{
    return r->buckets[r->bucket_of[param]].memory->memory + r->offset[param];
}

int cd_reducer_place(const cd_reducer *r, int param, size_t *offset_p)
{
    *offset_p = r->offset[param];
    return r->bucket_of[param];
}

void *cd_reducer_bucket(const cd_reducer *r, int k, size_t *bytes_p)
{
    *bytes_p = r->buckets[k].count * cd_dtype_bytes(r->buckets[k].dtype);
    return r->buckets[k].memory->memory;
}

void cd_reducer_set_divisor(cd_reducer *r, double divisor)
{
    r->divisor = divisor;
}

void cd_reducer_set_scale(cd_reducer *r, double scale)
{
    r->scale = scale;
}

void cd_reducer_set_uses(cd_reducer *r, const int *uses)
{
    for (int i = 0; i < r->count; i++)
        r->uses[i] = uses[i] > 1 ? uses[i] : 1;
}

void cd_reducer_set_stream(cd_reducer *r, void *stream)
{
    r->stream = stream;
}

/* The flag of a bucket, or NULL where it has none. */
static char *flag_of(const bucket *b)
{
    size_t bytes = b->count * cd_dtype_bytes(b->dtype);
    return b->memory->bytes > bytes ? b->memory->memory + bytes : 0;
}

cd_status cd_reducer_begin(cd_reducer *r, cd_step step, const cd_patience *patience)
{
    for (int k = 0; k < r->bucket_count; k++) {
        bucket *b = &r->buckets[k];
        if (b->work) {
            cd_status status = cd_work_wait(b->work, patience);
            if (status == CD_WAIT_EXPIRED || status == CD_INTERRUPTED)
                return status;
            cd_work_release(b->work);
            b->work = 0;
        }
        atomic_store_explicit(&b->unready, b->params, memory_order_relaxed);
        char *flag = flag_of(b);
        if (flag)
            memset(flag, 0, cd_dtype_bytes(b->dtype));
    }
    for (int i = 0; i < r->count; i++)
        atomic_store_explicit(&r->pending[i], r->uses[i], memory_order_relaxed);
    memset(r->missing, 0, (size_t)r->count);
    /* Relaxed above, release here: begin returns before any ready() of this step starts, in this thread or
     * in one that it starts, so the order is the caller's; the store only keeps the counters in front of
     * `ordered`. */
    atomic_store_explicit(&r->ordered, 0, memory_order_release);
    pthread_mutex_lock(&r->lock);
    r->step = step;
    r->next = 0;
    pthread_mutex_unlock(&r->lock);
    return CD_OK;
}

static void scale_bucket(const bucket *b, double scale)
{
    const void *in[1] = {b->memory->memory};
    cd_reduce_func multiply = cd_reduce_find(CD_PREMUL_SUM, b->dtype);
    if (multiply)
        multiply(b->memory->memory, in, 1, b->count, scale);
}

/* Starts the all_reduce of bucket b; the lock is held. */
static cd_status launch(cd_reducer *r, bucket *b)
{
    if (r->scale != 1.0 && b->device == CD_CPU)
        scale_bucket(b, r->scale);
    bool plain = r->mode == CD_REDUCE_SUM || r->divisor == 1.0;
    bool average = !plain && r->divisor == (double)cd_group_size(r->group);
    size_t item = cd_dtype_bytes(b->dtype), count = b->memory->bytes / item;
    if (b->memory->borrowed)
        count = b->count;
    cd_span span = {.data = b->memory->memory, .count = count, .item_bytes = (uint32_t)item};
    cd_op op = {
        .kind = CD_ALL_REDUCE,
        .dtype = b->dtype,
        .redop = plain ? CD_SUM : average ? CD_AVG : CD_PREMUL_SUM,
        .device = b->device,
        .root = -1,
        .peer = -1,
        .factor = plain || average ? 1.0 : 1.0 / r->divisor,
        .in = {.list = &span, .spans = 1},
        .out = {.list = &span, .spans = 1},
        .count = count,
        .item_bytes = (uint32_t)item,
        .ndim = 1,
        .shape = {(int64_t)count},
        .stream = r->stream,
    };
    CD_TRY(cd_group_issue(r->group, &op, cd_group_timeout_ns(r->group), &b->work));
    cd_bucket_memory_retain(b->memory);
    cd_work_set_owner(b->work, b->memory, cd_bucket_memory_release);
    r->launched++;
    r->launched_bytes += b->count * item;
    return CD_OK;
}

/* Acquire: pairs with the decrement in complete(), so that the gradients of other threads are seen by
 * whoever launches. */
static bool is_full(const bucket *b)
{
    return atomic_load_explicit(&b->unready, memory_order_acquire) == 0;
}

/* Launches every full bucket that has none unlaunched before it. Whoever fills a bucket comes here after
 * filling it, so the last of them to take the lock sees all that are full: none is forgotten. */
static cd_status launch_full(cd_reducer *r)
{
    cd_status status = CD_OK;
    pthread_mutex_lock(&r->lock);
    while (status == CD_OK && r->next < r->bucket_count && is_full(&r->buckets[r->next])) {
        status = launch(r, &r->buckets[r->next]);
        if (status == CD_OK)
            r->next++;
    }
    pthread_mutex_unlock(&r->lock);
    return status;
}

/* Parameter is ready: counts it; true when its bucket is full now. */
static bool complete(cd_reducer *r, int param)
{
    int at = atomic_fetch_add_explicit(&r->ordered, 1, memory_order_relaxed);
    r->order[at] = param;
    /* Acquire-release: each decrement hands the gradients before it to the next, the last one hands all to
     * the launcher. */
    bucket *b = &r->buckets[r->bucket_of[param]];
    return atomic_fetch_sub_explicit(&b->unready, 1, memory_order_acq_rel) == 1;
}

cd_status cd_reducer_ready(cd_reducer *r, int param)
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
    if (complete(r, param) && r->step == CD_STEP_REDUCE)
        return launch_full(r);
    return CD_OK;
}

int cd_reducer_seen(const cd_reducer *r, int param)
{
    return r->uses[param] - atomic_load_explicit(&r->pending[param], memory_order_acquire);
}

int cd_reducer_next_full(cd_reducer *r)
{
    int found = -1;
    pthread_mutex_lock(&r->lock);
    if (r->step == CD_STEP_HANDOUT && r->next < r->bucket_count && is_full(&r->buckets[r->next]))
        found = r->next++;
    pthread_mutex_unlock(&r->lock);
    return found;
}

/* Zeros in place of a gradient that did not come. */
static void fill_one(cd_reducer *r, int param, bool expected)
{
    bucket *b = &r->buckets[r->bucket_of[param]];
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

cd_status cd_reducer_fill(cd_reducer *r, bool expected, int *filled_p)
{
    int filled = 0;
    for (int i = 0; i < r->count; i++) {
        if (atomic_load_explicit(&r->pending[i], memory_order_relaxed) > 0) {
            fill_one(r, i, expected);
            filled++;
        }
    }
    *filled_p = filled;
    return r->step == CD_STEP_REDUCE ? launch_full(r) : CD_OK;
}

/* True when a bucket's sum says that some rank had no gradient. */
static bool is_flagged(const bucket *b)
{
    const char *flag = flag_of(b);
    for (size_t i = 0; flag && i < cd_dtype_bytes(b->dtype); i++)
        if (flag[i])
            return true;
    return false;
}

cd_status cd_reducer_finish(cd_reducer *r, bool unready_expected, const cd_patience *patience)
{
    if (r->step == CD_STEP_LOCAL)
        return CD_OK;
    int filled;
    CD_TRY(cd_reducer_fill(r, unready_expected, &filled));
    bool flagged = false;
    for (int k = 0; k < r->bucket_count; k++) {
        bucket *b = &r->buckets[k];
        if (!b->work)
            continue;
        CD_TRY(b->device == CD_CPU ? cd_work_wait(b->work, patience)
                                   : cd_work_join_stream(b->work, r->stream, patience));
        cd_work_release(b->work);
        b->work = 0;
        flagged = flagged || is_flagged(b);
    }
    if (flagged)
        return cd_fail(CD_BAD_ARGUMENT, "reducer: at least one rank has no gradient for some parameters");
    return CD_OK;
}

cd_status cd_reducer_gather_missing(cd_reducer *r, uint8_t *missing, cd_patience *patience)
{
    size_t count = (size_t)r->count, world = (size_t)cd_group_size(r->group);
    cd_span in = {.data = r->missing, .count = count, .item_bytes = 1};
    cd_span out = {.data = missing, .count = count * world, .item_bytes = 1};
    cd_op op = {
        .kind = CD_ALL_GATHER,
        .dtype = CD_UINT8,
        .device = CD_CPU,
        .root = -1,
        .peer = -1,
        .in = {.list = &in, .spans = 1},
        .out = {.list = &out, .spans = 1},
        .count = count,
        .item_bytes = 1,
        .ndim = 1,
        .shape = {(int64_t)count},
    };
    return cd_group_run(r->group, &op, patience);
}

const int *cd_reducer_ready_order(const cd_reducer *r, int *count_p)
{
    *count_p = atomic_load_explicit(&r->ordered, memory_order_acquire);
    return r->order;
}

void cd_reducer_launched(const cd_reducer *r, uint64_t *buckets_p, uint64_t *bytes_p)
{
    *buckets_p = r->launched;
    *bytes_p = r->launched_bytes;
}
