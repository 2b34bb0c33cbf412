/* Worlds of ranks in one process for tests: a mesh a rank, joined by channels in memory, socket pairs, or both. */
#ifndef CD_TEST_MESH_WORLD_H
#define CD_TEST_MESH_WORLD_H

#include "check.h"

#include "net/link.h"
#include "net/mesh.h"
#include "shm/channel.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

typedef enum { WORLD_SHM, WORLD_UNIX, WORLD_TCP, WORLD_MIXED, WORLD_KINDS } world_kind;

typedef struct {
    int ranks;
    cd_mesh *mesh[32];
    void *memory;
} mesh_world;

static inline void connect_tcp(int pair[2])
{
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof at;
    CHECK(listener >= 0 && bind(listener, (struct sockaddr *)&at, sizeof at) == 0 && listen(listener, 1) == 0);
    CHECK(getsockname(listener, (struct sockaddr *)&at, &bytes) == 0);
    pair[0] = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(connect(pair[0], (struct sockaddr *)&at, sizeof at) == 0);
    pair[1] = accept(listener, NULL, NULL);
    CHECK(pair[1] >= 0);
    close(listener);
}

static inline void world_join(mesh_world *w, int a, int b, world_kind kind)
{
    cd_pipe *pipe_a, *pipe_b;
    if (kind == WORLD_MIXED)
        kind = (a + b) % 3 == 0 ? WORLD_TCP : (a + b) % 3 == 1 ? WORLD_SHM : WORLD_UNIX;
    if (kind == WORLD_SHM) {
        CHECK_OK(cd_channel_open(w->memory, w->ranks, a, b, b, &pipe_a));
        CHECK_OK(cd_channel_open(w->memory, w->ranks, b, a, a, &pipe_b));
    } else {
        int pair[2];
        if (kind == WORLD_TCP)
            connect_tcp(pair);
        else
            CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
        CHECK_OK(cd_link_open(pair[0], b, &pipe_a));
        CHECK_OK(cd_link_open(pair[1], a, &pipe_b));
    }
    cd_mesh_attach(w->mesh[a], pipe_a);
    cd_mesh_attach(w->mesh[b], pipe_b);
}

static inline mesh_world world_open(int ranks, world_kind kind)
{
    mesh_world w = {.ranks = ranks};
    size_t bytes = (cd_channels_bytes(ranks) + 4095) & ~(size_t)4095;
    w.memory = aligned_alloc(4096, bytes);
    CHECK(w.memory);
    memset(w.memory, 0, bytes);
    for (int r = 0; r < ranks; r++)
        CHECK_OK(cd_mesh_create(r, ranks, &w.mesh[r]));
    for (int a = 0; a < ranks; a++) {
        for (int b = a + 1; b < ranks; b++)
            world_join(&w, a, b, kind);
    }
    return w;
}

static inline void world_close(mesh_world *w)
{
    cd_error why = {.code = CD_ABORTED, .rank = -1, .text = "the test is over"};
    for (int r = 0; r < w->ranks; r++)
        cd_mesh_close(w->mesh[r], &why);
    for (int r = 0; r < w->ranks; r++)
        cd_mesh_free(w->mesh[r]);
    free(w->memory);
}

static inline cd_patience patience_s(double seconds, int ranks)
{
    return cd_patience_until(cd_deadline_after_ns((uint64_t)(seconds * 1e9)), ranks);
}

enum { LARGE = 3 * 1000 * 1000 + 17 };

static inline uint8_t pattern(int from, int to, size_t i)
{
    return (uint8_t)(i * 31 + (i >> 8) + (size_t)from * 7 + (size_t)to * 3);
}

static inline uint8_t *make_message(int from, int to, size_t bytes)
{
    uint8_t *data = malloc(bytes + 1);
    for (size_t i = 0; i < bytes; i++)
        data[i] = pattern(from, to, i);
    return data;
}

static inline void check_message(const uint8_t *data, int from, int to, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        CHECK(data[i] == pattern(from, to, i));
}

/* Blocking send and receive. */
static inline cd_status send_to(cd_mesh *mesh, int peer, int64_t tag, const void *data, size_t bytes, double seconds)
{
    cd_xfer x, *list = &x;
    cd_mesh_send(mesh, &x, peer, (cd_match){1, tag}, 0, data, bytes, false);
    cd_patience patience = patience_s(seconds, 2);
    cd_status status = cd_mesh_wait(mesh, &list, 1, &patience);
    if (status != CD_OK) {
        cd_error why = *cd_last_error();
        cd_mesh_cancel(mesh, &x);
        cd_fail_with(&why);
    }
    cd_xfer_clear(&x);
    return status;
}

static inline cd_status recv_from(cd_mesh *mesh, int peer, int64_t tag, void *data, size_t bytes, double seconds, int *source_p)
{
    cd_xfer x, *list = &x;
    cd_mesh_recv(mesh, &x, peer, (cd_match){1, tag}, 0, data, bytes, false, false);
    cd_patience patience = patience_s(seconds, 2);
    cd_status status = cd_mesh_wait(mesh, &list, 1, &patience);
    if (status != CD_OK) {
        cd_error why = *cd_last_error();
        cd_mesh_cancel(mesh, &x);
        cd_fail_with(&why);
    }
    if (source_p)
        *source_p = x.source;
    cd_xfer_clear(&x);
    return status;
}

#endif
