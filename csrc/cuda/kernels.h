/* Our kernels on one GPU. Three ways to have them, tried in this order: the image that nvcc made when the extension was built;
 * their source, compiled by NVRTC when it is found (about 0.3 s, once a group); neither: strided copies go through the driver
 * (one 2-D copy per plane, or one copy per element where strides are not plane-like: slow, correct). */
#ifndef CD_CUDA_KERNELS_H
#define CD_CUDA_KERNELS_H

#include "base/op.h"
#include "cuda/driver.h"
#include "cuda/kernel_params.h"

/* Made by setup.py from kernels.cu; absent from programs that link the C core alone. */
extern CD_WEAK const unsigned char cd_kernels_image[]; /* fatbin; its first byte is 0 where the build had no nvcc */
extern CD_WEAK const char cd_kernels_source[];

enum { CD_KERNEL_WIDTHS = 5 };

typedef struct {
    const cd_gpu *gpu;
    cd_cu_module module; /* NULL: none of the kernels */
    const char *origin;  /* "nvcc", "nvrtc" or "driver copies" */
    cd_cu_function pack[CD_KERNEL_WIDTHS], unpack[CD_KERNEL_WIDTHS]; /* by log2 of the unit's bytes */
    cd_cu_function copy_pieces;
} cd_kernels;

/* The GPU's context must be current for all of these. Never fails: what is missing makes it slower (see above). */
void cd_kernels_open(cd_kernels *kernels, const cd_gpu *gpu);
void cd_kernels_close(cd_kernels *kernels);

/* Enqueues a copy of the span's elements, in logical order, to packed memory (or from it). `dims` are the span's, merged
 * (cd_dims_normalise) and not empty. Errors: CD_GPU; CD_UNSUPPORTED beyond 8 merged dimensions. */
cd_status cd_kernels_pack(const cd_kernels *kernels, const void *data, const cd_dims *dims, uint32_t item_bytes,
                          void *packed, cd_cu_stream stream);
cd_status cd_kernels_unpack(const cd_kernels *kernels, void *data, const cd_dims *dims, uint32_t item_bytes,
                            const void *packed, cd_cu_stream stream);
/* Enqueues copies of contiguous pieces in as few launches as possible. Pieces do not overlap. */
cd_status cd_kernels_copy(const cd_kernels *kernels, const cd_kernel_piece *pieces, size_t count, cd_cu_stream stream);

#endif
