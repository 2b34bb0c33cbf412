/* The inside of a shared-memory team; included by coll/shm_*.c and their tests alone.
 *
 * Vocabulary. *Head*: the 64-byte line with which a rank enters an operation; two a rank, by parity of the
 * operation's number. *Small slot*: what a rank gives in a small operation; slots follow each other around a
 * small ring. *Ring*: SLOTS slots a rank, through which larger operations pass in *rounds*; a slot holds one
 * *slice* for each reader, or one for all. *Piece*: the part of a user's buffer that one rank gives to
 * another.
 *
 * Rules. A word has one writer and only grows; release to post, acquire to read. The one exception is
 * `ring_bytes` (written once, by compare-and-swap, when a team is opened).
 *
 * Every operation of every kind begins with the same meeting: a rank posts its head and then waits for the
 * heads of all. So
 *   - a difference between ranks is found by all of them before any user memory is written, whatever path
 * they take;
 *   - when a rank posts head k, it has finished k−1, so it saw the heads k−1 of all, each posted after its
 * owner had finished k−2: nobody reads heads, small slots, descriptors or counts of k−2 any more, and those
 * of k may take their place. There is no exit barrier, and rooted kinds need no word of their own. */
#ifndef CD_COLL_SHM_TEAM_IMPL_H
#define CD_COLL_SHM_TEAM_IMPL_H

#include "base/pace.h"
#include "coll/shm_team.h"
#include "shm/reach.h"
#include "simd/reduce.h"
#include "simd/strided.h"

#include <string.h>

#define CD_SHM_SLOTS 12
#define CD_SHM_INLINE 48
/* Sizes of one kind whose ways are chosen apart (shm_ways.c). */
#define CD_SHM_SIZES 4
#define CD_SHM_PACES (CD_SHM_SIZES * (CD_ALL_TO_ALL - CD_ALL_REDUCE + 1))
/* Slices and reductions start at multiples of this, so that no two ranks write one line. */
#define CD_SHM_GRAIN ((size_t)64)
/* Operations from here on are limited by memory and have ways of their own (shm_ways.c). */
#define CD_SHM_LARGE ((size_t)16 << 20)
/* What is received in pieces from here on goes past the caches: it displaces the rings there, and its lines were read from memory
 * only to be overwritten. 2 ranks on a 2-core EPYC, milliseconds: all_gather of 8 MiB 0.7 instead of 1.2, of 64 MiB 11 instead of
 * 15.5; 1 MiB would take 85 µs instead of 61. */
#define CD_SHM_FAR_BYTES ((size_t)4 << 20)

/* Where a rank has nothing that others read. */
#define CD_SHM_NOTHING UINT64_MAX
/* What a rank says about its buffers in operations that are not small. */
typedef struct {
    uint64_t in_at, out_at; /* 1 + offset of the buffer from the arena's base, 0 = does not lie in the arena, or CD_SHM_NOTHING */
    uint64_t skew;          /* of the input's address against lines, where slices in the ring are to lie likewise */
    uint64_t in_address, out_address; /* of the buffers in this rank's own memory, where it offers them */
} cd_shm_where;

typedef struct {
    _Atomic uint64_t number; /* of the operation on this team, from 1 */
    uint32_t signature;
    uint16_t eager;          /* uneven operations: all that this rank gives lies in its small slot */
    uint16_t offers;         /* this rank can read in the memory of the others, and all that it gives can be read at `where` */
    union {
        char payload[CD_SHM_INLINE];
        cd_shm_where where;
    };
} cd_shm_head;
_Static_assert(sizeof(cd_shm_head) == 64, "one line");
_Static_assert(CD_SHM_PACES <= 32 && CD_PACE_WAYS <= 4, "two bits each");

/* One rank's part of the board: all of it is written by that rank alone. */
typedef struct {
    struct {
        cd_shm_head head;
        uint64_t ways; /* two bits per pace: the way of the next operation, where this rank is the one to tell it; as the head */
        char pad[CD_LINE - sizeof(cd_shm_head) - sizeof(uint64_t)];
    } enter[2];
    struct {
        _Atomic uint64_t round; /* rounds since the team began */
        char pad[CD_LINE - sizeof(uint64_t)];
    } staged, reduced, left;    /* slices of the round lie in the ring; the own reduced slice too; nothing more is read */
    cd_descriptor descriptor[2];
    _Atomic uint32_t core;      /* 1 + the core on which the rank last waited in vain; a hint */
    _Atomic uint32_t has_card;  /* written once */
    cd_reach_card card;
    uint32_t can_read;          /* all that the rank takes in the running operation; published by `staged` or `left` */
    char pad[CD_LINE * 2 - 4 * sizeof(uint32_t) - sizeof(cd_reach_card)];
} cd_shm_row;
_Static_assert(sizeof(cd_shm_row) == CD_LINE * 8, "rows start on lines");

/* Start of the shared memory. */
typedef struct {
    cd_cause cause;
    _Atomic uint64_t ring_bytes; /* footprint of a ring, 0 until the first rank has chosen it */
} cd_shm_board;

/* Bytes [at, at + bytes) of the span's elements in logical order. */
typedef struct {
    const cd_span *span;
    size_t at, bytes;
} cd_shm_piece;

/* Sizes that follow from the number of ranks alone. */
typedef struct {
    size_t small_bytes;  /* capacity of a small slot */
    size_t small_stride; /* of the small ring: at least three slots */
    size_t counts_at, small_at, ring_at; /* offsets from the board */
    size_t ring_stride;
    size_t bytes;
} cd_shm_layout;

typedef enum { CD_SHM_REACH_UNKNOWN, CD_SHM_REACH_NONE, CD_SHM_REACH_FINE } cd_shm_reach;

struct cd_shm_team {
    int rank, ranks;
    cd_shm_board *board;
    cd_shm_row *rows;
    cd_shm_layout layout;
    const cd_arena *arena; /* may be NULL */
    uint64_t number;       /* operations begun */
    cd_shm_head draft;     /* of the running operation's own head; its number is not used */
    uint64_t moved_ns;     /* when this rank last left a core that it shared */
    uint64_t rounds;       /* rounds of the ring that all operations so far took: the same on all ranks */
    size_t slot_bytes;
    size_t small_ring;           /* bytes of a small ring that are used, a multiple of CD_SHM_GRAIN */
    size_t small_now, small_next; /* offsets in it of this operation's slot and of the next one's: the same on all ranks */
    /* See shm_ways.c. */
    cd_pace paces[CD_SHM_PACES]; /* by kind and size */
    uint64_t ways;               /* two bits per pace: what this rank tells */
    bool is_far;                 /* the running operation writes past the caches */
    bool reads;                  /* the running operation reads in the memory of others, if all offer theirs */
    bool places;                 /* and what is only to be moved is read straight to where it goes */
    cd_pace *timed;              /* the running operation is timed for it */
    unsigned timed_way, timed_ways; /* the way it goes, of how many */
    size_t timed_bytes;
    uint64_t began_ns, waited_ns; /* waited for the others to come: not their work */
    /* See shm_reach.c. */
    cd_shm_reach reach;
    uint64_t token;
    size_t reads_least; /* bytes of an operation */
    bool reads_always;
    size_t chunk;       /* bytes read at a time */
    char *reading;      /* a chunk and a page for each rank, where `reach` is fine */
    /* Work space of the running operation. */
    const void **inputs;        /* one a rank */
    cd_shm_piece *gives, *takes; /* one a rank: to and from that peer */
    char *scratch;              /* scratch_bytes, for strided memory */
    size_t scratch_bytes;
};

cd_shm_layout cd_shm_layout_of(int ranks);

static inline int cd_shm_world_rank(const cd_team *team, int rank)
{
    return team->world_ranks ? team->world_ranks[rank] : rank;
}

static inline cd_shm_head *cd_shm_head_of(const cd_shm_team *shm, int rank)
{
    return &shm->rows[rank].enter[shm->number & 1].head;
}

/* Small slot of a rank for the running operation. */
static inline char *cd_shm_small_of(const cd_shm_team *shm, int rank)
{
    return (char *)shm->board + shm->layout.small_at + (size_t)rank * shm->layout.small_stride + shm->small_now;
}

/* The small slots of the running operation, `bytes` large, the same on all ranks. They follow those of the operation before,
 * so that they overlap at most those of k−2 and earlier, which nobody reads any more. Going around a ring larger than L2
 * instead of alternating between two slots lets lines leave the peers' caches before they are written again: taking back a
 * line that a peer holds costs more than the copy (2 ranks on an EPYC: 16 KiB
 * 2.5 instead of 3.4 µs, 64 KiB 9.4 instead of 10.8). */
static inline void cd_shm_claim_small(cd_shm_team *shm, size_t bytes)
{
    if (bytes > shm->small_ring - shm->small_next)
        shm->small_next = 0;
    shm->small_now = shm->small_next;
    shm->small_next += (bytes + CD_SHM_GRAIN - 1) / CD_SHM_GRAIN * CD_SHM_GRAIN;
}

static inline char *cd_shm_slot_of(const cd_shm_team *shm, int rank, uint64_t round)
{
    return (char *)shm->board + shm->layout.ring_at + (size_t)rank * shm->layout.ring_stride +
           (size_t)(round % CD_SHM_SLOTS) * shm->slot_bytes;
}

static inline void cd_shm_raise(_Atomic uint64_t *word, uint64_t value)
{
    cd_jitter();
    atomic_store_explicit(word, value, memory_order_release);
}

/* Parts of the signature: all ranks must take the same path (arena and stage meet alike, and decide afterwards). */
enum { CD_SHM_SMALL = 0, CD_SHM_ROUNDS = 1 };

/* Begins the next operation: descriptor, and a draft of the own head, to which the caller adds what it has to say there. */
static inline cd_shm_head *cd_shm_begin(cd_shm_team *shm, const cd_op *op, uint32_t path)
{
    shm->number++;
    cd_shm_head *head = &shm->draft;
    head->signature = cd_op_signature(op) ^ path;
    head->eager = 0;
    head->offers = 0;
    uint64_t *ways = &shm->rows[shm->rank].enter[shm->number & 1].ways;
    if (cd_unlikely(*ways != shm->ways))
        *ways = shm->ways;
    cd_op_descriptor(op, &shm->rows[shm->rank].descriptor[shm->number & 1]);
    return head;
}

/* Makes the own head, and all that was written before, visible to the others. The line is written in one go: a peer that waits
 * takes it back as soon as its first word changes, and what is written after that costs a second way between the cores. 2 ranks
 * on a 2-core Xeon, 4 B, 105 ns of other work between two operations: 258 ns instead of 458 (the best quarter 254 and 320). */
static inline void cd_shm_enter(cd_shm_team *shm)
{
    cd_shm_head *head = cd_shm_head_of(shm, shm->rank);
    memcpy((char *)head + sizeof head->number, (const char *)&shm->draft + sizeof head->number,
           sizeof *head - sizeof head->number);
    cd_shm_raise(&head->number, shm->number);
}

/* The slow part of the meeting: waits for one peer's head while looking for differences among those that came. */
cd_status cd_shm_wait_head(cd_team *team, const cd_op *op, int peer, const cd_patience *patience) CD_COLD;
/* For a rank that waits: leaves the core if another rank was last seen on the same one although there are enough for all. The
 * kernel leaves two ranks that yield to each other on one core for seconds. The affinity mask is the same afterwards. */
void cd_shm_leave_shared_core(cd_shm_team *shm) CD_COLD;
/* Publishes the difference as the group's cause and fails with what was published first. */
cd_status cd_shm_differs(cd_team *team, int peer) CD_COLD;

/* Waits until all ranks have entered the running operation and finds out whether it is the same one. Afterwards all that they
 * wrote before entering may be read. */
static inline cd_status cd_shm_meet(cd_team *team, const cd_op *op, const cd_patience *patience)
{
    const cd_shm_team *shm = team->shm;
    uint32_t signature = shm->draft.signature;
    for (int peer = 0; peer < shm->ranks; peer++) {
        const cd_shm_head *head = cd_shm_head_of(shm, peer);
        if (cd_unlikely(atomic_load_explicit(&head->number, memory_order_acquire) < shm->number))
            CD_TRY(cd_shm_wait_head(team, op, peer, patience));
        if (cd_unlikely(head->signature != signature))
            return cd_shm_differs(team, peer);
    }
    return CD_OK;
}

/* The slow part of cd_shm_await. */
cd_status cd_shm_wait_word(cd_team *team, const _Atomic uint64_t *word, uint64_t value, int peer,
                           const cd_patience *patience) CD_COLD;

/* cd_wait_at_least for all waits behind the meeting. Two ranks on one core may meet only here: the one that comes last never
 * waits in the meeting, and a wait that does not tell leaves them there for tens of seconds (1 MiB in 600 µs instead of 67). */
static inline cd_status cd_shm_await(cd_team *team, const _Atomic uint64_t *word, uint64_t value, int peer,
                                     const cd_patience *patience)
{
    if (cd_likely(atomic_load_explicit(word, memory_order_acquire) >= value))
        return CD_OK;
    return cd_shm_wait_word(team, word, value, peer, patience);
}

/* Waits until the slot of this round in the own ring may be written: all have left the round that used it before. */
static inline cd_status cd_shm_wait_free(cd_team *team, uint64_t round, const cd_patience *patience)
{
    const cd_shm_team *shm = team->shm;
    if (round < CD_SHM_SLOTS)
        return CD_OK;
    for (int peer = 0; peer < shm->ranks; peer++)
        if (peer != shm->rank)
            CD_TRY(cd_shm_await(team, &shm->rows[peer].left.round, round + 1 - CD_SHM_SLOTS, peer, patience));
    return CD_OK;
}

/* Fills gives and takes for a kind that moves or scatters (all but BARRIER, ALL_REDUCE and REDUCE). What REDUCE_SCATTER takes
 * from a peer is a contribution to `out`: its `takes` tell the size only. */
void cd_shm_resolve(cd_shm_team *shm, const cd_op *op);
/* Uneven operations, between begin and enter: writes down what this rank gives and takes. */
void cd_shm_write_counts(cd_shm_team *shm);
/* Uneven operations, between begin and enter: what this rank gives goes to its small slot if it fits, one block behind the
 * other (or once, when every peer gets the same). */
void cd_shm_give_eagerly(cd_shm_team *shm, bool one_for_all);
/* Uneven operations, after the meeting: bytes that `peer` gives to the ranks before this one. */
size_t cd_shm_given_before(const cd_shm_team *shm, int peer);
/* After the meeting: true when all ranks gave eagerly; then inputs[peer] is what that peer gives to this rank. */
bool cd_shm_take_eagerly(cd_shm_team *shm, bool one_for_all);
/* After the meeting: compares what each rank gives with what its peers expect, all pairs on all ranks, so that all find the
 * same difference. *largest_p: bytes of the largest piece. */
cd_status cd_shm_check_counts(cd_team *team, const cd_op *op, size_t *largest_p);

/* Before cd_shm_begin: which way the operation writes to shared memory, or whether it does without. */
void cd_shm_choose_way(cd_team *team, const cd_op *op);
/* When it has ended: what it took. Returns the status. */
cd_status cd_shm_note_way(cd_shm_team *shm, cd_status status);
/* Memory that other ranks read ← `from`, the way of the running operation. */
void cd_shm_give(const cd_shm_team *shm, void *out, const void *from, size_t bytes);
/* The same for a part of a piece. */
void cd_piece_give(const cd_shm_team *shm, const cd_shm_piece *piece, size_t at, size_t bytes, void *out);

/* Bytes [at, at + bytes) of a piece → packed memory, and back; any cut, also inside of elements. */
void cd_piece_read(const cd_shm_piece *piece, size_t at, size_t bytes, void *out);
void cd_piece_write(const cd_shm_piece *piece, size_t at, size_t bytes, const void *in);
/* As write, for memory that this operation has not read: past the caches where the piece is large. */
void cd_piece_receive(const cd_shm_piece *piece, size_t at, size_t bytes, const void *in);
/* What this rank gives to itself, without passing shared memory. */
void cd_shm_copy_own(cd_shm_team *shm);

/* Makes the own card; CD_BAD_ARGUMENT: the setting cannot be read. */
cd_status cd_shm_reach_open(cd_shm_team *shm);
void cd_shm_reach_close(cd_shm_team *shm);
/* Whether this rank can read in the memory of all others; asked before cd_shm_begin. */
bool cd_shm_reaches(const cd_team *team);
/* Where this rank's buffers lie in the arena: what it writes into its head. */
cd_shm_where cd_shm_locate(const cd_shm_team *shm, const cd_op *op);
/* Between begin and enter: adds where others may read through the kernel, if the operation is to be run so. */
void cd_shm_reach_offer(cd_shm_team *shm, const cd_op *op, cd_shm_head *head);
/* After the meeting: whether all that others read (and the outputs of ALL_REDUCE and REDUCE) lies in the arena. The same answer
 * on all ranks: it depends on what all of them wrote before. */
bool cd_shm_all_in_arena(const cd_shm_team *shm);
/* After the meeting, and after cd_shm_resolve for what is no ALL_REDUCE: runs the operation by reading if all ranks can. The
 * rings take it when *ran_p is false afterwards; they begin at shm->rounds. */
cd_status cd_shm_reach_run(cd_team *team, const cd_op *op, const cd_patience *patience, bool *ran_p);
/* This rank has read all that it takes: says so, and waits until nobody reads what it gave (nor, for ALL_REDUCE and REDUCE,
 * writes its output) any more. */
cd_status cd_shm_reach_end(cd_team *team, const cd_op *op, const cd_patience *patience);

/* Address of a byte of a contiguous piece, NULL when it is strided. */
static inline char *cd_piece_at(const cd_shm_piece *piece, size_t at)
{
    return piece->span->dims ? NULL : (char *)piece->span->data + piece->at + at;
}

/* What a rank publishes as `skew`. */
static inline uint64_t cd_shm_skew_of(const cd_blocks *blocks)
{
    const cd_span *span = &blocks->list[0];
    return blocks->spans != 1 || span->dims ? 0 : (uintptr_t)span->data % CD_SHM_GRAIN;
}

static inline cd_shm_piece cd_piece_whole(const cd_span *span)
{
    return (cd_shm_piece){.span = span, .bytes = span->count * span->item_bytes};
}

static inline size_t cd_least(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* The paths; each runs any kind but SEND and RECV (arena falls back to stage where buffers do not lie in the arena). */
cd_status cd_shm_small_run(cd_team *team, const cd_op *op, const cd_patience *patience);
cd_status cd_shm_stage_run(cd_team *team, const cd_op *op, const cd_patience *patience);
cd_status cd_shm_move_run(cd_team *team, const cd_op *op, const cd_patience *patience);
cd_status cd_shm_arena_run(cd_team *team, const cd_op *op, const cd_patience *patience);
/* ALL_REDUCE and REDUCE from after the meeting on, without the arena. */
cd_status cd_shm_stage_after_meeting(cd_team *team, const cd_op *op, const cd_patience *patience);
/* Largest cd_plan_bytes that the small path takes. */
size_t cd_shm_small_limit(int ranks);

#endif
