#include "ddp/reducer.h"

#include "base/log.h"
#include "simd/reduce.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* A bucket in shared memory is reduced in pieces of at least this size: what was just copied in is still in the cache, and little
 * is left to do after the last gradient. What synchronising costs a step of 2 ranks on a 2-core EPYC (mean of the ranks, whole
 * bucket / 4 MiB / 1 MiB): 64-layer MLP 6.2 / 4.6 / 4.9 ms, transformer 7.5 / 4.1 / 2.3 ms, ResNet-18 6.6 / 9.2 / 9.3 ms; the
 * figures scatter by 2 ms. Other transports pay for each message: there a bucket is one piece. */
#define PIECE_BYTES ((size_t)1 << 20)

typedef struct {
    cd_bucket_memory *memory;
    size_t count; /* elements of all gradients, without the flag */
    cd_dtype dtype;
    cd_device device;
    int params;
    int first, pieces; /* its pieces: first … first + pieces − 1 */
} bucket;

/* What is reduced at once: neighbours in one bucket; the last one of a bucket holds the flag too. */
typedef struct {
    int bucket;
    size_t at, count; /* elements, without the flag */
    int params;
    _Atomic int unready;
    cd_work *work; /* while launched and not finished; written under the lock */
} piece;

struct cd_reducer {
    cd_group *group;
    cd_reducer_param *params;
    int *bucket_of;
    int *piece_of;
    size_t *offset;        /* bytes from the start of the bucket */
    int *uses;             /* calls of ready() that make a parameter ready */
    _Atomic int *pending;  /* of them still to come; below 0: too many */
    uint8_t *missing;      /* filled in this step though that was not expected */
    int *order;
    _Atomic int ordered;   /* entries of order */
    bucket *buckets;
    piece *pieces;
    int count, bucket_count, piece_count;
    cd_reduce_mode mode;
    cd_step step;
    double divisor, scale;
    bool scaled; /* set_scale was called: every rank has its own factor */
    void *stream;
    pthread_mutex_t lock;  /* next and the launching itself */
    int next;              /* first piece that was not launched, or bucket that was not handed out */
    uint64_t launched, launched_bytes;
    uint64_t first_launch_ns; /* of this step; 0: none */
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
    r->piece_of = calloc(n, sizeof *r->piece_of);
    r->offset = calloc(n, sizeof *r->offset);
    r->uses = calloc(n, sizeof *r->uses);
    r->pending = calloc(n, sizeof *r->pending);
    r->missing = calloc(n, 1);
    r->order = calloc(n, sizeof *r->order);
    r->buckets = calloc(m, sizeof *r->buckets);
    r->pieces = calloc(n, sizeof *r->pieces);
    if (!r->params || !r->bucket_of || !r->piece_of || !r->offset || !r->uses || !r->pending || !r->missing || !r->order ||
        !r->buckets || !r->pieces)
        return cd_fail(CD_NO_MEMORY, "reducer: no memory for %d parameters", spec->count);
    r->count = spec->count;
    r->bucket_count = spec->buckets;
    return CD_OK;
}

/* Parameter number `at` of the readiness order. */
static int param_at(const cd_reducer_spec *spec, int at)
{
    return spec->order ? spec->order[at] : at;
}

static cd_status lay_out(cd_reducer *r, const cd_reducer_spec *spec)
{
    for (int at = 0; at < r->count; at++) {
        int i = param_at(spec, at);
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

/* Cuts bucket k into pieces of neighbours. */
static void cut_bucket(cd_reducer *r, const cd_reducer_spec *spec, int k, bool shared)
{
    bucket *b = &r->buckets[k];
    piece *open = 0;
    b->first = r->piece_count;
    for (int at = 0; at < r->count; at++) {
        int i = param_at(spec, at);
        if (r->bucket_of[i] != k)
            continue;
        size_t item = cd_dtype_bytes(b->dtype);
        if (!open || (shared && open->count * item >= PIECE_BYTES)) {
            open = &r->pieces[r->piece_count++];
            *open = (piece){.bucket = k, .at = r->offset[i] / item};
            b->pieces++;
        }
        r->piece_of[i] = (int)(open - r->pieces);
        open->count += r->params[i].count;
        open->params++;
    }
}

/* Every rank must cut alike, so it depends on what all have in common, not on whether this rank's arena had room. */
static void cut(cd_reducer *r, const cd_reducer_spec *spec)
{
    bool shared = !spec->memory && strcmp(cd_group_transport(r->group), "shm") == 0;
    for (int k = 0; k < r->bucket_count; k++)
        cut_bucket(r, spec, k, shared);
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
    cut(r, spec);
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
    for (int i = 0; i < r->piece_count; i++)
        cd_work_release(r->pieces[i].work);
    for (int k = 0; k < r->bucket_count; k++)
        cd_bucket_memory_release(r->buckets[k].memory);
    pthread_mutex_destroy(&r->lock);
    free(r->pieces);
    free(r->buckets);
    free(r->order);
    free(r->missing);
    free(r->pending);
    free(r->uses);
    free(r->offset);
    free(r->piece_of);
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
    r->scaled = true;
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
    for (int i = 0; i < r->piece_count; i++) {
        piece *p = &r->pieces[i];
        if (p->work) {
            cd_status status = cd_work_wait(p->work, patience);
            if (status == CD_WAIT_EXPIRED || status == CD_INTERRUPTED)
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
    pthread_mutex_lock(&r->lock);
    r->step = step;
    r->next = 0;
    r->first_launch_ns = 0;
    pthread_mutex_unlock(&r->lock);
    return CD_OK;
}

/* Where a piece begins in memory, and how many elements it has with the flag where it holds that. */
static char *memory_of(const cd_reducer *r, const piece *p, size_t *count_p)
{
    const bucket *b = &r->buckets[p->bucket];
    bool is_last = p == &r->pieces[b->first + b->pieces - 1];
    *count_p = p->count + (is_last && flag_of(b) ? 1 : 0);
    return b->memory->memory + p->at * cd_dtype_bytes(b->dtype);
}

static void scale_piece(const cd_reducer *r, const piece *p)
{
    size_t count;
    char *data = memory_of(r, p, &count);
    const void *in[1] = {data};
    cd_reduce_func multiply = cd_reduce_find(CD_PREMUL_SUM, r->buckets[p->bucket].dtype);
    if (multiply)
        multiply(data, in, 1, p->count, r->scale);
}

/* Starts the all_reduce of piece p; the lock is held. */
static cd_status launch(cd_reducer *r, piece *p)
{
    bucket *b = &r->buckets[p->bucket];
    if (r->scale != 1.0 && b->device == CD_CPU)
        scale_piece(r, p);
    bool plain = r->mode == CD_REDUCE_SUM || r->divisor == 1.0;
    bool average = !plain && r->divisor == (double)cd_group_size(r->group);
    bool weighted = r->scaled && b->device != CD_CPU; /* NCCL multiplies by each rank's own factor */
    size_t item = cd_dtype_bytes(b->dtype), count;
    char *data = memory_of(r, p, &count);
    cd_span span = {.data = data, .count = count, .item_bytes = (uint32_t)item};
    cd_op op = {
        .kind = CD_ALL_REDUCE,
        .dtype = b->dtype,
        .redop = weighted ? CD_PREMUL_SUM : plain ? CD_SUM : average ? CD_AVG : CD_PREMUL_SUM,
        .device = b->device,
        .root = -1,
        .peer = -1,
        .factor = weighted ? r->scale : plain || average ? 1.0 : 1.0 / r->divisor,
        .in = {.list = &span, .spans = 1},
        .out = {.list = &span, .spans = 1},
        .count = count,
        .item_bytes = (uint32_t)item,
        .ndim = 1,
        .shape = {(int64_t)count},
        .stream = r->stream,
    };
    if (!r->first_launch_ns)
        r->first_launch_ns = cd_now_ns();
    CD_TRY(cd_group_issue(r->group, &op, cd_group_timeout_ns(r->group), &p->work));
    cd_bucket_memory_retain(b->memory);
    cd_work_set_owner(p->work, b->memory, cd_bucket_memory_release);
    r->launched += p == &r->pieces[b->first + b->pieces - 1];
    r->launched_bytes += p->count * item;
    return CD_OK;
}

/* Acquire: pairs with the decrement in complete(), so that the gradients of other threads are seen by
 * whoever launches. */
static bool is_full(const piece *p)
{
    return atomic_load_explicit(&p->unready, memory_order_acquire) == 0;
}

static bool is_full_bucket(const cd_reducer *r, const bucket *b)
{
    for (int i = 0; i < b->pieces; i++)
        if (!is_full(&r->pieces[b->first + i]))
            return false;
    return true;
}

/* Launches every full piece that has none unlaunched before it. Whoever fills a piece comes here after
 * filling it, so the last of them to take the lock sees all that are full: none is forgotten. */
static cd_status launch_full(cd_reducer *r)
{
    cd_status status = CD_OK;
    pthread_mutex_lock(&r->lock);
    while (status == CD_OK && r->next < r->piece_count && is_full(&r->pieces[r->next])) {
        status = launch(r, &r->pieces[r->next]);
        if (status == CD_OK)
            r->next++;
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
    piece *p = &r->pieces[r->piece_of[param]];
    return atomic_fetch_sub_explicit(&p->unready, 1, memory_order_acq_rel) == 1;
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
    for (int i = 0; i < r->piece_count; i++) {
        piece *p = &r->pieces[i];
        if (!p->work)
            continue;
        CD_TRY(r->buckets[p->bucket].device == CD_CPU ? cd_work_wait(p->work, patience)
                                                      : cd_work_join_stream(p->work, r->stream, patience));
        cd_work_release(p->work);
        p->work = 0;
    }
    bool flagged = false;
    for (int k = 0; k < r->bucket_count && r->step == CD_STEP_REDUCE; k++)
        flagged = flagged || is_flagged(&r->buckets[k]);
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

uint64_t cd_reducer_first_launch_ns(cd_reducer *r)
{
    pthread_mutex_lock(&r->lock);
    uint64_t ns = r->first_launch_ns;
    pthread_mutex_unlock(&r->lock);
    return ns;
}

void cd_reducer_launched(const cd_reducer *r, uint64_t *buckets_p, uint64_t *bytes_p)
{
    *buckets_p = r->launched;
    *bytes_p = r->launched_bytes;
}
