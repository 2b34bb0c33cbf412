#include "sampler/index.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* torch draws 64 bits a sample from here on: floor((2^32 − 1) / 20). */
#define LONG_DRAWS_FROM UINT64_C(214748364)
#define LENGTH_LIMIT (UINT64_C(1) << 60)

/* Mersenne Twister 19937. A block of outputs is made at once: no output depends on what the shuffle does with
 * the one before, so the targets of a whole block are known early and their cache lines can be on the way. */
#define WORDS 624
#define MIDDLE 397

typedef struct {
    uint32_t state[WORDS];
    uint32_t drawn[WORDS];
    size_t used; /* of drawn */
} twister;

static void twister_seed(twister *t, uint32_t seed)
{
    t->state[0] = seed;
    for (uint32_t j = 1; j < WORDS; j++)
        t->state[j] = 1812433253u * (t->state[j - 1] ^ (t->state[j - 1] >> 30)) + j;
    t->used = WORDS;
}

static inline uint32_t twist(uint32_t high, uint32_t low)
{
    uint32_t both = (high & 0x80000000u) | (low & 0x7fffffffu);
    return (both >> 1) ^ ((0u - (low & 1u)) & 0x9908b0dfu);
}

/* The next 624 outputs into t->drawn. */
static void twister_block(twister *t)
{
    uint32_t *s = t->state;
    for (size_t j = 0; j < WORDS - MIDDLE; j++)
        s[j] = s[j + MIDDLE] ^ twist(s[j], s[j + 1]);
    for (size_t j = WORDS - MIDDLE; j < WORDS - 1; j++)
        s[j] = s[j + MIDDLE - WORDS] ^ twist(s[j], s[j + 1]);
    s[WORDS - 1] = s[MIDDLE - 1] ^ twist(s[WORDS - 1], s[0]);
    for (size_t j = 0; j < WORDS; j++) {
        uint32_t y = s[j];
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c5680u;
        y ^= (y << 15) & 0xefc60000u;
        t->drawn[j] = y ^ (y >> 18);
    }
    t->used = 0;
}

/* 64 bits, the half that was drawn first on top. 624 is even, so a pair never straddles a block. */
static inline uint64_t twister_long(twister *t)
{
    if (t->used == WORDS)
        twister_block(t);
    uint64_t high = t->drawn[t->used];
    uint64_t both = high << 32 | t->drawn[t->used + 1];
    t->used += 2;
    return both;
}

/* A permutation in the making: entries of 4 bytes, or of 8 where `wide`. */
static inline uint64_t entry_get(const void *entries, bool wide, uint64_t i)
{
    return wide ? ((const uint64_t *)entries)[i] : ((const uint32_t *)entries)[i];
}

static inline void entry_set(void *entries, bool wide, uint64_t i, uint64_t value)
{
    if (wide)
        ((uint64_t *)entries)[i] = value;
    else
        ((uint32_t *)entries)[i] = (uint32_t)value;
}

/* How many steps ahead a target's line is asked for: 10 million samples in 59 ms, with 8 or 64 steps in 68
 * (Zen 4, L3 of 32 MiB). */
#define AHEAD 32

/* targets[k] = i + drawn[k] mod (length − i) for i = begin + k < length. The quotient of two integers below
 * 2^32, rounded to double, never rounds up to the next integer (its distance from it is at least 2^-32 of it,
 * a double's step 2^-53), so its whole part is exact, and a division of doubles goes several at a time where
 * one of integers does not. */
static void block_targets(const uint32_t *restrict drawn, uint32_t begin, uint32_t length,
                          uint32_t *restrict targets)
{
    for (uint32_t k = 0; k < WORDS; k++) {
        /* Through signed integers, which have a vector conversion; halves keep them below 2^31. */
        double value = (double)(int32_t)(drawn[k] >> 1) * 2.0 + (double)(int32_t)(drawn[k] & 1u);
        int32_t left = (int32_t)(length - begin - k);
        uint32_t quotient = (uint32_t)(int32_t)(value / (double)left);
        targets[k] = begin + k + (drawn[k] - quotient * (uint32_t)left);
    }
}

/* The last block, where length − i runs out. */
static void last_targets(const uint32_t *drawn, uint32_t begin, uint32_t length, uint32_t *targets)
{
    for (uint32_t k = 0; k < WORDS; k++) {
        uint32_t i = begin + k;
        targets[k] = i + 1 < length ? i + drawn[k] % (length - i) : 0;
    }
}

static void next_targets(twister *t, uint32_t begin, uint32_t length, uint32_t *targets)
{
    twister_block(t);
    /* Quotients must stay below 2^31: length − i ≥ 2, which the last block does not promise. */
    if (length >= WORDS + 2 && begin < length - WORDS - 1)
        block_targets(t->drawn, begin, length, targets);
    else
        last_targets(t->drawn, begin, length, targets);
}

/* What is wanted of the stream: out[j] = entry at + j × step for j < count, and the entry `wrapped` if there
 * is padding. */
typedef struct {
    uint64_t at, step;
    size_t count;
    int64_t *out;
    uint64_t wrapped;
    int64_t *wrapped_out; /* NULL without padding */
} harvest;

/* Takes what is wanted below `end`. */
static void harvest_below(harvest *h, const uint32_t *entries, uint64_t end)
{
    for (; h->count > 0 && h->at < end; h->at += h->step, h->count--)
        *h->out++ = (int64_t)entries[h->at];
}

/* One more than the last entry that is wanted. */
static uint64_t harvest_end(const harvest *h)
{
    uint64_t end = h->count > 0 ? h->at + (h->count - 1) * h->step + 1 : 0;
    return h->wrapped_out && h->wrapped >= end ? h->wrapped + 1 : end;
}

/* torch's shuffle of fewer than 214748364: entry i is final after step i, so the steps stop with the last one
 * wanted, and entries are taken while they are still in the cache. */
static void shuffle_forward(uint32_t *entries, uint32_t length, uint32_t seed, harvest *h)
{
    for (uint32_t i = 0; i < length; i++)
        entries[i] = i;
    twister t;
    twister_seed(&t, seed);
    uint32_t targets[2 * WORDS];
    uint32_t steps = (uint32_t)harvest_end(h);
    if (steps > length - 1)
        steps = length - 1;
    next_targets(&t, 0, length, targets + WORDS);
    for (uint32_t begin = 0; begin < steps; begin += WORDS) {
        memcpy(targets, targets + WORDS, sizeof targets / 2);
        next_targets(&t, begin + WORDS, length, targets + WORDS);
        uint32_t block = steps - begin < WORDS ? steps - begin : WORDS;
        for (uint32_t k = 0; k < block; k++) {
            __builtin_prefetch(&entries[targets[k + AHEAD]], 1);
            uint32_t value = entries[targets[k]];
            entries[targets[k]] = entries[begin + k];
            entries[begin + k] = value;
        }
        harvest_below(h, entries, begin + block);
    }
    harvest_below(h, entries, length);
}

/* torch's shuffle of 214748364 and more: inside out, 64-bit draws; no entry is final before the end. */
static inline void shuffle_inside_out(void *entries, bool wide, uint64_t length, uint32_t seed)
{
    twister t;
    twister_seed(&t, seed);
    uint64_t targets[AHEAD];
    uint64_t drawn = 0;
    for (; drawn < AHEAD && drawn < length; drawn++)
        targets[drawn] = twister_long(&t) % (drawn + 1);
    for (uint64_t i = 0; i < length; i++) {
        uint64_t target = targets[i % AHEAD];
        if (drawn < length) {
            uint64_t ahead = twister_long(&t) % (drawn + 1);
            __builtin_prefetch((char *)entries + ahead * (wide ? 8 : 4), 1);
            targets[drawn++ % AHEAD] = ahead;
        }
        entry_set(entries, wide, i, i);
        entry_set(entries, wide, i, entry_get(entries, wide, target));
        entry_set(entries, wide, target, i);
    }
}

static bool is_wide(uint64_t length)
{
    return length > UINT64_C(1) << 32;
}

static void shuffle_long(void *entries, uint64_t length, uint32_t seed)
{
    if (is_wide(length))
        shuffle_inside_out(entries, true, length, seed);
    else
        shuffle_inside_out(entries, false, length, seed);
}

cd_status cd_index_check(const cd_index_spec *spec)
{
    if (spec->world < 1)
        return cd_fail(CD_BAD_ARGUMENT, "sampler: num_replicas should be at least 1, not %" PRId64,
                       spec->world);
    if (spec->rank < 0 || spec->rank >= spec->world)
        return cd_fail(CD_BAD_ARGUMENT,
                       "Invalid rank %" PRId64 ", rank should be in the interval [0, %" PRId64 "]",
                       spec->rank, spec->world - 1);
    if (spec->length >= LENGTH_LIMIT || spec->first >= LENGTH_LIMIT || (uint64_t)spec->world >= LENGTH_LIMIT)
        return cd_fail(CD_BAD_ARGUMENT, "sampler: length, position and num_replicas must be below 2^60");
    return CD_OK;
}

static uint64_t rest_of(const cd_index_spec *spec)
{
    return spec->length > spec->first ? spec->length - spec->first : 0;
}

/* Positions of this rank that lie below length. */
static uint64_t real_count(const cd_index_spec *spec)
{
    uint64_t rest = rest_of(spec), rank = (uint64_t)spec->rank, world = (uint64_t)spec->world;
    return rest / world + (rest % world > rank);
}

uint64_t cd_index_count(const cd_index_spec *spec)
{
    uint64_t rest = rest_of(spec), world = (uint64_t)spec->world;
    switch (spec->pad) {
    case CD_PAD_REPEAT: return rest / world + (rest % world > 0);
    case CD_PAD_DROP: return rest / world;
    case CD_PAD_NONE: break;
    }
    return real_count(spec);
}

uint64_t cd_index_padding(const cd_index_spec *spec)
{
    return spec->pad == CD_PAD_REPEAT ? cd_index_count(spec) - real_count(spec) : 0;
}

/* Huge pages: a shuffle jumps over the whole array, and with small ones most jumps miss the TLB (measured: 10
 * million samples in 59 ms, without 88). */
static void *entries_map(size_t bytes)
{
    void *entries = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (entries == MAP_FAILED)
        return 0;
    madvise(entries, bytes, MADV_HUGEPAGE);
    return entries;
}

static cd_status fill_shuffled(const cd_index_spec *spec, harvest *h)
{
    bool wide = is_wide(spec->length);
    size_t bytes = spec->length * (wide ? 8 : 4);
    void *entries = entries_map(bytes);
    if (!entries)
        return cd_fail(CD_NO_MEMORY,
                       "sampler: no memory for the permutation of %" PRIu64 " samples (%zu bytes)",
                       spec->length, bytes);
    uint32_t seed = (uint32_t)spec->seed;
    if (spec->length < LONG_DRAWS_FROM) {
        shuffle_forward(entries, (uint32_t)spec->length, seed, h);
    } else {
        shuffle_long(entries, spec->length, seed);
        for (; h->count > 0; h->count--, h->at += h->step)
            *h->out++ = (int64_t)entry_get(entries, wide, h->at);
    }
    if (h->wrapped_out)
        *h->wrapped_out = (int64_t)entry_get(entries, wide, h->wrapped);
    munmap(entries, bytes);
    return CD_OK;
}

static void fill_in_order(harvest *h)
{
    for (size_t j = 0; j < h->count; j++)
        h->out[j] = (int64_t)(h->at + j * h->step);
    if (h->wrapped_out)
        *h->wrapped_out = (int64_t)h->wrapped;
}

cd_status cd_index_fill(const cd_index_spec *spec, uint64_t position, int64_t *out, size_t count)
{
    if (count == 0)
        return CD_OK;
    uint64_t world = (uint64_t)spec->world;
    harvest h = {.at = spec->first + (uint64_t)spec->rank + position * world,
                 .step = world,
                 .count = count,
                 .out = out};
    /* A rank has at most one entry of padding, its last. */
    if (position + count > real_count(spec)) {
        h.count--;
        h.wrapped = (h.at + h.count * world) % spec->length;
        h.wrapped_out = out + h.count;
    }
    if (spec->shuffle)
        return fill_shuffled(spec, &h);
    fill_in_order(&h);
    return CD_OK;
}
