/* all_reduce and reduce in memory that all ranks have mapped: each rank reduces its slice from all inputs where they lie and
 * stores the result to all outputs. Two waits and no staging. Falls back to staging unless the buffers of all ranks lie in the
 * arena. */
#include "coll/shm_team_impl.h"

/* What is reduced at a time, before it is copied to the others: blocks of two inputs stay in L1, and the kernel writes one
 * destination. Measured with 2 ranks at 1 MiB: 4 KiB 23.5 µs, 16 KiB 25, 2 KiB as 4. */
#define BLOCK_BYTES ((size_t)4096)

static inline char *at_where(const cd_arena *arena, uint64_t where)
{
    return arena->base + (where - 1);
}

/* The slice's result goes to the outputs of all, or to that of the root. */
static void reduce_slice(cd_shm_team *shm, const cd_op *op, size_t from, size_t end)
{
    cd_reduce_func reduce = cd_reduce_find(op->redop, op->dtype);
    bool to_root = op->kind == CD_REDUCE, has_out = !to_root || shm->rank == op->root;
    for (size_t at = from; at < end; at += BLOCK_BYTES) {
        size_t bytes = cd_least(BLOCK_BYTES, end - at);
        for (int peer = 0; peer < shm->ranks; peer++)
            shm->inputs[peer] = at_where(shm->arena, cd_shm_head_of(shm, peer)->where.in_at) + at;
        char *own = has_out ? (char *)op->out.list[0].data + at : shm->scratch;
        reduce(own, shm->inputs, shm->ranks, bytes / op->item_bytes, op->factor);
        for (int i = 1; i < shm->ranks; i++) {
            int peer = (shm->rank + i) % shm->ranks;
            if (!to_root || peer == op->root)
                cd_shm_give(shm, at_where(shm->arena, cd_shm_head_of(shm, peer)->where.out_at) + at, own, bytes);
        }
    }
}

static cd_status run_in_place(cd_team *team, const cd_op *op, const cd_shm_where *where, const cd_patience *patience)
{
    cd_shm_team *shm = team->shm;
    cd_shm_head *head = cd_shm_begin(shm, op, CD_SHM_ROUNDS);
    head->where = *where;
    cd_shm_reach_offer(shm, op, head);
    cd_shm_enter(shm);
    CD_TRY(cd_shm_meet(team, op, patience));
    if (!cd_shm_all_in_arena(shm))
        return cd_shm_stage_after_meeting(team, op, patience);
    if (shm->timed_bytes >= CD_SHM_LARGE)
        shm->timed = NULL; /* neither of the two ways of large ones */
    size_t bytes = op->in.list[0].count * op->item_bytes, ranks = (size_t)shm->ranks;
    size_t slice = cd_round_up((bytes + ranks - 1) / ranks, CD_SHM_GRAIN);
    size_t from = cd_least((size_t)shm->rank * slice, bytes);
    reduce_slice(shm, op, from, cd_least(from + slice, bytes));
    return cd_shm_reach_end(team, op, patience);
}

cd_status cd_shm_arena_run(cd_team *team, const cd_op *op, const cd_patience *patience)
{
    cd_shm_team *shm = team->shm;
    cd_shm_where where = cd_shm_locate(shm, op);
    where.skew = cd_shm_skew_of(&op->in);
    if (!where.in_at || !where.out_at)
        return cd_shm_stage_run(team, op, patience);
    cd_shm_choose_way(team, op);
    return cd_shm_note_way(shm, run_in_place(team, op, &where, patience));
}
