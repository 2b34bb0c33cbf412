/* The monitor: one thread of a world that sleeps in poll(2) and
 *   - hands out shared memory and accepts data connections,
 *   - hears on the control connections and on process descriptors who left or died, and tells all groups,
 *   - on rank 0 and on the deputy passes notices on to the others.
 * It never waits for a peer and holds no Python state. */
#include "base/host.h"
#include "base/log.h"
#include "group/group_impl.h"
#include "net/link.h"
#include "net/sock.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

/* A frame that is coming in on one control connection. After bootstrap every body is a notice. */
typedef struct {
    size_t got;
    int error; /* errno that ended the connection; 0: it was closed */
    bool shut_here; /* … and by whom: not by the other end */
    cd_control_head head;
    cd_notice notice;
} reader;

struct cd_monitor {
    cd_world *world;
    pthread_t thread;
    int wake;
    _Atomic bool stop;
    reader *readers;   /* [world] */
    int *process_fds;  /* [world]: of the ranks of this host, −1 elsewhere */
    bool *expected;    /* [world]: its goodbye was heard, the end of its connection is no news */
    uint64_t *ended_ns; /* [world]: when its process was seen to have ended, while its last word may be under way; 0: not so */
    struct pollfd *entries;
    int room;
};

/* CD_LEFT_*; of ranks of this host. */
static uint32_t last_word(const cd_world *w, int rank)
{
    if (!w->host.rows || w->host_of[rank] != w->host_of[w->rank])
        return CD_LEFT_NOT;
    return atomic_load_explicit(&w->host.rows[w->local_of[rank]].left, memory_order_acquire);
}

/* A process that dies closes its sockets a moment before its end is told. */
#define DYING_MS 20
/* How long its last word may take, which it gave to the kernel before its end: to rank 0 and the deputy themselves … */
#define OWN_WORD_NS (100 * CD_NS_PER_MS)
/* … and through these to the others: they may get no core for a while. */
#define PASSED_WORD_NS (5 * CD_NS_PER_S)
/* How long a rank whose connection to a living rank 0 was cut leaves it to that one to say whose connection it is. */
#define HUB_SAYS_MS 300

/* The process of `rank` lives and our connection to it is cut, as are all our others: it is this rank that is cut off. */
static bool cut_off(const struct cd_monitor *m, int rank)
{
    const cd_world *w = m->world;
    int others = 0;
    for (int r = 0; r < w->world; r++) {
        if (r == rank || w->controls[r] < 0)
            continue;
        if (m->expected[r] || !cd_control_is_closed(w->controls[r]))
            return false;
        others++;
    }
    return others > 0;
}

static void leave_it_to_rank_0(const cd_world *w)
{
    for (int waited_ms = 0; waited_ms < HUB_SAYS_MS; waited_ms += 5) {
        if (atomic_load_explicit(&w->group->cause->state, memory_order_acquire) != CD_CAUSE_NONE)
            return;
        cd_sleep_ns(5 * CD_NS_PER_MS);
    }
}

/* "[2, 3]": who runs on the host of this rank. */
static const char *ranks_beside(const cd_world *w, int rank, char *out, size_t bytes)
{
    size_t used = 0;
    for (int r = 0; r < w->world && used + 16 < bytes; r++)
        if (w->host_of[r] == w->host_of[rank])
            used += (size_t)snprintf(out + used, bytes - used, "%s%d", used ? ", " : "[", r);
    snprintf(out + used, bytes - used, "]");
    return out;
}

/* Fills why; its rank is the one at fault, which may be this one. */
static void explain_loss(const struct cd_monitor *m, int rank, bool ended, cd_error *why)
{
    const cd_world *w = m->world;
    const cd_member *member = &w->members[rank];
    struct pollfd process = {.fd = m->process_fds[rank], .events = POLLIN};
    int error = m->readers[rank].error;
    char beside[256], how[400];
    /* A loaded machine may take long between the end of a process's sockets and its own. */
    ended = ended || (process.fd >= 0 && cd_host_process_state(member->process) == 'X');
    if (ended)
        snprintf(how, sizeof how, "ended without leaving the group");
    else if (m->readers[rank].shut_here || (process.fd >= 0 && poll(&process, 1, DYING_MS) == 0 && cut_off(m, rank))) {
        why->rank = w->rank;
        snprintf(why->text, sizeof why->text, "rank %d was lost: its process (pid %u on %s) lives, but its connections were cut",
                 w->rank, w->members[w->rank].process, w->members[w->rank].host_name);
        return;
    } else if (error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH)
        snprintf(how, sizeof how, "does not answer: its host is lost or the network to it is cut, ranks %s run there",
                 ranks_beside(w, rank, beside, sizeof beside));
    else if (process.fd < 0)
        snprintf(how, sizeof how, "died without leaving the group, or the network to it was cut");
    else if (poll(&process, 1, 0) != 0)
        snprintf(how, sizeof how, "ended without leaving the group");
    else
        snprintf(how, sizeof how, "lives, but the control connection to it was cut");
    snprintf(why->text, sizeof why->text, "rank %d was lost: its process (pid %u on %s) %s", rank, member->process,
             member->host_name, how);
    /* Its word comes by shared memory, not by what was cut. */
    if (rank == 0 && !ended && w->host_of[0] == w->host_of[w->rank] && process.fd >= 0 && poll(&process, 1, 0) == 0)
        leave_it_to_rank_0(w);
}

static void departed(struct cd_monitor *m, int rank, bool ended)
{
    cd_world *w = m->world;
    if (m->expected[rank])
        return;
    m->expected[rank] = true;
    cd_notice notice = {.rank = rank};
    uint32_t word = last_word(w, rank);
    if (word == CD_LEFT_IN_ORDER) {
        cd_world_peer_left(w, rank);
        cd_world_tell(w, CD_CONTROL_BYE, &notice, rank);
        return;
    }
    cd_error why = {.code = CD_PEER_LOST, .rank = rank};
    if (word == CD_LEFT_LOST)
        memcpy(why.text, w->host.rows[w->local_of[rank]].why, sizeof why.text - 1);
    else
        explain_loss(m, rank, ended, &why);
    notice.rank = why.rank;
    notice.code = (int32_t)why.code;
    memcpy(notice.text, why.text, sizeof notice.text);
    if (why.rank == w->rank) {
        cd_log(CD_LOG_INFO, "%s", why.text);
        atomic_store_explicit(&w->cut_ns, cd_now_ns(), memory_order_relaxed); /* see say_goodbye */
        cd_world_confess(w, &why);
    } else {
        cd_world_peer_lost(w, rank, &why);
    }
    cd_world_tell(w, CD_CONTROL_LOST, &notice, rank);
}

/* How far a rank came in a group. */
static void note_progress(cd_world *w, const cd_notice *notice)
{
    cd_waiting *told = &w->waiting[notice->rank];
    char *rest;
    uint64_t sequence = strtoull(notice->text, &rest, 10);
    if (*rest == ' ') {
        long peer = strtol(rest, 0, 10);
        atomic_store_explicit(&told->message_peer, peer >= 0 && peer < w->world ? (int)peer : -1, memory_order_relaxed);
        /* Release: who sees the time sees the peer. */
        atomic_store_explicit(&told->message_ns, cd_now_ns(), memory_order_release);
        return;
    }
    atomic_store_explicit(&told->context, notice->context, memory_order_relaxed);
    atomic_store_explicit(&told->sequence, sequence, memory_order_relaxed);
}

static void hear_notice(struct cd_monitor *m, int from, cd_control_kind kind, cd_notice *notice)
{
    cd_world *w = m->world;
    notice->text[sizeof notice->text - 1] = 0;
    if (notice->rank < 0 || notice->rank >= w->world)
        return;
    cd_error why = {.code = (cd_status)notice->code, .rank = notice->rank};
    memcpy(why.text, notice->text, sizeof why.text);
    cd_error_settle(&why);
    switch (kind) {
    case CD_CONTROL_BYE:
        m->expected[notice->rank] = true;
        note_progress(w, notice);
        cd_world_peer_left(w, notice->rank);
        break;
    case CD_CONTROL_LOST:
        m->expected[notice->rank] = true;
        cd_world_peer_lost(w, notice->rank, &why);
        break;
    case CD_CONTROL_WAITING: note_progress(w, notice); break;
    case CD_CONTROL_ABORT:
        /* What is known here was told to all then. */
        if (!cd_groups_abort_context(w, notice->context, &why))
            return;
        break;
    default: cd_log(CD_LOG_WARN, "rank %d: control frame %d from rank %d is not known", w->rank, (int)kind, from); return;
    }
    /* What comes from the other of the two that pass on has been told to all by it. */
    if (cd_world_is_hub(w, w->rank) && !cd_world_is_hub(w, from))
        cd_world_tell(w, kind, notice, from);
}

/* Reads what is there. True when the connection ended. */
static bool read_control(struct cd_monitor *m, int from)
{
    reader *r = &m->readers[from];
    for (;;) {
        bool in_head = r->got < sizeof r->head;
        char *to = in_head ? (char *)&r->head + r->got : (char *)&r->notice + (r->got - sizeof r->head);
        size_t room = in_head ? sizeof r->head - r->got : sizeof r->head + sizeof r->notice - r->got;
        ssize_t got = recv(m->world->controls[from], to, room, MSG_DONTWAIT);
        if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) {
            r->error = got ? errno : 0;
            /* A reset that a failed notice has found first reads as a plain end. */
            r->shut_here = !atomic_load_explicit(&m->world->untold[from], memory_order_relaxed) &&
                           cd_sock_was_shut_here(m->world->controls[from], r->error);
            return true;
        }
        if (got < 0)
            return false;
        r->got += (size_t)got;
        if (r->got >= sizeof r->head && (r->head.magic != CD_CONTROL_MAGIC || r->head.bytes != sizeof r->notice))
            return true;
        if (r->got == sizeof r->head + sizeof r->notice) {
            r->got = 0;
            hear_notice(m, from, (cd_control_kind)r->head.kind, &r->notice);
        }
    }
}

static void drop_control(struct cd_monitor *m, int from)
{
    cd_world *w = m->world;
    pthread_mutex_lock(&w->control_lock);
    close(w->controls[from]);
    w->controls[from] = -1;
    pthread_mutex_unlock(&w->control_lock);
    departed(m, from, m->ended_ns[from] != 0);
}

/* Whether somebody is there to pass on what a rank says. */
static bool is_told(const cd_world *w)
{
    return w->controls[0] >= 0 || (w->deputy >= 0 && w->controls[w->deputy] >= 0);
}

/* The process of `rank` has ended. The word in the host's memory is its last one, and was there before; what came by a
 * connection, ours or that of those who pass it on, may still be under way. Nobody blames it until that had time to come. */
static void process_ended(struct cd_monitor *m, int rank)
{
    const cd_world *w = m->world;
    close(m->process_fds[rank]);
    m->process_fds[rank] = -1;
    if (w->host.rows && w->host_of[rank] == w->host_of[w->rank])
        departed(m, rank, true);
    else if (!m->expected[rank])
        m->ended_ns[rank] = cd_now_ns();
}

/* Whether a word is still waited for. */
static bool settle_ends(struct cd_monitor *m)
{
    cd_world *w = m->world;
    bool waits = false;
    for (int r = 0; r < w->world; r++) {
        if (!m->ended_ns[r])
            continue;
        bool own = w->controls[r] >= 0;
        bool late = cd_now_ns() - m->ended_ns[r] >= (own ? OWN_WORD_NS : PASSED_WORD_NS);
        if (!m->expected[r] && !late && (own || is_told(w))) {
            waits = true;
            continue;
        }
        m->ended_ns[r] = 0;
        if (m->expected[r])
            continue;
        if (own) { /* a process that it forked may hold the connection open */
            departed(m, r, true);
        } else { /* nobody can say how it left: only who waits for it fails, not the groups that it was in */
            m->expected[r] = true;
            cd_world_peer_left(w, r);
        }
    }
    return waits;
}

static void answer(int socket, cd_control_kind kind, const void *body, size_t bytes)
{
    /* The socket is new, its buffer empty: this does not block. */
    cd_patience brief = cd_patience_until(cd_deadline_after_ns(10 * CD_NS_PER_MS), 1);
    (void)cd_control_send(socket, kind, body, bytes, &brief);
}

static void take_link(struct cd_monitor *m, int socket, const cd_hello *hello)
{
    cd_world *w = m->world;
    int peer = hello->me.rank;
    uint8_t proof[CD_MEMBER_PROOF_BYTES];
    cd_answer_proof(hello, cd_world_secret(w), proof);
    answer(socket, CD_CONTROL_WELCOME, proof, sizeof proof);
    cd_pipe *pipe;
    if (cd_link_open(socket, peer, &pipe) != CD_OK) {
        close(socket);
        return;
    }
    cd_mesh_attach(w->mesh, pipe);
    /* Release: who sees the count sees the pipe attached. */
    atomic_fetch_add_explicit(&w->links, 1, memory_order_release);
}

static void take_second(struct cd_monitor *m, int socket, const cd_hello *hello)
{
    cd_world *w = m->world;
    uint8_t proof[CD_MEMBER_PROOF_BYTES];
    cd_answer_proof(hello, cd_world_secret(w), proof);
    answer(socket, CD_CONTROL_WELCOME, proof, sizeof proof);
    cd_sock_set_patience(socket, CD_CONTROL_PATIENCE_MS);
    pthread_mutex_lock(&w->control_lock);
    w->controls[hello->me.rank] = socket;
    pthread_mutex_unlock(&w->control_lock);
    /* Release: who sees the count sees the connection. */
    atomic_fetch_add_explicit(&w->links, 1, memory_order_release);
}

static void greeted(void *ctx, int socket, cd_control_kind kind, const cd_hello *hello)
{
    struct cd_monitor *m = ctx;
    cd_world *w = m->world;
    int peer = hello->me.rank;
    bool known = peer >= 0 && peer < w->world && peer != w->rank && hello->me.world == w->world;
    bool for_me = memcmp(hello->target, w->members[w->rank].nonce, CD_MEMBER_NONCE_BYTES) == 0;
    bool genuine = known && for_me && memcmp(hello->me.nonce, w->members[peer].nonce, CD_MEMBER_NONCE_BYTES) == 0;
    if (kind == CD_CONTROL_DATA && genuine) {
        take_link(m, socket, hello);
        return;
    }
    if (kind == CD_CONTROL_SECOND && genuine && w->controls[peer] < 0 &&
        !atomic_load_explicit(&w->controls_live, memory_order_acquire)) {
        take_second(m, socket, hello);
        return;
    }
    /* One that is ahead of us: it left, and meets the others anew. */
    bool same = known && cd_member_is_same_process(&w->members[peer], &hello->me);
    bool free_place = !known || same || atomic_load_explicit(&w->gone[peer], memory_order_acquire) || m->expected[peer] ||
                      m->ended_ns[peer] || atomic_load_explicit(&w->closing, memory_order_relaxed);
    if (kind == CD_CONTROL_HELLO && for_me && !free_place) {
        const cd_member *other = &w->members[peer];
        cd_fail_rank(CD_REFUSED, peer, "two processes claim rank %d: pid %u on %s, which is at work, and pid %u on %s", peer,
                     other->process, other->host_name, hello->me.process, hello->me.host_name);
        answer(socket, CD_CONTROL_REFUSED, cd_last_error(), sizeof(cd_error));
    } else {
        answer(socket, CD_CONTROL_STALE, 0, 0);
    }
    close(socket);
}

static bool make_room(struct cd_monitor *m, int room)
{
    if (room <= m->room)
        return true;
    struct pollfd *more = realloc(m->entries, (size_t)room * sizeof *more);
    if (!more)
        return false;
    m->entries = more;
    m->room = room;
    return true;
}

/* Fills entries: wake, greeter, handout, then controls and processes with `owner` telling whose. */
static int poll_set(struct cd_monitor *m, int *first_control, int *first_process)
{
    cd_world *w = m->world;
    int count = 0;
    m->entries[count++] = (struct pollfd){.fd = m->wake, .events = POLLIN};
    count += cd_greeter_poll_set(w->greeter, m->entries + count, 64);
    count += cd_handout_poll_set(w->handout, m->entries + count, 64);
    *first_control = count;
    bool live = atomic_load_explicit(&w->controls_live, memory_order_acquire);
    for (int r = 0; r < w->world; r++)
        m->entries[count++] = (struct pollfd){.fd = live ? w->controls[r] : -1, .events = POLLIN};
    *first_process = count;
    for (int r = 0; r < w->world; r++)
        m->entries[count++] = (struct pollfd){.fd = live ? m->process_fds[r] : -1, .events = POLLIN};
    return count;
}

static void watch_processes(struct cd_monitor *m)
{
    cd_world *w = m->world;
    for (int r = 0; r < w->world; r++)
        if (r != w->rank && cd_world_sees_process(w, r))
            m->process_fds[r] = (int)syscall(SYS_pidfd_open, (pid_t)w->members[r].process, 0);
}

static void serve(struct cd_monitor *m, int first_control, int first_process)
{
    cd_world *w = m->world;
    for (int r = 0; r < w->world; r++) {
        if (m->entries[first_control + r].revents && read_control(m, r))
            drop_control(m, r);
        if (m->entries[first_process + r].revents)
            process_ended(m, r);
    }
}

static void *monitor_main(void *arg)
{
    struct cd_monitor *m = arg;
    cd_world *w = m->world;
    bool watching = false, waits = false;
    while (!atomic_load_explicit(&m->stop, memory_order_acquire)) {
        if (!watching && atomic_load_explicit(&w->controls_live, memory_order_acquire)) {
            watch_processes(m);
            watching = true;
        }
        int first_control, first_process;
        int count = poll_set(m, &first_control, &first_process);
        if (poll(m->entries, (nfds_t)count, waits ? DYING_MS : 1000) < 0 && errno != EINTR)
            cd_log(CD_LOG_WARN, "rank %d: monitor: poll failed with errno %d", w->rank, errno);
        uint64_t drained;
        while (read(m->wake, &drained, sizeof drained) > 0) {
        }
        if (cd_greeter_serve(w->greeter, greeted, m) != CD_OK)
            cd_log(CD_LOG_WARN, "%s", cd_last_error()->text);
        cd_handout_serve(w->handout);
        serve(m, first_control, first_process);
        waits = settle_ends(m);
    }
    return 0;
}

cd_status cd_monitor_start(cd_world *w)
{
    struct cd_monitor *m = calloc(1, sizeof *m);
    if (!m)
        return cd_fail(CD_NO_MEMORY, "no memory for the monitor");
    w->monitor = m;
    m->world = w;
    size_t ranks = (size_t)w->world;
    m->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (m->wake < 0)
        return cd_fail_errno(CD_IO, errno, "the monitor's eventfd");
    m->readers = calloc(ranks, sizeof *m->readers);
    m->process_fds = malloc(ranks * sizeof *m->process_fds);
    m->expected = calloc(ranks, sizeof *m->expected);
    m->ended_ns = calloc(ranks, sizeof *m->ended_ns);
    if (!m->readers || !m->process_fds || !m->expected || !m->ended_ns || !make_room(m, 129 + 2 * w->world))
        return cd_fail(CD_NO_MEMORY, "no memory for the monitor");
    for (size_t r = 0; r < ranks; r++)
        m->process_fds[r] = -1;
    /* Signals are for the threads of the program, whose handlers may expect to run there. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&m->thread, 0, monitor_main, m);
    pthread_sigmask(SIG_SETMASK, &before, 0);
    if (error) {
        m->thread = 0;
        return cd_fail_errno(CD_NO_MEMORY, error,
                             "cannot start the monitor thread (see ulimit -u, and pids.max of the container)");
    }
    return CD_OK;
}

void cd_monitor_wake(cd_world *w)
{
    uint64_t one = 1;
    if (w->monitor && write(w->monitor->wake, &one, sizeof one) < 0)
        return; /* the counter is full: it will wake anyway */
}

void cd_monitor_stop(cd_world *w)
{
    struct cd_monitor *m = w->monitor;
    if (!m)
        return;
    atomic_store_explicit(&m->stop, true, memory_order_release);
    cd_monitor_wake(w);
    /* In a forked child the thread does not exist. */
    if (m->thread && !cd_world_forked(w))
        pthread_join(m->thread, 0);
    for (int r = 0; m->process_fds && r < w->world; r++)
        if (m->process_fds[r] >= 0)
            close(m->process_fds[r]);
    if (m->wake >= 0)
        close(m->wake);
    free(m->readers);
    free(m->process_fds);
    free(m->expected);
    free(m->ended_ns);
    free(m->entries);
    free(m);
    w->monitor = 0;
}
