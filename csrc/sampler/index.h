/* Which sample goes to which rank: a pure function of (length, seed, shuffle, padding, rank, world, first,
 * position). */
#ifndef CD_SAMPLER_INDEX_H
#define CD_SAMPLER_INDEX_H

#include "base/status.h"

#include <stddef.h>
#include <stdint.h>

typedef enum {
    CD_PAD_REPEAT = 0, /* indices of the stream's start again until all ranks have ceil(rest / world) */
    CD_PAD_DROP,       /* the tail is dropped: floor(rest / world) each */
    CD_PAD_NONE        /* uneven: this rank's positions below length and no others */
} cd_pad;

/* The stream is the order of all samples of an epoch; rank r takes its positions first + r, first + r +
 * world, … A job that goes on at another world size sets `first` to what it has used up, so that the union of
 * the rest stays exact. rest = length − first, or 0. A shuffled stream is the permutation that
 * torch.randperm(length) gives with a CPU generator seeded with `seed` (world = 1 and rank = 0 yield it
 * whole). */
typedef struct {
    uint64_t length;
    uint64_t seed;  /* seed + epoch of the caller's, modulo 2^64; only the low 32 bits matter (as in torch) */
    uint64_t first; /* positions of the stream that are used up already; 0 at the start of an epoch */
    int64_t rank, world;
    bool shuffle;
    cd_pad pad;
} cd_index_spec;

/* Checks rank and world (CD_BAD_ARGUMENT with torch's text), and length and first < 2^60. */
cd_status cd_index_check(const cd_index_spec *spec);
/* Number of indices of this rank; for CD_PAD_NONE of this very rank. */
uint64_t cd_index_count(const cd_index_spec *spec);
/* How many of them, at the end, are padding (only CD_PAD_REPEAT has any). */
uint64_t cd_index_padding(const cd_index_spec *spec);
/* Entries [position, position + count) of this rank's indices. Needs position + count ≤ cd_index_count.
 * Errors: CD_NO_MEMORY (a shuffle needs 4 bytes a sample, 8 above 2^32 samples). */
cd_status cd_index_fill(const cd_index_spec *spec, uint64_t position, int64_t *out, size_t count);

#endif
