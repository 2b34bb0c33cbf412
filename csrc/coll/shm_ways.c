/* Whether an operation writes to the memory that ranks share through the caches or past them. Where the cores share a cache,
 * through it is best. Where they do not, a line that a peer has read must be taken back from its caches before it can be
 * written again; a store past the caches only tells the peer that its copy is void. Two cores of a virtual machine (EPYC, Zen 3),
 * slots of 64 KiB in a ring of 1.5 MiB, written, read by the other, written again, GB/s:
 *                                               near: written, read    far: written, read
 *   one cache (a line there and back in 0.1 µs)         26, 25                23, 12
 *   two caches (0.45 µs)                               3.8, 10                22, 11
 * all_reduce between two caches, near and far: 64 KiB 29 and 12 µs, 1 MiB 440 and 194; within one 7 and 14, 89 and 198. The host
 * moves such cores from one state to the other several times a second and tells nobody. So one rank times whole operations, what
 * they write and what they read, and tells the others which way the next one goes. The way changes no result; ranks go the same
 * one so that what is measured is what one way costs.
 *
 * Large operations have two other ways: through the rings, near, and by reading in the memory of others (shm_reach.c). Memory is
 * what limits them, and writing the rings past the caches was not quicker in either state (all_reduce of 64 MiB). */
#include "coll/shm_team_impl.h"

#include "base/clock.h"
#include "coll/plan.h"

/* Below, reading the clock would show; and the lines of small operations seldom come around. */
#define LEAST_BYTES ((size_t)32 << 10)

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

void cd_shm_choose_way(cd_team *team, const cd_op *op)
{
    cd_shm_team *shm = team->shm;
    size_t bytes = cd_plan_bytes(team, op);
    shm->is_far = shm->reads = false;
    shm->timed = NULL;
    if ((op->flags & CD_OP_UNEVEN) || shm->ranks == 1)
        return;
    bool reads = op->kind != CD_REDUCE && bytes >= shm->reads_least && cd_shm_reaches(team);
    if (reads && shm->reads_always) {
        shm->reads = true;
        return;
    }
    if (bytes < LEAST_BYTES || (bytes >= CD_SHM_LARGE && !reads))
        return;
    unsigned size = bytes >= CD_SHM_LARGE ? 2 : bytes >= (size_t)1 << 20;
    unsigned index = ((unsigned)op->kind - CD_ALL_REDUCE) * CD_SHM_SIZES + size;
    int teller = teller_of(shm, op);
    /* The head of the operation before: all have met there, and it stays until all have entered this one. */
    const cd_shm_head *last = &shm->rows[teller].enter[shm->number & 1].head;
    bool second = (last->far >> index & 1) != 0;
    shm->reads = second && bytes >= CD_SHM_LARGE;
    shm->is_far = second && bytes < CD_SHM_LARGE;
    if (teller != shm->rank)
        return;
    shm->timed = &shm->paces[index];
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
    cd_pace_note(pace, shm->is_far || shm->reads, shm->timed_bytes, now_ns - shm->began_ns - shm->waited_ns);
    uint32_t bit = UINT32_C(1) << (pace - shm->paces);
    /* It is told with the head of the next operation, and taken by the one after that. */
    if (cd_pace_way(pace, shm->timed_bytes, now_ns))
        shm->far |= bit;
    else
        shm->far &= ~bit;
    return status;
}
