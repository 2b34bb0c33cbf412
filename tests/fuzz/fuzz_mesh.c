/* Frames of a peer that sends anything: the mesh must refuse or take them, in any pieces, with receives and sends posted. */
#include "fuzz.h"
#include "net/mesh.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    cd_pipe base;
    const uint8_t *next, *end;
    size_t most; /* bytes a read */
} fed_pipe;

static cd_status swallow(cd_pipe *pipe, const cd_piece *pieces, int count, size_t *moved_p)
{
    (void)pipe;
    *moved_p = 0;
    for (int i = 0; i < count; i++)
        *moved_p += pieces[i].bytes;
    return CD_OK;
}

static cd_status feed(cd_pipe *pipe, void *out, size_t bytes, size_t *moved_p)
{
    fed_pipe *fed = (fed_pipe *)pipe;
    size_t left = (size_t)(fed->end - fed->next);
    size_t part = bytes < left ? bytes : left;
    part = part < fed->most ? part : fed->most;
    if (left == 0)
        return cd_fail_rank(CD_PEER_LOST, pipe->peer, "the end of the input");
    memcpy(out, fed->next, part);
    fed->next += part;
    *moved_p = part;
    return CD_OK;
}

static void shut(cd_pipe *pipe)
{
    (void)pipe;
}

static void release(cd_pipe *pipe)
{
    free(pipe);
}

static const cd_pipe_ops ops = {"fed", swallow, feed, shut, release, NULL, NULL};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    if (bytes < 1)
        return 0;
    cd_mesh *mesh;
    fed_pipe *fed = malloc(sizeof *fed);
    if (!fed || cd_mesh_create(0, 2, &mesh) != CD_OK)
        __builtin_trap();
    *fed = (fed_pipe){{.ops = &ops, .fd = -1, .peer = 1}, data + 1, data + bytes, data[0] ? data[0] : 4096};
    cd_mesh_attach(mesh, &fed->base);
    static char memory[4][1 << 16];
    cd_xfer xfers[4] = {0};
    cd_mesh_recv(mesh, &xfers[0], 1, (cd_match){0, 0}, 0, memory[0], 24, true, false);
    cd_mesh_recv(mesh, &xfers[1], -1, (cd_match){1, 1}, 7, memory[1], sizeof memory[1], true, false);
    cd_mesh_send(mesh, &xfers[2], 1, (cd_match){0, 0}, 0, memory[2], sizeof memory[2], false);
    cd_mesh_recv(mesh, &xfers[3], 1, (cd_match){0, 0}, 0, memory[3], 40000, false, false);
    for (int turn = 0; turn < 4096 && fed->next < fed->end; turn++) {
        const uint8_t *before = fed->next;
        cd_mesh_test(mesh, &xfers[turn % 4]);
        if (fed->next == before && turn > 64)
            break; /* the peer was given up */
    }
    for (int i = 0; i < 4; i++) {
        cd_mesh_cancel(mesh, &xfers[i]);
        cd_xfer_clear(&xfers[i]);
    }
    cd_error why = {.code = CD_ABORTED, .rank = 0, .text = "the end"};
    cd_mesh_close(mesh, &why);
    cd_mesh_free(mesh);
    return 0;
}
