/* The backend of a group's GPUs: its opening, and what the group asks of it. */
#include "group/group_impl.h"

#include <stdio.h>

cd_backend *cd_group_backend(cd_group *g, cd_device device)
{
    return device == CD_CPU ? g->cpu : cd_group_gpu(g);
}

void cd_group_abort_gpu(cd_group *g)
{
    cd_backend *gpu = cd_group_gpu(g);
    if (gpu)
        gpu->ops->abort(gpu);
}

bool cd_group_is_gpu_busy(cd_group *g)
{
    cd_backend *gpu = cd_group_gpu(g);
    return gpu && gpu->ops->is_busy(gpu);
}

cd_status cd_group_exchange(void *ctx, const void *mine, void *all, size_t bytes, const cd_patience *patience)
{
    cd_patience own = *patience;
    return cd_group_gather_bytes(ctx, mine, bytes, all, &own);
}

/* The GPU side of the group of all, whose ranks are the world's; NULL: this rank has none, or it is being opened. */
static cd_backend *gpu_of_all(cd_group *g)
{
    cd_group *all = g->world->group;
    return all && all != g ? cd_group_gpu(all) : 0;
}

/* The other ranks are in the making too, or about to come to it: they are told, as of any collective that fails. */
static cd_status settle_opening(cd_group *g, cd_status status)
{
    cd_error error = *cd_last_error();
    if (status == CD_INTERRUPTED) {
        cd_error why = {.code = CD_ABORTED, .rank = g->world->rank};
        snprintf(why.text, sizeof why.text, "rank %d was interrupted while the group's GPUs were connected", g->world->rank);
        cd_group_abort(g, &why);
        return cd_fail_with(&error);
    }
    if (cd_status_is_sticky(status)) {
        cd_group_abort(g, &error);
        CD_TRY(cd_cause_check(g->cause)); /* the first cause speaks on all ranks alike */
    }
    return cd_fail_with(&error);
}

cd_status cd_group_open_device(cd_group *g, cd_device device, int device_index, bool eager, const cd_patience *patience)
{
    if (device == CD_CPU || cd_group_gpu(g))
        return CD_OK;
    cd_waiter waiter = cd_waiter_start(patience);
    while (pthread_mutex_trylock(&g->device_lock) != 0) /* another thread opens */
        CD_TRY(cd_waiter_turn(&waiter));
    cd_status status = CD_OK;
    if (!cd_group_gpu(g)) {
        cd_backend_env env = {.team = &g->team, .exchange = cd_group_exchange, .exchange_ctx = g, .parent = gpu_of_all(g),
                              .parent_ranks = g->world_ranks, .device_index = device_index, .eager = eager,
                              .patience = patience};
        cd_backend *gpu;
        status = cd_backend_open_gpu(&env, &gpu);
        if (status == CD_OK) /* release: who finds it finds it made */
            atomic_store_explicit(&g->gpu, gpu, memory_order_release);
    }
    pthread_mutex_unlock(&g->device_lock);
    return status == CD_OK ? CD_OK : settle_opening(g, status);
}
