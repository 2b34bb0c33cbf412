/* Memory that NCCL knows, and the facts of backend/gpu.h. */
#include "backend/gpu_impl.h"

#include <stdlib.h>
#include <unistd.h>

/* Released memory is kept up to this sum: giving it back waits for the GPU, which has to be rare; no GPU
 * misses so little. */
#define KEPT_BYTES ((size_t)256 << 20)

static void give_back(cd_gpu_backend *b, const cd_gpu_block *block)
{
    cd_nccl_comm comm = atomic_load(&b->comm);
    if (block->handle && comm)
        b->nccl.comm_deregister(comm, block->handle);
    if (block->nccl)
        b->nccl.mem_free(block->memory);
    else
        b->driver.mem_free(cd_gpu_address(block->memory));
}

static cd_status take(cd_gpu_backend *b, size_t bytes, bool plain, cd_gpu_block *out)
{
    bool nccl = !plain && b->nccl.version >= CD_NCCL_MEMORY_SINCE && b->nccl.mem_alloc && b->nccl.mem_free;
    *out = (cd_gpu_block){.bytes = bytes, .nccl = nccl};
    if (!out->nccl) {
        cd_cu_address address = 0;
        CD_TRY(cd_driver_check(&b->driver, b->driver.mem_alloc(&address, bytes), "cuMemAlloc"));
        out->memory = (void *)(uintptr_t)address;
        return CD_OK;
    }
    cd_nccl_result result = b->nccl.mem_alloc(&out->memory, bytes);
    if (result != CD_NCCL_SUCCESS)
        return cd_fail(CD_NO_MEMORY, "NCCL gives no %zu bytes of GPU memory: %s", bytes, b->nccl.error_text(result));
    cd_nccl_comm comm = atomic_load(&b->comm);
    /* Registration is an optimisation: memory that NCCL does not register works all the same. */
    if (comm && b->nccl.comm_register && b->nccl.comm_register(comm, out->memory, bytes, &out->handle) != CD_NCCL_SUCCESS)
        out->handle = 0;
    return CD_OK;
}

/* The block is the caller's until it is released, also beyond the group's end: it holds the backend. */
static cd_status remember(cd_gpu_backend *b, const cd_gpu_block *block)
{
    cd_status status = CD_OK;
    pthread_mutex_lock(&b->blocks_lock);
    if (b->block_count == b->block_room) {
        size_t room = b->block_room ? b->block_room * 2 : 16;
        cd_gpu_block *more = realloc(b->blocks, room * sizeof *more);
        if (more) {
            b->blocks = more;
            b->block_room = room;
        } else {
            status = cd_fail(CD_NO_MEMORY, "no memory to remember a GPU allocation");
        }
    }
    if (status == CD_OK) {
        b->blocks[b->block_count++] = *block;
        atomic_fetch_add_explicit(&b->refs, 1, memory_order_relaxed);
    }
    pthread_mutex_unlock(&b->blocks_lock);
    return status;
}

/* Everything that is released by now ripens; what is released while the GPU is waited for may be used by
 * later work. */
static void ripen(cd_gpu_backend *b)
{
    pthread_mutex_lock(&b->blocks_lock);
    for (size_t i = 0; i < b->block_count; i++)
        if (b->blocks[i].state == CD_GPU_BLOCK_RELEASED)
            b->blocks[i].state = CD_GPU_BLOCK_RIPE;
    pthread_mutex_unlock(&b->blocks_lock);
}

/* Takes a ripe block of NCCL's memory, or of the driver's, off the list. False: there is none. */
static bool pick(cd_gpu_backend *b, bool nccl, cd_gpu_block *out)
{
    size_t i = 0;
    pthread_mutex_lock(&b->blocks_lock);
    while (i < b->block_count && (b->blocks[i].state != CD_GPU_BLOCK_RIPE || b->blocks[i].nccl != nccl))
        i++;
    bool found = i < b->block_count;
    if (found) {
        *out = b->blocks[i];
        b->released_bytes -= out->bytes;
        b->blocks[i] = b->blocks[--b->block_count];
    }
    pthread_mutex_unlock(&b->blocks_lock);
    return found;
}

static size_t released_bytes(cd_gpu_backend *b)
{
    pthread_mutex_lock(&b->blocks_lock);
    size_t bytes = b->released_bytes;
    pthread_mutex_unlock(&b->blocks_lock);
    return bytes;
}

/* In a thread of its own, which holds the backend: nothing ends a wait for the GPU. The driver's memory is given back here, since
 * the driver waits for what other threads have queued meanwhile; NCCL's by the caller, who may use the communicator. */
static cd_status sweep_main(void *arg)
{
    cd_gpu_backend *b = arg;
    cd_gpu_block block;
    bool pushed;
    cd_status status = cd_gpu_enter(&b->gpu, &pushed) == CD_OK ? CD_OK : CD_GPU;
    if (status == CD_OK) {
        cd_cu_result result = b->driver.ctx_synchronize();
        if (result != CD_CU_SUCCESS)
            status = cd_fail(CD_GPU, "the GPU cannot be waited for: cuCtxSynchronize: CUDA error %d", result);
        while (status == CD_OK && pick(b, false, &block))
            give_back(b, &block);
        cd_gpu_leave(&b->gpu, pushed);
    }
    /* Release: the next sweep comes after this one. */
    atomic_store_explicit(&b->sweeping, false, memory_order_release);
    cd_gpu_backend_unref(b);
    return status;
}

/* Waits for the GPU in a thread of its own; where patience ends first, that goes on by itself. */
static cd_status sweep(cd_gpu_backend *b, const cd_patience *patience)
{
    cd_waiter waiter = cd_waiter_start(patience);
    while (atomic_load_explicit(&b->sweeping, memory_order_acquire)) /* one that an earlier caller has left */
        CD_TRY(cd_waiter_turn(&waiter));
    ripen(b);
    atomic_fetch_add_explicit(&b->refs, 1, memory_order_relaxed);
    atomic_store_explicit(&b->sweeping, true, memory_order_relaxed);
    cd_status status = cd_gpu_errand(sweep_main, 0, b, patience);
    if (status == CD_NO_MEMORY) {
        atomic_store_explicit(&b->sweeping, false, memory_order_relaxed);
        atomic_fetch_sub_explicit(&b->refs, 1, memory_order_relaxed); /* the group has one */
    }
    return status;
}

/* Gives back what was released, when all work that was queued by then, in any stream, is through: NCCL's
 * memory is taken away under kernels that use it (2.28 on an H200: "an illegal memory access"), where the
 * driver's own waits. By who is inside, context current; not while a coalesced group is open, whose operations are
 * yet to be launched. */
static cd_status reclaim(cd_gpu_backend *b, const cd_patience *patience)
{
    cd_gpu_block block;
    cd_patience own = *patience;
    own.cause = b->team->cause;
    cd_status status = sweep(b, &own);
    if (status == CD_TIMED_OUT)
        return cd_fail(CD_WAIT_EXPIRED, "rank %d: an allocation on GPU %d waited to its deadline for work that was queued before "
                                        "memory was released: let that end, or give the group a longer timeout",
                       cd_gpu_rank(b, b->rank), b->gpu.index);
    while (status == CD_OK && pick(b, true, &block))
        give_back(b, &block);
    return status;
}

static cd_status take_or_reclaim(cd_gpu_backend *b, size_t bytes, bool plain, const cd_patience *patience,
                                 bool inside, cd_gpu_block *out)
{
    if (!inside && released_bytes(b) >= KEPT_BYTES)
        CD_TRY(reclaim(b, patience));
    cd_status status = take(b, bytes, plain, out);
    if (status == CD_OK || inside || released_bytes(b) == 0)
        return status;
    CD_TRY(reclaim(b, patience));
    return take(b, bytes, plain, out);
}

static cd_status alloc(cd_backend *backend, size_t bytes, bool plain, const cd_patience *patience, void **out)
{
    cd_gpu_backend *b = (cd_gpu_backend *)backend;
    cd_gpu_block block;
    bool pushed, inside = cd_gpu_owns_group(b);
    if (!inside)
        CD_TRY(cd_gpu_go_in(b, CD_BARRIER, CD_NEVER, patience));
    cd_status status = cd_gpu_enter(&b->gpu, &pushed);
    if (status == CD_OK) {
        status = take_or_reclaim(b, bytes ? bytes : 1, plain, patience, inside, &block);
        if (status == CD_OK && (status = remember(b, &block)) != CD_OK)
            give_back(b, &block);
        cd_gpu_leave(&b->gpu, pushed);
    }
    if (!inside)
        cd_gpu_come_out(b);
    if (status == CD_OK)
        *out = block.memory;
    return status;
}

cd_status cd_gpu_alloc(cd_backend *backend, size_t bytes, const cd_patience *patience, void **out)
{
    return alloc(backend, bytes, false, patience, out);
}

cd_status cd_gpu_alloc_plain(cd_backend *backend, size_t bytes, const cd_patience *patience, void **out)
{
    return alloc(backend, bytes, true, patience, out);
}

void cd_gpu_release(cd_backend *backend, void *memory)
{
    cd_gpu_backend *b = (cd_gpu_backend *)backend;
    bool known = false;
    if (b->process != getpid())
        return;
    /* Held for a look at the list alone, never around a call into NCCL or the driver: nobody waits here. */
    pthread_mutex_lock(&b->blocks_lock);
    for (size_t i = 0; memory && i < b->block_count && !known; i++) {
        cd_gpu_block *block = &b->blocks[i];
        known = block->memory == memory && block->state == CD_GPU_BLOCK_USED;
        if (known) {
            block->state = CD_GPU_BLOCK_RELEASED;
            b->released_bytes += block->bytes;
        }
    }
    pthread_mutex_unlock(&b->blocks_lock);
    if (known)
        cd_gpu_backend_unref(b);
}

void cd_gpu_blocks_close(cd_gpu_backend *b)
{
    /* Where the GPU cannot be waited for (the thread captures a graph), its memory ends with the process. */
    if (b->block_count > 0 && b->driver.ctx_synchronize() == CD_CU_SUCCESS)
        for (size_t i = 0; i < b->block_count; i++)
            give_back(b, &b->blocks[i]);
    free(b->blocks);
}

cd_gpu_facts cd_gpu_describe(const cd_backend *backend)
{
    const cd_gpu_backend *b = (const cd_gpu_backend *)backend;
    return (cd_gpu_facts){b->gpu.index, b->nccl.version, b->kernels.origin, b->gpu.name, b->gpu.pci};
}
