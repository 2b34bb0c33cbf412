#include "base/log.h"
#include "group/work_impl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* How often each set of ranks was made a group here: members count alike, whatever other groups each of them made. */
struct cd_set_count {
    struct cd_set_count *next;
    uint64_t key[2];
    uint64_t count;
};

static size_t gone_bytes(int ranks)
{
    size_t bytes = (size_t)ranks * sizeof(_Atomic uint32_t);
    return (bytes + CD_LINE - 1) & ~(size_t)(CD_LINE - 1);
}

size_t cd_group_memory_bytes(int ranks)
{
    return gone_bytes(ranks) + cd_shm_team_bytes(ranks);
}

static uint64_t mix(uint64_t hash, uint64_t word)
{
    hash = (hash ^ word) * UINT64_C(0x9E3779B97F4A7C15);
    return hash ^ (hash >> 31);
}

static void key_of(const int *ranks, int count, uint64_t occurrence, uint64_t key[2])
{
    key[0] = mix(UINT64_C(0x243F6A8885A308D3), occurrence);
    key[1] = mix(UINT64_C(0x13198A2E03707344), ~occurrence);
    for (int i = 0; i < count; i++) {
        key[0] = mix(key[0], (uint64_t)ranks[i] + 1);
        key[1] = mix(key[1], (uint64_t)ranks[i] * 31 + 7);
    }
}

static cd_status next_occurrence(cd_world *w, const int *ranks, int count, uint64_t *out)
{
    uint64_t key[2];
    key_of(ranks, count, UINT64_MAX, key);
    cd_world_lock_groups(w);
    struct cd_set_count *set = w->sets;
    while (set && (set->key[0] != key[0] || set->key[1] != key[1]))
        set = set->next;
    if (!set && (set = calloc(1, sizeof *set))) {
        set->key[0] = key[0];
        set->key[1] = key[1];
        set->next = w->sets;
        w->sets = set;
    }
    if (set)
        *out = set->count++;
    cd_world_unlock_groups(w);
    return set ? CD_OK : cd_fail(CD_NO_MEMORY, "no memory for a group");
}

void cd_sets_free(cd_world *w)
{
    while (w->sets) {
        struct cd_set_count *next = w->sets->next;
        free(w->sets);
        w->sets = next;
    }
}

static cd_status check_members(const cd_world *w, const int *ranks, int count)
{
    bool here = false;
    for (int i = 0; i < count; i++) {
        if (ranks[i] < 0 || ranks[i] >= w->world)
            return cd_fail(CD_BAD_ARGUMENT, "Rank %d is out of range. Valid ranks are 0 to %d (world_size=%d)", ranks[i],
                           w->world - 1, w->world);
        for (int j = 0; j < i; j++)
            if (ranks[j] == ranks[i])
                return cd_fail(CD_BAD_ARGUMENT, "rank %d stands twice in the list of ranks", ranks[i]);
        here = here || ranks[i] == w->rank;
        if (atomic_load_explicit(&w->gone[ranks[i]], memory_order_acquire))
            return cd_fail_rank(CD_PEER_LOST, ranks[i], "new group: rank %d is gone", ranks[i]);
    }
    return here ? CD_OK : cd_fail(CD_BAD_ARGUMENT, "rank %d is not a member of the group it makes", w->rank);
}

static cd_status allocate(cd_world *w, const int *ranks, int count, cd_group **out)
{
    cd_group *g = calloc(1, sizeof *g);
    if (!g)
        return cd_fail(CD_NO_MEMORY, "no memory for a group");
    atomic_init(&g->refs, 1);
    g->world = cd_world_retain(w);
    g->alive = w->alive;
    g->page = w->page;
    g->size = count;
    g->segment.fd = -1;
    g->cause = &g->own_cause;
    pthread_mutex_init(&g->device_lock, 0);
    pthread_mutex_init(&g->queue_lock, 0);
    pthread_mutex_init(&g->orphans_lock, 0);
    pthread_mutex_init(&g->spares_lock, 0);
    pthread_cond_init(&g->queue_filled, 0);
    g->world_ranks = malloc((size_t)count * sizeof *g->world_ranks);
    g->index_of = malloc((size_t)w->world * sizeof *g->index_of);
    if (!g->world_ranks || !g->index_of) {
        cd_group_release(g);
        return cd_fail(CD_NO_MEMORY, "no memory for a group of %d", count);
    }
    for (int r = 0; r < w->world; r++)
        g->index_of[r] = -1;
    for (int i = 0; i < count; i++) {
        g->world_ranks[i] = ranks[i];
        g->index_of[ranks[i]] = i;
        g->spans_hosts = g->spans_hosts || w->host_of[ranks[i]] != w->host_of[w->rank];
    }
    g->rank = g->index_of[w->rank];
    *out = g;
    return CD_OK;
}

/* The words of a shared group lie before its team in one piece of memory. */
static cd_status use_memory(cd_group *g, void *memory)
{
    g->gone = memory;
    const cd_arena *arena = g->world->host.arena ? g->world->arena : 0;
    CD_TRY(cd_shm_team_open((char *)memory + gone_bytes(g->size), g->size, g->rank, arena, &g->shm));
    g->cause = cd_shm_team_cause(g->shm);
    return CD_OK;
}

static cd_status use_own_words(cd_group *g)
{
    g->gone = calloc((size_t)g->size, sizeof *g->gone);
    return g->gone ? CD_OK : cd_fail(CD_NO_MEMORY, "no memory for a group of %d", g->size);
}

static cd_status share_memory(cd_group *g, const cd_patience *patience)
{
    cd_world *w = g->world;
    cd_handout_key key = {.key = {g->key[0], g->key[1]}};
    memcpy(key.generation, w->generation, sizeof key.generation);
    if (g->rank == 0) {
        CD_TRY(cd_segment_create(cd_group_memory_bytes(g->size), &g->segment));
        CD_TRY(cd_handout_offer(w->handout, &key, g->segment.fd));
        cd_monitor_wake(w);
    } else {
        int maker = g->world_ranks[0];
        cd_status status = cd_handout_fetch(w->members[maker].nonce, &key, patience, &g->segment);
        if (status == CD_IO || status == CD_NOT_FOUND || status == CD_PEER_LOST)
            return cd_fail_rank(CD_PEER_LOST, maker, "rank %d did not hand out the shared memory: %s", maker,
                                cd_last_error()->text);
        if (status == CD_TIMED_OUT)
            return cd_fail_rank(CD_TIMED_OUT, maker, "rank %d, which makes the shared memory, did not come before the deadline",
                                maker);
        CD_TRY(status);
    }
    return use_memory(g, g->segment.base);
}

static cd_status open_cpu(cd_group *g)
{
    cd_world *w = g->world;
    g->template = cd_patience_until(CD_NEVER, g->shm ? g->size : 1);
    g->template.cause = g->cause;
    g->template.gone = g->gone;
    g->template.world_ranks = g->world_ranks;
    g->context = g->key[0] & ~UINT64_C(1);
    g->team = (cd_team){.rank = g->rank, .world = g->size, .world_ranks = g->world_ranks, .shm = g->shm, .mesh = w->mesh,
                        .context = g->context, .cause = g->cause, .gone = g->gone};
    cd_backend_env env = {.team = &g->team, .exchange = cd_group_exchange, .exchange_ctx = g, .device_index = -1};
    return g->size == 1 ? cd_backend_open_self(&env, &g->cpu) : cd_backend_open_cpu(&env, &g->cpu);
}

/* The list holds the group, so that the monitor and the end of the world find no group there that its owner has let go. */
static void enlist(cd_group *g)
{
    cd_world_lock_groups(g->world);
    g->next = g->world->groups;
    g->world->groups = cd_group_retain(g);
    cd_world_unlock_groups(g->world);
}

cd_status cd_group_open_default(cd_world *w, cd_group **out)
{
    int *ranks = malloc((size_t)w->world * sizeof *ranks);
    if (!ranks)
        return cd_fail(CD_NO_MEMORY, "no memory for a group of %d", w->world);
    for (int r = 0; r < w->world; r++)
        ranks[r] = r;
    cd_group *g = 0;
    cd_status status = allocate(w, ranks, w->world, &g);
    if (status == CD_OK) {
        key_of(ranks, w->world, UINT64_MAX - 1, g->key);
        g->timeout_ns = w->timeout_ns;
        status = w->world > 1 && !g->spans_hosts ? use_memory(g, w->host.team) : use_own_words(g);
    }
    if (status == CD_OK)
        status = open_cpu(g);
    free(ranks);
    if (status != CD_OK) {
        cd_group_release(g);
        return status;
    }
    enlist(g);
    *out = g;
    return CD_OK;
}

static void describe_wish(char *text, size_t bytes, const int *ranks, int count)
{
    size_t used = (size_t)snprintf(text, bytes, "new_group([");
    for (int i = 0; i < count && used < bytes - 8; i++)
        used += (size_t)snprintf(text + used, bytes - used, "%s%d", i ? ", " : "", ranks[i]);
    if (used < bytes - 3)
        snprintf(text + used, bytes - used, "])");
}

static void unexpect(cd_group *g)
{
    cd_world_lock_groups(g->world);
    cd_group **link = &g->world->expected;
    while (*link != g)
        link = &(*link)->next;
    *link = g->next;
    g->next = NULL;
    cd_world_unlock_groups(g->world);
}

/* With the lock of groups. */
static void abort_expected(cd_world *w, const cd_error *error)
{
    for (cd_group *g = w->expected; g; g = g->next)
        cd_cause_publish(g->cause, error);
}

/* An abort of the default group ends the making of others too: from here on, a wait for their members. */
static cd_status expect(cd_group *g)
{
    cd_world *w = g->world;
    cd_world_lock_groups(w);
    g->next = w->expected;
    w->expected = g;
    cd_world_unlock_groups(w);
    cd_status status = cd_cause_check(w->group->cause); /* after it is in the list: an abort is seen here or finds it there */
    if (status != CD_OK)
        unexpect(g);
    return status;
}

/* All members are here once this returns. Whoever is missing is named, with what it does instead where that can be seen. */
static cd_status meet_members(cd_group *g, const char *wish, const cd_patience *patience)
{
    cd_op op = {.kind = CD_BARRIER, .dtype = CD_BYTES, .root = -1};
    cd_patience own = *patience;
    if (g->size == 1)
        return CD_OK;
    CD_TRY(expect(g));
    cd_status status = cd_group_run(g, &op, &own);
    unexpect(g);
    return status == CD_OK ? CD_OK : cd_fail_prefix("%s: ", wish);
}

static cd_status explain(cd_group *g, const char *wish)
{
    cd_world *w = g->world;
    cd_error why = *cd_last_error();
    if (why.code != CD_TIMED_OUT || !w->host.rows)
        return why.code;
    for (int i = 0; i < g->size; i++) {
        int r = g->world_ranks[i];
        if (r == w->rank || w->host_of[r] != w->host_of[w->rank])
            continue;
        char other[CD_WANTING_BYTES];
        memcpy(other, w->host.rows[w->local_of[r]].wanting, sizeof other);
        other[sizeof other - 1] = 0;
        if (other[0] && strcmp(other, wish) != 0)
            return cd_fail_rank(CD_TIMED_OUT, r, "members disagree: rank %d waits in %s, rank %d waits in %s", w->rank, wish, r,
                                other);
    }
    return cd_fail_rank(CD_TIMED_OUT, why.rank, "%s did not get all its members in time: %s", wish, why.text);
}

static cd_status make(cd_world *w, const int *ranks, int count, const cd_patience *patience, cd_group *g)
{
    char wish[CD_WANTING_BYTES] = {0};
    describe_wish(wish, sizeof wish, ranks, count);
    char *shown = w->host.rows ? w->host.rows[w->local].wanting : 0;
    if (shown)
        memcpy(shown, wish, sizeof wish);
    cd_patience until_abort = *patience;
    until_abort.cause = w->group->cause;
    cd_status status = count > 1 && !g->spans_hosts ? share_memory(g, &until_abort) : use_own_words(g);
    if (status == CD_OK)
        status = open_cpu(g);
    if (status == CD_OK)
        status = meet_members(g, wish, patience);
    if (status != CD_OK)
        return explain(g, wish);
    if (shown)
        shown[0] = 0;
    if (g->rank == 0 && g->segment.base) {
        cd_handout_key key = {.key = {g->key[0], g->key[1]}};
        memcpy(key.generation, w->generation, sizeof key.generation);
        cd_handout_withdraw(w->handout, &key);
    }
    return CD_OK;
}

cd_status cd_group_create(cd_world *w, const int *ranks, int count, uint64_t timeout_ns, const cd_patience *patience,
                          cd_group **out)
{
    if (cd_world_forked(w))
        return cd_world_refuse_fork(w);
    cd_status joined = check_members(w, ranks, count);
    if (joined != CD_OK)
        return joined == CD_PEER_LOST ? cd_group_first_cause(w->group, joined) : joined;
    uint64_t occurrence = 0;
    CD_TRY(next_occurrence(w, ranks, count, &occurrence));
    cd_group *g = 0;
    CD_TRY(allocate(w, ranks, count, &g));
    key_of(ranks, count, occurrence, g->key);
    g->timeout_ns = timeout_ns;
    cd_status status = make(w, ranks, count, patience, g);
    if (status != CD_OK) {
        cd_error why = *cd_last_error();
        if (g->rank == 0 && w->handout && g->segment.base) {
            cd_handout_key key = {.key = {g->key[0], g->key[1]}};
            memcpy(key.generation, w->generation, sizeof key.generation);
            cd_handout_withdraw(w->handout, &key);
        }
        cd_group_release(g);
        cd_fail_with(&why);
        return why.code == CD_PEER_LOST ? cd_group_first_cause(w->group, why.code) : why.code;
    }
    enlist(g);
    *out = g;
    return CD_OK;
}

/* ---- the end ---- */

void cd_group_drain(cd_group *g, const cd_patience *patience)
{
    if (cd_world_forked(g->world) || atomic_load_explicit(&g->closed, memory_order_acquire))
        return;
    cd_patience own = *patience;
    own.cause = g->cause;
    own.spin = own.yields = 0; /* the worker needs the core more */
    cd_mesh *mesh = g->world->mesh;
    cd_waiter waiter = cd_waiter_start(&own);
    cd_error before = *cd_last_error();
    /* Acquire: pairs with the release after an operation's end. */
    while (atomic_load_explicit(&g->pending, memory_order_acquire) || (mesh && cd_mesh_owes(mesh)) || cd_group_is_gpu_busy(g))
        if (cd_waiter_turn(&waiter) != CD_OK)
            break;
    cd_fail_with(&before);
}

void cd_group_close(cd_group *g)
{
    if (!g || atomic_exchange_explicit(&g->closed, true, memory_order_acq_rel))
        return;
    if (!cd_world_forked(g->world)) {
        /* Release: what this rank posted before is visible to who sees that it left. Only ranks that still wait for it fail. */
        atomic_store_explicit(&g->gone[g->rank], 1, memory_order_release);
        cd_queue_stop(g);
        cd_group_abort_gpu(g);
        cd_p2p_close(g);
        if (g->world->mesh) {
            cd_mesh_forget(g->world->mesh, g->context);
            cd_mesh_forget(g->world->mesh, g->context + 1);
        }
    }
    cd_world_lock_groups(g->world);
    cd_group **link = &g->world->groups;
    while (*link && *link != g)
        link = &(*link)->next;
    bool listed = *link != NULL;
    if (listed)
        *link = g->next;
    cd_world_unlock_groups(g->world);
    if (listed)
        cd_group_release(g); /* not the last: the caller has one */
}

/* In a forked child: another thread of the parent may have been about to take a group that it closed off the list. */
static void forget_all(cd_world *w)
{
    while (w->groups) {
        cd_group *g = w->groups;
        w->groups = g->next;
        atomic_store_explicit(&g->closed, true, memory_order_relaxed); /* the one thread there is */
        cd_group_release(g);
    }
}

void cd_groups_close_all(cd_world *w)
{
    if (cd_world_forked(w))
        forget_all(w);
    for (;;) {
        cd_world_lock_groups(w);
        cd_group *g = w->groups;
        if (g)
            cd_group_retain(g);
        cd_world_unlock_groups(w);
        if (!g)
            return;
        cd_group_close(g);
        cd_group_release(g);
    }
}

cd_group *cd_group_retain(cd_group *g)
{
    atomic_fetch_add_explicit(&g->refs, 1, memory_order_relaxed);
    return g;
}

void cd_group_release(cd_group *g)
{
    if (!g || atomic_fetch_sub_explicit(&g->refs, 1, memory_order_acq_rel) != 1)
        return;
    if (g->cpu)
        g->cpu->ops->free(g->cpu);
    cd_backend *gpu = cd_group_gpu(g);
    bool forked = cd_world_forked(g->world);
    if (gpu && !forked) /* CUDA is the parent's, and so are the threads that closing would wait for */
        gpu->ops->free(gpu);
    if (!g->shm)
        free(g->gone);
    cd_shm_team_free(g->shm);
    cd_segment_free(&g->segment);
    free(g->world_ranks);
    free(g->index_of);
    pthread_mutex_destroy(&g->device_lock);
    pthread_mutex_destroy(&g->queue_lock);
    pthread_mutex_destroy(&g->orphans_lock);
    if (!forked) /* a thread that is not there may have been at it */
        cd_spares_free(g);
    pthread_mutex_destroy(&g->spares_lock);
    if (!forked) /* for the parent's worker, which waits there, it would wait for ever */
        pthread_cond_destroy(&g->queue_filled);
    cd_world *world = g->world;
    free(g);
    cd_world_release(world);
}

void cd_group_abort(cd_group *g, const cd_error *error)
{
    /* The cause lies in memory that the other ranks read: for the parent of a forked child all is well. */
    if (cd_world_forked(g->world) || !cd_cause_publish(g->cause, error))
        return;
    if (g == g->world->group) {
        cd_world_lock_groups(g->world);
        abort_expected(g->world, error);
        cd_world_unlock_groups(g->world);
    }
    cd_group_abort_gpu(g);
    if (g->spans_hosts) {
        cd_notice notice = {.context = g->context, .rank = error->rank < 0 ? g->world->rank : error->rank,
                            .code = (int32_t)error->code};
        memcpy(notice.text, error->text, sizeof notice.text);
        cd_world_tell(g->world, CD_CONTROL_ABORT, &notice, -1);
    }
}

void cd_groups_peer_gone(cd_world *w, int rank, const cd_error *lost)
{
    cd_world_lock_groups(w);
    for (cd_group *g = w->groups; g; g = g->next) {
        int index = g->index_of[rank];
        if (index < 0)
            continue;
        if (lost) {
            cd_cause_publish(g->cause, lost);
            cd_group_abort_gpu(g);
        }
        atomic_store_explicit(&g->gone[index], 1, memory_order_release);
    }
    cd_world_unlock_groups(w);
}

bool cd_groups_abort_context(cd_world *w, uint64_t context, const cd_error *error)
{
    bool news = true;
    cd_world_lock_groups(w);
    for (cd_group *g = w->groups; g; g = g->next)
        if (g->context == context) {
            news = cd_cause_publish(g->cause, error);
            if (g == w->group)
                abort_expected(w, error);
            cd_group_abort_gpu(g);
        }
    cd_world_unlock_groups(w);
    return news;
}

/* ---- questions ---- */

int cd_group_rank(const cd_group *g)
{
    return g->rank;
}

int cd_group_size(const cd_group *g)
{
    return g->size;
}

uint32_t cd_group_pending(const cd_group *g)
{
    uint32_t queued = atomic_load_explicit(&g->pending, memory_order_relaxed); /* a number for a text: orders nothing */
    bool counts_messages = g == g->world->group && g->world->mesh && !cd_world_forked(g->world);
    return queued + (counts_messages ? (uint32_t)cd_mesh_outstanding(g->world->mesh) : 0);
}

size_t cd_group_untold(const cd_group *g, char *out, size_t bytes)
{
    out[0] = 0;
    return g->world->mesh && !cd_world_forked(g->world) ? cd_mesh_untold(g->world->mesh, out, bytes) : 0;
}

void cd_group_tell_loss(const cd_group *g, int rank)
{
    if (g->world->mesh && !cd_world_forked(g->world))
        cd_mesh_tell_loss(g->world->mesh, rank);
}

const int32_t *cd_group_world_ranks(const cd_group *g)
{
    return g->world_ranks;
}

uint64_t cd_group_timeout_ns(const cd_group *g)
{
    return atomic_load_explicit(&g->timeout_ns, memory_order_relaxed);
}

void cd_group_set_timeout_ns(cd_group *g, uint64_t timeout_ns)
{
    atomic_store_explicit(&g->timeout_ns, timeout_ns, memory_order_relaxed);
}

cd_world *cd_group_world(cd_group *g)
{
    return g->world;
}

const char *cd_group_transport(const cd_group *g)
{
    return g->size == 1 ? "self" : g->shm ? "shm" : "tcp";
}

uint64_t cd_group_context(const cd_group *g)
{
    return g->context;
}

uint64_t cd_group_sequence(const cd_group *g)
{
    return g->sequence;
}
