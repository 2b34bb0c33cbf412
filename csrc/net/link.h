/* A pipe (base/pipe.h) over a connected stream socket. */
#ifndef CD_NET_LINK_H
#define CD_NET_LINK_H

#include "base/pipe.h"

/* Takes a connected, authenticated stream socket (TCP or Unix) to the peer with this world rank; makes it non-blocking and,
 * for TCP, sets TCP_NODELAY. Keepalive and TCP_USER_TIMEOUT were set by whoever connected. The socket is the link's on
 * success, and stays the caller's on failure. Does not block. Errors: CD_BAD_ARGUMENT (no socket), CD_NO_MEMORY. */
cd_status cd_link_open(int socket, int peer, cd_pipe **out);

#endif
