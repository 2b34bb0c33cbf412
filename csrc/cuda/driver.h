/* The CUDA driver, opened at run time, and one GPU of it. */
#ifndef CD_CUDA_DRIVER_H
#define CD_CUDA_DRIVER_H

#include "base/status.h"
#include "cuda/driver_abi.h"
#include "cuda/library.h"

/* A table of the driver's functions; a value without hidden state: opening it twice is cheap. */
typedef struct {
    cd_library library;
#define CD_FIELD(field, symbol, parameters) cd_cu_result(*field) parameters;
    CD_DRIVER_FUNCTIONS(CD_FIELD)
#undef CD_FIELD
} cd_driver;

/* Loads libcuda and initialises it. CD_UNSUPPORTED with what was looked for and where, or that there is no GPU. */
cd_status cd_driver_open(cd_driver *driver);
void cd_driver_close(cd_driver *driver);
/* CD_OK for success; otherwise CD_GPU, or CD_NO_MEMORY: "what: the driver's words". */
cd_status cd_driver_check(const cd_driver *driver, cd_cu_result result, const char *what);

/* One GPU through its primary context, the one that the CUDA runtime and all frameworks use. */
typedef struct {
    const cd_driver *driver;
    cd_cu_context context; /* NULL: not open */
    cd_cu_device device;
    int index;
    int major, minor, multiprocessors;
    bool pools; /* stream-ordered allocation */
    cd_cu_uuid uuid;
    char pci[32];
    char name[96];
} cd_gpu;

/* index −1: the device that is current in this thread, else `fallback` modulo the number of GPUs.
 * Errors: CD_BAD_ARGUMENT (no such GPU), CD_UNSUPPORTED (none at all), CD_GPU. */
cd_status cd_gpu_open(cd_gpu *gpu, const cd_driver *driver, int index, int fallback);
void cd_gpu_close(cd_gpu *gpu);

/* Makes the GPU's context the thread's; *pushed_p says whether cd_gpu_leave has to undo it. About 20 ns when it is already. */
static inline cd_status cd_gpu_enter(const cd_gpu *gpu, bool *pushed_p)
{
    cd_cu_context current = 0;
    *pushed_p = false;
    if (cd_likely(gpu->driver->ctx_get_current(&current) == CD_CU_SUCCESS && current == gpu->context))
        return CD_OK;
    CD_TRY(cd_driver_check(gpu->driver, gpu->driver->ctx_push(gpu->context), "cuCtxPushCurrent"));
    *pushed_p = true;
    return CD_OK;
}

static inline void cd_gpu_leave(const cd_gpu *gpu, bool pushed)
{
    cd_cu_context popped;
    if (cd_unlikely(pushed))
        gpu->driver->ctx_pop(&popped);
}

#endif
