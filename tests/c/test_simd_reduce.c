/* Every kernel of every variant that runs here against arithmetic on one element at a time, written
 * independently: short floats are decoded by ldexp and encoded by searching the table of all their values. */
#include "check.h"

#include "simd/reduce.h"

#include <math.h>

enum { MAX_INPUTS = 9, MAX_COUNT = 4099, MAX_BYTES = 32 };

static const char *const variants[] = {"scalar", "avx2", "avx512", "neon"};
static const size_t counts[] = {0, 1, 2, 7, 15, 16, 17, 63, 64, 65, 1000, MAX_COUNT};

typedef struct {
    int bits, mantissa, bias;
    uint32_t top; /* code of infinity, or of NaN where there is no infinity */
    bool finite;
    double values[0x7f81]; /* of the codes 0 … top; that of `top` is what would follow the largest number */
} format;

static format f16 = {16, 10, 15, 0x7c00, false, {0}}, bf16 = {16, 7, 127, 0x7f80, false, {0}},
              e4m3 = {8, 3, 7, 0x7f, true, {0}}, e5m2 = {8, 2, 15, 0x7c, false, {0}};

static void format_fill(format *f)
{
    for (uint32_t code = 0; code <= f->top; code++) {
        int exponent = (int)(code >> f->mantissa);
        int fraction = (int)(code & ((1u << f->mantissa) - 1));
        f->values[code] = exponent ? ldexp((1 << f->mantissa) + fraction, exponent - f->bias - f->mantissa)
                                   : ldexp(fraction, 1 - f->bias - f->mantissa);
    }
}

static float decode(const format *f, uint32_t item)
{
    uint32_t code = item & ((1u << (f->bits - 1)) - 1);
    double value = code < f->top ? f->values[code] : code == f->top && !f->finite ? INFINITY : NAN;
    return (float)(item >> (f->bits - 1) ? -value : value);
}

static uint32_t encode(const format *f, float value)
{
    uint32_t sign = signbit(value) ? 1u << (f->bits - 1) : 0;
    if (isnan(value))
        return f->finite ? f->top : f->top + 1;
    double target = fabs((double)value);
    uint32_t low = 0, high = f->top; /* values[low] ≤ target < values[high], unless beyond the end */
    if (target >= f->values[high])
        return sign | high;
    while (high - low > 1) {
        uint32_t middle = (low + high) / 2;
        if (f->values[middle] <= target)
            low = middle;
        else
            high = middle;
    }
    double below = target - f->values[low], above = f->values[high] - target;
    return sign | (below < above || (below == above && low % 2 == 0) ? low : high);
}

static const format *short_format(cd_dtype dtype)
{
    switch (dtype) {
    case CD_FLOAT16: return &f16;
    case CD_BFLOAT16: return &bf16;
    case CD_FLOAT8_E4M3FN: return &e4m3;
    case CD_FLOAT8_E5M2: return &e5m2;
    default: return NULL;
    }
}

static uint64_t random_state = 88172645463325252u;

static uint64_t random_bits(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state * UINT64_C(0x2545F4914F6CDD1D);
}

/* A float that is often special and mostly of a size that sums and products survive. */
static double random_number(void)
{
    static const double special[] = {0.0,    -0.0, INFINITY, -INFINITY, NAN,  1e-45,
                                     -1e-40, 6e-8, 65519.0,  449.0,     3e38, 1.0};
    uint64_t bits = random_bits();
    if (bits % 32 == 0)
        return special[(bits >> 8) % 12];
    if (bits % 4 == 0)
        return (double)(int)((bits >> 8) % 9) - 4.0; /* so that equal values and both zeros meet */
    return ldexp((double)(int64_t)bits, (int)(bits >> 4 & 15) - 71);
}

static void random_element(cd_dtype dtype, unsigned char *out)
{
    uint64_t bits[2] = {random_bits(), random_bits()};
    size_t bytes = cd_dtype_bytes(dtype);
    const format *f = short_format(dtype);
    if (dtype == CD_LONGDOUBLE || dtype == CD_CLONGDOUBLE) {
        long double parts[2] = {(long double)random_number() / 3.0L, (long double)random_number() / 3.0L};
        memcpy(out, parts, bytes);
    } else if ((dtype == CD_FLOAT32 || dtype == CD_COMPLEX64) && bits[1] % 4) {
        float parts[2] = {(float)random_number(), (float)random_number()};
        memcpy(out, parts, bytes);
    } else if ((dtype == CD_FLOAT64 || dtype == CD_COMPLEX128) && bits[1] % 4) {
        double parts[2] = {random_number(), random_number()};
        memcpy(out, parts, bytes);
    } else if (f && bits[1] % 4) {
        uint32_t item = encode(f, (float)random_number());
        memcpy(out, &item, bytes);
    } else if (dtype == CD_BOOL && bits[1] % 2) {
        *out = (unsigned char)(bits[0] % 2);
    } else {
        memcpy(out, bits, bytes);
    }
}

#define DEFINE_REAL(T, NAME)                                                                 \
    static T NAME(cd_redop redop, const T *x, int n, double factor)                          \
    {                                                                                        \
        T acc = redop == CD_PREMUL_SUM ? x[0] * (T)factor : x[0];                            \
        for (int k = 1; k < n; k++) {                                                        \
            switch (redop) {                                                                 \
            case CD_SUM:                                                                     \
            case CD_AVG: acc = acc + x[k]; break;                                            \
            case CD_PRODUCT: acc = acc * x[k]; break;                                        \
            case CD_PREMUL_SUM: acc = acc + x[k] * (T)factor; break;                         \
            default:                                                                         \
                if (isnan(acc) || isnan(x[k]))                                               \
                    acc = (T)NAN;                                                            \
                else if (redop == CD_MIN ? acc >= x[k] : acc <= x[k])                        \
                    acc = x[k];                                                              \
            }                                                                                \
        }                                                                                    \
        return redop == CD_AVG ? acc / (T)n : acc;                                           \
    }                                                                                        \
    static void NAME##_complex(cd_redop redop, const T(*x)[2], int n, double factor, T *out) \
    {                                                                                        \
        T re[MAX_INPUTS], im[MAX_INPUTS];                                                    \
        for (int k = 0; k < n; k++) {                                                        \
            re[k] = x[k][0];                                                                 \
            im[k] = x[k][1];                                                                 \
        }                                                                                    \
        for (int k = 1; k < n && redop == CD_PRODUCT; k++) {                                 \
            T new_re = re[0] * re[k] - im[0] * im[k];                                        \
            im[0] = re[0] * im[k] + im[0] * re[k];                                           \
            re[0] = new_re;                                                                  \
        }                                                                                    \
        out[0] = redop == CD_PRODUCT ? re[0] : NAME(redop, re, n, factor);                   \
        out[1] = redop == CD_PRODUCT ? im[0] : NAME(redop, im, n, factor);                   \
    }

DEFINE_REAL(float, reduce_float)
DEFINE_REAL(double, reduce_double)
DEFINE_REAL(long double, reduce_long)

/* Integers as 64 bits, extended by their sign; arithmetic modulo 2⁶⁴ gives the low bytes of any width. */
static uint64_t reduce_integer(cd_redop redop, const uint64_t *x, int n, size_t bytes, bool is_signed)
{
    uint64_t acc = x[0];
    for (int k = 1; k < n; k++) {
        bool x_less = is_signed ? (int64_t)x[k] < (int64_t)acc : x[k] < acc;
        switch (redop) {
        case CD_PRODUCT: acc *= x[k]; break;
        case CD_MIN: acc = x_less ? x[k] : acc; break;
        case CD_MAX: acc = x_less ? acc : x[k]; break;
        case CD_BAND: acc &= x[k]; break;
        case CD_BOR: acc |= x[k]; break;
        case CD_BXOR: acc ^= x[k]; break;
        default: acc += x[k];
        }
    }
    if (redop != CD_AVG)
        return acc;
    int unused = 64 - 8 * (int)bytes;
    if (!is_signed)
        return ((acc << unused) >> unused) / (uint64_t)n;
    return (uint64_t)(((int64_t)(acc << unused) >> unused) / n);
}

static uint64_t reduce_bool(cd_redop redop, const uint64_t *x, int n)
{
    int trues = 0;
    for (int k = 0; k < n; k++)
        trues += x[k] != 0;
    switch (redop) {
    case CD_PRODUCT:
    case CD_MIN:
    case CD_BAND: return trues == n;
    case CD_BXOR: return (uint64_t)trues % 2;
    default: return trues > 0;
    }
}

static void reduce_element(cd_redop redop, cd_dtype dtype, const unsigned char (*in)[MAX_BYTES], int n,
                           double factor, unsigned char *out)
{
    size_t bytes = cd_dtype_bytes(dtype);
    const format *f = short_format(dtype);
    float floats[MAX_INPUTS], pairs[MAX_INPUTS][2];
    double doubles[MAX_INPUTS], double_pairs[MAX_INPUTS][2];
    long double longs[MAX_INPUTS], long_pairs[MAX_INPUTS][2];
    uint64_t integers[MAX_INPUTS];
    bool is_signed = dtype == CD_INT8 || dtype == CD_INT16 || dtype == CD_INT32 || dtype == CD_INT64;
    for (int k = 0; k < n; k++) {
        memcpy(pairs[k], in[k], sizeof pairs[k]);
        memcpy(double_pairs[k], in[k], sizeof double_pairs[k]);
        memcpy(long_pairs[k], in[k], sizeof long_pairs[k]);
        integers[k] = 0;
        memcpy(&integers[k], in[k], bytes < 8 ? bytes : 8);
        if (is_signed)
            integers[k] = (uint64_t)((int64_t)(integers[k] << (64 - 8 * bytes)) >> (64 - 8 * bytes));
        floats[k] = f ? decode(f, (uint32_t)integers[k]) : pairs[k][0];
        doubles[k] = double_pairs[k][0];
        longs[k] = long_pairs[k][0];
    }
    if (f) {
        uint32_t item = encode(f, reduce_float(redop, floats, n, factor));
        memcpy(out, &item, bytes);
    } else if (dtype == CD_FLOAT32) {
        floats[0] = reduce_float(redop, floats, n, factor);
        memcpy(out, floats, bytes);
    } else if (dtype == CD_FLOAT64) {
        doubles[0] = reduce_double(redop, doubles, n, factor);
        memcpy(out, doubles, bytes);
    } else if (dtype == CD_LONGDOUBLE) {
        longs[0] = reduce_long(redop, longs, n, factor);
        memcpy(out, longs, bytes);
    } else if (dtype == CD_COMPLEX64) {
        reduce_float_complex(redop, (const float(*)[2])pairs, n, factor, floats);
        memcpy(out, floats, bytes);
    } else if (dtype == CD_COMPLEX128) {
        reduce_double_complex(redop, (const double(*)[2])double_pairs, n, factor, doubles);
        memcpy(out, doubles, bytes);
    } else if (dtype == CD_CLONGDOUBLE) {
        reduce_long_complex(redop, (const long double(*)[2])long_pairs, n, factor, longs);
        memcpy(out, longs, bytes);
    } else {
        uint64_t result = dtype == CD_BOOL ? reduce_bool(redop, integers, n)
                                           : reduce_integer(redop, integers, n, bytes, is_signed);
        memcpy(out, &result, bytes);
    }
}

#define PARTS_SAME(T)                                                      \
    for (size_t i = 0; i < bytes / sizeof(T); i++) {                       \
        T x, y;                                                            \
        memcpy(&x, a + i * sizeof(T), sizeof(T));                          \
        memcpy(&y, b + i * sizeof(T), sizeof(T));                          \
        if (!(isnan(x) ? isnan(y) : x == y && !signbit(x) == !signbit(y))) \
            return false;                                                  \
    }                                                                      \
    return true;

/* The same bits, but for the payload and sign of NaNs and the padding of long double. */
static bool elements_same(cd_dtype dtype, const unsigned char *a, const unsigned char *b)
{
    size_t bytes = cd_dtype_bytes(dtype);
    const format *f = short_format(dtype);
    if (f) {
        uint32_t x = 0, y = 0;
        memcpy(&x, a, bytes);
        memcpy(&y, b, bytes);
        return isnan(decode(f, x)) ? isnan(decode(f, y)) : x == y;
    }
    switch (dtype) {
    case CD_FLOAT32:
    case CD_COMPLEX64: PARTS_SAME(float)
    case CD_FLOAT64:
    case CD_COMPLEX128: PARTS_SAME(double)
    case CD_LONGDOUBLE:
    case CD_CLONGDOUBLE: PARTS_SAME(long double)
    default: return memcmp(a, b, bytes) == 0;
    }
}

static unsigned char inputs_all[MAX_INPUTS][MAX_COUNT][MAX_BYTES], expected[MAX_COUNT][MAX_BYTES];

/* One call, with out apart (alias −1) or the same as one input, all pointers skewed by different numbers of
 * bytes. */
static void check_call(cd_reduce_func func, const char *variant, cd_redop redop, cd_dtype dtype,
                       unsigned char **blocks, int n, size_t count, int alias, double factor)
{
    size_t bytes = cd_dtype_bytes(dtype), skew = (size_t)(alias + 3) % 5;
    unsigned char *block = malloc(skew + count * bytes + 1), *out = block + skew;
    const void *in[MAX_INPUTS];
    for (int k = 0; k < n; k++)
        in[k] = blocks[k] + k % 3;
    memset(out, 0xee, count * bytes + 1);
    if (alias >= 0) {
        memcpy(out, in[alias], count * bytes);
        in[alias] = out;
    }
    func(out, in, n, count, factor);
    CHECK(out[count * bytes] == 0xee);
    for (size_t i = 0; i < count; i++) {
        if (elements_same(dtype, out + i * bytes, expected[i]))
            continue;
        fprintf(stderr, "%s: %s of %s, %d inputs, element %zu of %zu, alias %d: got", variant,
                cd_redop_name(redop), cd_dtype_name(dtype), n, i, count, alias);
        for (size_t b = 0; b < bytes; b++)
            fprintf(stderr, " %02x", out[i * bytes + b]);
        fprintf(stderr, ", not");
        for (size_t b = 0; b < bytes; b++)
            fprintf(stderr, " %02x", expected[i][b]);
        fprintf(stderr, "\n");
        exit(1);
    }
    free(block);
}

static void check_count(cd_redop redop, cd_dtype dtype, int n, size_t count, double factor)
{
    size_t bytes = cd_dtype_bytes(dtype);
    unsigned char *blocks[MAX_INPUTS]; /* of the exact size, for AddressSanitizer */
    for (int k = 0; k < n; k++) {
        size_t skew = (size_t)k % 3;
        blocks[k] = malloc(skew + count * bytes + (count == 0));
        for (size_t i = 0; i < count; i++)
            memcpy(blocks[k] + skew + i * bytes, inputs_all[k][i], bytes);
    }
    for (size_t v = 0; v < sizeof variants / sizeof *variants; v++) {
        cd_reduce_func func = cd_reduce_find_variant(variants[v], redop, dtype);
        for (int alias = -1; func && alias < n; alias++)
            check_call(func, variants[v], redop, dtype, blocks, n, count, alias, factor);
    }
    for (int k = 0; k < n; k++)
        free(blocks[k]);
}

static void test_pair(cd_redop redop, cd_dtype dtype)
{
    for (int k = 0; k < MAX_INPUTS; k++)
        for (size_t i = 0; i < MAX_COUNT; i++)
            random_element(dtype, inputs_all[k][i]);
    for (int n = 1; n <= MAX_INPUTS; n++) {
        double factor = n % 2 ? 0.3 : -2.0;
        for (size_t i = 0; i < MAX_COUNT; i++) {
            unsigned char element[MAX_INPUTS][MAX_BYTES];
            for (int k = 0; k < n; k++)
                memcpy(element[k], inputs_all[k][i], MAX_BYTES);
            reduce_element(redop, dtype, (const unsigned char(*)[MAX_BYTES])element, n, factor, expected[i]);
        }
        for (size_t c = 0; c < sizeof counts / sizeof *counts; c++)
            check_count(redop, dtype, n, counts[c], factor);
    }
}

static void test_table(void)
{
    int variants_here = 0;
    for (size_t v = 0; v < sizeof variants / sizeof *variants; v++)
        variants_here += cd_reduce_find_variant(variants[v], CD_SUM, CD_FLOAT32) != NULL;
    CHECK(variants_here >= 1 && cd_reduce_find_variant("scalar", CD_SUM, CD_INT8));
    CHECK(!cd_reduce_find_variant("mmx", CD_SUM, CD_FLOAT32));
    for (int redop = 0; redop < CD_REDOPS; redop++)
        for (int dtype = 0; dtype < CD_DTYPES; dtype++) {
            bool legal = cd_redop_supports((cd_redop)redop, (cd_dtype)dtype);
            CHECK((cd_reduce_find((cd_redop)redop, (cd_dtype)dtype) != NULL) == legal);
            if (legal)
                test_pair((cd_redop)redop, (cd_dtype)dtype);
        }
    CHECK(!cd_reduce_find(CD_REDOPS, CD_FLOAT32) && !cd_reduce_find(CD_SUM, CD_DTYPES));
}

/* All codes of a short float through SUM of one input, and sums of float32-exact halves that fall on every
 * kind of tie. */
static void test_short_codes(cd_dtype dtype)
{
    const format *f = short_format(dtype);
    size_t bytes = cd_dtype_bytes(dtype), codes = (size_t)1 << f->bits;
    unsigned char *in = calloc(codes, bytes), *step = calloc(codes, bytes), *out = calloc(codes, bytes);
    unsigned char *first = calloc(codes, bytes); /* what the scalar variant gives, NaNs and all */
    for (uint32_t code = 0; code < codes; code++) {
        memcpy(in + code * bytes, &code, bytes);
        uint32_t small = encode(f, fabsf(decode(f, code)) * ldexpf(1.0f, -f->mantissa - 1));
        memcpy(step + code * bytes, &small, bytes);
    }
    const void *both[2] = {in, step};
    for (size_t v = 0; v < sizeof variants / sizeof *variants; v++) {
        cd_reduce_func func = cd_reduce_find_variant(variants[v], CD_SUM, dtype);
        for (int n = 1; func && n <= 2; n++) {
            func(out, both, n, codes, 1.0);
            if (n == 1 && v == 0)
                memcpy(first, out, codes * bytes);
            CHECK(n != 1 || memcmp(first, out, codes * bytes) == 0);
            for (uint32_t code = 0; code < codes; code++) {
                uint32_t small = 0;
                memcpy(&small, step + code * bytes, bytes);
                uint32_t wanted = encode(f, n == 1 ? decode(f, code) : decode(f, code) + decode(f, small));
                CHECK(elements_same(dtype, out + code * bytes, (unsigned char *)&wanted));
            }
        }
    }
    free(in);
    free(step);
    free(out);
    free(first);
}

/* What the contract promises in words, with numbers worked out by hand. */
static void test_promises(void)
{
    cd_reduce_func avg = cd_reduce_find(CD_AVG, CD_INT32);
    int32_t a[3] = {-7, 7, INT32_MAX}, b[3] = {0, 0, 1}, out[3];
    const void *in[64] = {a, b};
    avg(out, in, 2, 3, 1.0);
    CHECK(out[0] == -3 && out[1] == 3 && out[2] == INT32_MIN / 2);

    uint16_t one = 0x3f80, small = 0x3c00,
             sum; /* bfloat16: 1 and 2⁻⁷; 64 in fp32 make 1.5, each alone is lost at 2 */
    for (int k = 0; k < 64; k++)
        in[k] = &small;
    in[0] = &one;
    cd_reduce_find(CD_SUM, CD_BFLOAT16)(&sum, in, 64, 1, 1.0);
    CHECK(sum == encode(&bf16, 1.0f + 63.0f / 128.0f));

    float minus = -0.0f, plus = 0.0f, least;
    const void *zeros[2] = {&minus, &plus};
    cd_reduce_find(CD_MIN, CD_FLOAT32)(&least, zeros, 2, 1, 1.0);
    CHECK(!signbit(least)); /* the later of two equals */

    uint8_t large = 0x7e, third = 0x7e, overflow; /* 448 + 448: e4m3fn has no infinity */
    const void *larges[2] = {&large, &third};
    cd_reduce_find(CD_SUM, CD_FLOAT8_E4M3FN)(&overflow, larges, 2, 1, 1.0);
    CHECK((overflow & 0x7f) == 0x7f);
    large = third = 0x7b;
    cd_reduce_find(CD_SUM, CD_FLOAT8_E5M2)(&overflow, larges, 2, 1, 1.0);
    CHECK(overflow == 0x7c);
}

int main(void)
{
    format_fill(&f16);
    format_fill(&bf16);
    format_fill(&e4m3);
    format_fill(&e5m2);
    test_promises();
    test_table();
    test_short_codes(CD_FLOAT16);
    test_short_codes(CD_BFLOAT16);
    test_short_codes(CD_FLOAT8_E4M3FN);
    test_short_codes(CD_FLOAT8_E5M2);
    puts("test_simd_reduce: ok");
    return 0;
}
