/* An operation as a value: describes, owns nothing, allocates nothing. */
#ifndef CD_BASE_OP_H
#define CD_BASE_OP_H

#include "base/dtype.h"
#include "base/status.h"

#include <stddef.h>
#include <stdint.h>

/* The values cross processes (signatures, recorder): append only. */
typedef enum {
    CD_BARRIER = 0,
    CD_ALL_REDUCE,
    CD_REDUCE,
    CD_BROADCAST,
    CD_ALL_GATHER,
    CD_GATHER,
    CD_SCATTER,
    CD_REDUCE_SCATTER,
    CD_ALL_TO_ALL,
    CD_SEND,
    CD_RECV,
    CD_KINDS
} cd_kind;

/* torch's numbers. */
typedef enum {
    CD_SUM = 0,
    CD_AVG,
    CD_PRODUCT,
    CD_MIN,
    CD_MAX,
    CD_BAND,
    CD_BOR,
    CD_BXOR,
    CD_PREMUL_SUM,
    CD_REDOPS
} cd_redop;

typedef enum { CD_CPU = 0, CD_CUDA } cd_device;

#define CD_MAX_DIMS 64

/* Dimensions of a strided array, outermost first; strides in bytes, any sign. */
typedef struct {
    int ndim;
    size_t shape[CD_MAX_DIMS];
    ptrdiff_t strides[CD_MAX_DIMS];
} cd_dims;

/* Elements of one buffer in logical (C) order. With dims == NULL they lie one behind the other from `data` on; otherwise
 * dims tells where. `count` is always the number of elements. */
typedef struct {
    void *data;
    size_t count;
    const cd_dims *dims;
    uint32_t item_bytes;
} cd_span;

/* What an operation reads from or writes for each peer: the block of peer j.
 *   spans == 1, counts == NULL  one span cut in `world` equal blocks (or, for kinds with one buffer, the buffer itself)
 *   spans == 1, counts != NULL  one span cut in blocks of counts[j] elements, one behind the other
 *   spans == world, many        list[j] is the block of peer j
 * spans == 0: this rank has no such buffer (the outputs of a non-root). */
typedef struct {
    const cd_span *list;
    const size_t *counts;
    int spans;
} cd_blocks;

/* Block of peer j among `world`: the span it lies in, its first element there and its number of elements. */
static inline const cd_span *cd_blocks_at(const cd_blocks *blocks, int world, int j, size_t *first_p, size_t *count_p)
{
    if (blocks->spans > 1 || (blocks->spans == 1 && world == 1)) {
        *first_p = 0;
        *count_p = blocks->list[j].count;
        return &blocks->list[j];
    }
    const cd_span *span = &blocks->list[0];
    if (blocks->counts) {
        size_t first = 0;
        for (int i = 0; i < j; i++)
            first += blocks->counts[i];
        *first_p = first;
        *count_p = blocks->counts[j];
    } else {
        size_t each = span->count / (size_t)world;
        *first_p = each * (size_t)j;
        *count_p = each;
    }
    return span;
}

/* Which buffers a kind has:
 *   BARRIER         none
 *   ALL_REDUCE      in: one span, out: one span of the same count; mostly the same memory (in place)
 *   REDUCE          in: one span; out: one span on the root (may be the same memory), none elsewhere
 *   BROADCAST       in: one span on the root; out: one span on the others
 *   ALL_GATHER      in: one span; out: blocks (may be uneven; block of a peer = what it gives)
 *   GATHER          in: one span; out: blocks on the root
 *   SCATTER         in: blocks on the root; out: one span
 *   REDUCE_SCATTER  in: blocks; out: one span
 *   ALL_TO_ALL      in: blocks; out: blocks
 *   SEND            in: one span        RECV  out: one span
 * in and out of one operation overlap only where said "same memory"; the caller (py/) has checked it. */
typedef struct {
    cd_kind kind;
    cd_dtype dtype;
    cd_redop redop;
    cd_device device;
    int root;           /* group rank of the root, −1 if the kind has none */
    int peer;           /* SEND, RECV: group rank of the other; RECV: −1 = any */
    int64_t tag;        /* SEND, RECV */
    double factor;      /* PREMUL_SUM: multiplies every input before the sum */
    cd_blocks in, out;
    size_t count;       /* elements that all ranks must agree on (see cd_op_signature) */
    uint32_t item_bytes;
    uint32_t meaning;   /* CD_BYTES: what the caller takes the elements for, as a hash; 0: not known. Must agree as the dtype */
    int ndim;           /* the caller's shape of the tensor that must agree, for signature and texts; at most 8 are kept */
    int64_t shape[8];
    uint32_t flags;     /* CD_OP_UNEVEN: blocks may differ between ranks, so count and shape stay out of the signature */
    uint64_t sequence;  /* set by the group */
    void *stream;       /* GPU: the caller's current stream */
    int gpu;            /* GPU: 1 + index of the one that all arrays lie on, where the caller knows it; 0: the backend looks */
} cd_op;

enum { CD_OP_UNEVEN = 1u };

/* What must be the same on all ranks of an operation, as 64 fixed bytes that cross processes. */
typedef struct {
    uint64_t sequence;
    uint64_t count;
    uint32_t item_bytes;
    int16_t root;
    uint8_t kind, dtype, redop, ndim, flags, pad;
    uint32_t factor_bits; /* of the factor as float; CD_BYTES, which is never reduced: the meaning */
    int32_t shape[8];     /* cut to 31 bits: for texts; count is exact */
} cd_descriptor;
_Static_assert(sizeof(cd_descriptor) == 64, "one line, crosses processes");

void cd_op_descriptor(const cd_op *op, cd_descriptor *out);
/* Hash of what must agree (never 0): kind, dtype, item size, meaning, redop, factor, root, count and shape; of all but count and
 * shape for CD_OP_UNEVEN. Cheap enough for the hot path (about 5 ns). */
uint32_t cd_op_signature(const cd_op *op);
/* "all_reduce(SUM) of float32 (100,), sequence 7, root 0"; returns out. */
const char *cd_descriptor_text(const cd_descriptor *descriptor, char *out, size_t bytes);
/* Records CD_MISMATCH with both sides in one text and the field(s) that differ marked:
 * "collective 7 differs between ranks: rank 0 calls all_reduce(SUM) of float32 (100,), rank 1 calls … (shape differs)". */
cd_status cd_op_mismatch(int rank_a, const cd_descriptor *a, int rank_b, const cd_descriptor *b) CD_COLD;
/* Likewise for a block of a CD_OP_UNEVEN operation whose two ends disagree. */
cd_status cd_op_block_mismatch(const cd_op *op, int from, uint64_t gives_bytes, int to, uint64_t takes_bytes) CD_COLD;
const char *cd_kind_name(cd_kind kind);   /* torch's function name: "all_reduce" */
const char *cd_redop_name(cd_redop redop); /* "SUM" */
/* The table of legal (redop, dtype) pairs: SUM, PRODUCT, MIN, MAX on all numbers and bool (logical); no MIN/MAX on complex;
 * AVG and PREMUL_SUM on all numbers but bool (PREMUL_SUM not on integers); bitwise on integers and bool; none on CD_BYTES. */
bool cd_redop_supports(cd_redop redop, cd_dtype dtype);

#endif
