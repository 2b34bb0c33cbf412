/* Shared by the files of the GPU backend, included by no other.
 *
 * Locks: `lock` is held around every call into NCCL and from group_begin to group_end; `events_lock` guards the pool of events
 * and the list of running operations and is never held during a call into NCCL. Order: lock → events_lock. The watch thread waits
 * for `lock` only for a bounded time: a caller can be stuck inside NCCL (the GPU's launch queue is full behind a dead peer),
 * and the abort is what frees it. */
#ifndef CD_BACKEND_GPU_IMPL_H
#define CD_BACKEND_GPU_IMPL_H

#include "backend/gpu.h"
#include "cuda/kernels.h"
#include "cuda/nccl.h"

#include <pthread.h>
#include <stdatomic.h>

typedef struct cd_gpu_backend cd_gpu_backend;

enum { CD_EVENT_PENDING = 0, CD_EVENT_RECORDED, CD_EVENT_DONE };

/* One operation in flight. Two holders at most: the caller (from start) and the list of running operations. */
struct cd_event {
    cd_gpu_backend *backend;
    cd_cu_event cu;
    cd_event *next;          /* in the pool's free list */
    _Atomic uint32_t refs;
    _Atomic uint32_t state;  /* PENDING: inside an open NCCL group; DONE is final */
    bool captured;           /* recorded into a CUDA graph: has no state of its own */
    uint64_t deadline_ns;
    cd_descriptor op;        /* for texts */
};

enum { CD_GPU_RUNNING = 1024 }; /* as many as a GPU's launch queue holds */

/* What is left to do when a coalesced group ends: scratch to unpack and free, an event to record. */
typedef struct cd_gpu_deferred cd_gpu_deferred;
struct cd_gpu_deferred {
    cd_gpu_deferred *next;
    cd_cu_stream stream;
    void *scratch;   /* freed; NULL: none */
    void *unpack_to; /* NULL: nothing to unpack */
    uint32_t item_bytes;
    cd_dims dims;    /* merged */
};

typedef struct {
    void *memory;
    void *handle; /* of ncclCommRegister, NULL: not registered */
    bool nccl;    /* from ncclMemAlloc */
} cd_gpu_block;

struct cd_gpu_backend {
    cd_backend base;
    cd_team *team;
    int rank, world;
    _Atomic uint32_t refs; /* the group's and one for each event that a caller holds */

    cd_driver driver;
    cd_nccl nccl;
    cd_gpu gpu;
    cd_kernels kernels;

    pthread_mutex_t lock;
    _Atomic(cd_nccl_comm) comm; /* NULL: aborted or closed; taken out before it is aborted */
    _Atomic bool aborted;       /* set before the abort begins: what ends after that is not to be trusted */
    _Atomic bool broken;        /* an operation failed half-way: the communicator can only be aborted */
    _Atomic bool closed;
    cd_cu_stream stream;        /* of asynchronous operations */
    cd_cu_event fork;           /* makes our stream wait for the caller's; free again once the wait is enqueued */
    cd_cu_address word;         /* what a barrier reduces */
    _Atomic bool grouping;      /* between group_begin and group_end, `lock` is held by group_owner */
    pthread_t group_owner;
    cd_gpu_deferred *deferred;
    cd_event *grouped;          /* events to record at group_end, linked by next */

    pthread_mutex_t events_lock;
    cd_event *pool;
    cd_event *running[CD_GPU_RUNNING]; /* ring in issue order */
    unsigned running_first, running_count;

    pthread_t watch;
    bool watching;
    pthread_mutex_t watch_lock;
    pthread_cond_t watch_wake;
    bool watch_stop, abort_wanted;

    cd_gpu_block *blocks; /* under lock */
    size_t block_count, block_room;
};

/* gpu_comm.c */
/* Meets the other ranks: checks that each has its own GPU and the same NCCL, then makes the communicator. */
cd_status cd_gpu_connect(cd_gpu_backend *b, const cd_backend_env *env, cd_status prepared, const cd_patience *patience);
/* What a call into NCCL answered: waits while it is "in progress" (not inside a group), records failures. Under lock. */
cd_status cd_gpu_settle(cd_gpu_backend *b, cd_nccl_comm comm, cd_nccl_result result, const char *what,
                        const cd_patience *patience);
/* Takes the communicator out and aborts it. Watch thread, or free. */
void cd_gpu_abort_comm(cd_gpu_backend *b);
/* Finishes what runs and closes the communicator, or aborts it when that takes too long. */
void cd_gpu_close_comm(cd_gpu_backend *b);
/* The group's cause, or that it was aborted, as the thread's error. */
cd_status cd_gpu_cause(const cd_gpu_backend *b) CD_COLD;

/* gpu_launch.c */
cd_status cd_gpu_supports(cd_kind kind, cd_redop redop, cd_dtype dtype);
/* Enqueues op in `stream`. Under lock, context current. */
cd_status cd_gpu_launch(cd_gpu_backend *b, const cd_op *op, cd_cu_stream stream, const cd_patience *patience);
/* After the end of a coalesced group: unpacks and frees what it used. `good` false: only frees. */
cd_status cd_gpu_finish_deferred(cd_gpu_backend *b, bool good);

/* gpu_event.c */
cd_status cd_gpu_event_take(cd_gpu_backend *b, const cd_op *op, const cd_patience *patience, cd_event **out);
/* Records the event behind the stream's work and lists the operation as running. Consumes nothing. */
cd_status cd_gpu_event_record(cd_gpu_backend *b, cd_event *event, cd_cu_stream stream);
void cd_gpu_event_unref(cd_event *event);
/* Drops finished operations from the front of the running ones. Returns the oldest that still runs (referenced) or NULL. */
cd_event *cd_gpu_events_reap(cd_gpu_backend *b);
void cd_gpu_events_close(cd_gpu_backend *b);
cd_status cd_gpu_event_done(cd_event *event, bool *done_p);
cd_status cd_gpu_event_wait_host(cd_event *event, const cd_patience *patience);
cd_status cd_gpu_event_join_stream(cd_event *event, void *stream);
void cd_gpu_event_free(cd_event *event);

/* gpu_watch.c */
cd_status cd_gpu_watch_start(cd_gpu_backend *b);
void cd_gpu_watch_stop(cd_gpu_backend *b);
void cd_gpu_watch_abort(cd_gpu_backend *b);

/* gpu_memory.c */
void cd_gpu_blocks_close(cd_gpu_backend *b);

/* gpu.c */
void cd_gpu_backend_unref(cd_gpu_backend *b);

static inline cd_cu_address cd_gpu_address(const void *memory)
{
    return (cd_cu_address)(uintptr_t)memory;
}

#endif
