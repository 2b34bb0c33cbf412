/* Moves of any size through the rings: broadcast, all_gather, gather, scatter, all_to_all. In each round a rank puts the next
 * slice of what it gives into a slot (one slice for all where all get the same, otherwise one for each peer) and copies the
 * slices of the others out of theirs. It puts one round ahead of what it takes, so that peers seldom wait for it. */
#include "coll/shm_team_impl.h"

typedef struct {
    cd_team *team;
    const cd_patience *patience;
    const cd_shm_piece *common; /* what every peer gets, NULL when each gets its own or this rank gives nothing */
    bool one_for_all;
    size_t slice;               /* bytes of a round for one peer */
    uint64_t first, end;        /* rounds, as the team counts them */
} move;

/* Whether every peer that a rank gives to gets the same. */
static inline bool gives_one(cd_kind kind)
{
    return kind == CD_BROADCAST || kind == CD_ALL_GATHER || kind == CD_GATHER;
}

static move plan_move(cd_team *team, const cd_op *op, const cd_patience *patience)
{
    cd_shm_team *shm = team->shm;
    move m = {.team = team, .patience = patience, .first = shm->rounds};
    m.one_for_all = gives_one(op->kind);
    size_t peers = shm->ranks > 1 ? (size_t)shm->ranks - 1 : 1;
    m.slice = m.one_for_all ? shm->slot_bytes : shm->slot_bytes / peers / CD_SHM_GRAIN * CD_SHM_GRAIN;
    int taker = op->kind == CD_GATHER ? op->root : (shm->rank + 1) % shm->ranks;
    if (m.one_for_all && taker != shm->rank && shm->gives[taker].bytes)
        m.common = &shm->gives[taker];
    return m;
}

/* Part of a piece that travels in a round. */
static inline size_t part_of(const move *m, const cd_shm_piece *piece, uint64_t round, size_t *at_p)
{
    size_t at = (size_t)(round - m->first) * m->slice;
    *at_p = at;
    return at < piece->bytes ? cd_least(piece->bytes - at, m->slice) : 0;
}

/* Position of the slice for `taker` in a slot of `giver`, when each peer gets its own. */
static inline size_t slice_index(int giver, int taker)
{
    return (size_t)(taker < giver ? taker : taker - 1);
}

static cd_status put(const move *m, uint64_t round)
{
    cd_shm_team *shm = m->team->shm;
    char *slot = cd_shm_slot_of(shm, shm->rank, round);
    size_t at, put_bytes = 0;
    if (m->one_for_all) {
        size_t bytes = m->common ? part_of(m, m->common, round, &at) : 0;
        if (!bytes)
            return CD_OK;
        CD_TRY(cd_shm_wait_free(m->team, round, m->patience));
        cd_piece_give(shm, m->common, at, bytes, slot);
        cd_shm_raise(&shm->rows[shm->rank].staged.round, round + 1);
        return CD_OK;
    }
    for (int peer = 0; peer < shm->ranks; peer++) {
        size_t bytes = peer == shm->rank ? 0 : part_of(m, &shm->gives[peer], round, &at);
        if (!bytes)
            continue;
        if (!put_bytes)
            CD_TRY(cd_shm_wait_free(m->team, round, m->patience));
        cd_piece_give(shm, &shm->gives[peer], at, bytes, slot + slice_index(shm->rank, peer) * m->slice);
        put_bytes += bytes;
    }
    if (put_bytes)
        cd_shm_raise(&shm->rows[shm->rank].staged.round, round + 1);
    return CD_OK;
}

static cd_status take(const move *m, uint64_t round)
{
    cd_shm_team *shm = m->team->shm;
    for (int i = 1; i < shm->ranks; i++) {
        int peer = (shm->rank + i) % shm->ranks;
        size_t at, bytes = part_of(m, &shm->takes[peer], round, &at);
        if (!bytes)
            continue;
        CD_TRY(cd_shm_await(m->team, &shm->rows[peer].staged.round, round + 1, peer, m->patience));
        size_t index = m->one_for_all ? 0 : slice_index(peer, shm->rank);
        cd_piece_receive(&shm->takes[peer], at, bytes, cd_shm_slot_of(shm, peer, round) + index * m->slice);
    }
    cd_shm_raise(&shm->rows[shm->rank].left.round, round + 1);
    return CD_OK;
}

/* Bytes of the largest piece; the same on all of them where blocks are equal. */
static size_t largest_piece(const cd_shm_team *shm)
{
    size_t largest = 0;
    for (int peer = 0; peer < shm->ranks; peer++) {
        largest = shm->gives[peer].bytes > largest ? shm->gives[peer].bytes : largest;
        largest = shm->takes[peer].bytes > largest ? shm->takes[peer].bytes : largest;
    }
    return shm->ranks > 1 ? largest : 0;
}

static void deliver_eager(cd_shm_team *shm)
{
    for (int peer = 0; peer < shm->ranks; peer++)
        cd_piece_write(&shm->takes[peer], 0, shm->takes[peer].bytes, shm->inputs[peer]);
}

static cd_status run_move(cd_team *team, const cd_op *op, const cd_patience *patience)
{
    cd_shm_team *shm = team->shm;
    bool uneven = (op->flags & CD_OP_UNEVEN) != 0, one_for_all = gives_one(op->kind);
    cd_shm_resolve(shm, op);
    cd_shm_head *head = cd_shm_begin(shm, op, CD_SHM_ROUNDS);
    head->where = cd_shm_locate(shm, op);
    cd_shm_reach_offer(shm, op, head);
    if (uneven) {
        cd_shm_write_counts(shm);
        cd_shm_give_eagerly(shm, one_for_all);
    }
    cd_shm_enter(shm);
    size_t largest = largest_piece(shm);
    move m = plan_move(team, op, patience);
    bool has_put = !uneven && !shm->reads && !head->where.in_at && largest;
    /* The first round is put while the others arrive: it touches nobody's memory but the own ring. Not what may be read in the
     * arena. */
    if (has_put)
        CD_TRY(put(&m, m.first));
    CD_TRY(cd_shm_meet(team, op, patience));
    if (uneven) {
        CD_TRY(cd_shm_check_counts(team, op, &largest));
        if (cd_shm_take_eagerly(shm, one_for_all)) {
            deliver_eager(shm);
            return CD_OK;
        }
    }
    bool ran;
    CD_TRY(cd_shm_reach_run(team, op, patience, &ran));
    if (ran)
        return CD_OK;
    m.first = shm->rounds;
    m.end = m.first + (largest + m.slice - 1) / m.slice;
    if (!has_put && m.first < m.end)
        CD_TRY(put(&m, m.first));
    cd_shm_copy_own(shm);
    for (uint64_t round = m.first; round < m.end; round++) {
        if (round + 1 < m.end)
            CD_TRY(put(&m, round + 1));
        CD_TRY(take(&m, round));
    }
    shm->rounds = m.end;
    return CD_OK;
}

cd_status cd_shm_move_run(cd_team *team, const cd_op *op, const cd_patience *patience)
{
    cd_shm_choose_way(team, op);
    return cd_shm_note_way(team->shm, run_move(team, op, patience));
}
