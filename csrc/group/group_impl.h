/* The insides of a group, shared by the files of group/ alone. */
#ifndef CD_GROUP_GROUP_IMPL_H
#define CD_GROUP_GROUP_IMPL_H

#include "group/world_impl.h"

#include <pthread.h>

#define CD_DESTROYED_TEXT "the process group was destroyed: destroy_process_group() comes after the last call of all threads"

struct cd_group {
    /* Hot: read or written by every operation. */
    _Atomic uint32_t busy;    /* 1 while somebody runs an operation: the right to use `cpu` and `sequence` */
    _Atomic uint32_t pending; /* queued, not yet completed: an operation may run in its caller's thread only at 0 */
    uint64_t sequence;
    cd_backend *cpu;
    _Atomic(cd_backend *) gpu; /* stored once, under device_lock */
    cd_cause *cause; /* in shared memory when all ranks share a host, else own_cause */
    const _Atomic uint32_t *alive;
    cd_record_page *page;
    uint64_t context;
    _Atomic bool closed;
    _Atomic uint32_t *gone; /* by group rank; in shared memory or own */
    int32_t *world_ranks;
    cd_patience template; /* spin budget, cause, gone, names */
    _Atomic(const void *) holder; /* while busy: the thread that runs the operation */

    _Atomic int refs;
    cd_world *world;
    cd_group *next; /* in the world's list */
    int rank, size;
    int32_t *index_of; /* group rank of each world rank, −1 */
    _Atomic uint64_t timeout_ns;
    uint64_t key[2];
    _Atomic uint64_t roll_calls; /* monitored barriers so far */
    bool spans_hosts;
    cd_cause own_cause;
    cd_segment segment;
    cd_shm_team *shm;
    cd_team team;
    pthread_mutex_t device_lock; /* opening of gpu */

    pthread_mutex_t queue_lock;
    pthread_cond_t queue_filled;
    cd_work *queue_head, *queue_tail;
    pthread_t worker;
    bool worker_runs, worker_stop;

    pthread_mutex_t orphans_lock; /* works that nobody holds any more but that still move, or run on the GPU */
    cd_work *_Atomic orphans; /* written under the lock; a look without it only says whether to take it */
    pthread_mutex_t spares_lock;
    cd_work *spares; /* memory of works that are over, for the next ones */
    int spare_count;
};

/* Acquire: pairs with the release in cd_group_open_device; the monitor asks while a caller opens. */
static inline cd_backend *cd_group_gpu(const cd_group *g)
{
    return atomic_load_explicit(&g->gpu, memory_order_acquire);
}

/* device.c */
/* Ends what runs on the group's GPU, if it has one. Any thread. */
void cd_group_abort_gpu(cd_group *group);
bool cd_group_is_gpu_busy(cd_group *group);
/* A cd_exchange_func; ctx is the group. */
cd_status cd_group_exchange(void *ctx, const void *mine, void *all, size_t bytes, const cd_patience *patience);

/* group.c */
size_t cd_group_memory_bytes(int ranks);
cd_status cd_group_open_default(cd_world *world, cd_group **out);
/* For every group of the world that contains `rank`: it left, or it is lost (the cause of all). */
void cd_groups_peer_gone(cd_world *world, int rank, const cd_error *lost_or_null);
/* False: a group of this context has a cause already. */
bool cd_groups_abort_context(cd_world *world, uint64_t context, const cd_error *error);
void cd_groups_close_all(cd_world *world);
void cd_sets_free(cd_world *world);

/* issue.c: running and queueing */
cd_status cd_group_refuse(cd_group *group);
/* `record`: of an operation that was queued, with its ticket; NULL: a new one is made. */
cd_status cd_group_execute(cd_group *group, cd_op *op, cd_patience *patience, cd_record *record, uint64_t ticket);
/* Turns a failure into what the caller sees and, where the group is lost, into the cause of all ranks. */
cd_status cd_group_settle(cd_group *group, const cd_op *op, cd_status status);
/* After an error that another rank's end may have caused: gives the news of that a moment to come. Returns the group's cause
 * if there is one, CD_PEER_LOST if the rank of the thread's error is gone, otherwise `status` and the error as they were. */
cd_status cd_group_first_cause(cd_group *group, cd_status status);
void cd_queue_stop(cd_group *group);
/* CD_NESTED where the calling thread is in the middle of one of the group's operations, or is its worker (Python code that runs
 * meanwhile: a signal handler, a __del__): none that is queued can run before it returns. */
cd_status cd_group_refuse_nested(cd_group *group, cd_kind kind);

/* p2p.c */
/* What a failed wait for a message says: the first cause if there is one. `status`: CD_PEER_LOST or CD_ABORTED. */
cd_status cd_p2p_explain(cd_group *group, const cd_op *op, cd_status status);
cd_status cd_p2p_run(cd_group *group, cd_op *op, cd_patience *patience);
cd_status cd_p2p_start(cd_group *group, cd_work *work);
void cd_p2p_close(cd_group *group);
/* Frees works that nobody holds and that are through; `cancel`: all of them. */
void cd_orphans_reap(cd_group *group, bool cancel);

/* work.c */
void cd_spares_free(cd_group *group);

#endif
