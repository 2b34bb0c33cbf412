#include "simd/copy.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>

enum { LINE = 64 };
/* Below, the C library copies with vector instructions. From here on it may take `rep movsb`, which on Zen 3 is ten times slower
 * where the destination lies up to 64 bytes further in its page than the source in its own (glibc 2.36 does; bug 30994). That is
 * how NumPy's large arrays, 16 bytes into a page, lie against slots of shared memory. 64 KiB from one core's cache through
 * memory of both, written and read, µs on a 2-core EPYC: rep movsb 37, where pages lie otherwise 4.3 to 8.8; this loop 4.1. */
#define NEAR_FROM ((size_t)2048)
/* Intel's `rep movsb` has no such places, and takes lines that it overwrites whole from other caches without reading them. 64 KiB
 * into a ring of 3 MiB that another core reads, GB/s (2 MiB of L2 a core, no common cache): this loop 18, rep movsb 26. */
#define WHOLE_FROM ((size_t)4096)

/* Whether the processor is one of Intel's on which it is (Ice Lake and later). */
static inline bool takes_whole_lines(void)
{
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) /* which do not see into it */
    return false;
#else
    return __builtin_cpu_is("intel") && __builtin_cpu_supports("avx512vbmi2");
#endif
}

/* Copies up to the first line of `out`; returns how much. */
static inline size_t copy_head(char *out, const char *in, size_t bytes)
{
    size_t head = (LINE - (uintptr_t)out % LINE) % LINE;
    head = head < bytes ? head : bytes;
    memcpy(out, in, head);
    return head;
}

/* Whole lines from an aligned `out` on; returns how much. */
static inline size_t copy_lines(char *out, const char *in, size_t bytes)
{
    size_t at = 0;
    for (; bytes - at >= LINE; at += LINE) {
        const __m128i *from = (const __m128i *)(const void *)(in + at);
        __m128i *to = (__m128i *)(void *)(out + at);
        __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
        __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
        _mm_store_si128(to, a);
        _mm_store_si128(to + 1, b);
        _mm_store_si128(to + 2, c);
        _mm_store_si128(to + 3, d);
    }
    return at;
}

__attribute__((target("avx"))) static size_t copy_lines_avx(char *out, const char *in, size_t bytes)
{
    size_t at = 0;
    for (; bytes - at >= 2 * LINE; at += 2 * LINE) {
        const __m256i *from = (const __m256i *)(const void *)(in + at);
        __m256i *to = (__m256i *)(void *)(out + at);
        __m256i a = _mm256_loadu_si256(from), b = _mm256_loadu_si256(from + 1);
        __m256i c = _mm256_loadu_si256(from + 2), d = _mm256_loadu_si256(from + 3);
        _mm256_store_si256(to, a);
        _mm256_store_si256(to + 1, b);
        _mm256_store_si256(to + 2, c);
        _mm256_store_si256(to + 3, d);
    }
    return at;
}

void cd_copy_near(void *to, const void *from, size_t bytes)
{
    if (bytes < NEAR_FROM) {
        memcpy(to, from, bytes);
        return;
    }
    char *out = to;
    const char *in = from;
    if (bytes >= WHOLE_FROM && takes_whole_lines()) {
        /* Its stores are in no order among themselves, but all before a later store, as that which releases them (Intel's manual,
         * "Fast-String Operation and Out-of-Order Stores"). */
        __asm__ volatile("rep movsb" : "+D"(out), "+S"(in), "+c"(bytes) : : "memory");
        return;
    }
    size_t at = copy_head(out, in, bytes);
    if (__builtin_cpu_supports("avx"))
        at += copy_lines_avx(out + at, in + at, bytes - at);
    at += copy_lines(out + at, in + at, bytes - at);
    memcpy(out + at, in + at, bytes - at);
}

void cd_copy_far(void *to, const void *from, size_t bytes)
{
    char *out = to;
    const char *in = from;
    size_t at = copy_head(out, in, bytes);
    for (; bytes - at >= LINE; at += LINE) {
        const __m128i *source = (const __m128i *)(const void *)(in + at);
        __m128i *target = (__m128i *)(void *)(out + at);
        __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
        __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
        _mm_stream_si128(target, a);
        _mm_stream_si128(target + 1, b);
        _mm_stream_si128(target + 2, c);
        _mm_stream_si128(target + 3, d);
    }
    memcpy(out + at, in + at, bytes - at);
    _mm_sfence(); /* these stores are in no order with later ones otherwise */
}

#else

void cd_copy_near(void *to, const void *from, size_t bytes)
{
    memcpy(to, from, bytes);
}

void cd_copy_far(void *to, const void *from, size_t bytes)
{
    memcpy(to, from, bytes);
}

#endif
