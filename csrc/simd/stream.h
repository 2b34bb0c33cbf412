/* Copies of large arrays that nobody reads soon: past the caches, where the processor can. */
#ifndef CD_SIMD_STREAM_H
#define CD_SIMD_STREAM_H

#include <stddef.h>

/* to ← from, which must not overlap. From 64 KiB on the destination is written around the caches: its lines are neither read
 * first nor displace others. Ordinary release stores of this thread order the bytes for others. Pure; any thread. */
void cd_stream_copy(void *to, const void *from, size_t bytes);

#endif
