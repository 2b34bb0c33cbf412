/* Ranks that share a core while another one is idle. Measured with 2 ranks on 2 cores: forked together they stayed on one core
 * for tens of seconds, and an all_reduce of 4 B took 56 µs with long spins, 1.2 µs with short ones, instead of 0.12 µs. */
#include "coll/shm_team_impl.h"

#include "base/clock.h"
#include "base/host.h"

#include <sched.h>

/* A move costs some 10 µs and cold caches; a stale hint costs one such move, so they must be rare. */
#define MOVE_EVERY_NS (20 * CD_NS_PER_MS)

/* A core of the mask on which no rank was seen; −1 if there is none. */
static int free_core(const cd_shm_team *shm, const cpu_set_t *allowed)
{
    cpu_set_t taken;
    CPU_ZERO(&taken);
    for (int peer = 0; peer < shm->ranks; peer++) {
        uint32_t core = atomic_load_explicit(&shm->rows[peer].core, memory_order_relaxed);
        if (core && core <= CPU_SETSIZE)
            CPU_SET(core - 1, &taken);
    }
    for (size_t core = 0; core < CPU_SETSIZE; core++)
        if (CPU_ISSET(core, allowed) && !CPU_ISSET(core, &taken))
            return (int)core;
    return -1;
}

/* Of the ranks seen on a core the lowest stays. */
static bool shares_core(const cd_shm_team *shm, uint32_t core)
{
    for (int peer = 0; peer < shm->rank; peer++)
        if (atomic_load_explicit(&shm->rows[peer].core, memory_order_relaxed) == core)
            return true;
    return false;
}

void cd_shm_leave_shared_core(cd_shm_team *shm)
{
    int here = sched_getcpu();
    if (here < 0 || shm->ranks > cd_host_cores())
        return;
    /* Relaxed: a hint that orders nothing. */
    atomic_store_explicit(&shm->rows[shm->rank].core, (uint32_t)here + 1, memory_order_relaxed);
    if (!shares_core(shm, (uint32_t)here + 1))
        return;
    uint64_t now = cd_now_ns();
    if (now - shm->moved_ns < MOVE_EVERY_NS)
        return;
    shm->moved_ns = now;
    cpu_set_t allowed, one;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0)
        return;
    int target = free_core(shm, &allowed);
    if (target < 0)
        return;
    CPU_ZERO(&one);
    CPU_SET((size_t)target, &one);
    if (sched_setaffinity(0, sizeof one, &one) != 0)
        return;
    /* The move has happened when the call returns; from here on the kernel may move the thread again. */
    (void)sched_setaffinity(0, sizeof allowed, &allowed);
    atomic_store_explicit(&shm->rows[shm->rank].core, (uint32_t)target + 1, memory_order_relaxed);
}
