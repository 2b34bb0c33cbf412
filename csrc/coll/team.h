/* What a CPU algorithm sees of its group: ranks, memory shared with them, messages to them. Never names, sockets or stores. */
#ifndef CD_COLL_TEAM_H
#define CD_COLL_TEAM_H

#include "base/op.h"
#include "base/wait.h"
#include "net/mesh.h"

#include <stdatomic.h>

typedef struct cd_shm_team cd_shm_team; /* coll/shm_team.h: boards, slots and rings of a group whose ranks share a host */

typedef struct {
    int rank, world;
    const int32_t *world_ranks; /* world rank of each rank of the group */
    cd_shm_team *shm;           /* NULL unless all ranks share this host's memory */
    cd_mesh *mesh;              /* NULL in a group of one */
    uint64_t context;           /* mesh context of this group's collectives; context + 1 is its point-to-point traffic */
    cd_cause *cause;            /* in shared memory for shm teams, private otherwise */
    _Atomic uint32_t *gone;     /* by group rank; private to this process, written by the monitor */
} cd_team;

/* Runs one operation to its end. The op has been checked (py/): counts fit, the dtype is legal, blocks are as its kind says.
 * Called by one thread at a time per team, in the same order on all ranks; op->sequence is set. On failure the group is done
 * for (the caller publishes the cause), but inputs are untouched for CD_MISMATCH. */
typedef cd_status (*cd_coll_func)(cd_team *team, const cd_op *op, const cd_patience *patience);

#endif
