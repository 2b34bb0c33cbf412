/* Which gradient lies in which bucket, and the memory of one bucket. */
#ifndef CD_DDP_BUCKET_H
#define CD_DDP_BUCKET_H

#include "base/op.h"
#include "shm/arena.h"

#include <stdatomic.h>

/* A parameter as the reducer sees it. */
typedef struct {
    size_t count; /* elements */
    cd_dtype dtype;
    cd_device device;
} cd_reducer_param;

/* Assigns parameters to buckets by size. Walks params in `order` (NULL: 0…count−1), one open bucket per
 * (dtype, device); after a parameter was added and the bucket has reached its cap it is closed, and the
 * next bucket of that (dtype, device) takes the next cap (the last repeats). Buckets are numbered in the
 * order in which they close, those still open at the end in the order in which they were opened; with
 * order == NULL all are numbered by their smallest parameter. Different dtypes or devices never share a
 * bucket. Writes bucket_of[param], returns the number of buckets. Pure; no allocation; O(count × kinds of
 * dtype). */
int cd_bucket_assign(const cd_reducer_param *params, const int *order, int count, const size_t *caps, int caps_count,
                     int *bucket_of);

/* Memory of one bucket, shared by its reducer and by the operations that run on it: the last one gives it
 * back. */
typedef struct {
    char *memory;
    size_t bytes;
    cd_arena *arena;  /* where memory is from; NULL: malloc, or the caller's when `borrowed` */
    bool borrowed;
    _Atomic int references;
} cd_bucket_memory;

/* From the arena if there is one with room, else from malloc (64-byte aligned); zeroed. `external` not
 * NULL: that memory, which the caller keeps alive. One reference. Errors: CD_NO_MEMORY. */
cd_status cd_bucket_memory_create(cd_arena *arena, size_t bytes, void *external, cd_bucket_memory **out);
void cd_bucket_memory_retain(cd_bucket_memory *memory);
/* Its block is never given back to the arena: other ranks may still write there. Takes NULL. */
void cd_bucket_memory_forsake(cd_bucket_memory *memory);
/* Takes NULL. Any thread; its type fits cd_work_set_owner. */
void cd_bucket_memory_release(void *memory);

#endif
