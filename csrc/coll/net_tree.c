/* BROADCAST and BARRIER over messages.
 *
 *   path         steps                       payload bytes sent by a rank (N = bytes of the vector, P = ranks, h = 80)
 *   net_tree     log2 P                      h × log2 P + children × N; all ranks together Ph × log2 P + (P − 1)N
 *   net_chain    log2 P + P − 1 + chunks − 1 h × log2 P + N, the last rank without N
 *   net_barrier  log2 P (dissemination)      h × log2 P, rounded up
 *
 * All begin with the hellos of a dissemination barrier. Up to CD_NET_CARRY bytes ride in them; more follows in chunks along a
 * binomial tree or a chain, WINDOW of them under way: a rank passes a chunk on while it receives the next ones. */
#include "coll/net_run.h"

#include <string.h>

enum { WINDOW = 4, CHILDREN = 32 };
#define CHUNK_BYTES (UINT64_C(256) << 10)

typedef struct {
    cd_net_run *run;
    cd_shm_piece data;
    int parent, children[CHILDREN], child_count; /* parent −1: the root */
} tree;

static void find_binomial(tree *t, int world, int me, int root)
{
    int place = (me - root + world) % world;
    int bit = 1;
    t->parent = -1;
    for (; bit < world; bit <<= 1) {
        if (place & bit) {
            t->parent = (place - bit + root) % world;
            break;
        }
    }
    /* Largest subtree first. */
    for (bit >>= 1; bit > 0; bit >>= 1) {
        if (place + bit < world)
            t->children[t->child_count++] = (place + bit + root) % world;
    }
}

static void find_chain(tree *t, int world, int me, int root)
{
    int place = (me - root + world) % world;
    t->parent = place ? (me - 1 + world) % world : -1;
    if (place < world - 1)
        t->children[t->child_count++] = (me + 1) % world;
}

static int slot_of(const tree *t, size_t chunk, int child)
{
    return t->run->first_slot + (int)(chunk % WINDOW) * (CHILDREN + 1) + 1 + child;
}

static char *chunk_at(const tree *t, size_t chunk)
{
    char *data = cd_piece_at(&t->data, chunk * CHUNK_BYTES);
    return data ? data : t->run->work + (chunk % WINDOW) * CHUNK_BYTES;
}

static size_t chunk_bytes(const tree *t, size_t chunk)
{
    return cd_least(t->data.bytes - chunk * CHUNK_BYTES, CHUNK_BYTES);
}

static void expect(const tree *t, size_t chunk)
{
    if (t->parent >= 0)
        cd_net_recv(t->run, slot_of(t, chunk, -1), t->parent, CD_NET_DATA, chunk_at(t, chunk), chunk_bytes(t, chunk));
}

static cd_status pass_on(const tree *t, size_t chunk)
{
    size_t at = chunk * CHUNK_BYTES, bytes = chunk_bytes(t, chunk);
    char *data = chunk_at(t, chunk);
    bool strided = !cd_piece_at(&t->data, at);
    if (t->parent >= 0)
        CD_TRY(cd_net_wait(t->run, slot_of(t, chunk, -1), 1));
    else if (strided)
        cd_piece_read(&t->data, at, bytes, data);
    for (int i = 0; i < t->child_count; i++)
        cd_net_send(t->run, slot_of(t, chunk, i), t->children[i], CD_NET_DATA, data, bytes);
    if (t->parent >= 0 && strided)
        cd_piece_write(&t->data, at, bytes, data);
    return CD_OK;
}

static cd_status pass_all(const tree *t)
{
    size_t chunks = t->data.bytes > CD_NET_CARRY ? (t->data.bytes + CHUNK_BYTES - 1) / CHUNK_BYTES : 0;
    CD_TRY(cd_net_agree(t->run, &t->data));
    for (size_t c = 0; c < WINDOW && c < chunks; c++)
        expect(t, c);
    for (size_t c = 0; c < chunks; c++) {
        /* The slot is free: what used it was waited for one turn ago, see below. */
        CD_TRY(pass_on(t, c));
        if (c + 1 >= WINDOW) {
            size_t oldest = c + 1 - WINDOW;
            CD_TRY(cd_net_wait(t->run, slot_of(t, oldest, 0), t->child_count));
            if (oldest + WINDOW < chunks)
                expect(t, oldest + WINDOW);
        }
    }
    return cd_net_wait(t->run, 0, t->run->slot_count);
}

static cd_status broadcast(cd_team *team, const cd_op *op, const cd_patience *patience, bool chain)
{
    cd_net_run run;
    tree t = {.run = &run};
    t.data = cd_piece_whole(team->rank == op->root ? &op->in.list[0] : &op->out.list[0]);
    (chain ? find_chain : find_binomial)(&t, team->world, team->rank, op->root);
    size_t work = t.data.span->dims && t.data.bytes > CD_NET_CARRY ? WINDOW * CHUNK_BYTES : 0;
    CD_TRY(cd_net_begin(&run, team, op, patience, WINDOW * (CHILDREN + 1), work));
    return cd_net_end(&run, pass_all(&t));
}

cd_status cd_net_tree_run(cd_team *team, const cd_op *op, const cd_patience *patience)
{
    return broadcast(team, op, patience, false);
}

cd_status cd_net_chain_run(cd_team *team, const cd_op *op, const cd_patience *patience)
{
    return broadcast(team, op, patience, true);
}

static cd_status meet_all(cd_net_run *run)
{
    CD_TRY(cd_net_agree(run, NULL));
    return cd_net_wait(run, 0, run->team->world);
}

cd_status cd_net_barrier_run(cd_team *team, const cd_op *op, const cd_patience *patience)
{
    cd_net_run run;
    CD_TRY(cd_net_begin(&run, team, op, patience, 0, 0));
    return cd_net_end(&run, meet_all(&run));
}
