#include "group/stall.h"

#include "base/host.h"
#include "base/log.h"

#include <stdio.h>
#include <string.h>

/* A wait that takes longer is told to the ranks of other hosts, so that they can say who came. */
#define TELL_NS CD_NS_PER_S
/* More ranks than this are counted, not listed. */
#define LISTED 16
#define DESCRIBED 3

cd_record_page *cd_world_page(const cd_world *w, int rank)
{
    if (rank == w->rank)
        return w->page;
    bool here = w->host.pages && w->host_of[rank] == w->host_of[w->rank];
    return here ? &w->host.pages[w->local_of[rank]] : NULL;
}

/* State T in /proc: stopped by a signal. */
bool cd_world_is_stopped(const cd_world *w, int rank)
{
    if (rank < 0 || rank >= w->world || !cd_world_sees_process(w, rank))
        return false;
    char state = cd_host_process_state(w->members[rank].process);
    return state == 'T' || state == 't';
}

const char *cd_world_describe(const cd_world *w, int rank, char *out, size_t bytes)
{
    const cd_record_page *page = cd_world_page(w, rank);
    bool stopped = cd_world_is_stopped(w, rank);
    char what[320] = "";
    out[0] = 0;
    if (page)
        cd_record_describe(page, what, sizeof what);
    else if (atomic_load_explicit(&w->waiting[rank].sequence, memory_order_relaxed))
        snprintf(what, sizeof what, "waits itself in the group's operation %llu",
                 (unsigned long long)atomic_load_explicit(&w->waiting[rank].sequence, memory_order_relaxed));
    if (what[0] || stopped)
        snprintf(out, bytes, "rank %d %s%s%s%s", rank, what, stopped && what[0] ? " (" : "",
                 stopped ? "its process is stopped" : "", stopped && what[0] ? ")" : "");
    return out;
}

int cd_world_records(const cd_world *w, int rank, cd_record_view *out, int room, uint32_t *process_p)
{
    const cd_record_page *page = rank >= 0 && rank < w->world ? cd_world_page(w, rank) : NULL;
    if (!page)
        return -1;
    *process_p = (uint32_t)atomic_load_explicit(&page->process, memory_order_relaxed);
    return cd_record_read(page, out, room);
}

void cd_world_set_site(cd_world *w, const char *text)
{
    cd_record_set_site(w->page, text);
}

const char *cd_world_site(const cd_world *w, int rank, char out[8 * CD_RECORD_SITE_WORDS])
{
    const cd_record_page *page = rank >= 0 && rank < w->world ? cd_world_page(w, rank) : NULL;
    out[0] = 0;
    return page ? cd_record_site(page, out) : out;
}

void cd_world_generation(const cd_world *w, char out[33])
{
    for (int i = 0; i < CD_MEMBER_NONCE_BYTES; i++)
        snprintf(out + 2 * i, 3, "%02x", w->generation[i]);
}

int cd_world_is_gone(const cd_world *w, int rank)
{
    return rank < 0 || rank >= w->world || atomic_load_explicit(&w->gone[rank], memory_order_acquire) != 0;
}

int cd_world_first_gone(const cd_world *w)
{
    return atomic_load_explicit(&w->first_gone, memory_order_relaxed);
}

static bool has_arrived(const cd_group *g, int rank, uint64_t sequence)
{
    const cd_world *w = g->world;
    if (rank == w->rank)
        return true;
    const cd_record_page *page = cd_world_page(w, rank);
    cd_record_view view;
    if (page)
        return cd_record_find(page, g->context, &view) && view.sequence >= sequence;
    return atomic_load_explicit(&w->waiting[rank].context, memory_order_relaxed) == g->context &&
           atomic_load_explicit(&w->waiting[rank].sequence, memory_order_relaxed) >= sequence;
}

/* True when a rank that is gone is known not to have begun this operation: it never will. */
static bool never_arrives(const cd_group *g, int rank, uint64_t sequence)
{
    const cd_world *w = g->world;
    const cd_record_page *page = cd_world_page(w, rank);
    cd_record_view view;
    if (!page)
        return atomic_load_explicit(&w->waiting[rank].context, memory_order_relaxed) == g->context &&
               atomic_load_explicit(&w->waiting[rank].sequence, memory_order_relaxed) < sequence;
    if (cd_record_find(page, g->context, &view))
        return view.sequence < sequence;
    return atomic_load_explicit(&page->last, memory_order_relaxed) < CD_RECORD_RING;
}

/* Who waits for a rank that itself waits for one that left would wait until the deadline: look for it. */
static cd_status refuse_departed(const cd_watch *watch)
{
    const cd_group *g = watch->group;
    for (int i = 0; i < g->size; i++) {
        int rank = g->world_ranks[i];
        /* Acquire: what the rank recorded before it left is visible. */
        if (atomic_load_explicit(&g->world->gone[rank], memory_order_acquire) &&
            never_arrives(g, rank, watch->op->sequence))
            return cd_fail_rank(CD_PEER_LOST, rank, "rank %d left the group before it took part", rank);
    }
    return CD_OK;
}

static size_t append(char *out, size_t bytes, size_t used, const char *text)
{
    int wrote = used < bytes ? snprintf(out + used, bytes - used, "%s", text) : 0;
    return used + (size_t)(wrote > 0 ? wrote : 0);
}

static size_t list_ranks(const cd_watch *watch, bool arrived, char *out, size_t bytes, size_t used)
{
    const cd_group *g = watch->group;
    int count = 0;
    char number[24];
    used = append(out, bytes, used, arrived ? "arrived ranks: [" : "missing ranks: [");
    for (int i = 0; i < g->size; i++) {
        if (has_arrived(g, g->world_ranks[i], watch->op->sequence) != arrived)
            continue;
        snprintf(number, sizeof number, "%s%d", count ? ", " : "", g->world_ranks[i]);
        if (count++ < LISTED)
            used = append(out, bytes, used, number);
    }
    if (count > LISTED) {
        snprintf(number, sizeof number, ", … %d in all", count);
        used = append(out, bytes, used, number);
    }
    return append(out, bytes, used, "]");
}

const char *cd_watch_describe(const cd_watch *watch, int suspect, char *out, size_t bytes)
{
    const cd_group *g = watch->group;
    char part[400];
    uint64_t now = cd_now_ns();
    double waited = watch->started_ns && now > watch->started_ns ? (double)(now - watch->started_ns) / 1e9 : 0;
    snprintf(part, sizeof part, "waited %.1f s", waited);
    size_t used = append(out, bytes, 0, part);
    if (watch->peer == -1 && g->size > 1) {
        used = append(out, bytes, used, "; ");
        used = list_ranks(watch, true, out, bytes, used);
        used = append(out, bytes, used, "; ");
        used = list_ranks(watch, false, out, bytes, used);
    }
    int described = 0;
    for (int i = 0; i < g->size && described < DESCRIBED; i++) {
        int rank = g->world_ranks[i];
        bool late = watch->peer == -1 ? !has_arrived(g, rank, watch->op->sequence) : rank == watch->peer;
        if (rank == g->world->rank || !(late || rank == suspect))
            continue;
        cd_world_describe(g->world, rank, part, sizeof part);
        if (part[0]) {
            used = append(out, bytes, used, "; ");
            used = append(out, bytes, used, part);
            described++;
        }
    }
    return out;
}

/* The rank with which `rank` itself waits to move a message; −1: with none, or not known. `since_ns`: what was told before
 * then may be over. */
static int waits_for(const cd_world *w, int rank, uint64_t since_ns)
{
    const cd_record_page *page = cd_world_page(w, rank);
    cd_record_view newest[8];
    if (!page)
        return atomic_load_explicit(&w->waiting[rank].message_ns, memory_order_acquire) < since_ns
                   ? -1 : atomic_load_explicit(&w->waiting[rank].message_peer, memory_order_relaxed);
    int count = cd_record_read(page, newest, 8), sent_to = -1;
    /* What runs, or what failed while we waited; what was done before that is of another moment. */
    for (int i = 0; i < count; i++) {
        const cd_record_view *r = &newest[i];
        bool is_over = r->state != CD_RECORD_RUNNING && !(r->state == CD_RECORD_FAILED && r->done_ns >= since_ns);
        if (is_over && (r->kind == CD_SEND || r->kind == CD_RECV))
            continue; /* messages end out of order */
        if (is_over)
            break;
        if (r->kind == CD_RECV)
            return r->peer;
        if (r->kind == CD_SEND && sent_to < 0)
            sent_to = r->peer;
    }
    return sent_to;
}

int cd_watch_find_cause(const cd_watch *watch, char *out, size_t bytes)
{
    const cd_world *w = watch->group->world;
    int at = watch->peer;
    size_t used = 0;
    out[0] = 0;
    for (int steps = 0; at >= 0 && steps < w->world && !cd_world_is_stopped(w, at); steps++) {
        int next = waits_for(w, at, watch->started_ns);
        if (next < 0 || next == at)
            break;
        char part[64];
        snprintf(part, sizeof part, "%srank %d itself waits for rank %d", steps ? ", " : "", at, next);
        used = append(out, bytes, used, part);
        if (next == w->rank) {
            append(out, bytes, used, ": a cycle");
            return watch->peer;
        }
        at = next;
    }
    return at;
}

int cd_watch_blame(const cd_watch *watch, int suspect, char *out, size_t bytes)
{
    int rank = watch->peer >= 0 ? cd_watch_find_cause(watch, out, bytes / 2) : suspect;
    size_t used = watch->peer >= 0 ? strlen(out) : 0;
    if (used)
        used = append(out, bytes, used, "; ");
    cd_watch_describe(watch, rank, out + used, bytes - used);
    return rank;
}

int cd_watch_first_missing(const cd_watch *watch, int suspect)
{
    const cd_group *g = watch->group;
    int missing = -1;
    for (int i = 0; i < g->size; i++) {
        int rank = g->world_ranks[i];
        if (cd_world_is_stopped(g->world, rank))
            return rank;
        if (missing < 0 && !has_arrived(g, rank, watch->op->sequence))
            missing = rank;
    }
    bool innocent = suspect < 0 || has_arrived(g, suspect, watch->op->sequence);
    return innocent && missing >= 0 ? missing : suspect;
}

static void tell(const cd_watch *watch)
{
    const cd_group *g = watch->group;
    cd_notice notice = {.context = g->context, .rank = g->world->rank};
    if (watch->peer == -1)
        snprintf(notice.text, sizeof notice.text, "%llu", (unsigned long long)watch->op->sequence);
    else
        snprintf(notice.text, sizeof notice.text, "0 %d", watch->peer);
    cd_world_tell(g->world, CD_CONTROL_WAITING, &notice, -1);
}

static void warn(const cd_watch *watch)
{
    const cd_group *g = watch->group;
    char text[1024], name[96];
    cd_watch_describe(watch, -1, text, sizeof text);
    cd_record_view view = {.kind = watch->op->kind, .sequence = watch->op->sequence, .peer = watch->peer};
    cd_log(CD_LOG_WARN, "rank %d: stall: %s in a group of %d: %s", g->world->rank, cd_record_name(&view, name, sizeof name),
           g->size, text);
}

static cd_status watch_idle(void *ctx)
{
    cd_watch *watch = ctx;
    const cd_group *g = watch->group;
    if (atomic_load_explicit(&g->closed, memory_order_acquire))
        return cd_fail_rank(CD_ABORTED, g->world->rank, CD_DESTROYED_TEXT);
    uint64_t now = cd_now_coarse_ns();
    if (!watch->started_ns)
        watch->started_ns = now;
    else if (watch->peer == -1)
        CD_TRY(refuse_departed(watch));
    uint64_t waited = now - watch->started_ns;
    if (!watch->told && g->spans_hosts && watch->peer >= -1) {
        uint64_t all = watch->deadline.at_ns > watch->started_ns ? watch->deadline.at_ns - watch->started_ns : 0;
        watch->told = waited >= TELL_NS || waited >= all / 2;
        if (watch->told)
            tell(watch);
    }
    if (!watch->warned && g->world->stall_ns && waited >= g->world->stall_ns) {
        watch->warned = true;
        warn(watch);
    }
    return watch->idle ? watch->idle(watch->ctx) : CD_OK;
}

void cd_watch_begin(cd_watch *watch, cd_group *group, const cd_op *op, int peer, cd_patience *patience)
{
    *watch = (cd_watch){.group = group, .op = op, .peer = peer, .idle = patience->idle, .ctx = patience->idle_ctx,
                        .deadline = patience->deadline};
    patience->idle = watch_idle;
    patience->idle_ctx = watch;
}

void cd_watch_end(const cd_watch *watch, cd_patience *patience)
{
    patience->idle = watch->idle;
    patience->idle_ctx = watch->ctx;
}
