/* The server of the TCP store: one thread, event-driven. Serves the clients here and torch's (opcodes 0 to 18). With a job
 * secret each connection must prove it first (net/auth.h), which torch's clients cannot.
 *
 * Nothing a client does blocks another: requests may come in any pieces, answers are buffered, a client that does not read is
 * not read from either, junk is dropped, and a connection that says nothing is dropped after CD_AUTH_DEADLINE_NS. When
 * descriptors run out, the soft limit of the process is raised to the hard one (at most 65536). */
#ifndef CD_STORE_SERVER_H
#define CD_STORE_SERVER_H

#include "net/auth.h"

typedef struct {
    const char *host; /* to listen on: its addresses only (cd_sock_listen_all). NULL with listen_fd */
    bool is_one_host; /* no client comes from another host */
    uint16_t port;    /* 0: any free */
    int listen_fd;    /* −1, or a listening socket that becomes the server's on success */
    cd_secret secret; /* not set: the plain protocol */
} cd_server_options;

typedef struct cd_server cd_server;

/* Listens and starts the thread. Errors: CD_NETWORK (cannot listen), CD_BAD_ARGUMENT (descriptor), CD_NO_MEMORY. */
cd_status cd_server_start(const cd_server_options *options, cd_server **out);
uint16_t cd_server_port(const cd_server *server);
/* Connections open now, for tests. Any thread. */
int cd_server_connections(const cd_server *server);
/* Ends the thread, closes all connections, frees. In a forked child, where the thread is not, only the sockets are closed.
 * Takes NULL. Blocks for the current turn of the loop only. */
void cd_server_stop(cd_server *server);

#endif
