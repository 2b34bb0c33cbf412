/* A crowd (K73): 1280 clients that connect at once and meet, in a network namespace whose queue of new connections has 16 places,
 * where this process may make one. */
#include "check.h"

#include "store/kinds.h"
#include "store/server.h"

#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#define THREADS (CHECK_BRIEF ? 32 : 640)
#define CLIENTS (CHECK_BRIEF ? 40 : 2) /* a thread */

typedef struct {
    uint16_t port;
    cd_store *stores[640][40];
} crowd;

static void join_crowd(int rank, void *ctx)
{
    crowd *c = ctx;
    cd_secret none = {.is_set = false};
    cd_patience patience = {.deadline = cd_deadline_after_ns(60 * CD_NS_PER_S)};
    int64_t joined;
    for (int i = 0; i < CLIENTS; i++) {
        CHECK_OK(cd_tcp_store_open("127.0.0.1", c->port, &none, &patience, &c->stores[rank][i]));
        cd_store *s = c->stores[rank][i];
        CHECK_OK(s->ops->add(s, cd_bytes_of("joined"), 1, &joined, &patience));
    }
    cd_store *s = c->stores[rank][0];
    CHECK_OK(cd_store_barrier(s, cd_bytes_of("all"), THREADS, &patience));
    CHECK_OK(s->ops->add(s, cd_bytes_of("joined"), 0, &joined, &patience));
    CHECK(joined == THREADS * CLIENTS);
}

/* Many come while few are let in: who is turned away knocks again. */
static void narrow_the_door(void)
{
    if (unshare(CLONE_NEWNET) != 0)
        return; /* the queue of the host, then */
    struct ifreq loopback = {.ifr_name = "lo", .ifr_flags = IFF_UP};
    int fd = socket(AF_INET, SOCK_DGRAM, 0);
    CHECK(fd >= 0 && ioctl(fd, SIOCSIFFLAGS, &loopback) == 0);
    close(fd);
    fd = open("/proc/sys/net/core/somaxconn", O_WRONLY);
    if (fd >= 0) {
        CHECK(write(fd, "16", 2) == 2 || errno == EACCES || errno == EPERM || errno == EROFS);
        close(fd);
    }
}

int main(void)
{
    narrow_the_door();
    struct rlimit limit;
    CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
    rlim_t needed = 2 * THREADS * CLIENTS + 200;
    CHECK(limit.rlim_max >= needed);
    limit.rlim_cur = needed;
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    cd_server *server;
    cd_server_options options = {.host = "127.0.0.1", .listen_fd = -1};
    CHECK_OK(cd_server_start(&options, &server));
    static crowd c;
    c.port = cd_server_port(server);
    check_on_ranks(THREADS, join_crowd, &c);
    CHECK(cd_server_connections(server) >= THREADS * CLIENTS);
    for (int r = 0; r < THREADS; r++)
        for (int i = 0; i < CLIENTS; i++)
            cd_store_release(c.stores[r][i]);
    cd_server_stop(server);
    puts("store/crowd: ok");
    return 0;
}
