/* Shared by array.c, array_cupy.c, array_dlpack.c, array_interface.c, and hook.c, which copies tensors, alone. Functions return
 * 0, or −1 with an exception; `name` is the argument's. */
#ifndef CD_PY_ARRAY_IMPL_H
#define CD_PY_ARRAY_IMPL_H

#include "py/array.h"
#include "py/dlpack.h"

/* NumPy's letter (b i u f c) and bytes → code; CD_BYTES for others. */
cd_dtype cd_py_dtype_of_family(char family, size_t bytes);
int cd_py_array_refuse_dims(const char *name, int ndim);
/* Sets count and, unless the elements lie in C order without gaps, dims, from shape, data and item_bytes. Strides are in units
 * of `unit` bytes; NULL: C order. ValueError: a negative extent, or what would not fit into the address space. */
int cd_py_array_set_layout(cd_py_array *out, const int64_t *strides, ptrdiff_t unit, const char *name);
/* Sets device_index; ValueError. */
int cd_py_array_set_device(cd_py_array *out, int64_t index, const char *name);
/* The exception that is set, of a library that could not make an array of `object`, as one that names the argument. −1. */
int cd_py_array_name_error(PyObject *object, const char *name);

/* torch keeps a sign as a bit beside the memory on the imaginary parts of a conjugate: an element behind one of its own size.
 * What torch allocates is aligned to more than a complex number, so imaginary parts lie at odd multiples of their size. False:
 * no such view. */
static inline bool cd_py_array_may_be_imaginary(const void *data, size_t item_bytes)
{
    return ((uintptr_t)data & item_bytes) != 0;
}

/* Sets dtype, item_bytes and swapped from what numpy.dtype takes. */
int cd_py_array_set_dtype(PyObject *dtype, const char *name, cd_py_array *out);

/* The same from the typestr of an interface, unless object.dtype contradicts it (TypeError). */
int cd_py_array_set_told_dtype(PyObject *object, PyObject *typestr, const char *name, cd_py_array *out);

/* Whether `type` is cupy.ndarray itself; once seen, it is state->cupy_type. No exception. */
bool cd_py_cupy_find(cd_py_state *state, PyTypeObject *type);
/* After cd_py_cupy_find has found it. */
int cd_py_cupy_read(cd_py_state *state, PyObject *object, const char *name, cd_py_array *out);
int cd_py_cupy_stream(const cd_py_state *state, void **stream_p);

/* By __cuda_array_interface__, whose dict (owned by the caller) goes to out->keep. */
int cd_py_array_interface_read(PyObject *object, PyObject *interface, const char *name, cd_py_array *out);
/* The stream in which the array's maker says that its work is ordered; NULL: in none, or the legacy default stream. */
int cd_py_array_interface_stream(PyObject *interface, const char *name, void **stream_p);

/* The table of `type`, remembered in module state; NULL: it has none (no exception). */
const cd_dl_exchange *cd_py_dlpack_table(cd_py_state *state, PyTypeObject *type);
int cd_py_dlpack_export(const cd_py_state *state, const cd_dl_exchange *api, PyObject *object, const char *name,
                        cd_py_array *out);
/* By object.__dlpack__(). */
int cd_py_dlpack_read(PyObject *object, const char *name, cd_py_array *out);

#endif
