#include "net/link.h"

#include "base/attr.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

/* Reads of less than this come out of a buffer that is filled with one call: a small message is one system call, not three. */
#define AHEAD_BYTES 16384
#define PIECES_MOST 8

typedef struct {
    cd_pipe pipe;
    size_t ahead_at, ahead_end;
    char ahead[AHEAD_BYTES];
} tcp_link;

static cd_status fail_link(const tcp_link *link, int error)
{
    int peer = link->pipe.peer;
    if (error == EPIPE || error == ECONNRESET)
        return cd_fail_rank(CD_PEER_LOST, peer, "the connection to rank %d was closed by the other end", peer);
    cd_fail_errno(CD_IO, error, "the connection to rank %d failed", peer);
    cd_error told = *cd_last_error();
    told.rank = peer;
    return cd_fail_with(&told);
}

static bool must_try_later(int error)
{
    return error == EAGAIN || error == EWOULDBLOCK || error == EINTR || error == ENOBUFS;
}

static cd_status link_send(cd_pipe *pipe, const cd_piece *pieces, int count, size_t *moved_p)
{
    tcp_link *link = (tcp_link *)pipe;
    struct iovec list[PIECES_MOST];
    int used = 0;
    *moved_p = 0;
    for (int i = 0; i < count && used < PIECES_MOST; i++) {
        if (pieces[i].bytes)
            list[used++] = (struct iovec){(void *)(uintptr_t)pieces[i].data, pieces[i].bytes};
    }
    if (used == 0)
        return CD_OK;
    struct msghdr message = {.msg_iov = list, .msg_iovlen = (size_t)used};
    cd_jitter();
    ssize_t n = sendmsg(pipe->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n >= 0)
        *moved_p = (size_t)n;
    else if (!must_try_later(errno))
        return fail_link(link, errno);
    return CD_OK;
}

static cd_status receive_some(tcp_link *link, void *out, size_t bytes, size_t *moved_p)
{
    *moved_p = 0;
    cd_jitter();
    ssize_t n = recv(link->pipe.fd, out, bytes, MSG_DONTWAIT);
    if (n > 0)
        *moved_p = (size_t)n;
    else if (n == 0)
        return fail_link(link, EPIPE);
    else if (!must_try_later(errno))
        return fail_link(link, errno);
    return CD_OK;
}

static cd_status link_recv(cd_pipe *pipe, void *out, size_t bytes, size_t *moved_p)
{
    tcp_link *link = (tcp_link *)pipe;
    *moved_p = 0;
    if (bytes == 0)
        return CD_OK;
    if (link->ahead_at == link->ahead_end) {
        if (bytes >= AHEAD_BYTES)
            return receive_some(link, out, bytes, moved_p);
        size_t got;
        CD_TRY(receive_some(link, link->ahead, AHEAD_BYTES, &got));
        link->ahead_at = 0;
        link->ahead_end = got;
    }
    size_t there = link->ahead_end - link->ahead_at;
    size_t n = bytes < there ? bytes : there;
    memcpy(out, link->ahead + link->ahead_at, n);
    link->ahead_at += n;
    *moved_p = n;
    return CD_OK;
}

static void link_close(cd_pipe *pipe)
{
    /* The descriptor stays ours until free: another thread may be polling it. Already sent bytes still arrive. */
    shutdown(pipe->fd, SHUT_WR);
}

static void link_free(cd_pipe *pipe)
{
    close(pipe->fd);
    free(pipe);
}

static const cd_pipe_ops link_ops = {"tcp", link_send, link_recv, link_close, link_free, NULL, NULL};

cd_status cd_link_open(int socket, int peer, cd_pipe **out)
{
    int flags = fcntl(socket, F_GETFL);
    if (flags < 0 || fcntl(socket, F_SETFL, flags | O_NONBLOCK) < 0)
        return cd_fail_errno(CD_BAD_ARGUMENT, errno, "link to rank %d: descriptor %d", peer, socket);
    tcp_link *link = calloc(1, sizeof *link);
    if (!link)
        return cd_fail(CD_NO_MEMORY, "link: no memory for %zu bytes", sizeof *link);
    int one = 1;
    /* Fails on Unix sockets, which do not delay anyway. */
    (void)setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    link->pipe = (cd_pipe){.ops = &link_ops, .fd = socket, .peer = peer};
    *out = &link->pipe;
    return CD_OK;
}
