/* The mesh over pipes that move a few bytes at a time, and the parser of frames under random bytes. */
#include "mesh_world.h"

#include "net/mesh_frame.h"

static uint64_t next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

/* A pipe in front of another one, which moves from none to `most` bytes a call. */
typedef struct {
    cd_pipe pipe;
    cd_pipe *inner;
    uint64_t random;
    size_t most;
} narrow;

static cd_status narrow_send(cd_pipe *pipe, const cd_piece *pieces, int count, size_t *moved_p)
{
    narrow *n = (narrow *)pipe;
    size_t allowed = (size_t)(next_random(&n->random) % (n->most + 1));
    *moved_p = 0;
    for (int i = 0; i < count; i++) {
        if (!pieces[i].bytes)
            continue;
        size_t bytes = pieces[i].bytes < allowed ? pieces[i].bytes : allowed;
        return n->inner->ops->send(n->inner, &(cd_piece){pieces[i].data, bytes}, 1, moved_p);
    }
    return CD_OK;
}

static cd_status narrow_recv(cd_pipe *pipe, void *out, size_t bytes, size_t *moved_p)
{
    narrow *n = (narrow *)pipe;
    size_t allowed = (size_t)(next_random(&n->random) % (n->most + 1));
    return n->inner->ops->recv(n->inner, out, bytes < allowed ? bytes : allowed, moved_p);
}

static void narrow_close(cd_pipe *pipe)
{
    narrow *n = (narrow *)pipe;
    n->inner->ops->close(n->inner);
}

static void narrow_free(cd_pipe *pipe)
{
    narrow *n = (narrow *)pipe;
    n->inner->ops->free(n->inner);
    free(n);
}

static const cd_pipe_ops narrow_ops = {"narrow", narrow_send, narrow_recv, narrow_close, narrow_free, NULL, NULL};

static cd_pipe *make_narrow(cd_pipe *inner, uint64_t seed, size_t most)
{
    narrow *n = calloc(1, sizeof *n);
    CHECK(n);
    *n = (narrow){{.ops = &narrow_ops, .fd = inner->fd, .peer = inner->peer}, inner, seed * 2654435761u + 1, most};
    return &n->pipe;
}

static void join_narrow(mesh_world *w, uint64_t seed, size_t most)
{
    cd_pipe *a, *b;
    if (seed % 2) {
        int pair[2];
        CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
        CHECK_OK(cd_link_open(pair[0], 1, &a));
        CHECK_OK(cd_link_open(pair[1], 0, &b));
    } else {
        CHECK_OK(cd_channel_open(w->memory, 2, 0, 1, 1, &a));
        CHECK_OK(cd_channel_open(w->memory, 2, 1, 0, 0, &b));
    }
    cd_mesh_attach(w->mesh[0], make_narrow(a, seed, most));
    cd_mesh_attach(w->mesh[1], make_narrow(b, seed + 99, most));
}

static mesh_world open_apart(void)
{
    mesh_world w = {.ranks = 2};
    size_t bytes = (cd_channels_bytes(2) + 4095) & ~(size_t)4095;
    w.memory = aligned_alloc(4096, bytes);
    CHECK(w.memory);
    memset(w.memory, 0, bytes);
    for (int r = 0; r < 2; r++)
        CHECK_OK(cd_mesh_create(r, 2, &w.mesh[r]));
    return w;
}

enum { MESSAGES = 30 };

typedef struct {
    mesh_world w;
    uint64_t seed;
} traffic;

static size_t size_of(const traffic *t, int from, int i)
{
    uint64_t state = t->seed * 1000 + (uint64_t)(from * 100 + i) + 1;
    for (int k = 0; k < 5; k++)
        next_random(&state);
    static const size_t most[] = {30, 200, 20000, 300000};
    return (size_t)(next_random(&state) % most[i % 4]);
}

/* Messages both ways on three tags; every third transfer of rank 0's sends is cancelled at some time, and so is sent again. */
static void traffic_body(int rank, void *ctx)
{
    traffic *t = ctx;
    cd_xfer x[2 * MESSAGES], *list[2 * MESSAGES];
    uint8_t *data[2 * MESSAGES];
    for (int i = 0; i < MESSAGES; i++) {
        size_t out_bytes = size_of(t, rank, i), in_bytes = size_of(t, 1 - rank, i);
        data[2 * i] = malloc(out_bytes + 1);
        data[2 * i + 1] = malloc(in_bytes + 1);
        memset(data[2 * i], i * 2 + rank, out_bytes);
        cd_mesh_send(t->w.mesh[rank], &x[2 * i], 1 - rank, (cd_match){1, i % 3}, 0, data[2 * i], out_bytes, i % 5 == 0);
        cd_mesh_recv(t->w.mesh[rank], &x[2 * i + 1], 1 - rank, (cd_match){1, i % 3}, 0, data[2 * i + 1], in_bytes, false, false);
        list[2 * i] = &x[2 * i];
        list[2 * i + 1] = &x[2 * i + 1];
        if (i % 3 == 2) { /* a message for nobody, withdrawn at once or after a while */
            cd_xfer gone;
            cd_mesh_send(t->w.mesh[rank], &gone, 1 - rank, (cd_match){77, i}, 0, data[2 * i], out_bytes, false);
            for (int k = 0; k < i * 7; k++)
                cd_mesh_test(t->w.mesh[rank], &x[0]);
            cd_mesh_cancel(t->w.mesh[rank], &gone);
            cd_xfer_clear(&gone);
        }
    }
    cd_patience patience = patience_s(100, 2);
    CHECK_OK(cd_mesh_wait(t->w.mesh[rank], list, 2 * MESSAGES, &patience));
    for (int i = 0; i < MESSAGES; i++) {
        for (size_t k = 0; k < x[2 * i + 1].bytes; k++)
            CHECK(data[2 * i + 1][k] == (uint8_t)(i * 2 + 1 - rank));
        free(data[2 * i]);
        free(data[2 * i + 1]);
    }
}

static void test_narrow_pipes(void)
{
    for (uint64_t seed = 1; seed <= 16; seed++) {
        traffic t = {.w = open_apart(), .seed = seed};
        join_narrow(&t.w, seed, seed % 3 == 0 ? 100 : seed % 3 == 1 ? 1000 : 100000);
        check_on_ranks(2, traffic_body, &t);
        world_close(&t.w);
    }
}

/* ---- the parser ---- */

/* Gives the mesh bytes from a buffer and swallows what it sends. */
typedef struct {
    cd_pipe pipe;
    const uint8_t *bytes;
    size_t count, at;
} script;

static cd_status script_send(cd_pipe *pipe, const cd_piece *pieces, int count, size_t *moved_p)
{
    (void)pipe;
    *moved_p = 0;
    for (int i = 0; i < count; i++)
        *moved_p += pieces[i].bytes;
    return CD_OK;
}

static cd_status script_recv(cd_pipe *pipe, void *out, size_t bytes, size_t *moved_p)
{
    script *s = (script *)pipe;
    size_t left = s->count - s->at;
    *moved_p = bytes < left ? bytes : left;
    memcpy(out, s->bytes + s->at, *moved_p);
    s->at += *moved_p;
    return CD_OK;
}

static void script_close(cd_pipe *pipe)
{
    (void)pipe;
}

static const cd_pipe_ops script_ops = {"script", script_send, script_recv, script_close, script_close, NULL, NULL};

/* Frames that are mostly right, with fields that mostly are not. */
static size_t make_script(uint64_t *random, uint8_t *out, size_t room)
{
    size_t used = 0;
    while (used + sizeof(cd_frame) + 512 < room && next_random(random) % 8) {
        cd_frame f;
        for (size_t i = 0; i < sizeof f; i++)
            ((uint8_t *)&f)[i] = (uint8_t)next_random(random);
        if (next_random(random) % 16) {
            f.magic = CD_FRAME_MAGIC;
            f.kind = (uint8_t)(next_random(random) % (CD_FRAME_KINDS + 1));
            memset(f.zero, 0, sizeof f.zero);
            f.context = 1;
            f.offset = next_random(random) % 3;
            f.ticket = (uint32_t)(next_random(random) % 4);
            f.signature = 0;
            f.bytes = f.kind > CD_FRAME_BODY || f.kind == CD_FRAME_READY ? 0 : next_random(random) % 300;
            if (next_random(random) % 16 == 0)
                f.bytes = next_random(random);
        }
        memcpy(out + used, &f, sizeof f);
        used += sizeof f;
        size_t body = cd_frame_is_legal(&f) ? cd_frame_body_bytes(&f) : 0;
        body += cd_frame_filler_bytes(body);
        for (size_t i = 0; i < body && used < room; i++)
            out[used++] = (uint8_t)i;
    }
    return used;
}

static void test_random_frames(void)
{
    uint64_t random = 88172645463325252u;
    int lost = 0;
    static uint8_t bytes[1 << 16];
    for (int round = 0; round < 25000; round++) {
        cd_mesh *mesh;
        CHECK_OK(cd_mesh_create(0, 2, &mesh));
        script s = {.pipe = {.ops = &script_ops, .fd = -1, .peer = 1}, .bytes = bytes};
        s.count = make_script(&random, bytes, 8192);
        cd_mesh_attach(mesh, &s.pipe);
        cd_xfer x[6];
        static char data[6][300];
        for (int i = 0; i < 3; i++)
            cd_mesh_recv(mesh, &x[i], i == 2 ? -1 : 1, (cd_match){1, i}, 0, data[i], 100, true, false);
        cd_mesh_send(mesh, &x[3], 1, (cd_match){1, 1}, 0, bytes, CD_MESH_EAGER + 1 < sizeof bytes ? CD_MESH_EAGER + 1 : 0, false);
        cd_xfer probe = {0};
        for (int i = 0; i < 3; i++)
            cd_mesh_test(mesh, &probe);
        cd_mesh_recv(mesh, &x[4], 1, (cd_match){1, 0}, 0, data[4], 300, true, false);
        cd_mesh_send(mesh, &x[5], 1, (cd_match){1, 1}, 0, bytes, 8, false);
        lost += x[5].error && (x[5].error->code == CD_PROTOCOL || x[5].error->code == CD_IO);
        for (int i = 0; i < 6; i += 2)
            cd_mesh_cancel(mesh, &x[i]);
        cd_error why = {.code = CD_ABORTED, .rank = -1, .text = "the test is over"};
        cd_mesh_close(mesh, &why);
        for (int i = 0; i < 6; i++) {
            CHECK(atomic_load(&x[i].done));
            cd_xfer_clear(&x[i]);
        }
        cd_mesh_free(mesh);
    }
    CHECK(lost > 1000); /* the nonsense was noticed */
}

int main(void)
{
    test_narrow_pipes();
    test_random_frames();
    puts("net mesh faults: ok");
    return 0;
}
