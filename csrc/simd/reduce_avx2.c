#if defined(__x86_64__)
#include <immintrin.h>

/* Every processor with AVX2 has F16C as well, which older compilers do not know how to ask for. */
#define CD_VARIANT avx2
#define CD_VARIANT_RUNS __builtin_cpu_supports("avx2") != 0
#define CD_VECTOR_BYTES 32
#include "simd/reduce_body.h"
#endif
