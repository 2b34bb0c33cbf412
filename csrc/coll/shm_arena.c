/* all_reduce in memory that all ranks have mapped: each rank reduces its slice from all inputs where they lie and stores the
 * result to all outputs. Two waits and no staging. Falls back to staging unless the buffers of all ranks lie in the arena. */
#include "coll/shm_team_impl.h"

/* What is reduced at a time, before it is copied to the others: blocks of two inputs stay in L1, and the kernel writes one
 * destination. Measured with 2 ranks at 1 MiB: 4 KiB 23.5 µs, 16 KiB 25, 2 KiB as 4. */
#define BLOCK_BYTES ((size_t)4096)

/* 1 + offset from the arena's base, 0 unless the span lies in the own region in one run. */
static uint64_t locate(const cd_arena *arena, const cd_span *span)
{
    if (span->dims)
        return 0;
    size_t offset = cd_arena_offset(arena, span->data, span->count * span->item_bytes);
    return offset == SIZE_MAX ? 0 : (uint64_t)((size_t)arena->local * arena->region_bytes + offset) + 1;
}

static inline char *at_where(const cd_arena *arena, uint64_t where)
{
    return arena->base + (where - 1);
}

/* The decision is the same on all ranks: it depends on what all of them wrote before the meeting. */
static bool all_lie_in_arena(const cd_shm_team *shm)
{
    for (int peer = 0; peer < shm->ranks; peer++) {
        const cd_shm_where *where = &cd_shm_head_of(shm, peer)->where;
        if (!where->in_at || !where->out_at)
            return false;
    }
    return true;
}

static void reduce_slice(cd_shm_team *shm, const cd_op *op, size_t from, size_t end)
{
    cd_reduce_func reduce = cd_reduce_find(op->redop, op->dtype);
    char *own = op->out.list[0].data;
    for (size_t at = from; at < end; at += BLOCK_BYTES) {
        size_t bytes = cd_least(BLOCK_BYTES, end - at);
        for (int peer = 0; peer < shm->ranks; peer++)
            shm->inputs[peer] = at_where(shm->arena, cd_shm_head_of(shm, peer)->where.in_at) + at;
        reduce(own + at, shm->inputs, shm->ranks, bytes / op->item_bytes, op->factor);
        for (int i = 1; i < shm->ranks; i++) {
            int peer = (shm->rank + i) % shm->ranks;
            cd_shm_give(shm, at_where(shm->arena, cd_shm_head_of(shm, peer)->where.out_at) + at, own + at, bytes);
        }
    }
}

static cd_status run_in_place(cd_team *team, const cd_op *op, cd_shm_where where, const cd_patience *patience)
{
    cd_shm_team *shm = team->shm;
    cd_shm_begin(shm, op, CD_SHM_ROUNDS)->where = where;
    cd_shm_enter(shm);
    CD_TRY(cd_shm_meet(team, op, patience));
    if (!all_lie_in_arena(shm))
        return cd_shm_stage_after_meeting(team, op, patience);
    size_t bytes = op->in.list[0].count * op->item_bytes, ranks = (size_t)shm->ranks;
    size_t slice = cd_round_up((bytes + ranks - 1) / ranks, CD_SHM_GRAIN);
    size_t from = cd_least((size_t)shm->rank * slice, bytes);
    reduce_slice(shm, op, from, cd_least(from + slice, bytes));
    /* A rank that gives up says so before it touches its array again: what was read there since may not be its input. Acquire in
     * the check orders the reads above before it. */
    if (patience->cause)
        CD_TRY(cd_cause_check(patience->cause));
    /* The round is only a ticket here; it keeps the counters of the ring in step. */
    uint64_t round = shm->rounds++;
    cd_shm_raise(&shm->rows[shm->rank].left.round, round + 1);
    for (int peer = 0; peer < shm->ranks; peer++)
        if (peer != shm->rank)
            CD_TRY(cd_shm_await(team, &shm->rows[peer].left.round, round + 1, peer, patience));
    return CD_OK;
}

cd_status cd_shm_arena_run(cd_team *team, const cd_op *op, const cd_patience *patience)
{
    cd_shm_team *shm = team->shm;
    cd_shm_where where = {.in_at = locate(shm->arena, &op->in.list[0]),
                          .out_at = locate(shm->arena, &op->out.list[0]),
                          .skew = cd_shm_skew_of(&op->in)};
    if (!where.in_at || !where.out_at)
        return cd_shm_stage_run(team, op, patience);
    cd_shm_choose_way(team, op, false);
    return cd_shm_note_way(shm, run_in_place(team, op, where, patience));
}
