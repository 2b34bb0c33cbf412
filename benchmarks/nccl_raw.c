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

/* Mean host nanoseconds of the driver's calls that an operation can need, in `out`: cuCtxGetCurrent, cuPointerGetAttribute,
 * cuStreamIsCapturing, cuEventRecord, cuStreamWaitEvent, cuEventQuery, cuEventCreate with cuEventDestroy. 0 when it went well. */
int raw_driver_ns(void *data, void *stream, double *out)
{
    enum { CALLS = 2000 };
    struct {
#define FIELD(field, symbol, parameters) cd_cu_result(*field) parameters;
        CD_DRIVER_FUNCTIONS(FIELD)
#undef FIELD
    } cuda;
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library)
        return 1;
#define FIND(field, symbol, parameters)                             \
    if (!(*(void **)&cuda.field = dlsym(library, #symbol)))         \
        return 2;
    CD_DRIVER_FUNCTIONS(FIND)
#undef FIND
    cd_cu_context context;
    cd_cu_event event, other;
    int index, status, failed = 0, n = 0;
    if (cuda.event_create(&event, CD_CU_EVENT_DISABLE_TIMING))
        return 3;
#define TIME(call)                                                                                           \
    do {                                                                                                     \
        struct timespec a, b;                                                                                \
        clock_gettime(CLOCK_MONOTONIC, &a);                                                                  \
        for (int i = 0; i < CALLS; i++)                                                                      \
            failed |= (call) != 0;                                                                           \
        clock_gettime(CLOCK_MONOTONIC, &b);                                                                  \
        out[n++] = ((double)(b.tv_sec - a.tv_sec) * 1e9 + (double)(b.tv_nsec - a.tv_nsec)) / CALLS;          \
    } while (0)
    TIME(cuda.ctx_get_current(&context));
    TIME(cuda.pointer_attribute(&index, CD_CU_POINTER_DEVICE_ORDINAL, (cd_cu_address)(uintptr_t)data));
    TIME(cuda.stream_is_capturing(stream, &status));
    TIME(cuda.event_record(event, stream));
    TIME(cuda.stream_wait_event(stream, event, 0));
    TIME(cuda.event_query(event) > CD_CU_NOT_READY);
    TIME(cuda.event_create(&other, CD_CU_EVENT_DISABLE_TIMING) || cuda.event_destroy(other));
    return failed ? 4 : cuda.event_destroy(event);
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
