/* The part of NCCL's binary interface that we call, in our own words. tests/test_cuda_abi.py compiles this beside the real
 * nccl.h and compares every value, size and offset. */
#ifndef CD_CUDA_NCCL_ABI_H
#define CD_CUDA_NCCL_ABI_H

#include "cuda/driver_abi.h"

#include <limits.h>
#include <stddef.h>

typedef void *cd_nccl_comm;
typedef int cd_nccl_result; /* an enum of int's size, as the following */
typedef int cd_nccl_type;
typedef int cd_nccl_redop;

typedef struct {
    char internal[128];
} cd_nccl_id;

enum {
    CD_NCCL_SUCCESS = 0,
    CD_NCCL_INVALID_ARGUMENT = 4,
    CD_NCCL_REMOTE_ERROR = 6,
    CD_NCCL_IN_PROGRESS = 7,
};

enum {
    CD_NCCL_INT8 = 0,
    CD_NCCL_UINT8 = 1,
    CD_NCCL_INT32 = 2,
    CD_NCCL_UINT32 = 3,
    CD_NCCL_INT64 = 4,
    CD_NCCL_UINT64 = 5,
    CD_NCCL_FLOAT16 = 6,
    CD_NCCL_FLOAT32 = 7,
    CD_NCCL_FLOAT64 = 8,
    CD_NCCL_BFLOAT16 = 9,
    CD_NCCL_FLOAT8_E4M3 = 10, /* since 2.24 */
    CD_NCCL_FLOAT8_E5M2 = 11,
};

enum { CD_NCCL_SUM = 0, CD_NCCL_PROD = 1, CD_NCCL_MAX = 2, CD_NCCL_MIN = 3, CD_NCCL_AVG = 4 };
enum { CD_NCCL_SCALAR_HOST = 1, CD_NCCL_SHRINK_DEFAULT = 0 };

/* 2.18 brought ncclCommSplit; its ncclConfig_t is the first part of every later one, and a later library fills in what the
 * version stamped into a config did not have yet. */
#define CD_NCCL_LEAST 21800
#define CD_NCCL_FLOAT8_SINCE 22400
#define CD_NCCL_MEMORY_SINCE 21900
#define CD_NCCL_SHARED_GPU_SINCE 23000
#define CD_NCCL_GROUP_ABORT_SINCE 22200 /* ncclCommAbort inside a group raises the flag now and frees at the group's end */
#define CD_NCCL_MAGIC 0xcafebeefu
#define CD_NCCL_UNSET INT_MIN

typedef struct {
    size_t size;
    unsigned magic;
    unsigned version;
    int blocking;
    int cga_cluster;
    int ctas_least;
    int ctas_most;
    const char *net_name;
    int split_share;
    int traffic_class; /* padding in 2.18's struct, a field since 2.24: must say "unset" */
} cd_nccl_config;

#define CD_NCCL_FUNCTIONS(X)                                                                                      \
    X(get_version, ncclGetVersion, (int *version_p))                                                              \
    X(get_id, ncclGetUniqueId, (cd_nccl_id * out))                                                                \
    X(comm_init, ncclCommInitRankConfig,                                                                          \
      (cd_nccl_comm * out, int world, cd_nccl_id id, int rank, cd_nccl_config *config))                           \
    X(comm_split, ncclCommSplit,                                                                                  \
      (cd_nccl_comm comm, int color, int key, cd_nccl_comm *out, cd_nccl_config *config))                         \
    X(comm_finalize, ncclCommFinalize, (cd_nccl_comm comm))                                                       \
    X(comm_destroy, ncclCommDestroy, (cd_nccl_comm comm))                                                         \
    X(comm_abort, ncclCommAbort, (cd_nccl_comm comm))                                                             \
    X(comm_async_error, ncclCommGetAsyncError, (cd_nccl_comm comm, cd_nccl_result * out))                         \
    X(all_reduce, ncclAllReduce,                                                                                  \
      (const void *in, void *out, size_t count, cd_nccl_type type, cd_nccl_redop redop, cd_nccl_comm comm,        \
       cd_cu_stream stream))                                                                                      \
    X(reduce, ncclReduce,                                                                                         \
      (const void *in, void *out, size_t count, cd_nccl_type type, cd_nccl_redop redop, int root,                 \
       cd_nccl_comm comm, cd_cu_stream stream))                                                                   \
    X(broadcast, ncclBroadcast,                                                                                   \
      (const void *in, void *out, size_t count, cd_nccl_type type, int root, cd_nccl_comm comm,                   \
       cd_cu_stream stream))                                                                                      \
    X(all_gather, ncclAllGather,                                                                                  \
      (const void *in, void *out, size_t count, cd_nccl_type type, cd_nccl_comm comm, cd_cu_stream stream))       \
    X(reduce_scatter, ncclReduceScatter,                                                                          \
      (const void *in, void *out, size_t count, cd_nccl_type type, cd_nccl_redop redop, cd_nccl_comm comm,        \
       cd_cu_stream stream))                                                                                      \
    X(send, ncclSend,                                                                                             \
      (const void *in, size_t count, cd_nccl_type type, int peer, cd_nccl_comm comm, cd_cu_stream stream))        \
    X(recv, ncclRecv,                                                                                             \
      (void *out, size_t count, cd_nccl_type type, int peer, cd_nccl_comm comm, cd_cu_stream stream))             \
    X(group_start, ncclGroupStart, (void))                                                                        \
    X(group_end, ncclGroupEnd, (void))                                                                            \
    X(redop_create, ncclRedOpCreatePreMulSum,                                                                     \
      (cd_nccl_redop * out, void *scalar, cd_nccl_type type, int residence, cd_nccl_comm comm))                   \
    X(redop_destroy, ncclRedOpDestroy, (cd_nccl_redop redop, cd_nccl_comm comm))

/* These answer with a text. */
#define CD_NCCL_TEXTS(X)                                        \
    X(error_text, ncclGetErrorString, (cd_nccl_result result))  \
    X(last_error, ncclGetLastError, (cd_nccl_comm comm))

/* Since 2.19, the last one 2.27; NULL in an older library. */
#define CD_NCCL_OPTIONAL(X)                                                                          \
    X(mem_alloc, ncclMemAlloc, (void **out, size_t bytes))                                           \
    X(mem_free, ncclMemFree, (void *memory))                                                         \
    X(comm_register, ncclCommRegister, (cd_nccl_comm comm, void *memory, size_t bytes, void **out))  \
    X(comm_deregister, ncclCommDeregister, (cd_nccl_comm comm, void *handle))                        \
    X(comm_shrink, ncclCommShrink,                                                                   \
      (cd_nccl_comm comm, int *left_out, int count, cd_nccl_comm *out, cd_nccl_config *config, int flags))

#endif
