/* Which way an operation goes: through the rings, written through the caches or past them, or by reading in the memory of others
 * (shm_reach.c). Where the cores share a cache, rings written through it are best. Where they do not, a line that a peer has read
 * must be taken back from its caches before it can be written again; a store past the caches only tells the peer that its copy is
 * void. Two cores of a virtual machine (EPYC, Zen 3), slots of 64 KiB in a ring of 1.5 MiB, written, read by the other, written
 * again, GB/s:
 *                                               near: written, read    far: written, read
 *   one cache (a line there and back in 0.1 µs)         26, 25                23, 12
 *   two caches (0.45 µs)                               3.8, 10                22, 11
 * all_reduce between two caches, near and far: 64 KiB 29 and 12 µs, 1 MiB 440 and 194; within one 7 and 14, 89 and 198. The host
 * moves such cores from one state to the other several times a second and tells nobody. So one rank times whole operations, what
 * they write and what they read, and tells the others which way the next one goes. The way changes no result; ranks go the same
 * one so that what is measured is what one way costs.
 *
 * Two cores of another virtual machine (Intel, 2 MiB of L2 each, no common cache), slots of 64 KiB in a
 * ring of 3 MiB: near 18 and 11 GB/s, far 14 and 9. Read in the other's memory a byte passes between the cores once, and not at
 * all when both have it still from the operation before. µs by rings and read straight to its place: broadcast of 128 KiB 10.4
 * and 4.6, of 1 MiB 91 and 51, of 4 MiB 468 and 389; all_gather of 128 KiB 15.3 and 4.7, of 1 MiB 111 and 51, of 4 MiB 529 and
 * 336. What it costs the giver to write its array again is not seen here: where it does so in between, up to 1 MiB, the rings may
 * be the quicker ones.
 *
 * Large operations are not written past the caches: memory is what limits them, and it was quicker in neither state of either
 * machine. They have two ways of reading, since stores past the caches do not read what they overwrite: broadcast of 64 MiB on
 * the EPYC 9 ms through a buffer and 12 straight to its place, on the Intel 10.9 and 9.5. */
#include "coll/shm_team_impl.h"

#include "base/clock.h"
#include "coll/plan.h"

/* Below, reading the clock would show; and the lines of small operations seldom come around. */
#define LEAST_BYTES ((size_t)32 << 10)

/* Below, an all_reduce that reads makes the next one slower: each rank writes lines that the other has just read. 2 ranks on the
 * Intel cores above, µs by rings and with reading as the third way: 64 KiB 12 and 18, 1 MiB 173 to 208 and 220 to 229, 4 MiB 830
 * to 880 and 690 to 760. */
#define ALL_REDUCE_LEAST ((size_t)2 << 20)

/* Rings written near, rings written far; reading through a buffer, and straight to where it goes (shm_reach.c). */
enum { NEAR, FAR, READ, PLACE };
static const unsigned char ways_below_large[CD_PACE_WAYS] = {NEAR, FAR, PLACE}, ways_of_large[CD_PACE_WAYS] = {NEAR, READ, PLACE};

/* A rank whose time holds what others read, or what they wrote and it read itself. */
static int teller_of(const cd_shm_team *shm, const cd_op *op)
{
    switch (op->kind) {
    case CD_BROADCAST:
    case CD_SCATTER: return (op->root + 1) % shm->ranks;
    case CD_REDUCE:
    case CD_GATHER: return op->root;
    default: return 0;
    }
}

static unsigned size_of(size_t bytes)
{
    return bytes < (size_t)128 << 10 ? 0 : bytes < ALL_REDUCE_LEAST ? 1 : bytes < CD_SHM_LARGE ? 2 : 3;
}

/* How many ways there are; one needs no choice. */
static unsigned count_ways(cd_kind kind, size_t bytes, bool reads)
{
    if (bytes < CD_SHM_LARGE)
        return reads ? 3 : 2;
    return !reads ? 1 : kind == CD_REDUCE_SCATTER ? 2 : 3; /* a result goes to its place whichever way it was read */
}

static void go(cd_shm_team *shm, unsigned way)
{
    shm->is_far = way == FAR;
    shm->reads = way == READ || way == PLACE;
    shm->places = way == PLACE;
}

void cd_shm_choose_way(cd_team *team, const cd_op *op)
{
    cd_shm_team *shm = team->shm;
    size_t bytes = cd_plan_bytes(team, op);
    go(shm, NEAR);
    shm->timed = NULL;
    if ((op->flags & CD_OP_UNEVEN) || shm->ranks == 1)
        return;
    bool reads = op->kind != CD_REDUCE && bytes >= shm->reads_least && cd_shm_reaches(team);
    if (reads && shm->reads_always) {
        go(shm, bytes < CD_SHM_LARGE ? PLACE : READ);
        return;
    }
    reads = reads && (op->kind != CD_ALL_REDUCE || bytes >= ALL_REDUCE_LEAST);
    unsigned ways = count_ways(op->kind, bytes, reads);
    if (bytes < LEAST_BYTES || ways == 1)
        return;
    unsigned index = ((unsigned)op->kind - CD_ALL_REDUCE) * CD_SHM_SIZES + size_of(bytes);
    int teller = teller_of(shm, op);
    /* With the head of the operation before: all have met there, and it stays until all have entered this one. */
    unsigned told = shm->rows[teller].enter[shm->number & 1].ways >> 2 * index & 3;
    go(shm, (bytes < CD_SHM_LARGE ? ways_below_large : ways_of_large)[told]);
    if (teller != shm->rank)
        return;
    shm->timed = &shm->paces[index];
    shm->timed_way = told;
    shm->timed_ways = ways;
    shm->timed_bytes = bytes;
    shm->waited_ns = 0;
    shm->began_ns = cd_now_ns();
}

cd_status cd_shm_note_way(cd_shm_team *shm, cd_status status)
{
    cd_pace *pace = shm->timed;
    shm->timed = NULL;
    if (!pace || status != CD_OK)
        return status;
    uint64_t now_ns = cd_now_ns();
    /* What was to be read and could not be counts as reading, with what the rings took then: it is what trying to costs. */
    cd_pace_note(pace, shm->timed_way, shm->timed_bytes, now_ns - shm->began_ns - shm->waited_ns);
    unsigned shift = 2 * (unsigned)(pace - shm->paces);
    uint64_t way = cd_pace_way(pace, shm->timed_ways, shm->timed_bytes, now_ns);
    /* It is told with the head of the next operation, and taken by the one after that. */
    shm->ways = (shm->ways & ~(UINT64_C(3) << shift)) | way << shift;
    return status;
}
