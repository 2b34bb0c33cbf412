#include "ddp/inplace.h"

#include "base/attr.h"
#include "base/host.h"
#include "base/knob.h"
#include "base/log.h"
#include "simd/copy.h"

#include <stdlib.h>
#include <string.h>

/* What is reduced at a time, before it is copied to the others: it stays in L1. */
#define BLOCK_BYTES ((size_t)16384)

struct cd_inplace {
    int rank, ranks, buckets;
    char **at;                   /* [rank × buckets + bucket] in this process's mapping */
    _Atomic uint64_t **counters; /* [rank] */
    const void **inputs;         /* [ranks] */
};

/* What a rank tells the others: its vote, 1 + offset of its counter in the arena, and of each bucket; 0: not there. */
enum { VOTE, COUNTER, FIRST_BUCKET };

/* Ranks that have a core to spare let a worker reduce while they compute; others lose to it what it takes. */
static bool wants_inline(const cd_group *group)
{
    if (!cd_knob_is("CDIST_REDUCER", "auto"))
        return cd_knob_is("CDIST_REDUCER", "inline");
    return 2 * cd_world_local_size(cd_group_world((cd_group *)group)) > cd_host_cores();
}

static uint64_t locate(const cd_arena *arena, const void *memory, size_t bytes)
{
    size_t offset = cd_arena_offset(arena, memory, bytes);
    return offset == SIZE_MAX ? 0 : (uint64_t)((size_t)arena->local * arena->region_bytes + offset) + 1;
}

/* All ranks read the same table, so they decide alike. */
static bool all_can(const uint64_t *all, int ranks, size_t words)
{
    for (int rank = 0; rank < ranks; rank++)
        for (size_t word = COUNTER; word < words; word++)
            if (!all[(size_t)rank * words + word])
                return false;
    /* Cores may be counted differently where affinities differ: one rank without a spare one is enough. */
    for (int rank = 0; rank < ranks; rank++)
        if (all[(size_t)rank * words + VOTE])
            return true;
    return false;
}

static cd_status make(cd_arena *arena, const uint64_t *all, int rank, int ranks, int buckets, cd_inplace **out)
{
    cd_inplace *inplace = calloc(1, sizeof *inplace);
    if (!inplace)
        return cd_fail(CD_NO_MEMORY, "reducer: no memory for %d ranks", ranks);
    size_t words = FIRST_BUCKET + (size_t)buckets;
    *inplace = (cd_inplace){.rank = rank, .ranks = ranks, .buckets = buckets};
    inplace->at = calloc((size_t)ranks * (size_t)buckets + 1, sizeof *inplace->at);
    inplace->counters = calloc((size_t)ranks, sizeof *inplace->counters);
    inplace->inputs = calloc((size_t)ranks, sizeof *inplace->inputs);
    if (!inplace->at || !inplace->counters || !inplace->inputs) {
        cd_inplace_free(inplace);
        return cd_fail(CD_NO_MEMORY, "reducer: no memory for %d ranks", ranks);
    }
    for (int peer = 0; peer < ranks; peer++) {
        const uint64_t *said = all + (size_t)peer * words;
        inplace->counters[peer] = (_Atomic uint64_t *)(void *)(arena->base + (said[COUNTER] - 1));
        for (int k = 0; k < buckets; k++)
            inplace->at[peer * buckets + k] = arena->base + (said[FIRST_BUCKET + k] - 1);
    }
    *out = inplace;
    return CD_OK;
}

cd_status cd_inplace_open(cd_group *group, cd_bucket_memory *const *buckets, int count, cd_patience *patience,
                          cd_inplace **out)
{
    *out = 0;
    cd_arena *arena = cd_world_arena(cd_group_world(group));
    int ranks = cd_group_size(group);
    size_t words = FIRST_BUCKET + (size_t)count;
    uint64_t *mine = calloc(words * ((size_t)ranks + 1), sizeof *mine);
    if (!mine)
        return cd_fail(CD_NO_MEMORY, "reducer: no memory for %d ranks", ranks);
    mine[VOTE] = wants_inline(group);
    void *counter = 0;
    if (arena && cd_arena_alloc(arena, CD_LINE, &counter) == CD_OK) {
        atomic_init((_Atomic uint64_t *)counter, 0); /* before the others hear of it */
        mine[COUNTER] = locate(arena, counter, CD_LINE);
        for (int k = 0; k < count; k++)
            mine[FIRST_BUCKET + k] = locate(arena, buckets[k]->memory, buckets[k]->bytes);
    }
    uint64_t *all = mine + words;
    cd_status status = cd_group_gather_bytes(group, mine, words * sizeof *mine, all, patience);
    bool can = status == CD_OK && all_can(all, ranks, words);
    if (can)
        status = make(arena, all, cd_group_rank(group), ranks, count, out);
    else if (counter)
        cd_arena_release(arena, counter);
    if (status == CD_OK)
        cd_log_about("ddp", "gradients are reduced by %s", can ? "the threads that compute them" : "the worker");
    free(mine);
    return status;
}

void cd_inplace_free(cd_inplace *inplace)
{
    if (!inplace)
        return;
    free(inplace->inputs);
    free(inplace->counters);
    free(inplace->at);
    free(inplace);
}

void cd_inplace_publish(cd_inplace *inplace, uint64_t number)
{
    /* Release: who reads this number sees the gradients of the pieces; those of other threads came to this one by the acquire of
     * the piece's own counter (reducer.c). */
    atomic_store_explicit(inplace->counters[inplace->rank], number, memory_order_release);
}

uint64_t cd_inplace_common(const cd_inplace *inplace)
{
    uint64_t least = UINT64_MAX;
    for (int peer = 0; peer < inplace->ranks; peer++) {
        /* Acquire: pairs with publish. */
        uint64_t number = atomic_load_explicit(inplace->counters[peer], memory_order_acquire);
        least = number < least ? number : least;
    }
    return least;
}

void cd_inplace_reduce(cd_inplace *inplace, int bucket, size_t at_bytes, size_t bytes, size_t item_bytes,
                       cd_reduce_func reduce, double factor)
{
    size_t ranks = (size_t)inplace->ranks, slice = cd_round_up((bytes + ranks - 1) / ranks, CD_LINE);
    size_t from = (size_t)inplace->rank * slice;
    size_t end = from + slice < bytes ? from + slice : bytes;
    char *const *at = inplace->at + bucket;
    char *own = at[inplace->rank * inplace->buckets] + at_bytes;
    for (; from < end; from += BLOCK_BYTES) {
        size_t block = end - from < BLOCK_BYTES ? end - from : BLOCK_BYTES;
        for (int peer = 0; peer < inplace->ranks; peer++)
            inplace->inputs[peer] = at[peer * inplace->buckets] + at_bytes + from;
        reduce(own + from, inplace->inputs, inplace->ranks, block / item_bytes, factor);
        for (int i = 1; i < inplace->ranks; i++) {
            int peer = (inplace->rank + i) % inplace->ranks;
            cd_copy_near(at[peer * inplace->buckets] + at_bytes + from, own + from, block);
        }
    }
}
