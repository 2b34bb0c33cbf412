/* What depends on the compiler or the processor, in one place: nothing else in the tree asks for them with #ifdef. */
#ifndef CD_BASE_ATTR_H
#define CD_BASE_ATTR_H

#include <stddef.h>

/* Two 64-byte lines: adjacent-line prefetchers pull lines in pairs, so one line alone still falsely shares. */
#define CD_LINE 128
#define CD_ALIGNED(bytes) __attribute__((aligned(bytes)))
#define CD_PRINTF(text, first) __attribute__((format(printf, text, first)))
#define CD_MUST_USE __attribute__((warn_unused_result))
#define CD_COLD __attribute__((cold, noinline))
#define CD_UNUSED __attribute__((unused))
/* A symbol that may be absent from the link: its address is NULL then. */
#define CD_WEAK __attribute__((weak))
#define cd_likely(x) __builtin_expect(!!(x), 1)
#define cd_unlikely(x) __builtin_expect(!!(x), 0)

static inline size_t cd_round_up(size_t value, size_t to)
{
    return (value + to - 1) / to * to;
}

/* Tells the core that this is a spin loop. */
static inline void cd_cpu_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb" ::: "memory");
#else
    __asm__ __volatile__("" ::: "memory");
#endif
}

/* Before a word is posted or bytes are sent. The test build's (tests/c/jitter.c) yields or naps at random. */
#ifdef CDIST_JITTER
void cd_jitter(void);
#else
static inline void cd_jitter(void)
{
}
#endif

#endif
