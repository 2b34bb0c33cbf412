#include "base/dtype.h"

#include <complex.h>

enum { INTEGER = 1, REAL = 2, COMPLEX = 4 };

static const struct {
    const char *name;
    uint8_t bytes;
    uint8_t family;
} rows[CD_DTYPES] = {
    [CD_BYTES] = {"bytes", 0, 0},
    [CD_BOOL] = {"bool", 1, 0},
    [CD_INT8] = {"int8", 1, INTEGER},
    [CD_UINT8] = {"uint8", 1, INTEGER},
    [CD_INT16] = {"int16", 2, INTEGER},
    [CD_UINT16] = {"uint16", 2, INTEGER},
    [CD_INT32] = {"int32", 4, INTEGER},
    [CD_UINT32] = {"uint32", 4, INTEGER},
    [CD_INT64] = {"int64", 8, INTEGER},
    [CD_UINT64] = {"uint64", 8, INTEGER},
    [CD_FLOAT16] = {"float16", 2, REAL},
    [CD_BFLOAT16] = {"bfloat16", 2, REAL},
    [CD_FLOAT32] = {"float32", 4, REAL},
    [CD_FLOAT64] = {"float64", 8, REAL},
    [CD_COMPLEX64] = {"complex64", 8, COMPLEX},
    [CD_COMPLEX128] = {"complex128", 16, COMPLEX},
    [CD_LONGDOUBLE] = {"longdouble", sizeof(long double), REAL},
    [CD_CLONGDOUBLE] = {"clongdouble", sizeof(long double _Complex), COMPLEX},
    [CD_FLOAT8_E4M3FN] = {"float8_e4m3fn", 1, REAL},
    [CD_FLOAT8_E5M2] = {"float8_e5m2", 1, REAL},
};

size_t cd_dtype_bytes(cd_dtype dtype)
{
    return rows[dtype].bytes;
}

const char *cd_dtype_name(cd_dtype dtype)
{
    return dtype < CD_DTYPES ? rows[dtype].name : "unknown dtype";
}

bool cd_dtype_is_float(cd_dtype dtype)
{
    return rows[dtype].family == REAL;
}

bool cd_dtype_is_complex(cd_dtype dtype)
{
    return rows[dtype].family == COMPLEX;
}

bool cd_dtype_is_integer(cd_dtype dtype)
{
    return rows[dtype].family == INTEGER;
}
