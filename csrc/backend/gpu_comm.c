/* The communicator: meeting, waiting for NCCL's non-blocking calls, ending. */
#include "backend/gpu_impl.h"

#include "base/host.h"
#include "base/log.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* A caller that is inside NCCL has this long to come out before the communicator is aborted under it. */
#define ABORT_GRACE_S 1
/* Work that is still queued when a group is closed may end within this time; a dead peer ends the wait at once. */
#define DRAIN_NS (10 * CD_NS_PER_S)
#define FINALIZE_NS (800 * CD_NS_PER_MS)

/* What a rank tells the others; crosses processes of one build. */
typedef struct {
    int32_t status; /* cd_status of this rank's own preparation */
    int32_t nccl_version;
    int32_t gpu_index;
    cd_cu_uuid uuid;
    char pci[32];
    char host[64];
    char text[256];
    cd_nccl_id id; /* rank 0's counts */
} card;

cd_status cd_gpu_cause(const cd_gpu_backend *b)
{
    CD_TRY(cd_cause_check(b->team->cause));
    return cd_fail(CD_ABORTED, "the group's GPU side was %s", atomic_load(&b->closed) ? "closed" : "aborted");
}

cd_status cd_gpu_settle(cd_gpu_backend *b, cd_nccl_comm comm, cd_nccl_result result, const char *what,
                        const cd_patience *patience)
{
    if (cd_likely(result == CD_NCCL_SUCCESS))
        return CD_OK;
    if (result == CD_NCCL_IN_PROGRESS && b->grouping)
        return CD_OK;
    cd_patience own = *patience;
    if (!own.cause)
        own.cause = b->team->cause;
    cd_waiter waiter = cd_waiter_start(&own);
    while (result == CD_NCCL_IN_PROGRESS) {
        cd_status status = cd_waiter_turn(&waiter);
        if (status == CD_TIMED_OUT)
            return cd_fail(CD_TIMED_OUT, "%s: NCCL was still waiting for another rank when the deadline passed", what);
        if (status != CD_OK)
            return status;
        if (atomic_load_explicit(&b->aborted, memory_order_acquire))
            return cd_gpu_cause(b);
        if (b->nccl.comm_async_error(comm, &result) != CD_NCCL_SUCCESS)
            return cd_fail(CD_GPU, "%s: NCCL does not tell how the call went", what);
    }
    return result == CD_NCCL_SUCCESS ? CD_OK : cd_nccl_fail(&b->nccl, comm, result, what);
}

static int world_rank(const cd_gpu_backend *b, int rank)
{
    return b->team->world_ranks ? b->team->world_ranks[rank] : rank;
}

static cd_status check_own_gpus(const cd_gpu_backend *b, const card *cards)
{
    for (int i = 0; i < b->world; i++)
        for (int j = i + 1; j < b->world; j++)
            if (memcmp(&cards[i].uuid, &cards[j].uuid, sizeof cards[i].uuid) == 0)
                return cd_fail_rank(CD_BAD_ARGUMENT, world_rank(b, j),
                                    "ranks %d and %d both use the GPU at %s of %s (their device %d and %d): NCCL needs one "
                                    "GPU a rank; name it by device_id or select it before the first collective",
                                    world_rank(b, i), world_rank(b, j), cards[i].pci, cards[i].host, cards[i].gpu_index,
                                    cards[j].gpu_index);
    return CD_OK;
}

static cd_status check_cards(const cd_gpu_backend *b, const card *cards)
{
    for (int i = 0; i < b->world; i++)
        if (cards[i].status != CD_OK)
            return cd_fail_rank(CD_UNSUPPORTED, world_rank(b, i), "rank %d on %s cannot take part: %s", world_rank(b, i),
                                cards[i].host, cards[i].text);
    for (int i = 1; i < b->world; i++)
        if (cards[i].nccl_version != cards[0].nccl_version)
            return cd_fail_rank(CD_UNSUPPORTED, world_rank(b, i),
                                "rank %d has NCCL %d, rank %d has %d: all ranks need the same (CDIST_NCCL_LIB can name it)",
                                world_rank(b, 0), cards[0].nccl_version, world_rank(b, i), cards[i].nccl_version);
    return check_own_gpus(b, cards);
}

static void fill_card(cd_gpu_backend *b, cd_status prepared, card *mine)
{
    memset(mine, 0, sizeof *mine);
    if (prepared == CD_OK && b->rank == 0) {
        cd_nccl_result result = b->nccl.get_id(&mine->id);
        if (result != CD_NCCL_SUCCESS)
            prepared = cd_nccl_fail(&b->nccl, 0, result, "ncclGetUniqueId");
    }
    mine->status = (int32_t)prepared;
    cd_host_name(mine->host, sizeof mine->host);
    if (prepared != CD_OK) {
        snprintf(mine->text, sizeof mine->text, "%.255s", cd_last_error()->text);
        return;
    }
    mine->nccl_version = b->nccl.version;
    mine->gpu_index = b->gpu.index;
    mine->uuid = b->gpu.uuid;
    memcpy(mine->pci, b->gpu.pci, sizeof mine->pci);
}

/* Exchanges cards even when this rank cannot take part: the others must learn it. */
static cd_status meet(cd_gpu_backend *b, const cd_backend_env *env, cd_status prepared, const cd_patience *patience,
                      cd_nccl_id *id)
{
    card mine, *cards = calloc((size_t)b->world, sizeof *cards);
    if (!cards)
        return cd_fail(CD_NO_MEMORY, "no memory for %d cards", b->world);
    fill_card(b, prepared, &mine);
    cd_error own = *cd_last_error();
    cd_status status = env->exchange(env->exchange_ctx, &mine, cards, sizeof mine, patience);
    if (mine.status != CD_OK)
        status = cd_fail_with(&own);
    else if (status == CD_OK)
        status = check_cards(b, cards);
    *id = cards[0].id;
    free(cards);
    return status;
}

cd_status cd_gpu_connect(cd_gpu_backend *b, const cd_backend_env *env, cd_status prepared, const cd_patience *patience)
{
    cd_nccl_id id;
    CD_TRY(meet(b, env, prepared, patience, &id));
    cd_nccl_config config = cd_nccl_config_make();
    cd_nccl_comm comm = 0;
    cd_nccl_result result;
    cd_gpu_backend *parent = (cd_gpu_backend *)env->parent;
    cd_nccl_comm parent_comm = parent ? atomic_load(&parent->comm) : 0;
    if (parent_comm) {
        /* The lowest member's rank in the parent is a colour that no other new group has. */
        int colour = env->parent_ranks[0];
        for (int i = 1; i < b->world; i++)
            colour = env->parent_ranks[i] < colour ? env->parent_ranks[i] : colour;
        pthread_mutex_lock(&parent->lock);
        result = b->nccl.comm_split(parent_comm, colour, b->rank, &comm, &config);
        cd_status parent_status = cd_gpu_settle(parent, parent_comm, result, "ncclCommSplit", patience);
        pthread_mutex_unlock(&parent->lock);
        CD_TRY(parent_status);
        result = comm ? CD_NCCL_IN_PROGRESS : CD_NCCL_INVALID_ARGUMENT;
    } else {
        result = b->nccl.comm_init(&comm, b->world, id, b->rank, &config);
    }
    cd_status status = cd_gpu_settle(b, comm, result, "connecting", patience);
    if (status != CD_OK) {
        if (comm)
            b->nccl.comm_abort(comm);
        return status;
    }
    atomic_store(&b->comm, comm);
    return CD_OK;
}

cd_status cd_gpu_sit_out_split(cd_backend *parent, const cd_patience *patience)
{
    cd_gpu_backend *b = (cd_gpu_backend *)parent;
    cd_nccl_config config = cd_nccl_config_make();
    cd_nccl_comm none = 0;
    pthread_mutex_lock(&b->lock);
    cd_nccl_comm comm = atomic_load(&b->comm);
    cd_status status = comm ? cd_gpu_settle(b, comm, b->nccl.comm_split(comm, CD_NCCL_NO_COLOR, b->rank, &none, &config),
                                            "ncclCommSplit", patience)
                            : cd_gpu_cause(b);
    pthread_mutex_unlock(&b->lock);
    return status;
}

static bool lock_within(pthread_mutex_t *mutex, int seconds)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += seconds;
    return pthread_mutex_timedlock(mutex, &until) == 0;
}

void cd_gpu_abort_comm(cd_gpu_backend *b)
{
    /* Release: whoever sees `aborted` does not take a later event for a success. */
    atomic_store_explicit(&b->aborted, true, memory_order_release);
    bool locked = lock_within(&b->lock, ABORT_GRACE_S);
    cd_nccl_comm comm = atomic_exchange(&b->comm, 0);
    if (locked)
        pthread_mutex_unlock(&b->lock);
    if (!comm)
        return;
    cd_log_about("gpu", "rank %d aborts its communicator", b->rank);
    b->nccl.comm_abort(comm);
}

/* Waits, bounded, until what was issued has ended. False: it has not. */
static bool drain(cd_gpu_backend *b)
{
    cd_patience patience = {.deadline = cd_deadline_after_ns(DRAIN_NS), .cause = b->team->cause, .yields = 1};
    cd_waiter waiter = cd_waiter_start(&patience);
    cd_event *oldest;
    while (!atomic_load(&b->broken) && (oldest = cd_gpu_events_reap(b))) {
        cd_gpu_event_unref(oldest);
        if (cd_waiter_turn(&waiter) != CD_OK)
            return false;
    }
    return !atomic_load(&b->broken) && cd_cause_check(b->team->cause) == CD_OK;
}

void cd_gpu_close_comm(cd_gpu_backend *b)
{
    if (!atomic_load(&b->comm))
        return;
    cd_error kept = *cd_last_error();
    bool good = drain(b);
    if (good) {
        cd_patience patience = {.deadline = cd_deadline_after_ns(FINALIZE_NS), .cause = b->team->cause, .yields = 1};
        cd_nccl_comm comm = atomic_load(&b->comm);
        good = cd_gpu_settle(b, comm, b->nccl.comm_finalize(comm), "closing", &patience) == CD_OK;
        if (good && (comm = atomic_exchange(&b->comm, 0)))
            b->nccl.comm_destroy(comm);
    }
    if (!good)
        cd_gpu_abort_comm(b);
    cd_fail_with(&kept);
}
