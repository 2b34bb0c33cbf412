#include "coll/net_run.h"

#include <stdlib.h>
#include <string.h>

/* Idle looks (about 50 ms apart) at a peer that left before its silence counts: what it sent before is still on its way. The end
 * of its stream is seen sooner. */
#define GONE_LOOKS 20

#define HELLO_BYTES (sizeof(cd_net_hello) + CD_NET_CARRY)

static cd_status look_for_departure(cd_net_run *run)
{
    for (int i = 0; i < run->waiting_count; i++) {
        const cd_xfer *x = run->waiting[i];
        int rank = run->ranks[x - run->slots];
        if (atomic_load_explicit(&x->done, memory_order_acquire) ||
            !atomic_load_explicit(&run->callers->gone[rank], memory_order_acquire))
            continue;
        if (++run->gone_looks >= GONE_LOOKS)
            return cd_fail_rank(CD_PEER_LOST, x->peer, "rank %d left the group before it took part in %s", x->peer,
                                cd_kind_name(run->op->kind));
        break;
    }
    return CD_OK;
}

static cd_status idle(void *ctx)
{
    cd_net_run *run = ctx;
    if (run->callers->gone)
        CD_TRY(look_for_departure(run));
    return run->callers->idle ? run->callers->idle(run->callers->idle_ctx) : CD_OK;
}

static cd_status fail_memory(size_t bytes)
{
    return cd_fail(CD_NO_MEMORY, "collective: no memory for %zu bytes of work space", bytes);
}

cd_status cd_net_begin(cd_net_run *run, cd_team *team, const cd_op *op, const cd_patience *patience, int own_slots,
                       size_t work_bytes)
{
    size_t world = (size_t)team->world;
    size_t lanes = op->kind == CD_REDUCE || op->kind == CD_GATHER || op->kind == CD_SCATTER ? 2 : 1;
    size_t slots = 2 * lanes * world + (size_t)own_slots;
    *run = (cd_net_run){.team = team, .op = op, .patience = *patience, .callers = patience, .slot_count = (int)slots,
                        .first_slot = (int)(2 * lanes * world)};
    run->patience.gone = NULL;
    if (patience->idle || patience->gone) {
        run->patience.idle = idle;
        run->patience.idle_ctx = run;
    }
    size_t hellos = cd_round_up(HELLO_BYTES * lanes * world, 64);
    size_t tables = cd_round_up(slots * (sizeof(cd_xfer) + sizeof(cd_xfer *) + sizeof(int)) + world * sizeof(bool), 64);
    run->memory = malloc(tables + 2 * hellos + work_bytes + 64);
    if (!run->memory)
        return fail_memory(tables + 2 * hellos + work_bytes);
    run->slots = (cd_xfer *)(void *)run->memory;
    run->waiting = (cd_xfer **)(void *)(run->slots + slots);
    run->ranks = (int *)(void *)(run->waiting + slots);
    run->greeted = (bool *)(void *)(run->ranks + slots);
    memset(run->ranks, 0xFF, slots * sizeof(int));
    memset(run->greeted, 0, world);
    run->hellos_out = run->memory + tables;
    run->hellos_in = run->hellos_out + hellos;
    run->work = (char *)cd_round_up((uintptr_t)(run->hellos_in + hellos), 64);
    run->head.signature = cd_op_signature(op);
    cd_op_descriptor(op, &run->head.descriptor);
    return CD_OK;
}

static int lane_of(int step)
{
    return step == CD_NET_BLOCK;
}

static cd_net_hello *hello_at(const cd_net_run *run, char *hellos, int step, int index)
{
    return (cd_net_hello *)(void *)(hellos + HELLO_BYTES * (size_t)(lane_of(step) * run->team->world + index));
}

static int send_slot(const cd_net_run *run, int step, int rank)
{
    return 2 * lane_of(step) * run->team->world + rank;
}

static int recv_slot(const cd_net_run *run, int step, int rank)
{
    return send_slot(run, step, rank) + run->team->world;
}

/* Every rank that may be waiting for this one in the operation learns why it will wait in vain. */
static void tell_all(cd_net_run *run, const cd_error *why)
{
    /* Own memory: hellos that are still going out must not change. */
    cd_net_hello *hello = hello_at(run, run->hellos_in, CD_NET_HELLO, run->team->rank);
    *hello = run->head;
    hello->signature = CD_NET_DISPUTE;
    hello->carried = sizeof *why;
    memcpy(hello + 1, why, sizeof *why);
    for (int rank = 0; rank < run->team->world; rank++) {
        if (rank != run->team->rank && !run->greeted[rank] && run->ranks[rank] < 0)
            cd_net_send(run, rank, rank, CD_NET_HELLO, hello, sizeof *hello + hello->carried);
    }
}

/* The error that tell_all sent. */
static cd_status join_dispute(const cd_net_hello *hello)
{
    cd_error why;
    if (hello->carried != sizeof why)
        return cd_fail(CD_PROTOCOL, "an error of %u bytes instead of %zu came in place of a hello", hello->carried, sizeof why);
    memcpy(&why, hello + 1, sizeof why);
    why.code = CD_MISMATCH;
    why.text[sizeof why.text - 1] = 0;
    return cd_fail_with(&why);
}

cd_status cd_net_end(cd_net_run *run, cd_status status)
{
    if (status != CD_OK && run->memory) {
        cd_error why = *cd_last_error();
        /* Not yet the group's cause: who makes it that also tells the ranks that have no hello to wait for. */
        if (status == CD_MISMATCH)
            tell_all(run, &why);
        for (int slot = 0; slot < run->slot_count; slot++) {
            if (run->ranks[slot] < 0)
                continue;
            cd_mesh_cancel(run->team->mesh, &run->slots[slot]);
            cd_xfer_clear(&run->slots[slot]);
        }
        cd_fail_with(&why);
        if (status == CD_TIMED_OUT)
            cd_fail_prefix("%s, sequence %llu: ", cd_kind_name(run->op->kind), (unsigned long long)run->op->sequence);
    }
    free(run->memory);
    return status;
}

static cd_match match_of(const cd_net_run *run, int step)
{
    return (cd_match){run->team->context, (int64_t)(run->op->sequence * CD_NET_STEPS + (uint64_t)step)};
}

void cd_net_send(cd_net_run *run, int slot, int rank, int step, const void *data, size_t bytes)
{
    run->ranks[slot] = rank;
    cd_mesh_send(run->team->mesh, &run->slots[slot], run->team->world_ranks[rank], match_of(run, step), 0, data, bytes, false);
}

void cd_net_recv(cd_net_run *run, int slot, int rank, int step, void *data, size_t bytes)
{
    run->ranks[slot] = rank;
    cd_mesh_recv(run->team->mesh, &run->slots[slot], run->team->world_ranks[rank], match_of(run, step), 0, data, bytes,
                 step != CD_NET_DATA && step != CD_NET_RESULT, false);
}

cd_status cd_net_wait(cd_net_run *run, int first, int count)
{
    int n = 0;
    for (int slot = first; slot < first + count; slot++) {
        if (run->ranks[slot] >= 0)
            run->waiting[n++] = &run->slots[slot];
    }
    if (n == 0)
        return CD_OK;
    run->waiting_count = n;
    CD_TRY(cd_mesh_wait(run->team->mesh, run->waiting, n, &run->patience));
    for (int slot = first; slot < first + count; slot++)
        run->ranks[slot] = -1;
    return CD_OK;
}

void cd_net_fill(cd_net_run *run, int step, int index, const cd_shm_piece *block)
{
    cd_net_hello *hello = hello_at(run, run->hellos_out, step, index);
    *hello = run->head;
    hello->block_bytes = block ? block->bytes : 0;
    if (block && block->bytes <= CD_NET_CARRY) {
        hello->carried = (uint32_t)block->bytes;
        cd_piece_read(block, 0, block->bytes, hello + 1);
    }
}

void cd_net_greet(cd_net_run *run, int step, int rank, int index)
{
    cd_net_hello *hello = hello_at(run, run->hellos_out, step, index);
    if (step == CD_NET_HELLO)
        run->greeted[rank] = true;
    cd_net_send(run, send_slot(run, step, rank), rank, step, hello, sizeof *hello + hello->carried);
}

void cd_net_await_greeting(cd_net_run *run, int step, int rank)
{
    cd_net_recv(run, recv_slot(run, step, rank), rank, step, hello_at(run, run->hellos_in, step, rank), HELLO_BYTES);
}

cd_status cd_net_check(cd_net_run *run, int step, int rank, const cd_net_hello **hello_p)
{
    const cd_net_hello *hello = hello_at(run, run->hellos_in, step, rank);
    const cd_team *team = run->team;
    size_t bytes = run->slots[recv_slot(run, step, rank)].bytes;
    if (bytes < sizeof *hello || bytes - sizeof *hello != hello->carried)
        return cd_fail_rank(CD_PROTOCOL, team->world_ranks[rank], "rank %d begins %s with a message of %zu bytes that is none of "
                            "this protocol", team->world_ranks[rank], cd_kind_name(run->op->kind), bytes);
    if (hello->signature == CD_NET_DISPUTE)
        return join_dispute(hello);
    if (hello->signature != run->head.signature)
        return cd_op_mismatch(team->world_ranks[team->rank], &run->head.descriptor, team->world_ranks[rank], &hello->descriptor);
    *hello_p = hello;
    return CD_OK;
}

cd_status cd_net_meet(cd_net_run *run, const uint64_t *gives, uint64_t takes)
{
    int world = run->team->world, me = run->team->rank;
    for (int i = 1; i < world; i++)
        cd_net_await_greeting(run, CD_NET_HELLO, (me + i) % world);
    for (int i = 1; i < world; i++) {
        int to = (me + i) % world, memory = gives ? to : me;
        if (gives || i == 1)
            cd_net_fill(run, CD_NET_HELLO, memory, NULL);
        if (gives)
            hello_at(run, run->hellos_out, CD_NET_HELLO, memory)->block_bytes = gives[to];
        cd_net_greet(run, CD_NET_HELLO, to, memory);
    }
    CD_TRY(cd_net_wait(run, 0, 2 * world));
    for (int rank = 0; rank < world; rank++) {
        const cd_net_hello *hello;
        if (rank == me)
            continue;
        CD_TRY(cd_net_check(run, CD_NET_HELLO, rank, &hello));
        if (gives && hello->block_bytes != takes)
            return cd_op_block_mismatch(run->op, run->team->world_ranks[rank], hello->block_bytes, run->team->world_ranks[me],
                                        takes);
    }
    return gives ? cd_net_agree_on_blocks(run) : CD_OK;
}

void cd_net_greet_next(cd_net_run *run)
{
    int world = run->team->world, me = run->team->rank;
    if (world == 1)
        return;
    cd_net_await_greeting(run, CD_NET_HELLO, (me - 1 + world) % world);
    cd_net_fill(run, CD_NET_HELLO, me, NULL);
    cd_net_greet(run, CD_NET_HELLO, (me + 1) % world, me);
}

cd_status cd_net_hear_previous(cd_net_run *run)
{
    int world = run->team->world, previous = (run->team->rank - 1 + world) % world;
    const cd_net_hello *ignored;
    if (world == 1)
        return CD_OK;
    CD_TRY(cd_net_wait(run, recv_slot(run, CD_NET_HELLO, previous), 1));
    return cd_net_check(run, CD_NET_HELLO, previous, &ignored);
}

/* A hello with the same data as the one that came. */
static void repeat(cd_net_run *run, int index, const cd_net_hello *came)
{
    cd_net_hello *hello = hello_at(run, run->hellos_out, CD_NET_HELLO, index);
    *hello = run->head;
    hello->block_bytes = came->block_bytes;
    hello->carried = came->carried;
    memcpy(hello + 1, came + 1, came->carried);
}

static cd_status agree(cd_net_run *run, int step, const cd_shm_piece *data)
{
    int world = run->team->world, me = run->team->rank;
    int place = data ? (me - run->op->root + world) % world : 0;
    int with_data = (me + 1) % world; /* the memory for the hello that has it */
    bool carries = data && data->bytes <= CD_NET_CARRY;
    const cd_net_hello *came = NULL, *hello;
    cd_net_fill(run, step, me, NULL);
    if (carries && place == 0)
        cd_net_fill(run, step, with_data, data);
    /* Before the step of distance d those at places below d have the data. */
    for (int distance = 1; distance < world; distance <<= 1) {
        int to = (me + distance) % world, from = (me - distance + world) % world;
        bool gives = carries && place < distance && place + distance < world;
        cd_net_await_greeting(run, step, from);
        cd_net_greet(run, step, to, gives ? with_data : me);
        CD_TRY(cd_net_wait(run, recv_slot(run, step, from), 1));
        CD_TRY(cd_net_check(run, step, from, &hello));
        if (!carries || place < distance || place >= 2 * distance)
            continue;
        if (hello->carried != data->bytes)
            return cd_fail_rank(CD_PROTOCOL, run->team->world_ranks[from], "rank %d passes on %u bytes of a %s of %zu",
                                run->team->world_ranks[from], hello->carried, cd_kind_name(run->op->kind), data->bytes);
        came = hello;
        repeat(run, with_data, came);
    }
    if (came)
        cd_piece_write(data, 0, came->carried, cd_net_carried(came));
    return CD_OK;
}

cd_status cd_net_agree(cd_net_run *run, const cd_shm_piece *data)
{
    return agree(run, CD_NET_HELLO, data);
}

cd_status cd_net_agree_on_blocks(cd_net_run *run)
{
    return agree(run, CD_NET_AGREED, NULL);
}
