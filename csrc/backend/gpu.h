/* What the GPU backend offers beyond the contract of backend.h: memory that NCCL has registered, and facts for texts and tests.
 * Every function takes a backend made by cd_backend_open_gpu. */
#ifndef CD_BACKEND_GPU_H
#define CD_BACKEND_GPU_H

#include "backend/backend.h"

/* `supports` of the backend, also where there is no GPU: what NCCL of any version may take. */
cd_status cd_gpu_supports(cd_kind kind, cd_redop redop, cd_dtype dtype);

/* Device memory from NCCL's own allocator (ncclMemAlloc), registered with the group's communicator, so that collectives on it
 * need no staging; plain device memory where NCCL is older than 2.19. Local. Waits with patience while another thread is inside.
 * Errors: CD_NO_MEMORY, CD_GPU, CD_WAIT_EXPIRED (of memory that was released, which is tried again later), patience's. */
cd_status cd_gpu_alloc(cd_backend *backend, size_t bytes, const cd_patience *patience, void **out);
/* The same from the driver, not registered. */
cd_status cd_gpu_alloc_plain(cd_backend *backend, size_t bytes, const cd_patience *patience, void **out);
/* Gives it back. Queued work of any stream may still use it: it is kept until a later allocation, which waits for that work when
 * much is kept or no other memory is left. Any thread, without waiting while the group lives; also after an abort. The backend
 * lives as long as its memory: what is released last after the group has freed it waits a moment (0.8 s) for the GPU and leaves
 * the rest to a thread. Takes NULL. */
void cd_gpu_release(cd_backend *backend, void *memory);

typedef struct {
    int index;           /* of the GPU, as this process numbers them */
    int nccl_version;    /* 22807 = 2.28.7 */
    const char *kernels; /* "nvcc", "nvrtc" or "driver copies" */
    const char *name;    /* of the GPU */
    const char *pci;
} cd_gpu_facts;

/* Texts live as long as the backend. */
cd_gpu_facts cd_gpu_describe(const cd_backend *backend);

/* Enqueues in `stream` copies of the spans' elements, in logical order, to packed memory: spans[i] to packed[i]; `back`: from
 * there. All that lie without gaps take one kernel. A span without data counts as zeros. Errors: CD_GPU, CD_NO_MEMORY,
 * CD_UNSUPPORTED beyond 8 merged dimensions. */
cd_status cd_gpu_pack(cd_backend *backend, const cd_span *spans, void *const *packed, size_t count, bool back, void *stream);

#endif
