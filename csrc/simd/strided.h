/* The one place that knows strides: copies between logical ranges of a span and packed memory. */
#ifndef CD_SIMD_STRIDED_H
#define CD_SIMD_STRIDED_H

#include "base/op.h"

/* Elements [first, first + count) of the span in logical order → packed memory, and back. Gaps between strides are neither
 * read nor written. Contiguous spans are one memcpy. Pure; any thread; count 0 is legal with any pointer. */
void cd_span_read(const cd_span *span, size_t first, size_t count, void *out);
void cd_span_write(const cd_span *span, size_t first, size_t count, const void *in);
/* Address of element `first` of a contiguous span (dims == NULL). */
static inline void *cd_span_at(const cd_span *span, size_t first)
{
    return (char *)span->data + first * span->item_bytes;
}
/* Both spans as logical sequences of the same count and item size: to ← from. They must not overlap. */
void cd_span_copy(const cd_span *to, const cd_span *from);
/* Merges adjacent dimensions that lie one behind the other and drops those of extent 1, in place. Returns true when nothing
 * but one packed run is left (dims are then not needed). */
bool cd_dims_normalise(cd_dims *dims, uint32_t item_bytes);

#endif
