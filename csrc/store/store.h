/* The key-value store: how processes find each other and agree. One interface over a TCP server, a file, a table in the
 * process and a prefix on any of them. Keys and values are bytes; meanings follow torch.distributed's stores. */
#ifndef CD_STORE_STORE_H
#define CD_STORE_STORE_H

#include "base/wait.h"

#include <stddef.h>
#include <stdint.h>

#define CD_STORE_CLOSED_TEXT "the store is closed: close() comes after the last call of all threads; to go on, make a new one"

/* Bytes not owned (keys, values in) */
typedef struct {
    const void *data;
    size_t bytes;
} cd_bytes;

/* Bytes owned by the caller: allocated with malloc by the callee, released with cd_buffer_free. Zero is empty. */
typedef struct {
    void *data;
    size_t bytes;
} cd_buffer;
void cd_buffer_free(cd_buffer *buffer);

typedef struct cd_store cd_store;

/* A call waits as its cd_patience says: deadline (0 = look once), Ctrl-C (idle), an optional cause. Spin fields are not used.
 * idle may take the GIL, so no lock that a thread with the GIL may want is held while it is called. */

/* Every function: any thread; may block until patience ends; safe beside a blocked call of another thread on the same object
 * (a blocked wait never holds up another call). Outputs are written on success only.
 * Errors common to all: CD_STORE (closed, lost, refused), CD_STORE_TIMEOUT (names the keys and the time), CD_INTERRUPTED. */
typedef struct {
    const char *name; /* "tcp", "file", "hash", "prefix", "python" */
    cd_status (*set)(cd_store *, cd_bytes key, cd_bytes value, const cd_patience *);
    /* Waits for the key. */
    cd_status (*get)(cd_store *, cd_bytes key, cd_buffer *out, const cd_patience *);
    cd_status (*add)(cd_store *, cd_bytes key, int64_t delta, int64_t *value_p, const cd_patience *);
    cd_status (*compare_set)(cd_store *, cd_bytes key, cd_bytes expected, cd_bytes desired, cd_buffer *out, const cd_patience *);
    cd_status (*check)(cd_store *, const cd_bytes *keys, size_t count, bool *all_p, const cd_patience *);
    cd_status (*wait)(cd_store *, const cd_bytes *keys, size_t count, const cd_patience *);
    cd_status (*delete_key)(cd_store *, cd_bytes key, bool *existed_p, const cd_patience *);
    cd_status (*num_keys)(cd_store *, int64_t *count_p, const cd_patience *);
    cd_status (*append)(cd_store *, cd_bytes key, cd_bytes value, const cd_patience *);
    /* Waits for all keys; out[count]. On failure nothing is left allocated. A TCP server answers with at most 1 GiB. */
    cd_status (*multi_get)(cd_store *, const cd_bytes *keys, size_t count, cd_buffer *out, const cd_patience *);
    cd_status (*multi_set)(cd_store *, const cd_bytes *keys, const cd_bytes *values, size_t count, const cd_patience *);
    /* These three are NULL where the kind has no queues. pop: block == false and empty → CD_NOT_FOUND. */
    cd_status (*queue_push)(cd_store *, cd_bytes key, cd_bytes value, const cd_patience *);
    cd_status (*queue_pop)(cd_store *, cd_bytes key, bool block, cd_buffer *out, const cd_patience *);
    cd_status (*queue_len)(cd_store *, cd_bytes key, int64_t *count_p, const cd_patience *);
    cd_status (*list_keys)(cd_store *, cd_buffer **out_keys, size_t *count_p, const cd_patience *);
    /* NULL where there is no server. See cd_store_local_address. */
    bool (*local_address)(cd_store *, char *out, size_t bytes);
    /* Wakes and fails every blocked call and all later ones. Any thread; does not block. */
    void (*close)(cd_store *);
    /* After close, when no call is running any more. Takes NULL. */
    void (*free)(cd_store *);
} cd_store_ops;

/* Every kind starts with this. `refs`: shells and prefix stores that share it; the last cd_store_release closes and frees. */
struct cd_store {
    const cd_store_ops *ops;
    _Atomic int refs;
    _Atomic uint64_t timeout_ns; /* default of calls without a deadline of their own; 300 s */
};

void cd_store_init(cd_store *store, const cd_store_ops *ops); /* refs = 1, default timeout */
cd_store *cd_store_retain(cd_store *store);
void cd_store_release(cd_store *store);
/* CD_STORE_TIMEOUT "wait timeout after 300ms, keys: /a, /b"; `lead` goes before each key. */
cd_status cd_store_expired(uint64_t waited_ns, const char *lead, const cd_bytes *keys, size_t count) CD_COLD;
/* CD_NOT_FOUND of a pop that does not wait. */
cd_status cd_store_queue_empty(cd_bytes key) CD_COLD;
/* The numeric address by which this host reaches the store's server, so that other users of the store reach this host there;
 * false: the kind has no server or does not tell. Does not block but for the look-up of a name. */
bool cd_store_local_address(cd_store *store, char *out, size_t bytes);
/* A copy with malloc. CD_NO_MEMORY. */
cd_status cd_buffer_copy(const void *data, size_t bytes, cd_buffer *out);
/* The arrays of list_keys and multi_get. Take NULL. */
void cd_buffers_free(cd_buffer *buffers, size_t count);
/* In terms of the other functions, for kinds (file, python) that have no such request of their own. */
cd_status cd_store_append_by_swap(cd_store *store, cd_bytes key, cd_bytes value, const cd_patience *patience);
cd_status cd_store_multi_get_each(cd_store *store, const cd_bytes *keys, size_t count, cd_buffer *out,
                                  const cd_patience *patience);
cd_status cd_store_multi_set_each(cd_store *store, const cd_bytes *keys, const cd_bytes *values, size_t count,
                                  const cd_patience *patience);
/* Arrives and waits until `world` callers have: works on any kind, and again with the same key once all have come. */
cd_status cd_store_barrier(cd_store *store, cd_bytes key, int64_t world, const cd_patience *patience);

static inline cd_bytes cd_bytes_of(const char *text)
{
    size_t bytes = 0;
    while (text[bytes])
        bytes++;
    return (cd_bytes){text, bytes};
}

#endif
