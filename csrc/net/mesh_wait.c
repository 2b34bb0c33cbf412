#include "net/mesh_core.h"

#include <stdlib.h>
#include <time.h>
#include <unistd.h>

/* With pipes in memory somebody must look at them: the longest nap then. */
#define NAP_MEMORY_NS UINT64_C(50000)
#define NAP_HELPER_NS UINT64_C(200000)
/* The helper's longest while others wait, who drive everything. */
#define NAP_BESIDE_NS (4 * CD_NS_PER_MS)
#define NAP_MOST_NS (50 * CD_NS_PER_MS)
/* Turns in vain after which the helper takes longer naps. */
#define HELPER_EAGER_TURNS 20
/* The helper goes to sleep for good only this long after the last asynchronous transfer: waking it costs its waker a system
 * call, and the ranks a core. */
#define HELPER_LINGER_NS (20 * CD_NS_PER_MS)
/* Turns of progress that an ending wait makes at most, to see what came before the end. */
#define LAST_TURNS 16

void cd_mesh_unlock(cd_mesh *mesh)
{
    bool wake_poller = mesh->news && mesh->polling;
    if (mesh->news && mesh->sleepers)
        pthread_cond_broadcast(&mesh->changed);
    mesh->news = false;
    pthread_mutex_unlock(&mesh->lock);
    if (wake_poller) {
        uint64_t one = 1;
        /* Fails only when the counter is full, and then the poller is awake anyway. */
        ssize_t ignored = write(mesh->event, &one, sizeof one);
        (void)ignored;
    }
}

/* The sockets to wait for; returns how many. */
static nfds_t fill_polled(cd_mesh *mesh)
{
    nfds_t count = 0;
    mesh->polled[count++] = (struct pollfd){.fd = mesh->event, .events = POLLIN};
    for (int i = 0; i < mesh->attached_count; i++) {
        cd_mesh_peer *p = &mesh->peers[mesh->attached[i]];
        if (p->lost || p->pipe->fd < 0)
            continue;
        short events = POLLIN;
        if (!p->deaf && cd_mesh_has_output(p))
            events |= POLLOUT;
        mesh->polled[count++] = (struct pollfd){.fd = p->pipe->fd, .events = events};
    }
    return count;
}

static bool is_done(const cd_xfer *x)
{
    /* Acquire: pairs with the release of cd_mesh_complete. */
    return atomic_load_explicit(&x->done, memory_order_acquire) != 0;
}

/* Are all complete, or has one failed? Then there is nothing to sleep for. */
static bool is_settled(cd_xfer *const *xfers, int count)
{
    bool all_done = count > 0;
    for (int i = 0; i < count; i++) {
        if (!is_done(xfers[i]))
            all_done = false;
        else if (xfers[i]->error)
            return true;
    }
    return all_done;
}

/* Sleeps until something may have changed, or `most_ns`, or `memory_ns` where pipes in memory must be looked at. Called
 * without the lock; looks at the transfers once more with it, so that a completion in between is not slept over. */
static void nap(cd_mesh *mesh, cd_xfer *const *xfers, int count, uint64_t most_ns, uint64_t memory_ns)
{
    pthread_mutex_lock(&mesh->lock);
    if (is_settled(xfers, count)) {
        cd_mesh_unlock(mesh);
        return;
    }
    if (mesh->memories && most_ns > memory_ns)
        most_ns = memory_ns;
    if (mesh->polling || !mesh->sockets) {
        uint64_t until = cd_now_ns() + most_ns;
        struct timespec at = {.tv_sec = (time_t)(until / CD_NS_PER_S), .tv_nsec = (long)(until % CD_NS_PER_S)};
        mesh->sleepers++;
        pthread_cond_timedwait(&mesh->changed, &mesh->lock, &at);
        mesh->sleepers--;
        cd_mesh_unlock(mesh);
        return;
    }
    mesh->polling = true;
    nfds_t polled = fill_polled(mesh);
    cd_mesh_unlock(mesh);
    struct timespec most = {.tv_sec = (time_t)(most_ns / CD_NS_PER_S), .tv_nsec = (long)(most_ns % CD_NS_PER_S)};
    int ready = ppoll(mesh->polled, polled, &most, NULL);
    pthread_mutex_lock(&mesh->lock);
    if (ready > 0 && mesh->polled[0].revents) {
        uint64_t ignored;
        ssize_t got = read(mesh->event, &ignored, sizeof ignored);
        (void)got;
    }
    mesh->polling = false;
    mesh->news = true; /* another must poll if this thread leaves */
    cd_mesh_unlock(mesh);
}

static bool turn(cd_mesh *mesh)
{
    if (pthread_mutex_trylock(&mesh->lock) != 0)
        return false;
    bool moved = cd_mesh_progress(mesh);
    cd_mesh_unlock(mesh);
    return moved;
}

/* As a turn, also when others hold the lock: what is there when it is called has been received when it returns. */
static void turn_for_the_last_time(cd_mesh *mesh)
{
    pthread_mutex_lock(&mesh->lock);
    for (int i = 0; i < LAST_TURNS && cd_mesh_progress(mesh); i++)
        continue;
    cd_mesh_unlock(mesh);
}

/* The first transfer that is not complete, or that failed, from *at on; NULL: all are complete and fine. */
static cd_xfer *find_open(cd_xfer *const *xfers, int count, int *at)
{
    while (*at < count && is_done(xfers[*at]) && !xfers[*at]->error)
        ++*at;
    for (int i = *at; i < count; i++) {
        if (is_done(xfers[i]) && xfers[i]->error)
            return xfers[i];
    }
    return *at < count ? xfers[*at] : NULL;
}

/* The word of a rank's leaving takes another way than what it sent before: a socket is over when its stream ends, or when
 * nothing has come for this long. */
#define STREAM_ENDS_NS CD_NS_PER_S

/* `since_ns`: when it was first found gone. Through memory all is here before the word is. */
static bool has_left(cd_mesh *mesh, const cd_xfer *x, const cd_patience *patience, uint64_t *since_ns)
{
    if (!patience->gone || x->peer < 0 || !atomic_load_explicit(&patience->gone[x->peer], memory_order_acquire))
        return false;
    pthread_mutex_lock(&mesh->lock);
    const cd_mesh_peer *p = &mesh->peers[x->peer];
    bool flows = p->pipe && p->pipe->fd >= 0 && !p->lost;
    cd_mesh_unlock(mesh);
    uint64_t now = cd_now_ns();
    if (!*since_ns)
        *since_ns = now;
    return !flows || now - *since_ns > STREAM_ENDS_NS;
}

static bool is_aborted(const cd_patience *patience)
{
    return patience->cause && atomic_load_explicit(&patience->cause->state, memory_order_acquire) != CD_CAUSE_NONE;
}

static cd_status fail_expired(const cd_xfer *x)
{
    if (x->peer < 0)
        return cd_fail(CD_TIMED_OUT, "no rank sent a message with tag %lld before the deadline", (long long)x->match.tag);
    if (!x->is_send)
        return cd_fail_rank(CD_TIMED_OUT, x->peer, "rank %d did not send its message of %zu bytes before the deadline", x->peer,
                            x->bytes);
    return cd_fail_rank(CD_TIMED_OUT, x->peer, "rank %d did not receive the message of %zu bytes before the deadline%s",
                        x->peer, x->bytes,
                        x->bytes <= CD_MESH_EAGER ? "" : " (a large message waits for its receive: two ranks that both send "
                                                         "first wait for each other)");
}

/* One turn of waiting in vain: pauses by the waiter's phase. */
static cd_status pause_turn(cd_mesh *mesh, cd_waiter *waiter, cd_xfer *const *xfers, int count)
{
    if (!waiter->napping)
        return cd_waiter_turn(waiter);
    CD_TRY(cd_waiter_check(waiter));
    nap(mesh, xfers, count, (uint64_t)cd_waiter_nap_ms(waiter) * CD_NS_PER_MS, NAP_MEMORY_NS);
    return CD_OK;
}

static cd_status wait_slowly(cd_mesh *mesh, cd_xfer *const *xfers, int count, int at, const cd_patience *patience)
{
    cd_waiter waiter = cd_waiter_start(patience);
    uint64_t gone_ns = 0;
    for (;;) {
        bool moved = turn(mesh);
        cd_xfer *open = find_open(xfers, count, &at);
        if (!open)
            return CD_OK;
        if (is_done(open) && open->error)
            return cd_fail_with(open->error);
        if (moved) {
            cd_waiter_reset(&waiter);
            gone_ns = 0;
            continue;
        }
        cd_status status = pause_turn(mesh, &waiter, &xfers[at], count - at);
        bool left = status == CD_OK && waiter.turns >= patience->spin && has_left(mesh, open, patience, &gone_ns);
        if (cd_likely(status == CD_OK && !left))
            continue;
        if (status == CD_INTERRUPTED)
            return status;
        /* What the peer posted before it left, or before the abort was seen, counts. */
        cd_error why = *cd_last_error();
        bool expired = status == CD_TIMED_OUT && !is_aborted(patience);
        turn_for_the_last_time(mesh);
        open = find_open(xfers, count, &at);
        if (!open)
            return CD_OK;
        if (is_done(open) && open->error)
            return cd_fail_with(open->error);
        if (left)
            return cd_fail_rank(CD_PEER_LOST, open->peer, "rank %d left the group before it took part", open->peer);
        return expired ? fail_expired(open) : cd_fail_with(&why);
    }
}

cd_status cd_mesh_wait(cd_mesh *mesh, cd_xfer *const *xfers, int count, const cd_patience *patience)
{
    int at = 0;
    cd_xfer *open = find_open(xfers, count, &at);
    if (!open)
        return CD_OK;
    if (is_done(open) && open->error)
        return cd_fail_with(open->error);
    atomic_fetch_add_explicit(&mesh->waiters, 1, memory_order_relaxed);
    cd_status status = wait_slowly(mesh, xfers, count, at, patience);
    atomic_fetch_sub_explicit(&mesh->waiters, 1, memory_order_relaxed);
    return status;
}

bool cd_mesh_test(cd_mesh *mesh, cd_xfer *xfer)
{
    if (is_done(xfer))
        return true;
    if (pthread_mutex_trylock(&mesh->lock) == 0) {
        mesh->visits++;
        cd_mesh_progress(mesh);
        cd_mesh_unlock(mesh);
    }
    return is_done(xfer);
}

static bool look_at_kept(cd_mesh *mesh, int peer, cd_match match, size_t *bytes_p, int *source_p, cd_status *status_p)
{
    int source;
    pthread_mutex_lock(&mesh->lock);
    cd_mesh_progress(mesh);
    cd_kept *kept = cd_mesh_find_kept(mesh, peer, match, &source);
    const cd_error *lost = mesh->closed ? mesh->closed : peer >= 0 ? mesh->peers[peer].lost : NULL;
    if (kept) {
        *bytes_p = kept->bytes;
        *source_p = source;
    } else if (lost) {
        *status_p = cd_fail_with(lost);
    }
    cd_mesh_unlock(mesh);
    return kept || lost;
}

cd_status cd_mesh_probe(cd_mesh *mesh, int peer, cd_match match, size_t *bytes_p, int *source_p, const cd_patience *patience)
{
    if (peer < -1 || peer >= mesh->world)
        return cd_fail(CD_BAD_ARGUMENT, "rank %d is not in a world of %d", peer, mesh->world);
    cd_waiter waiter = cd_waiter_start(patience);
    const cd_xfer asked = {.peer = peer, .match = match};
    uint64_t gone_ns = 0;
    for (;;) {
        cd_status found = CD_OK;
        if (look_at_kept(mesh, peer, match, bytes_p, source_p, &found))
            return found;
        cd_status status = pause_turn(mesh, &waiter, NULL, 0);
        bool left = status == CD_OK && waiter.turns >= patience->spin && has_left(mesh, &asked, patience, &gone_ns);
        if (cd_likely(status == CD_OK && !left))
            continue;
        if (status != CD_INTERRUPTED && look_at_kept(mesh, peer, match, bytes_p, source_p, &found))
            return found;
        if (left)
            return cd_fail_rank(CD_PEER_LOST, peer, "rank %d left the group before it sent", peer);
        return status == CD_TIMED_OUT && !is_aborted(patience) ? fail_expired(&asked) : status;
    }
}

/* Sleeps while others move everything: as long as threads wait, or once. Each look takes a core from a copy, so they become
 * rarer (*nap_ns): the helper is late by no more than the others were at it. */
static void sleep_beside_others(cd_mesh *mesh, uint64_t *nap_ns)
{
    do {
        cd_sleep_ns(*nap_ns);
        *nap_ns = 2 * *nap_ns < NAP_BESIDE_NS ? 2 * *nap_ns : NAP_BESIDE_NS;
    } while (atomic_load_explicit(&mesh->waiters, memory_order_relaxed) > 0);
}

/* The helper: moves asynchronous transfers while no thread waits. It never waits for the lock: whoever holds it moves them,
 * for as long as a megabyte takes, and would have to wake the helper by a system call when it gives the lock back, again and
 * again. */
static void *drive(void *arg)
{
    cd_mesh *mesh = arg;
    int idle = 0;
    uint64_t last_ns = cd_now_ns(), visits = 0, nap_ns = NAP_HELPER_NS;
    for (;;) {
        if (atomic_load_explicit(&mesh->waiters, memory_order_relaxed) > 0 || pthread_mutex_trylock(&mesh->lock) != 0) {
            sleep_beside_others(mesh, &nap_ns);
            continue;
        }
        mesh->has_rest = mesh->has_rest && cd_mesh_has_rest(mesh);
        bool has_work = mesh->async_count > 0 || mesh->has_rest;
        if (has_work)
            last_ns = cd_now_ns();
        while (!has_work && !mesh->stopping && cd_now_ns() - last_ns > HELPER_LINGER_NS) {
            mesh->helper_sleeps = true;
            pthread_cond_wait(&mesh->work, &mesh->lock);
            mesh->helper_sleeps = false;
            last_ns = cd_now_ns();
        }
        bool stops = mesh->stopping;
        /* Who posts one transfer after the other moves them too, and is only held up by a second thread that wants a core. */
        bool is_busy = visits != mesh->visits;
        visits = mesh->visits;
        pthread_mutex_unlock(&mesh->lock);
        if (stops)
            return NULL;
        if (is_busy) {
            sleep_beside_others(mesh, &nap_ns);
            continue;
        }
        nap_ns = NAP_HELPER_NS;
        if (!has_work)
            cd_sleep_ns(NAP_HELPER_NS);
        else if (turn(mesh))
            idle = 0;
        else
            nap(mesh, NULL, 0, NAP_MOST_NS, idle++ < HELPER_EAGER_TURNS ? NAP_MEMORY_NS : NAP_HELPER_NS);
    }
}

void cd_mesh_start_helper(cd_mesh *mesh)
{
    if (mesh->helper_sleeps)
        pthread_cond_signal(&mesh->work);
    if (mesh->has_helper || mesh->stopping)
        return;
    /* Without it asynchronous transfers move whenever a thread of the program waits or tests: slower, not wrong. */
    mesh->has_helper = pthread_create(&mesh->helper, NULL, drive, mesh) == 0;
}

void cd_mesh_stop_helper(cd_mesh *mesh)
{
    pthread_mutex_lock(&mesh->lock);
    mesh->stopping = true;
    mesh->news = true;
    bool has_helper = mesh->has_helper;
    pthread_cond_signal(&mesh->work);
    cd_mesh_unlock(mesh);
    if (has_helper)
        pthread_join(mesh->helper, NULL);
    mesh->has_helper = false;
}
