/* Large messages that the receiver copies out of the sender's own memory (a pipe between processes of a host that may), instead
 * of having them sent through the pipe.
 *
 *   sender                     receiver
 *   offers the body: a word
 *   ASK (address, offer)
 *                              reads
 *                              takes the offer, completes its receive, TOOK
 *   completes its send
 *
 * The offer is a word in memory that both share, and one of the two ends it, in one atomic step: the receiver when it has read
 * all, or the sender before it gives its memory back in any other way (it cancels, loses the peer, closes). So what is delivered
 * is the message, which the sender's memory held all the time. A receiver that comes too late delivers nothing and gets DROP; a
 * sender that comes too late finds its send delivered. Nobody ever writes into another process, so a receive that was cancelled
 * is written by nobody. Whatever goes wrong with reading (the kernel refuses, memory that it cannot read, a process that is
 * gone), the receiver asks for the body through the pipe as if it had not tried.
 *
 * Which way is faster depends on the pages (reading costs the kernel about 0.7 µs for each small one) and on where the two
 * processes run: a ring is quick where they share a cache and slow where they do not, which a virtual machine does not say. µs
 * one way between 2 ranks on an EPYC: 1 MiB through the ring 35, read 42 on huge pages, 91 on small ones; 64 MiB 4277, 5079,
 * 14390. With the cores far apart, where the ring is written past the caches (see shm/channel.c), 1 MiB 113 and 134, 64 MiB
 * 11600 and 12600. So it is measured as it goes, for each peer, through the pipe from the invitation of the body on, since that
 * waits for the sender.
 *
 * Where large messages go both ways at once no core is idle, and what counts is the work of both: a ring costs each rank a write
 * and a read of every byte, reading one copy. Then everything is read. 64 messages of 1 MiB each way between 2 ranks on a 2-core
 * Xeon, µs for one of each, in the same turn: 322 by ring, 239 read, 462 where the ranks chose as each message's pace said. At
 * 64 MiB, where nothing stays in a cache, a choice by pace ends with reading too: 12600 and 12900.
 *
 * Reading into a buffer that stays in the cache and storing that past the caches was not quicker: 16 MiB 3500 to 3700 and 3400
 * without, 64 MiB 12500 to 13500 and 12100 to 13100. */
#include "net/mesh_core.h"

/* Everything that is announced. Even 20 KiB are read in 1.4 µs where the reader has them in its cache, in 3.6 where the sender
 * has just written them and the cores share none (2-core Xeon). */
#define REACH_LEAST ((uint64_t)CD_MESH_EAGER + 1)
/* Read in one turn, with the lock held. */
#define TURN_BYTES (UINT64_C(1) << 20)
enum { WAY_READ, WAY_RING, WAYS };

static cd_pace *pace_of(cd_mesh_peer *p, size_t bytes)
{
    return &p->pace[bytes < UINT64_C(128) << 10 ? 0 : bytes < UINT64_C(1) << 20 ? 1 : bytes < UINT64_C(16) << 20 ? 2 : 3];
}

void cd_mesh_note_pieces(cd_mesh_peer *p, const cd_xfer *x)
{
    uint64_t now_ns = cd_now_ns(), began_ns = x->took_ns > p->body_ns ? x->took_ns : p->body_ns;
    p->body_ns = now_ns;
    if (x->bytes >= REACH_LEAST)
        cd_pace_note(pace_of(p, x->bytes), WAY_RING, x->bytes, now_ns - began_ns);
}

/* The word of an offer: its number and this bit while it stands, 0 when it was taken or withdrawn. The number comes again after
 * 2^31 others, long after its DROP. */
static uint32_t offer_word(cd_offer offer)
{
    return offer.number << 1 | 1;
}

void cd_mesh_offer(const cd_mesh *mesh, cd_mesh_peer *p, cd_xfer *x)
{
    if (!p->pipe->offers || mesh->reach == CD_MESH_REACH_NEVER || x->bytes < REACH_LEAST)
        return;
    cd_offer offer = {.there = (uint64_t)(uintptr_t)x->data, .number = p->offers + 1};
    _Atomic uint32_t *word = &p->pipe->offers[offer.number % CD_PIPE_OFFERS];
    /* Relaxed: only this side sets the bit. It stands: an older message still waits in this place. */
    if (atomic_load_explicit(word, memory_order_relaxed) & 1)
        return;
    p->offers++;
    /* Relaxed: the announcement, which is released behind it, tells of the word. */
    atomic_store_explicit(word, offer_word(offer), memory_order_relaxed);
    x->offer = offer;
}

/* One of two ends an offer: the receiver, which takes what it has read, or the sender, which withdraws it. Acquire and release:
 * who takes it has read before, and what the sender then does with its memory comes after. */
static bool end_offer(_Atomic uint32_t *words, cd_offer offer)
{
    uint32_t stands = offer_word(offer);
    return atomic_compare_exchange_strong_explicit(&words[offer.number % CD_PIPE_OFFERS], &stands, 0, memory_order_acq_rel,
                                                   memory_order_acquire);
}

bool cd_mesh_withdraw(cd_mesh *mesh, cd_xfer *x)
{
    return !x->offer.there || end_offer(mesh->peers[x->peer].pipe->offers, x->offer);
}

void cd_mesh_delivered(cd_mesh *mesh, cd_xfer *x)
{
    cd_mesh_count_sent(mesh, x->bytes);
    cd_mesh_complete(mesh, x, NULL);
}

/* Do large messages go to this peer, too? The oldest speaks for all. */
static bool goes_both_ways(const cd_mesh_peer *p)
{
    const cd_xfer *asked = p->asked.first, *body = p->bodies.first;
    return (asked && asked->bytes >= REACH_LEAST) || (body && body->bytes >= REACH_LEAST);
}

bool cd_mesh_reads(const cd_mesh *mesh, cd_mesh_peer *p, cd_offer offer, size_t bytes)
{
    if (!offer.there || mesh->reach == CD_MESH_REACH_NEVER || bytes < REACH_LEAST || !p->pipe || !p->pipe->peer_offers ||
        !p->pipe->ops->reaches_peer(p->pipe))
        return false;
    if (mesh->reach == CD_MESH_REACH_ALWAYS || goes_both_ways(p))
        return true;
    return cd_pace_way(pace_of(p, bytes), WAYS, bytes, cd_now_ns()) == WAY_READ;
}

/* All is read. */
static void take_offer(cd_mesh *mesh, int peer, cd_xfer *x)
{
    cd_mesh_peer *p = &mesh->peers[peer];
    cd_pace_note(pace_of(p, x->bytes), WAY_READ, x->bytes, x->took_ns);
    cd_xfers_remove(&p->reading, x);
    if (!end_offer(p->pipe->peer_offers, x->offer)) {
        x->state = CD_XFER_LATE;
        cd_xfers_push(&p->arriving, x);
        return;
    }
    cd_mesh_control(mesh, peer, CD_FRAME_TOOK, x->their_ticket, 0);
    cd_mesh_complete(mesh, x, NULL);
}

/* Reads at most `most` of the first body; returns how much. */
static size_t read_part(cd_mesh *mesh, int peer, size_t most)
{
    cd_mesh_peer *p = &mesh->peers[peer];
    cd_xfer *x = p->reading.first;
    size_t left = x->bytes - x->moved;
    size_t n = left < most ? left : most;
    uint64_t began_ns = cd_now_ns();
    if (!p->pipe->ops->read_peer(p->pipe, x->data + x->moved, x->offer.there + x->moved, n)) {
        cd_xfers_remove(&p->reading, x);
        cd_mesh_invite_body(mesh, peer, x);
        return n;
    }
    x->moved += n;
    x->took_ns += cd_now_ns() - began_ns;
    if (x->moved == x->bytes)
        take_offer(mesh, peer, x);
    return n;
}

void cd_mesh_read_some(cd_mesh *mesh, int peer)
{
    /* Several small ones in one turn: what their waiters run between two reads would find the caches full of messages. */
    for (size_t total = 0; mesh->peers[peer].reading.first && total < TURN_BYTES;)
        total += read_part(mesh, peer, (size_t)TURN_BYTES - total);
}

void cd_mesh_take_took(cd_mesh *mesh, int peer, const cd_frame *f)
{
    cd_mesh_peer *p = &mesh->peers[peer];
    cd_xfer *x = cd_xfers_find(&p->asked, f->ticket);
    if (!x)
        return; /* it learnt so when it was to be withdrawn */
    cd_xfers_remove(&p->asked, x);
    cd_mesh_delivered(mesh, x);
}
