/* long double and its complex numbers: plain loops. */
#include "simd/reduce_variant.h"

typedef long double item __attribute__((aligned(1), may_alias));

/* FIRST makes the accumulator of the first element x, STEP adds the next one, x, to a, POST finishes a. */
#define DEFINE_LONG(NAME, FIRST, STEP, POST)                                                    \
    static void NAME(void *out, const void *const *in, int inputs, size_t count, double factor) \
    {                                                                                           \
        item *to = out;                                                                         \
        (void)factor;                                                                           \
        for (size_t i = 0; i < count; i++) {                                                    \
            long double x = ((const item *)in[0])[i], a = FIRST;                                \
            for (int k = 1; k < inputs; k++) {                                                  \
                x = ((const item *)in[k])[i];                                                   \
                a = STEP;                                                                       \
            }                                                                                   \
            to[i] = POST;                                                                       \
        }                                                                                       \
    }

DEFINE_LONG(sum, x, a + x, a)
DEFINE_LONG(avg, x, a + x, a / (long double)inputs)
DEFINE_LONG(product, x, (a * x), a)
DEFINE_LONG(least, x, a < x || a != a ? a : x, a)
DEFINE_LONG(most, x, a > x || a != a ? a : x, a)
DEFINE_LONG(premul, (x * (long double)factor), a + x * (long double)factor, a)

#define DEFINE_LONG_PARTS(NAME)                                                                         \
    static void NAME##_parts(void *out, const void *const *in, int inputs, size_t count, double factor) \
    {                                                                                                   \
        NAME(out, in, inputs, 2 * count, factor);                                                       \
    }

DEFINE_LONG_PARTS(sum)
DEFINE_LONG_PARTS(avg)
DEFINE_LONG_PARTS(premul)
CD_DEFINE_COMPLEX_PRODUCT(product_complex, long double)

static const cd_reduce_func real[CD_REDOPS] = {
    [CD_SUM] = sum,   [CD_AVG] = avg,  [CD_PRODUCT] = product,
    [CD_MIN] = least, [CD_MAX] = most, [CD_PREMUL_SUM] = premul,
};
static const cd_reduce_func complex[CD_REDOPS] = {
    [CD_SUM] = sum_parts,
    [CD_AVG] = avg_parts,
    [CD_PRODUCT] = product_complex,
    [CD_PREMUL_SUM] = premul_parts,
};

cd_reduce_func cd_reduce_long_find(cd_redop redop, cd_dtype dtype)
{
    return dtype == CD_LONGDOUBLE ? real[redop] : complex[redop];
}
