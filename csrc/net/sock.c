#include "net/sock.h"

#include "base/knob.h"
#include "net/addr.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>

/* A host that vanishes is noticed by the kernel after this: the promise for a lost host is 20 s. */
#define LOST_HOST_MS 15000u

void cd_sock_tune(int fd)
{
    int on = 1, idle = 5, interval = 3, probes = 3;
    unsigned patience_ms = LOST_HOST_MS;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
    setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &patience_ms, sizeof patience_ms);
}

cd_status cd_sock_listen(const char *address, uint16_t port, int *fd_p, uint16_t *port_p)
{
    struct sockaddr_storage bound;
    int count;
    CD_TRY(cd_addr_resolve(address, port, &bound, 1, &count));
    int fd = socket(bound.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return cd_fail_errno(CD_NETWORK, errno, "cannot make a socket");
    int on = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    socklen_t bytes = cd_addr_bytes(&bound);
    if (bind(fd, (struct sockaddr *)&bound, bytes) != 0 || listen(fd, SOMAXCONN) != 0 ||
        getsockname(fd, (struct sockaddr *)&bound, &bytes) != 0) {
        cd_status status = cd_fail_errno(CD_NETWORK, errno, "cannot listen on %s port %u", address, port);
        close(fd);
        return status;
    }
    *fd_p = fd;
    *port_p = ntohs(bound.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&bound)->sin6_port
                                                : ((struct sockaddr_in *)&bound)->sin_port);
    return CD_OK;
}

cd_status cd_sock_listen_range(const char *address, int *fd_p, uint16_t *port_p)
{
    const char *range = cd_knob("CDIST_PORT_RANGE");
    if (!*range)
        return cd_sock_listen(address, 0, fd_p, port_p);
    unsigned first, last;
    if (sscanf(range, "%u-%u", &first, &last) != 2 || first < 1 || last > 65535 || first > last)
        return cd_fail(CD_BAD_ARGUMENT, "CDIST_PORT_RANGE='%s' is not a range such as 20000-20100", range);
    for (unsigned port = first; port <= last; port++)
        if (cd_sock_listen(address, (uint16_t)port, fd_p, port_p) == CD_OK)
            return CD_OK;
    return cd_fail_prefix("no free port in CDIST_PORT_RANGE=%s: ", range);
}

static cd_status await_connect(int fd, const cd_patience *patience, int *error_p)
{
    cd_waiter waiter = cd_waiter_start(patience);
    for (;;) {
        struct pollfd entry = {.fd = fd, .events = POLLOUT};
        if (poll(&entry, 1, waiter.napping ? cd_waiter_nap_ms(&waiter) : 0) > 0)
            break;
        CD_TRY(waiter.napping ? cd_waiter_check(&waiter) : cd_waiter_turn(&waiter));
    }
    socklen_t bytes = sizeof *error_p;
    getsockopt(fd, SOL_SOCKET, SO_ERROR, error_p, &bytes);
    return CD_OK;
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
            cd_status status = await_connect(fd, patience, &error);
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
