/* A non-blocking, full-duplex, ordered stream of bytes to one peer: a socket (net/link) or a pair of rings in shared memory
 * (shm/channel). The message engine (net/mesh) runs on this alone. */
#ifndef CD_BASE_PIPE_H
#define CD_BASE_PIPE_H

#include "base/status.h"

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

typedef struct cd_pipe cd_pipe;

typedef struct {
    const void *data;
    size_t bytes;
} cd_piece;

/* Called by one thread at a time for each direction (the engine's lock); never block.
 * Errors: CD_PEER_LOST when the other end is closed (after all its bytes were received), CD_IO otherwise. */
typedef struct {
    const char *name; /* "tcp", "shm" */
    /* Sends a prefix of the pieces, as much as fits; *moved_p = 0 when nothing does. */
    cd_status (*send)(cd_pipe *, const cd_piece *pieces, int count, size_t *moved_p);
    /* Receives what is there, at most `bytes`; *moved_p = 0 when nothing is. */
    cd_status (*recv)(cd_pipe *, void *out, size_t bytes, size_t *moved_p);
    /* Wakes a peer that polls this pipe; any thread; the object stays valid. */
    void (*close)(cd_pipe *);
    void (*free)(cd_pipe *);
    /* Both NULL where no pipe of this kind can read the peer's memory. Whether this one may; the first call asks the kernel. */
    bool (*reaches_peer)(cd_pipe *);
    /* Copies from address `there` in the peer's process, without its help. False: that cannot be read, and a part of `out` may
     * be written. */
    bool (*read_peer)(cd_pipe *, void *out, uint64_t there, size_t bytes);
} cd_pipe_ops;

struct cd_pipe {
    const cd_pipe_ops *ops;
    int fd;   /* for poll(2); −1 for memory, which must be looked at */
    int peer; /* world rank */
    /* CD_PIPE_OFFERS words each in memory that both sides share, zero at first, for the agreement on bodies that are read: the
     * own offers and the peer's (see net/mesh_reach.c). NULL where read_peer is. */
    _Atomic uint32_t *offers, *peer_offers;
};

/* So many messages each way can be under way to be read; they take half a KiB of each ring. */
#define CD_PIPE_OFFERS 128u

#endif
