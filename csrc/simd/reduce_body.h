/* The kernels of one instruction set. A file that includes this has defined
 *   CD_VARIANT        the name, as a token
 *   CD_VARIANT_RUNS   an expression: can this processor run it?
 *   CD_VECTOR_BYTES   the width of its registers: 16, 32 (AVX2 and F16C) or 64 (AVX-512)
 * and gets the object cd_reduce_<name>. All arithmetic is on GCC vectors, so that -O2 suffices, with the same
 * formula for a register ("wide") and for one element ("one"): a result depends neither on the width nor on
 * the place in the array. */
#include "base/attr.h"
#include "simd/reduce_variant.h"

#include <stdbool.h>
#include <stdint.h>

#define CD_INLINE static inline __attribute__((always_inline, unused))

/* Registers of KIND and their twins in memory ("_m"), which may lie anywhere and alias anything. */
#define DEFINE_VECTOR(NAME, T, BYTES)                           \
    typedef T NAME __attribute__((vector_size(BYTES), unused)); \
    typedef NAME NAME##_m __attribute__((aligned(1), may_alias, unused));

#define DEFINE_VECTORS(KIND, T)                    \
    typedef T KIND##_scalar;                       \
    DEFINE_VECTOR(KIND##_wide, T, CD_VECTOR_BYTES) \
    DEFINE_VECTOR(KIND##_one, T, sizeof(T))

DEFINE_VECTORS(i8, int8_t)
DEFINE_VECTORS(u8, uint8_t)
DEFINE_VECTORS(i16, int16_t)
DEFINE_VECTORS(u16, uint16_t)
DEFINE_VECTORS(i32, int32_t)
DEFINE_VECTORS(u32, uint32_t)
DEFINE_VECTORS(i64, int64_t)
DEFINE_VECTORS(u64, uint64_t)
DEFINE_VECTORS(f32, float)
DEFINE_VECTORS(f64, double)
/* What becomes a register of float32 when widened. */
DEFINE_VECTOR(u16_short, uint16_t, CD_VECTOR_BYTES / 2)
DEFINE_VECTOR(u8_short, uint8_t, CD_VECTOR_BYTES / 4)

#include "simd/half.h"

/* load and store of each kind: KIND is what lies in memory, ARITH what is computed with. */
#define DEFINE_ACCESS(KIND, ARITH, FORM, MEMORY, WIDEN, NARROW)          \
    CD_INLINE ARITH##_##FORM load_##KIND##_##FORM(const char *at)        \
    {                                                                    \
        MEMORY item = *(const MEMORY##_m *)(const void *)at;             \
        return WIDEN;                                                    \
    }                                                                    \
    CD_INLINE void store_##KIND##_##FORM(char *at, ARITH##_##FORM value) \
    {                                                                    \
        *(MEMORY##_m *)(void *)at = NARROW;                              \
    }

/* A block of four registers. Its elements may go to the lanes in any order, if they come back the same way:
 * short items need no packing then, since each lane of 32 bits holds two or four of them. */
#define DEFINE_BLOCK(KIND, ARITH)                                                                         \
    CD_INLINE void load_##KIND##_block(const char *at, ARITH##_wide *a, ARITH##_wide *b, ARITH##_wide *c, \
                                       ARITH##_wide *d)                                                   \
    {                                                                                                     \
        enum { step = KIND##_lanes * KIND##_bytes };                                                      \
        *a = load_##KIND##_wide(at);                                                                      \
        *b = load_##KIND##_wide(at + step);                                                               \
        *c = load_##KIND##_wide(at + 2 * step);                                                           \
        *d = load_##KIND##_wide(at + 3 * step);                                                           \
    }                                                                                                     \
    CD_INLINE void store_##KIND##_block(char *at, ARITH##_wide a, ARITH##_wide b, ARITH##_wide c,         \
                                        ARITH##_wide d)                                                   \
    {                                                                                                     \
        enum { step = KIND##_lanes * KIND##_bytes };                                                      \
        store_##KIND##_wide(at, a);                                                                       \
        store_##KIND##_wide(at + step, b);                                                                \
        store_##KIND##_wide(at + 2 * step, c);                                                            \
        store_##KIND##_wide(at + 3 * step, d);                                                            \
    }

#define DEFINE_PLAIN(KIND)                                                                                 \
    enum { KIND##_lanes = CD_VECTOR_BYTES / sizeof(KIND##_scalar), KIND##_bytes = sizeof(KIND##_scalar) }; \
    DEFINE_ACCESS(KIND, KIND, wide, KIND##_wide, item, value)                                              \
    DEFINE_ACCESS(KIND, KIND, one, KIND##_one, item, value)                                                \
    DEFINE_BLOCK(KIND, KIND)

DEFINE_PLAIN(i8)
DEFINE_PLAIN(u8)
DEFINE_PLAIN(i16)
DEFINE_PLAIN(u16)
DEFINE_PLAIN(i32)
DEFINE_PLAIN(u32)
DEFINE_PLAIN(i64)
DEFINE_PLAIN(u64)
DEFINE_PLAIN(f32)
DEFINE_PLAIN(f64)

/* Any byte but 0 is true. */
enum { truth_lanes = CD_VECTOR_BYTES, truth_bytes = 1 };
DEFINE_ACCESS(truth, u8, wide, u8_wide, (u8_wide)(item != 0) & 1, value)
DEFINE_ACCESS(truth, u8, one, u8_one, (u8_one)(item != 0) & 1, value)
DEFINE_BLOCK(truth, u8)

#define WIDEN_ONE(item) __builtin_convertvector(item, u32_one)
enum { f16_lanes = CD_VECTOR_BYTES / 4, f16_bytes = 2 };
DEFINE_ACCESS(f16, f32, wide, u16_short, WIDEN_F16(item), NARROW_F16(value))
DEFINE_ACCESS(f16, f32, one, u16_one, widen_one(WIDEN_ONE(item), F16_FORMAT),
              __builtin_convertvector(narrow_one(value, F16_FORMAT), u16_one))
enum { bf16_lanes = CD_VECTOR_BYTES / 4, bf16_bytes = 2 };
DEFINE_ACCESS(bf16, f32, wide, u16_short, widen_bf16_wide(WIDEN_U16(item)),
              NARROW_U16(narrow_bf16_wide(value)))
DEFINE_ACCESS(bf16, f32, one, u16_one, widen_bf16_one(WIDEN_ONE(item)),
              __builtin_convertvector(narrow_bf16_one(value), u16_one))
enum { e4m3_lanes = CD_VECTOR_BYTES / 4, e4m3_bytes = 1 };
DEFINE_ACCESS(e4m3, f32, wide, u8_short, widen_wide(WIDEN_U8(item), E4M3_FORMAT),
              NARROW_U8(narrow_wide(value, E4M3_FORMAT)))
DEFINE_ACCESS(e4m3, f32, one, u8_one, widen_one(WIDEN_ONE(item), E4M3_FORMAT),
              __builtin_convertvector(narrow_one(value, E4M3_FORMAT), u8_one))
enum { e5m2_lanes = CD_VECTOR_BYTES / 4, e5m2_bytes = 1 };
DEFINE_ACCESS(e5m2, f32, wide, u8_short, widen_wide(WIDEN_U8(item), E5M2_FORMAT),
              NARROW_U8(narrow_wide(value, E5M2_FORMAT)))
DEFINE_ACCESS(e5m2, f32, one, u8_one, widen_one(WIDEN_ONE(item), E5M2_FORMAT),
              __builtin_convertvector(narrow_one(value, E5M2_FORMAT), u8_one))

CD_INLINE void load_bf16_block(const char *at, f32_wide *a, f32_wide *b, f32_wide *c, f32_wide *d)
{
    u32_wide ab = load_u32_wide(at), cd = load_u32_wide(at + CD_VECTOR_BYTES);
    *a = (f32_wide)(ab << 16);
    *b = (f32_wide)(ab & 0xffff0000u);
    *c = (f32_wide)(cd << 16);
    *d = (f32_wide)(cd & 0xffff0000u);
}

CD_INLINE void store_bf16_block(char *at, f32_wide a, f32_wide b, f32_wide c, f32_wide d)
{
    store_u32_wide(at, narrow_bf16_wide(a) | (round_bf16_wide(b) & 0xffff0000u));
    store_u32_wide(at + CD_VECTOR_BYTES, narrow_bf16_wide(c) | (round_bf16_wide(d) & 0xffff0000u));
}

#if defined(CD_HAS_F16)
DEFINE_BLOCK(f16, f32)
#else
CD_INLINE void load_f16_block(const char *at, f32_wide *a, f32_wide *b, f32_wide *c, f32_wide *d)
{
    u32_wide ab = load_u32_wide(at), cd = load_u32_wide(at + CD_VECTOR_BYTES);
    *a = widen_wide(ab & 0xffffu, F16_FORMAT);
    *b = widen_wide(ab >> 16, F16_FORMAT);
    *c = widen_wide(cd & 0xffffu, F16_FORMAT);
    *d = widen_wide(cd >> 16, F16_FORMAT);
}

CD_INLINE void store_f16_block(char *at, f32_wide a, f32_wide b, f32_wide c, f32_wide d)
{
    store_u32_wide(at, narrow_wide(a, F16_FORMAT) | narrow_wide(b, F16_FORMAT) << 16);
    store_u32_wide(at + CD_VECTOR_BYTES, narrow_wide(c, F16_FORMAT) | narrow_wide(d, F16_FORMAT) << 16);
}
#endif

#define DEFINE_FLOAT8_BLOCK(KIND, FORMAT)                                                                  \
    CD_INLINE void load_##KIND##_block(const char *at, f32_wide *a, f32_wide *b, f32_wide *c, f32_wide *d) \
    {                                                                                                      \
        u32_wide abcd = load_u32_wide(at);                                                                 \
        *a = widen_wide(abcd & 0xffu, FORMAT);                                                             \
        *b = widen_wide((abcd >> 8) & 0xffu, FORMAT);                                                      \
        *c = widen_wide((abcd >> 16) & 0xffu, FORMAT);                                                     \
        *d = widen_wide(abcd >> 24, FORMAT);                                                               \
    }                                                                                                      \
    CD_INLINE void store_##KIND##_block(char *at, f32_wide a, f32_wide b, f32_wide c, f32_wide d)          \
    {                                                                                                      \
        store_u32_wide(at, narrow_wide(a, FORMAT) | narrow_wide(b, FORMAT) << 8 |                          \
                               narrow_wide(c, FORMAT) << 16 | narrow_wide(d, FORMAT) << 24);               \
    }
DEFINE_FLOAT8_BLOCK(e4m3, E4M3_FORMAT)
DEFINE_FLOAT8_BLOCK(e5m2, E5M2_FORMAT)

/* Of two equals (−0 and +0 among them) the later one is taken, a NaN on either side stays: MIN is (a < b or a
 * is NaN) ? a : b, as NumPy's minimum has it. Written with masks, since C has no vector ?:. */
#define DEFINE_ORDER(KIND, FORM, MASK, A_STAYS_TOO)                                           \
    CD_INLINE KIND##_##FORM min_##KIND##_##FORM(KIND##_##FORM a, KIND##_##FORM b)             \
    {                                                                                         \
        MASK##_##FORM a_stays = (MASK##_##FORM)(a < b) A_STAYS_TOO(MASK##_##FORM);            \
        return (KIND##_##FORM)(((MASK##_##FORM)a & a_stays) | ((MASK##_##FORM)b & ~a_stays)); \
    }                                                                                         \
    CD_INLINE KIND##_##FORM max_##KIND##_##FORM(KIND##_##FORM a, KIND##_##FORM b)             \
    {                                                                                         \
        MASK##_##FORM a_stays = (MASK##_##FORM)(a > b) A_STAYS_TOO(MASK##_##FORM);            \
        return (KIND##_##FORM)(((MASK##_##FORM)a & a_stays) | ((MASK##_##FORM)b & ~a_stays)); \
    }
#define IF_NAN(MASK) | (MASK)(a != a)
#define NO_NAN(MASK)
#define DEFINE_ORDERS(KIND, MASK, A_STAYS_TOO)  \
    DEFINE_ORDER(KIND, wide, MASK, A_STAYS_TOO) \
    DEFINE_ORDER(KIND, one, MASK, A_STAYS_TOO)

DEFINE_ORDERS(i8, i8, NO_NAN)
DEFINE_ORDERS(u8, i8, NO_NAN)
DEFINE_ORDERS(i16, i16, NO_NAN)
DEFINE_ORDERS(u16, i16, NO_NAN)
DEFINE_ORDERS(i32, i32, NO_NAN)
DEFINE_ORDERS(u32, i32, NO_NAN)
DEFINE_ORDERS(i64, i64, NO_NAN)
DEFINE_ORDERS(u64, i64, NO_NAN)
DEFINE_ORDERS(f32, i32, IF_NAN)
DEFINE_ORDERS(f64, i64, IF_NAN)

#define OP_ADD(TYPE, a, b) ((a) + (b))
#define OP_MUL(TYPE, a, b) ((a) * (b))
#define OP_MIN(TYPE, a, b) min_##TYPE(a, b)
#define OP_MAX(TYPE, a, b) max_##TYPE(a, b)
#define OP_AND(TYPE, a, b) ((a) & (b))
#define OP_OR(TYPE, a, b) ((a) | (b))
#define OP_XOR(TYPE, a, b) ((a) ^ (b))
#define AS_IS(x, scale) (x)
#define TIMES(x, scale) ((x) * (scale))
#define OVER(x, scale) ((x) / (scale))

/* acc = in[0] op in[1] op … for one register or one element at byte offset `at`. */
#define ACCUMULATE(KIND, ARITH, FORM, OP, PRE, acc, at)                  \
    ARITH##_##FORM acc = PRE(load_##KIND##_##FORM(in[0] + (at)), scale); \
    for (int k = 1; k < inputs; k++)                                     \
        acc = OP(ARITH##_##FORM, acc, PRE(load_##KIND##_##FORM(in[k] + (at)), scale));

/* One kernel. Four registers at a time amortise the loop over the inputs. The last, ragged register is
 * computed before anything is stored, since out may be an input, and stored last: it overlaps elements that
 * are done already and finds the same values for them. So is the first one where the loop begins behind it, at
 * the next address of out that is a multiple of the register's width: arrays of NumPy lie 16 bytes behind a
 * line, and registers that cross lines cost a tenth of an all_reduce of 1 MiB. Two inputs get a loop of their
 * own, in which the compiler sees the number. */
#define DEFINE_REDUCE(NAME, KIND, ARITH, OP, PRE, POST, SCALE)                                              \
    CD_INLINE void NAME##_loop(char *out, const char *const *in, int inputs, size_t count,                  \
                               ARITH##_scalar scale)                                                        \
    {                                                                                                       \
        enum { step = KIND##_lanes * KIND##_bytes };                                                        \
        size_t bytes = count * KIND##_bytes, at = 0;                                                        \
        (void)scale;                                                                                        \
        if (bytes < step) {                                                                                 \
            for (; at < bytes; at += KIND##_bytes) {                                                        \
                ACCUMULATE(KIND, ARITH, one, OP, PRE, acc, at)                                              \
                store_##KIND##_one(out + at, POST(acc, scale));                                             \
            }                                                                                               \
            return;                                                                                         \
        }                                                                                                   \
        ACCUMULATE(KIND, ARITH, wide, OP, PRE, last, bytes - step)                                          \
        ARITH##_wide first = last;                                                                          \
        size_t skip = bytes < 16 * step ? 0 : -(uintptr_t)out % step;                                       \
        if (skip && skip % KIND##_bytes == 0) {                                                             \
            ACCUMULATE(KIND, ARITH, wide, OP, PRE, head, 0)                                                 \
            first = head;                                                                                   \
            at = skip;                                                                                      \
        }                                                                                                   \
        bool has_first = at != 0;                                                                           \
        for (; bytes - at >= 4 * step; at += 4 * step) {                                                    \
            ARITH##_wide a, b, c, d, e, f, g, h;                                                            \
            load_##KIND##_block(in[0] + at, &a, &b, &c, &d);                                                \
            a = PRE(a, scale);                                                                              \
            b = PRE(b, scale);                                                                              \
            c = PRE(c, scale);                                                                              \
            d = PRE(d, scale);                                                                              \
            for (int k = 1; k < inputs; k++) {                                                              \
                load_##KIND##_block(in[k] + at, &e, &f, &g, &h);                                            \
                a = OP(ARITH##_wide, a, PRE(e, scale));                                                     \
                b = OP(ARITH##_wide, b, PRE(f, scale));                                                     \
                c = OP(ARITH##_wide, c, PRE(g, scale));                                                     \
                d = OP(ARITH##_wide, d, PRE(h, scale));                                                     \
            }                                                                                               \
            store_##KIND##_block(out + at, POST(a, scale), POST(b, scale), POST(c, scale), POST(d, scale)); \
        }                                                                                                   \
        for (; bytes - at >= step; at += step) {                                                            \
            ACCUMULATE(KIND, ARITH, wide, OP, PRE, acc, at)                                                 \
            store_##KIND##_wide(out + at, POST(acc, scale));                                                \
        }                                                                                                   \
        if (at < bytes)                                                                                     \
            store_##KIND##_wide(out + bytes - step, POST(last, scale));                                     \
        if (has_first)                                                                                      \
            store_##KIND##_wide(out, POST(first, scale));                                                   \
    }                                                                                                       \
                                                                                                            \
    static void NAME(void *out, const void *const *in, int inputs, size_t count, double factor)             \
    {                                                                                                       \
        (void)factor;                                                                                       \
        if (inputs == 2) {                                                                                  \
            const char *const both[2] = {in[0], in[1]};                                                     \
            NAME##_loop(out, both, 2, count, (ARITH##_scalar)(SCALE));                                      \
        } else {                                                                                            \
            NAME##_loop(out, (const char *const *)in, inputs, count, (ARITH##_scalar)(SCALE));              \
        }                                                                                                   \
    }

#define DEFINE_BITS(KIND)                                           \
    DEFINE_REDUCE(sum_##KIND, KIND, KIND, OP_ADD, AS_IS, AS_IS, 0)  \
    DEFINE_REDUCE(prod_##KIND, KIND, KIND, OP_MUL, AS_IS, AS_IS, 0) \
    DEFINE_REDUCE(and_##KIND, KIND, KIND, OP_AND, AS_IS, AS_IS, 0)  \
    DEFINE_REDUCE(or_##KIND, KIND, KIND, OP_OR, AS_IS, AS_IS, 0)    \
    DEFINE_REDUCE(xor_##KIND, KIND, KIND, OP_XOR, AS_IS, AS_IS, 0)

/* The average is divided in a second pass over out: processors have no vector division of integers to win
 * with. */
#define DEFINE_INTEGER(KIND, BITS, LONG)                                                              \
    DEFINE_REDUCE(least_##KIND, KIND, KIND, OP_MIN, AS_IS, AS_IS, 0)                                  \
    DEFINE_REDUCE(most_##KIND, KIND, KIND, OP_MAX, AS_IS, AS_IS, 0)                                   \
    static void avg_##KIND(void *out, const void *const *in, int inputs, size_t count, double factor) \
    {                                                                                                 \
        typedef KIND##_scalar item __attribute__((aligned(1), may_alias));                            \
        item *items = out;                                                                            \
        sum_##BITS(out, in, inputs, count, factor);                                                   \
        for (size_t i = 0; i < count; i++)                                                            \
            items[i] = (KIND##_scalar)((LONG)items[i] / (LONG)inputs);                                \
    }

#define DEFINE_FLOAT(KIND, ARITH)                                       \
    DEFINE_REDUCE(sum_##KIND, KIND, ARITH, OP_ADD, AS_IS, AS_IS, 0)     \
    DEFINE_REDUCE(avg_##KIND, KIND, ARITH, OP_ADD, AS_IS, OVER, inputs) \
    DEFINE_REDUCE(prod_##KIND, KIND, ARITH, OP_MUL, AS_IS, AS_IS, 0)    \
    DEFINE_REDUCE(least_##KIND, KIND, ARITH, OP_MIN, AS_IS, AS_IS, 0)   \
    DEFINE_REDUCE(most_##KIND, KIND, ARITH, OP_MAX, AS_IS, AS_IS, 0)    \
    DEFINE_REDUCE(premul_##KIND, KIND, ARITH, OP_ADD, TIMES, AS_IS, factor)

DEFINE_BITS(u8)
DEFINE_BITS(u16)
DEFINE_BITS(u32)
DEFINE_BITS(u64)
DEFINE_INTEGER(i8, u8, int32_t)
DEFINE_INTEGER(u8, u8, uint32_t)
DEFINE_INTEGER(i16, u16, int32_t)
DEFINE_INTEGER(u16, u16, uint32_t)
DEFINE_INTEGER(i32, u32, int32_t)
DEFINE_INTEGER(u32, u32, uint32_t)
DEFINE_INTEGER(i64, u64, int64_t)
DEFINE_INTEGER(u64, u64, uint64_t)
DEFINE_FLOAT(f32, f32)
DEFINE_FLOAT(f64, f64)
DEFINE_FLOAT(f16, f32)
DEFINE_FLOAT(bf16, f32)
DEFINE_FLOAT(e4m3, f32)
DEFINE_FLOAT(e5m2, f32)
DEFINE_REDUCE(or_truth, truth, u8, OP_OR, AS_IS, AS_IS, 0)
DEFINE_REDUCE(and_truth, truth, u8, OP_AND, AS_IS, AS_IS, 0)
DEFINE_REDUCE(xor_truth, truth, u8, OP_XOR, AS_IS, AS_IS, 0)

/* Sums and real factors treat the two parts of a complex number alike. */
#define DEFINE_PARTS(NAME, PART)                                                                \
    static void NAME(void *out, const void *const *in, int inputs, size_t count, double factor) \
    {                                                                                           \
        PART(out, in, inputs, 2 * count, factor);                                               \
    }

DEFINE_PARTS(sum_c64, sum_f32)
DEFINE_PARTS(avg_c64, avg_f32)
DEFINE_PARTS(premul_c64, premul_f32)
DEFINE_PARTS(sum_c128, sum_f64)
DEFINE_PARTS(avg_c128, avg_f64)
DEFINE_PARTS(premul_c128, premul_f64)
CD_DEFINE_COMPLEX_PRODUCT(prod_c64, float)
CD_DEFINE_COMPLEX_PRODUCT(prod_c128, double)

#define INTEGERS(SIGNED, BITS)                                                                  \
    [CD_INT8] = SIGNED##_##BITS##8, [CD_UINT8] = SIGNED##_u8, [CD_INT16] = SIGNED##_##BITS##16, \
    [CD_UINT16] = SIGNED##_u16, [CD_INT32] = SIGNED##_##BITS##32, [CD_UINT32] = SIGNED##_u32,   \
    [CD_INT64] = SIGNED##_##BITS##64, [CD_UINT64] = SIGNED##_u64
#define FLOATS(OP)                                                                                        \
    [CD_FLOAT16] = OP##_f16, [CD_BFLOAT16] = OP##_bf16, [CD_FLOAT32] = OP##_f32, [CD_FLOAT64] = OP##_f64, \
    [CD_FLOAT8_E4M3FN] = OP##_e4m3, [CD_FLOAT8_E5M2] = OP##_e5m2
#define COMPLEXES(OP) [CD_COMPLEX64] = OP##_c64, [CD_COMPLEX128] = OP##_c128

static bool runs(void)
{
    return CD_VARIANT_RUNS;
}

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)

const cd_reduce_variant
    JOIN(cd_reduce_, CD_VARIANT) =
        {
            .name = TEXT(CD_VARIANT),
            .runs = runs,
            .table =
                {
                    [CD_SUM] = {[CD_BOOL] = or_truth, INTEGERS(sum, u), FLOATS(sum), COMPLEXES(sum)},
                    [CD_AVG] = {INTEGERS(avg, i), FLOATS(avg), COMPLEXES(avg)},
                    [CD_PRODUCT] = {[CD_BOOL] = and_truth, INTEGERS(prod, u), FLOATS(prod), COMPLEXES(prod)},
                    [CD_MIN] = {[CD_BOOL] = and_truth, INTEGERS(least, i), FLOATS(least)},
                    [CD_MAX] = {[CD_BOOL] = or_truth, INTEGERS(most, i), FLOATS(most)},
                    [CD_BAND] = {[CD_BOOL] = and_truth, INTEGERS(and, u)},
                    [CD_BOR] = {[CD_BOOL] = or_truth, INTEGERS(or, u)},
                    [CD_BXOR] = {[CD_BOOL] = xor_truth, INTEGERS(xor, u)},
                    [CD_PREMUL_SUM] = {FLOATS(premul), COMPLEXES(premul)},
                },
};
