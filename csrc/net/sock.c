#include "net/sock.h"

#include "base/host.h"
#include "base/knob.h"
#include "base/log.h"
#include "net/addr.h"

#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

/* The kernel cuts it to net.core.somaxconn. */
#define BACKLOG 65535
/* A host that vanishes is noticed by the kernel after this: the promise for a lost host is 20 s. */
#define LOST_HOST_MS 15000u

void cd_sock_set_patience(int fd, unsigned patience_ms)
{
    int seconds = (int)patience_ms / 1000, interval = seconds / 5 ? seconds / 5 : 1, idle = interval, probes = 4;
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
    setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &patience_ms, sizeof patience_ms);
}

bool cd_sock_was_shut_here(int fd, int error)
{
    struct tcp_info info;
    socklen_t bytes = sizeof info;
    if (error == ECONNABORTED)
        return true;
    if (error || getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &bytes) != 0)
        return false;
    /* After the other end's FIN alone the state is CLOSE_WAIT; a reset would have been an error. */
    return info.tcpi_state == TCP_FIN_WAIT1 || info.tcpi_state == TCP_FIN_WAIT2 || info.tcpi_state == TCP_CLOSING ||
           info.tcpi_state == TCP_TIME_WAIT || info.tcpi_state == TCP_LAST_ACK || info.tcpi_state == TCP_CLOSE;
}

void cd_sock_tune(int fd)
{
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    cd_sock_set_patience(fd, LOST_HOST_MS);
}

static uint16_t port_of(const struct sockaddr_storage *address)
{
    return ntohs(address->ss_family == AF_INET6 ? ((const struct sockaddr_in6 *)address)->sin6_port
                                                : ((const struct sockaddr_in *)address)->sin_port);
}

static cd_status listen_on(struct sockaddr_storage bound, const char *address, uint16_t port, int *fd_p, uint16_t *port_p,
                           int *error_p)
{
    int fd = socket(bound.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) {
        *error_p = errno;
        return cd_fail_errno(CD_NETWORK, errno, "cannot make a socket");
    }
    int on = 1, off = 0;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bound.ss_family == AF_INET6)
        setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    socklen_t bytes = cd_addr_bytes(&bound);
    if (bind(fd, (struct sockaddr *)&bound, bytes) != 0 || listen(fd, BACKLOG) != 0 ||
        getsockname(fd, (struct sockaddr *)&bound, &bytes) != 0) {
        int error = *error_p = errno;
        close(fd);
        const char *remedy = error == EADDRINUSE      ? " (port in use: choose another, or 0 for a free one)"
                             : error == EADDRNOTAVAIL ? " (not an address of this host)"
                                                      : "";
        return cd_fail_errno(CD_NETWORK, error, "cannot listen on %s port %u%s", address, port, remedy);
    }
    *fd_p = fd;
    *port_p = port_of(&bound);
    return CD_OK;
}

cd_status cd_sock_listen(const char *address, uint16_t port, int *fd_p, uint16_t *port_p)
{
    struct sockaddr_storage bound;
    int count, error;
    CD_TRY(cd_addr_resolve(address, port, &bound, 1, &count));
    return listen_on(bound, address, port, fd_p, port_p, &error);
}

static void close_all(const int *fds, int count)
{
    for (int i = 0; i < count; i++)
        close(fds[i]);
}

static void set_port(struct sockaddr_storage *address, uint16_t port)
{
    if (address->ss_family == AF_INET6)
        ((struct sockaddr_in6 *)address)->sin6_port = htons(port);
    else
        ((struct sockaddr_in *)address)->sin_port = htons(port);
}

/* One try; port 0 becomes that which the first address got. */
static cd_status listen_at(struct sockaddr_storage *found, int count, uint16_t *port_p, int *fds, int *count_p, int *error_p)
{
    int made = 0;
    cd_status status = CD_OK;
    for (int i = 0; i < count; i++) {
        char text[64];
        cd_addr_text((const struct sockaddr *)&found[i], text, sizeof text);
        set_port(&found[i], *port_p);
        status = listen_on(found[i], text, *port_p, &fds[made], port_p, error_p);
        if (status == CD_OK)
            made++;
        else if (*error_p != EADDRNOTAVAIL && *error_p != EAFNOSUPPORT) {
            close_all(fds, made);
            return status;
        }
    }
    *count_p = made;
    return made ? CD_OK : status;
}

/* Loopback addresses alone, or all, and then what was added to what the name means here is said. */
static int choose_addresses(const char *host, bool is_one_host, struct sockaddr_storage *found, int count)
{
    int here = count - 1;
    while (here >= 0 && !cd_addr_is_loopback_of(&found[here]))
        here--;
    if (here < 1 || cd_addr_is_loopback_of(&found[0]))
        return count;
    if (is_one_host) {
        memmove(found, found + 1, (size_t)(count - 1) * sizeof *found);
        return count - 1;
    }
    char added[64], named[64];
    cd_addr_text((const struct sockaddr *)&found[0], added, sizeof added);
    cd_addr_text((const struct sockaddr *)&found[here], named, sizeof named);
    cd_log(CD_LOG_WARN, "'%s' means %s on this host (/etc/hosts), which no other host reaches: listening on %s too; "
           "CDIST_SOCKET_IFNAME or a numeric MASTER_ADDR choose another address", host, named, added);
    return count;
}

/* How often another free port is tried because the first address' one is taken on the second. */
#define FREE_PORT_TRIES 16

cd_status cd_sock_listen_all(const char *host, uint16_t port, bool is_one_host, int *fds, int most, int *count_p,
                             uint16_t *port_p)
{
    struct sockaddr_storage found[8];
    int count;
    CD_TRY(cd_addr_resolve(host, port, found, most < 8 ? most : 8, &count));
    count = choose_addresses(host, is_one_host, found, count);
    for (int tries = port ? 1 : FREE_PORT_TRIES;; tries--) {
        int error = 0;
        *port_p = port;
        cd_status status = listen_at(found, count, port_p, fds, count_p, &error);
        if (status == CD_OK || error != EADDRINUSE || tries == 1)
            return status;
    }
}

cd_status cd_sock_adopt_listener(int fd, uint16_t *port_p)
{
    int listens = 0;
    socklen_t bytes = sizeof listens;
    if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &bytes) != 0)
        return cd_fail_errno(CD_BAD_ARGUMENT, errno, "descriptor %d is no socket", fd);
    if (!listens)
        return cd_fail(CD_BAD_ARGUMENT, "descriptor %d is a socket that does not listen", fd);
    struct sockaddr_storage bound;
    bytes = sizeof bound;
    int flags = fcntl(fd, F_GETFL);
    if (getsockname(fd, (struct sockaddr *)&bound, &bytes) != 0 || flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0 ||
        fcntl(fd, F_SETFD, FD_CLOEXEC) != 0)
        return cd_fail_errno(CD_NETWORK, errno, "cannot take over listening descriptor %d", fd);
    *port_p = port_of(&bound);
    return CD_OK;
}

cd_status cd_sock_accept(int listener, int *fd_p)
{
    int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
        if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS)
            return cd_fail_errno(CD_NO_MEMORY, errno, "cannot accept a connection");
        if (errno == EBADF || errno == EINVAL || errno == ENOTSOCK)
            return cd_fail_errno(CD_IO, errno, "cannot accept connections");
        *fd_p = -1; /* EAGAIN, or a connection that was gone before it was taken */
        return CD_OK;
    }
    cd_sock_tune(fd);
    *fd_p = fd;
    return CD_OK;
}

bool cd_sock_turn_away(int listener, int *spare_p, void (*tell)(void *ctx, int fd), void *ctx)
{
    bool any = false;
    for (;;) {
        int fd = -1;
        if (*spare_p >= 0)
            close(*spare_p);
        bool is_there = cd_sock_accept(listener, &fd) == CD_OK && fd >= 0;
        if (is_there) {
            tell(ctx, fd);
            close(fd);
        }
        *spare_p = cd_host_spare_file();
        if (!is_there)
            return any;
        any = true;
    }
}

cd_status cd_sock_port_range(unsigned *first_p, unsigned *last_p)
{
    const char *range = cd_knob("CDIST_PORT_RANGE");
    unsigned first = 0, last = 0;
    int used = 0;
    bool is_read = !*range || (sscanf(range, "%u-%u%n", &first, &last, &used) == 2 && !range[used]);
    if (!is_read || (*range && (first < 1 || last > 65535 || first > last)))
        return cd_fail(CD_BAD_ARGUMENT, "CDIST_PORT_RANGE='%.100s' is not a range such as 20000-20100", range);
    *first_p = first;
    *last_p = last;
    return CD_OK;
}

cd_status cd_sock_listen_range(const char *address, int *fd_p, uint16_t *port_p)
{
    unsigned first, last;
    CD_TRY(cd_sock_port_range(&first, &last));
    if (last == 0)
        return cd_sock_listen(address, 0, fd_p, port_p);
    for (unsigned port = first; port <= last; port++)
        if (cd_sock_listen(address, (uint16_t)port, fd_p, port_p) == CD_OK)
            return CD_OK;
    return cd_fail_prefix("no free port in CDIST_PORT_RANGE=%u-%u: ", first, last);
}

/* Looking costs a system call of about 0.5 µs a turn; a round trip on loopback is below this, a sleep and wake-up are not. */
#define LOOK_NS UINT64_C(30000)

cd_status cd_sock_await(int fd, short events, cd_waiter *waiter, uint64_t *began_ns)
{
    struct pollfd entry = {.fd = fd, .events = events};
    uint64_t now = cd_now_ns();
    if (!*began_ns)
        *began_ns = now;
    if (now - *began_ns < LOOK_NS && waiter->patience->deadline.at_ns > now) {
        sched_yield(); /* where the peer shares this core it can run now */
        return CD_OK;
    }
    CD_TRY(cd_waiter_check(waiter));
    poll(&entry, 1, cd_waiter_nap_ms(waiter));
    return CD_OK;
}

static cd_status await_connect(int fd, const cd_patience *patience, int *error_p)
{
    cd_waiter waiter = cd_waiter_start(patience);
    struct pollfd entry = {.fd = fd, .events = POLLOUT};
    uint64_t began_ns = 0;
    while (poll(&entry, 1, 0) <= 0)
        CD_TRY(cd_sock_await(fd, POLLOUT, &waiter, &began_ns));
    socklen_t bytes = sizeof *error_p;
    getsockopt(fd, SOL_SOCKET, SO_ERROR, error_p, &bytes);
    return CD_OK;
}

/* What this host sends to an address of its own is lost for good while its loopback interface is down, as in a new network
 * namespace. On loopback a connection is there at once: only one that is not comes here. */
static cd_status check_loopback(int fd, const struct sockaddr_storage *to)
{
    struct ifreq loopback = {.ifr_name = "lo"};
    if (ioctl(fd, SIOCGIFFLAGS, &loopback) != 0 || loopback.ifr_flags & IFF_UP)
        return CD_OK;
    struct sockaddr_storage from;
    socklen_t bytes = sizeof from;
    if (getsockname(fd, (struct sockaddr *)&from, &bytes) != 0)
        return CD_OK;
    char here[64], there[64];
    cd_addr_text((const struct sockaddr *)&from, here, sizeof here);
    cd_addr_text((const struct sockaddr *)to, there, sizeof there);
    if (strcmp(here, there) != 0)
        return CD_OK;
    return cd_fail(CD_REFUSED, "the loopback interface of this host is down, without which it does not reach itself: ip link set "
                   "lo up");
}

cd_status cd_sock_connect_once(const char *host, uint16_t port, const cd_patience *patience, int *fd_p)
{
    struct sockaddr_storage found[8];
    int count, error = 0;
    CD_TRY(cd_addr_resolve(host, port, found, 8, &count));
    for (int i = 0; i < count; i++) {
        int fd = socket(found[i].ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (fd < 0) {
            error = errno;
            continue;
        }
        error = connect(fd, (struct sockaddr *)&found[i], cd_addr_bytes(&found[i])) == 0 ? 0 : errno;
        if (error == EINPROGRESS) {
            cd_status status = check_loopback(fd, &found[i]);
            if (status == CD_OK)
                status = await_connect(fd, patience, &error);
            if (status != CD_OK) {
                close(fd);
                return status == CD_TIMED_OUT ? cd_fail(CD_TIMED_OUT, "no answer from %s port %u", host, port) : status;
            }
        }
        if (error == 0) {
            cd_sock_tune(fd);
            *fd_p = fd;
            return CD_OK;
        }
        close(fd);
    }
    return cd_fail_errno(CD_NETWORK, error, "cannot connect to %s port %u", host, port);
}

/* Cheap and different per thread and attempt; nothing secret hangs on it. */
static uint64_t jitter(uint64_t most)
{
    uint64_t x = cd_now_ns() ^ (uint64_t)(uintptr_t)&x;
    x ^= x >> 33;
    x *= UINT64_C(0xff51afd7ed558ccd);
    x ^= x >> 33;
    return most ? x % most : 0;
}

cd_status cd_sock_back_off(int attempt, cd_waiter *waiter)
{
    /* From 1 ms, since the ranks of a host start together and the one that listens may be a moment late. */
    uint64_t pause = (UINT64_C(1) << (attempt < 10 ? attempt : 10)) * CD_NS_PER_MS;
    if (pause > CD_NS_PER_S)
        pause = CD_NS_PER_S;
    cd_deadline end = cd_deadline_after_ns(pause / 2 + jitter(pause));
    for (;;) {
        CD_TRY(cd_waiter_check(waiter));
        uint64_t left = cd_deadline_left_ns(cd_deadline_earlier(end, waiter->patience->deadline));
        if (left == 0 && cd_deadline_passed(end))
            return CD_OK;
        cd_sleep_ns(left < 20 * CD_NS_PER_MS ? left : 20 * CD_NS_PER_MS);
    }
}

cd_status cd_sock_connect(const char *host, uint16_t port, const cd_patience *patience, int *fd_p)
{
    cd_waiter waiter = cd_waiter_start(patience);
    for (int attempt = 0;; attempt++) {
        cd_status status = cd_sock_connect_once(host, port, patience, fd_p);
        if (status != CD_NETWORK)
            return status;
        cd_error cause = *cd_last_error();
        status = cd_sock_back_off(attempt, &waiter);
        if (status != CD_OK)
            return status == CD_TIMED_OUT ? cd_fail_with(&cause) : status;
    }
}

cd_status cd_sock_send_some(int fd, const void *data, size_t bytes, size_t *moved_p)
{
    ssize_t sent = send(fd, data, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
        if (errno == EPIPE || errno == ECONNRESET)
            return cd_fail_errno(CD_PEER_LOST, errno, "the connection was closed by the other end");
        if (errno != EAGAIN && errno != EINTR)
            return cd_fail_errno(CD_IO, errno, "send");
        sent = 0;
    }
    *moved_p = (size_t)sent;
    return CD_OK;
}

cd_status cd_sock_recv_some(int fd, void *out, size_t bytes, size_t *moved_p)
{
    ssize_t got = bytes ? recv(fd, out, bytes, MSG_DONTWAIT) : 0;
    if (got == 0 && bytes)
        return cd_fail(CD_PEER_LOST, "the connection was closed by the other end");
    if (got < 0) {
        if (errno == ECONNRESET)
            return cd_fail_errno(CD_PEER_LOST, errno, "the connection was closed by the other end");
        if (errno != EAGAIN && errno != EINTR)
            return cd_fail_errno(CD_IO, errno, "recv");
        got = 0;
    }
    *moved_p = (size_t)got;
    return CD_OK;
}

cd_status cd_sock_send_all(int fd, const void *data, size_t bytes, const cd_patience *patience)
{
    cd_waiter waiter = cd_waiter_start(patience);
    uint64_t began_ns = 0;
    const char *next = data;
    while (bytes) {
        size_t moved = 0;
        CD_TRY(cd_sock_send_some(fd, next, bytes, &moved));
        next += moved;
        bytes -= moved;
        if (bytes)
            CD_TRY(cd_sock_await(fd, POLLOUT, &waiter, &began_ns));
        if (moved)
            began_ns = 0;
    }
    return CD_OK;
}

cd_status cd_sock_recv_all(int fd, void *out, size_t bytes, const cd_patience *patience)
{
    cd_waiter waiter = cd_waiter_start(patience);
    uint64_t began_ns = 0;
    char *next = out;
    while (bytes) {
        size_t moved = 0;
        CD_TRY(cd_sock_recv_some(fd, next, bytes, &moved));
        next += moved;
        bytes -= moved;
        if (moved)
            began_ns = 0;
        else
            CD_TRY(cd_sock_await(fd, POLLIN, &waiter, &began_ns));
    }
    return CD_OK;
}

static const char *end_text(const struct sockaddr_storage *address, char out[CD_SOCK_TEXT_BYTES])
{
    if (address->ss_family != AF_INET && address->ss_family != AF_INET6) {
        snprintf(out, CD_SOCK_TEXT_BYTES, "?");
        return out;
    }
    char number[INET6_ADDRSTRLEN];
    cd_addr_text((const struct sockaddr *)address, number, sizeof number);
    snprintf(out, CD_SOCK_TEXT_BYTES, address->ss_family == AF_INET6 ? "[%s]:%u" : "%s:%u", number, port_of(address));
    return out;
}

const char *cd_sock_peer_text(int fd, char out[CD_SOCK_TEXT_BYTES])
{
    struct sockaddr_storage address = {0};
    socklen_t bytes = sizeof address;
    getpeername(fd, (struct sockaddr *)&address, &bytes);
    return end_text(&address, out);
}

const char *cd_sock_local_text(int fd, char out[CD_SOCK_TEXT_BYTES])
{
    struct sockaddr_storage address = {0};
    socklen_t bytes = sizeof address;
    getsockname(fd, (struct sockaddr *)&address, &bytes);
    return end_text(&address, out);
}

const char *cd_sock_local_address(int fd, char *out, size_t bytes)
{
    struct sockaddr_storage address = {0};
    socklen_t address_bytes = sizeof address;
    if (getsockname(fd, (struct sockaddr *)&address, &address_bytes) == 0 &&
        (address.ss_family == AF_INET || address.ss_family == AF_INET6))
        cd_addr_text((const struct sockaddr *)&address, out, bytes);
    else
        snprintf(out, bytes, "?");
    return out;
}
