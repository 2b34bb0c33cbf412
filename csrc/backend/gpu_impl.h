/* Shared by the files of the GPU backend, included by no other.
 *
 * Communicators are blocking: a call into NCCL can wait for another rank (it connects within the first collective of a kind
 * and size) or for the GPU (whose launch queue is full behind a dead peer). What keeps that bounded:
 *   - one caller at a time is inside, and marks itself so, with its deadline, before it looks at `comm`; the watch, which never
 *     goes in, takes `comm` out before it looks who is inside. When a deadline passes, or the group has a cause, the watch raises
 *     the communicator's abort flag, which all of NCCL's waits look at; memory is freed only when nobody is inside.
 *   - what is expected to wait for others (creation, first collectives, the end) is called in a thread of its own, while the
 *     caller waits with patience: for deadline, cause and Ctrl-C (gpu_errand.c).
 *
 * `inside_until` is a lock too, of whatever is said here to be "by who is inside", from group_begin to group_end as well.
 * `events_lock` guards the pool of events and the list of running operations and is never held during a call into NCCL or one
 * into the driver that can wait. It is taken inside, not the other way round. */
#ifndef CD_BACKEND_GPU_IMPL_H
#define CD_BACKEND_GPU_IMPL_H

#include "backend/gpu.h"
#include "cuda/kernels.h"
#include "cuda/nccl.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

typedef struct cd_gpu_backend cd_gpu_backend;

enum { CD_EVENT_PENDING = 0, CD_EVENT_RECORDED, CD_EVENT_ASKED, CD_EVENT_DONE };

/* An operation in flight, or several of one stream that nobody holds. Two holders at most: the caller (from start) and the list
 * of running operations. */
struct cd_event {
    cd_gpu_backend *backend;
    cd_cu_event cu;
    cd_event *next;          /* in the pool's free list */
    _Atomic uint32_t refs;
    _Atomic uint32_t state;  /* PENDING: inside an open NCCL group, or about to be recorded; ASKED: RECORDED, and the keeper of
                              * the list asks the driver; DONE is final */
    bool captured;           /* recorded into a CUDA graph: has no state of its own */
    cd_cu_stream stream;     /* of the last record */
    uint64_t deadline_ns;    /* of the first operation */
    cd_descriptor op;        /* the first one, for texts */
};

enum { CD_GPU_RUNNING = 1024 }; /* as many as a GPU's launch queue holds */
/* Deadlines that lie this close together are as good as one. */
#define CD_GPU_SLACK_NS (20 * CD_NS_PER_MS)

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

typedef enum { CD_GPU_BLOCK_USED, CD_GPU_BLOCK_RELEASED, CD_GPU_BLOCK_RIPE } cd_gpu_block_state;

typedef struct {
    void *memory;
    size_t bytes;
    void *handle; /* of ncclCommRegister, NULL: not registered */
    bool nccl;    /* from ncclMemAlloc */
    cd_gpu_block_state state;
} cd_gpu_block;

struct cd_gpu_backend {
    cd_backend base;
    cd_team *team;
    int rank, world;
    _Atomic uint32_t refs; /* the group's, the watch's, those of threads that were left alone, of callers' events and of blocks */

    cd_driver driver;
    cd_nccl nccl;
    cd_gpu gpu;
    cd_kernels kernels;

    _Atomic uint64_t inside_until; /* deadline of the caller that is inside NCCL, never 0; 0: nobody is */
    _Atomic uint32_t inside_kind;  /* what it does there */
    _Atomic uint64_t visits;       /* how many have ended: the number of the one that is inside */
    _Atomic(cd_nccl_comm) comm; /* NULL: aborted or closed; taken out before it is aborted */
    _Atomic bool aborted;       /* set before the abort begins: what ends after that is not to be trusted */
    _Atomic uint64_t raised;    /* 1: NCCL's abort flag is up */
    _Atomic bool broken;        /* an operation failed half-way: the communicator can only be aborted */
    _Atomic bool closed;
    cd_cu_stream stream;        /* of asynchronous operations */
    cd_cu_event fork;           /* makes our stream wait for the caller's; free again once the wait is enqueued */
    cd_cu_address word;         /* what a barrier reduces */
    /* By who is inside, as all up to the next lock. Per kind: bit n: one of 2^n bytes has been through, so that NCCL has
     * connected for it. */
    uint64_t warm[CD_KINDS];
    _Atomic bool grouping;      /* between group_begin and group_end, when group_owner is inside */
    pthread_t group_owner;
    cd_gpu_deferred *deferred;
    cd_event *grouped;          /* events to record at group_end, linked by next */
    cd_event *grouped_run;      /* the one of all operations in callers' streams; NULL: there was none */

    pthread_mutex_t events_lock;
    cd_event *pool;
    cd_event *spare;  /* the next one to take; by who is inside */
    cd_event *newest; /* the one that was listed last, perhaps off the list again; by who is inside */
    cd_event *running[CD_GPU_RUNNING]; /* ring in issue order */
    unsigned running_first, running_count;

    pthread_t watch;
    bool watching;
    _Atomic uint64_t watch_over; /* 1: the watch touches nothing any more */
    pthread_mutex_t watch_lock;
    pthread_cond_t watch_wake;
    _Atomic bool watch_stop, abort_wanted; /* written under watch_lock */
    uint64_t late_visit;        /* the watch's: 1 + the visit that was past its deadline at the last look; 0: none was */

    pid_t process; /* whose all this is: a forked child leaves it alone */
    pthread_mutex_t blocks_lock; /* taken inside, where that is needed */
    cd_gpu_block *blocks;
    size_t block_count, block_room, released_bytes;
    _Atomic bool sweeping; /* a thread waits for the GPU, to give back what was released */
};

/* How long the end of a group, or of its last array, waits for the GPU before it leaves the rest to a thread. */
#define CD_GPU_FAREWELL_NS (800 * CD_NS_PER_MS)

/* gpu_comm.c */
/* Meets the other ranks: checks that each has its own GPU, or may share it, and the same NCCL, then makes the communicator. */
cd_status cd_gpu_connect(cd_gpu_backend *b, const cd_backend_env *env, cd_status prepared, const cd_patience *patience);
/* What a call into NCCL answered: records failures; after an abort, its cause. Waits while it is "in progress" (old NCCL, or
 * NCCL_COMM_BLOCKING=0 in the environment; not inside a group). By who is inside. */
cd_status cd_gpu_settle(cd_gpu_backend *b, cd_nccl_comm comm, cd_nccl_result result, const char *what,
                        const cd_patience *patience);
/* Takes the communicator out, raises its abort flag, frees it when nobody is inside any more. Watch thread, or free. */
void cd_gpu_abort_comm(cd_gpu_backend *b);
/* Finishes what runs and closes the communicator, or aborts it when that takes too long. */
void cd_gpu_close_comm(cd_gpu_backend *b);
/* Lets the caller in, for a `kind` of operation until `deadline`, unless somebody is inside. */
static inline bool cd_gpu_try_go_in(cd_gpu_backend *b, cd_kind kind, cd_deadline deadline)
{
    uint64_t nobody = 0;
    /* Sequentially consistent, as the load of `comm` that follows and the aborter's exchange of `comm` and load of this word:
     * either we find no communicator, or the aborter finds us. It acquires what the one before has released. */
    if (cd_unlikely(!atomic_compare_exchange_strong(&b->inside_until, &nobody, deadline.at_ns ? deadline.at_ns : 1)))
        return false;
    atomic_store_explicit(&b->inside_kind, (uint32_t)kind, memory_order_relaxed); /* for a text */
    return true;
}

/* The visit of who is inside has ended: the watch finds the same number before and after a deadline that it belongs to. */
static inline void cd_gpu_count_visit(cd_gpu_backend *b)
{
    atomic_store_explicit(&b->visits, atomic_load_explicit(&b->visits, memory_order_relaxed) + 1, memory_order_relaxed);
}

static inline void cd_gpu_come_out(cd_gpu_backend *b)
{
    cd_gpu_count_visit(b);
    /* Release: who frees the communicator does so after our last use of it, and who goes in next finds what we left. */
    atomic_store_explicit(&b->inside_until, 0, memory_order_release);
}

/* gpu_errand.c */
/* Calls body(arg) in a thread of its own and waits for it with patience. When patience ends first, calls stop(arg), waits for
 * body to come out (its waits look at NCCL's abort flag, which stop has raised or had raised) and returns patience's error;
 * otherwise body's. `stop` NULL: nothing can end body, which is left to itself then, so arg must live until it is through. The
 * thread has no context and blocks all signals. CD_NO_MEMORY: it could not be started; no body that was given an arg of its own
 * answers that. */
cd_status cd_gpu_errand(cd_status (*body)(void *arg), void (*stop)(void *arg), void *arg, const cd_patience *patience);
/* The same in two steps. */
typedef struct cd_gpu_errand_state cd_gpu_errand_state;
cd_status cd_gpu_errand_begin(cd_status (*body)(void *arg), void *arg, cd_gpu_errand_state **out);
cd_status cd_gpu_errand_end(cd_gpu_errand_state *errand, void (*stop)(void *arg), const cd_patience *patience);

/* The group's cause, or that it was aborted, as the thread's error. */
cd_status cd_gpu_cause(const cd_gpu_backend *b) CD_COLD;

/* gpu_launch.c */
/* Enqueues op in `stream`. By who is inside, context current. */
cd_status cd_gpu_launch(cd_gpu_backend *b, const cd_op *op, cd_cu_stream stream, const cd_patience *patience);
/* After the end of a coalesced group: unpacks and frees what it used. `good` false: only frees. */
cd_status cd_gpu_finish_deferred(cd_gpu_backend *b, bool good);

/* gpu_event.c */
cd_status cd_gpu_event_take(cd_gpu_backend *b, const cd_op *op, const cd_patience *patience, cd_event **out);
/* Records the event behind the stream's work and lists the operation as running. `give`: consumes the caller's reference, when
 * it succeeds. By who is inside, as take. */
cd_status cd_gpu_event_record(cd_gpu_backend *b, cd_event *event, cd_cu_stream stream, bool give);
/* Lets the newest listed operation stand for one more behind it, if nobody waits for it alone, it is in the same stream and its
 * deadline is as good as the same: the event is recorded anew. *done_p false: that cannot be, nothing was done. By who is
 * inside. */
cd_status cd_gpu_event_extend(cd_gpu_backend *b, cd_cu_stream stream, const cd_patience *patience, bool *done_p);
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
/* Goes in until `deadline`; waits for that with patience, for another thread's coalesced group too. */
cd_status cd_gpu_go_in(cd_gpu_backend *b, cd_kind kind, cd_deadline deadline, const cd_patience *patience);
/* A coalesced group is inside from begin to end; its owner comes in again. */
static inline bool cd_gpu_owns_group(const cd_gpu_backend *b)
{
    return b->grouping && pthread_equal(b->group_owner, pthread_self());
}

/* True while the stream's work becomes a CUDA graph. The legacy default stream (0 and 1) cannot be captured. */
static inline bool cd_gpu_is_captured(const cd_gpu_backend *b, cd_cu_stream stream)
{
    int status = CD_CU_CAPTURE_NONE;
    return (uintptr_t)stream > 1 && b->driver.stream_is_capturing(stream, &status) == CD_CU_SUCCESS &&
           status != CD_CU_CAPTURE_NONE;
}

static inline int cd_gpu_rank(const cd_gpu_backend *b, int rank)
{
    return b->team->world_ranks ? b->team->world_ranks[rank] : rank;
}

static inline cd_cu_address cd_gpu_address(const void *memory)
{
    return (cd_cu_address)(uintptr_t)memory;
}

#endif
