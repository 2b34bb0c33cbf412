/* What the files of one instruction set give to reduce.c: private to this folder. */
#ifndef CD_SIMD_REDUCE_VARIANT_H
#define CD_SIMD_REDUCE_VARIANT_H

#include "simd/reduce.h"

#include <stdbool.h>

typedef struct {
    const char *name;
    bool (*runs)(void); /* can this processor execute it? */
    cd_reduce_func table[CD_REDOPS][CD_DTYPES];
} cd_reduce_variant;

extern const cd_reduce_variant cd_reduce_scalar;
#if defined(__x86_64__)
extern const cd_reduce_variant cd_reduce_avx2;
extern const cd_reduce_variant cd_reduce_avx512;
#elif defined(__aarch64__)
extern const cd_reduce_variant cd_reduce_neon;
#endif
/* long double has no vector instructions anywhere: these serve all variants. */
cd_reduce_func cd_reduce_long_find(cd_redop redop, cd_dtype dtype);

/* The plain formula: (re + im·i)(x + y·i) = (re·x − im·y) + (re·y + im·x)·i. */
#define CD_DEFINE_COMPLEX_PRODUCT(NAME, T)                                                      \
    static void NAME(void *out, const void *const *in, int inputs, size_t count, double factor) \
    {                                                                                           \
        typedef T part __attribute__((aligned(1), may_alias));                                  \
        part *to = out;                                                                         \
        (void)factor;                                                                           \
        for (size_t i = 0; i < 2 * count; i += 2) {                                             \
            T re = ((const part *)in[0])[i], im = ((const part *)in[0])[i + 1];                 \
            for (int k = 1; k < inputs; k++) {                                                  \
                T x = ((const part *)in[k])[i], y = ((const part *)in[k])[i + 1];               \
                T re_next = re * x - im * y;                                                    \
                im = re * y + im * x;                                                           \
                re = re_next;                                                                   \
            }                                                                                   \
            to[i] = re;                                                                         \
            to[i + 1] = im;                                                                     \
        }                                                                                       \
    }

#endif
