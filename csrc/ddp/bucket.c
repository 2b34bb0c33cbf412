#include "ddp/bucket.h"

#include <stdlib.h>
#include <string.h>

enum { KEYS = CD_DTYPES * 2 };

/* The open bucket of one (dtype, device). */
typedef struct {
    size_t bytes;
    int first;  /* position in order of its first parameter, −1: none is open */
    int number; /* given when it was opened */
    int cap;
} open_bucket;

static int key_of(const cd_reducer_param *param)
{
    return (int)param->dtype * 2 + (param->device == CD_CUDA);
}

/* Gives `number` to all parameters of this key from position first to last. */
static void number_bucket(const cd_reducer_param *params, const int *order, int first, int last, int key, int number,
                          int *bucket_of)
{
    for (int at = first; at <= last; at++) {
        int param = order ? order[at] : at;
        if (key_of(&params[param]) == key)
            bucket_of[param] = number;
    }
}

int cd_bucket_assign(const cd_reducer_param *params, const int *order, int count, const size_t *caps, int caps_count,
                     int *bucket_of)
{
    open_bucket open[KEYS];
    for (int key = 0; key < KEYS; key++)
        open[key] = (open_bucket){.first = -1};
    int opened = 0, closed = 0;
    for (int at = 0; at < count; at++) {
        const cd_reducer_param *param = &params[order ? order[at] : at];
        int key = key_of(param);
        open_bucket *bucket = &open[key];
        if (bucket->first < 0) {
            bucket->first = at;
            bucket->bytes = 0;
            bucket->number = opened++;
        }
        bucket->bytes += param->count * cd_dtype_bytes(param->dtype);
        if (bucket->bytes >= caps[bucket->cap]) {
            number_bucket(params, order, bucket->first, at, key, order ? closed : bucket->number, bucket_of);
            bucket->first = -1;
            bucket->cap += bucket->cap + 1 < caps_count;
            closed++;
        }
    }
    for (;;) {
        int oldest = -1;
        for (int key = 0; key < KEYS; key++)
            if (open[key].first >= 0 && (oldest < 0 || open[key].first < open[oldest].first))
                oldest = key;
        if (oldest < 0)
            return closed;
        open_bucket *bucket = &open[oldest];
        number_bucket(params, order, bucket->first, count - 1, oldest, order ? closed : bucket->number, bucket_of);
        bucket->first = -1;
        closed++;
    }
}

cd_status cd_bucket_memory_create(cd_arena *arena, size_t bytes, void *external, cd_bucket_memory **out)
{
    cd_bucket_memory *memory = calloc(1, sizeof *memory);
    if (!memory)
        return cd_fail(CD_NO_MEMORY, "gradient bucket: no memory for its description");
    memory->bytes = bytes;
    memory->memory = external;
    memory->borrowed = external != 0;
    atomic_init(&memory->references, 1);
    void *block = 0;
    /* An arena that is full or absent only costs speed. */
    if (!external && arena && cd_arena_alloc(arena, bytes, &block) == CD_OK)
        memory->arena = arena;
    else if (!external && !(block = aligned_alloc(64, (bytes + 63) & ~(size_t)63))) {
        free(memory);
        return cd_fail(CD_NO_MEMORY, "gradient bucket: no memory for %zu bytes", bytes);
    }
    if (!external) {
        memory->memory = block;
        memset(block, 0, bytes);
    }
    *out = memory;
    return CD_OK;
}

void cd_bucket_memory_retain(cd_bucket_memory *memory)
{
    /* Relaxed: the caller holds a reference, so the count cannot reach zero meanwhile. */
    atomic_fetch_add_explicit(&memory->references, 1, memory_order_relaxed);
}

void cd_bucket_memory_forsake(cd_bucket_memory *memory)
{
    if (!memory || !memory->arena)
        return;
    memory->arena = 0;
    memory->borrowed = true;
}

void cd_bucket_memory_release(void *object)
{
    cd_bucket_memory *memory = object;
    /* Acquire-release: whoever frees sees everything that the others did with the memory before they let
     * go. */
    if (!memory || atomic_fetch_sub_explicit(&memory->references, 1, memory_order_acq_rel) > 1)
        return;
    if (memory->arena)
        cd_arena_release(memory->arena, memory->memory);
    else if (!memory->borrowed)
        free(memory->memory);
    free(memory);
}
