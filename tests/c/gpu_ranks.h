/* Ranks as threads over the fake driver and the fake NCCL, which the Makefile puts beside the test program. */
#ifndef CD_TEST_GPU_RANKS_H
#define CD_TEST_GPU_RANKS_H

#include "backend/gpu.h"
#include "base/clock.h"
#include "check.h"

#include <dlfcn.h>
#include <libgen.h>
#include <limits.h>
#include <unistd.h>

enum { GPU_RANKS_MOST = 8 };

/* What the ranks of one group share. */
typedef struct {
    int world;
    pthread_barrier_t barrier;
    char cards[GPU_RANKS_MOST][2048];
    cd_cause cause[GPU_RANKS_MOST]; /* private per rank, as between hosts */
    int32_t world_ranks[GPU_RANKS_MOST];
} gpu_group;

/* One rank's view. */
typedef struct {
    gpu_group *group;
    cd_team team;
    cd_backend *backend;
    cd_patience patience;
    void *memory[64]; /* from gpu_alloc, not yet released */
    int held;
} gpu_rank;

static inline void gpu_use_fakes(void)
{
    char program[PATH_MAX] = {0}, path[PATH_MAX + 64];
    CHECK(readlink("/proc/self/exe", program, sizeof program - 1) > 0);
    char *folder = dirname(program);
    snprintf(path, sizeof path, "%s/libcuda_fake.so", folder);
    setenv("CDIST_CUDA_LIB", path, 1);
    snprintf(path, sizeof path, "%s/libnccl_fake.so", folder);
    setenv("CDIST_NCCL_LIB", path, 1);
    setenv("CDIST_NVRTC_LIB", "/nowhere/libnvrtc.so", 1);
    setenv("FAKE_NCCL_DIR", folder, 1);
}

/* A function of a fake library. */
static inline void *gpu_fake(const char *setting, const char *symbol)
{
    void *library = dlopen(getenv(setting), RTLD_NOW | RTLD_LOCAL);
    CHECK(library);
    void *address = dlsym(library, symbol);
    CHECK(address);
    return address;
}

#define FAKE_CUDA_CALL(type, name) ((type)(uintptr_t)gpu_fake("CDIST_CUDA_LIB", #name))
#define FAKE_NCCL_CALL(type, name) ((type)(uintptr_t)gpu_fake("CDIST_NCCL_LIB", #name))

static inline cd_status gpu_exchange(void *ctx, const void *mine, void *all, size_t bytes, const cd_patience *patience)
{
    (void)patience;
    gpu_rank *r = ctx;
    gpu_group *g = r->group;
    CHECK(bytes <= sizeof g->cards[0]);
    memcpy(g->cards[r->team.rank], mine, bytes);
    pthread_barrier_wait(&g->barrier);
    for (int i = 0; i < g->world; i++)
        memcpy((char *)all + (size_t)i * bytes, g->cards[i], bytes);
    pthread_barrier_wait(&g->barrier);
    return CD_OK;
}

static inline void gpu_group_init(gpu_group *g, int world)
{
    memset(g, 0, sizeof *g);
    g->world = world;
    for (int i = 0; i < world; i++)
        g->world_ranks[i] = i;
    pthread_barrier_init(&g->barrier, 0, (unsigned)world);
}

static inline cd_backend_env gpu_env(gpu_rank *r, gpu_group *g, int rank)
{
    memset(r, 0, sizeof *r);
    r->group = g;
    r->team = (cd_team){.rank = rank, .world = g->world, .world_ranks = g->world_ranks, .cause = &g->cause[rank]};
    r->patience = cd_patience_until(cd_deadline_after_ns(30 * CD_NS_PER_S), g->world);
    r->patience.cause = &g->cause[rank];
    return (cd_backend_env){.team = &r->team, .exchange = gpu_exchange, .exchange_ctx = r, .device_index = rank,
                            .patience = &r->patience};
}

static inline void gpu_rank_open(gpu_rank *r, gpu_group *g, int rank)
{
    cd_backend_env env = gpu_env(r, g, rank);
    CHECK_OK(cd_backend_open_gpu(&env, &r->backend));
}

static inline void gpu_rank_close(gpu_rank *r)
{
    cd_backend *backend = r->backend;
    backend->ops->free(backend);
    /* The last one ends the backend: whatever a test has released itself is in the list no longer. */
    while (r->held > 0)
        cd_gpu_release(backend, r->memory[--r->held]);
}

/* Before the backend ends. */
static inline void gpu_release(gpu_rank *r, void *memory)
{
    for (int i = 0; i < r->held; i++)
        if (r->memory[i] == memory)
            r->memory[i] = r->memory[--r->held];
    cd_gpu_release(r->backend, memory);
}

static inline void *gpu_alloc(gpu_rank *r, size_t bytes)
{
    void *memory = 0;
    CHECK_OK(cd_gpu_alloc(r->backend, bytes, &r->patience, &memory));
    memset(memory, 0, bytes);
    CHECK(r->held < (int)(sizeof r->memory / sizeof r->memory[0]));
    r->memory[r->held++] = memory;
    return memory;
}

/* Waits for all that was issued: a barrier is behind it in the same communicator. */
static inline void gpu_flush(gpu_rank *r)
{
    cd_op op = {.kind = CD_BARRIER, .device = CD_CUDA, .root = -1};
    CHECK_OK(r->backend->ops->run(r->backend, &op, &r->patience));
}

#endif
