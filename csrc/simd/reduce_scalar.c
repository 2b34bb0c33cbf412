/* What every processor of the architecture runs; on x86-64 and arm64 the compiler makes 16-byte registers of
 * it. */
#define CD_VARIANT scalar
#define CD_VARIANT_RUNS true
#define CD_VECTOR_BYTES 16
#include "simd/reduce_body.h"
