#include "ddp/inplace.h"

#include "base/attr.h"
#include "base/host.h"
#include "base/knob.h"
#include "base/log.h"
#include "simd/copy.h"

#include <stdlib.h>
#include <string.h>

/* What is reduced at a time, before it is copied to the others: it stays in L1. */
#define PART_BYTES ((size_t)16384)
/* What a rank takes at a time: a multiple of all items, and long beside the way of the word's line from one core to another. */
#define BLOCK_BYTES (4 * PART_BYTES)

/* Of a piece in a step, in memory of group rank 0. */
typedef struct {
    _Atomic uint32_t arrived; /* ranks that have published it */
    _Atomic uint32_t taken;   /* blocks; some more where several ranks found nothing left */
} piece_word;

struct cd_inplace {
    int rank, ranks, buckets, pieces;
    char **at;            /* [rank × buckets + bucket] in this process's mapping */
    piece_word *words[2]; /* [piece] of this step, and of the next one: zeros */
    const void **inputs;  /* [ranks] */
};

/* What a rank tells the others: its vote, 1 + offset in the arena of the words (rank 0) and of each bucket; 0: not there. */
enum { VOTE, WORDS, FIRST_BUCKET };

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
        for (size_t word = rank ? FIRST_BUCKET : WORDS; word < words; word++)
            if (!all[(size_t)rank * words + word])
                return false;
    /* Cores may be counted differently where affinities differ: one rank without a spare one is enough. */
    for (int rank = 0; rank < ranks; rank++)
        if (all[(size_t)rank * words + VOTE])
            return true;
    return false;
}

static cd_status make(cd_arena *arena, const uint64_t *all, int rank, int ranks, int buckets, int pieces, cd_inplace **out)
{
    cd_inplace *inplace = calloc(1, sizeof *inplace);
    if (!inplace)
        return cd_fail(CD_NO_MEMORY, "reducer: no memory for %d ranks", ranks);
    size_t words = FIRST_BUCKET + (size_t)buckets;
    *inplace = (cd_inplace){.rank = rank, .ranks = ranks, .buckets = buckets, .pieces = pieces};
    inplace->at = calloc((size_t)ranks * (size_t)buckets + 1, sizeof *inplace->at);
    inplace->inputs = calloc((size_t)ranks, sizeof *inplace->inputs);
    if (!inplace->at || !inplace->inputs) {
        cd_inplace_free(inplace);
        return cd_fail(CD_NO_MEMORY, "reducer: no memory for %d ranks", ranks);
    }
    for (int half = 0; half < 2; half++)
        inplace->words[half] = (piece_word *)(void *)(arena->base + (all[WORDS] - 1)) + half * pieces;
    for (int peer = 0; peer < ranks; peer++)
        for (int k = 0; k < buckets; k++)
            inplace->at[peer * buckets + k] = arena->base + (all[(size_t)peer * words + FIRST_BUCKET + (size_t)k] - 1);
    *out = inplace;
    return CD_OK;
}

/* Words for two steps; NULL where the arena has no room. */
static void *make_words(cd_arena *arena, int pieces, size_t bytes)
{
    void *memory;
    if (cd_arena_alloc(arena, bytes, &memory) != CD_OK)
        return 0;
    piece_word *words = memory;
    for (int i = 0; i < 2 * pieces; i++) { /* before the others hear of them */
        atomic_init(&words[i].arrived, 0);
        atomic_init(&words[i].taken, 0);
    }
    return memory;
}

cd_status cd_inplace_open(cd_group *group, cd_bucket_memory *const *buckets, int count, int pieces, cd_patience *patience,
                          cd_inplace **out)
{
    *out = 0;
    cd_arena *arena = cd_world_arena(cd_group_world(group));
    int ranks = cd_group_size(group), rank = cd_group_rank(group);
    size_t words = FIRST_BUCKET + (size_t)count, bytes = 2 * (size_t)pieces * sizeof(piece_word);
    uint64_t *mine = calloc(words * ((size_t)ranks + 1), sizeof *mine);
    if (!mine)
        return cd_fail(CD_NO_MEMORY, "reducer: no memory for %d ranks", ranks);
    mine[VOTE] = wants_inline(group);
    void *own_words = arena && rank == 0 ? make_words(arena, pieces, bytes) : 0;
    if (own_words)
        mine[WORDS] = locate(arena, own_words, bytes);
    for (int k = 0; arena && k < count; k++)
        mine[FIRST_BUCKET + k] = locate(arena, buckets[k]->memory, buckets[k]->bytes);
    uint64_t *all = mine + words;
    cd_status status = cd_group_gather_bytes(group, mine, words * sizeof *mine, all, patience);
    bool can = status == CD_OK && all_can(all, ranks, words);
    if (can)
        status = make(arena, all, rank, ranks, count, pieces, out);
    else if (own_words)
        cd_arena_release(arena, own_words);
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
    free(inplace->at);
    free(inplace);
}

bool cd_inplace_publish(cd_inplace *inplace, int piece)
{
    /* Release: who finds all arrived sees the gradients of this rank; those of its other threads came to this one by the acquire
     * of the piece's own counter (step.c). The additions of the ranks are one release sequence. Acquire: the last one may go on
     * with the piece. */
    uint32_t before = atomic_fetch_add_explicit(&inplace->words[0][piece].arrived, 1, memory_order_acq_rel);
    return before + 1 == (uint32_t)inplace->ranks;
}

bool cd_inplace_is_common(const cd_inplace *inplace, int piece)
{
    /* Acquire: pairs with publish. */
    return atomic_load_explicit(&inplace->words[0][piece].arrived, memory_order_acquire) == (uint32_t)inplace->ranks;
}

/* Reads a block from all buckets and writes the result to all. */
static void reduce_block(cd_inplace *inplace, int bucket, size_t from, size_t end, size_t item_bytes, cd_reduce_func reduce,
                         double factor)
{
    char *const *at = inplace->at + bucket;
    char *own = at[inplace->rank * inplace->buckets];
    for (; from < end; from += PART_BYTES) {
        size_t part = end - from < PART_BYTES ? end - from : PART_BYTES;
        for (int peer = 0; peer < inplace->ranks; peer++)
            inplace->inputs[peer] = at[peer * inplace->buckets] + from;
        reduce(own + from, inplace->inputs, inplace->ranks, part / item_bytes, factor);
        for (int i = 1; i < inplace->ranks; i++) {
            int peer = (inplace->rank + i) % inplace->ranks;
            cd_copy_near(at[peer * inplace->buckets] + from, own + from, part);
        }
    }
}

void cd_inplace_reduce(cd_inplace *inplace, int piece, int bucket, size_t at_bytes, size_t bytes, size_t item_bytes,
                       cd_reduce_func reduce, double factor)
{
    _Atomic uint32_t *taken = &inplace->words[0][piece].taken;
    /* Relaxed, both: what the block holds came by the acquire of is_common or publish; a number is given to one rank only. The
     * look beforehand leaves the line of an exhausted piece shared, and `taken` far from overflow. */
    while (atomic_load_explicit(taken, memory_order_relaxed) * BLOCK_BYTES < bytes) {
        size_t from = atomic_fetch_add_explicit(taken, 1, memory_order_relaxed) * BLOCK_BYTES;
        if (from >= bytes)
            return;
        size_t end = bytes - from < BLOCK_BYTES ? bytes : from + BLOCK_BYTES;
        reduce_block(inplace, bucket, at_bytes + from, at_bytes + end, item_bytes, reduce, factor);
    }
}

void cd_inplace_end_step(cd_inplace *inplace)
{
    /* Nobody looks at this step's words any more, and nobody does again before the end of the next step, to which this rank comes
     * after these stores: the operations by which the ranks agree order them. */
    for (int i = 0; inplace->rank == 0 && i < inplace->pieces; i++) {
        atomic_store_explicit(&inplace->words[0][i].arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&inplace->words[0][i].taken, 0, memory_order_relaxed);
    }
    piece_word *next = inplace->words[1];
    inplace->words[1] = inplace->words[0];
    inplace->words[0] = next;
}
