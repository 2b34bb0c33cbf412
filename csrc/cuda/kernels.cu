// Kernels that move arrays on one GPU: strided ↔ packed, many pieces at once, and many pieces with a factor and a cast.
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
        u64 units = piece.count / 16;
        for (u64 i = first; i < units; i += step)
            ((u128 *)piece.to)[i] = ((const u128 *)piece.from)[i];
        done = units * 16;
    }
    for (u64 i = done + first; i < piece.count; i += step)
        ((u8 *)piece.to)[i] = ((const u8 *)piece.from)[i];
}

// 16-bit floats by the instructions themselves; NVRTC alone has no cuda_fp16.h.
struct f16 {
    u16 bits;
};
struct bf16 {
    u16 bits;
};

__device__ inline double load(const double &x) { return x; }
__device__ inline float load(const float &x) { return x; }
__device__ inline float load(const f16 &x)
{
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
    return wide;
}
__device__ inline float load(const bf16 &x) { return __uint_as_float((u32)x.bits << 16); }

__device__ inline void store(double &to, double x) { to = x; }
__device__ inline void store(float &to, double x) { to = (float)x; }
__device__ inline void store(float &to, float x) { to = x; }
__device__ inline void store(f16 &to, float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(x)); }
__device__ inline void store(bf16 &to, float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to.bits) : "f"(x)); }

template <typename T> struct arithmetic {
    typedef float type;
};
template <> struct arithmetic<double> {
    typedef double type;
};

// to = (To)(from × factor), in place too.
template <typename From, typename To> __device__ inline void move_pieces(const cd_kernel_list &list)
{
    typedef typename arithmetic<From>::type Wide;
    const cd_kernel_piece piece = list.pieces[blockIdx.y];
    Wide factor = (Wide)list.factor;
    u64 step = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < piece.count; i += step)
        store(((To *)piece.to)[i], load(((const From *)piece.from)[i]) * factor);
}

#define MOVE(from, From, to, To)                                                                          \
    extern "C" __global__ void cd_move_##from##_##to(const __grid_constant__ cd_kernel_list list)         \
    {                                                                                                     \
        move_pieces<From, To>(list);                                                                      \
    }
MOVE(float64, double, float64, double)
MOVE(float32, float, float32, float)
MOVE(float16, f16, float16, f16)
MOVE(bfloat16, bf16, bfloat16, bf16)
MOVE(float32, float, float16, f16)
MOVE(float16, f16, float32, float)
MOVE(float32, float, bfloat16, bf16)
MOVE(bfloat16, bf16, float32, float)
