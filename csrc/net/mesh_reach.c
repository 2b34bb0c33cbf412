/* Large messages that the receiver copies out of the sender's own memory (a pipe between processes of a host that may), instead
 * of having them sent through the pipe.
 *
 *   sender                     receiver
 *   ASK (address of the body)
 *                              reads
 *                              TOOK
 *   completes its send, HELD
 *                              completes its receive
 *
 * The receive is complete only when the sender has said that the send was still posted when it learnt of TOOK: so its memory
 * held the message all the time. A send that is cancelled before answers TOOK with nothing, its DROP fails the receive; what was
 * read is never delivered. Nobody ever writes into another process, so a receive that was cancelled is written by nobody.
 * Whatever goes wrong with reading (the kernel refuses, memory that it cannot read, a process that is gone), the receiver asks
 * for the body through the pipe as if it had not tried.
 *
 * Which way is faster depends on the pages (reading costs the kernel about 0.7 µs for each small one) and on where the two
 * processes run: a ring is quick where they share a cache and slow where they do not, which a virtual machine does not say. µs
 * one way between 2 ranks on an EPYC: 1 MiB through the ring 35, read 42 on huge pages, 91 on small ones; 64 MiB 4277, 5079,
 * 14390. With the cores far apart, where the ring is written past the caches (see shm/channel.c), 1 MiB 113 and 134, 64 MiB
 * 11600 and 12600. So it is measured as it goes, for each peer.
 *
 * Where large messages go both ways at once no core is idle, and what counts is the work of both: a ring costs each rank a write
 * and a read of every byte, reading one copy. Then everything is read. 64 messages of 1 MiB each way between 2 ranks on a 2-core
 * Xeon, µs for one of each, in the same turn: 322 by ring, 239 read, 462 where the ranks chose as each message's pace said. At
 * 64 MiB, where nothing stays in a cache, a choice by pace ends with reading too: 12600 and 12900.
 *
 * Reading into a buffer that stays in the cache and storing that past the caches was not quicker: 16 MiB 3500 to 3700 and 3400
 * without, 64 MiB 12500 to 13500 and 12100 to 13100. */
#include "net/mesh_core.h"

/* Smaller ones are never faster to read than through a ring in cache. */
#define REACH_LEAST (UINT64_C(128) << 10)
/* Read at a time, with the lock held. */
#define TURN_BYTES (UINT64_C(1) << 20)
enum { WAY_READ, WAY_RING, WAYS };

static cd_pace *pace_of(cd_mesh_peer *p, size_t bytes)
{
    return &p->pace[bytes < UINT64_C(1) << 20 ? 0 : bytes < UINT64_C(16) << 20 ? 1 : 2];
}

void cd_mesh_note_pace(cd_mesh_peer *p, const cd_xfer *x, bool read, uint64_t ns)
{
    if (x->bytes >= REACH_LEAST)
        cd_pace_note(pace_of(p, x->bytes), read ? WAY_READ : WAY_RING, x->bytes, ns);
}

uint64_t cd_mesh_offer(const cd_mesh *mesh, const cd_mesh_peer *p, const cd_xfer *x)
{
    bool offers = p->pipe->ops->read_peer && mesh->reach != CD_MESH_REACH_NEVER && x->bytes >= REACH_LEAST;
    return offers ? (uint64_t)(uintptr_t)x->data : 0;
}

/* Do large messages go to this peer, too? The oldest speaks for all. */
static bool goes_both_ways(const cd_mesh_peer *p)
{
    const cd_xfer *asked = p->asked.first, *body = p->bodies.first;
    return (asked && asked->bytes >= REACH_LEAST) || (body && body->bytes >= REACH_LEAST);
}

bool cd_mesh_reads(const cd_mesh *mesh, cd_mesh_peer *p, uint64_t there, size_t bytes)
{
    if (!there || mesh->reach == CD_MESH_REACH_NEVER || bytes < REACH_LEAST || !p->pipe || !p->pipe->ops->read_peer ||
        !p->pipe->ops->reaches_peer(p->pipe))
        return false;
    if (mesh->reach == CD_MESH_REACH_ALWAYS || goes_both_ways(p))
        return true;
    return cd_pace_way(pace_of(p, bytes), WAYS, bytes, cd_now_ns()) == WAY_READ;
}

bool cd_mesh_read_some(cd_mesh *mesh, int peer)
{
    cd_mesh_peer *p = &mesh->peers[peer];
    cd_xfer *x = p->reading.first;
    size_t left = x->bytes - x->moved;
    size_t n = left < TURN_BYTES ? left : (size_t)TURN_BYTES;
    uint64_t began_ns = cd_now_ns();
    if (!p->pipe->ops->read_peer(p->pipe, x->data + x->moved, x->there + x->moved, n)) {
        cd_xfers_remove(&p->reading, x);
        cd_mesh_invite_body(mesh, peer, x);
        return true;
    }
    x->moved += n;
    x->took_ns += cd_now_ns() - began_ns;
    if (x->moved == x->bytes) {
        cd_mesh_note_pace(p, x, true, x->took_ns);
        cd_xfers_remove(&p->reading, x);
        x->state = CD_XFER_TOOK;
        cd_xfers_push(&p->arriving, x);
        cd_mesh_control(mesh, peer, CD_FRAME_TOOK, x->their_ticket, x->ticket);
    }
    return true;
}

void cd_mesh_take_took(cd_mesh *mesh, int peer, const cd_frame *f)
{
    cd_mesh_peer *p = &mesh->peers[peer];
    cd_xfer *x = cd_xfers_find(&p->asked, f->ticket);
    if (!x)
        return; /* cancelled in the meantime; DROP is on its way */
    cd_xfers_remove(&p->asked, x);
    cd_mesh_count_sent(mesh, x->bytes);
    cd_mesh_complete(mesh, x, NULL);
    cd_mesh_control(mesh, peer, CD_FRAME_HELD, (uint32_t)f->offset, 0);
}

void cd_mesh_take_held(cd_mesh *mesh, int peer, const cd_frame *f)
{
    cd_mesh_peer *p = &mesh->peers[peer];
    cd_xfer *x = cd_xfers_find(&p->arriving, f->ticket);
    if (!x || x->state != CD_XFER_TOOK)
        return; /* cancelled in the meantime */
    cd_xfers_remove(&p->arriving, x);
    cd_mesh_complete(mesh, x, NULL);
}
