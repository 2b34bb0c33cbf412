/* The short floats ↔ float32 on GCC vectors, by integer arithmetic: every value, sign, denormal, infinity and
 * rounding to nearest even, independent of the processor's flush-to-zero mode. Included by reduce_body.h,
 * which has defined the vectors u32_FORM, i32_FORM and f32_FORM for FORM = wide (a register) and one (a
 * single lane). */
#ifndef CD_SIMD_HALF_H
#define CD_SIMD_HALF_H

/* mantissa: bits of the mantissa. bias: of the exponent. sign: number of the sign bit. top: the code (without
 * sign) of infinity, above which all codes are NaN; without infinities (finite) it is the only NaN. */
#define F16_FORMAT 10, 15, 15, 0x7c00, false
#define E5M2_FORMAT 2, 15, 7, 0x7c, false
#define E4M3_FORMAT 3, 7, 7, 0x7f, true

#define DEFINE_HALF(FORM)                                                                                  \
    CD_INLINE u32_##FORM pick_##FORM(u32_##FORM mask, u32_##FORM yes, u32_##FORM no)                       \
    {                                                                                                      \
        return (mask & yes) | (~mask & no);                                                                \
    }                                                                                                      \
                                                                                                           \
    /* A denormal gets an exponent that makes it normal, and the float subtraction takes away what that    \
     * added: exact, and no operand or result is a denormal of float32. */                                 \
    CD_INLINE f32_##FORM widen_##FORM(u32_##FORM item, int mantissa, int bias, int sign, int top,          \
                                      bool finite)                                                         \
    {                                                                                                      \
        u32_##FORM zero = {0};                                                                             \
        u32_##FORM code = item & ((1u << sign) - 1u);                                                      \
        u32_##FORM bits = code << (23 - mantissa);                                                         \
        u32_##FORM magic = zero + ((128u - (unsigned)bias) << 23);                                         \
        u32_##FORM tiny = (u32_##FORM)((f32_##FORM)(bits + magic) - (f32_##FORM)magic);                    \
        u32_##FORM normal = bits + ((127u - (unsigned)bias) << 23);                                        \
        u32_##FORM is_tiny = (u32_##FORM)((i32_##FORM)bits < (1 << 23));                                   \
        u32_##FORM is_special = (u32_##FORM)((i32_##FORM)code >= top);                                     \
        u32_##FORM result =                                                                                \
            pick_##FORM(is_tiny, tiny, normal) | (is_special & (finite ? 0x7fc00000u : 0x7f800000u));      \
        return (f32_##FORM)(result | ((item >> sign) << 31));                                              \
    }                                                                                                      \
                                                                                                           \
    /* Normal results are rounded by an addition to the bits, whose carry may run into the exponent and up \
     * to `top`; denormal ones by the addition of a float whose last bit is the smallest denormal. */      \
    CD_INLINE u32_##FORM narrow_##FORM(f32_##FORM value, int mantissa, int bias, int sign, int top,        \
                                       bool finite)                                                        \
    {                                                                                                      \
        u32_##FORM zero = {0};                                                                             \
        u32_##FORM item = (u32_##FORM)value;                                                               \
        u32_##FORM bits = item & 0x7fffffffu;                                                              \
        int cut = 23 - mantissa;                                                                           \
        u32_##FORM rounded = bits + ((bits >> cut) & 1u) + ((1u << (cut - 1)) - 1u);                       \
        u32_##FORM normal = (rounded >> cut) - ((127u - (unsigned)bias) << mantissa);                      \
        u32_##FORM magic = zero + ((unsigned)(151 - bias - mantissa) << 23);                               \
        u32_##FORM tiny = (u32_##FORM)((f32_##FORM)bits + (f32_##FORM)magic) - magic;                      \
        u32_##FORM is_tiny = (u32_##FORM)((i32_##FORM)bits < ((128 - bias) << 23));                        \
        u32_##FORM code = pick_##FORM(is_tiny, tiny, normal);                                              \
        code = pick_##FORM((u32_##FORM)((i32_##FORM)code > top), zero + (unsigned)top, code);              \
        u32_##FORM is_nan = (u32_##FORM)((i32_##FORM)bits > 0x7f800000);                                   \
        u32_##FORM payload = finite ? zero : (bits >> cut) & ((1u << mantissa) - 1u);                      \
        u32_##FORM quiet = payload | (unsigned)(finite ? top : top | (1 << (mantissa - 1)));               \
        code = pick_##FORM(is_nan, quiet, code);                                                           \
        return code | ((item >> 31) << sign);                                                              \
    }                                                                                                      \
                                                                                                           \
    CD_INLINE f32_##FORM widen_bf16_##FORM(u32_##FORM item)                                                \
    {                                                                                                      \
        return (f32_##FORM)(item << 16);                                                                   \
    }                                                                                                      \
                                                                                                           \
    /* The result stands in the upper 16 bits; below it is rubbish. */                                     \
    CD_INLINE u32_##FORM round_bf16_##FORM(f32_##FORM value)                                               \
    {                                                                                                      \
        u32_##FORM item = (u32_##FORM)value;                                                               \
        u32_##FORM is_nan = (u32_##FORM)(value != value);                                                  \
        u32_##FORM rounded = item + ((item >> 16) & 1u) + 0x7fffu;                                         \
        return pick_##FORM(is_nan, item | 0x400000u, rounded);                                             \
    }                                                                                                      \
                                                                                                           \
    CD_INLINE u32_##FORM narrow_bf16_##FORM(f32_##FORM value)                                              \
    {                                                                                                      \
        return round_bf16_##FORM(value) >> 16;                                                             \
    }

DEFINE_HALF(wide)
DEFINE_HALF(one)

/* Between a register and the short items of memory; and float16 by the processor, where it can: the results
 * are those of the formulas above, to the payload of NaNs. Compilers make lane by lane of
 * __builtin_convertvector here. Whole blocks go another way (reduce_body.h). */
#if CD_VECTOR_BYTES > 16 || defined(CD_USE_NEON)
#define CD_HAS_F16
#endif
#if CD_VECTOR_BYTES == 64
#define WIDEN_U16(item) ((u32_wide)_mm512_cvtepu16_epi32((__m256i)(item)))
#define NARROW_U16(value) ((u16_short)_mm512_cvtepi32_epi16((__m512i)(value)))
#define WIDEN_U8(item) ((u32_wide)_mm512_cvtepu8_epi32((__m128i)(item)))
#define NARROW_U8(value) ((u8_short)_mm512_cvtepi32_epi8((__m512i)(value)))
#define WIDEN_F16(item) ((f32_wide)_mm512_cvtph_ps((__m256i)(item)))
#define NARROW_F16(value) \
    ((u16_short)_mm512_cvtps_ph((__m512)(value), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))
#elif CD_VECTOR_BYTES == 32
CD_INLINE __m128i pack_u16(u32_wide value)
{
    return _mm_packus_epi32(_mm256_castsi256_si128((__m256i)value),
                            _mm256_extracti128_si256((__m256i)value, 1));
}

CD_INLINE u8_short pack_u8(u32_wide value)
{
    __m128i words = pack_u16(value);
    return (u8_short)_mm_cvtsi128_si64(_mm_packus_epi16(words, words));
}
#define WIDEN_U16(item) ((u32_wide)_mm256_cvtepu16_epi32((__m128i)(item)))
#define NARROW_U16(value) ((u16_short)pack_u16(value))
#define WIDEN_U8(item) ((u32_wide)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)(item))))
#define NARROW_U8(value) pack_u8(value)
#define WIDEN_F16(item) ((f32_wide)_mm256_cvtph_ps((__m128i)(item)))
#define NARROW_F16(value) \
    ((u16_short)_mm256_cvtps_ph((__m256)(value), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))
#else
#define WIDEN_U16(item) __builtin_convertvector(item, u32_wide)
#define NARROW_U16(value) __builtin_convertvector(value, u16_short)
#define WIDEN_U8(item) __builtin_convertvector(item, u32_wide)
#define NARROW_U8(value) __builtin_convertvector(value, u8_short)
#if defined(CD_USE_NEON)
#define WIDEN_F16(item) ((f32_wide)vcvt_f32_f16(vreinterpret_f16_u16((uint16x4_t)(item))))
#define NARROW_F16(value) ((u16_short)vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)(value))))
#else
#define WIDEN_F16(item) widen_wide(WIDEN_U16(item), F16_FORMAT)
#define NARROW_F16(value) NARROW_U16(narrow_wide(value, F16_FORMAT))
#endif
#endif

#endif
