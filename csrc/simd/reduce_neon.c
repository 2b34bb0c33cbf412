#if defined(__aarch64__)
#include <arm_neon.h>

/* Part of every arm64 processor; differs from "scalar" in that float16 is converted by the processor. */
#define CD_VARIANT neon
#define CD_VARIANT_RUNS true
#define CD_VECTOR_BYTES 16
#define CD_USE_NEON
#include "simd/reduce_body.h"
#endif
