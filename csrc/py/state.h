/* What the extension keeps per module object (per interpreter), and how to get at it. No Python object is static.
 *
 * A room with heap types adds them in `int cd_py_<room>_add(PyObject *module)` (0, or −1 with an exception), called by
 * module.c when the module is executed, and keeps what it needs again in a field below. */
#ifndef CD_PY_STATE_H
#define CD_PY_STATE_H

#ifndef PY_SSIZE_T_CLEAN
#define PY_SSIZE_T_CLEAN
#endif
#include <Python.h>

#include <stdbool.h>

/* Every reference, in one list: fields, traverse and clear are made from it. */
#define CD_PY_STATE_OBJECTS(X)                                                          \
    X(errors)        /* the module cdist.errors, imported at the first failure */       \
    X(default_group) /* what group=None means: a ProcessGroup, or NULL before init */   \
    X(array_types)   /* dict: array type → DLPack's C table of it (array.c) */          \
    X(exchange_type) /* the array type that was read last through DLPack's C table */   \
    X(cupy_type)     /* cupy.ndarray, once one was read */                              \
    X(cupy_stream)   /* cupy.cuda.get_current_stream, beside it */                      \
    X(group_type)                                                                       \
    X(host_side_type)                                                                   \
    X(work_type)                                                                        \
    X(redop_type)                                                                       \
    X(block_type)                                                                       \
    X(store_type)                                                                       \
    X(tcp_store_type)                                                                   \
    X(file_store_type)                                                                  \
    X(hash_store_type)                                                                  \
    X(prefix_store_type)                                                                \
    X(sampler_type)                                                                     \
    X(reducer_type)                                                                     \
    X(bucket_buffer_type)                                                               \
    X(gradient_hook_type)                                                               \
    X(foreach_copy)       /* torch._foreach_copy_, once it was needed */                \
    X(grad_name)          /* "grad" */                                                  \
    X(requires_grad_name) /* "requires_grad" */                                         \
    X(dtype_name)         /* "dtype" */                                                 \
    X(data_name)          /* "data" */                                                  \
    X(ptr_name)           /* "ptr" */                                                   \
    X(device_id_name)     /* "device_id" */                                             \
    X(shape_name)         /* "shape" */                                                 \
    X(strides_name)       /* "strides" */                                               \
    X(packed_name)        /* "_c_contiguous" */                                         \
    X(is_neg_name)        /* "is_neg" */                                                \
    X(is_conj_name)       /* "is_conj" */

/* The getter of an attribute in C, of objects that are exactly of `type`; NULL: not known. */
typedef struct {
    PyTypeObject *type;
    getter get;
    void *closure;
} cd_py_getter;

enum {
    CD_PY_CUPY_DATA,
    CD_PY_CUPY_DEVICE,
    CD_PY_CUPY_PTR,
    CD_PY_CUPY_DTYPE,
    CD_PY_CUPY_SHAPE,
    CD_PY_CUPY_STRIDES,
    CD_PY_CUPY_PACKED,
    CD_PY_CUPY_GETTERS
};

typedef intptr_t (*cd_py_stream_func)(void);

typedef struct {
#define X(name) PyObject *name;
    CD_PY_STATE_OBJECTS(X)
#undef X
    const void *exchange_api; /* of exchange_type */
    cd_py_getter cupy_getters[CD_PY_CUPY_GETTERS];
    cd_py_stream_func cupy_stream_function; /* CuPy's current stream, with the GIL held; NULL: ask cupy_stream */
    bool had_default_group;
    void *store_servers;      /* list of this process's multi-tenant servers (store.c) */
} cd_py_state;

extern struct PyModuleDef cd_py_module;

/* Of the module object that a module function gets as `self`. */
static inline cd_py_state *cd_py_state_of(PyObject *module)
{
    return (cd_py_state *)PyModule_GetState(module);
}

/* Of the module that defines `type` or one of its bases: for methods and slots. NULL with an exception for foreign types. */
static inline cd_py_state *cd_py_state_of_type(PyTypeObject *type)
{
    PyObject *module = PyType_GetModuleByDef(type, &cd_py_module);
    return module ? cd_py_state_of(module) : NULL;
}

#endif
