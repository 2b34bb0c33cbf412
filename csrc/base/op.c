#include "base/op.h"

#include <stdio.h>
#include <string.h>

static const char *const kind_names[CD_KINDS] = {
    [CD_BARRIER] = "barrier",       [CD_ALL_REDUCE] = "all_reduce", [CD_REDUCE] = "reduce",
    [CD_BROADCAST] = "broadcast",   [CD_ALL_GATHER] = "all_gather", [CD_GATHER] = "gather",
    [CD_SCATTER] = "scatter",       [CD_REDUCE_SCATTER] = "reduce_scatter",
    [CD_ALL_TO_ALL] = "all_to_all", [CD_SEND] = "send",             [CD_RECV] = "recv",
};

static const char *const redop_names[CD_REDOPS] = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"};

const char *cd_kind_name(cd_kind kind)
{
    return (unsigned)kind < CD_KINDS ? kind_names[kind] : "unknown operation";
}

const char *cd_redop_name(cd_redop redop)
{
    return (unsigned)redop < CD_REDOPS ? redop_names[redop] : "unknown reduction";
}

static bool kind_reduces(cd_kind kind)
{
    return kind == CD_ALL_REDUCE || kind == CD_REDUCE || kind == CD_REDUCE_SCATTER;
}

bool cd_redop_supports(cd_redop redop, cd_dtype dtype)
{
    if (dtype == CD_BYTES)
        return false;
    switch (redop) {
    case CD_SUM:
    case CD_PRODUCT: return true;
    case CD_MIN:
    case CD_MAX: return !cd_dtype_is_complex(dtype);
    case CD_AVG: return dtype != CD_BOOL;
    case CD_PREMUL_SUM: return cd_dtype_is_float(dtype) || cd_dtype_is_complex(dtype);
    case CD_BAND:
    case CD_BOR:
    case CD_BXOR: return dtype == CD_BOOL || cd_dtype_is_integer(dtype);
    case CD_REDOPS: break;
    }
    return false;
}

void cd_op_descriptor(const cd_op *op, cd_descriptor *out)
{
    float factor = kind_reduces(op->kind) && op->redop == CD_PREMUL_SUM ? (float)op->factor : 0.0f;
    *out = (cd_descriptor){
        .sequence = op->sequence,
        .count = op->count,
        .item_bytes = op->item_bytes,
        .root = (int16_t)op->root,
        .kind = (uint8_t)op->kind,
        .dtype = (uint8_t)op->dtype,
        .redop = (uint8_t)(kind_reduces(op->kind) ? op->redop : CD_SUM),
        .ndim = (uint8_t)(op->ndim < 8 ? op->ndim : 8),
        .flags = (uint8_t)op->flags,
    };
    memcpy(&out->factor_bits, &factor, sizeof factor);
    if (op->dtype == CD_BYTES)
        out->factor_bits = op->meaning;
    for (int i = 0; i < out->ndim; i++)
        out->shape[i] = (int32_t)(op->shape[i] & INT32_MAX);
}

/* One multiply-xorshift step per word: spreads every bit of the word over the hash. */
static inline uint64_t mix(uint64_t hash, uint64_t word)
{
    hash = (hash ^ word) * UINT64_C(0x9E3779B97F4A7C15);
    return hash ^ (hash >> 29);
}

uint32_t cd_op_signature(const cd_op *op)
{
    uint64_t words = (uint64_t)op->kind | (uint64_t)op->dtype << 8 | (uint64_t)(uint16_t)op->root << 16 |
                     (uint64_t)op->item_bytes << 32;
    uint64_t hash = mix(UINT64_C(0x2545F4914F6CDD1D) ^ op->meaning, words);
    if (kind_reduces(op->kind)) {
        uint64_t factor = 0;
        if (op->redop == CD_PREMUL_SUM)
            memcpy(&factor, &op->factor, sizeof factor);
        hash = mix(hash, factor ^ ((uint64_t)op->redop + 1));
    }
    if (!(op->flags & CD_OP_UNEVEN)) {
        hash = mix(hash, op->count);
        for (int i = 0; i < op->ndim && i < 8; i++)
            hash = mix(hash, (uint64_t)op->shape[i] + 1);
    }
    uint32_t folded = (uint32_t)(hash ^ (hash >> 32));
    return folded ? folded : 1;
}

const char *cd_descriptor_text(const cd_descriptor *d, char *out, size_t bytes)
{
    size_t used = 0;
#define ADD(...)                                                              \
    do {                                                                      \
        int wrote = snprintf(out + used, bytes - used, __VA_ARGS__);          \
        used += wrote > 0 ? (size_t)wrote : 0;                                \
        if (used >= bytes)                                                    \
            return out;                                                       \
    } while (0)
    ADD("%s", cd_kind_name((cd_kind)d->kind));
    if (kind_reduces((cd_kind)d->kind))
        ADD("(%s)", cd_redop_name((cd_redop)d->redop));
    if (d->kind != CD_BARRIER) {
        ADD(" of %s (", cd_dtype_name((cd_dtype)d->dtype));
        for (int i = 0; i < d->ndim; i++)
            ADD("%s%d%s", i ? ", " : "", d->shape[i], d->ndim == 1 ? "," : "");
        ADD(")");
    }
    if (d->root >= 0)
        ADD(", root %d", d->root);
    ADD(", sequence %llu", (unsigned long long)d->sequence);
#undef ADD
    return out;
}

static const char *differing_field(const cd_descriptor *a, const cd_descriptor *b)
{
    if (a->kind != b->kind)
        return "operation";
    if (a->dtype != b->dtype || a->item_bytes != b->item_bytes)
        return "dtype";
    if (a->dtype == CD_BYTES && a->factor_bits != b->factor_bits)
        return "unit, byte order or record";
    if (a->redop != b->redop || a->factor_bits != b->factor_bits)
        return "reduction";
    if (a->root != b->root)
        return "root";
    if (a->count != b->count)
        return "element count";
    if (a->ndim != b->ndim || memcmp(a->shape, b->shape, sizeof a->shape) != 0)
        return "shape";
    return "order of calls";
}

cd_status cd_op_mismatch(int rank_a, const cd_descriptor *a, int rank_b, const cd_descriptor *b)
{
    /* The same text on every rank: the lower rank is named first. */
    if (rank_b < rank_a)
        return cd_op_mismatch(rank_b, b, rank_a, a);
    char text_a[256], text_b[256];
    return cd_fail_rank(CD_MISMATCH, rank_b,
                        "ranks call different collectives: rank %d calls %s, rank %d calls %s (%s differs)", rank_a,
                        cd_descriptor_text(a, text_a, sizeof text_a), rank_b,
                        cd_descriptor_text(b, text_b, sizeof text_b), differing_field(a, b));
}

cd_status cd_op_block_mismatch(const cd_op *op, int from, uint64_t gives_bytes, int to, uint64_t takes_bytes)
{
    uint64_t item = op->item_bytes ? op->item_bytes : 1;
    return cd_fail_rank(CD_MISMATCH, from,
                        "ranks call different collectives: in %s of %s, sequence %llu, rank %d gives %llu elements to rank %d, "
                        "which expects %llu (element count differs)",
                        cd_kind_name(op->kind), cd_dtype_name(op->dtype), (unsigned long long)op->sequence, from,
                        (unsigned long long)(gives_bytes / item), to, (unsigned long long)(takes_bytes / item));
}
