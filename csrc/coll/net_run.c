#include "coll/net_run.h"

#include <stdlib.h>
#include <string.h>

/* Idle looks (about 50 ms apart) at a peer that left before its silence counts: what it sent before is still on its way. */
#define GONE_LOOKS 4

static size_t hello_bytes(const cd_net_run *run)
{
    return (sizeof run->head + CD_NET_CARRY) * (size_t)run->team->world;
}

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
    size_t world = (size_t)team->world, slots = 2 * world + (size_t)own_slots;
    *run = (cd_net_run){.team = team, .op = op, .patience = *patience, .callers = patience, .slot_count = (int)slots};
    run->patience.gone = NULL;
    if (patience->idle || patience->gone) {
        run->patience.idle = idle;
        run->patience.idle_ctx = run;
    }
    size_t hellos = cd_round_up(hello_bytes(run), 64);
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

static cd_net_hello *hello_at(const cd_net_run *run, char *hellos, int index)
{
    return (cd_net_hello *)(void *)(hellos + (sizeof run->head + CD_NET_CARRY) * (size_t)index);
}

/* Every rank that may be waiting for this one in the operation learns what it called instead. */
static void tell_all(cd_net_run *run)
{
    /* Own memory: hellos that are still going out must not change. */
    cd_net_hello *hello = hello_at(run, run->hellos_in, run->team->rank);
    *hello = run->head;
    for (int rank = 0; rank < run->team->world; rank++) {
        if (rank != run->team->rank && !run->greeted[rank] && run->ranks[rank] < 0)
            cd_net_send(run, rank, rank, CD_NET_HELLO, hello, sizeof *hello);
    }
}

cd_status cd_net_end(cd_net_run *run, cd_status status)
{
    if (status != CD_OK && run->memory) {
        cd_error why = *cd_last_error();
        if (status == CD_MISMATCH) {
            tell_all(run);
            if (run->team->cause)
                cd_cause_publish(run->team->cause, &why);
        }
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
                 step == CD_NET_HELLO, false);
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

void cd_net_greet(cd_net_run *run, int rank, int index, bool refill, const cd_shm_piece *block)
{
    cd_net_hello *hello = hello_at(run, run->hellos_out, index);
    if (refill) {
        *hello = run->head;
        hello->block_bytes = block ? block->bytes : 0;
        if (block && block->bytes <= CD_NET_CARRY) {
            hello->carried = (uint32_t)block->bytes;
            cd_piece_read(block, 0, block->bytes, hello + 1);
        }
    }
    run->greeted[rank] = true;
    cd_net_send(run, rank, rank, CD_NET_HELLO, hello, sizeof *hello + hello->carried);
}

void cd_net_await_greeting(cd_net_run *run, int rank)
{
    cd_net_recv(run, run->team->world + rank, rank, CD_NET_HELLO, hello_at(run, run->hellos_in, rank),
                sizeof(cd_net_hello) + CD_NET_CARRY);
}

cd_status cd_net_check(cd_net_run *run, int rank, const cd_net_hello **hello_p)
{
    const cd_net_hello *hello = hello_at(run, run->hellos_in, rank);
    const cd_team *team = run->team;
    size_t bytes = run->slots[team->world + rank].bytes;
    if (bytes < sizeof *hello || bytes - sizeof *hello != hello->carried)
        return cd_fail_rank(CD_PROTOCOL, team->world_ranks[rank], "rank %d begins %s with a message of %zu bytes that is none of "
                            "this protocol", team->world_ranks[rank], cd_kind_name(run->op->kind), bytes);
    if (hello->signature != run->head.signature)
        return cd_op_mismatch(team->world_ranks[team->rank], &run->head.descriptor, team->world_ranks[rank], &hello->descriptor);
    *hello_p = hello;
    return CD_OK;
}

cd_status cd_net_meet(cd_net_run *run)
{
    int world = run->team->world, me = run->team->rank;
    for (int i = 1; i < world; i++)
        cd_net_await_greeting(run, (me + i) % world);
    for (int i = 1; i < world; i++)
        cd_net_greet(run, (me + i) % world, me, i == 1, NULL);
    CD_TRY(cd_net_wait(run, 0, 2 * world));
    const cd_net_hello *ignored;
    for (int rank = 0; rank < world; rank++) {
        if (rank != me)
            CD_TRY(cd_net_check(run, rank, &ignored));
    }
    return CD_OK;
}
