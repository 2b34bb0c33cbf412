/* Gradients of ranks that share a host, reduced where they lie, in the shared arena, by the threads that compute them: no worker,
 * no message, nobody waits.
 *
 * The buckets are cut in pieces, the same and in the same order on all ranks. Each rank has one counter that only grows, in
 * shared memory: how many pieces of its own are complete. What all ranks have completed, each rank reduces its slice of, whenever
 * it comes by: it reads the slice from all buckets and writes the result to all of them. Nobody else reads or writes that slice
 * between a rank's publishing the piece and the end of the step. The step's end is the caller's to agree on: before it each rank
 * has reduced its slices of all pieces, after it no rank touches the memory of another. */
#ifndef CD_DDP_INPLACE_H
#define CD_DDP_INPLACE_H

#include "ddp/bucket.h"
#include "group/group.h"
#include "simd/reduce.h"

typedef struct cd_inplace cd_inplace;

/* Collective over the group: tells where the buckets lie. *out stays NULL where this does not pay or cannot be, on all ranks
 * alike: a rank's bucket lies outside the arena, or the ranks have a core each to spare for a worker (CDIST_REDUCER=inline or
 * worker: decided so). Only for groups whose transport is "shm". Errors: the group's; CD_NO_MEMORY. */
cd_status cd_inplace_open(cd_group *group, cd_bucket_memory *const *buckets, int count, cd_patience *patience,
                          cd_inplace **out);
/* Takes NULL. Between steps only. Its counter stays, so that a rank that still steps waits instead of writing. */
void cd_inplace_free(cd_inplace *inplace);
/* This rank's first `number` pieces since open, counted over all steps, are complete. `number` never falls. */
void cd_inplace_publish(cd_inplace *inplace, uint64_t number);
/* How many pieces all ranks have published. */
uint64_t cd_inplace_common(const cd_inplace *inplace);
/* Reduces this rank's slice of a piece that all have published. */
void cd_inplace_reduce(cd_inplace *inplace, int bucket, size_t at_bytes, size_t bytes, size_t item_bytes,
                       cd_reduce_func reduce, double factor);

#endif
