/* The gradient reducer: buckets, readiness counters, launch in order. One call per gradient on the hot
 * path.
 *
 * A step is begin → ready × parameters → finish. Bucket k is launched (asynchronous all_reduces in place, one
 * for each of its pieces: see reducer.c) as soon as all gradients of a piece are ready and everything before it
 * was launched, so that all ranks launch in the same order whatever the order of gradients. From the second step on
 * pieces are reduced without operations where inplace.h can: then ready() does a share of the work, and finish the rest.
 *
 * A gradient that is missing on one rank must become an error on all of them. Each bucket therefore
 * carries one more element behind its gradients, the flag: 0, or NaN from a rank that had to send zeros in
 * place of a gradient. The sum tells every rank, at no extra message; only then do the ranks gather who
 * missed what. (Buckets in GPU memory have no flag.) */
#ifndef CD_DDP_REDUCER_H
#define CD_DDP_REDUCER_H

#include "ddp/bucket.h"
#include "group/group.h"

typedef struct cd_reducer cd_reducer;

typedef enum { CD_REDUCE_MEAN = 0, CD_REDUCE_SUM } cd_reduce_mode;

typedef enum {
    CD_STEP_LOCAL = 0, /* ready() only counts (no_sync) */
    CD_STEP_REDUCE,    /* full buckets are reduced by the reducer */
    CD_STEP_HANDOUT    /* full buckets are given to the caller (a comm hook) by cd_reducer_next_full */
} cd_step;

/* What a reducer is made from; copied by create. All ranks give equal ones. */
typedef struct {
    const cd_reducer_param *params; /* real or complex floats */
    int count;
    const int *bucket_of; /* bucket of each parameter; a bucket holds one dtype and device */
    int buckets;
    cd_reduce_mode mode;
    void *const *memory; /* NULL, or memory of each bucket (GPU: must be given; no room for a flag is needed) */
    const int *order;     /* in which gradients are expected and lie in their buckets; each once; NULL: 0…count − 1 */
} cd_reducer_spec;

/* Bucket memory comes from the host's arena where there is one. Local: sends nothing. Retains the group.
 * Errors: CD_BAD_TYPE (integer gradients), CD_BAD_ARGUMENT (bucket_of), CD_NO_MEMORY. */
cd_status cd_reducer_create(cd_group *group, const cd_reducer_spec *spec, cd_reducer **out);
/* Takes NULL. Operations that are still running keep their memory; so do other ranks that may still write there. */
void cd_reducer_free(cd_reducer *reducer);

int cd_reducer_buckets(const cd_reducer *reducer);
/* Where gradient `param` lies in its bucket; stays valid for the reducer's life. */
void *cd_reducer_view(const cd_reducer *reducer, int param);
/* Its bucket, and the offset there in bytes. */
int cd_reducer_place(const cd_reducer *reducer, int param, size_t *offset_p);
/* Memory of all gradients of a bucket (without the flag). */
void *cd_reducer_bucket(const cd_reducer *reducer, int bucket, size_t *bytes_p);

/* The following set-up calls hold from the next begin on; the thread that calls begin. */
/* MEAN divides by this instead of the group's size; the same on all ranks. */
void cd_reducer_set_divisor(cd_reducer *reducer, double divisor);
/* Multiplies this rank's gradients before the sum (weights; mode SUM). Called on all ranks or on none. */
void cd_reducer_set_scale(cd_reducer *reducer, double scale);
/* How often ready() is called for each parameter in a step before it counts as ready; default and least 1. */
void cd_reducer_set_uses(cd_reducer *reducer, const int *uses);
/* GPU: the stream that computes the gradients. */
void cd_reducer_set_stream(cd_reducer *reducer, void *stream);

/* Begins a step: all parameters become unready. If an earlier step was left by an error, waits for its
 * operations first, within patience (in place: ends it with zeros for what is missing, so that the other ranks' finish fails).
 * Errors: CD_WAIT_EXPIRED, CD_INTERRUPTED, in place the group's. */
cd_status cd_reducer_begin(cd_reducer *reducer, cd_step step, const cd_patience *patience);
/* Gradient `param` lies complete in its view. Thread-safe. On a GPU a launch may wait, also for other ranks, and so does another
 * thread that comes to launch: `patience`, which may be NULL elsewhere, is that of the caller, whose idle is called meanwhile.
 * Errors: CD_BAD_ARGUMENT when it was ready already in this step or is out of range (the caller names it); the group's;
 * patience's. */
cd_status cd_reducer_ready(cd_reducer *reducer, int param, const cd_patience *patience);
/* Whether the next ready() of this parameter fills what is launched at once. For whoever alone calls ready() now. */
bool cd_reducer_completes(const cd_reducer *reducer, int param);
/* Calls of ready() for this parameter since begin. */
int cd_reducer_seen(const cd_reducer *reducer, int param);
/* CD_STEP_HANDOUT: the next bucket in order if it is full, and not handed out yet; otherwise −1. Thread-
 * safe. */
int cd_reducer_next_full(cd_reducer *reducer);
/* Makes every unready parameter ready, with zeros (CPU). Unless `expected`, raises the flag of its bucket.
 * Returns how many. Part of finish; called alone only with CD_STEP_HANDOUT. All calls of ready() have
 * returned. */
cd_status cd_reducer_fill(cd_reducer *reducer, bool expected, int *filled_p);
/* Waits until every bucket is reduced (GPU: until the stream waits for them). With CD_STEP_LOCAL: nothing.
 * Unready parameters are filled; where that was not expected the answer is CD_BAD_ARGUMENT on all ranks,
 * the gradients are not to be used, and the group lives on. After the first reduced step the ranks also
 * agree on whether the next go in place. Errors: that; the group's; CD_INTERRUPTED (then it can be called
 * again, unless in the short operations by which the ranks agree: they abort the group as any does). */
cd_status cd_reducer_finish(cd_reducer *reducer, bool unready_expected, const cd_patience *patience);
/* Who missed what in this step: missing[rank × count + param] = 1. Collective; after a finish that failed
 * with CD_BAD_ARGUMENT. */
cd_status cd_reducer_gather_missing(cd_reducer *reducer, uint8_t *missing, cd_patience *patience);
/* The parameters in the order in which they became ready in this step, for re-planning; *count_p entries. */
const int *cd_reducer_ready_order(const cd_reducer *reducer, int *count_p);
/* When the first piece of this step was launched (cd_now_ns); 0 if none was. */
uint64_t cd_reducer_first_launch_ns(const cd_reducer *reducer);
/* Bytes and number of buckets launched since create. */
void cd_reducer_launched(const cd_reducer *reducer, uint64_t *buckets_p, uint64_t *bytes_p);

#endif
