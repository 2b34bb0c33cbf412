#include "store/server.h"

#include "base/host.h"
#include "base/log.h"
#include "net/sock.h"
#include "store/server_impl.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#define EVENTS 256
#define READ_BYTES 65536
/* Of one client in one turn, so that one with much to say does not delay the others. */
#define READS_A_TURN 16
#define FILES_MOST 65536
#define ACCEPT_PAUSE_MS 100
/* After this long without a free descriptor clients are told so: those that it has do not go, and others would wait in vain. */
#define FULL_NS CD_NS_PER_S
/* Addresses of one host name. */
#define LISTENERS_MOST 8
/* How long the thread looks for the next request before it sleeps: a client in a chain of calls asks again within this. */
#define LOOK_NS UINT64_C(30000)

struct cd_server {
    hub hub;
    int epoll, stop_event, listeners[LISTENERS_MOST], listener_count;
    uint16_t port;
    pid_t pid;
    cd_secret secret;
    conn *conns;      /* newest first */
    bool accept_paused;
    uint64_t full_since_ns; /* connections wait in vain, which was said; 0: none does */
    int spare;              /* a descriptor to tell them with */
    _Atomic int open; /* relaxed: a figure for tests */
    pthread_t thread;
    uint8_t *scratch;
};

static bool pile_room(pile *p, size_t bytes)
{
    if (p->start == p->end)
        p->start = p->end = 0;
    if (p->room - p->end >= bytes)
        return true;
    if (p->start) {
        memmove(p->data, p->data + p->start, p->end - p->start);
        p->end -= p->start;
        p->start = 0;
        if (p->room - p->end >= bytes)
            return true;
    }
    size_t room = p->room ? p->room : 256;
    while (room - p->end < bytes)
        room *= 2;
    uint8_t *larger = realloc(p->data, room);
    if (!larger)
        return false;
    p->data = larger;
    p->room = room;
    return true;
}

/* Idle clients keep no large buffers. */
static void pile_shrink(pile *p)
{
    if (p->start == p->end && p->room > 4096) {
        free(p->data);
        *p = (pile){0};
    }
}

void hub_doom(hub *h, conn *c, const char *why)
{
    if (c->doomed)
        return;
    c->doomed = true;
    c->next_doomed = h->doomed;
    h->doomed = c;
    if (why && cd_log_topic("store")) {
        char peer[CD_SOCK_TEXT_BYTES];
        cd_log_about("store", "connection of %s dropped: %s", cd_sock_peer_text(c->fd, peer), why);
    }
}

void hub_answer(hub *h, conn *c, const void *data, size_t bytes)
{
    if (c->doomed)
        return;
    if (c->out.end - c->out.start + bytes > CD_STORE_ANSWERS_MOST) {
        hub_doom(h, c, "it asked for more than 1 GiB of answers at once");
        return;
    }
    if (!pile_room(&c->out, bytes)) {
        hub_doom(h, c, "no memory for its answers");
        return;
    }
    if (bytes)
        memcpy(c->out.data + c->out.end, data, bytes);
    c->out.end += bytes;
}

void hub_flush(hub *h, conn *c)
{
    while (!c->doomed && c->out.start < c->out.end) {
        size_t moved;
        if (cd_sock_send_some(c->fd, c->out.data + c->out.start, c->out.end - c->out.start, &moved) != CD_OK)
            hub_doom(h, c, NULL);
        else if (!moved)
            return; /* refresh_interest asks for EPOLLOUT */
        else
            c->out.start += moved;
    }
    pile_shrink(&c->out);
}

static bool is_paused(const conn *c)
{
    return c->out.end - c->out.start > PAUSE_BYTES;
}

static void refresh_interest(cd_server *s, conn *c)
{
    uint32_t events = (is_paused(c) ? 0u : (uint32_t)EPOLLIN) | (c->out.start < c->out.end ? (uint32_t)EPOLLOUT : 0u);
    if (c->doomed || events == c->events)
        return;
    struct epoll_event event = {.events = events, .data.ptr = c};
    if (epoll_ctl(s->epoll, EPOLL_CTL_MOD, c->fd, &event) != 0)
        hub_doom(&s->hub, c, "epoll_ctl failed");
    c->events = events;
}

/* The parts of the handshake; bytes used, 0 when more must come. */
static size_t shake_hands(cd_server *s, conn *c, const uint8_t *data, size_t bytes)
{
    if (c->stage == STAGE_HELLO) {
        if (bytes < CD_AUTH_HELLO_BYTES && data[0] == 'C')
            return 0;
        uint8_t reply[CD_AUTH_REPLY_BYTES];
        if (bytes < CD_AUTH_HELLO_BYTES || cd_auth_reply(&c->auth, &s->secret, data, reply) != CD_OK) {
            hub_doom(&s->hub, c, "it did not begin with the proof of the job secret");
            return 0;
        }
        hub_answer(&s->hub, c, reply, sizeof reply);
        c->stage = STAGE_PROOF;
        return CD_AUTH_HELLO_BYTES;
    }
    if (bytes < CD_AUTH_PROOF_BYTES)
        return 0;
    if (cd_auth_verify(&c->auth, &s->secret, data) != CD_OK) {
        hub_doom(&s->hub, c, "it does not know the job secret");
        return 0;
    }
    c->stage = STAGE_VALIDATE;
    return CD_AUTH_PROOF_BYTES;
}

static size_t run_one(cd_server *s, conn *c, const uint8_t *data, size_t bytes)
{
    if (c->stage < STAGE_VALIDATE)
        return shake_hands(s, c, data, bytes);
    if (c->stage == STAGE_VALIDATE && data[0] != CD_REQ_VALIDATE) {
        hub_doom(&s->hub, c, "it does not speak the store's protocol");
        return 0;
    }
    cd_scan_result result = cd_proto_scan(&c->scan, data, bytes);
    if (result == CD_SCAN_MORE)
        return 0;
    size_t used = c->scan.at;
    if (result == CD_SCAN_BAD || !hub_run(&s->hub, c, data, used)) {
        hub_doom(&s->hub, c, "it sent a bad request (unknown, too large, or add to a value that is no number)");
        return 0;
    }
    c->scan = (cd_scan){0};
    c->stage = STAGE_OPEN;
    return used;
}

/* Runs all complete requests; bytes used. */
static size_t run_all(cd_server *s, conn *c, const uint8_t *data, size_t bytes)
{
    size_t used = 0, part = 1;
    while (part && used < bytes && !c->doomed && !is_paused(c)) {
        part = run_one(s, c, data + used, bytes - used);
        used += part;
    }
    return used;
}

/* One read; true when there may be more. */
static bool read_once(cd_server *s, conn *c)
{
    bool begun = c->in.start < c->in.end;
    if (begun && !pile_room(&c->in, READ_BYTES)) {
        hub_doom(&s->hub, c, "no memory for its request");
        return false;
    }
    uint8_t *room = begun ? c->in.data + c->in.end : s->scratch;
    size_t got = 0;
    if (cd_sock_recv_some(c->fd, room, READ_BYTES, &got) != CD_OK) {
        hub_doom(&s->hub, c, NULL);
        return false;
    }
    if (begun) {
        c->in.end += got;
        c->in.start += run_all(s, c, c->in.data + c->in.start, c->in.end - c->in.start);
        pile_shrink(&c->in);
    } else if (got) {
        size_t used = run_all(s, c, s->scratch, got);
        if (used < got && !c->doomed) {
            if (!pile_room(&c->in, got - used)) {
                hub_doom(&s->hub, c, "no memory for its request");
                return false;
            }
            memcpy(c->in.data + c->in.end, s->scratch + used, got - used);
            c->in.end += got - used;
        }
    }
    return got == READ_BYTES;
}

/* Sends, and runs requests that waited for their answers' room, until one of them is used up. */
static void drain(cd_server *s, conn *c)
{
    for (size_t used = 1; used;) {
        hub_flush(&s->hub, c);
        if (c->doomed || is_paused(c) || c->in.start == c->in.end)
            return;
        used = run_all(s, c, c->in.data + c->in.start, c->in.end - c->in.start);
        c->in.start += used;
        pile_shrink(&c->in);
    }
}

static void serve(cd_server *s, conn *c, uint32_t events)
{
    if (c->doomed)
        return;
    if (events & (EPOLLERR | EPOLLHUP) && !(events & EPOLLIN))
        hub_doom(&s->hub, c, NULL);
    drain(s, c);
    bool more = events & EPOLLIN;
    for (int i = 0; i < READS_A_TURN && more && !c->doomed && !is_paused(c); i++) {
        more = read_once(s, c);
        drain(s, c);
    }
    refresh_interest(s, c);
}

static void free_conn(cd_server *s, conn *c)
{
    hub_forget_watches(&s->hub, c);
    *c->link = c->next;
    if (c->next)
        c->next->link = c->link;
    close(c->fd);
    free(c->in.data);
    free(c->out.data);
    free(c);
    atomic_fetch_sub_explicit(&s->open, 1, memory_order_relaxed);
}

static void bury(cd_server *s)
{
    while (s->hub.doomed) {
        conn *c = s->hub.doomed;
        s->hub.doomed = c->next_doomed;
        /* A forked process may still hold the socket open: then closing it would leave it in the epoll, with a pointer to
         * freed memory. Not in free_conn, since a fork that frees its copy shares the epoll with us. */
        epoll_ctl(s->epoll, EPOLL_CTL_DEL, c->fd, NULL);
        free_conn(s, c);
    }
}

static void add_conn(cd_server *s, int fd)
{
    conn *c = calloc(1, sizeof *c);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
    if (!c || epoll_ctl(s->epoll, EPOLL_CTL_ADD, fd, &event) != 0) {
        free(c);
        close(fd);
        return;
    }
    c->fd = fd;
    c->events = EPOLLIN;
    c->stage = s->secret.is_set ? STAGE_HELLO : STAGE_VALIDATE;
    c->handshake_end_ns = cd_now_ns() + CD_AUTH_DEADLINE_NS;
    c->next = s->conns;
    c->link = &s->conns;
    if (c->next)
        c->next->link = &c->next;
    s->conns = c;
    atomic_fetch_add_explicit(&s->open, 1, memory_order_relaxed);
}

static bool raise_file_limit(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0)
        return false;
    rlim_t most = limit.rlim_max < FILES_MOST ? limit.rlim_max : FILES_MOST;
    if (limit.rlim_cur >= most)
        return false;
    limit.rlim_cur = most;
    return setrlimit(RLIMIT_NOFILE, &limit) == 0;
}

static void pause_accept(cd_server *s, bool pause)
{
    struct epoll_event event = {.events = pause ? 0u : (uint32_t)EPOLLIN, .data.ptr = s->listeners};
    for (int i = 0; i < s->listener_count; i++)
        epoll_ctl(s->epoll, EPOLL_CTL_MOD, s->listeners[i], &event);
    s->accept_paused = pause;
}

static void tell_full(void *ctx, int fd)
{
    const char *text = ctx;
    char greeting[64];
    (void)send(fd, text, strlen(text), MSG_NOSIGNAL);
    (void)recv(fd, greeting, sizeof greeting, 0); /* else closing would take the answer back */
}

static void turn_away(cd_server *s, int listener)
{
    char text[sizeof CD_STORE_FULL + CD_ERROR_TEXT_BYTES];
    snprintf(text, sizeof text, CD_STORE_FULL "%s", cd_last_error()->text);
    cd_sock_turn_away(listener, &s->spare, tell_full, text);
}

static void accept_all(cd_server *s, int listener)
{
    for (;;) {
        int fd = -1;
        cd_status status = cd_sock_accept(listener, &fd);
        if (status == CD_NO_MEMORY && raise_file_limit())
            continue;
        if (status != CD_OK) {
            if (!s->full_since_ns)
                cd_log(CD_LOG_WARN, "store on port %u: %s; it tries again", s->port, cd_last_error()->text);
            if (!s->full_since_ns)
                s->full_since_ns = cd_now_ns();
            else if (status == CD_NO_MEMORY && cd_now_ns() - s->full_since_ns > FULL_NS)
                turn_away(s, listener);
            pause_accept(s, true);
            return;
        }
        if (fd < 0) { /* nobody is left waiting; without free descriptors the system says that first */
            s->full_since_ns = 0;
            return;
        }
        add_conn(s, fd);
    }
}

/* Drops those that have not said who they are in time; milliseconds to the next one, −1 if none. Handshakes take longest while
 * everybody connects, and connections are newest first, so the walk ends at the first that is old enough to be settled. */
static int expire(cd_server *s)
{
    uint64_t now = cd_now_ns(), next = UINT64_MAX;
    for (conn *c = s->conns; c && c->handshake_end_ns + CD_NS_PER_S > now; c = c->next) {
        if (c->stage == STAGE_OPEN || c->doomed)
            continue;
        if (c->handshake_end_ns <= now)
            hub_doom(&s->hub, c, "it said nothing");
        else if (c->handshake_end_ns < next)
            next = c->handshake_end_ns;
    }
    bury(s);
    return next == UINT64_MAX ? -1 : (int)((next - now) / CD_NS_PER_MS) + 1;
}

static int await_events(cd_server *s, struct epoll_event *events, bool look)
{
    uint64_t end = look ? cd_now_ns() + LOOK_NS : 0;
    while (look) {
        int count = epoll_wait(s->epoll, events, EVENTS, 0);
        if (count || cd_now_ns() >= end)
            look = false;
        if (count)
            return count;
        sched_yield();
    }
    int sleep_ms = expire(s);
    if (s->accept_paused && (sleep_ms < 0 || sleep_ms > ACCEPT_PAUSE_MS))
        sleep_ms = ACCEPT_PAUSE_MS;
    int count = epoll_wait(s->epoll, events, EVENTS, sleep_ms);
    if (s->accept_paused)
        pause_accept(s, false);
    return count;
}

static void *run(void *argument)
{
    cd_server *s = argument;
    struct epoll_event events[EVENTS];
    bool look = cd_host_cores() > 1;
    for (int count = 0;;) {
        count = await_events(s, events, look && count > 0);
        for (int i = 0; i < count; i++) {
            if (events[i].data.ptr == &s->stop_event)
                return NULL;
            if (events[i].data.ptr != s->listeners)
                serve(s, events[i].data.ptr, events[i].events);
            else
                for (int k = 0; k < s->listener_count; k++)
                    accept_all(s, s->listeners[k]);
        }
        bury(s);
    }
}

static cd_status start_thread(cd_server *s)
{
    /* Signals are for the threads of the program: this one takes none. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&s->thread, NULL, run, s);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error ? cd_fail_errno(CD_NO_MEMORY, error,
                             "cannot start the thread of the store (see ulimit -u, and pids.max of the container)") : CD_OK;
}

static void free_server(cd_server *s)
{
    while (s->conns)
        free_conn(s, s->conns);
    cd_table_clear(&s->hub.table);
    if (s->epoll >= 0)
        close(s->epoll);
    if (s->stop_event >= 0)
        close(s->stop_event);
    if (s->spare >= 0)
        close(s->spare);
    free(s->scratch);
    free(s);
}

static cd_status prepare(cd_server *s)
{
    struct epoll_event stop = {.events = EPOLLIN, .data.ptr = &s->stop_event};
    struct epoll_event accept = {.events = EPOLLIN, .data.ptr = s->listeners};
    CD_TRY(cd_table_init(&s->hub.table));
    if (!s->scratch)
        return cd_fail(CD_NO_MEMORY, "no memory for the store's server");
    bool is_set_up = s->epoll >= 0 && s->stop_event >= 0 && epoll_ctl(s->epoll, EPOLL_CTL_ADD, s->stop_event, &stop) == 0;
    for (int i = 0; i < s->listener_count && is_set_up; i++)
        is_set_up = epoll_ctl(s->epoll, EPOLL_CTL_ADD, s->listeners[i], &accept) == 0;
    return is_set_up ? start_thread(s) : cd_fail_errno(CD_NETWORK, errno, "cannot set up the store's server");
}

static cd_status open_listeners(cd_server *s, const cd_server_options *options)
{
    if (options->listen_fd < 0)
        return cd_sock_listen_all(options->host, options->port, options->is_one_host, s->listeners, LISTENERS_MOST,
                                  &s->listener_count, &s->port);
    CD_TRY(cd_sock_adopt_listener(options->listen_fd, &s->port));
    s->listeners[s->listener_count++] = options->listen_fd;
    return CD_OK;
}

static void close_listeners(const cd_server *s)
{
    for (int i = 0; i < s->listener_count; i++)
        close(s->listeners[i]);
}

cd_status cd_server_start(const cd_server_options *options, cd_server **out)
{
    cd_server *s = calloc(1, sizeof *s);
    if (!s)
        return cd_fail(CD_NO_MEMORY, "no memory for the store's server");
    s->pid = getpid();
    s->secret = options->secret;
    s->scratch = malloc(READ_BYTES);
    s->epoll = epoll_create1(EPOLL_CLOEXEC);
    s->spare = cd_host_spare_file();
    s->stop_event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    cd_status status = open_listeners(s, options);
    if (status == CD_OK)
        status = prepare(s);
    if (status == CD_OK) {
        *out = s;
        return CD_OK;
    }
    if (options->listen_fd < 0)
        close_listeners(s);
    free_server(s);
    return status;
}

uint16_t cd_server_port(const cd_server *server)
{
    return server->port;
}

int cd_server_connections(const cd_server *server)
{
    return atomic_load_explicit(&server->open, memory_order_relaxed);
}

void cd_server_stop(cd_server *server)
{
    if (!server)
        return;
    if (server->pid == getpid()) {
        uint64_t one = 1;
        if (write(server->stop_event, &one, sizeof one) == sizeof one)
            pthread_join(server->thread, NULL);
    }
    close_listeners(server);
    free_server(server);
}
