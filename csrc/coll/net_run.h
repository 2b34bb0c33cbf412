/* What the collectives over messages share. Private to coll/net_*.
 *
 * Vocabulary. A *hello* is the first message that a rank sends to another in an operation: signature, description, and up to
 * CD_NET_CARRY bytes of data. It is checked before anything is written to the user's memory. A *slot* holds one transfer under
 * way. A *piece* is a part of a block that is one message.
 *
 * Agreement. No rank completes an operation before it depends on the checked hello of every other one, so that ranks that
 * call different things all fail in that very call. Operations in which every pair talks have that from their hellos; the
 * others (broadcast, the small reduce, barrier) send hellos as a dissemination barrier does, and so do those with blocks of
 * different sizes once these are compared (gather, scatter, all_to_all with splits and the like). Some rank always
 * finds the difference: whatever it calls, a rank says hello to the next one at once and listens to the one before it, and
 * going round, a rank that differs stands behind one that does not. */
#ifndef CD_COLL_NET_RUN_H
#define CD_COLL_NET_RUN_H

#include "coll/shm_team_impl.h"
#include "coll/team.h"

/* Data that travels with the hello: a message of its own would cost more than the copy. */
#define CD_NET_CARRY 8192
/* What one rank holds for pieces of an operation. */
#define CD_NET_MEMORY (UINT64_C(8) << 20)

/* In place of a signature, which is never 0: the sender has found that ranks call different things; its cd_error follows. */
#define CD_NET_DISPUTE 0u

typedef struct {
    uint32_t signature;
    uint32_t carried;     /* bytes of data behind this struct */
    uint64_t block_bytes; /* of the whole block that the sender will send to the receiver */
    cd_descriptor descriptor;
} cd_net_hello;
_Static_assert(sizeof(cd_net_hello) == 80 && sizeof(cd_net_hello) + CD_NET_CARRY <= CD_MESH_EAGER, "one eager message");

/* Steps of an operation, the low bits of the tag. */
/* CD_NET_BLOCK: hellos with a block, straight between the root and the others. CD_NET_AGREED: of a second agreement. */
enum { CD_NET_HELLO = 0, CD_NET_DATA = 1, CD_NET_RESULT = 2, CD_NET_BLOCK = 3, CD_NET_AGREED = 4, CD_NET_STEPS = 8 };

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
    int first_slot;            /* of the algorithm: those before it are for hellos */
    bool *greeted;             /* ranks that have a CD_NET_HELLO of this operation from us */
} cd_net_run;

/* Slots [0, world) are sends of CD_NET_HELLO, [world, 2 × world) their receives, by rank; REDUCE, GATHER and SCATTER have as
 * many for CD_NET_BLOCK behind them; the algorithm's begin at first_slot. */
cd_status cd_net_begin(cd_net_run *run, cd_team *team, const cd_op *op, const cd_patience *patience, int own_slots,
                       size_t work_bytes);
/* Cancels what is still under way, tells the others about a mismatch, frees. Returns `status`, its error being the thread's. */
cd_status cd_net_end(cd_net_run *run, cd_status status);

/* Slots are free before and taken afterwards; 0 bytes are a message too. */
void cd_net_send(cd_net_run *run, int slot, int rank, int step, const void *data, size_t bytes);
void cd_net_recv(cd_net_run *run, int slot, int rank, int step, void *data, size_t bytes);
/* Waits for the taken slots among [first, first + count) and frees them. */
cd_status cd_net_wait(cd_net_run *run, int first, int count);

/* `step` is CD_NET_HELLO, CD_NET_BLOCK or CD_NET_AGREED (which has the slots and memory of CD_NET_HELLO) in the following. */
/* Writes a hello with the block if it has up to CD_NET_CARRY bytes (NULL: none); it may be sent to several ranks. `index` (a
 * rank) chooses the memory for it. */
void cd_net_fill(cd_net_run *run, int step, int index, const cd_shm_piece *block);
void cd_net_greet(cd_net_run *run, int step, int rank, int index);
void cd_net_await_greeting(cd_net_run *run, int step, int rank);
/* After the wait for that slot: the other rank's hello, if it is of the same operation. */
cd_status cd_net_check(cd_net_run *run, int step, int rank, const cd_net_hello **hello_p);
/* To all, from all, without data: for algorithms that begin with everybody. `gives`: bytes of the block for each rank, of which
 * that for this one must be `takes`; NULL: not compared. */
cd_status cd_net_meet(cd_net_run *run, const uint64_t *gives, uint64_t takes);
/* Returns CD_OK when all ranks are known to call the same, after log2(world) steps; the sends may still be under way. With
 * `data` of up to CD_NET_CARRY bytes it is a broadcast as well: the root's reach the others', which are written last. */
cd_status cd_net_agree(cd_net_run *run, const cd_shm_piece *data);
/* Blocks may be of different sizes, which only the two ends can compare. Returns CD_OK when all ranks are known to have come
 * here, that is to have found their blocks right. All CD_NET_HELLO slots are free before; data that came with hellos stays. */
cd_status cd_net_agree_on_blocks(cd_net_run *run);
/* For operations in which not every pair talks: a hello to the next rank at once, and the wait for that of the rank before,
 * which shows every difference to somebody. To be heard before anything that may never come. */
void cd_net_greet_next(cd_net_run *run);
cd_status cd_net_hear_previous(cd_net_run *run);

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
