/* A world of one: every operation is a copy, or nothing. */
#include "backend/backend.h"
#include "simd/reduce.h"
#include "simd/strided.h"

#include <stdlib.h>
#include <string.h>

static cd_status self_supports(cd_kind kind, cd_redop redop, cd_dtype dtype)
{
    bool reduces = kind == CD_ALL_REDUCE || kind == CD_REDUCE || kind == CD_REDUCE_SCATTER;
    if (reduces && !cd_redop_supports(redop, dtype))
        return cd_fail(CD_UNSUPPORTED, "%s: ReduceOp.%s is not defined for %s", cd_kind_name(kind), cd_redop_name(redop),
                       cd_dtype_name(dtype));
    return CD_OK;
}

static bool self_is_quick(cd_backend *backend, const cd_op *op)
{
    (void)backend;
    return op->count * op->item_bytes <= 65536;
}

/* The reduction of one input is not always the input: PREMUL_SUM scales it, bool becomes 0 or 1. */
static cd_status finish_reduction(const cd_op *op, const cd_span *out)
{
    if (op->redop != CD_PREMUL_SUM && op->dtype != CD_BOOL)
        return CD_OK;
    cd_reduce_func reduce = cd_reduce_find(op->redop, op->dtype);
    char block[4096];
    size_t most = sizeof block / op->item_bytes;
    for (size_t first = 0; first < out->count; first += most) {
        size_t count = out->count - first < most ? out->count - first : most;
        const void *in[1] = {block};
        cd_span_read(out, first, count, block);
        reduce(block, in, 1, count, op->factor);
        cd_span_write(out, first, count, block);
    }
    return CD_OK;
}

static cd_status self_run(cd_backend *backend, const cd_op *op, const cd_patience *patience)
{
    (void)backend;
    (void)patience;
    if (op->kind == CD_BARRIER || !op->in.spans || !op->out.spans)
        return CD_OK;
    const cd_span *in = &op->in.list[0], *out = &op->out.list[0];
    if (in->data != out->data)
        cd_span_copy(out, in);
    if (op->kind == CD_ALL_REDUCE || op->kind == CD_REDUCE || op->kind == CD_REDUCE_SCATTER)
        return finish_reduction(op, out);
    return CD_OK;
}

static void self_abort(cd_backend *backend)
{
    (void)backend;
}

static void self_free(cd_backend *backend)
{
    free(backend);
}

static const cd_backend_ops ops = {.name = "self", .device = CD_CPU, .supports = self_supports, .is_quick = self_is_quick,
                                   .run = self_run, .abort = self_abort, .free = self_free};

cd_status cd_backend_open_self(const cd_backend_env *env, cd_backend **out)
{
    (void)env;
    cd_backend *backend = malloc(sizeof *backend);
    if (!backend)
        return cd_fail(CD_NO_MEMORY, "no memory for a backend");
    backend->ops = &ops;
    *out = backend;
    return CD_OK;
}
