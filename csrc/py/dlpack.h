/* The binary interface of DLPack 1.x as far as it is used here, written from the public specification
 * (https://dmlc.github.io/dlpack/latest/c_api.html). */
#ifndef CD_PY_DLPACK_H
#define CD_PY_DLPACK_H

#include <stddef.h>
#include <stdint.h>

enum { CD_DL_MAJOR = 1 };

typedef enum {
    CD_DL_CPU = 1,
    CD_DL_CUDA = 2,
    CD_DL_CUDA_HOST = 3,
    CD_DL_CUDA_MANAGED = 13
} cd_dl_device_kind;

typedef enum {
    CD_DL_INT = 0,
    CD_DL_UINT = 1,
    CD_DL_FLOAT = 2,
    CD_DL_BFLOAT = 4,
    CD_DL_COMPLEX = 5,
    CD_DL_BOOL = 6,
    CD_DL_FLOAT8_E4M3FN = 10,
    CD_DL_FLOAT8_E5M2 = 12
} cd_dl_code;

typedef struct {
    int32_t device_type, device_id;
} cd_dl_device;

typedef struct {
    uint8_t code, bits;
    uint16_t lanes;
} cd_dl_dtype;

typedef struct {
    void *data;
    cd_dl_device device;
    int32_t ndim;
    cd_dl_dtype dtype;
    int64_t *shape;
    int64_t *strides; /* in elements; before 1.2 NULL means C order */
    uint64_t byte_offset;
} cd_dl_tensor;

typedef struct {
    uint32_t major, minor;
} cd_dl_version;

/* In a capsule named "dltensor". */
typedef struct cd_dl_managed {
    cd_dl_tensor tensor;
    void *context;
    void (*deleter)(struct cd_dl_managed *);
} cd_dl_managed;

#define CD_DL_READ_ONLY UINT64_C(1)

/* In a capsule named "dltensor_versioned". */
typedef struct cd_dl_versioned {
    cd_dl_version version;
    void *context;
    void (*deleter)(struct cd_dl_versioned *);
    uint64_t flags;
    cd_dl_tensor tensor;
} cd_dl_versioned;

/* The table in the capsule "dlpack_exchange_api" of a type's __dlpack_c_exchange_api__. */
typedef struct cd_dl_exchange {
    cd_dl_version version;
    struct cd_dl_exchange *older;
    int (*allocate)(cd_dl_tensor *, cd_dl_versioned **, void *, void (*)(void *, const char *, const char *));
    int (*export_managed)(void *object, cd_dl_versioned **);
    int (*import_managed)(cd_dl_versioned *, void **object);
    int (*export_borrowed)(void *object, cd_dl_tensor *); /* may be NULL */
    int (*current_stream)(int32_t device_type, int32_t device_id, void **stream_p);
} cd_dl_exchange;

_Static_assert(sizeof(cd_dl_tensor) == 48, "crosses libraries");
_Static_assert(offsetof(cd_dl_versioned, tensor) == 32, "crosses libraries");

#endif
