/* Operations as NCCL calls. NCCL sees packed memory only: a strided span is packed into scratch before and unpacked after, in the
 * same stream. What NCCL lacks is composed of grouped sends and receives. */
#include "backend/gpu_impl.h"

#include "backend/gpu_types.h"
#include "simd/strided.h"

#include <stdlib.h>

enum { VIEWS_ON_STACK = 32 };

/* A span as NCCL sees it. */
typedef struct {
    void *data;    /* packed elements */
    void *scratch; /* where they were packed; NULL: the span's own memory */
} view;

/* What the pieces of one launch share. */
typedef struct {
    cd_gpu_backend *b;
    const cd_op *op;
    cd_nccl_comm comm;
    cd_cu_stream stream;
    const cd_patience *patience;
    cd_gpu_type type;
} launch;

static cd_status call(const launch *l, cd_nccl_result result, const char *what)
{
    return cd_gpu_settle(l->b, l->comm, result, what, l->patience);
}

static cd_status check_place(const launch *l, const cd_span *span)
{
    const cd_gpu_backend *b = l->b;
    int index = l->op->gpu - 1;
    if (index < 0 &&
        b->driver.pointer_attribute(&index, CD_CU_POINTER_DEVICE_ORDINAL, cd_gpu_address(span->data)) != CD_CU_SUCCESS)
        return cd_fail(CD_BAD_ARGUMENT, "%s: an array does not lie in the memory of a GPU",
                       cd_kind_name(l->op->kind));
    if (index != b->gpu.index)
        return cd_fail(CD_BAD_ARGUMENT, "%s: an array lies on GPU %d, but this rank's part of the group runs on GPU %d",
                       cd_kind_name(l->op->kind), index, b->gpu.index);
    return CD_OK;
}

/* The span's dimensions, merged. True when they are one packed run after all. */
static bool merge(const cd_span *span, cd_dims *out)
{
    *out = *span->dims;
    return cd_dims_normalise(out, span->item_bytes);
}

/* One span of cd_gpu_pack; what has no gaps is added to the list instead. */
static cd_status pack_one(cd_gpu_backend *b, const cd_span *span, void *packed, bool back, void *stream,
                          cd_kernel_piece *pieces, size_t *count_p)
{
    size_t bytes = span->count * span->item_bytes;
    cd_dims dims;
    if (bytes == 0)
        return CD_OK;
    if (!span->data)
        return cd_driver_check(&b->driver, b->driver.set_bytes_async(cd_gpu_address(packed), 0, bytes, stream),
                               "cuMemsetD8Async");
    if (span->dims && !merge(span, &dims))
        return back ? cd_kernels_unpack(&b->kernels, span->data, &dims, span->item_bytes, packed, stream)
                    : cd_kernels_pack(&b->kernels, span->data, &dims, span->item_bytes, packed, stream);
    pieces[(*count_p)++] = back ? (cd_kernel_piece){span->data, packed, bytes} : (cd_kernel_piece){packed, span->data, bytes};
    return CD_OK;
}

cd_status cd_gpu_pack(cd_backend *backend, const cd_span *spans, void *const *packed, size_t count, bool back, void *stream)
{
    cd_gpu_backend *b = (cd_gpu_backend *)backend;
    cd_kernel_piece *pieces = malloc((count + 1) * sizeof *pieces);
    size_t without_gaps = 0;
    bool pushed;
    if (!pieces)
        return cd_fail(CD_NO_MEMORY, "no memory for a list of %zu arrays", count);
    cd_status status = cd_gpu_enter(&b->gpu, &pushed);
    if (status == CD_OK) {
        for (size_t i = 0; i < count && status == CD_OK; i++)
            status = pack_one(b, &spans[i], packed[i], back, stream, pieces, &without_gaps);
        if (status == CD_OK)
            status = cd_kernels_copy(&b->kernels, pieces, without_gaps, stream);
        cd_gpu_leave(&b->gpu, pushed);
    }
    free(pieces);
    return status;
}

static cd_status take_scratch(const launch *l, size_t bytes, void **out)
{
    const cd_gpu_backend *b = l->b;
    cd_cu_address address = 0;
    if (!b->gpu.pools)
        return cd_fail(CD_UNSUPPORTED, "GPU %d has no stream-ordered allocator: pass contiguous arrays", b->gpu.index);
    CD_TRY(cd_driver_check(&b->driver, b->driver.mem_alloc_async(&address, bytes, l->stream), "scratch for a strided array"));
    *out = (void *)(uintptr_t)address;
    return CD_OK;
}

/* Opens a span; `read`: its elements are packed now. */
static cd_status view_open(const launch *l, const cd_span *span, bool read, view *out)
{
    *out = (view){.data = span->data};
    if (span->count == 0)
        return CD_OK;
    CD_TRY(check_place(l, span));
    if (cd_likely(!span->dims))
        return CD_OK;
    cd_dims dims;
    if (merge(span, &dims))
        return CD_OK;
    CD_TRY(take_scratch(l, span->count * span->item_bytes, &out->scratch));
    out->data = out->scratch;
    cd_status status = CD_OK;
    if (read)
        status = cd_kernels_pack(&l->b->kernels, span->data, &dims, span->item_bytes, out->scratch, l->stream);
    if (cd_unlikely(status != CD_OK))
        l->b->driver.mem_free_async(cd_gpu_address(out->scratch), l->stream);
    return status;
}

static cd_status defer(const launch *l, const cd_span *span, void *scratch, bool write, cd_gpu_deferred **out)
{
    cd_gpu_deferred *d = malloc(sizeof *d);
    if (!d)
        return cd_fail(CD_NO_MEMORY, "no memory to remember a strided array of a coalesced group");
    *d = (cd_gpu_deferred){.stream = l->stream, .scratch = scratch, .item_bytes = span->item_bytes};
    d->unpack_to = write ? span->data : 0;
    merge(span, &d->dims);
    *out = d;
    return CD_OK;
}

static cd_status finish(cd_gpu_backend *b, const cd_gpu_deferred *d, bool good)
{
    cd_status status = CD_OK;
    if (good && d->unpack_to)
        status = cd_kernels_unpack(&b->kernels, d->unpack_to, &d->dims, d->item_bytes, d->scratch, d->stream);
    b->driver.mem_free_async(cd_gpu_address(d->scratch), d->stream);
    return status;
}

/* Closes a span; `write`: its elements are unpacked, if all went well. Inside a coalesced group, later. */
static cd_status view_close(const launch *l, const cd_span *span, bool write, cd_status so_far, view *v)
{
    if (cd_likely(!v->scratch))
        return so_far;
    cd_gpu_deferred *d = 0;
    cd_error kept = *cd_last_error();
    cd_status status = defer(l, span, v->scratch, write, &d);
    if (status == CD_OK && l->b->grouping) {
        d->next = l->b->deferred;
        l->b->deferred = d;
    } else if (status == CD_OK) {
        status = finish(l->b, d, so_far == CD_OK);
        free(d);
    }
    return so_far == CD_OK ? status : cd_fail_with(&kept);
}

cd_status cd_gpu_finish_deferred(cd_gpu_backend *b, bool good)
{
    cd_status status = CD_OK;
    while (b->deferred) {
        cd_gpu_deferred *d = b->deferred;
        b->deferred = d->next;
        cd_status one = finish(b, d, good);
        status = status == CD_OK ? one : status;
        free(d);
    }
    return status;
}

static cd_status with_redop(const launch *l, cd_nccl_redop *out)
{
    const cd_gpu_backend *b = l->b;
    double scalar = 0;
    *out = l->type.redop;
    if (l->op->redop != CD_PREMUL_SUM)
        return CD_OK;
    cd_gpu_scalar(l->type.type, l->op->factor, &scalar);
    return call(l, b->nccl.redop_create(out, &scalar, l->type.type, CD_NCCL_SCALAR_HOST, l->comm), "ncclRedOpCreatePreMulSum");
}

static void drop_redop(const launch *l, cd_nccl_redop redop)
{
    /* Legal as soon as the last call that was given it has returned. */
    if (l->op->redop == CD_PREMUL_SUM)
        l->b->nccl.redop_destroy(redop, l->comm);
}

/* The blocks of one side of an operation, opened. */
typedef struct {
    const cd_blocks *blocks;
    view *views;
    view few[VIEWS_ON_STACK];
    int opened;
} side;

static cd_status side_open(const launch *l, const cd_blocks *blocks, bool read, side *s)
{
    s->blocks = blocks;
    s->opened = 0;
    s->views = s->few;
    if (blocks->spans > VIEWS_ON_STACK && !(s->views = calloc((size_t)blocks->spans, sizeof *s->views)))
        return cd_fail(CD_NO_MEMORY, "no memory for %d blocks", blocks->spans);
    for (; s->opened < blocks->spans; s->opened++)
        CD_TRY(view_open(l, &blocks->list[s->opened], read, &s->views[s->opened]));
    return CD_OK;
}

static cd_status side_close(const launch *l, bool write, cd_status so_far, side *s)
{
    for (int i = 0; i < s->opened; i++)
        so_far = view_close(l, &s->blocks->list[i], write, so_far, &s->views[i]);
    if (s->views != s->few)
        free(s->views);
    return so_far;
}

/* Packed memory of peer j's block, and its number of NCCL elements. */
static char *side_at(const launch *l, const side *s, int j, size_t *count_p)
{
    size_t first = 0, count = 0;
    const cd_span *span = cd_blocks_at(s->blocks, l->b->world, j, &first, &count);
    *count_p = count * l->type.per_item;
    return (char *)s->views[span - s->blocks->list].data + first * span->item_bytes;
}

/* Opens both sides, runs `body`, closes both. In place, the result is read from the packed input's twin. */
typedef cd_status (*body_func)(const launch *l, const side *in, const side *out);

static cd_status run_body(const launch *l, body_func body)
{
    side in, out;
    out.opened = 0;
    out.views = out.few;
    cd_status status = side_open(l, &l->op->in, true, &in);
    if (status == CD_OK)
        status = side_open(l, &l->op->out, false, &out);
    if (status == CD_OK)
        status = body(l, &in, &out);
    status = side_close(l, true, status, &out);
    return side_close(l, false, status, &in);
}

static bool is_one_run(const cd_blocks *blocks)
{
    return blocks->spans == 1 && !blocks->counts;
}

static cd_status do_all_reduce(const launch *l, const side *in, const side *out)
{
    cd_nccl_redop redop;
    size_t count = l->op->in.list[0].count * l->type.per_item;
    CD_TRY(with_redop(l, &redop));
    cd_nccl_result result = l->b->nccl.all_reduce(in->views[0].data, out->views[0].data, count, l->type.type, redop, l->comm,
                                                  l->stream);
    cd_status status = call(l, result, "ncclAllReduce");
    drop_redop(l, redop);
    return status;
}

static cd_status do_reduce(const launch *l, const side *in, const side *out)
{
    cd_nccl_redop redop;
    size_t count = l->op->in.list[0].count * l->type.per_item;
    CD_TRY(with_redop(l, &redop));
    cd_nccl_result result = l->b->nccl.reduce(in->views[0].data, out->opened ? out->views[0].data : 0, count, l->type.type,
                                              redop, l->op->root, l->comm, l->stream);
    cd_status status = call(l, result, "ncclReduce");
    drop_redop(l, redop);
    return status;
}

static cd_status do_broadcast(const launch *l, const side *in, const side *out)
{
    bool root = l->op->root == l->b->rank;
    const cd_span *span = root ? &l->op->in.list[0] : &l->op->out.list[0];
    void *data = root ? in->views[0].data : out->views[0].data;
    cd_nccl_result result = l->b->nccl.broadcast(data, data, span->count * l->type.per_item, l->type.type, l->op->root,
                                                 l->comm, l->stream);
    return call(l, result, "ncclBroadcast");
}

static cd_status copy_own(const launch *l, const void *from, void *to, size_t bytes)
{
    if (from == to || bytes == 0)
        return CD_OK;
    return cd_driver_check(&l->b->driver,
                           l->b->driver.copy_async(cd_gpu_address(to), cd_gpu_address(from), bytes, l->stream),
                           "copy of a rank's own block");
}

typedef struct {
    char *data;
    size_t count; /* NCCL elements */
} block;

static block whole_of(const launch *l, const side *s)
{
    return (block){s->views[0].data, s->blocks->list[0].count * l->type.per_item};
}

static block block_of(const launch *l, const side *s, int j)
{
    block found;
    found.data = side_at(l, s, j, &found.count);
    return found;
}

/* What this rank gives peer j, and what it gets from it; nothing: count 0. */
static block block_to(const launch *l, const side *in, int j)
{
    int rank = l->b->rank, root = l->op->root;
    switch (l->op->kind) {
    case CD_ALL_GATHER: return whole_of(l, in);
    case CD_GATHER: return j == root ? whole_of(l, in) : (block){0, 0};
    case CD_SCATTER: return rank == root ? block_of(l, in, j) : (block){0, 0};
    default: return block_of(l, in, j);
    }
}

static block block_from(const launch *l, const side *out, int j)
{
    int rank = l->b->rank, root = l->op->root;
    switch (l->op->kind) {
    case CD_GATHER: return rank == root ? block_of(l, out, j) : (block){0, 0};
    case CD_SCATTER: return j == root ? whole_of(l, out) : (block){0, 0};
    default: return block_of(l, out, j);
    }
}

static bool goes_on(cd_nccl_result result)
{
    return result == CD_NCCL_SUCCESS || result == CD_NCCL_IN_PROGRESS;
}

static cd_status do_trade(const launch *l, const side *in, const side *out)
{
    const cd_gpu_backend *b = l->b;
    block mine = block_to(l, in, b->rank), into = block_from(l, out, b->rank);
    CD_TRY(copy_own(l, mine.data, into.data, into.count < mine.count ? into.count : mine.count));
    cd_nccl_result result = b->nccl.group_start();
    for (int j = 0; j < b->world && goes_on(result); j++) {
        if (j == b->rank)
            continue;
        block give = block_to(l, in, j), get = block_from(l, out, j);
        if (give.count)
            result = b->nccl.send(give.data, give.count, l->type.type, j, l->comm, l->stream);
        if (get.count && goes_on(result))
            result = b->nccl.recv(get.data, get.count, l->type.type, j, l->comm, l->stream);
    }
    cd_nccl_result ended = b->nccl.group_end();
    return call(l, goes_on(result) ? ended : result, "grouped sends and receives");
}

static cd_status do_all_gather(const launch *l, const side *in, const side *out)
{
    if (!is_one_run(&l->op->out))
        return do_trade(l, in, out);
    block mine = whole_of(l, in);
    return call(l,
                l->b->nccl.all_gather(mine.data, out->views[0].data, mine.count, l->type.type, l->comm, l->stream),
                "ncclAllGather");
}

/* Blocks that do not lie in one run, or differ in size: one reduction to each owner, as one NCCL group. */
static cd_status reduce_to_owners(const launch *l, const side *in, const side *out, cd_nccl_redop redop)
{
    const cd_gpu_backend *b = l->b;
    cd_nccl_result result = b->nccl.group_start();
    for (int j = 0; j < b->world && goes_on(result); j++) {
        block part = block_of(l, in, j);
        void *into = j == b->rank ? out->views[0].data : part.data;
        if (part.count)
            result = b->nccl.reduce(part.data, into, part.count, l->type.type, redop, j, l->comm, l->stream);
    }
    cd_nccl_result ended = b->nccl.group_end();
    return call(l, goes_on(result) ? ended : result, "grouped ncclReduce");
}

static cd_status do_reduce_scatter(const launch *l, const side *in, const side *out)
{
    cd_nccl_redop redop;
    CD_TRY(with_redop(l, &redop));
    block mine = whole_of(l, out);
    cd_status status;
    if (is_one_run(&l->op->in))
        status = call(l,
                      l->b->nccl.reduce_scatter(in->views[0].data, mine.data, mine.count, l->type.type, redop, l->comm,
                                                l->stream),
                      "ncclReduceScatter");
    else
        status = reduce_to_owners(l, in, out, redop);
    drop_redop(l, redop);
    return status;
}

static cd_status do_send(const launch *l, const side *in, const side *out)
{
    (void)out;
    block mine = whole_of(l, in);
    return call(l, l->b->nccl.send(mine.data, mine.count, l->type.type, l->op->peer, l->comm, l->stream), "ncclSend");
}

static cd_status do_recv(const launch *l, const side *in, const side *out)
{
    (void)in;
    block mine = whole_of(l, out);
    return call(l, l->b->nccl.recv(mine.data, mine.count, l->type.type, l->op->peer, l->comm, l->stream), "ncclRecv");
}

static cd_status do_barrier(const launch *l)
{
    void *word = (void *)(uintptr_t)l->b->word;
    return call(l, l->b->nccl.all_reduce(word, word, 1, CD_NCCL_INT32, CD_NCCL_SUM, l->comm, l->stream), "ncclAllReduce");
}

static const body_func bodies[CD_KINDS] = {
    [CD_ALL_REDUCE] = do_all_reduce, [CD_REDUCE] = do_reduce,   [CD_BROADCAST] = do_broadcast,
    [CD_ALL_GATHER] = do_all_gather, [CD_GATHER] = do_trade,    [CD_SCATTER] = do_trade,
    [CD_REDUCE_SCATTER] = do_reduce_scatter,
    [CD_ALL_TO_ALL] = do_trade,      [CD_SEND] = do_send,       [CD_RECV] = do_recv,
};

cd_status cd_gpu_supports(cd_kind kind, cd_redop redop, cd_dtype dtype)
{
    cd_gpu_type type;
    return cd_gpu_type_of(kind, redop, dtype, 1, 0, &type);
}

static cd_status issue(const launch *l)
{
    return l->op->kind == CD_BARRIER ? do_barrier(l) : run_body(l, bodies[l->op->kind]);
}

static cd_status issue_main(void *arg)
{
    launch *l = arg;
    bool pushed;
    CD_TRY(cd_gpu_enter(&l->b->gpu, &pushed));
    cd_status status = issue(l);
    cd_gpu_leave(&l->b->gpu, pushed);
    return status;
}

static void stop_issue(void *arg)
{
    cd_gpu_watch_abort(((launch *)arg)->b);
}

/* The bit of `warm` for an operation of this size: NCCL connects for the algorithm that it chooses, by kind and size. */
static uint64_t size_bit(const cd_op *op)
{
    const cd_blocks *blocks = op->in.spans ? &op->in : &op->out;
    uint64_t bytes = blocks->spans ? blocks->list[0].count * blocks->list[0].item_bytes : 0;
    return UINT64_C(1) << (63 - __builtin_clzll(bytes | 1));
}

/* The first of its kind and size waits within NCCL until the others have come to connect. Not from another thread: inside a
 * coalesced group, which belongs to its thread; in the thread's own default stream (2); while a graph is captured. Then the
 * deadline and the cause end it all the same, but Ctrl-C waits for one of them. */
static cd_status issue_first(launch *l, uint64_t bit)
{
    cd_gpu_backend *b = l->b;
    if (b->grouping || (uintptr_t)l->stream == 2 || cd_gpu_is_captured(b, l->stream))
        return issue(l);
    const cd_patience *patience = l->patience;
    cd_patience plain = {.deadline = patience->deadline, .cause = b->team->cause, .yields = 1}, own = *patience;
    if (!own.cause)
        own.cause = b->team->cause;
    l->patience = &plain;
    cd_status status = cd_gpu_errand(issue_main, stop_issue, l, &own);
    if (status == CD_OK)
        b->warm[l->op->kind] |= bit;
    if (status == CD_TIMED_OUT)
        return cd_fail(CD_TIMED_OUT, "%s: NCCL was still waiting for another rank when the deadline passed",
                       cd_kind_name(l->op->kind));
    return status;
}

cd_status cd_gpu_launch(cd_gpu_backend *b, const cd_op *op, cd_cu_stream stream, const cd_patience *patience)
{
    launch l = {.b = b, .op = op, .stream = stream, .patience = patience};
    l.comm = atomic_load_explicit(&b->comm, memory_order_acquire);
    if (cd_unlikely(!l.comm || atomic_load_explicit(&b->team->cause->state, memory_order_relaxed) != CD_CAUSE_NONE))
        return cd_gpu_cause(b);
    if ((unsigned)op->kind >= CD_KINDS)
        return cd_fail(CD_UNSUPPORTED, "NCCL has no operation %d", (int)op->kind);
    if (op->kind == CD_RECV && op->peer < 0)
        return cd_fail(CD_UNSUPPORTED, "NCCL receives from a named rank only: give src");
    if (op->kind != CD_BARRIER)
        CD_TRY(cd_gpu_type_of(op->kind, op->redop, op->dtype, op->item_bytes, b->nccl.version, &l.type));
    uint64_t bit = size_bit(op);
    return cd_likely(b->warm[op->kind] & bit || b->world == 1) ? issue(&l) : issue_first(&l, bit);
}
