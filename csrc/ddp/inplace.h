/* Gradients of ranks that share a host, reduced where they lie, in the shared arena, by the threads that compute them: no worker,
 * no message, nobody waits.
 *
 * The buckets are cut in pieces, the same and in the same order on all ranks. For each piece a word in shared memory counts the
 * ranks that have completed theirs, and which blocks of it are taken. Of a piece that all have completed any rank takes blocks
 * that nobody has taken: it reads the block from all buckets and writes the result to all of them. Nobody else reads or writes
 * that block between its ranks' publishing the piece and the end of the step. The step's end is the caller's to agree on: before
 * it every block is taken and each rank has reduced those it took, after it no rank touches the memory of another.
 *
 * Who takes what is the callers' to choose; blocks instead of a fixed share let a rank that is ahead do the work of one that is
 * behind, for which all would wait at the end. */
#ifndef CD_DDP_INPLACE_H
#define CD_DDP_INPLACE_H

#include "ddp/bucket.h"
#include "group/group.h"
#include "simd/reduce.h"

typedef struct cd_inplace cd_inplace;

/* Collective over the group: tells where the buckets lie. *out stays NULL where this does not pay or cannot be, on all ranks
 * alike: a rank's bucket lies outside the arena, or the ranks have a core each to spare for a worker (CDIST_REDUCER=inline or
 * worker: decided so). Only for groups whose transport is "shm". Errors: the group's; CD_NO_MEMORY. */
cd_status cd_inplace_open(cd_group *group, cd_bucket_memory *const *buckets, int count, int pieces, cd_patience *patience,
                          cd_inplace **out);
/* Takes NULL. Between steps only. Its words stay, so that a rank that still steps waits instead of writing. */
void cd_inplace_free(cd_inplace *inplace);
/* This rank's piece is complete; once in a step. Whether all are now: this rank was the last. */
bool cd_inplace_publish(cd_inplace *inplace, int piece);
/* Whether all ranks have published the piece in this step. */
bool cd_inplace_is_common(const cd_inplace *inplace, int piece);
/* Reduces the blocks that nobody has taken of a piece that all have published; `at_bytes` from its bucket's start. */
void cd_inplace_reduce(cd_inplace *inplace, int piece, int bucket, size_t at_bytes, size_t bytes, size_t item_bytes,
                       cd_reduce_func reduce, double factor);
/* All ranks have reduced what they took in this step; each calls it before it comes to the next agreement on a step's end. */
void cd_inplace_end_step(cd_inplace *inplace);

#endif
