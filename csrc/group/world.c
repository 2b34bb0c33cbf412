#include "base/host.h"
#include "base/knob.h"
#include "base/log.h"
#include "group/group_impl.h"
#include "group/world_impl.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#define ARENA_MOST (UINT64_C(64) << 30)
#define PAGE 4096

static size_t line_up(size_t bytes)
{
    return (bytes + PAGE - 1) & ~(size_t)(PAGE - 1);
}

/* Bytes of the arena of one rank: a limit of addresses, not of memory. */
static cd_status arena_bytes(size_t *bytes_p)
{
    if (!cd_knob_is("CDIST_ARENA_BYTES", "auto")) {
        uint64_t asked;
        CD_TRY(cd_knob_number("CDIST_ARENA_BYTES", &asked));
        *bytes_p = line_up(asked);
        return CD_OK;
    }
    uint64_t memory = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
    *bytes_p = line_up(memory < ARENA_MOST ? memory : ARENA_MOST);
    return CD_OK;
}

size_t cd_world_host_bytes(const cd_world *w)
{
    return line_up((size_t)w->locals * sizeof(cd_host_row)) + line_up(cd_record_pages_bytes(w->locals)) +
           line_up(cd_channels_bytes(w->locals)) + line_up(cd_group_memory_bytes(w->locals)) +
           (size_t)w->locals * w->host.arena_bytes;
}

void cd_world_limit_arena(cd_world *w)
{
    uint64_t room = cd_host_address_room();
    if (!cd_knob_is("CDIST_ARENA_BYTES", "auto") || room == UINT64_MAX)
        return;
    /* The arenas of all ranks are mapped by each: three quarters of what is left are the program's. */
    size_t most = (size_t)(room / 4 / (uint64_t)w->locals) & ~(size_t)(PAGE - 1);
    if (w->host.arena_bytes > most)
        w->host.arena_bytes = most;
}

cd_status cd_world_lay_out(cd_world *w, void *base, size_t bytes)
{
    /* Where the arenas lie is for the leader to say, which may have been told another size or had to do without. */
    w->host.arena_bytes = 0;
    size_t needed = cd_world_host_bytes(w);
    if (bytes < needed)
        return cd_fail(CD_PROTOCOL, "the host's shared memory has %zu bytes, expected %zu", bytes, needed);
    w->host.arena_bytes = (bytes - needed) / (size_t)w->locals & ~(size_t)(PAGE - 1);
    char *next = base;
    w->host.rows = (cd_host_row *)base;
    next += line_up((size_t)w->locals * sizeof(cd_host_row));
    w->host.pages = (cd_record_page *)next;
    next += line_up(cd_record_pages_bytes(w->locals));
    w->host.channels = next;
    next += line_up(cd_channels_bytes(w->locals));
    w->host.team = next;
    next += line_up(cd_group_memory_bytes(w->locals));
    w->host.arena = w->host.arena_bytes ? next : 0;
    CD_TRY(cd_arena_open(w->host.arena, w->host.arena_bytes, w->locals, w->local, &w->arena));
    w->arena->alive = w->alive;
    return CD_OK;
}

bool cd_world_forked(const cd_world *w)
{
    return w->alive && atomic_load_explicit(w->alive, memory_order_relaxed) == 0;
}

cd_status cd_world_refuse_fork(const cd_world *w)
{
    return cd_fail_rank(CD_ABORTED, w->rank,
                        "this process was forked after init_process_group: process groups do not survive fork; call "
                        "init_process_group in the child, or use cdist.multiprocessing.spawn");
}

void cd_world_lock_groups(cd_world *w)
{
    if (!cd_world_forked(w))
        pthread_mutex_lock(&w->groups_lock);
}

void cd_world_unlock_groups(cd_world *w)
{
    if (!cd_world_forked(w))
        pthread_mutex_unlock(&w->groups_lock);
}

/* A page that the kernel empties in forked children: one load tells, without getpid. */
static cd_status open_alive_page(cd_world *w)
{
    void *page = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED)
        return cd_fail_errno(CD_NO_MEMORY, errno, "no memory for a process group");
    if (madvise(page, 4096, MADV_WIPEONFORK) != 0)
        cd_log(CD_LOG_DEBUG, "this kernel cannot mark memory for fork: children are not told apart");
    atomic_store_explicit((_Atomic uint32_t *)page, 1, memory_order_relaxed);
    w->alive = page;
    return CD_OK;
}

static cd_status check_config(const cd_world_config *c)
{
    if (c->world < 1)
        return cd_fail(CD_BAD_ARGUMENT, "world_size %d: must be at least 1", c->world);
    if (c->rank < 0 || c->rank >= c->world)
        return cd_fail(CD_BAD_ARGUMENT, "rank %d is out of range: world_size is %d", c->rank, c->world);
    if (strlen(c->prefix) >= sizeof((cd_world *)0)->prefix)
        return cd_fail(CD_BAD_ARGUMENT, "the group name is longer than %zu characters", sizeof((cd_world *)0)->prefix - 1);
    return CD_OK;
}

static cd_status prepare(cd_world *w, const cd_world_config *c, cd_store *store)
{
    atomic_init(&w->refs, 1);
    w->rank = c->rank;
    w->world = c->world;
    w->timeout_ns = c->timeout_ns;
    w->force_tcp = c->force_tcp || cd_knob_is("CDIST_TRANSPORT", "tcp");
    w->data_listener = -1;
    w->deputy = -1;
    atomic_init(&w->first_gone, -1);
    w->segment.fd = -1;
    snprintf(w->prefix, sizeof w->prefix, "%s", c->prefix);
    w->has_secret = c->secret != 0;
    if (c->secret)
        memcpy(w->secret, c->secret, sizeof w->secret);
    pthread_mutex_init(&w->control_lock, 0);
    pthread_mutex_init(&w->groups_lock, 0);
    w->store = store ? cd_store_retain(store) : 0;
    size_t ranks = (size_t)c->world;
    w->members = calloc(ranks, sizeof *w->members);
    w->host_of = calloc(ranks, sizeof *w->host_of);
    w->local_of = calloc(ranks, sizeof *w->local_of);
    w->gone = calloc(ranks, sizeof *w->gone);
    w->controls = malloc(ranks * sizeof *w->controls);
    w->waiting = calloc(ranks, sizeof *w->waiting);
    w->unexplained = calloc(ranks, sizeof *w->unexplained);
    w->untold = calloc(ranks, sizeof *w->untold);
    if (!w->members || !w->host_of || !w->local_of || !w->gone || !w->controls || !w->waiting || !w->unexplained || !w->untold)
        return cd_fail(CD_NO_MEMORY, "no memory for a world of %d ranks", c->world);
    for (size_t r = 0; r < ranks; r++)
        w->controls[r] = -1;
    w->locals = 1;
    CD_TRY(arena_bytes(&w->host.arena_bytes));
    uint64_t stall_s;
    CD_TRY(cd_knob_number("CDIST_STALL_SECONDS", &stall_s));
    w->stall_ns = stall_s * CD_NS_PER_S;
    return open_alive_page(w);
}

static cd_status open_recorder(cd_world *w)
{
    if (w->host.pages) {
        w->page = &w->host.pages[w->local];
    } else {
        w->own_page = aligned_alloc(CD_LINE, sizeof *w->own_page);
        if (!w->own_page)
            return cd_fail(CD_NO_MEMORY, "no memory for the recorder");
        memset(w->own_page, 0, sizeof *w->own_page);
        w->page = w->own_page;
    }
    cd_record_page_open(w->page);
    return CD_OK;
}

cd_status cd_world_open(const cd_world_config *config, cd_store *store, const cd_patience *patience, cd_world **out)
{
    cd_log_reread();
    CD_TRY(check_config(config));
    if (config->world > 1 && !store)
        return cd_fail(CD_BAD_ARGUMENT, "a world of %d ranks needs a store to meet", config->world);
    cd_world *w = calloc(1, sizeof *w);
    if (!w)
        return cd_fail(CD_NO_MEMORY, "no memory for a world");
    cd_status status = prepare(w, config, store);
    if (status == CD_OK && w->world > 1)
        status = cd_world_bootstrap(w, config, patience);
    if (status == CD_OK)
        status = open_recorder(w);
    if (status == CD_OK)
        status = cd_group_open_default(w, &w->group);
    if (status != CD_OK) {
        cd_error why = *cd_last_error();
        cd_world_close(w);
        cd_world_release(w);
        return cd_fail_with(&why);
    }
    atomic_store_explicit(&w->controls_live, true, memory_order_release);
    cd_monitor_wake(w);
    *out = w;
    return CD_OK;
}

bool cd_world_sees_process(const cd_world *w, int rank)
{
    const cd_member *me = &w->members[w->rank], *other = &w->members[rank];
    return w->world > 1 && other->process != me->process && other->pid_namespace == me->pid_namespace &&
           other->net_namespace == me->net_namespace && memcmp(other->boot_id, me->boot_id, sizeof me->boot_id) == 0;
}

bool cd_world_is_hub(const cd_world *w, int rank)
{
    return rank == 0 || rank == w->deputy;
}

void cd_world_tell(cd_world *w, cd_control_kind kind, const cd_notice *notice, int skip)
{
    if (!w->controls || w->world == 1)
        return;
    /* Notices are small and rare; a socket that has no room for one belongs to a rank that is stuck. */
    cd_patience brief = cd_patience_until(cd_deadline_after_ns(20 * CD_NS_PER_MS), 1);
    pthread_mutex_lock(&w->control_lock);
    for (int r = 0; r < w->world; r++)
        if (r != skip && w->controls[r] >= 0)
            if (cd_control_send(w->controls[r], kind, notice, sizeof *notice, &brief) != CD_OK)
                atomic_store_explicit(&w->untold[r], 1, memory_order_relaxed); /* for the monitor, which reads it after the end */
    pthread_mutex_unlock(&w->control_lock);
}

static void note_first(cd_world *w, int rank)
{
    int none = -1;
    atomic_compare_exchange_strong_explicit(&w->first_gone, &none, rank, memory_order_relaxed, memory_order_relaxed);
}

void cd_world_peer_lost(cd_world *w, int rank, const cd_error *why)
{
    if (rank == w->rank || atomic_load_explicit(&w->gone[rank], memory_order_acquire))
        return;
    note_first(w, rank);
    cd_log(CD_LOG_INFO, "rank %d: %s", w->rank, why->text);
    /* The cause before the sign: who sees that the rank is gone finds why. Only the monitor comes here. */
    cd_groups_peer_gone(w, rank, why);
    atomic_store_explicit(&w->gone[rank], 1, memory_order_release);
    cd_mesh_fail_peer(w->mesh, rank, why);
}

void cd_world_peer_left(cd_world *w, int rank)
{
    if (rank == w->rank || atomic_exchange_explicit(&w->gone[rank], 1, memory_order_acq_rel))
        return;
    note_first(w, rank);
    cd_groups_peer_gone(w, rank, 0);
}

void cd_world_announce_death(cd_world *w, const char *why)
{
    if (cd_world_forked(w) || atomic_load_explicit(&w->closing, memory_order_relaxed))
        return;
    cd_error error = {.code = CD_PEER_LOST, .rank = w->rank};
    snprintf(error.text, sizeof error.text, "rank %d was lost: %s", w->rank, why);
    cd_notice notice = {.rank = w->rank, .code = (int32_t)error.code};
    memcpy(notice.text, error.text, sizeof notice.text);
    /* Ranks of this host see it in shared memory at once, the others by the notice. */
    cd_world_confess(w, &error);
    cd_world_tell(w, CD_CONTROL_LOST, &notice, -1);
}

void cd_world_confess(cd_world *w, const cd_error *why)
{
    if (atomic_exchange_explicit(&w->lost, true, memory_order_relaxed))
        return;
    cd_groups_peer_gone(w, w->rank, why);
    if (!w->host.rows)
        return;
    cd_host_row *row = &w->host.rows[w->local];
    uint32_t before = CD_LEFT_NOT;
    memcpy(row->why, why->text, sizeof row->why);
    /* Release: who sees the word sees why. Who has said goodbye keeps to it. */
    atomic_compare_exchange_strong_explicit(&row->left, &before, CD_LEFT_LOST, memory_order_release, memory_order_relaxed);
}

/* Ranks of other hosts may still wait in a group that has failed here. Why goes before the goodbye, on the same connections,
 * so that nobody takes this rank's leaving for the cause. */
static void pass_on_causes(cd_world *w)
{
    cd_world_lock_groups(w);
    for (cd_group *g = w->groups; g; g = g->next) {
        if (!g->spans_hosts || cd_cause_check(g->cause) == CD_OK)
            continue;
        const cd_error *why = cd_last_error();
        cd_notice notice = {.context = g->context, .rank = why->rank < 0 ? w->rank : why->rank, .code = (int32_t)why->code};
        memcpy(notice.text, why->text, sizeof notice.text);
        cd_world_tell(w, CD_CONTROL_ABORT, &notice, -1);
    }
    cd_world_unlock_groups(w);
}

/* A rank whose connections were cut cannot tell anybody: the others find its process alive, if it lives on for this long. */
#define SEEN_ALIVE_NS (300 * CD_NS_PER_MS)

static void say_goodbye(cd_world *w)
{
    uint64_t cut_ns = atomic_load_explicit(&w->cut_ns, memory_order_relaxed), now = cd_now_ns();
    if (cut_ns && now - cut_ns < SEEN_ALIVE_NS)
        cd_sleep_ns(SEEN_ALIVE_NS - (now - cut_ns));
    bool lost = atomic_load_explicit(&w->lost, memory_order_relaxed);
    uint32_t before = CD_LEFT_NOT;
    if (w->host.rows && !lost)
        /* Release: what this rank posted before is visible to who sees that it left. */
        atomic_compare_exchange_strong_explicit(&w->host.rows[w->local].left, &before, CD_LEFT_IN_ORDER, memory_order_release,
                                                memory_order_relaxed);
    if (atomic_load_explicit(&w->controls_live, memory_order_relaxed) && !lost) {
        pass_on_causes(w);
        cd_notice notice = {.rank = w->rank};
        if (w->group) {
            notice.context = w->group->context;
            snprintf(notice.text, sizeof notice.text, "%llu", (unsigned long long)w->group->sequence);
        }
        cd_world_tell(w, CD_CONTROL_BYE, &notice, -1);
    }
    if (w->published) {
        cd_patience brief = cd_patience_until(cd_deadline_after_ns(200 * CD_NS_PER_MS), 1);
        char key[300];
        snprintf(key, sizeof key, "%s/cdist/rank0", w->prefix);
        bool existed;
        (void)w->store->ops->delete_key(w->store, cd_bytes_of(key), &existed, &brief);
    }
}

void cd_world_close(cd_world *w)
{
    if (!w || w->closed)
        return;
    w->closed = true;
    bool forked = cd_world_forked(w);
    atomic_store_explicit(&w->closing, true, memory_order_release);
    if (!forked && w->alive)
        say_goodbye(w);
    cd_groups_close_all(w);
    cd_monitor_stop(w);
    if (w->mesh && !forked) {
        cd_error why = {.code = CD_ABORTED, .rank = w->rank, .text = CD_DESTROYED_TEXT};
        cd_mesh_close(w->mesh, &why);
    }
    for (int r = 0; w->controls && r < w->world; r++)
        if (w->controls[r] >= 0) {
            close(w->controls[r]);
            w->controls[r] = -1;
        }
    cd_greeter_free(w->greeter);
    w->greeter = 0;
    if (w->data_listener >= 0)
        close(w->data_listener);
    w->data_listener = -1;
    cd_handout_free(w->handout);
    w->handout = 0;
    if (w->store)
        cd_store_release(w->store);
    w->store = 0;
    cd_group_release(w->group);
    w->group = 0;
}

cd_world *cd_world_retain(cd_world *w)
{
    atomic_fetch_add_explicit(&w->refs, 1, memory_order_relaxed);
    return w;
}

void cd_world_release(cd_world *w)
{
    if (!w || atomic_fetch_sub_explicit(&w->refs, 1, memory_order_acq_rel) != 1)
        return;
    bool forked = cd_world_forked(w);
    if (!forked)
        cd_mesh_free(w->mesh);
    cd_arena_free(w->arena);
    cd_segment_free(&w->segment);
    cd_sets_free(w);
    free(w->members);
    free(w->host_of);
    free(w->local_of);
    free(w->gone);
    free(w->controls);
    free(w->waiting);
    free(w->unexplained);
    free(w->untold);
    free(w->own_page);
    if (w->alive)
        munmap((void *)(uintptr_t)w->alive, 4096);
    pthread_mutex_destroy(&w->control_lock);
    pthread_mutex_destroy(&w->groups_lock);
    free(w);
}

cd_group *cd_world_group(cd_world *w)
{
    return w->group;
}

cd_arena *cd_world_arena(cd_world *w)
{
    return w->host.arena && !cd_world_forked(w) ? w->arena : 0;
}

int cd_world_local_rank(const cd_world *w)
{
    return w->local;
}

int cd_world_local_size(const cd_world *w)
{
    return w->locals;
}
