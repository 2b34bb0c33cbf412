/* Stream sockets: listening on a chosen address, connecting under a deadline. All sockets are non-blocking, close-on-exec and
 * have TCP_NODELAY. */
#ifndef CD_NET_SOCK_H
#define CD_NET_SOCK_H

#include "base/wait.h"

#include <stddef.h>
#include <stdint.h>

/* Listens on this numeric address only, on a free port of CDIST_PORT_RANGE or any free port. */
cd_status cd_sock_listen_range(const char *address, int *fd_p, uint16_t *port_p);
/* Listens on address and port (0: any free). Errors: CD_NETWORK naming the address, CD_BAD_ARGUMENT. */
cd_status cd_sock_listen(const char *address, uint16_t port, int *fd_p, uint16_t *port_p);
/* One attempt over all addresses of the host. Errors: CD_NETWORK (refused, unreachable), those of patience. */
cd_status cd_sock_connect_once(const char *host, uint16_t port, const cd_patience *patience, int *fd_p);
/* TCP_NODELAY, keepalive and TCP_USER_TIMEOUT as all data connections have them. */
void cd_sock_tune(int fd);

#endif
