/* The inside of the mesh, shared by its files: mesh.c (what callers ask for), mesh_match.c (who gets which message),
 * mesh_move.c (frames in and out of pipes), mesh_reach.c (bodies read in the sender's memory), mesh_wait.c (waiting,
 * naps, the helper thread). Private to net/mesh*.
 *
 * All functions here are called with mesh->lock held unless they say otherwise. */
#ifndef CD_NET_MESH_CORE_H
#define CD_NET_MESH_CORE_H

#include "base/pace.h"
#include "net/mesh.h"
#include "net/mesh_frame.h"

#include <poll.h>
#include <pthread.h>

#define CD_MESH_KEPT_SOFT (UINT64_C(8) << 20)
#define CD_MESH_KEPT_HARD (UINT64_C(64) << 20)
#define CD_MESH_UNTOLD 8

typedef enum {
    CD_XFER_DONE = 0,
    CD_XFER_QUEUED,   /* send: in peer->first, nothing is out yet */
    CD_XFER_SENDING,  /* send: the eager frame that is going out */
    CD_XFER_ASKED,    /* send: in peer->asked, announced */
    CD_XFER_BODY,     /* send: in peer->bodies, the receiver is ready */
    CD_XFER_SELF,     /* send to the own rank: a kept message points to it */
    CD_XFER_POSTED,   /* receive: in peer->posted or mesh->any */
    CD_XFER_CLAIMED,  /* receive: has a kept message whose body is still coming in */
    CD_XFER_DIRECT,   /* receive: the eager body that is coming in goes to its memory */
    CD_XFER_ARRIVING, /* receive: in peer->arriving, the sender was told */
    CD_XFER_READING,  /* receive: in peer->reading, the body is read in the sender's memory */
    CD_XFER_LATE      /* receive: in peer->arriving, what was read had been withdrawn; DROP is on its way */
} cd_xfer_state;

typedef struct {
    cd_xfer *first, *last;
} cd_xfers;

/* A message that nobody has asked for yet. */
typedef struct cd_kept {
    struct cd_kept *next;
    uint64_t stamp; /* order of arrival, over all peers */
    cd_match match;
    uint32_t signature, ticket;
    size_t bytes;
    bool is_announced; /* the body is still at the sender */
    bool is_whole;
    cd_xfer *claimed;  /* the receive that gets it when its body is in */
    cd_xfer *self;     /* the own send whose memory has the body */
    cd_offer offer;    /* announced */
    char body[];
} cd_kept;

typedef enum { CD_MESH_REACH_AUTO, CD_MESH_REACH_ALWAYS, CD_MESH_REACH_NEVER } cd_mesh_reach;

typedef struct {
    cd_pipe *pipe;     /* NULL: unreachable */
    cd_error *lost;    /* no longer NULL: why nothing goes to this peer any more */
    cd_error *deaf;    /* sending failed; what the peer sent before is still read */
    size_t untold;     /* failed sends that this peer's loss ended and nobody has asked about */
    bool loss_is_known; /* the user has been told of it */
    cd_xfers first, asked, bodies, posted, arriving, reading;
    cd_pace pace[4];   /* of large messages from this peer by size, see mesh_reach.c */
    uint32_t offers;   /* made to this peer */
    uint64_t body_ns;  /* when the last body came to its end in pieces */
    cd_kept *kept, **kept_last;
    size_t kept_bytes;
    bool told_slow;    /* we asked the peer to announce everything */
    bool is_slow;      /* the peer asked us */
    size_t unread;     /* bytes sent since the pipe was last read by a sender */
    struct {
        cd_frame *list;
        size_t first, count, room;
    } control;         /* frames without body, sent before all others */
    struct {
        bool active;
        cd_frame frame;
        size_t header_left, body_left, filler_left;
        const char *body;
        cd_xfer *xfer;
        char *copy;    /* of the rest of the body of a cancelled send */
    } out;
    struct {
        cd_frame frame;
        size_t header_got, body_left, filler_left;
        char *to;      /* NULL: nobody wants the body */
        cd_xfer *xfer;
        cd_kept *kept;
    } in;
} cd_mesh_peer;

typedef struct {
    uint64_t failure;
    int lost;          /* the rank whose loss ended it, -1: something else */
    char text[256];
} cd_mesh_untold_send;

struct cd_mesh {
    pthread_mutex_t lock;
    int rank, world;
    cd_mesh_reach reach;
    cd_mesh_peer *peers;
    int *attached, attached_count; /* ranks with a pipe */
    cd_xfers any;                  /* receives from anyone */
    uint64_t stamp;
    uint32_t ticket;
    uint64_t *forgotten;           /* sorted */
    size_t forgotten_count, forgotten_room;
    cd_error *closed;
    _Atomic uint64_t bytes_sent;
    int sockets, memories;         /* pipes of reachable peers, by kind */
    /* Naps: one thread at a time polls the sockets and the event, the others sleep on `changed`. */
    int event;
    struct pollfd *polled;
    bool polling, news;
    int sleepers;
    pthread_cond_t changed;
    /* The helper. */
    pthread_t helper;
    bool has_helper, helper_sleeps, stopping;
    pthread_cond_t work;           /* the helper sleeps here when there is nothing asynchronous */
    size_t async_count;            /* asynchronous transfers under way */
    bool has_rest;                 /* frames of cancelled transfers may be waiting to go out */
    _Atomic int waiters;           /* threads in the slow part of a wait: they drive everything */
    /* Failed sends that nobody has asked about; of more than there is room for only the number is known. */
    cd_mesh_untold_send untold[CD_MESH_UNTOLD];
    uint64_t failures;
    size_t untold_count, remembered;
    uint64_t visits;               /* transfers posted and turns made by threads other than the helper */
    char scratch[65536];
};

/* mesh_match.c */
void cd_xfers_push(cd_xfers *list, cd_xfer *xfer);
void cd_xfers_remove(cd_xfers *list, cd_xfer *xfer);
cd_xfer *cd_xfers_find(const cd_xfers *list, uint32_t ticket);
/* The last touch of a transfer. `error` is copied; NULL = fine. */
void cd_mesh_complete(cd_mesh *mesh, cd_xfer *xfer, const cd_error *error);
void cd_mesh_cancelled(cd_mesh *mesh, cd_xfer *xfer);
cd_error *cd_mesh_copy_error(const cd_error *error);
/* Takes the oldest receive that wants this message out of its list; NULL: none. */
cd_xfer *cd_mesh_take_posted(cd_mesh *mesh, int peer, cd_match match);
/* The oldest kept message that fits, peer −1: from anyone. */
cd_kept *cd_mesh_find_kept(cd_mesh *mesh, int peer, cd_match match, int *source_p);
/* Keeps a message of `body_room` bytes; NULL (and the error is set) when the peer sent too much or memory is out. */
cd_kept *cd_mesh_keep(cd_mesh *mesh, int peer, cd_match match, uint32_t signature, uint32_t ticket, size_t bytes,
                      size_t body_room);
void cd_mesh_drop_kept(cd_mesh *mesh, int peer, cd_kept *kept);
/* Gives a kept message to a receive that fits. */
void cd_mesh_accept(cd_mesh *mesh, int source, cd_kept *kept, cd_xfer *xfer);
/* Size and signature against what was posted; on disagreement the receive is completed with the error, and false. `ticket`: of
 * a message that was only announced, whose sender is told; −1: its body comes anyway. */
bool cd_mesh_admits(cd_mesh *mesh, int source, cd_xfer *xfer, size_t bytes, uint32_t signature, int64_t ticket);
/* The receive gets an announced message: begins to read it at `there`, or asks for it. */
void cd_mesh_invite(cd_mesh *mesh, int source, uint32_t their_ticket, cd_offer offer, size_t bytes, cd_xfer *xfer);
/* Tells the sender that the receive stands ready for the body. */
void cd_mesh_invite_body(cd_mesh *mesh, int source, cd_xfer *xfer);
bool cd_mesh_is_forgotten(const cd_mesh *mesh, uint64_t context);
void cd_mesh_lose(cd_mesh *mesh, int peer, const cd_error *why);
/* Sending failed: all sends end with the error. */
void cd_mesh_deafen(cd_mesh *mesh, int peer, const cd_error *why);

/* mesh_move.c */
void cd_mesh_control(cd_mesh *mesh, int peer, cd_frame_kind kind, uint32_t ticket, uint64_t offset);
/* REFUSE for CD_MISMATCH, which tells what the receive `xfer` would have taken. */
void cd_mesh_refuse(cd_mesh *mesh, int peer, uint32_t ticket, const cd_xfer *xfer);
bool cd_mesh_has_output(const cd_mesh_peer *peer);
/* Has any peer control frames or the rest of a cancelled send to go out? */
bool cd_mesh_has_rest(const cd_mesh *mesh);
/* Sends what the pipe takes, receives what is there; true if a byte moved. A failing pipe loses the peer. */
bool cd_mesh_push(cd_mesh *mesh, int peer);
bool cd_mesh_pull(cd_mesh *mesh, int peer);
bool cd_mesh_progress(cd_mesh *mesh);
/* One writer at a time: the lock's holder. */
void cd_mesh_count_sent(cd_mesh *mesh, uint64_t bytes);
/* Makes the frame that is going out independent of this send's memory; false: no memory, the peer was lost instead. */
bool cd_mesh_detach_output(cd_mesh *mesh, int peer, cd_xfer *xfer);

/* mesh_reach.c */
/* Offers the body of a send that is announced now. */
void cd_mesh_offer(const cd_mesh *mesh, cd_mesh_peer *peer, cd_xfer *xfer);
/* Before an announced send ends otherwise than by TOOK. False: the receiver has taken it meanwhile, so that it was delivered. */
bool cd_mesh_withdraw(cd_mesh *mesh, cd_xfer *xfer);
/* Completes a send whose body was read. */
void cd_mesh_delivered(cd_mesh *mesh, cd_xfer *xfer);
/* Whether to read a body of that many bytes. */
bool cd_mesh_reads(const cd_mesh *mesh, cd_mesh_peer *peer, cd_offer offer, size_t bytes);
/* Reads the next part of peer->reading, which is not empty. */
void cd_mesh_read_some(cd_mesh *mesh, int peer);
void cd_mesh_take_took(cd_mesh *mesh, int peer, const cd_frame *frame);
/* A body has come in pieces. */
void cd_mesh_note_pieces(cd_mesh_peer *peer, const cd_xfer *xfer);

/* mesh_wait.c */
/* Unlocks, and wakes those that sleep if there is news for them. */
void cd_mesh_unlock(cd_mesh *mesh);
/* Makes sure that there is a helper and that it is awake. */
void cd_mesh_start_helper(cd_mesh *mesh);
/* Without the lock; after close. */
void cd_mesh_stop_helper(cd_mesh *mesh);

#endif
