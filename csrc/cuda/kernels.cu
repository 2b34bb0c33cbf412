// Kernels that copy arrays on one GPU: strided ↔ packed, and many pieces at once.
// Built by nvcc into the extension where there is one, else by NVRTC at first use: so no header of the toolkit is used here.
#include "cuda/kernel_params.h"

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct __align__(16) u128 {
    u64 low, high;
};

// Byte offset of unit i. Index is 32 bits wide where the count allows: its division is several times cheaper.
template <typename Index> __device__ inline long long offset_of(u64 unit, const cd_kernel_dims &dims)
{
    Index rest = (Index)unit;
    long long offset = 0;
#pragma unroll
    for (int d = CD_KERNEL_DIMS - 1; d >= 0; d--) {
        if (d >= dims.ndim)
            continue;
        Index extent = (Index)dims.shape[d];
        Index next = rest / extent;
        offset += (long long)(rest - next * extent) * dims.strides[d];
        rest = next;
    }
    return offset;
}

template <typename Unit, bool Pack, typename Index>
__device__ inline void strided_loop(char *strided, Unit *packed, const cd_kernel_dims &dims)
{
    u64 step = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < dims.count; i += step) {
        Unit *at = (Unit *)(strided + offset_of<Index>(i, dims));
        if (Pack)
            packed[i] = *at;
        else
            *at = packed[i];
    }
}

template <typename Unit, bool Pack>
__device__ inline void strided_copy(char *strided, Unit *packed, const cd_kernel_dims &dims)
{
    if (dims.count < 0x80000000ull)
        strided_loop<Unit, Pack, u32>(strided, packed, dims);
    else
        strided_loop<Unit, Pack, u64>(strided, packed, dims);
}

#define STRIDED(bytes, Unit)                                                                                          \
    extern "C" __global__ void cd_pack_##bytes(char *strided, Unit *packed, const __grid_constant__ cd_kernel_dims d) \
    {                                                                                                                 \
        strided_copy<Unit, true>(strided, packed, d);                                                                 \
    }                                                                                                                 \
    extern "C" __global__ void cd_unpack_##bytes(char *strided, Unit *packed,                                         \
                                                 const __grid_constant__ cd_kernel_dims d)                            \
    {                                                                                                                 \
        strided_copy<Unit, false>(strided, packed, d);                                                                \
    }
STRIDED(1, u8)
STRIDED(2, u16)
STRIDED(4, u32)
STRIDED(8, u64)
STRIDED(16, u128)

// One row of blocks (blockIdx.y) for each piece.
extern "C" __global__ void cd_copy_pieces(const __grid_constant__ cd_kernel_list list)
{
    const cd_kernel_piece piece = list.pieces[blockIdx.y];
    u64 first = (u64)blockIdx.x * blockDim.x + threadIdx.x, step = (u64)gridDim.x * blockDim.x;
    u64 done = 0;
    if ((((u64)piece.to | (u64)piece.from) & 15) == 0) {
        u64 units = piece.bytes / 16;
        for (u64 i = first; i < units; i += step)
            ((u128 *)piece.to)[i] = ((const u128 *)piece.from)[i];
        done = units * 16;
    }
    for (u64 i = done + first; i < piece.bytes; i += step)
        ((u8 *)piece.to)[i] = ((const u8 *)piece.from)[i];
}
