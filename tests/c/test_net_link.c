/* The link over TCP and Unix sockets: streams both ways through small buffers, any cut, close. */
#include "mesh_world.h"

#include <fcntl.h>

enum { STREAM = 2 * 1000 * 1000 + 3 };

static uint8_t at(size_t i, int rank)
{
    return (uint8_t)(i * 13 + (i >> 9) + (size_t)rank);
}

typedef struct {
    cd_pipe *pipe[2];
} ends;

static void stream_body(int rank, void *ctx)
{
    cd_pipe *pipe = ((ends *)ctx)->pipe[rank];
    uint8_t *out = malloc(STREAM), *in = malloc(STREAM);
    for (size_t i = 0; i < STREAM; i++)
        out[i] = at(i, rank);
    size_t sent = 0, got = 0;
    for (size_t turn = 0; sent < STREAM || got < STREAM; turn++) {
        size_t moved, a = 7 + turn % 50, b = turn % 3 ? 100000 : 0, left = STREAM - sent;
        a = a < left ? a : left;
        b = b < left - a ? b : left - a;
        cd_piece pieces[3] = {{out + sent, a}, {NULL, 0}, {out + sent + a, b}};
        CHECK_OK(pipe->ops->send(pipe, pieces, 3, &moved));
        sent += moved;
        size_t want = turn % 4 ? 1 + turn * 37 % 500 : 200000;
        want = want < STREAM - got ? want : STREAM - got;
        CHECK_OK(pipe->ops->recv(pipe, in + got, want, &moved));
        CHECK(moved <= want);
        got += moved;
    }
    for (size_t i = 0; i < STREAM; i++)
        CHECK(in[i] == at(i, 1 - rank));
    free(out);
    free(in);
}

static void open_ends(ends *e, bool tcp)
{
    int pair[2], small = 4096;
    if (tcp)
        connect_tcp(pair);
    else
        CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    for (int i = 0; i < 2; i++) {
        CHECK(setsockopt(pair[i], SOL_SOCKET, SO_SNDBUF, &small, sizeof small) == 0);
        CHECK_OK(cd_link_open(pair[i], 1 - i, &e->pipe[i]));
        CHECK(fcntl(pair[i], F_GETFL) & O_NONBLOCK);
    }
}

static void test_close(bool tcp)
{
    ends e;
    char in[64];
    size_t moved;
    open_ends(&e, tcp);
    CHECK_OK(e.pipe[1]->ops->recv(e.pipe[1], in, 64, &moved));
    CHECK(moved == 0);
    CHECK_OK(e.pipe[0]->ops->send(e.pipe[0], &(cd_piece){"last", 5}, 1, &moved));
    e.pipe[0]->ops->close(e.pipe[0]);
    CHECK_FAILS(e.pipe[0]->ops->send(e.pipe[0], &(cd_piece){"last", 5}, 1, &moved), CD_PEER_LOST);
    struct pollfd look = {.fd = e.pipe[1]->fd, .events = POLLIN};
    CHECK(poll(&look, 1, 5000) == 1);
    CHECK_OK(e.pipe[1]->ops->recv(e.pipe[1], in, 2, &moved));
    CHECK_OK(e.pipe[1]->ops->recv(e.pipe[1], in + moved, 62, &moved));
    CHECK(!strcmp(in, "last"));
    CHECK(poll(&look, 1, 5000) == 1);
    CHECK_FAILS(e.pipe[1]->ops->recv(e.pipe[1], in, 64, &moved), CD_PEER_LOST);
    CHECK(cd_last_error()->rank == 0 && strstr(cd_last_error()->text, "rank 0"));
    e.pipe[0]->ops->free(e.pipe[0]);
    e.pipe[1]->ops->free(e.pipe[1]);
}

int main(void)
{
    for (int tcp = 0; tcp < 2; tcp++) {
        ends e;
        open_ends(&e, tcp);
        check_on_ranks(2, stream_body, &e);
        e.pipe[0]->ops->free(e.pipe[0]);
        e.pipe[1]->ops->free(e.pipe[1]);
        test_close(tcp);
    }
    cd_pipe *none;
    CHECK_FAILS(cd_link_open(-1, 1, &none), CD_BAD_ARGUMENT);
    puts("net link: ok");
    return 0;
}
