/* Which variant runs: decided at the first use, from the processor and CDIST_SIMD. */
#include "simd/reduce.h"

#include "base/knob.h"
#include "base/log.h"
#include "simd/reduce_variant.h"

#include <stdatomic.h>
#include <string.h>
#include <strings.h>

/* Best first. */
static const cd_reduce_variant *const variants[] = {
#if defined(__x86_64__)
    &cd_reduce_avx512,
    &cd_reduce_avx2,
#elif defined(__aarch64__)
    &cd_reduce_neon,
#endif
    &cd_reduce_scalar,
};
enum { VARIANTS = sizeof variants / sizeof *variants };

static _Atomic(const cd_reduce_variant *) chosen;

static const cd_reduce_variant *find_variant(const char *name)
{
    for (int i = 0; i < VARIANTS; i++)
        if (strcasecmp(variants[i]->name, name) == 0 && variants[i]->runs())
            return variants[i];
    return NULL;
}

/* A name that this processor cannot run is passed over with a warning: cd_simd_name tells what runs. */
static const cd_reduce_variant *choose(void)
{
    const cd_reduce_variant *mine =
        cd_knob_is("CDIST_SIMD", "auto") ? NULL : find_variant(cd_knob("CDIST_SIMD"));
    bool is_passed_over = !mine && !cd_knob_is("CDIST_SIMD", "auto");
    for (int i = 0; !mine; i++) /* the last one runs everywhere */
        if (variants[i]->runs())
            mine = variants[i];
    const cd_reduce_variant *none = NULL;
    /* The first thread decides for all, even if the environment changes between two. Relaxed: the tables are
     * constants. */
    if (!atomic_compare_exchange_strong_explicit(&chosen, &none, mine, memory_order_relaxed,
                                                 memory_order_relaxed))
        return none;
    if (is_passed_over)
        cd_log(CD_LOG_WARN, "CDIST_SIMD=%s: this build or processor has no such kernels; those used are %s",
               cd_knob("CDIST_SIMD"), mine->name);
    return mine;
}

static const cd_reduce_variant *get_variant(void)
{
    /* Relaxed: what it points to is constant and was there before the process started. */
    const cd_reduce_variant *variant = atomic_load_explicit(&chosen, memory_order_relaxed);
    return variant ? variant : choose();
}

static cd_reduce_func find_in(const cd_reduce_variant *variant, cd_redop redop, cd_dtype dtype)
{
    if ((unsigned)redop >= CD_REDOPS || (unsigned)dtype >= CD_DTYPES)
        return NULL;
    if (dtype == CD_LONGDOUBLE || dtype == CD_CLONGDOUBLE)
        return cd_reduce_long_find(redop, dtype);
    return variant->table[redop][dtype];
}

cd_reduce_func cd_reduce_find(cd_redop redop, cd_dtype dtype)
{
    return find_in(get_variant(), redop, dtype);
}

const char *cd_simd_name(void)
{
    return get_variant()->name;
}

cd_reduce_func cd_reduce_find_variant(const char *name, cd_redop redop, cd_dtype dtype)
{
    const cd_reduce_variant *variant = find_variant(name);
    return variant ? find_in(variant, redop, dtype) : NULL;
}
