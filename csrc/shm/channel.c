#include "shm/channel.h"

#include "base/attr.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/pace.h"
#include "shm/reach.h"
#include "simd/copy.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* What one rank may touch for all its rings together. */
#define TOUCH_BYTES (UINT64_C(4) << 20)
/* Near the size of L2, so that lines have left the writer's L2 when the reader wants them, and are still in L3. */
#define RING_MOST (UINT64_C(1) << 20)
#define RING_LEAST (UINT64_C(16) << 10)
/* Bytes copied between two looks of the other side: small enough that both copy at the same time. */
#define PUBLISH_BYTES (UINT64_C(32) << 10)
/* A ring is written through the caches or past them, whichever is quicker here and now; why, and what either costs, says
 * coll/shm_ways.c. Sends of TIMED_LEAST and more are timed, pieces of FAR_LEAST and more go the way that was found. µs one way
 * between 2 ranks on a 2-core EPYC, near, far, chosen: 64 KiB 18.6, 10.5, 10.3 with the cores apart, 1 MiB 234, 115, 107; with
 * them together 1 MiB 49, 125, 51, and 64 KiB 4.4, 9.5, chosen by a rule that was interrupted more easily 5.3 to 6. */
#define FAR_LEAST (UINT64_C(4) << 10)
#define TIMED_LEAST (UINT64_C(16) << 10)

/* Bytes ever written and bytes ever read: words only grow, each has one writer. Zero = an empty ring. */
typedef struct {
    /* the writer's line */
    CD_ALIGNED(CD_LINE) _Atomic uint64_t head;
    _Atomic uint32_t writer_closed;
    cd_reach_card card; /* the writer's; written before its first byte, whose head publishes it */
    /* the reader's line */
    CD_ALIGNED(CD_LINE) _Atomic uint64_t tail;
    _Atomic uint32_t reader_closed;
    /* of both: the writer's offers */
    CD_ALIGNED(CD_LINE) _Atomic uint32_t offers[CD_PIPE_OFFERS];
    CD_ALIGNED(CD_LINE) char data[];
} ring;
_Static_assert(sizeof(ring) == 2 * CD_LINE + CD_PIPE_OFFERS * 4, "layout is shared between processes");

typedef struct {
    cd_pipe pipe;
    ring *out, *in;
    uint64_t ring_bytes; /* a power of two */
    /* The own index of each ring and the last value seen of the other's: no shared line is read while they suffice. */
    uint64_t out_head, out_tail;
    uint64_t in_head, in_tail;
    _Atomic uint32_t closed;
    bool is_far;   /* how the next bytes are written */
    bool was_slow; /* the last send that was timed, so that it was not noted */
    cd_pace pace;  /* of writing: 0 near, 1 far */
    enum { REACH_UNKNOWN, REACH_NONE, REACH_FINE } reach; /* is the peer's own memory to be read? */
    uint64_t token;                                       /* see shm/reach.h */
} channel;

static uint64_t choose_ring_bytes(int ranks)
{
    uint64_t share = TOUCH_BYTES / (2 * (uint64_t)(ranks > 1 ? ranks - 1 : 1));
    uint64_t bytes = RING_MOST;
    while (bytes > share && bytes > RING_LEAST)
        bytes /= 2;
    return bytes;
}

size_t cd_channels_bytes(int ranks)
{
    return (size_t)ranks * (size_t)ranks * (size_t)(sizeof(ring) + choose_ring_bytes(ranks));
}

static ring *find_ring(void *memory, int ranks, int from, int to)
{
    size_t stride = (size_t)(sizeof(ring) + choose_ring_bytes(ranks));
    return (ring *)(void *)((char *)memory + ((size_t)from * (size_t)ranks + (size_t)to) * stride);
}

static cd_status fail_closed(const channel *c)
{
    return cd_fail_rank(CD_PEER_LOST, c->pipe.peer, "rank %d closed its end of the shared memory channel", c->pipe.peer);
}

static cd_status fail_corrupt(const channel *c)
{
    return cd_fail_rank(CD_PROTOCOL, c->pipe.peer, "the shared memory channel of rank %d holds impossible indices",
                        c->pipe.peer);
}

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* Copies up to the end of the ring or of `bytes`, whichever comes first; returns how much. */
static uint64_t put(channel *c, const char *from, uint64_t bytes)
{
    uint64_t at = c->out_head & (c->ring_bytes - 1);
    uint64_t n = least(least(bytes, PUBLISH_BYTES), c->ring_bytes - at);
    if (c->is_far && n >= FAR_LEAST)
        cd_copy_far(c->out->data + at, from, (size_t)n);
    else
        cd_copy_near(c->out->data + at, from, (size_t)n);
    c->out_head += n;
    return n;
}

static uint64_t sum_bytes(const cd_piece *pieces, int count)
{
    uint64_t bytes = 0;
    for (int i = 0; i < count; i++)
        bytes += pieces[i].bytes;
    return bytes;
}

/* So many bytes were sent since then: how do the next ones go? */
static void note_way(channel *c, uint64_t bytes, uint64_t began_ns)
{
    uint64_t now_ns = cd_now_ns(), took_ns = now_ns - began_ns;
    /* What is written far the reader fetches from memory: 12 GB/s instead of 25 where the two share a cache. */
    if (c->is_far)
        took_ns += bytes / 32;
    /* A tick of the kernel takes longer than such a send: one that took twice as long counts only if the next does too. */
    uint64_t usual_ns = c->pace.ns[c->is_far] * (bytes >> 10);
    c->was_slow = usual_ns && took_ns > 2 * usual_ns && !c->was_slow;
    if (!c->was_slow)
        cd_pace_note(&c->pace, c->is_far, (size_t)bytes, took_ns);
    /* A try of the slower way costs the reader too, and whoever uses the same lines next: more than what was noted. */
    c->is_far = cd_pace_way(&c->pace, 2, 16 * (size_t)bytes, now_ns) == 1;
}

static cd_status channel_send(cd_pipe *pipe, const cd_piece *pieces, int count, size_t *moved_p)
{
    channel *c = (channel *)pipe;
    *moved_p = 0;
    if (cd_unlikely(atomic_load_explicit(&c->closed, memory_order_relaxed)))
        return fail_closed(c);
    uint64_t first = c->out_head, published = first;
    uint64_t began_ns = sum_bytes(pieces, count) >= TIMED_LEAST ? cd_now_ns() : 0;
    for (int i = 0; i < count; i++) {
        const char *from = pieces[i].data;
        uint64_t left = pieces[i].bytes;
        while (left) {
            uint64_t room = c->ring_bytes - (c->out_head - c->out_tail);
            if (room < left) {
                /* Acquire: the reader's copies out of these bytes are over before we write there again. */
                c->out_tail = atomic_load_explicit(&c->out->tail, memory_order_acquire);
                room = c->ring_bytes - (c->out_head - c->out_tail);
                if (cd_unlikely(room > c->ring_bytes))
                    return fail_corrupt(c);
                /* Only here: the word shares the reader's line, which would be fetched for every message otherwise. */
                if (cd_unlikely(atomic_load_explicit(&c->out->reader_closed, memory_order_acquire)))
                    return fail_closed(c);
                if (room == 0)
                    goto full;
            }
            uint64_t n = put(c, from, least(left, room));
            from += n;
            left -= n;
            if (c->out_head - published >= PUBLISH_BYTES) {
                /* Release: who sees this head sees the bytes below it. */
                atomic_store_explicit(&c->out->head, c->out_head, memory_order_release);
                published = c->out_head;
            }
        }
    }
full:
    if (c->out_head != published)
        atomic_store_explicit(&c->out->head, c->out_head, memory_order_release); /* as above */
    *moved_p = (size_t)(c->out_head - first);
    if (began_ns && *moved_p >= TIMED_LEAST)
        note_way(c, *moved_p, began_ns);
    return CD_OK;
}

/* Refreshes the writer's index when fewer than `wanted` bytes are known to be there; false when none are. */
static cd_status look_for_bytes(channel *c, uint64_t wanted, uint64_t *there_p)
{
    uint64_t there = c->in_head - c->in_tail;
    if (there < wanted) {
        /* Acquire: pairs with the release of the writer, the bytes below head are visible. */
        c->in_head = atomic_load_explicit(&c->in->head, memory_order_acquire);
        there = c->in_head - c->in_tail;
        if (cd_unlikely(there > c->ring_bytes))
            return fail_corrupt(c);
    }
    *there_p = there;
    return CD_OK;
}

static cd_status channel_recv(cd_pipe *pipe, void *out, size_t bytes, size_t *moved_p)
{
    channel *c = (channel *)pipe;
    uint64_t there = 0, first = c->in_tail;
    char *to = out;
    *moved_p = 0;
    CD_TRY(look_for_bytes(c, bytes, &there));
    if (there == 0) {
        /* Acquire on the close word, then the head once more: what was written before the close counts. */
        if (cd_likely(!atomic_load_explicit(&c->in->writer_closed, memory_order_acquire) &&
                      !atomic_load_explicit(&c->closed, memory_order_relaxed)))
            return CD_OK;
        CD_TRY(look_for_bytes(c, bytes, &there));
        if (there == 0)
            return fail_closed(c);
    }
    uint64_t left = least(there, bytes);
    while (left) {
        uint64_t at = c->in_tail & (c->ring_bytes - 1);
        uint64_t n = least(least(left, PUBLISH_BYTES), c->ring_bytes - at);
        cd_copy_near(to, c->in->data + at, (size_t)n);
        to += n;
        left -= n;
        c->in_tail += n;
        /* Release: our loads from these bytes are over before the writer may overwrite them. */
        atomic_store_explicit(&c->in->tail, c->in_tail, memory_order_release);
    }
    *moved_p = (size_t)(c->in_tail - first);
    return CD_OK;
}

static void channel_close(cd_pipe *pipe)
{
    channel *c = (channel *)pipe;
    atomic_store_explicit(&c->closed, 1, memory_order_relaxed);
    /* Release: who sees the word sees all that we wrote before. */
    atomic_store_explicit(&c->out->writer_closed, 1, memory_order_release);
    atomic_store_explicit(&c->in->reader_closed, 1, memory_order_release);
}

static void channel_free(cd_pipe *pipe)
{
    free(pipe);
}

static bool channel_reaches(cd_pipe *pipe)
{
    channel *c = (channel *)pipe;
    if (cd_unlikely(c->reach == REACH_UNKNOWN)) {
        int error = cd_reach_probe(&c->in->card);
        c->reach = error ? REACH_NONE : REACH_FINE;
        if (error)
            cd_log_about("plan", "large messages from rank %d come through shared memory only: its own cannot be read (%s)",
                         pipe->peer, strerror(error));
        else
            cd_log_about("plan", "large messages from rank %d come through shared memory or are read in its own",
                         pipe->peer);
    }
    return c->reach == REACH_FINE;
}

static bool channel_read_peer(cd_pipe *pipe, void *out, uint64_t there, size_t bytes)
{
    channel *c = (channel *)pipe;
    int error = cd_reach_read(&c->in->card, out, there, bytes);
    /* EFAULT: this memory alone cannot be read, as that of a device. Otherwise the peer is gone, or what it may be asked for has
     * changed. */
    if (error && error != EFAULT)
        c->reach = REACH_NONE;
    return error == 0;
}

static const cd_pipe_ops channel_ops = {"shm",        channel_send,     channel_recv,     channel_close,
                                        channel_free, channel_reaches, channel_read_peer};

cd_status cd_channel_open(void *memory, int ranks, int local, int peer_local, int peer_world_rank, cd_pipe **out)
{
    if (local < 0 || peer_local < 0 || local >= ranks || peer_local >= ranks || local == peer_local)
        return cd_fail(CD_BAD_ARGUMENT, "channel: positions %d and %d are not two of %d ranks", local, peer_local, ranks);
    channel *c = calloc(1, sizeof *c);
    if (!c)
        return cd_fail(CD_NO_MEMORY, "channel: no memory for %zu bytes", sizeof *c);
    c->pipe = (cd_pipe){.ops = &channel_ops, .fd = -1, .peer = peer_world_rank};
    c->out = find_ring(memory, ranks, local, peer_local);
    c->in = find_ring(memory, ranks, peer_local, local);
    c->ring_bytes = choose_ring_bytes(ranks);
    c->out_head = atomic_load_explicit(&c->out->head, memory_order_relaxed);
    c->in_tail = atomic_load_explicit(&c->in->tail, memory_order_relaxed);
    c->out_tail = atomic_load_explicit(&c->out->tail, memory_order_acquire);
    c->in_head = c->in_tail;
    c->pipe.offers = c->out->offers;
    c->pipe.peer_offers = c->in->offers;
    cd_reach_offer(&c->out->card, &c->token);
    *out = &c->pipe;
    return CD_OK;
}
