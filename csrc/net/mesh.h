/* Messages between any two ranks of a world: matching by (peer, context, tag), first in first out for equal keys, over one
 * pipe a pair. Point-to-point operations and the collectives between hosts both run on it, so that all groups share the
 * connections of a pair of ranks and none can block another.
 *
 * Vocabulary. A *transfer* is one send or one receive. *Context* separates groups and uses within a group. *Eager*: a message
 * whose body follows its header at once (up to CD_MESH_EAGER bytes); if nobody waits for it yet it is kept on the heap.
 * *Rendezvous*: a larger one, whose body is sent only after the receiver has said that it has posted the receive, so that it
 * goes straight into the caller's memory and a stream is never blocked by a message that nobody wants yet. Where the pipe can
 * read the peer's memory and that is faster, the receiver copies the body from there (CDIST_SINGLE_COPY, mesh_reach.c).
 *
 * Threads: every function may be called from any thread; one lock inside. Progress is made by whoever waits, and by a helper
 * thread of the mesh while asynchronous transfers are outstanding and nobody waits.
 *
 * Memory for messages that nobody has asked for is bounded for each peer: above 8 MiB the sender is told to announce all
 * further messages, also small ones, instead of sending them eagerly (nothing stops flowing, so no group can block another);
 * a peer that exceeds 64 MiB all the same is given up with CD_IO. */
#ifndef CD_NET_MESH_H
#define CD_NET_MESH_H

#include "base/pipe.h"
#include "base/wait.h"

#include <stdint.h>

/* Largest message sent without asking (see above); larger ones pay half a round trip, smaller ones at most one copy. */
#define CD_MESH_EAGER 16384

typedef struct cd_mesh cd_mesh;

typedef struct {
    uint64_t context;
    int64_t tag;
} cd_match;

/* Where the body of a large message lies in the sender's process, and which of its offers to this peer it is, from 1. there 0:
 * not to be read. */
typedef struct {
    uint64_t there;
    uint32_t number, zero;
} cd_offer;

/* One send or receive. The caller provides the memory (in a Work or on its stack), which must stay until the transfer is
 * complete or cancelled. Fields are the mesh's; read `error`, `source` and `bytes` after completion. */
typedef struct cd_xfer {
    struct cd_xfer *next;
    _Atomic uint64_t done; /* 0 running, 1 complete (release: data and the fields below are visible) */
    bool is_send, is_async, may_be_shorter;
    int peer;              /* world rank; −1 for a receive from anyone */
    cd_match match;
    uint32_t signature;    /* of the sender's dtype and shape; compared by the receiver unless 0 on either side */
    char *data;
    size_t bytes;          /* posted; after a receive: of the message */
    size_t moved;
    uint64_t stamp;        /* order of posting, so that the oldest of the receives that fit gets a message */
    uint32_t state, ticket, their_ticket;
    uint32_t their_signature; /* after CD_MISMATCH: what the other side posted */
    size_t their_bytes;
    cd_offer offer;        /* send: its own; receive: that of the message */
    uint64_t took_ns;      /* receive of a large message: spent on its body so far; while it comes in pieces, when it began */
    int source;            /* receive: the world rank that sent */
    cd_error *error;       /* NULL = fine; owned by the transfer: free with cd_xfer_clear */
    uint64_t failure;      /* number of an asynchronous send's failure, for cd_mesh_tell; 0: none, or told */
    int lost;              /* with it: the world rank whose loss it is, −1 for another reason */
} cd_xfer;

cd_status cd_mesh_create(int rank, int world, cd_mesh **out);
/* Gives the mesh the pipe to pipe->peer; the mesh owns it from here. A rank without pipe is unreachable: transfers fail. */
void cd_mesh_attach(cd_mesh *mesh, cd_pipe *pipe);
/* Whether it was given one. Any thread. */
bool cd_mesh_reaches(cd_mesh *mesh, int peer);
/* Fails every transfer, running and later. Any thread; does not block. */
void cd_mesh_close(cd_mesh *mesh, const cd_error *why);
/* After close; joins the helper thread, frees pipes and kept messages. Takes NULL. */
void cd_mesh_free(cd_mesh *mesh);

/* Post a transfer; never blocks; tries to move bytes at once (a small send is normally complete on return). peer == own rank
 * is legal (a copy). `is_async`: nobody may wait for long, so the helper thread drives it. Failures are in the transfer. */
void cd_mesh_send(cd_mesh *mesh, cd_xfer *xfer, int peer, cd_match match, uint32_t signature, const void *data, size_t bytes,
                  bool is_async);
/* A message longer than `bytes` fails the receive with CD_MISMATCH (both sizes named) and is dropped; a shorter one is
 * CD_MISMATCH too unless `may_be_shorter`. */
void cd_mesh_recv(cd_mesh *mesh, cd_xfer *xfer, int peer, cd_match match, uint32_t signature, void *data, size_t bytes,
                  bool may_be_shorter, bool is_async);
/* Makes progress until all are complete or patience ends. Returns the error of the first failed transfer (it becomes the
 * thread's), or CD_TIMED_OUT naming a peer that is waited for, the cause's, CD_PEER_LOST if that peer left. The transfers of
 * a wait that failed are still posted: cancel them before their memory goes. patience->gone is indexed by world rank here. */
cd_status cd_mesh_wait(cd_mesh *mesh, cd_xfer *const *xfers, int count, const cd_patience *patience) CD_MUST_USE;
/* One turn of progress; true when complete. */
bool cd_mesh_test(cd_mesh *mesh, cd_xfer *xfer);
/* After return the mesh touches neither the transfer nor its data; unless it was complete, its error is CD_ABORTED. A send whose
 * message the receiver has read and taken is complete (without error), although this side may hear of it only here. The part
 * of a send that must still go out (the rest of an eager message or of a segment) is copied first. A message that was
 * announced but not sent to its end fails the other side's transfer with CD_ABORTED. */
void cd_mesh_cancel(cd_mesh *mesh, cd_xfer *xfer);
void cd_xfer_clear(cd_xfer *xfer);
/* Waits for a message without receiving it: its size and source. For object transfers of unknown size. */
cd_status cd_mesh_probe(cd_mesh *mesh, int peer, cd_match match, size_t *bytes_p, int *source_p, const cd_patience *patience);

/* A peer is lost (monitor): fails all transfers with it, now and later, with this error. Any thread. */
void cd_mesh_fail_peer(cd_mesh *mesh, int peer, const cd_error *why);
/* A context is gone (call it for each context of a group): kept messages of the context are dropped, as are those that still
 * come; their senders' large transfers fail with CD_PEER_LOST: "rank 1 left the group …". */
void cd_mesh_forget(cd_mesh *mesh, uint64_t context);
/* Asynchronous transfers under way. Any thread. */
size_t cd_mesh_outstanding(cd_mesh *mesh);
/* Makes progress; whether anything that was sent has not left this process yet, or waits for its receive. Any thread. */
bool cd_mesh_owes(cd_mesh *mesh);
/* Asynchronous sends that failed, other than by cancelling or closing, and whose owner did not say that it knows: of this one
 * (tell), or that this rank is lost (tell_loss), which explains all that failed and will fail of that. How many; out: "to rank 1
 * (tag 3, 800 bytes): why" of the oldest that is remembered, "" if none. Any thread. */
size_t cd_mesh_untold(cd_mesh *mesh, char *out, size_t bytes);
void cd_mesh_tell(cd_mesh *mesh, cd_xfer *xfer);
void cd_mesh_tell_loss(cd_mesh *mesh, int rank);
/* Payload bytes sent so far, for tests of step and byte tables. */
uint64_t cd_mesh_bytes_sent(const cd_mesh *mesh);

#endif
