/* The client of the TCP store. Quick requests share one connection, in turn, so that what one thread has set the next one sees;
 * a wait that does not end at once moves to a connection of its own, so that it never holds up the others.
 *
 * The server may be torch's of any age, and an opcode that it does not know ends the connection: so only opcodes 0 to 13 are
 * used, and queues (14 to 16), list_keys (17) where the caller asks for them. */
#include "net/addr.h"
#include "net/sock.h"
#include "store/client_impl.h"
#include "store/kinds.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* How long a server that accepts connections but closes them at once is asked again: it may be starting behind a proxy. */
#define SHUT_DOOR_NS (3 * CD_NS_PER_S)
/* A quick request gets at least this long, also under a deadline of 0. */
#define LEAST_NS CD_NS_PER_S
#define IDLE_LINES 4
#define INIT_KEY "init/"

cd_status tcp_lost(const tcp_store *s, cd_status status)
{
    if (atomic_load_explicit(&s->closed, memory_order_acquire))
        return cd_fail(CD_STORE, CD_STORE_CLOSED_TEXT);
    if (status != CD_PEER_LOST && status != CD_IO)
        return status;
    return cd_fail(CD_STORE, "store at %s:%u lost: %s", s->host, s->port, cd_last_error()->text);
}

/* By a forked child, which only closes what it has of it: what another thread of the parent held stays locked. */
bool tcp_is_inherited(const tcp_store *s)
{
    return s->pid != getpid();
}

/* ---- connections ---- */

static void forget_line(tcp_store *s, tcp_line *line)
{
    bool locks = !tcp_is_inherited(s);
    if (locks)
        pthread_mutex_lock(&s->lock);
    if (line->fd >= 0)
        close(line->fd);
    line->fd = -1;
    if (line->link) {
        *line->link = line->next;
        if (line->next)
            line->next->link = line->link;
        line->link = NULL;
    }
    if (locks)
        pthread_mutex_unlock(&s->lock);
}

/* Registers the socket so that close can shut it down. */
static cd_status keep_line(tcp_store *s, tcp_line *line, int fd)
{
    pthread_mutex_lock(&s->lock);
    bool closed = atomic_load_explicit(&s->closed, memory_order_relaxed);
    if (!closed) {
        line->fd = fd;
        line->start = line->end = 0;
        line->next = s->lines;
        line->link = &s->lines;
        if (line->next)
            line->next->link = &line->next;
        s->lines = line;
    }
    pthread_mutex_unlock(&s->lock);
    if (closed)
        close(fd);
    return closed ? cd_fail(CD_STORE, CD_STORE_CLOSED_TEXT) : CD_OK;
}

/* What a ping carries. A server of this protocol sends it back; one that reads lines takes it for the end of a request, and
 * answers too instead of waiting for more. */
static const uint8_t ping[4] = {'\r', '\n', '\r', '\n'};

/* Quotes what came instead of a store's answer, as far as it is text. */
static cd_status tell_stranger(int fd, const uint8_t *answer, size_t bytes)
{
    uint8_t line[48];
    memcpy(line, answer, bytes);
    ssize_t more = recv(fd, line + bytes, sizeof line - bytes, MSG_DONTWAIT);
    size_t end = 0, got = bytes + (more > 0 ? (size_t)more : 0);
    while (end < got && line[end] >= ' ' && line[end] <= '~')
        end++;
    return cd_fail(CD_PROTOCOL, "it answered \"%.*s\"", (int)end, (const char *)line);
}

/* Magic and ping go out together. */
static cd_status greet(int fd, const cd_secret *secret, const cd_patience *patience)
{
    CD_TRY(cd_auth_connect(fd, secret, patience));
    uint8_t hello[10], answer[sizeof ping];
    cd_writer writer = cd_writer_of(hello, sizeof hello);
    cd_put_u8(&writer, CD_REQ_VALIDATE);
    cd_put_u32(&writer, CD_STORE_MAGIC);
    cd_put_u8(&writer, CD_REQ_PING);
    memcpy(hello + 6, ping, sizeof ping);
    CD_TRY(cd_sock_send_all(fd, hello, sizeof hello, patience));
    cd_status status = cd_sock_recv_all(fd, answer, sizeof answer, patience);
    if (status == CD_TIMED_OUT)
        return cd_fail(CD_TIMED_OUT, "It takes connections but does not answer as a store does (another program, or a process "
                                     "that is stopped)");
    CD_TRY(status);
    if (memcmp(answer, CD_STORE_FULL, sizeof answer) == 0) {
        char why[200] = "";
        (void)recv(fd, why, sizeof why - 1, MSG_DONTWAIT); /* came with it */
        return cd_fail(CD_REFUSED, "its server takes no further connection: %s", why);
    }
    return memcmp(answer, ping, sizeof ping) == 0 ? CD_OK : tell_stranger(fd, answer, sizeof answer);
}

static cd_status knock(tcp_store *s, const cd_patience *patience, int *fd_p)
{
    int fd;
    CD_TRY(cd_sock_connect_once(s->host, s->port, patience, &fd));
    cd_status status = greet(fd, &s->secret, patience);
    if (status != CD_OK) {
        close(fd);
        return status;
    }
    *fd_p = fd;
    return CD_OK;
}

static cd_status explain_knock(const tcp_store *s, cd_status status, uint64_t began)
{
    cd_error why = *cd_last_error();
    const char *cause = why.text, *remedy;
    switch (status) {
    case CD_INTERRUPTED:
    case CD_BAD_ARGUMENT: return status;
    case CD_PEER_LOST:
        return cd_fail(CD_REFUSED, "store at %s:%u closes new connections at once: %s", s->host, s->port,
                       s->secret.is_set ? "it has no job secret or another one (CDIST_JOB_SECRET is set here)"
                                        : "it is no store (see MASTER_ADDR and MASTER_PORT), or it expects a job secret "
                                         "(CDIST_JOB_SECRET)");
    case CD_REFUSED: return cd_fail(status, "store at %s:%u: %s", s->host, s->port, cause);
    case CD_PROTOCOL:
        return cd_fail(status,
                       "what listens at %s:%u is no store, %s: another program has that port, choose a free one of rank 0's host "
                       "(MASTER_PORT), or correct MASTER_ADDR",
                       s->host, s->port, cause);
    default:
        remedy = cd_addr_stays_here(s->host)
                     ? ": does rank 0 run? That address is this very host; where rank 0 is on another one, MASTER_ADDR is "
                       "wrong"
                     : ": does rank 0 run there? See MASTER_ADDR and MASTER_PORT";
        return cd_fail(CD_NETWORK,
                       "The client socket has timed out after %" PRIu64 "ms while trying to connect to (%s, %u). %s%s",
                       (cd_now_ns() - began + CD_NS_PER_MS / 2) / CD_NS_PER_MS, s->host, s->port, cause, remedy);
    }
}

/* Knocks until someone opens or patience ends. */
static cd_status connect_line(tcp_store *s, tcp_line *line, const cd_patience *patience)
{
    uint64_t began = cd_now_ns(), first_shut = 0;
    cd_waiter waiter = cd_waiter_start(patience);
    for (int attempt = 0;; attempt++) {
        int fd;
        cd_status status = knock(s, patience, &fd);
        if (status == CD_OK)
            return keep_line(s, line, fd);
        if (status == CD_PEER_LOST && !first_shut)
            first_shut = cd_now_ns();
        bool again = status == CD_NETWORK || status == CD_IO ||
                     (status == CD_PEER_LOST && cd_now_ns() - first_shut < SHUT_DOOR_NS);
        if (!again)
            return explain_knock(s, status, began);
        cd_error cause = *cd_last_error();
        cd_status pause = cd_sock_back_off(attempt, &waiter);
        if (pause == CD_TIMED_OUT) {
            cd_fail_with(&cause);
            return explain_knock(s, status, began);
        }
        CD_TRY(pause);
    }
}

static cd_status check_process(const tcp_store *s)
{
    if (tcp_is_inherited(s))
        return cd_fail(CD_STORE, "store client of %s:%u was inherited over fork: make a new one in the child", s->host, s->port);
    return CD_OK;
}

/* ---- turns on the shared connection ---- */

static void leave_quick(tcp_store *s, cd_status status)
{
    if (status != CD_OK)
        forget_line(s, &s->quick); /* the stream may be out of step: the next request gets a new one */
    pthread_mutex_lock(&s->lock);
    s->quick_busy = false;
    pthread_cond_signal(&s->quick_free);
    pthread_mutex_unlock(&s->lock);
}

static cd_status enter_quick(tcp_store *s, const cd_patience *patience)
{
    cd_waiter waiter = cd_waiter_start(patience);
    pthread_mutex_lock(&s->lock);
    while (s->quick_busy) {
        /* Open while idle runs: it may take the GIL, and whoever has the GIL may want the lock. */
        pthread_mutex_unlock(&s->lock);
        cd_status status = cd_waiter_check(&waiter);
        if (status != CD_OK)
            return status;
        pthread_mutex_lock(&s->lock);
        if (!s->quick_busy)
            break;
        uint64_t end = cd_now_ns() + (uint64_t)cd_waiter_nap_ms(&waiter) * CD_NS_PER_MS;
        struct timespec at = {.tv_sec = (time_t)(end / CD_NS_PER_S), .tv_nsec = (long)(end % CD_NS_PER_S)};
        pthread_cond_timedwait(&s->quick_free, &s->lock, &at);
    }
    s->quick_busy = true;
    pthread_mutex_unlock(&s->lock);
    return CD_OK;
}

cd_status tcp_quick(tcp_store *s, const tcp_message *message,
                    cd_status (*read)(tcp_line *, void *, const cd_patience *), void *out,
                    const cd_patience *patience)
{
    CD_TRY(check_process(s));
    if (atomic_load_explicit(&s->closed, memory_order_acquire))
        return cd_fail(CD_STORE, CD_STORE_CLOSED_TEXT);
    uint64_t began = cd_now_ns();
    cd_patience least = *patience;
    if (cd_deadline_left_ns(least.deadline) < LEAST_NS)
        least.deadline = cd_deadline_after_ns(LEAST_NS);
    cd_status status = enter_quick(s, &least);
    if (status == CD_OK) {
        if (s->quick.fd < 0) {
            cd_patience once = least;
            once.deadline = cd_deadline_earlier(least.deadline, cd_deadline_after_ns(LEAST_NS));
            status = connect_line(s, &s->quick, &once);
            if (status == CD_NETWORK || status == CD_REFUSED)
                status = cd_fail(CD_STORE, "store at %s:%u lost", s->host, s->port);
        }
        if (status == CD_OK)
            status = cd_sock_send_all(s->quick.fd, message->data, message->bytes, &least);
        if (status == CD_OK && read)
            status = read(&s->quick, out, &least);
        leave_quick(s, status);
    }
    if (status == CD_TIMED_OUT)
        return cd_fail(CD_STORE_TIMEOUT, "store at %s:%u: no answer, timeout after %" PRIu64 "ms", s->host, s->port,
                       (cd_now_ns() - began) / CD_NS_PER_MS);
    return status == CD_OK ? CD_OK : tcp_lost(s, status);
}

/* ---- waits ---- */

static cd_status take_line(tcp_store *s, tcp_line **out, const cd_patience *patience)
{
    pthread_mutex_lock(&s->lock);
    tcp_line *line = s->idle;
    if (line) {
        s->idle = line->next_idle;
        s->idle_count--;
    }
    pthread_mutex_unlock(&s->lock);
    if (!line) {
        line = malloc(sizeof *line);
        if (!line)
            return cd_fail(CD_NO_MEMORY, "no memory for a connection");
        *line = (tcp_line){.fd = -1};
        cd_status status = connect_line(s, line, patience);
        if (status != CD_OK) {
            free(line);
            return status;
        }
    }
    *out = line;
    return CD_OK;
}

static void give_line(tcp_store *s, tcp_line *line, bool usable)
{
    pthread_mutex_lock(&s->lock);
    bool keep = usable && s->idle_count < IDLE_LINES;
    if (keep) {
        line->next_idle = s->idle;
        s->idle = line;
        s->idle_count++;
    }
    pthread_mutex_unlock(&s->lock);
    if (!keep) {
        forget_line(s, line);
        free(line);
    }
}

/* A new connection may have reached another server than the first one did, which was closed since (a group that is made again at
 * once, at the address of the last): there nothing would come of the wait. The first connection tells. */
static cd_status check_same_server(tcp_store *s)
{
    char probe;
    pthread_mutex_lock(&s->lock);
    bool gone = s->quick.fd >= 0 && recv(s->quick.fd, &probe, 1, MSG_PEEK | MSG_DONTWAIT) == 0;
    pthread_mutex_unlock(&s->lock);
    return gone ? cd_fail(CD_STORE, "store at %s:%u lost: it closed the connection", s->host, s->port) : CD_OK;
}

/* After the deadline: takes the wait back. *came_p: the answer crossed the cancellation, so the keys are there. */
static cd_status cancel_wait(tcp_line *line, const cd_patience *patience, bool *came_p)
{
    cd_patience grace = {.deadline = cd_deadline_after_ns(LEAST_NS), .idle = patience->idle, .idle_ctx = patience->idle_ctx};
    uint8_t cancel = CD_REQ_CANCEL_WAIT, answer;
    CD_TRY(cd_sock_send_all(line->fd, &cancel, 1, &grace));
    CD_TRY(tcp_read(line, &answer, 1, &grace));
    *came_p = answer == CD_ANSWER_STOP_WAITING;
    return *came_p ? tcp_read(line, &answer, 1, &grace) : CD_OK;
}

cd_status tcp_await(tcp_store *s, const tcp_message *message, const cd_bytes *keys, size_t count, uint64_t budget_ns,
                    const cd_patience *patience)
{
    tcp_line *line = NULL;
    cd_patience connecting = *patience;
    if (cd_deadline_left_ns(connecting.deadline) < LEAST_NS)
        connecting.deadline = cd_deadline_after_ns(LEAST_NS);
    cd_status status = take_line(s, &line, &connecting);
    if (status != CD_OK)
        return status == CD_NETWORK ? cd_fail(CD_STORE, "store at %s:%u lost", s->host, s->port) : status;
    uint8_t answer = 0;
    bool came = false;
    status = check_same_server(s);
    if (status == CD_OK)
        status = cd_sock_send_all(line->fd, message->data, message->bytes, &connecting);
    if (status == CD_OK) {
        status = tcp_read(line, &answer, 1, patience);
        came = status == CD_OK;
    }
    bool usable = came;
    if (status == CD_TIMED_OUT)
        usable = cancel_wait(line, patience, &came) == CD_OK;
    give_line(s, line, usable);
    if (came)
        return CD_OK;
    return status == CD_TIMED_OUT ? cd_store_expired(budget_ns, "/", keys, count) : tcp_lost(s, status);
}

/* ---- the object ---- */

void tcp_close(cd_store *store)
{
    tcp_store *s = (tcp_store *)store;
    if (tcp_is_inherited(s))
        return;
    pthread_mutex_lock(&s->lock);
    /* Release: who finds its socket shut down sees that it was us. */
    atomic_store_explicit(&s->closed, true, memory_order_release);
    for (tcp_line *line = s->lines; line; line = line->next)
        shutdown(line->fd, SHUT_RDWR);
    pthread_mutex_unlock(&s->lock);
}

void tcp_free(cd_store *store)
{
    if (!store)
        return;
    tcp_store *s = (tcp_store *)store;
    forget_line(s, &s->quick);
    while (s->idle) {
        tcp_line *line = s->idle;
        s->idle = line->next_idle;
        forget_line(s, line);
        free(line);
    }
    if (!tcp_is_inherited(s)) /* for a thread of the parent that waits there it would wait for ever */
        pthread_cond_destroy(&s->quick_free);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

cd_status cd_tcp_store_open(const char *host, uint16_t port, const cd_secret *secret, const cd_patience *patience, cd_store **out)
{
    size_t bytes = strlen(host) + 1;
    tcp_store *s = calloc(1, sizeof *s + bytes);
    if (!s)
        return cd_fail(CD_NO_MEMORY, "no memory for a store");
    cd_store_init(&s->base, &tcp_ops);
    memcpy(s->host, host, bytes);
    s->port = port;
    s->secret = *secret;
    s->pid = getpid();
    s->quick.fd = -1;
    pthread_mutex_init(&s->lock, NULL);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&s->quick_free, &attributes);
    pthread_condattr_destroy(&attributes);
    cd_status status = connect_line(s, &s->quick, patience);
    if (status != CD_OK) {
        tcp_free(&s->base);
        return status;
    }
    *out = &s->base;
    return CD_OK;
}

cd_status cd_tcp_store_join(cd_store *store, int64_t world, bool wait_all, const cd_patience *patience)
{
    tcp_store *s = (tcp_store *)store;
    uint64_t left_ns = cd_deadline_left_ns(patience->deadline);
    uint64_t budget_s = left_ns / CD_NS_PER_S + (left_ns % CD_NS_PER_S != 0); /* connecting took a part of it already */
    int64_t joined;
    cd_bytes key = cd_bytes_of(INIT_KEY);
    CD_TRY(tcp_add_raw(s, key, 1, &joined, patience));
    s->joined_late = joined > world;
    cd_waiter waiter = cd_waiter_start(patience);
    /* Ranks of a host come within milliseconds of each other: look often at first. */
    uint64_t nap_ns = CD_NS_PER_MS / 2;
    while (wait_all && joined < world) {
        cd_deadline pause = cd_deadline_after_ns(nap_ns);
        nap_ns = nap_ns < 8 * CD_NS_PER_MS ? 2 * nap_ns : nap_ns;
        cd_status status = cd_waiter_check(&waiter);
        if (status == CD_TIMED_OUT)
            return cd_fail(CD_STORE_TIMEOUT, "Timed out after %" PRIu64 " seconds waiting for clients. %" PRId64 "/%" PRId64
                           " clients joined. Were all started, with this address and port?", budget_s, joined, world);
        CD_TRY(status);
        cd_sleep_ns(cd_deadline_left_ns(cd_deadline_earlier(pause, patience->deadline)));
        CD_TRY(tcp_add_raw(s, key, 0, &joined, patience));
    }
    return CD_OK;
}

bool cd_tcp_store_joined_late(const cd_store *store)
{
    return ((const tcp_store *)store)->joined_late;
}
