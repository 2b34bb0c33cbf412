/* Element types, by what arithmetic on them means. */
#ifndef CD_BASE_DTYPE_H
#define CD_BASE_DTYPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The values cross processes (signatures): append only. */
typedef enum {
    CD_BYTES = 0, /* opaque: moved, never reduced; the item size stands in the span */
    CD_BOOL,
    CD_INT8,
    CD_UINT8,
    CD_INT16,
    CD_UINT16,
    CD_INT32,
    CD_UINT32,
    CD_INT64,
    CD_UINT64,
    CD_FLOAT16,
    CD_BFLOAT16,
    CD_FLOAT32,
    CD_FLOAT64,
    CD_COMPLEX64,
    CD_COMPLEX128,
    CD_LONGDOUBLE,  /* the C compiler's */
    CD_CLONGDOUBLE,
    CD_FLOAT8_E4M3FN,
    CD_FLOAT8_E5M2,
    CD_DTYPES
} cd_dtype;

/* Bytes of an element; 0 for CD_BYTES. */
size_t cd_dtype_bytes(cd_dtype dtype);
/* NumPy's name ("float32"). */
const char *cd_dtype_name(cd_dtype dtype);
bool cd_dtype_is_float(cd_dtype dtype);   /* real floats of all widths */
bool cd_dtype_is_complex(cd_dtype dtype);
bool cd_dtype_is_integer(cd_dtype dtype); /* without bool */

#endif
