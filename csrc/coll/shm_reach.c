/* Operations in which a rank reads what it takes in the memory of the ranks that give it instead of having it pass the rings: a
 * byte is moved once, and by the core that needs it. What lies in the arena is read there; the rest through the kernel
 * (shm/reach.h), where that is quicker (shm_ways.c).
 *
 * The kernel reads straight to where the bytes go, or, in large operations where that is quicker, to a buffer that stays in the
 * core's cache, from where stores past the caches do not read first what they overwrite. 64 MiB through the buffer between
 * 2 ranks on a 2-core EPYC (Zen 3), cores without a common cache, NumPy's arrays (huge pages), ms, by rings and read:
 *   all_reduce 34.7, 14.3    broadcast 14.7, 8.3    all_gather 22.6, 13.4
 * Read into place an all_reduce takes 4 % less, a broadcast (in a program of its own) 12 instead of 9. On small pages reading
 * costs the kernel 0.7 µs a page, and where the cores share a cache rings are as quick.
 *
 * That memory cannot be read (that of a device, for one) shows in reading it. Each rank says when it leaves whether it could read
 * all that it takes, and waits for all that read to say so; if one could not, the rings take the operation on all ranks. No kind
 * but all_reduce writes to what a rank gives (base/op.h: in and out are different memory, or the same bytes are both), so the
 * rings find what was given as it was, and write over all that was read. An all_reduce in place destroys its input: before it
 * each rank tries to read both ends of all that it will take, tells the others, and it is run so only if all could. Where all
 * that is given lies in the arena nothing can fail, and all ranks know it from the heads. */
#include "coll/shm_team_impl.h"

#include "base/knob.h"
#include "base/log.h"

#include <stdlib.h>
#include <string.h>

#define PAGE ((size_t)4096)
/* Read at a time from each peer, with an L2 of 1 MiB: all_reduce of 64 MiB in 17.5 ms by 128 KiB, 15.0 by 256, 15.0 by 512; one
 * rank alone, in a program of its own, 14.5 by 16 KiB, 10 by 64, 9.2 by 128, 8.9 by 256. */
#define CHUNK_BYTES ((size_t)256 << 10)
#define LEAST_CHUNK_BYTES ((size_t)16 << 10)
/* Buffers for all peers, so that they stay in L2. */
#define BUFFER_BYTES ((size_t)1 << 20)
/* From here on where the setting says "always". */
#define ALWAYS_LEAST ((size_t)128 << 10)
/* From here on where ways are timed. */
#define AUTO_LEAST ((size_t)32 << 10)
/* Read at a time straight to its place: a deadline and Ctrl-C are looked at in between. */
#define PLACED_BYTES ((size_t)1 << 20)
/* A process that has ended cannot be read before the monitor says so. */
#define GONE_SOON_NS CD_NS_PER_S

enum { MODE_AUTO, MODE_ALWAYS, MODE_NEVER }; /* in the order of the setting's words */

cd_status cd_shm_reach_open(cd_shm_team *shm)
{
    int mode;
    CD_TRY(cd_knob_choice("CDIST_SINGLE_COPY", &mode));
    shm->reads_least = mode == MODE_NEVER ? SIZE_MAX : mode == MODE_ALWAYS ? ALWAYS_LEAST : AUTO_LEAST;
    shm->reads_always = mode == MODE_ALWAYS;
    size_t peers = shm->ranks > 1 ? (size_t)shm->ranks - 1 : 1, room = BUFFER_BYTES / peers / PAGE * PAGE;
    shm->chunk = room < LEAST_CHUNK_BYTES ? LEAST_CHUNK_BYTES : cd_least(CHUNK_BYTES, room);
    cd_shm_row *row = &shm->rows[shm->rank];
    cd_reach_offer(&row->card, &shm->token);
    /* Release: who sees it may read the card. */
    atomic_store_explicit(&row->has_card, 1, memory_order_release);
    return CD_OK;
}

void cd_shm_reach_close(cd_shm_team *shm)
{
    free(shm->reading);
}

static cd_shm_reach find_reach(const cd_team *team)
{
    cd_shm_team *shm = team->shm;
    size_t peers = (size_t)shm->ranks - 1;
    if (peers * shm->chunk > BUFFER_BYTES)
        return CD_SHM_REACH_NONE;
    for (int peer = 0; peer < shm->ranks; peer++)
        if (!atomic_load_explicit(&shm->rows[peer].has_card, memory_order_acquire))
            return CD_SHM_REACH_UNKNOWN;
    for (int peer = 0; peer < shm->ranks; peer++) {
        int error = peer == shm->rank ? 0 : cd_reach_probe(&shm->rows[peer].card);
        if (error) {
            cd_log_about("plan", "large operations go through shared memory only: rank %d cannot be read (%s)",
                         cd_shm_world_rank(team, peer), strerror(error));
            return CD_SHM_REACH_NONE;
        }
    }
    shm->reading = aligned_alloc(PAGE, (peers + 1) * (shm->chunk + PAGE));
    return shm->reading ? CD_SHM_REACH_FINE : CD_SHM_REACH_NONE;
}

bool cd_shm_reaches(const cd_team *team)
{
    cd_shm_team *shm = team->shm;
    if (cd_unlikely(shm->reach == CD_SHM_REACH_UNKNOWN))
        shm->reach = find_reach(team);
    return shm->reach == CD_SHM_REACH_FINE;
}

/* Address of a buffer in one run, 0 when it is not. */
static uint64_t address_of(const cd_blocks *blocks)
{
    return blocks->spans == 1 && !blocks->list[0].dims ? (uint64_t)(uintptr_t)blocks->list[0].data : 0;
}

/* Whether it takes something from others. */
static bool takes_something(const cd_op *op, int rank)
{
    bool is_root = rank == op->root;
    return op->kind == CD_BROADCAST || op->kind == CD_SCATTER ? !is_root : op->kind == CD_GATHER ? is_root : true;
}

static bool gives_something(const cd_shm_team *shm, const cd_op *op)
{
    bool is_root = shm->rank == op->root;
    return op->kind == CD_BROADCAST || op->kind == CD_SCATTER ? is_root : op->kind == CD_GATHER ? !is_root : true;
}

/* Whether its output is one that others read or write. */
static bool shows_output(const cd_shm_team *shm, const cd_op *op)
{
    return op->kind == CD_ALL_REDUCE || (op->kind == CD_REDUCE && shm->rank == op->root);
}

/* 1 + offset of a buffer from the arena's base, 0 unless it lies in the own region in one run. */
static uint64_t offset_of(const cd_shm_team *shm, const cd_blocks *blocks)
{
    const cd_arena *arena = shm->arena;
    if (!arena || blocks->spans != 1 || blocks->list[0].dims)
        return 0;
    size_t offset = cd_arena_offset(arena, blocks->list[0].data, blocks->list[0].count * blocks->list[0].item_bytes);
    return offset == SIZE_MAX ? 0 : (uint64_t)((size_t)arena->local * arena->region_bytes + offset) + 1;
}

cd_shm_where cd_shm_locate(const cd_shm_team *shm, const cd_op *op)
{
    return (cd_shm_where){.in_at = gives_something(shm, op) ? offset_of(shm, &op->in) : CD_SHM_NOTHING,
                          .out_at = shows_output(shm, op) ? offset_of(shm, &op->out) : CD_SHM_NOTHING};
}

void cd_shm_reach_offer(cd_shm_team *shm, const cd_op *op, cd_shm_head *head)
{
    if (!shm->reads)
        return;
    head->where.in_address = gives_something(shm, op) ? address_of(&op->in) : CD_SHM_NOTHING;
    head->where.out_address = shows_output(shm, op) ? address_of(&op->out) : CD_SHM_NOTHING;
    head->offers = head->where.in_address && head->where.out_address;
}

bool cd_shm_all_in_arena(const cd_shm_team *shm)
{
    for (int peer = 0; peer < shm->ranks; peer++) {
        const cd_shm_where *where = &cd_shm_head_of(shm, peer)->where;
        if (!where->in_at || !where->out_at)
            return false;
    }
    return true;
}

/* The same answer on all ranks: it depends on what all of them wrote before the meeting. */
static bool all_offer(const cd_shm_team *shm)
{
    for (int peer = 0; peer < shm->ranks; peer++)
        if (!cd_shm_head_of(shm, peer)->offers)
            return false;
    return true;
}

/* What this rank reads of a peer's memory. */
typedef struct {
    uint64_t address; /* in the peer's memory, or in this rank's mapping of the arena */
    size_t bytes;
    bool mapped;
} far_piece;

/* Bytes [at, at + bytes) of a buffer of a peer's. */
static far_piece far_part(const cd_shm_team *shm, uint64_t arena_at, uint64_t address, size_t at, size_t bytes)
{
    if (!bytes)
        return (far_piece){0};
    uint64_t begin = arena_at ? (uint64_t)(uintptr_t)shm->arena->base + (arena_at - 1) : address;
    return (far_piece){begin + at, bytes, arena_at != 0};
}

static far_piece in_part(const cd_shm_team *shm, int peer, size_t at, size_t bytes)
{
    const cd_shm_where *where = &cd_shm_head_of(shm, peer)->where;
    return far_part(shm, where->in_at, where->in_address, at, bytes);
}

/* Slice of an all_reduce that a rank reduces. */
static size_t slice_of(const cd_shm_team *shm, const cd_op *op, int owner, size_t *at_p)
{
    size_t all = op->in.list[0].count * op->item_bytes;
    size_t ranks = (size_t)shm->ranks, slice = cd_round_up((all + ranks - 1) / ranks, CD_SHM_GRAIN);
    *at_p = cd_least((size_t)owner * slice, all);
    return cd_least(slice, all - *at_p);
}

/* The slice that a peer has reduced. */
static far_piece reduced_by(const cd_shm_team *shm, const cd_op *op, int peer)
{
    const cd_shm_where *where = &cd_shm_head_of(shm, peer)->where;
    size_t at, bytes = slice_of(shm, op, peer, &at);
    return far_part(shm, where->out_at, where->out_address, at, bytes);
}

/* What `peer` gives to this rank as it is, or to be reduced. */
static far_piece given_by(const cd_shm_team *shm, const cd_op *op, int peer)
{
    size_t bytes = shm->takes[peer].bytes, at = 0;
    switch (op->kind) {
    case CD_ALL_REDUCE: bytes = slice_of(shm, op, shm->rank, &at); break;
    case CD_SCATTER:
    case CD_REDUCE_SCATTER:
    case CD_ALL_TO_ALL: at = op->flags & CD_OP_UNEVEN ? cd_shm_given_before(shm, peer) : (size_t)shm->rank * bytes; break;
    default: break;
    }
    return in_part(shm, peer, at, bytes);
}

/* Both ends of a piece; what lies between them is memory of the same kind. */
static bool can_read(const cd_shm_team *shm, int peer, far_piece piece)
{
    char byte;
    return !piece.bytes || piece.mapped ||
           (cd_reach_read(&shm->rows[peer].card, &byte, piece.address, 1) == 0 &&
            cd_reach_read(&shm->rows[peer].card, &byte, piece.address + piece.bytes - 1, 1) == 0);
}

/* Before an all_reduce, whose inputs may be gone when a rank finds that it cannot read. Takes one round of the rings as a ticket.
 * */
static cd_status agree(cd_team *team, const cd_op *op, const cd_patience *patience, bool *can_p)
{
    cd_shm_team *shm = team->shm;
    bool can = true;
    for (int peer = 0; peer < shm->ranks; peer++) {
        if (peer == shm->rank)
            continue;
        can = can && can_read(shm, peer, given_by(shm, op, peer)) && can_read(shm, peer, reduced_by(shm, op, peer));
    }
    uint64_t round = shm->rounds++;
    /* Nobody reads the answer of an earlier operation any more: all have entered this one. */
    shm->rows[shm->rank].can_read = can;
    cd_shm_raise(&shm->rows[shm->rank].staged.round, round + 1);
    for (int peer = 0; peer < shm->ranks; peer++) {
        CD_TRY(cd_shm_await(team, &shm->rows[peer].staged.round, round + 1, peer, patience));
        can = can && shm->rows[peer].can_read;
    }
    cd_shm_raise(&shm->rows[shm->rank].left.round, round + 1);
    *can_p = can;
    return CD_OK;
}

/* A rank that reads: it waits for nobody, yet may take long, so that it looks at what every wait looks at. */
typedef struct {
    cd_team *team;
    const cd_op *op;
    const cd_patience *patience;
    cd_waiter waiter;
    size_t chunk;  /* bytes at a time */
    char *packed;  /* as many, for a result on its way to memory */
    bool detours;  /* all results go that way */
    bool failed;   /* something could not be read */
} reader;

static CD_COLD cd_status cannot_read(const reader *r, int peer, size_t bytes, int error)
{
    cd_patience brief = *r->patience;
    brief.deadline = cd_deadline_earlier(brief.deadline, cd_deadline_after_ns(GONE_SOON_NS));
    cd_status status = cd_shm_await(r->team, &r->team->shm->rows[peer].left.round, UINT64_MAX, peer, &brief);
    if (status != CD_TIMED_OUT)
        return status;
    int rank = cd_shm_world_rank(r->team, peer);
    return cd_fail_rank(CD_PEER_LOST, rank,
                        "%zu bytes in the memory of rank %d can no longer be read (%s): its process ended, or its array "
                        "lies in memory that only it may read: then set CDIST_SINGLE_COPY=never",
                        bytes, rank, strerror(error));
}

/* For what is read of the peer number `index` from this rank on; the last one, `ranks`, for a packed result. */
static inline char *buffer_of(const cd_shm_team *shm, int index)
{
    return shm->reading + (size_t)(index - 1) * (shm->chunk + PAGE);
}

static cd_status look(reader *r, int peer)
{
    cd_status status = cd_waiter_check(&r->waiter);
    if (cd_likely(status != CD_TIMED_OUT))
        return status;
    int rank = cd_shm_world_rank(r->team, peer);
    return cd_fail_rank(CD_TIMED_OUT, rank, "the deadline passed while the memory of rank %d was read", rank);
}

/* Bytes at `from` in a peer's memory → to. That they cannot be read ends an all_reduce; of another operation it is told when the
 * rank leaves. */
static cd_status read_peer(reader *r, int peer, uint64_t from, size_t bytes, char *to)
{
    CD_TRY(look(r, peer));
    int error = cd_reach_read(&r->team->shm->rows[peer].card, to, from, bytes);
    if (cd_likely(error == 0))
        return CD_OK;
    r->failed = true;
    return r->op->kind == CD_ALL_REDUCE ? cannot_read(r, peer, bytes, error) : CD_OK;
}

/* Bytes [at, at + bytes) of a peer's piece; *out: where they lie. What is not mapped goes to the buffer for the peer number
 * `index` from this rank on, whose offset in its page is that of the source: the kernel may copy by `rep movsb` (simd/copy.c). */
static cd_status fetch(reader *r, int index, far_piece piece, size_t at, size_t bytes, char **out)
{
    cd_shm_team *shm = r->team->shm;
    int peer = (shm->rank + index) % shm->ranks;
    uint64_t from = piece.address + at;
    *out = piece.mapped ? (char *)(uintptr_t)from : buffer_of(shm, index) + from % PAGE;
    return piece.mapped ? look(r, peer) : read_peer(r, peer, from, bytes, *out);
}

/* Where a peer's piece is read straight to, NULL when it is not. */
static char *place_of(const cd_shm_team *shm, far_piece piece, const cd_shm_piece *to)
{
    char *place = shm->places && !piece.mapped && piece.bytes ? cd_piece_at(to, 0) : NULL;
    /* Not where `rep movsb` may be slow (simd/copy.c): up to 64 bytes further in its page than the source. */
    return place && ((uintptr_t)place - (uintptr_t)piece.address - 1) % PAGE >= 64 ? place : NULL;
}

/* Bytes [at, at + bytes) of a peer's piece → the same of `to`. */
static cd_status receive(reader *r, int index, far_piece piece, const cd_shm_piece *to, size_t at, size_t bytes)
{
    const cd_shm_team *shm = r->team->shm;
    char *place = place_of(shm, piece, to), *in;
    if (place)
        return read_peer(r, (shm->rank + index) % shm->ranks, piece.address + at, bytes, place + at);
    CD_TRY(fetch(r, index, piece, at, bytes, &in));
    cd_piece_receive(to, at, bytes, in);
    return CD_OK;
}

/* The next chunk of a piece; 0 when there is no more. */
static inline size_t chunk_of(const reader *r, size_t piece_bytes, size_t at)
{
    return at < piece_bytes ? cd_least(r->chunk, piece_bytes - at) : 0;
}

static cd_status take_pieces(reader *r)
{
    const cd_shm_team *shm = r->team->shm;
    const size_t most = r->chunk;
    for (int i = 1; i < shm->ranks; i++) {
        int peer = (shm->rank + i) % shm->ranks;
        far_piece piece = given_by(shm, r->op, peer);
        r->chunk = place_of(shm, piece, &shm->takes[peer]) ? PLACED_BYTES : most;
        for (size_t at = 0, bytes; !r->failed && (bytes = chunk_of(r, piece.bytes, at)) != 0; at += bytes)
            CD_TRY(receive(r, i, piece, &shm->takes[peer], at, bytes));
    }
    return CD_OK;
}

/* Bytes [at, at + bytes) of what this rank reduces, from all inputs: `own` is its own, `out` where they go. */
static cd_status reduce_chunk(reader *r, size_t at, size_t bytes, const cd_shm_piece *own, const cd_shm_piece *out)
{
    cd_shm_team *shm = r->team->shm;
    const cd_op *op = r->op;
    for (int i = 1; i < shm->ranks; i++) {
        int peer = (shm->rank + i) % shm->ranks;
        char *in;
        CD_TRY(fetch(r, i, given_by(shm, op, peer), at, bytes, &in));
        shm->inputs[peer] = in;
    }
    shm->inputs[shm->rank] = cd_piece_at(own, at);
    cd_reduce_func reduce = cd_reduce_find(op->redop, op->dtype);
    char *to = r->detours ? NULL : cd_piece_at(out, at);
    reduce(to ? to : r->packed, shm->inputs, shm->ranks, bytes / op->item_bytes, op->factor);
    if (!to)
        cd_piece_receive(out, at, bytes, r->packed);
    return CD_OK;
}

static cd_status reduce_block(reader *r)
{
    const cd_shm_team *shm = r->team->shm;
    const cd_shm_piece *own = &shm->gives[shm->rank], *out = &shm->takes[shm->rank];
    for (size_t at = 0; at < out->bytes && !r->failed; at += r->chunk)
        CD_TRY(reduce_chunk(r, at, cd_least(r->chunk, out->bytes - at), own, out));
    return CD_OK;
}

/* Reads the chunk at `at` of each other rank's slice; `reduced`: what says that the chunk is. */
static cd_status take_slices(reader *r, size_t at, uint64_t reduced)
{
    cd_shm_team *shm = r->team->shm;
    for (int i = 1; i < shm->ranks; i++) {
        int peer = (shm->rank + i) % shm->ranks;
        cd_shm_piece to = {.span = &r->op->out.list[0]};
        to.bytes = slice_of(shm, r->op, peer, &to.at);
        size_t bytes = chunk_of(r, to.bytes, at);
        if (!bytes)
            continue;
        /* Acquire: the kernel reads after it what the peer wrote before its release. */
        CD_TRY(cd_shm_await(r->team, &shm->rows[peer].reduced.round, reduced, peer, r->patience));
        CD_TRY(receive(r, i, reduced_by(shm, r->op, peer), &to, at, bytes));
    }
    return CD_OK;
}

/* Each rank reduces its slice by chunks, and reads the chunks of the others one behind. */
static cd_status reduce_slices(reader *r)
{
    cd_shm_team *shm = r->team->shm;
    const cd_op *op = r->op;
    cd_shm_piece own = {.span = &op->in.list[0]}, out = {.span = &op->out.list[0]};
    size_t largest = slice_of(shm, op, 0, &own.at), mine = slice_of(shm, op, shm->rank, &own.at);
    out.at = own.at;
    uint64_t first = shm->rounds, rounds = (largest + r->chunk - 1) / r->chunk;
    for (uint64_t round = 0; round <= rounds; round++) {
        size_t at = (size_t)round * r->chunk, bytes = chunk_of(r, mine, at);
        if (bytes)
            CD_TRY(reduce_chunk(r, at, bytes, &own, &out));
        cd_shm_raise(&shm->rows[shm->rank].reduced.round, first + round + 1);
        if (round)
            CD_TRY(take_slices(r, at - r->chunk, first + round));
    }
    shm->rounds = first + rounds + 1;
    return CD_OK;
}

static cd_status read_all(reader *r)
{
    switch (r->op->kind) {
    case CD_ALL_REDUCE: return reduce_slices(r);
    case CD_REDUCE_SCATTER: return reduce_block(r);
    default: return take_pieces(r);
    }
}

/* Says that this rank reads no more. Takes one round of the rings as a ticket. */
static cd_status leave(cd_shm_team *shm, const cd_patience *patience)
{
    /* A rank that gives up says so before it touches its array again: what was read there since may not be its input. Acquire in
     * the check orders the reads above before it. */
    if (patience->cause)
        CD_TRY(cd_cause_check(patience->cause));
    cd_shm_raise(&shm->rows[shm->rank].left.round, ++shm->rounds);
    return CD_OK;
}

cd_status cd_shm_reach_end(cd_team *team, const cd_op *op, const cd_patience *patience)
{
    cd_shm_team *shm = team->shm;
    bool all = op->kind == CD_ALL_REDUCE || op->kind == CD_REDUCE;
    CD_TRY(leave(shm, patience));
    /* The array is the caller's again when nobody reads it any more. */
    for (int peer = 0; peer < shm->ranks; peer++)
        if (peer != shm->rank && (all || shm->gives[peer].bytes))
            CD_TRY(cd_shm_await(team, &shm->rows[peer].left.round, shm->rounds, peer, patience));
    return CD_OK;
}

/* Runs what changes no input: whether it can be read shows in reading it. All learn how all that read have fared, and if one
 * could not read all that it takes, the rings take the operation on all ranks: they write over what was read. */
static cd_status try_reading(reader *r, bool *ran_p)
{
    cd_team *team = r->team;
    cd_shm_team *shm = team->shm;
    CD_TRY(read_all(r));
    /* Nobody reads the answer of an earlier operation any more: all have entered this one. leave() releases it. */
    shm->rows[shm->rank].can_read = !r->failed;
    CD_TRY(leave(shm, r->patience));
    /* While the others read. */
    if (r->op->kind != CD_REDUCE_SCATTER && !r->failed)
        cd_shm_copy_own(shm);
    bool all = !r->failed;
    for (int peer = 0; peer < shm->ranks; peer++) {
        if (peer == shm->rank || !takes_something(r->op, peer))
            continue;
        /* Acquire: pairs with the release in leave(). Afterwards the peer reads this rank's array no more. */
        CD_TRY(cd_shm_await(team, &shm->rows[peer].left.round, shm->rounds, peer, r->patience));
        all = all && shm->rows[peer].can_read;
    }
    *ran_p = all;
    return CD_OK;
}

/* All that is given lies in the arena: nothing can fail. */
static cd_status read_in_arena(reader *r)
{
    cd_shm_team *shm = r->team->shm;
    bool reduces = r->op->kind == CD_REDUCE_SCATTER;
    shm->timed = NULL; /* none of the ways between which it would choose */
    r->chunk = cd_least(shm->chunk, shm->scratch_bytes / PAGE * PAGE);
    r->packed = shm->scratch;
    /* Lines that a kernel writes are read first, those that are received are not: reduce_scatter of 64 MiB between 2 ranks in 5.4
     * instead of 7.3 ms. Where what is read has passed a buffer already it makes no difference. */
    r->detours = reduces && shm->takes[shm->rank].bytes >= CD_SHM_FAR_BYTES;
    if (!reduces)
        cd_shm_copy_own(shm);
    CD_TRY(read_all(r));
    return cd_shm_reach_end(r->team, r->op, r->patience);
}

cd_status cd_shm_reach_run(cd_team *team, const cd_op *op, const cd_patience *patience, bool *ran_p)
{
    cd_shm_team *shm = team->shm;
    bool reduces = op->kind == CD_ALL_REDUCE || op->kind == CD_REDUCE;
    reader r = {.team = team, .op = op, .patience = patience, .waiter = cd_waiter_start(patience), .chunk = shm->chunk};
    /* Reductions of one vector have a way of their own in the arena (shm_arena.c). */
    *ran_p = !reduces && cd_shm_all_in_arena(shm);
    if (*ran_p)
        return read_in_arena(&r);
    if (!shm->reads || !all_offer(shm))
        return CD_OK;
    r.packed = buffer_of(shm, shm->ranks);
    if (!reduces)
        return try_reading(&r, ran_p);
    CD_TRY(agree(team, op, patience, ran_p));
    if (!*ran_p)
        return CD_OK;
    CD_TRY(read_all(&r));
    return cd_shm_reach_end(team, op, patience);
}
