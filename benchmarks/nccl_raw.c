/* The yardstick of benchmarks/gpu.py: NCCL called from a C loop in the same process, on a communicator of its own. */
#include "cuda/nccl_abi.h"

#include <dlfcn.h>
#include <time.h>

static struct {
#define FIELD(field, symbol, parameters) cd_nccl_result(*field) parameters;
    CD_NCCL_FUNCTIONS(FIELD)
#undef FIELD
} nccl;
static cd_nccl_comm comm;

/* 0 when libnccl (a path, or NULL: the one in this process) has all that is needed. */
int raw_open(const char *path)
{
    void *library = dlopen(path ? path : "libnccl.so.2", RTLD_NOW);
    if (!library)
        return 1;
#define FIND(field, symbol, parameters)                                 \
    if (!(*(void **)&nccl.field = dlsym(library, #symbol)))             \
        return 2;
    CD_NCCL_FUNCTIONS(FIND)
#undef FIND
    return 0;
}

int raw_id(void *out)
{
    return nccl.get_id(out);
}

int raw_connect(const void *id, int world, int rank)
{
    cd_nccl_config config = {sizeof config, CD_NCCL_MAGIC, CD_NCCL_LEAST, 1, CD_NCCL_UNSET, CD_NCCL_UNSET,
                             CD_NCCL_UNSET, 0, CD_NCCL_UNSET, CD_NCCL_UNSET};
    return nccl.comm_init(&comm, world, *(const cd_nccl_id *)id, rank, &config);
}

int raw_all_reduce(void *data, size_t count, void *stream)
{
    return nccl.all_reduce(data, data, count, CD_NCCL_FLOAT32, CD_NCCL_SUM, comm, stream);
}

/* Mean host nanoseconds of a call, over `calls` of them without synchronisation. */
double raw_issue_ns(void *data, size_t count, void *stream, int calls)
{
    struct timespec a, b;
    clock_gettime(CLOCK_MONOTONIC, &a);
    for (int i = 0; i < calls; i++)
        raw_all_reduce(data, count, stream);
    clock_gettime(CLOCK_MONOTONIC, &b);
    return ((double)(b.tv_sec - a.tv_sec) * 1e9 + (double)(b.tv_nsec - a.tv_nsec)) / calls;
}
