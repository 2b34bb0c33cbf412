/* Which sample goes to which rank: a pure function of (length, seed, epoch, shuffle, padding, rank, world, position). */
#ifndef CD_SAMPLER_INDEX_H
#define CD_SAMPLER_INDEX_H

#include "base/status.h"

#include <stddef.h>
#include <stdint.h>

typedef enum {
    CD_PAD_REPEAT = 0, /* the first indices again until all ranks have ceil(length / world) */
    CD_PAD_DROP,       /* the tail is dropped: ceil((length − world) / world) each when it does not divide */
    CD_PAD_NONE        /* uneven: rank r gets positions r, r + world, … below length */
} cd_pad;

typedef struct {
    uint64_t length;
    uint64_t seed;  /* seed + epoch of the caller's, modulo 2^64; only the low 32 bits matter (as in torch) */
    int64_t rank, world;
    bool shuffle;
    cd_pad pad;
} cd_index_spec;

/* Checks rank and world (CD_BAD_ARGUMENT with torch's text) and length < 2^62. */
cd_status cd_index_check(const cd_index_spec *spec);
/* Number of indices of this rank; for CD_PAD_NONE of this very rank. */
uint64_t cd_index_count(const cd_index_spec *spec);
/* The permutation of 0..length−1 that torch.randperm gives with a CPU generator seeded with `seed`. out[length]. */
void cd_index_permute(uint64_t length, uint64_t seed, int64_t *out);
/* Positions [position, position + count) of this rank's indices. Needs position + count ≤ cd_index_count.
 * Errors: CD_NO_MEMORY (the permutation needs 4 or 8 bytes a sample). */
cd_status cd_index_fill(const cd_index_spec *spec, uint64_t position, int64_t *out, size_t count);

#endif
