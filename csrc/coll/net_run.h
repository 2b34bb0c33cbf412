/* What the collectives over messages share. Private to coll/net_*.
 *
 * Vocabulary. A *hello* is the first message that a rank sends to another in an operation: signature, description, and up to
 * CD_NET_CARRY bytes of data. It is checked before anything is written to the user's memory. A *slot* holds one transfer under
 * way. A *piece* is a part of a block that is one message. */
#ifndef CD_COLL_NET_RUN_H
#define CD_COLL_NET_RUN_H

#include "coll/shm_team_impl.h"
#include "coll/team.h"

/* Data that travels with the hello: a message of its own would cost more than the copy. */
#define CD_NET_CARRY 8192
/* What one rank holds for pieces of an operation. */
#define CD_NET_MEMORY (UINT64_C(8) << 20)

typedef struct {
    uint32_t signature;
    uint32_t carried;     /* bytes of data behind this struct */
    uint64_t block_bytes; /* of the whole block that the sender will send to the receiver */
    cd_descriptor descriptor;
} cd_net_hello;
_Static_assert(sizeof(cd_net_hello) == 80 && sizeof(cd_net_hello) + CD_NET_CARRY <= CD_MESH_EAGER, "one eager message");

/* Steps of an operation, the low bits of the tag. */
enum { CD_NET_HELLO = 0, CD_NET_DATA = 1, CD_NET_RESULT = 2, CD_NET_STEPS = 4 };

typedef struct {
    cd_team *team;
    const cd_op *op;
    cd_patience patience;      /* the caller's, with our idle function: the mesh indexes `gone` by world rank, we do not */
    const cd_patience *callers;
    int gone_looks;            /* how often a wait of this operation has found that a peer left */
    cd_net_hello head;         /* what every hello of this rank begins with */
    char *memory, *hellos_out, *hellos_in, *work; /* one block: hellos, then `work_bytes` for the algorithm */
    cd_xfer *slots;
    cd_xfer **waiting;
    int *ranks;                /* peer in each slot, by group rank; −1: the slot is free */
    int slot_count, waiting_count;
    bool *greeted;             /* ranks that have a hello of this operation from us */
} cd_net_run;

/* Slots [0, world) are sends of hellos, [world, 2 × world) their receives, by rank; the algorithm's begin at 2 × world. */
cd_status cd_net_begin(cd_net_run *run, cd_team *team, const cd_op *op, const cd_patience *patience, int own_slots,
                       size_t work_bytes);
/* Cancels what is still under way, tells the others about a mismatch, frees. Returns `status`, its error being the thread's. */
cd_status cd_net_end(cd_net_run *run, cd_status status);

/* Slots are free before and taken afterwards; 0 bytes are a message too. */
void cd_net_send(cd_net_run *run, int slot, int rank, int step, const void *data, size_t bytes);
void cd_net_recv(cd_net_run *run, int slot, int rank, int step, void *data, size_t bytes);
/* Waits for the taken slots among [first, first + count) and frees them. */
cd_status cd_net_wait(cd_net_run *run, int first, int count);

/* Sends a hello with `carried` bytes of the block, which has `block_bytes`. `index` (a rank) chooses the memory for it: the
 * same may go to several ranks when `refill` is false for all but the first. */
void cd_net_greet(cd_net_run *run, int rank, int index, bool refill, const cd_shm_piece *block);
void cd_net_await_greeting(cd_net_run *run, int rank);
/* After the wait for that slot: the other rank's hello, if it is of the same operation. */
cd_status cd_net_check(cd_net_run *run, int rank, const cd_net_hello **hello_p);
/* To all, from all, without data: for algorithms that begin with everybody. */
cd_status cd_net_meet(cd_net_run *run);

static inline const char *cd_net_carried(const cd_net_hello *hello)
{
    return (const char *)(hello + 1);
}

/* The paths. move: ALL_GATHER, GATHER, SCATTER, ALL_TO_ALL. */
cd_status cd_net_barrier_run(cd_team *team, const cd_op *op, const cd_patience *patience);
cd_status cd_net_tree_run(cd_team *team, const cd_op *op, const cd_patience *patience);
cd_status cd_net_chain_run(cd_team *team, const cd_op *op, const cd_patience *patience);
cd_status cd_net_move_run(cd_team *team, const cd_op *op, const cd_patience *patience);
cd_status cd_net_small_run(cd_team *team, const cd_op *op, const cd_patience *patience);
cd_status cd_net_slice_run(cd_team *team, const cd_op *op, const cd_patience *patience);

#endif
