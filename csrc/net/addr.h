/* Which address of this host others are to be told. No reverse DNS anywhere. */
#ifndef CD_NET_ADDR_H
#define CD_NET_ADDR_H

#include "base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

/* The numeric local address to tell peers who reach us as `host` does: of the interface that CDIST_SOCKET_IFNAME (or
 * GLOO_SOCKET_IFNAME) names by name, prefix or CIDR, by comma; otherwise the source address of the route to `host`.
 * Errors: CD_BAD_ARGUMENT (no such interface: lists those that exist), CD_NETWORK (host cannot be resolved or reached). */
cd_status cd_addr_local_for(const char *host, uint16_t port, char *out, size_t bytes);
/* The address of the interface that a setting names (see above), "" without a setting. CD_BAD_ARGUMENT as above. */
cd_status cd_addr_setting(char *out, size_t bytes);
bool cd_addr_is_loopback(const char *address);
bool cd_addr_is_loopback_of(const struct sockaddr_storage *address);
/* Whether the name or number leads nowhere but to this host itself. */
bool cd_addr_stays_here(const char *host);
/* The address that other hosts most likely reach this one by: of the interface that a setting names (see above), else the
 * source of the default route, else of the first interface that is up; false where there is loopback alone. */
cd_status cd_addr_outward(uint16_t port, struct sockaddr_storage *out, bool *found_p);
/* Numeric text of a socket address, without port. */
void cd_addr_text(const struct sockaddr *address, char *out, size_t bytes);
/* Resolves host (name or number) to at most `most` different stream addresses, IPv6 and IPv4 as the resolver orders them.
 * A name that means loopback here although it is not one of loopback's (Debian's /etc/hosts gives a host's own name
 * 127.0.1.1, which on any other host is that host) gets one more address, in front: that of cd_addr_outward. */
cd_status cd_addr_resolve(const char *host, uint16_t port, struct sockaddr_storage *out, int most, int *count_p);
/* "eth0, 10000 Mbit/s": the interface that has this numeric address, with what the kernel says of its speed; returns out. */
const char *cd_addr_interface(const char *address, char *out, size_t bytes);
socklen_t cd_addr_bytes(const struct sockaddr_storage *address);

#endif
