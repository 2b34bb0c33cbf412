/* The part of the CUDA driver's binary interface that we call, in our own words: no toolkit is needed to build.
 * tests/test_cuda_abi.py compiles this beside the real cuda.h and compares every value, size and symbol name.
 *
 * Handles are opaque pointers. Symbols are those that cuda.h maps its names to (cuMemFree → cuMemFree_v2). */
#ifndef CD_CUDA_DRIVER_ABI_H
#define CD_CUDA_DRIVER_ABI_H

#include <stddef.h>
#include <stdint.h>

typedef int cd_cu_result; /* an enum of int's size */
typedef int cd_cu_device;
typedef void *cd_cu_context;
typedef void *cd_cu_stream;
typedef void *cd_cu_event;
typedef void *cd_cu_module;
typedef void *cd_cu_function;
typedef unsigned long long cd_cu_address;

enum {
    CD_CU_SUCCESS = 0,
    CD_CU_INVALID_VALUE = 1,
    CD_CU_OUT_OF_MEMORY = 2,
    CD_CU_DEINITIALIZED = 4,
    CD_CU_NO_DEVICE = 100,
    CD_CU_NOT_READY = 600,
    CD_CU_NOT_SUPPORTED = 801,
};

enum {
    CD_CU_STREAM_NON_BLOCKING = 1,
    CD_CU_EVENT_DISABLE_TIMING = 2,
    CD_CU_CAPTURE_NONE = 0,
    CD_CU_CAPTURE_MODE_RELAXED = 2,
    CD_CU_MEMORY_DEVICE = 2,
    CD_CU_POINTER_DEVICE_ORDINAL = 9,
    CD_CU_DEVICE_MULTIPROCESSORS = 16,
    CD_CU_DEVICE_MAJOR = 75,
    CD_CU_DEVICE_MINOR = 76,
    CD_CU_DEVICE_MEMORY_POOLS = 115,
};

typedef struct {
    unsigned char bytes[16];
} cd_cu_uuid;

/* CUDA_MEMCPY2D. */
typedef struct {
    size_t from_x_bytes, from_y;
    int from_type;
    const void *from_host;
    cd_cu_address from_device;
    void *from_array;
    size_t from_pitch;
    size_t to_x_bytes, to_y;
    int to_type;
    void *to_host;
    cd_cu_address to_device;
    void *to_array;
    size_t to_pitch;
    size_t width_bytes, height;
} cd_cu_copy_2d;

/* X(field, symbol, parameters): one row a function. */
#define CD_DRIVER_FUNCTIONS(X)                                                                                    \
    X(init, cuInit, (unsigned flags))                                                                             \
    X(get_version, cuDriverGetVersion, (int *version_p))                                                          \
    X(get_error_string, cuGetErrorString, (cd_cu_result result, const char **text_p))                             \
    X(device_count, cuDeviceGetCount, (int *count_p))                                                             \
    X(device_get, cuDeviceGet, (cd_cu_device *out, int ordinal))                                                  \
    X(device_name, cuDeviceGetName, (char *out, int bytes, cd_cu_device device))                                  \
    X(device_uuid, cuDeviceGetUuid_v2, (cd_cu_uuid *out, cd_cu_device device))                                    \
    X(device_pci, cuDeviceGetPCIBusId, (char *out, int bytes, cd_cu_device device))                               \
    X(device_attribute, cuDeviceGetAttribute, (int *value_p, int attribute, cd_cu_device device))                 \
    X(primary_retain, cuDevicePrimaryCtxRetain, (cd_cu_context *out, cd_cu_device device))                        \
    X(primary_release, cuDevicePrimaryCtxRelease_v2, (cd_cu_device device))                                       \
    X(ctx_get_current, cuCtxGetCurrent, (cd_cu_context *out))                                                     \
    X(ctx_get_device, cuCtxGetDevice, (cd_cu_device *out))                                                        \
    X(ctx_push, cuCtxPushCurrent_v2, (cd_cu_context context))                                                     \
    X(ctx_pop, cuCtxPopCurrent_v2, (cd_cu_context *out))                                                          \
    X(ctx_synchronize, cuCtxSynchronize, (void))                                                                  \
    X(ctx_priorities, cuCtxGetStreamPriorityRange, (int *least_p, int *greatest_p))                               \
    X(stream_create, cuStreamCreateWithPriority, (cd_cu_stream *out, unsigned flags, int priority))               \
    X(stream_destroy, cuStreamDestroy_v2, (cd_cu_stream stream))                                                  \
    X(stream_query, cuStreamQuery, (cd_cu_stream stream))                                                         \
    X(stream_wait_event, cuStreamWaitEvent, (cd_cu_stream stream, cd_cu_event event, unsigned flags))             \
    X(stream_is_capturing, cuStreamIsCapturing, (cd_cu_stream stream, int *status_p))                             \
    X(exchange_capture_mode, cuThreadExchangeStreamCaptureMode, (int *mode_p))                                    \
    X(event_create, cuEventCreate, (cd_cu_event *out, unsigned flags))                                            \
    X(event_destroy, cuEventDestroy_v2, (cd_cu_event event))                                                      \
    X(event_record, cuEventRecord, (cd_cu_event event, cd_cu_stream stream))                                      \
    X(event_query, cuEventQuery, (cd_cu_event event))                                                             \
    X(mem_alloc, cuMemAlloc_v2, (cd_cu_address *out, size_t bytes))                                               \
    X(mem_free, cuMemFree_v2, (cd_cu_address address))                                                            \
    X(mem_alloc_async, cuMemAllocAsync, (cd_cu_address *out, size_t bytes, cd_cu_stream stream))                  \
    X(mem_free_async, cuMemFreeAsync, (cd_cu_address address, cd_cu_stream stream))                               \
    X(copy_async, cuMemcpyAsync, (cd_cu_address to, cd_cu_address from, size_t bytes, cd_cu_stream stream))       \
    X(copy_2d_async, cuMemcpy2DAsync_v2, (const cd_cu_copy_2d *copy, cd_cu_stream stream))                        \
    X(copy_to_device, cuMemcpyHtoD_v2, (cd_cu_address to, const void *from, size_t bytes))                        \
    X(copy_to_host, cuMemcpyDtoH_v2, (void *to, cd_cu_address from, size_t bytes))                                \
    X(set_bytes_async, cuMemsetD8Async, (cd_cu_address to, unsigned char value, size_t n, cd_cu_stream stream))   \
    X(pointer_attribute, cuPointerGetAttribute, (void *out, int attribute, cd_cu_address address))                \
    X(module_load, cuModuleLoadData, (cd_cu_module *out, const void *image))                                      \
    X(module_unload, cuModuleUnload, (cd_cu_module module))                                                       \
    X(module_function, cuModuleGetFunction, (cd_cu_function *out, cd_cu_module module, const char *name))         \
    X(launch, cuLaunchKernel,                                                                                     \
      (cd_cu_function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,              \
       unsigned block_y, unsigned block_z, unsigned shared_bytes, cd_cu_stream stream, void **arguments,          \
       void **extra))

#endif
