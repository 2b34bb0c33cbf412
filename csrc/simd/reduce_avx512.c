#if defined(__x86_64__)
#include <immintrin.h>

#define CD_VARIANT avx512
#define CD_VARIANT_RUNS                                                        \
    __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && \
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")
#define CD_VECTOR_BYTES 64
#include "simd/reduce_body.h"
#endif
