/* The insides of the reducer, shared by reducer.c (its making) and step.c (its steps) alone. */
#ifndef CD_DDP_REDUCER_IMPL_H
#define CD_DDP_REDUCER_IMPL_H

#include "ddp/inplace.h"
#include "ddp/reducer.h"

#include <pthread.h>

typedef struct {
    cd_bucket_memory *memory;
    size_t count; /* elements of all gradients, without the flag */
    cd_dtype dtype;
    cd_device device;
    int params;
    int first, pieces; /* its pieces: first … first + pieces − 1 */
} cd_bucket;

/* What is reduced at once: neighbours in one bucket; the last one of a bucket holds the flag too. */
typedef struct {
    int bucket;
    size_t at, count; /* elements, without the flag */
    int params;
    _Atomic int unready;
    cd_work *work; /* while launched and not finished; written under the lock */
    bool left;     /* in place: to the ranks that were earlier, until finish; under the lock */
} cd_piece_of_bucket;

struct cd_reducer {
    cd_group *group;
    cd_reducer_param *params;
    int *bucket_of;
    int *piece_of;
    size_t *offset;        /* bytes from the start of the bucket */
    int *uses;             /* calls of ready() that make a parameter ready */
    _Atomic int *pending;  /* of them still to come; below 0: too many */
    uint8_t *missing;      /* filled in this step though that was not expected */
    int *order;
    _Atomic int ordered;   /* entries of order */
    cd_bucket *buckets;
    cd_piece_of_bucket *pieces;
    int count, bucket_count, piece_count;
    cd_reduce_mode mode;
    cd_step step;
    double divisor, scale;
    bool scaled; /* set_scale was called: every rank has its own factor */
    void *stream;
    pthread_mutex_t lock;  /* next and the launching itself */
    int next;              /* first piece that was not launched, or bucket that was not handed out */
    bool given_memory;     /* the caller's buckets */
    cd_inplace *inplace;   /* NULL: pieces are operations of the group */
    bool asked;            /* whether there is an inplace was agreed on */
    int reduced;           /* in place: pieces that this rank need not look at again before finish; under the lock */
    bool under_way;        /* a step in place of which the others know, and that has not ended */
    cd_work *meeting;      /* of finish, where it was left */
    uint64_t launched, launched_bytes;
    _Atomic uint64_t first_launch_ns; /* of this step; 0: none */
};

#endif
