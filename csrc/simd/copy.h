/* Copies between the caches of two cores, and past the caches. */
#ifndef CD_SIMD_COPY_H
#define CD_SIMD_COPY_H

#include <stddef.h>

/* Both: to ← from, which must not overlap. Ordinary release stores of this thread order the bytes for others. Pure; any
 * thread. */

/* Where one side is shared memory that another core writes or reads. */
void cd_copy_near(void *to, const void *from, size_t bytes);
/* To memory that nobody reads soon, or that is too large for caches: where the processor can, its lines are neither read first
 * nor displace others. Worth it from some KiB on. */
void cd_copy_far(void *to, const void *from, size_t bytes);

#endif
