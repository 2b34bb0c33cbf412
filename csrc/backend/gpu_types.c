#include "backend/gpu_types.h"

#include <string.h>

enum { NONE = -1 };

static const struct {
    int8_t type;
    uint8_t per_item;
} rows[CD_DTYPES] = {
    [CD_BYTES] = {NONE, 1},
    [CD_BOOL] = {CD_NCCL_UINT8, 1},
    [CD_INT8] = {CD_NCCL_INT8, 1},
    [CD_UINT8] = {CD_NCCL_UINT8, 1},
    [CD_INT16] = {NONE, 1},
    [CD_UINT16] = {NONE, 1},
    [CD_INT32] = {CD_NCCL_INT32, 1},
    [CD_UINT32] = {CD_NCCL_UINT32, 1},
    [CD_INT64] = {CD_NCCL_INT64, 1},
    [CD_UINT64] = {CD_NCCL_UINT64, 1},
    [CD_FLOAT16] = {CD_NCCL_FLOAT16, 1},
    [CD_BFLOAT16] = {CD_NCCL_BFLOAT16, 1},
    [CD_FLOAT32] = {CD_NCCL_FLOAT32, 1},
    [CD_FLOAT64] = {CD_NCCL_FLOAT64, 1},
    [CD_COMPLEX64] = {CD_NCCL_FLOAT32, 2},
    [CD_COMPLEX128] = {CD_NCCL_FLOAT64, 2},
    [CD_LONGDOUBLE] = {NONE, 1},
    [CD_CLONGDOUBLE] = {NONE, 1},
    [CD_FLOAT8_E4M3FN] = {CD_NCCL_FLOAT8_E4M3, 1},
    [CD_FLOAT8_E5M2] = {CD_NCCL_FLOAT8_E5M2, 1},
};

/* Booleans are bytes of 0 and 1: or is the greater, and the lesser. */
static int redop_of_bool(cd_redop redop)
{
    switch (redop) {
    case CD_SUM:
    case CD_MAX:
    case CD_BOR: return CD_NCCL_MAX;
    case CD_PRODUCT:
    case CD_MIN:
    case CD_BAND: return CD_NCCL_MIN;
    default: return NONE;
    }
}

static int redop_of(cd_redop redop)
{
    switch (redop) {
    case CD_SUM:
    case CD_PREMUL_SUM: return CD_NCCL_SUM;
    case CD_AVG: return CD_NCCL_AVG;
    case CD_PRODUCT: return CD_NCCL_PROD;
    case CD_MIN: return CD_NCCL_MIN;
    case CD_MAX: return CD_NCCL_MAX;
    default: return NONE;
    }
}

static bool is_float8(cd_dtype dtype)
{
    return dtype == CD_FLOAT8_E4M3FN || dtype == CD_FLOAT8_E5M2;
}

cd_status cd_gpu_type_of(cd_kind kind, cd_redop redop, cd_dtype dtype, uint32_t item_bytes, int nccl_version,
                         cd_gpu_type *out)
{
    if (kind != CD_ALL_REDUCE && kind != CD_REDUCE && kind != CD_REDUCE_SCATTER) {
        *out = (cd_gpu_type){CD_NCCL_INT8, CD_NCCL_SUM, item_bytes};
        return CD_OK;
    }
    if (rows[dtype].type == NONE)
        return cd_fail(CD_UNSUPPORTED, "%s: NCCL does not reduce %s on GPUs; convert to a type that it has", cd_kind_name(kind),
                       cd_dtype_name(dtype));
    int op = dtype == CD_BOOL ? redop_of_bool(redop) : redop_of(redop);
    bool pairs_wrong = cd_dtype_is_complex(dtype) && redop != CD_SUM && redop != CD_AVG && redop != CD_PREMUL_SUM;
    bool factor_wrong = redop == CD_PREMUL_SUM && (!cd_redop_supports(redop, dtype) || is_float8(dtype));
    if (op == NONE || pairs_wrong || factor_wrong || !cd_redop_supports(redop, dtype))
        return cd_fail(CD_UNSUPPORTED, "%s: NCCL has no %s of %s", cd_kind_name(kind), cd_redop_name(redop),
                       cd_dtype_name(dtype));
    if (is_float8(dtype) && nccl_version && nccl_version < CD_NCCL_FLOAT8_SINCE)
        return cd_fail(CD_UNSUPPORTED, "%s: %s needs NCCL 2.24, this is %d", cd_kind_name(kind), cd_dtype_name(dtype),
                       nccl_version);
    *out = (cd_gpu_type){rows[dtype].type, op, rows[dtype].per_item};
    return CD_OK;
}

/* Round to nearest even on the bits of a float32; a factor is finite, so that only the carry into infinity can happen. */
static uint16_t to_bfloat16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static uint16_t to_float16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude >= 0x47800000) /* 65536 and above, infinity, NaN */
        return (uint16_t)(sign | (magnitude > 0x7f800000 ? 0x7e00 : 0x7c00));
    if (magnitude < 0x38800000) { /* below the least normal number: the float adder does the rounding */
        float y;
        memcpy(&y, &magnitude, sizeof y);
        y += 0.5f;
        memcpy(&magnitude, &y, sizeof y);
        return (uint16_t)(sign | (magnitude - 0x3f000000));
    }
    return (uint16_t)(sign | ((magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13));
}

void cd_gpu_scalar(cd_nccl_type type, double factor, void *out)
{
    float single = (float)factor;
    uint16_t half;
    switch (type) {
    case CD_NCCL_FLOAT64: memcpy(out, &factor, sizeof factor); return;
    case CD_NCCL_FLOAT32: memcpy(out, &single, sizeof single); return;
    case CD_NCCL_FLOAT16: half = to_float16(single); break;
    default: half = to_bfloat16(single); break;
    }
    memcpy(out, &half, sizeof half);
}
