/* Reductions of any size through the rings. In each round a rank puts the slices of the others into its slot, waits for
 * theirs, reduces its own slice in rank order, publishes it in its slot, and (all_reduce, root of reduce) copies the reduced
 * slices of the others out. Only foreign slices are staged; the own one is read where it lies. It puts one round ahead and
 * takes one behind, so that a rank that is a little late keeps nobody (2 ranks, 64 MiB: 6.7 ms instead of 8.1). Where ranks
 * outnumber cores it goes by several rounds at a time, since every wait gives the core away. */
#include "coll/shm_team_impl.h"

#include "base/host.h"

/* Rounds at a time where ranks outnumber cores: half a ring, so that the next ones find free slots. */
#define CROWDED_ROUNDS (CD_SHM_SLOTS / 2)
/* Slices from here on lie against lines as their giver's memory does. */
#define SKEWED_BYTES ((size_t)4096)

typedef struct {
    cd_team *team;
    const cd_op *op;
    const cd_patience *patience;
    cd_reduce_func reduce;
    cd_shm_piece in, out;  /* ALL_REDUCE, REDUCE; out.span == NULL where there is none */
    size_t slice;
    size_t pad;            /* bytes between slices; 0: they begin on lines */
    uint64_t first, end;   /* rounds, as the team counts them */
} stage;

/* Gives the stage the largest slices that fit when a slot holds `count` of them. */
static void choose_slice(stage *s, size_t count, bool skewed)
{
    size_t room = s->team->shm->slot_bytes / count / CD_SHM_GRAIN * CD_SHM_GRAIN;
    s->pad = skewed && room > SKEWED_BYTES ? CD_SHM_GRAIN : 0;
    s->slice = room - s->pad;
}

/* Slice number `index` in the slot of `giver`; `offset`: of its bytes from the start of the giver's input, to within a line.
 * Copies and kernels run along lines when both sides lie alike. */
static inline char *slice_of(const stage *s, int giver, uint64_t round, size_t index, size_t offset)
{
    const cd_shm_team *shm = s->team->shm;
    size_t skew = s->pad ? (cd_shm_head_of(shm, giver)->where.skew + offset) % CD_SHM_GRAIN : 0;
    return cd_shm_slot_of(shm, giver, round) + index * (s->slice + s->pad) + skew;
}

/* Slice of rank `owner` in a round of ALL_REDUCE and REDUCE. */
static inline size_t part_of(const stage *s, uint64_t round, int owner, size_t *at_p)
{
    size_t at = ((size_t)(round - s->first) * (size_t)s->team->world + (size_t)owner) * s->slice;
    *at_p = at;
    return at < s->in.bytes ? cd_least(s->in.bytes - at, s->slice) : 0;
}

static cd_status put(const stage *s, uint64_t round)
{
    cd_shm_team *shm = s->team->shm;
    CD_TRY(cd_shm_wait_free(s->team, round, s->patience));
    for (int i = 1; i < shm->ranks; i++) {
        int owner = (shm->rank + i) % shm->ranks;
        size_t at, bytes = part_of(s, round, owner, &at);
        cd_piece_give(shm, &s->in, at, bytes, slice_of(s, shm->rank, round, (size_t)owner, 0));
    }
    cd_shm_raise(&shm->rows[shm->rank].staged.round, round + 1);
    return CD_OK;
}

static cd_status wait_staged(const stage *s, uint64_t round)
{
    const cd_shm_team *shm = s->team->shm;
    for (int peer = 0; peer < shm->ranks; peer++)
        if (peer != shm->rank)
            CD_TRY(cd_shm_await(s->team, &shm->rows[peer].staged.round, round + 1, peer, s->patience));
    return CD_OK;
}

/* Where the own part of the input can be read in one run. */
static const void *own_input(const stage *s, const cd_shm_piece *piece, size_t at, size_t bytes)
{
    const char *own = cd_piece_at(piece, at);
    if (own)
        return own;
    cd_piece_read(piece, at, bytes, s->team->shm->scratch);
    return s->team->shm->scratch;
}

static cd_status reduce_own(const stage *s, uint64_t round)
{
    cd_shm_team *shm = s->team->shm;
    CD_TRY(wait_staged(s, round));
    size_t at, bytes = part_of(s, round, shm->rank, &at), index = (size_t)shm->rank;
    if (bytes) {
        for (int peer = 0; peer < shm->ranks; peer++)
            shm->inputs[peer] = slice_of(s, peer, round, index, 0);
        shm->inputs[shm->rank] = own_input(s, &s->in, at, bytes);
        char *shared = slice_of(s, shm->rank, round, index, 0);
        char *own = s->out.span ? cd_piece_at(&s->out, at) : NULL;
        /* In private memory first, then in bulk: a kernel that writes shared lines one by one is slower (measured). */
        s->reduce(own ? own : shared, shm->inputs, shm->ranks, bytes / s->op->item_bytes, s->op->factor);
        if (own)
            cd_shm_give(shm, shared, own, bytes);
        else if (s->out.span)
            cd_piece_write(&s->out, at, bytes, shared);
    }
    cd_shm_raise(&shm->rows[shm->rank].reduced.round, round + 1);
    return CD_OK;
}

static cd_status take(const stage *s, uint64_t round)
{
    cd_shm_team *shm = s->team->shm;
    for (int i = 1; s->out.span && i < shm->ranks; i++) {
        int owner = (shm->rank + i) % shm->ranks;
        size_t at, bytes = part_of(s, round, owner, &at);
        if (!bytes)
            continue;
        CD_TRY(cd_shm_await(s->team, &shm->rows[owner].reduced.round, round + 1, owner, s->patience));
        cd_piece_write(&s->out, at, bytes, slice_of(s, owner, round, (size_t)owner, 0));
    }
    cd_shm_raise(&shm->rows[shm->rank].left.round, round + 1);
    return CD_OK;
}

/* Chunks of equal size, so that the last one is not a crumb. */
static void plan_rounds(stage *s)
{
    size_t ranks = (size_t)s->team->world;
    choose_slice(s, ranks, true);
    size_t rounds = (s->in.bytes + s->slice * ranks - 1) / (s->slice * ranks);
    s->first = s->team->shm->rounds;
    s->end = s->first + rounds;
    s->slice = rounds ? cd_round_up((s->in.bytes + rounds * ranks - 1) / (rounds * ranks), CD_SHM_GRAIN) : CD_SHM_GRAIN;
}

static stage plan_stage(cd_team *team, const cd_op *op, const cd_patience *patience)
{
    stage s = {.team = team, .op = op, .patience = patience, .reduce = cd_reduce_find(op->redop, op->dtype)};
    if (op->kind == CD_REDUCE_SCATTER)
        return s;
    s.in = cd_piece_whole(&op->in.list[0]);
    if (op->kind == CD_ALL_REDUCE || team->rank == op->root)
        s.out = cd_piece_whole(&op->out.list[0]);
    plan_rounds(&s);
    return s;
}

/* All rounds; those before `put_end` have been put. Nobody waits for a rank that waits for it: when a rank takes round t it has
 * reduced at most 2 · CROWDED_ROUNDS − 1 rounds more, for which it needs slices of rounds before t + SLOTS; and a rank that
 * waits to put round t + SLOTS, until all have taken t, has put those. */
static cd_status run_rounds(const stage *s, uint64_t put_end)
{
    uint64_t most = s->team->shm->ranks > cd_host_cores() ? CROWDED_ROUNDS : 1, taken = s->first;
    for (uint64_t round = s->first; round < s->end; round += most) {
        uint64_t stop = s->end - round < most ? s->end : round + most;
        uint64_t ahead = most == 1 && stop < s->end ? stop + 1 : stop;
        for (; put_end < ahead; put_end++)
            CD_TRY(put(s, put_end));
        for (uint64_t own = round; own < stop; own++)
            CD_TRY(reduce_own(s, own));
        for (; taken < round; taken++)
            CD_TRY(take(s, taken));
    }
    for (; taken < s->end; taken++)
        CD_TRY(take(s, taken));
    s->team->shm->rounds = s->end;
    return CD_OK;
}

cd_status cd_shm_stage_after_meeting(cd_team *team, const cd_op *op, const cd_patience *patience)
{
    bool ran;
    CD_TRY(cd_shm_reach_run(team, op, patience, &ran));
    if (ran)
        return CD_OK;
    stage s = plan_stage(team, op, patience);
    return run_rounds(&s, s.first);
}

/* ---- reduce_scatter: blocks instead of slices of one buffer, and nothing to copy out ---- */

static inline size_t block_part(const stage *s, const cd_shm_piece *piece, uint64_t round, size_t *at_p)
{
    size_t at = (size_t)(round - s->first) * s->slice;
    *at_p = at;
    return at < piece->bytes ? cd_least(piece->bytes - at, s->slice) : 0;
}

static inline size_t slice_index(int giver, int taker)
{
    return (size_t)(taker < giver ? taker : taker - 1);
}

/* Where the block of `taker` begins in the input of any rank; asked for even blocks alone. */
static inline size_t block_at(const stage *s, int taker)
{
    return s->pad ? (size_t)taker * s->team->shm->takes[s->team->shm->rank].bytes : 0;
}

static cd_status put_blocks(const stage *s, uint64_t round)
{
    cd_shm_team *shm = s->team->shm;
    CD_TRY(cd_shm_wait_free(s->team, round, s->patience));
    for (int i = 1; i < shm->ranks; i++) {
        int owner = (shm->rank + i) % shm->ranks;
        const cd_shm_piece *give = &shm->gives[owner];
        size_t at, bytes = block_part(s, give, round, &at);
        char *to = slice_of(s, shm->rank, round, slice_index(shm->rank, owner), block_at(s, owner));
        cd_piece_give(shm, give, at, bytes, to);
    }
    cd_shm_raise(&shm->rows[shm->rank].staged.round, round + 1);
    return CD_OK;
}

/* Reduces shm->inputs into bytes [at, at + bytes) of the output. */
static void reduce_to_output(const stage *s, size_t at, size_t bytes)
{
    cd_shm_team *shm = s->team->shm;
    const cd_shm_piece *out = &shm->takes[shm->rank];
    char *own = cd_piece_at(out, at);
    s->reduce(own ? own : shm->scratch, shm->inputs, shm->ranks, bytes / s->op->item_bytes, s->op->factor);
    if (!own)
        cd_piece_write(out, at, bytes, shm->scratch);
}

static cd_status reduce_block(const stage *s, uint64_t round)
{
    cd_shm_team *shm = s->team->shm;
    const cd_shm_piece *give = &shm->gives[shm->rank];
    size_t at, bytes = block_part(s, give, round, &at);
    if (bytes) {
        CD_TRY(wait_staged(s, round));
        for (int peer = 0; peer < shm->ranks; peer++)
            shm->inputs[peer] = slice_of(s, peer, round, slice_index(peer, shm->rank), block_at(s, shm->rank));
        shm->inputs[shm->rank] = own_input(s, give, at, bytes);
        /* The scratch may hold the own input: a kernel may write over one of its inputs. */
        reduce_to_output(s, at, bytes);
    }
    cd_shm_raise(&shm->rows[shm->rank].left.round, round + 1);
    return CD_OK;
}

static void begin(cd_shm_team *shm, const cd_op *op)
{
    cd_shm_head *head = cd_shm_begin(shm, op, CD_SHM_ROUNDS);
    head->where = cd_shm_locate(shm, op);
    head->where.skew = cd_shm_skew_of(&op->in);
    cd_shm_reach_offer(shm, op, head);
}

static cd_status run_reduce_scatter(cd_team *team, const cd_op *op, const cd_patience *patience)
{
    cd_shm_team *shm = team->shm;
    bool uneven = (op->flags & CD_OP_UNEVEN) != 0;
    stage s = plan_stage(team, op, patience);
    cd_shm_resolve(shm, op);
    begin(shm, op);
    if (uneven) {
        cd_shm_write_counts(shm);
        cd_shm_give_eagerly(shm, false);
    }
    cd_shm_enter(shm);
    CD_TRY(cd_shm_meet(team, op, patience));
    size_t largest = shm->takes[shm->rank].bytes;
    if (uneven) {
        CD_TRY(cd_shm_check_counts(team, op, &largest));
        if (cd_shm_take_eagerly(shm, false)) {
            if (shm->takes[shm->rank].bytes)
                reduce_to_output(&s, 0, shm->takes[shm->rank].bytes);
            return CD_OK;
        }
    }
    bool ran;
    CD_TRY(cd_shm_reach_run(team, op, patience, &ran));
    if (ran)
        return CD_OK;
    size_t peers = shm->ranks > 1 ? (size_t)shm->ranks - 1 : 1;
    choose_slice(&s, peers, !uneven);
    s.first = shm->rounds;
    s.end = s.first + (largest + s.slice - 1) / s.slice;
    uint64_t put_end = s.first, most = shm->ranks > cd_host_cores() ? CROWDED_ROUNDS : 2;
    for (uint64_t round = s.first; round < s.end; round++) {
        if (most == 2 || round == put_end)
            for (; put_end < s.end && put_end < round + most; put_end++)
                CD_TRY(put_blocks(&s, put_end));
        CD_TRY(reduce_block(&s, round));
    }
    shm->rounds = s.end;
    return CD_OK;
}

static cd_status run_reduce(cd_team *team, const cd_op *op, const cd_patience *patience)
{
    stage s = plan_stage(team, op, patience);
    begin(team->shm, op);
    cd_shm_enter(team->shm);
    /* The first round is staged while the others arrive: it touches nobody's memory but the own ring. */
    uint64_t put_end = s.first;
    if (s.first < s.end && !team->shm->reads)
        CD_TRY(put(&s, put_end++));
    CD_TRY(cd_shm_meet(team, op, patience));
    return team->shm->reads ? cd_shm_stage_after_meeting(team, op, patience) : run_rounds(&s, put_end);
}

cd_status cd_shm_stage_run(cd_team *team, const cd_op *op, const cd_patience *patience)
{
    cd_shm_choose_way(team, op);
    cd_status status = op->kind == CD_REDUCE_SCATTER ? run_reduce_scatter(team, op, patience) : run_reduce(team, op, patience);
    return cd_shm_note_way(team->shm, status);
}
