/* The communicator: meeting, creating, ending. */
#include "backend/gpu_impl.h"

#include "base/host.h"
#include "base/log.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Where NCCL cannot raise the flag alone, a caller that is inside has this long to come out before all is freed under it. */
#define ABORT_GRACE_NS CD_NS_PER_S
/* Work that is still queued when a group is closed may end within this time; a dead peer ends the wait at once. */
#define DRAIN_NS (10 * CD_NS_PER_S)
#define FINALIZE_NS (800 * CD_NS_PER_MS)
/* The watch raises a flag within one of its looks (20 ms). */
#define RAISE_NS CD_NS_PER_S

/* What a rank tells the others; crosses processes of one build. */
typedef struct {
    int32_t status; /* cd_status of this rank's own preparation */
    int32_t nccl_version;
    int32_t gpu_index;
    int32_t parent_idle; /* see is_idle */
    int32_t may_share;   /* see shares_gpus */
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
    if (result == CD_NCCL_SUCCESS)
        return CD_OK;
    /* What NCCL says of a call that the abort ended explains nothing. */
    return atomic_load_explicit(&b->aborted, memory_order_acquire) ? cd_gpu_cause(b) : cd_nccl_fail(&b->nccl, comm, result, what);
}

/* Whether NCCL was told to let ranks share a GPU, and is one that can. It reads the number as strtoll does. */
static bool shares_gpus(const cd_nccl *nccl)
{
    const char *told = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    return nccl->version >= CD_NCCL_SHARED_GPU_SINCE && told && strtoll(told, 0, 0) != 0;
}

static cd_status check_own_gpus(const cd_gpu_backend *b, const card *cards)
{
    for (int i = 0; i < b->world; i++)
        for (int j = i + 1; j < b->world; j++)
            if (memcmp(&cards[i].uuid, &cards[j].uuid, sizeof cards[i].uuid) == 0 &&
                !(cards[i].may_share && cards[j].may_share))
                return cd_fail_rank(CD_BAD_ARGUMENT, cd_gpu_rank(b, j),
                                    "ranks %d and %d both use the GPU at %s of %s (their device %d and %d): NCCL needs one "
                                    "GPU a rank; name it by device_id or select it before the first collective (NCCL 2.30 and "
                                    "later can share one where NCCL_MULTI_RANK_GPU_ENABLE=1 is set on all ranks)",
                                    cd_gpu_rank(b, i), cd_gpu_rank(b, j), cards[i].pci, cards[i].host, cards[i].gpu_index,
                                    cards[j].gpu_index);
    return CD_OK;
}

static cd_status check_cards(const cd_gpu_backend *b, const card *cards)
{
    for (int i = 0; i < b->world; i++)
        if (cards[i].status != CD_OK)
            return cd_fail_rank(CD_UNSUPPORTED, cd_gpu_rank(b, i), "rank %d on %s cannot take part: %s", cd_gpu_rank(b, i),
                                cards[i].host, cards[i].text);
    for (int i = 1; i < b->world; i++)
        if (cards[i].nccl_version != cards[0].nccl_version)
            return cd_fail_rank(CD_UNSUPPORTED, cd_gpu_rank(b, i),
                                "rank %d has NCCL %d, rank %d has %d: all ranks need the same (CDIST_NCCL_LIB can name it)",
                                cd_gpu_rank(b, 0), cards[0].nccl_version, cd_gpu_rank(b, i), cards[i].nccl_version);
    return check_own_gpus(b, cards);
}

/* Whether, as far as this rank knows, a communicator can be made from the parent's: that is there, on the same GPU, and nothing
 * runs on it — a rank that waits in the parent's stream for one that waits in the making would wait for ever. */
static bool is_idle(const cd_gpu_backend *b, cd_gpu_backend *parent)
{
    if (!parent || !atomic_load(&parent->comm) || atomic_load(&parent->broken) || atomic_load(&parent->grouping) ||
        atomic_load(&parent->team->cause->state) != CD_CAUSE_NONE || parent->gpu.index != b->gpu.index)
        return false;
    return !parent->base.ops->is_busy(&parent->base);
}

static void fill_card(cd_gpu_backend *b, cd_gpu_backend *parent, cd_status prepared, card *mine)
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
    mine->parent_idle = is_idle(b, parent);
    mine->may_share = shares_gpus(&b->nccl);
    mine->uuid = b->gpu.uuid;
    memcpy(mine->pci, b->gpu.pci, sizeof mine->pci);
}

/* How the communicator comes to be. Members alone take part, so: all ranks of the parent can split it (into one part), some can
 * shrink it if they keep its order; ncclCommSplit into several parts would need every rank of the parent at the same time. */
typedef enum { FRESH, SPLIT, SHRINK } way;

/* From the cards, which are the same for all. An older NCCL, whose calls do not block, would still write to a venture that was
 * given up. */
static way choose_way(const cd_gpu_backend *b, const cd_backend_env *env, const card *cards)
{
    if (b->nccl.version < CD_NCCL_GROUP_ABORT_SINCE)
        return FRESH;
    for (int i = 0; i < b->world; i++)
        if (!cards[i].parent_idle)
            return FRESH;
    if (b->world == ((const cd_gpu_backend *)env->parent)->world)
        return SPLIT;
    bool rising = b->nccl.comm_shrink != 0;
    for (int i = 1; i < b->world; i++)
        rising = rising && env->parent_ranks[i - 1] < env->parent_ranks[i];
    return rising ? SHRINK : FRESH;
}

/* Exchanges cards even when this rank cannot take part: the others must learn it. */
static cd_status meet(cd_gpu_backend *b, const cd_backend_env *env, cd_status prepared, const cd_patience *patience,
                      cd_nccl_id *id, way *way_p)
{
    card mine, *cards = calloc((size_t)b->world, sizeof *cards);
    if (!cards)
        return cd_fail(CD_NO_MEMORY, "no memory for %d cards", b->world);
    fill_card(b, (cd_gpu_backend *)env->parent, prepared, &mine);
    cd_error own = *cd_last_error();
    cd_status status = env->exchange(env->exchange_ctx, &mine, cards, sizeof mine, patience);
    if (mine.status != CD_OK)
        status = cd_fail_with(&own);
    else if (status == CD_OK)
        status = check_cards(b, cards);
    *id = cards[0].id;
    if (status == CD_OK)
        *way_p = choose_way(b, env, cards);
    free(cards);
    return status;
}

/* A communicator on its way out. Freeing it gives GPU memory back, for which the driver waits until other work on the GPU has
 * ended, also of others: that is done in a thread of its own, which may be left. */
typedef struct {
    cd_gpu_backend *b; /* held */
    cd_nccl_comm comm;
    _Atomic bool over; /* no call is inside any more */
} burial;

/* A call on a communicator whose abort flag may be raised while the call goes on. */
typedef struct {
    cd_gpu_backend *b, *parent; /* parent: made from */
    cd_nccl_id id;
    way way;
    const int *members; /* their ranks in the parent */
    cd_patience patience;         /* deadline and cause alone: another thread's idle callback is not ours to call */
    _Atomic(cd_nccl_comm) comm;   /* NCCL stores it early in its creation */
    _Atomic bool over;
    bool begun;                   /* a call that makes it from the parent */
    burial *burial;               /* what `undertaker` is at; NULL: not begun */
    cd_gpu_errand_state *undertaker;
    bool raised;                  /* there was no thread for that: the flag, in a group that is open in the caller's thread */
} venture;

static venture venture_of(cd_gpu_backend *b, const cd_patience *patience)
{
    return (venture){.b = b, .patience = {.deadline = patience->deadline, .cause = b->team->cause, .yields = 1}};
}

/* Raises the abort flag without freeing: NCCL does that when the group ends. */
static bool raise_flag(cd_gpu_backend *b, cd_nccl_comm comm)
{
    if (b->nccl.version < CD_NCCL_GROUP_ABORT_SINCE || b->nccl.group_start() != CD_NCCL_SUCCESS)
        return false;
    b->nccl.comm_abort(comm);
    return true;
}

/* Raises the flag and frees, which NCCL wants from one thread, when the call has come out. */
static cd_status bury_main(void *arg)
{
    burial *d = arg;
    cd_gpu_backend *b = d->b;
    bool pushed = false, entered = cd_gpu_enter(&b->gpu, &pushed) == CD_OK, raised = entered && raise_flag(b, d->comm);
    /* Release: who sees it comes after NCCL's last look at what is made from this communicator. */
    if (raised)
        atomic_store_explicit(&b->raised, 1, memory_order_release);
    while (!atomic_load_explicit(&d->over, memory_order_acquire))
        cd_sleep_ns(CD_NS_PER_MS);
    if (raised)
        b->nccl.group_end();
    else if (entered)
        b->nccl.comm_abort(d->comm);
    if (entered)
        cd_gpu_leave(&b->gpu, pushed);
    cd_gpu_backend_unref(b);
    free(d);
    return CD_OK;
}

static bool bury(venture *v, cd_nccl_comm comm)
{
    burial *d = malloc(sizeof *d);
    if (!d)
        return false;
    *d = (burial){.b = v->b, .comm = comm};
    atomic_fetch_add_explicit(&v->b->refs, 1, memory_order_relaxed);
    if (cd_gpu_errand_begin(bury_main, d, &v->undertaker) == CD_OK) {
        v->burial = d;
        return true;
    }
    cd_gpu_backend_unref(v->b);
    free(d);
    return false;
}

static void stop_venture(void *arg)
{
    venture *v = arg;
    cd_nccl_comm comm;
    atomic_store_explicit(&v->b->aborted, true, memory_order_release);
    while (!(comm = atomic_load(&v->comm)) && !atomic_load_explicit(&v->over, memory_order_acquire))
        cd_sleep_ns(CD_NS_PER_MS);
    if (comm && !bury(v, comm))
        v->raised = raise_flag(v->b, comm);
}

/* Frees the communicator of a venture that failed and is over; what takes longer than a farewell goes on by itself. */
static void drop_venture(venture *v)
{
    cd_error kept = *cd_last_error();
    cd_patience patience = {.deadline = cd_deadline_after_ns(CD_GPU_FAREWELL_NS)};
    cd_nccl_comm comm = atomic_load(&v->comm);
    if (v->raised) {
        v->b->nccl.group_end();
    } else if (v->burial || (comm && bury(v, comm))) {
        /* Release: it frees after the call's last use, itself too. */
        atomic_store_explicit(&v->burial->over, true, memory_order_release);
        (void)cd_gpu_errand_end(v->undertaker, 0, &patience);
    }
    cd_fail_with(&kept);
}

static cd_status create(venture *v)
{
    cd_gpu_backend *b = v->b;
    cd_nccl_config config = cd_nccl_config_make(&b->nccl);
    cd_nccl_comm *comm_p = (cd_nccl_comm *)&v->comm;
    cd_nccl_result result = b->nccl.comm_init(comm_p, b->world, v->id, b->rank, &config);
    return cd_gpu_settle(b, atomic_load(&v->comm), result, "connecting", &v->patience);
}

static cd_status create_main(void *arg)
{
    venture *v = arg;
    bool pushed;
    cd_status status = cd_gpu_enter(&v->b->gpu, &pushed);
    if (status == CD_OK) {
        status = create(v);
        cd_gpu_leave(&v->b->gpu, pushed);
    }
    atomic_store_explicit(&v->over, true, memory_order_release);
    return status;
}

static cd_nccl_result shrink(venture *v, cd_nccl_comm from, cd_nccl_config *config)
{
    cd_gpu_backend *p = v->parent;
    int *left_out = malloc((size_t)p->world * sizeof *left_out), count = 0, next = 0;
    if (!left_out)
        return CD_NCCL_INVALID_ARGUMENT;
    for (int rank = 0; rank < p->world; rank++) {
        if (next < v->b->world && v->members[next] == rank)
            next++;
        else
            left_out[count++] = rank;
    }
    cd_nccl_result result = p->nccl.comm_shrink(from, left_out, count, (cd_nccl_comm *)&v->comm, config, CD_NCCL_SHRINK_DEFAULT);
    free(left_out);
    return result;
}

static cd_status derive_main(void *arg)
{
    venture *v = arg;
    cd_gpu_backend *p = v->parent;
    cd_nccl_config config = cd_nccl_config_make(&p->nccl);
    cd_nccl_comm from = atomic_load(&p->comm), *comm_p = (cd_nccl_comm *)&v->comm;
    bool pushed;
    if (!from)
        return cd_gpu_cause(p);
    CD_TRY(cd_gpu_enter(&p->gpu, &pushed));
    v->begun = true;
    cd_nccl_result result =
        v->way == SPLIT ? p->nccl.comm_split(from, 0, v->b->rank, comm_p, &config) : shrink(v, from, &config);
    cd_status status = cd_gpu_settle(p, from, result, v->way == SPLIT ? "ncclCommSplit" : "ncclCommShrink", &v->patience);
    if (status == CD_OK)
        status = cd_gpu_settle(v->b, atomic_load(&v->comm), CD_NCCL_IN_PROGRESS, "connecting", &v->patience);
    cd_gpu_leave(&p->gpu, pushed);
    return status;
}

/* NCCL leaves the making of a communicator when the one that it is made from is aborted: the parent's group ends too. */
static void stop_derive(void *arg)
{
    venture *v = arg;
    cd_error why = *cd_last_error();
    why.code = cd_status_is_sticky(why.code) ? why.code : CD_ABORTED;
    cd_cause_publish(v->parent->team->cause, &why);
    cd_gpu_watch_abort(v->parent);
}

static cd_status name_late(cd_status status, const char *what)
{
    if (status != CD_TIMED_OUT)
        return status;
    return cd_fail(CD_TIMED_OUT, "%s: NCCL was still waiting for another rank when the deadline passed", what);
}

/* NCCL hands out the communicator of a making that failed, to be aborted, and the one that it is made from keeps a pointer to its
 * abort flag: that one's flag is raised first, which is when NCCL looks there last. Where that does not come, it is left. */
static void drop_derived(venture *v)
{
    cd_error kept = *cd_last_error();
    cd_patience patience = {.deadline = cd_deadline_after_ns(RAISE_NS)};
    if (!v->begun)
        return;
    stop_derive(v);
    if (cd_wait_at_least(&v->parent->raised, 1, -1, &patience) == CD_OK)
        drop_venture(v);
    cd_fail_with(&kept);
}

/* The parent counts as inside for the time: its abort, which ends the making, frees it afterwards. */
static cd_status derive(venture *v, const cd_patience *patience)
{
    cd_gpu_backend *p = v->parent;
    CD_TRY(cd_gpu_go_in(p, CD_BARRIER, patience->deadline, patience));
    cd_status status = cd_gpu_errand(derive_main, stop_derive, v, patience);
    if (status != CD_OK)
        drop_derived(v);
    cd_gpu_come_out(p);
    return status;
}

cd_status cd_gpu_connect(cd_gpu_backend *b, const cd_backend_env *env, cd_status prepared, const cd_patience *patience)
{
    venture v = venture_of(b, patience);
    CD_TRY(meet(b, env, prepared, patience, &v.id, &v.way));
    cd_patience own = *patience;
    if (!own.cause)
        own.cause = b->team->cause;
    v.parent = (cd_gpu_backend *)env->parent;
    v.members = env->parent_ranks;
    cd_status status;
    if (v.way != FRESH) {
        status = name_late(derive(&v, &own), v.way == SPLIT ? "ncclCommSplit" : "ncclCommShrink");
    } else {
        status = name_late(cd_gpu_errand(create_main, stop_venture, &v, &own), "connecting");
        if (status != CD_OK)
            drop_venture(&v);
    }
    if (status == CD_OK)
        atomic_store(&b->comm, atomic_load(&v.comm));
    return status;
}

/* Waits until nobody is inside NCCL, at most until `deadline` or until the watch is to stop: then there are no callers. */
static void wait_outside(const cd_gpu_backend *b, cd_deadline deadline)
{
    while (atomic_load(&b->inside_until) && !atomic_load(&b->watch_stop) && !cd_deadline_passed(deadline))
        cd_sleep_ns(CD_NS_PER_MS);
}

void cd_gpu_abort_comm(cd_gpu_backend *b)
{
    /* Release: whoever sees `aborted` does not take a later event for a success. */
    atomic_store_explicit(&b->aborted, true, memory_order_release);
    cd_nccl_comm comm = atomic_exchange(&b->comm, 0);
    if (!comm)
        return;
    cd_log_about("gpu", "rank %d aborts its communicator", b->rank);
    if (raise_flag(b, comm)) {
        /* Release: who sees it comes after NCCL's last look at what is made from this communicator. */
        atomic_store_explicit(&b->raised, 1, memory_order_release);
        wait_outside(b, CD_NEVER);
        b->nccl.group_end();
    } else {
        wait_outside(b, cd_deadline_after_ns(ABORT_GRACE_NS));
        b->nccl.comm_abort(comm);
    }
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

static cd_status finalize_main(void *arg)
{
    venture *v = arg;
    bool pushed;
    CD_TRY(cd_gpu_enter(&v->b->gpu, &pushed));
    cd_nccl_comm comm = atomic_load(&v->comm);
    cd_status status = cd_gpu_settle(v->b, comm, v->b->nccl.comm_finalize(comm), "closing", &v->patience);
    cd_gpu_leave(&v->b->gpu, pushed);
    return status;
}

static cd_status destroy_main(void *arg)
{
    burial *d = arg;
    bool pushed;
    if (cd_gpu_enter(&d->b->gpu, &pushed) == CD_OK) {
        d->b->nccl.comm_destroy(d->comm);
        cd_gpu_leave(&d->b->gpu, pushed);
    }
    cd_gpu_backend_unref(d->b);
    free(d);
    return CD_OK;
}

/* Goes on by itself where it takes longer than `patience`. */
static void destroy(cd_gpu_backend *b, cd_nccl_comm comm, const cd_patience *patience)
{
    burial *d = malloc(sizeof *d);
    if (!d)
        return; /* its memory ends with the process */
    *d = (burial){.b = b, .comm = comm};
    atomic_fetch_add_explicit(&b->refs, 1, memory_order_relaxed);
    if (cd_gpu_errand(destroy_main, 0, d, patience) == CD_NO_MEMORY) {
        cd_gpu_backend_unref(b);
        free(d);
    }
}

void cd_gpu_close_comm(cd_gpu_backend *b)
{
    if (!atomic_load(&b->comm))
        return;
    cd_error kept = *cd_last_error();
    bool good = drain(b);
    if (good) {
        cd_patience patience = {.deadline = cd_deadline_after_ns(FINALIZE_NS), .cause = b->team->cause};
        venture v = venture_of(b, &patience);
        atomic_store(&v.comm, atomic_exchange(&b->comm, 0));
        if (cd_gpu_errand(finalize_main, stop_venture, &v, &patience) == CD_OK)
            destroy(b, atomic_load(&v.comm), &patience);
        else
            drop_venture(&v);
    } else {
        venture v = {.b = b};
        cd_log_about("gpu", "rank %d aborts its communicator", b->rank);
        atomic_store_explicit(&b->aborted, true, memory_order_release);
        atomic_store(&v.comm, atomic_exchange(&b->comm, 0));
        drop_venture(&v);
    }
    cd_fail_with(&kept);
}
