/* Stream sockets: listening on a chosen address, connecting under a deadline, moving some bytes. All sockets are non-blocking,
 * close-on-exec and have TCP_NODELAY. Outgoing sockets never pin a source port. */
#ifndef CD_NET_SOCK_H
#define CD_NET_SOCK_H

#include "base/wait.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define CD_SOCK_TEXT_BYTES 72 /* "[address]:port" */

/* CDIST_PORT_RANGE: its first and last port, 0 and 0 where it is not set. CD_BAD_ARGUMENT names it. */
cd_status cd_sock_port_range(unsigned *first_p, unsigned *last_p);
/* Listens on this address only, on a free port of CDIST_PORT_RANGE or any free port. */
cd_status cd_sock_listen_range(const char *address, int *fd_p, uint16_t *port_p);
/* Listens on address and port (0: any free). "0.0.0.0" and "::" (dual stack) are the wildcards, only on request.
 * Errors: CD_NETWORK naming address and port (in use, not of this host). */
cd_status cd_sock_listen(const char *address, uint16_t port, int *fd_p, uint16_t *port_p);
/* Listens on every address of a host name at one port; addresses that are not of this host are passed over while one is.
 * Where the name means loopback on this host only (see cd_addr_resolve) and is_one_host, on loopback alone; otherwise on the
 * address that other hosts reach too, which is said. Errors: CD_NETWORK as above. */
cd_status cd_sock_listen_all(const char *host, uint16_t port, bool is_one_host, int *fds, int most, int *count_p,
                             uint16_t *port_p);
/* Checks that fd listens, makes it non-blocking and close-on-exec. The descriptor is the caller's to close. */
cd_status cd_sock_adopt_listener(int fd, uint16_t *port_p);
/* The next connection, tuned; -1 when there is none. CD_NO_MEMORY when descriptors ran out, CD_IO otherwise. */
cd_status cd_sock_accept(int listener, int *fd_p);
/* Where descriptors ran out: accepts all that wait, each with the number of *spare_p (cd_host_spare_file), lets `tell` say on the
 * new socket, without blocking, why it cannot stay, and closes it. Whether anybody was there. *spare_p: kept anew if possible. */
bool cd_sock_turn_away(int listener, int *spare_p, void (*tell)(void *ctx, int fd), void *ctx);
/* One attempt over all addresses of the host. Errors: CD_NETWORK (refused, unreachable), CD_REFUSED (in vain as long as this host
 * stays as it is), those of patience. */
cd_status cd_sock_connect_once(const char *host, uint16_t port, const cd_patience *patience, int *fd_p);
/* The same until it succeeds or patience ends, with growing pauses (10 ms to 1 s, ±50 %) so that thousands do not knock in
 * step. CD_NETWORK with the last cause when the deadline passed. */
cd_status cd_sock_connect(const char *host, uint16_t port, const cd_patience *patience, int *fd_p);
/* The pause before attempt `attempt` + 1 of the above; checks patience. */
cd_status cd_sock_back_off(int attempt, cd_waiter *waiter);
/* TCP_NODELAY, keepalive and TCP_USER_TIMEOUT as all data connections have them. */
void cd_sock_tune(int fd);
/* After how long without an answer the kernel gives the connection up, whether bytes are under way (TCP_USER_TIMEOUT) or not
 * (keepalive). */
/* Whether this end of a connection that is over was shut down here (by this process, or by the kernel at an administrator's
 * word) and not by the other end. `error`: errno that ended it, 0: end of stream. */
bool cd_sock_was_shut_here(int fd, int error);
void cd_sock_set_patience(int fd, unsigned patience_ms);

/* As much as goes without blocking; *moved_p = 0 when nothing does. Errors: CD_PEER_LOST (closed or reset by the peer),
 * CD_IO. Never raises SIGPIPE. */
cd_status cd_sock_send_some(int fd, const void *data, size_t bytes, size_t *moved_p);
cd_status cd_sock_recv_some(int fd, void *out, size_t bytes, size_t *moved_p);
/* All of it, or the error of patience (CD_TIMED_OUT), after which the stream is out of step. */
cd_status cd_sock_send_all(int fd, const void *data, size_t bytes, const cd_patience *patience);
cd_status cd_sock_recv_all(int fd, void *out, size_t bytes, const cd_patience *patience);
/* One turn of waiting until fd is ready for `events` (POLLIN, POLLOUT): about 30 µs of looking, then poll in slices of at
 * most 50 ms. Set *began_ns to 0 before the first turn and after progress. */
cd_status cd_sock_await(int fd, short events, cd_waiter *waiter, uint64_t *began_ns) CD_MUST_USE;

/* "address:port" of the two ends, numeric; "?" where there is none. Returns out. */
const char *cd_sock_peer_text(int fd, char out[CD_SOCK_TEXT_BYTES]);
const char *cd_sock_local_text(int fd, char out[CD_SOCK_TEXT_BYTES]);
/* Numeric local address without port: what peers are told. Returns out. */
const char *cd_sock_local_address(int fd, char *out, size_t bytes);

#endif
