/* What the kernels take, seen by both compilers: kernels.c fills these in, kernels.cu reads them. No #include: NVRTC gets this
 * text in front of the kernels. */
#ifndef CD_CUDA_KERNEL_PARAMS_H
#define CD_CUDA_KERNEL_PARAMS_H

#define CD_KERNEL_DIMS 8
#define CD_KERNEL_PIECES 96 /* 96 × 24 bytes and the rest stay below the 4 KiB that a launch may carry on every GPU */

/* A strided array of `count` units, outermost dimension first; strides in bytes, any sign. */
typedef struct {
    unsigned long long count;
    unsigned long long shape[CD_KERNEL_DIMS];
    long long strides[CD_KERNEL_DIMS];
    int ndim;
} cd_kernel_dims;

typedef struct {
    void *to;
    const void *from;
    unsigned long long bytes;
} cd_kernel_piece;

typedef struct {
    cd_kernel_piece pieces[CD_KERNEL_PIECES];
    int count;
} cd_kernel_list;

#endif
