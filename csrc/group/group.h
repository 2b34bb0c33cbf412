/* What a user calls a process group. A *world* is what all groups of one init share: the table of members, the control
 * connections, the monitor, the mesh, the host's shared memory. Groups are made of members of a world.
 *
 * Order: operations on one group run in the order of their calls on each rank and must be called in the same order on all.
 * SEND and RECV are outside that order. Groups do not wait for each other. */
#ifndef CD_GROUP_GROUP_H
#define CD_GROUP_GROUP_H

#include "backend/backend.h"
#include "group/work.h"
#include "shm/arena.h"
#include "store/store.h"

typedef struct cd_world cd_world;
typedef struct cd_group cd_group;

typedef struct {
    int rank, world;
    const char *prefix;       /* of this world's keys in the store ("default_pg/0") */
    uint64_t timeout_ns;      /* default deadline of operations */
    const uint8_t *secret;    /* job secret of 32 bytes, or NULL: none */
    const char *bind_address; /* of data connections, or NULL: that by which the store (rank 0) and rank 0 (others) are reached,
                                 loopback for rank 0 where the store has no server */
    bool force_tcp;           /* tests: no shared memory even on one host */
} cd_world_config;

/* Meets the other ranks through the store and connects: returns on all ranks with the default group ready, or fails on all.
 * Blocks until patience ends. On failure nothing is left behind (threads, descriptors, keys of this rank).
 * Errors: CD_TIMED_OUT naming the missing ranks and the address waited on; CD_REFUSED (duplicate rank, other world size,
 * wrong secret), CD_STORE*, CD_NETWORK, CD_INTERRUPTED. The store is retained until close. */
cd_status cd_world_open(const cd_world_config *config, cd_store *store, const cd_patience *patience, cd_world **out);
/* Says goodbye to the peers, closes every group (running operations end with CD_ABORTED), joins threads. Local and bounded
 * (< 1 s), any thread, also after errors and after fork (then it only frees). */
void cd_world_close(cd_world *world);
/* Frees when the last reference (groups, arrays in the arena) is gone too. */
cd_world *cd_world_retain(cd_world *world);
void cd_world_release(cd_world *world);
cd_group *cd_world_group(cd_world *world);
/* Tells all peers at once why this rank goes (uncaught exception): their calls fail with CD_PEER_LOST and this text. */
void cd_world_announce_death(cd_world *world, const char *why);
/* Memory of this host's arena; NULL where there is none. */
cd_arena *cd_world_arena(cd_world *world);
int cd_world_local_rank(const cd_world *world); /* position among the ranks of this host */
int cd_world_local_size(const cd_world *world);

/* Collective over the members only. `ranks`: world ranks in group order. Members must make equal sets in the same order.
 * A disagreement on membership is a CD_TIMED_OUT that names both lists. */
cd_status cd_group_create(cd_world *world, const int *ranks, int count, uint64_t timeout_ns, const cd_patience *patience,
                          cd_group **out);
/* Local and bounded: later calls fail, running ones end with CD_ABORTED. Any thread. */
void cd_group_close(cd_group *group);
/* Before close: lets queued operations and those on the GPU end and what was sent go out, until patience ends or the group
 * fails; returns at once when nothing is under way. Receives are not waited for. Any thread but the group's worker. */
void cd_group_drain(cd_group *group, const cd_patience *patience);
cd_group *cd_group_retain(cd_group *group);
void cd_group_release(cd_group *group);

int cd_group_rank(const cd_group *group);
int cd_group_size(const cd_group *group);
/* Queued collectives that are not complete; of the default group also messages of all groups. Any thread. */
uint32_t cd_group_pending(const cd_group *group);
/* Sends of this world that failed and whose failure nobody has been told: how many, and about the first of them in out ("" if
 * none is remembered). */
size_t cd_group_untold(const cd_group *group, char *out, size_t bytes);
/* The user knows of the loss of this rank of the world: sends that it ended are no news. */
void cd_group_tell_loss(const cd_group *group, int rank);
const int32_t *cd_group_world_ranks(const cd_group *group);
uint64_t cd_group_timeout_ns(const cd_group *group);
void cd_group_set_timeout_ns(cd_group *group, uint64_t timeout_ns);
cd_world *cd_group_world(cd_group *group);
/* How data moves: "shm", "tcp" or "self", for logs and tests. */
const char *cd_group_transport(const cd_group *group);

/* Attaches the backend for another device type (GPU) at first use or eagerly; collective. What one rank finds wrong before NCCL
 * is called (CD_UNSUPPORTED, CD_BAD_ARGUMENT) all ranks are told, and the group is as before; a failure in the group range or
 * an interruption becomes the group's cause. */
cd_status cd_group_open_device(cd_group *group, cd_device device, int device_index, bool eager, const cd_patience *patience);
cd_backend *cd_group_backend(cd_group *group, cd_device device); /* NULL if not opened */

/* Runs op to its end in the calling thread if nothing is queued before it, behind the queue otherwise. Fails at once with
 * the group's cause if it has one. patience->cause/gone/world_ranks are filled in here. A failure in the group range becomes the
 * group's cause, so that every rank raises. However it ends: on return no thread of this process touches the arrays any more. A
 * caller that is interrupted while the worker has them waits until it has let go, and patience->idle is called once more before
 * (Python gives the GIL back in it). */
cd_status cd_group_run(cd_group *group, cd_op *op, cd_patience *patience);
/* An all_gather of `bytes` from every rank into all[rank × bytes], run as cd_group_run does: for what ranks tell each other. */
cd_status cd_group_gather_bytes(cd_group *group, const void *mine, size_t bytes, void *all, cd_patience *patience);
/* Queues op and returns; op is copied, with the lists of its blocks. `timeout_ns` counts from the start of the operation. */
cd_status cd_group_issue(cd_group *group, const cd_op *op, uint64_t timeout_ns, cd_work **out);
/* As cd_group_issue for an operation on a GPU, which may wait for other ranks before it returns: patience->idle is called
 * meanwhile (NULL: nobody's). CD_INTERRUPTED from it aborts the group, as in cd_group_run. */
cd_status cd_group_issue_patiently(cd_group *group, const cd_op *op, uint64_t timeout_ns, const cd_patience *patience,
                                   cd_work **out);
/* True when cd_group_run is expected to take a few µs once all have called: the caller may keep the GIL until the first idle. */
bool cd_group_is_quick(cd_group *group, const cd_op *op);
/* Makes `error` the group's cause on every rank; running and later operations fail with it. Any thread; does not block. In a
 * forked child it does nothing. */
void cd_group_abort(cd_group *group, const cd_error *error);
/* CD_OK, or the sticky cause as the thread's error. */
cd_status cd_group_status(cd_group *group);
/* CD_OK, or CD_ABORTED in a child that was forked after the group was made: the group is the parent's. */
cd_status cd_group_check_fork(const cd_group *group);
/* What the group's messages and records are known by; the same on all members. */
uint64_t cd_group_context(const cd_group *group);
/* Number of the last collective issued. */
uint64_t cd_group_sequence(const cd_group *group);
/* Blocks until every rank of the group called it, or names those that did not (bitmap of world ranks, up to
 * `world` bytes set to 1 in missing). wait_all: collect all missing until the deadline, otherwise stop at the
 * first. All ranks succeed or all fail. */
cd_status cd_group_monitored_barrier(cd_group *group, bool wait_all, const cd_patience *patience, uint8_t *missing);

#endif
