/* One phase: every rank puts what it gives into its small slot, meets the others, and takes what it needs from all slots.
 * No syscall, allocation, lock or read-modify-write. */
#include "coll/shm_team_impl.h"

/* Contributions of up to CD_SHM_INLINE bytes travel in the head's own line; larger ones need a claim first. */
static inline const char *payload_of(const cd_shm_team *shm, int rank, size_t bytes)
{
    return bytes <= CD_SHM_INLINE ? cd_shm_head_of(shm, rank)->payload : cd_shm_small_of(shm, rank);
}

/* The own one, before the head is entered. */
static inline char *own_payload(cd_shm_team *shm, size_t bytes)
{
    return bytes <= CD_SHM_INLINE ? shm->draft.payload : cd_shm_small_of(shm, shm->rank);
}

/* Reduces shm->inputs into a piece of the output. */
static void reduce_into(cd_shm_team *shm, const cd_op *op, const cd_span *out, size_t bytes)
{
    cd_reduce_func reduce = cd_reduce_find(op->redop, op->dtype);
    char *to = out->dims ? shm->scratch : out->data;
    reduce(to, shm->inputs, shm->ranks, bytes / out->item_bytes, op->factor);
    if (out->dims)
        cd_span_write(out, 0, out->count, to);
}

static cd_status run_reduce(cd_team *team, const cd_op *op, const cd_patience *patience)
{
    cd_shm_team *shm = team->shm;
    const cd_shm_piece give = cd_piece_whole(&op->in.list[0]);
    cd_shm_begin(shm, op, CD_SHM_SMALL);
    if (give.bytes > CD_SHM_INLINE)
        cd_shm_claim_small(shm, give.bytes);
    cd_piece_read(&give, 0, give.bytes, own_payload(shm, give.bytes));
    cd_shm_enter(shm);
    CD_TRY(cd_shm_meet(team, op, patience));
    if (!give.bytes || (op->kind == CD_REDUCE && shm->rank != op->root))
        return CD_OK;
    for (int peer = 0; peer < shm->ranks; peer++)
        shm->inputs[peer] = payload_of(shm, peer, give.bytes);
    reduce_into(shm, op, &op->out.list[0], give.bytes);
    return CD_OK;
}

static cd_status run_broadcast(cd_team *team, const cd_op *op, const cd_patience *patience)
{
    cd_shm_team *shm = team->shm;
    bool is_root = shm->rank == op->root;
    const cd_shm_piece piece = cd_piece_whole(is_root ? &op->in.list[0] : &op->out.list[0]);
    cd_shm_begin(shm, op, CD_SHM_SMALL);
    if (piece.bytes > CD_SHM_INLINE)
        cd_shm_claim_small(shm, piece.bytes);
    if (is_root)
        cd_piece_read(&piece, 0, piece.bytes, own_payload(shm, piece.bytes));
    cd_shm_enter(shm);
    CD_TRY(cd_shm_meet(team, op, patience));
    if (!is_root)
        cd_piece_write(&piece, 0, piece.bytes, payload_of(shm, op->root, piece.bytes));
    return CD_OK;
}

/* Bytes of a rank's whole contribution when blocks are equal: what it gives to one rank, or to all of them one behind the
 * other. Ranks that take compute it of the ranks that give. */
static inline size_t contribution(const cd_shm_team *shm, size_t block_bytes, bool one_for_all)
{
    return one_for_all ? block_bytes : block_bytes * (size_t)shm->ranks;
}

/* all_gather, gather, scatter, reduce_scatter and all_to_all of equal blocks. */
static cd_status run_blocks(cd_team *team, const cd_op *op, const cd_patience *patience)
{
    cd_shm_team *shm = team->shm;
    bool one_for_all = op->kind == CD_ALL_GATHER || op->kind == CD_GATHER;
    bool from_root = op->kind == CD_SCATTER, to_root = op->kind == CD_GATHER;
    bool is_root = shm->rank == op->root;
    cd_shm_resolve(shm, op);
    size_t block = one_for_all ? shm->gives[to_root ? op->root : shm->rank].bytes
                               : shm->takes[from_root ? op->root : shm->rank].bytes;
    size_t all = contribution(shm, block, one_for_all);
    cd_shm_begin(shm, op, CD_SHM_SMALL);
    if (all > CD_SHM_INLINE)
        cd_shm_claim_small(shm, all);
    if (!from_root || is_root) {
        char *payload = own_payload(shm, all);
        for (int peer = 0; peer < (one_for_all ? 1 : shm->ranks); peer++)
            cd_piece_read(&shm->gives[one_for_all && to_root ? op->root : peer], 0, block,
                          payload + (size_t)peer * block);
    }
    cd_shm_enter(shm);
    CD_TRY(cd_shm_meet(team, op, patience));
    if (!block || (to_root && !is_root))
        return CD_OK;
    size_t mine = one_for_all ? 0 : (size_t)shm->rank * block;
    if (op->kind == CD_REDUCE_SCATTER) {
        for (int peer = 0; peer < shm->ranks; peer++)
            shm->inputs[peer] = payload_of(shm, peer, all) + mine;
        reduce_into(shm, op, &op->out.list[0], block);
        return CD_OK;
    }
    for (int peer = from_root ? op->root : 0; peer < (from_root ? op->root + 1 : shm->ranks); peer++)
        cd_piece_write(&shm->takes[peer], 0, block, payload_of(shm, peer, all) + mine);
    return CD_OK;
}

cd_status cd_shm_small_run(cd_team *team, const cd_op *op, const cd_patience *patience)
{
    switch (op->kind) {
    case CD_ALL_REDUCE:
    case CD_REDUCE: return run_reduce(team, op, patience);
    case CD_BROADCAST: return run_broadcast(team, op, patience);
    case CD_BARRIER:
        cd_shm_begin(team->shm, op, CD_SHM_SMALL);
        cd_shm_enter(team->shm);
        return cd_shm_meet(team, op, patience);
    default: return run_blocks(team, op, patience);
    }
}
