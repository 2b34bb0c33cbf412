/* send and recv: outside the order of collectives, straight on the mesh. */
#include "group/stall.h"
#include "group/work_impl.h"
#include "simd/strided.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Marks a signature that is the meaning of bytes, their size included, and no dtype with its size. */
#define MEANS (UINT32_C(1) << 31)

/* Both sides must agree on what an element is; the shape may differ. Never 0. */
static uint32_t element_signature(const cd_op *op)
{
    return op->meaning ? op->meaning | MEANS : 1u + (uint32_t)op->dtype + (op->item_bytes << 8);
}

static cd_match match_of(const cd_group *g, const cd_op *op)
{
    return (cd_match){g->context + 1, op->tag};
}

static const cd_span *span_of(const cd_op *op)
{
    return op->kind == CD_SEND ? &op->in.list[0] : &op->out.list[0];
}

static cd_status pack(const cd_op *op, void **packed_p)
{
    const cd_span *span = span_of(op);
    size_t bytes = span->count * span->item_bytes;
    *packed_p = malloc(bytes ? bytes : 1);
    if (!*packed_p)
        return cd_fail(CD_NO_MEMORY, "%s: no memory for %zu bytes of a strided array", cd_kind_name(op->kind), bytes);
    if (op->kind == CD_SEND)
        cd_span_read(span, 0, span->count, *packed_p);
    return CD_OK;
}

static void post(cd_group *g, const cd_op *op, cd_xfer *xfer, void *packed, bool is_async)
{
    const cd_span *span = span_of(op);
    void *data = packed ? packed : span->data;
    size_t bytes = span->count * span->item_bytes;
    int peer = op->peer < 0 ? -1 : g->world_ranks[op->peer];
    if (op->kind == CD_SEND)
        cd_mesh_send(g->world->mesh, xfer, peer, match_of(g, op), element_signature(op), data, bytes, is_async);
    else
        cd_mesh_recv(g->world->mesh, xfer, peer, match_of(g, op), element_signature(op), data, bytes, false, is_async);
}

static const char *elements_text(uint32_t signature, size_t bytes, char *out, size_t room)
{
    uint32_t item = (signature - 1) >> 8;
    if (signature && !(signature & MEANS) && item)
        snprintf(out, room, "%zu elements of %s (%zu bytes)", bytes / item, cd_dtype_name((cd_dtype)((signature - 1) & 0xFF)),
                 bytes);
    else
        snprintf(out, room, "%zu bytes", bytes);
    return out;
}

/* What each side posted, in the same words on both. */
static cd_status describe_mismatch(const cd_group *g, const cd_op *op, const cd_xfer *xfer)
{
    const cd_span *span = span_of(op);
    char mine[80], theirs[80];
    int me = g->world->rank, other = cd_last_error()->rank;
    elements_text(element_signature(op), span->count * span->item_bytes, mine, sizeof mine);
    elements_text(xfer->their_signature, xfer->their_bytes, theirs, sizeof theirs);
    bool sends = op->kind == CD_SEND, alike = strcmp(mine, theirs) == 0;
    return cd_fail_rank(CD_MISMATCH, other,
                        "ranks disagree about a message with tag %lld: rank %d sends %s, rank %d receives %s%s",
                        (long long)op->tag, sends ? me : other, sends ? mine : theirs, sends ? other : me,
                        sends ? theirs : mine, alike ? " of another unit, byte order or record" : "");
}

static cd_status name_message(const cd_group *g, const cd_op *op)
{
    return cd_fail_prefix("rank %d in %s(%s %d, tag %lld): ", g->world->rank, cd_kind_name(op->kind),
                          op->kind == CD_SEND ? "to" : "from", op->peer < 0 ? -1 : (int)g->world_ranks[op->peer],
                          (long long)op->tag);
}

cd_status cd_p2p_explain(cd_group *g, const cd_op *op, cd_status status)
{
    if (cd_last_error()->rank < 0 && op->peer >= 0)
        cd_fail_rank(status, g->world_ranks[op->peer], "%s", cd_last_error()->text);
    status = cd_group_first_cause(g, status);
    if (atomic_load_explicit(&g->cause->state, memory_order_acquire) != CD_CAUSE_NONE)
        return status;
    return name_message(g, op);
}

/* A transfer that failed or timed out does not end the group: the order of collectives is untouched. */
static cd_status soften(cd_group *g, const cd_op *op, cd_status status, const cd_xfer *xfer, const cd_watch *watch)
{
    if (status == CD_OK || status == CD_INTERRUPTED)
        return status;
    int peer = cd_last_error()->rank;
    if (status == CD_MISMATCH)
        status = describe_mismatch(g, op, xfer);
    if (status == CD_PEER_LOST || status == CD_ABORTED)
        return cd_p2p_explain(g, op, status);
    name_message(g, op);
    if (status != CD_TIMED_OUT)
        return status;
    char text[CD_ERROR_TEXT_BYTES], late[640] = "";
    memcpy(text, cd_last_error()->text, sizeof text);
    if (watch)
        peer = cd_watch_blame(watch, peer, late, sizeof late);
    return cd_fail_rank(CD_WAIT_EXPIRED, peer,
                        "%s%s%s; a large send waits for its recv: when two ranks send to each other first, use isend or "
                        "batch_isend_irecv", text, late[0] ? "; " : "", late);
}

cd_status cd_p2p_run(cd_group *g, cd_op *op, cd_patience *patience)
{
    if (g->size == 1 && !g->world->mesh)
        return cd_fail(CD_BAD_ARGUMENT, "%s: the group has one rank only, there is nobody to talk to", cd_kind_name(op->kind));
    void *packed = 0;
    if (span_of(op)->dims)
        CD_TRY(pack(op, &packed));
    int peer = op->peer < 0 ? -1 : g->world_ranks[op->peer];
    cd_record *record = cd_record_begin(g->page, op, g->context, peer, CD_RECORD_RUNNING);
    uint64_t ticket = atomic_load_explicit(&record->ticket, memory_order_relaxed);
    cd_watch watch = {0};
    cd_xfer xfer = {0};
    cd_xfer *list = &xfer;
    post(g, op, &xfer, packed, false);
    cd_status status = CD_OK;
    if (!atomic_load_explicit(&xfer.done, memory_order_acquire) || xfer.error) {
        patience->cause = g->template.cause;
        patience->gone = g->world->gone;
        patience->spin = g->template.spin;
        patience->yields = g->template.yields;
        cd_watch_begin(&watch, g, op, peer < 0 ? -2 : peer, patience);
        status = cd_mesh_wait(g->world->mesh, &list, 1, patience);
        cd_watch_end(&watch, patience);
        if (status != CD_OK) {
            cd_error why = *cd_last_error();
            cd_mesh_cancel(g->world->mesh, &xfer);
            cd_fail_with(&why);
            /* The receiver may have taken it at the last moment. */
            bool is_fine = status != CD_INTERRUPTED && !xfer.error;
            status = is_fine ? CD_OK : soften(g, op, status, &xfer, &watch);
        }
    }
    if (status == CD_OK && op->kind == CD_RECV) {
        op->peer = g->index_of[xfer.source];
        if (packed)
            cd_span_write(span_of(op), 0, span_of(op)->count, packed);
    }
    cd_record_end(record, ticket, status == CD_OK, watch.started_ns != 0);
    cd_xfer_clear(&xfer);
    free(packed);
    return status;
}

void cd_orphans_reap(cd_group *g, bool cancel)
{
    pthread_mutex_lock(&g->orphans_lock);
    cd_work *list = atomic_exchange_explicit(&g->orphans, NULL, memory_order_relaxed);
    pthread_mutex_unlock(&g->orphans_lock);
    while (list) {
        cd_work *work = list;
        list = work->next;
        if (cancel && !cd_work_is_done(work)) {
            if (work->is_p2p)
                cd_mesh_cancel(g->world->mesh, &work->xfer);
            cd_fail(CD_ABORTED, "the process group was destroyed");
            cd_work_complete(work, CD_ABORTED);
        }
        cd_work_is_done(work);
        cd_work_release(work); /* goes back to the orphans if it still moves */
    }
}

cd_status cd_p2p_start(cd_group *g, cd_work *work)
{
    if (g->size == 1 && !g->world->mesh)
        return cd_fail(CD_BAD_ARGUMENT, "%s: the group has one rank only, there is nobody to talk to",
                       cd_kind_name(work->op.kind));
    if (atomic_load_explicit(&g->orphans, memory_order_relaxed))
        cd_orphans_reap(g, false);
    if (span_of(&work->op)->dims)
        CD_TRY(pack(&work->op, &work->packed));
    work->started_ns = work->queued_ns;
    work->is_p2p = true;
    post(g, &work->op, &work->xfer, work->packed, true);
    return CD_OK;
}

bool cd_p2p_finish(cd_work *work)
{
    if (atomic_load_explicit(&work->done, memory_order_acquire))
        return true;
    if (!atomic_load_explicit(&work->xfer.done, memory_order_acquire))
        return false;
    uint32_t free_right = 0;
    if (!atomic_compare_exchange_strong_explicit(&work->finishing, &free_right, 1, memory_order_acq_rel,
                                                 memory_order_acquire))
        return atomic_load_explicit(&work->done, memory_order_acquire) != 0;
    cd_status status = CD_OK;
    if (work->xfer.error)
        status = soften(work->group, &work->op, cd_fail_with(work->xfer.error), &work->xfer, NULL);
    else if (work->op.kind == CD_RECV && work->packed)
        cd_span_write(span_of(&work->op), 0, span_of(&work->op)->count, work->packed);
    cd_work_complete(work, status);
    return true;
}

void cd_p2p_close(cd_group *g)
{
    cd_orphans_reap(g, true);
}
