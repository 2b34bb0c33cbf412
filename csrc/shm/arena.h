/* Memory of a host that all its ranks have mapped, cut in one region a rank, from which each rank allocates for itself
 * (cdist.empty, gradient buckets): collectives run on it in place, without staging. */
#ifndef CD_SHM_ARENA_H
#define CD_SHM_ARENA_H

#include "base/status.h"

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

/* One process's view. Blocks are 128-byte aligned (page aligned from 64 KiB on), first-touched by the caller. */
typedef struct cd_arena {
    char *base;            /* of rank 0's region in this process's mapping */
    size_t region_bytes;   /* per rank; sparse: costs memory only where there are blocks, mostly only where they are touched */
    int ranks, local;
    const _Atomic uint32_t *alive; /* 0 in forked children, whose memory this is not; NULL: never forked */
    pthread_mutex_t lock;
    struct cd_arena_block *blocks;
} cd_arena;

/* Takes memory of ranks × region_bytes (may be NULL: then every allocation fails with CD_UNSUPPORTED). */
cd_status cd_arena_open(void *memory, size_t region_bytes, int ranks, int local, cd_arena **out);
void cd_arena_free(cd_arena *arena);
/* From the own region. Any thread. Blocks of 4 MiB and more lie in huge pages where the kernel makes them on request, and then
 * have all their memory at once. Errors: CD_NO_MEMORY with the sizes. */
cd_status cd_arena_alloc(cd_arena *arena, size_t bytes, void **out);
/* Gives a block back; its pages too (punch hole / MADV_REMOVE) from 1 MiB on. In a forked child nothing happens: the block is
 * the parent's, which goes on with it. */
void cd_arena_release(cd_arena *arena, void *block);
/* The block in which `memory` lies (none: nothing happens) is never given out again after its release: another rank may still
 * be writing to it. Its pages go back all the same. Any thread. */
void cd_arena_retire(cd_arena *arena, const void *memory);
/* Offset in the own region, or SIZE_MAX when [p, p + bytes) does not lie in it. O(1). */
static inline size_t cd_arena_offset(const cd_arena *arena, const void *p, size_t bytes)
{
    size_t offset = (size_t)((const char *)p - arena->base) - (size_t)arena->local * arena->region_bytes;
    return offset < arena->region_bytes && bytes <= arena->region_bytes - offset ? offset : SIZE_MAX;
}
static inline void *cd_arena_at(const cd_arena *arena, int local, size_t offset)
{
    return arena->base + (size_t)local * arena->region_bytes + offset;
}

#endif
