/* The gradient reducer: buckets, readiness counters, launch in order. One call per gradient on the hot path. */
#ifndef CD_DDP_REDUCER_H
#define CD_DDP_REDUCER_H

#include "group/group.h"

typedef struct cd_reducer cd_reducer;

/* A parameter as the reducer sees it. */
typedef struct {
    size_t count;     /* elements */
    cd_dtype dtype;
    cd_device device;
} cd_reducer_param;

typedef enum { CD_REDUCE_MEAN = 0, CD_REDUCE_SUM } cd_reduce_mode;

/* Assigns params (in the given order) to buckets by size: the rule of api.md section 2.3, as a pure function.
 * caps: bytes per bucket, the last repeats. bucket_of[param] is written; returns the number of buckets. Different dtypes or
 * devices never share a bucket. */
int cd_bucket_assign(const cd_reducer_param *params, const int *order, int count, const size_t *caps, int caps_count,
                     int *bucket_of);

/* `bucket_of` as above, already agreed by all ranks. Bucket memory comes from the host's arena where there is one.
 * Divides by `divisor` (0: the group's size) for MEAN. */
cd_status cd_reducer_create(cd_group *group, const cd_reducer_param *params, int count, const int *bucket_of, int buckets,
                            cd_reduce_mode mode, cd_reducer **out);
void cd_reducer_free(cd_reducer *reducer);
/* Where gradient `param` lives in its bucket; stays valid for the reducer's life. */
void *cd_reducer_view(cd_reducer *reducer, int param);
void *cd_reducer_bucket(cd_reducer *reducer, int bucket, size_t *bytes_p);
/* Begins a step: all parameters of interest become unready. sync == false: ready() only counts (no_sync). */
void cd_reducer_begin(cd_reducer *reducer, bool sync);
/* Gradient `param` lies complete in its view. Thread-safe; launches every bucket that is full and has none unlaunched before
 * it. Errors: CD_BAD_ARGUMENT when it was ready already in this step (the caller names it); the group's. */
cd_status cd_reducer_ready(cd_reducer *reducer, int param);
/* Launches nothing by itself: the caller (a comm hook) reduces full buckets. Returns the index of the next bucket that is full
 * and not handed out, or −1. */
int cd_reducer_next_full(cd_reducer *reducer);
/* Waits until every bucket is reduced. If parameters are unready: CD_BAD_ARGUMENT and their flags in unready[count] (may be
 * NULL), unless allow_unready, which first marks them ready with zeros. */
cd_status cd_reducer_finish(cd_reducer *reducer, bool allow_unready, uint8_t *unready, const cd_patience *patience);
/* Order in which parameters became ready in the last synchronised step, for re-planning; count entries. */
const int *cd_reducer_ready_order(const cd_reducer *reducer);

#endif
