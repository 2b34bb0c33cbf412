/* The shared memory of one group whose ranks are all on one host: board (abort cause, a row of descriptors a rank), small
 * slots, staging rings. One per group; made by the lowest rank, attached by the others. */
#ifndef CD_COLL_SHM_TEAM_H
#define CD_COLL_SHM_TEAM_H

#include "coll/team.h"
#include "shm/arena.h"

/* Bytes of zero-filled shared memory that a group of `ranks` needs. */
size_t cd_shm_team_bytes(int ranks);
/* View of rank `rank` on that memory (which must outlive it). `arena`: base of the host's arena, mapped by all of them at
 * possibly different addresses, NULL if none. Does not block and needs no order among ranks. */
cd_status cd_shm_team_open(void *memory, int ranks, int rank, const cd_arena *arena, cd_shm_team **out);
void cd_shm_team_free(cd_shm_team *team);
/* The group's abort cause in that memory. */
cd_cause *cd_shm_team_cause(cd_shm_team *team);

#endif
