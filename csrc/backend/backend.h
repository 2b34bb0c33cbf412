/* The contract between a group and one way to run operations. A new backend can be written from this header alone.
 *
 * Life: open → run/start … → abort, at any time → free. One backend belongs to one group and one device type. */
#ifndef CD_BACKEND_BACKEND_H
#define CD_BACKEND_BACKEND_H

#include "base/op.h"
#include "base/wait.h"
#include "coll/team.h"

typedef struct cd_backend cd_backend;
typedef struct cd_event cd_event;

/* Gathers `bytes` bytes of every rank of the group into out[world × bytes]; collective, blocking. Given to backends that must
 * agree on addresses or ids; they do not know the store. */
typedef cd_status (*cd_exchange_func)(void *ctx, const void *mine, void *all, size_t bytes, const cd_patience *patience);

/* What a backend may use of its group, valid for the backend's life. */
typedef struct {
    cd_team *team; /* ranks, cause, gone; shm and mesh for the CPU backend */
    cd_exchange_func exchange;
    void *exchange_ctx;
    cd_backend *parent;      /* same device type of a group that holds all members of this one, to start from, or NULL */
    const int *parent_ranks; /* ranks of the members there */
    int device_index;        /* GPU bound to this rank, −1 if none was named */
    bool eager;              /* connect at open (init_process_group(device_id=…)) */
    const cd_patience *patience; /* during open alone */
} cd_backend_env;

typedef struct {
    const char *name; /* "cpu", "self", "nccl" */
    cd_device device;
    /* May this (kind, redop, dtype) run here? Pure; says why not by cd_fail(CD_UNSUPPORTED). */
    cd_status (*supports)(cd_kind kind, cd_redop redop, cd_dtype dtype);
    /* True when run() is expected to end within a few µs once all ranks have called it: the caller may keep the GIL and run it
     * in its own thread. Pure, cheap. */
    bool (*is_quick)(cd_backend *, const cd_op *);
    /* Runs op; one thread at a time, in issue order, the same order on all ranks (SEND and RECV: any order, any thread).
     * CPU: returns when the data is there. GPU: returns when the work is enqueued behind op->stream's work, in that stream.
     * Errors in the group range are sticky; the caller publishes them as the group's cause. */
    cd_status (*run)(cd_backend *, const cd_op *, const cd_patience *);
    /* Asynchronous form for backends that have their own queue (GPU): enqueues in the backend's stream behind op->stream's work
     * and gives an event. NULL: the group's worker thread calls run(). */
    cd_status (*start)(cd_backend *, const cd_op *, const cd_patience *, cd_event **out);
    /* Events: only with start. done: CD_OK and *done_p; failures are the operation's. wait_host blocks; CD_WAIT_EXPIRED when
     * its patience ends first (the operation's own deadline is kept by the backend). join_stream makes `stream` wait for the
     * event without blocking the host. An event keeps its backend's memory alive and may be freed after it. */
    cd_status (*event_done)(cd_event *, bool *done_p);
    cd_status (*event_wait_host)(cd_event *, const cd_patience *);
    cd_status (*event_join_stream)(cd_event *, void *stream);
    void (*event_free)(cd_event *);
    /* Coalescing: operations between begin and end are one launch (NCCL group). NULL: no such thing. */
    cd_status (*group_begin)(cd_backend *, const cd_patience *);
    cd_status (*group_end)(cd_backend *, const cd_patience *);
    /* Whether something that was enqueued has not ended. Any thread. NULL: run() returns when all has. */
    bool (*is_busy)(cd_backend *);
    /* Ends running and queued work with the group's cause; any thread; does not block. */
    void (*abort)(cd_backend *);
    /* After the last run returned. Bounded (an aborted backend never waits for peers). Takes NULL. */
    void (*free)(cd_backend *);
} cd_backend_ops;

struct cd_backend {
    const cd_backend_ops *ops;
};

cd_status cd_backend_open_self(const cd_backend_env *env, cd_backend **out); /* world of one */
cd_status cd_backend_open_cpu(const cd_backend_env *env, cd_backend **out);
/* CD_UNSUPPORTED with what was looked for and where when NCCL or the driver is missing. */
cd_status cd_backend_open_gpu(const cd_backend_env *env, cd_backend **out);

#endif
