/* Reduction of several arrays into one, in the order of the inputs.
 *
 * One rule for all callers: element i of the result is in[0][i] op in[1][i] op … op in[n−1][i], evaluated from left to
 * right, whatever the count, the alignment or the instruction set, so that the bits are the same on every rank.
 *   - float16, bfloat16 and float8 are widened to float32, reduced and finished there, and rounded once (to nearest even).
 *   - AVG is the sum divided by n at the end; integers truncate toward zero. PREMUL_SUM multiplies each input by `factor`
 *     (as the accumulator's type) before the sum.
 *   - Integers wrap around. bool is logical: SUM and MAX are or, PRODUCT and MIN are and; BAND BOR BXOR as named; any
 *     non-zero byte counts as true and results are 0 or 1.
 *   - MIN and MAX give NaN where any input is NaN (with NumPy: minimum, maximum).
 *   - complex PRODUCT is the plain four-multiplication formula. No fused multiply-add anywhere (-ffp-contract=off), so
 *     that all instruction sets give the same bits. */
#ifndef CD_SIMD_REDUCE_H
#define CD_SIMD_REDUCE_H

#include "base/op.h"

#include <stddef.h>

/* out may be the same memory as one of the inputs, but not overlap one partly. inputs ≥ 1. No alignment is required.
 * Pure; any thread. */
typedef void (*cd_reduce_func)(void *out, const void *const *in, int inputs, size_t count, double factor);

/* The function for a legal pair (cd_redop_supports), in the best variant that this processor runs; NULL for an illegal one.
 * The variant is chosen once per process (override: CDIST_SIMD=scalar|avx2|avx512|neon). */
cd_reduce_func cd_reduce_find(cd_redop redop, cd_dtype dtype);
/* "avx512": for logs and benchmarks. */
const char *cd_simd_name(void);
/* For tests: the function of one named variant, NULL when it was not built or this processor cannot run it. */
cd_reduce_func cd_reduce_find_variant(const char *variant, cd_redop redop, cd_dtype dtype);

#endif
