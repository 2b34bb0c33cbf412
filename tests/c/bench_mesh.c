/* Latency and bandwidth of messages between two ranks, each on a core of its own. usage: bench_mesh shm|unix|tcp [threads] */
#include "mesh_world.h"

#include "base/clock.h"
#include "base/host.h"

#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>

typedef struct {
    cd_mesh *mesh;
    int rank;
} side;

/* The best of several batches: other programs on the machine only ever add. */
enum { BATCHES = 100 };

static void ping(const side *s, size_t bytes, int rounds)
{
    char *data = aligned_alloc(4096, (bytes + 4095) & ~(size_t)4095);
    memset(data, s->rank, bytes);
    double best = 1e18;
    for (int batch = 0; batch < (rounds ? BATCHES : 10); batch++) {
        int each = rounds / BATCHES + 1;
        uint64_t start = cd_now_ns();
        for (int i = 0; i < each; i++) {
            if (s->rank == 0)
                CHECK_OK(send_to(s->mesh, 1, 7, data, bytes, 20));
            CHECK_OK(recv_from(s->mesh, 1 - s->rank, 7, data, bytes, 20, NULL));
            if (s->rank == 1)
                CHECK_OK(send_to(s->mesh, 0, 7, data, bytes, 20));
        }
        double ns = (double)(cd_now_ns() - start) / each / 2;
        best = ns < best ? ns : best;
    }
    if (s->rank == 0)
        printf("pingpong %9zu B  one way %10.3f us  %6.2f GB/s\n", bytes, best / 1e3, (double)bytes / best);
    free(data);
}

enum { WINDOW = 64 };

static void stream(const side *s, size_t bytes, int rounds, bool both, bool async)
{
    size_t span = ((bytes + 4095) & ~(size_t)4095);
    int window = bytes * WINDOW > (UINT64_C(512) << 20) ? 8 : WINDOW;
    int buffers = bytes > (1u << 20) ? 2 : window;
    char *out = aligned_alloc(4096, span * (size_t)buffers), *in = aligned_alloc(4096, span * (size_t)buffers);
    memset(out, s->rank + 1, span * (size_t)buffers);
    memset(in, 0, span * (size_t)buffers);
    cd_xfer x[2 * WINDOW], *list[2 * WINDOW];
    double best = 1e18;
    for (int i = 0; i < rounds; i++) {
        uint64_t start = cd_now_ns();
        int n = 0;
        for (int k = 0; k < window; k++) {
            if (both || s->rank == 1) {
                cd_mesh_recv(s->mesh, &x[n], 1 - s->rank, (cd_match){1, 3}, 0, in + span * (size_t)(k % buffers), bytes, false, async);
                list[n] = &x[n];
                n++;
            }
            if (both || s->rank == 0) {
                cd_mesh_send(s->mesh, &x[n], 1 - s->rank, (cd_match){1, 3}, 0, out + span * (size_t)(k % buffers), bytes, async);
                list[n] = &x[n];
                n++;
            }
        }
        cd_patience patience = patience_s(20, 2);
        CHECK_OK(cd_mesh_wait(s->mesh, list, n, &patience));
        for (int k = 0; k < n; k++)
            cd_xfer_clear(list[k]);
        char token = 0;
        if (s->rank == 0)
            CHECK_OK(recv_from(s->mesh, 1, 9, &token, 1, 20, NULL));
        else
            CHECK_OK(send_to(s->mesh, 0, 9, &token, 1, 20));
        double ns = (double)(cd_now_ns() - start) / window;
        best = ns < best ? ns : best;
    }
    if (s->rank == 0)
        printf("%s x%-3d%9zu B  each    %10.3f us  %6.2f GB/s%s\n", both ? "both" : "one ", window, bytes, best / 1e3,
               (double)bytes * (both ? 2 : 1) / best, async ? "  async" : "");
    free(out);
    free(in);
}

static void body(int rank, void *ctx)
{
    cpu_set_t core;
    CPU_ZERO(&core);
    CPU_SET((size_t)rank, &core);
    sched_setaffinity(0, sizeof core, &core); /* the cores were counted before */
    side s = {((cd_mesh **)ctx)[rank], rank};
    static const size_t sizes[] = {4, 64, 1024, 16384, 65536, 1 << 20, 16 << 20, 64 << 20};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        ping(&s, sizes[i], sizes[i] <= 1024 ? 50000 : sizes[i] <= 65536 ? 2000 : sizes[i] <= (1 << 20) ? 100 : 0);
    for (int both = 0; both < 2; both++) {
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
            stream(&s, sizes[i], sizes[i] <= 1024 ? 300 : sizes[i] <= 65536 ? 100 : sizes[i] <= (1 << 20) ? 40 : 8, both, true);
    }
}

int main(int argc, char **argv)
{
    world_kind kind = argc > 1 && !strcmp(argv[1], "tcp") ? WORLD_TCP : argc > 1 && !strcmp(argv[1], "unix") ? WORLD_UNIX : WORLD_SHM;
    (void)cd_host_cores();
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (argc > 2) {
        mesh_world w = world_open(2, kind);
        check_on_ranks(2, body, w.mesh);
        world_close(&w);
        return 0;
    }
    /* Two processes, as in life: memory of the channels is mapped before the fork. */
    mesh_world w = {.ranks = 2};
    size_t bytes = (cd_channels_bytes(2) + 4095) & ~(size_t)4095;
    w.memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(w.memory != MAP_FAILED);
    if (kind != WORLD_SHM) {
        for (int r = 0; r < 2; r++)
            CHECK_OK(cd_mesh_create(r, 2, &w.mesh[r]));
        world_join(&w, 0, 1, kind);
    }
    pid_t child = fork();
    if (kind == WORLD_SHM) {
        /* Each in its own process, whose memory the other may read. */
        int me = child ? 0 : 1;
        cd_pipe *pipe;
        CHECK_OK(cd_mesh_create(me, 2, &w.mesh[me]));
        CHECK_OK(cd_channel_open(w.memory, 2, me, 1 - me, 1 - me, &pipe));
        cd_mesh_attach(w.mesh[me], pipe);
    }
    body(child ? 0 : 1, w.mesh);
    if (!child)
        _exit(0);
    waitpid(child, NULL, 0);
    return 0;
}
