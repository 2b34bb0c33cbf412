/* Data between ranks without arithmetic: ALL_GATHER, GATHER, SCATTER, ALL_TO_ALL over messages, each pair directly.
 *
 *   path      kind        steps  payload bytes sent by a rank (B = bytes of a block, P = ranks, h = 80)
 *   net_move  all_gather  2      (P − 1)(h + B)
 *             gather      2 + a  h × (1 + log2 P) + h + B, the root without the last two
 *             scatter     2 + a  h × (1 + log2 P) + (P − 1)(h + B) at the root, h × (1 + log2 P) elsewhere
 *             all_to_all  2      (P − 1)h + the sum of the blocks for others
 *
 * a: log2 P steps of agreement that no block is of another size than expected. Operations with splits and uneven lists have
 * them as well, with h × log2 P bytes.
 *
 * Blocks of up to CD_NET_CARRY bytes ride in the hello (one step); larger ones follow in pieces, WINDOW of them under way for
 * each pair. The hello names the bytes of the block, so that uneven blocks which differ between the two ends are found out. */
#include "coll/net_run.h"
#include "simd/strided.h"

#include <string.h>

enum { WINDOW = 2 };
#define PIECE_MOST (UINT64_C(1) << 20)
#define PIECE_LEAST (UINT64_C(16) << 10)

typedef struct {
    cd_net_run *run;
    int world, me;
    const cd_op *op;
    int step;                   /* of the hellos with blocks: between the root and the others they are beside the agreement */
    size_t piece_bytes;
} mover;

static cd_shm_piece block_of(const mover *m, const cd_blocks *blocks, int peer)
{
    size_t first, count;
    const cd_span *span = cd_blocks_at(blocks, m->world, peer, &first, &count);
    return (cd_shm_piece){span, first * span->item_bytes, count * span->item_bytes};
}

/* What goes to and comes from a peer; no span: nothing, not even a hello. */
static cd_shm_piece give_of(const mover *m, int peer)
{
    switch (m->op->kind) {
    case CD_ALL_GATHER: return cd_piece_whole(&m->op->in.list[0]);
    case CD_GATHER: return peer == m->op->root ? cd_piece_whole(&m->op->in.list[0]) : (cd_shm_piece){0};
    case CD_SCATTER: return m->me == m->op->root ? block_of(m, &m->op->in, peer) : (cd_shm_piece){0};
    default: return block_of(m, &m->op->in, peer);
    }
}

static cd_shm_piece take_of(const mover *m, int peer)
{
    switch (m->op->kind) {
    case CD_GATHER: return m->me == m->op->root ? block_of(m, &m->op->out, peer) : (cd_shm_piece){0};
    case CD_SCATTER: return peer == m->op->root ? cd_piece_whole(&m->op->out.list[0]) : (cd_shm_piece){0};
    default: return block_of(m, &m->op->out, peer);
    }
}

/* Bytes of piece number `index` of a block; 0 beyond its end and for blocks that ride in the hello. */
static size_t piece_of(const mover *m, const cd_shm_piece *block, size_t index)
{
    size_t at = index * m->piece_bytes;
    if (!block->span || block->bytes <= CD_NET_CARRY || at >= block->bytes)
        return 0;
    return cd_least(block->bytes - at, m->piece_bytes);
}

enum { SEND = 0, RECV = 1 };

static int slot_of(const mover *m, size_t index, int way, int peer)
{
    return m->run->first_slot + ((int)(index % WINDOW) * 2 + way) * m->world + peer;
}

static char *work_of(const mover *m, int slot)
{
    return m->run->work + (size_t)(slot - m->run->first_slot) * m->piece_bytes;
}

static void post_sends(const mover *m, size_t index)
{
    for (int i = 1; i < m->world; i++) {
        int peer = (m->me + i) % m->world, slot = slot_of(m, index, SEND, peer);
        const cd_shm_piece give = give_of(m, peer);
        size_t bytes = piece_of(m, &give, index);
        if (!bytes)
            continue;
        char *data = cd_piece_at(&give, index * m->piece_bytes);
        if (!data) {
            data = work_of(m, slot);
            cd_piece_read(&give, index * m->piece_bytes, bytes, data);
        }
        cd_net_send(m->run, slot, peer, CD_NET_DATA, data, bytes);
    }
}

static void post_receives(const mover *m, size_t index)
{
    for (int i = 1; i < m->world; i++) {
        int peer = (m->me - i + m->world) % m->world, slot = slot_of(m, index, RECV, peer);
        const cd_shm_piece take = take_of(m, peer);
        size_t bytes = piece_of(m, &take, index);
        if (!bytes)
            continue;
        char *into = cd_piece_at(&take, index * m->piece_bytes);
        cd_net_recv(m->run, slot, peer, CD_NET_DATA, into ? into : work_of(m, slot), bytes);
    }
}

static cd_status finish_pieces(const mover *m, size_t index)
{
    CD_TRY(cd_net_wait(m->run, slot_of(m, index, SEND, 0), 2 * m->world));
    for (int peer = 0; peer < m->world; peer++) {
        const cd_shm_piece take = take_of(m, peer);
        size_t bytes = peer == m->me ? 0 : piece_of(m, &take, index);
        if (bytes && !cd_piece_at(&take, index * m->piece_bytes))
            cd_piece_write(&take, index * m->piece_bytes, bytes, work_of(m, slot_of(m, index, RECV, peer)));
    }
    return CD_OK;
}

static void copy_own(const mover *m)
{
    const cd_shm_piece give = give_of(m, m->me), take = take_of(m, m->me);
    if (!give.span || !take.span || !give.bytes)
        return;
    char *from = cd_piece_at(&give, 0), *to = cd_piece_at(&take, 0);
    char *between = work_of(m, slot_of(m, 0, SEND, m->me)); /* no transfer uses the slot of the own rank */
    if (to && !from)
        cd_piece_read(&give, 0, give.bytes, to);
    else if (from && !to)
        cd_piece_write(&take, 0, give.bytes, from);
    else if (from && from != to)
        memmove(to, from, give.bytes);
    else if (!from)
        for (size_t at = 0; at < give.bytes; at += m->piece_bytes) {
            size_t bytes = cd_least(give.bytes - at, m->piece_bytes);
            cd_piece_read(&give, at, bytes, between);
            cd_piece_write(&take, at, bytes, between);
        }
}

/* Reads the hellos: all are checked before the first byte is written. */
static cd_status take_hellos(const mover *m)
{
    const cd_net_hello *hello;
    if (m->step == CD_NET_BLOCK)
        CD_TRY(cd_net_hear_previous(m->run));
    CD_TRY(cd_net_wait(m->run, 0, m->run->first_slot));
    for (int peer = 0; peer < m->world; peer++) {
        const cd_shm_piece take = take_of(m, peer);
        int rank = m->run->team->world_ranks[peer];
        if (peer == m->me || !take.span)
            continue;
        CD_TRY(cd_net_check(m->run, m->step, peer, &hello));
        if (hello->block_bytes != take.bytes)
            return cd_op_block_mismatch(m->op, rank, hello->block_bytes, m->run->team->world_ranks[m->me], take.bytes);
    }
    if (m->step == CD_NET_BLOCK || (m->op->flags & CD_OP_UNEVEN))
        CD_TRY(cd_net_agree_on_blocks(m->run));
    for (int peer = 0; peer < m->world; peer++) {
        const cd_shm_piece take = take_of(m, peer);
        if (peer == m->me || !take.span || take.bytes > CD_NET_CARRY)
            continue;
        CD_TRY(cd_net_check(m->run, m->step, peer, &hello));
        cd_piece_write(&take, 0, take.bytes, cd_net_carried(hello));
    }
    return CD_OK;
}

static cd_status move(const mover *m)
{
    bool shares_hello = m->op->kind == CD_ALL_GATHER;
    if (m->step == CD_NET_BLOCK)
        cd_net_greet_next(m->run);
    size_t most = 0;
    for (int i = 1; i < m->world; i++) {
        int from = (m->me - i + m->world) % m->world, to = (m->me + i) % m->world;
        const cd_shm_piece take = take_of(m, from), give = give_of(m, to);
        if (take.span)
            cd_net_await_greeting(m->run, m->step, from);
        if (give.span) {
            int memory = shares_hello ? m->me : to;
            if (!shares_hello || i == 1)
                cd_net_fill(m->run, m->step, memory, &give);
            cd_net_greet(m->run, m->step, to, memory);
        }
        size_t bytes = take.bytes > give.bytes ? take.bytes : give.bytes;
        most = bytes > most ? bytes : most;
    }
    size_t pieces = most > CD_NET_CARRY ? (most + m->piece_bytes - 1) / m->piece_bytes : 0;
    for (size_t index = 0; index < WINDOW && index < pieces; index++)
        post_sends(m, index);
    CD_TRY(take_hellos(m));
    for (size_t index = 0; index < WINDOW && index < pieces; index++)
        post_receives(m, index);
    copy_own(m);
    for (size_t index = 0; index < pieces; index++) {
        CD_TRY(finish_pieces(m, index));
        if (index + WINDOW < pieces) {
            post_receives(m, index + WINDOW);
            post_sends(m, index + WINDOW);
        }
    }
    return CD_OK;
}

cd_status cd_net_move_run(cd_team *team, const cd_op *op, const cd_patience *patience)
{
    cd_net_run run;
    mover m = {.run = &run, .world = team->world, .me = team->rank, .op = op};
    m.step = op->kind == CD_GATHER || op->kind == CD_SCATTER ? CD_NET_BLOCK : CD_NET_HELLO;
    size_t bytes = (size_t)(CD_NET_MEMORY / (2 * WINDOW * (uint64_t)team->world));
    m.piece_bytes = bytes < PIECE_LEAST ? PIECE_LEAST : bytes < PIECE_MOST ? bytes : PIECE_MOST;
    int slots = 2 * WINDOW * team->world;
    CD_TRY(cd_net_begin(&run, team, op, patience, slots, (size_t)slots * m.piece_bytes));
    return cd_net_end(&run, move(&m));
}
