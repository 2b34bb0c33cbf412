/* Memory that NCCL knows, and the facts and copies of backend/gpu.h. */
#include "backend/gpu_impl.h"

#include <stdlib.h>

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
    *out = (cd_gpu_block){.nccl = !plain && b->nccl.version >= CD_NCCL_MEMORY_SINCE && b->nccl.mem_alloc && b->nccl.mem_free};
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

static cd_status remember(cd_gpu_backend *b, const cd_gpu_block *block)
{
    if (b->block_count == b->block_room) {
        size_t room = b->block_room ? b->block_room * 2 : 16;
        cd_gpu_block *more = realloc(b->blocks, room * sizeof *more);
        if (!more)
            return cd_fail(CD_NO_MEMORY, "no memory to remember a GPU allocation");
        b->blocks = more;
        b->block_room = room;
    }
    b->blocks[b->block_count++] = *block;
    return CD_OK;
}

/* Gives back what was released. Under lock, context current; not while a coalesced group is open, whose operations are yet to be
 * launched. */
static void sweep(cd_gpu_backend *b)
{
    /* Acquire: pairs with the release in cd_gpu_release. */
    cd_gpu_dropped *next, *dropped = atomic_exchange_explicit(&b->dropped, 0, memory_order_acquire);
    for (; dropped; dropped = next) {
        size_t i = 0;
        while (i < b->block_count && b->blocks[i].memory != dropped->memory)
            i++;
        if (i < b->block_count) {
            give_back(b, &b->blocks[i]);
            b->blocks[i] = b->blocks[--b->block_count];
        }
        next = dropped->next;
        free(dropped);
    }
}

static cd_status alloc(cd_backend *backend, size_t bytes, bool plain, const cd_patience *patience, void **out)
{
    cd_gpu_backend *b = (cd_gpu_backend *)backend;
    cd_gpu_block block;
    bool pushed, inside = cd_gpu_owns_group(b);
    if (!inside) {
        CD_TRY(cd_gpu_lock(b, patience));
        cd_gpu_go_in(b, CD_BARRIER, CD_NEVER);
    }
    cd_status status = cd_gpu_enter(&b->gpu, &pushed);
    if (status == CD_OK) {
        if (!inside)
            sweep(b);
        status = take(b, bytes ? bytes : 1, plain, &block);
        if (status == CD_OK && (status = remember(b, &block)) != CD_OK)
            give_back(b, &block);
        cd_gpu_leave(&b->gpu, pushed);
    }
    if (!inside) {
        cd_gpu_come_out(b);
        pthread_mutex_unlock(&b->lock);
    }
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
    cd_gpu_dropped *dropped = memory ? malloc(sizeof *dropped) : 0;
    bool pushed;
    if (!dropped) /* kept until the backend is freed */
        return;
    dropped->memory = memory;
    dropped->next = atomic_load_explicit(&b->dropped, memory_order_relaxed);
    /* Release: who takes the list sees the entry. */
    while (!atomic_compare_exchange_weak_explicit(&b->dropped, &dropped->next, dropped, memory_order_release,
                                                  memory_order_relaxed)) {
    }
    /* Never waits: the finaliser of an array may run in the very thread that holds the lock (in a coalesced group; in a signal's
     * handler). Then the next allocation or release sweeps. */
    if (pthread_mutex_trylock(&b->lock) != 0)
        return;
    cd_gpu_go_in(b, CD_BARRIER, CD_NEVER);
    if (cd_gpu_enter(&b->gpu, &pushed) == CD_OK) {
        sweep(b);
        cd_gpu_leave(&b->gpu, pushed);
    }
    cd_gpu_come_out(b);
    pthread_mutex_unlock(&b->lock);
}

void cd_gpu_blocks_close(cd_gpu_backend *b)
{
    sweep(b);
    for (size_t i = 0; i < b->block_count; i++)
        give_back(b, &b->blocks[i]);
    free(b->blocks);
}

cd_gpu_facts cd_gpu_describe(const cd_backend *backend)
{
    const cd_gpu_backend *b = (const cd_gpu_backend *)backend;
    return (cd_gpu_facts){b->gpu.index, b->nccl.version, b->kernels.origin, b->gpu.name, b->gpu.pci};
}

cd_status cd_gpu_copy_in(cd_backend *backend, void *to, const void *from, size_t bytes)
{
    cd_gpu_backend *b = (cd_gpu_backend *)backend;
    bool pushed;
    CD_TRY(cd_gpu_enter(&b->gpu, &pushed));
    cd_cu_result result = b->driver.copy_to_device(cd_gpu_address(to), from, bytes);
    cd_gpu_leave(&b->gpu, pushed);
    return cd_driver_check(&b->driver, result, "cuMemcpyHtoD");
}

cd_status cd_gpu_copy_out(cd_backend *backend, void *to, const void *from, size_t bytes)
{
    cd_gpu_backend *b = (cd_gpu_backend *)backend;
    bool pushed;
    CD_TRY(cd_gpu_enter(&b->gpu, &pushed));
    cd_cu_result result = b->driver.copy_to_host(to, cd_gpu_address(from), bytes);
    cd_gpu_leave(&b->gpu, pushed);
    return cd_driver_check(&b->driver, result, "cuMemcpyDtoH");
}
