/* The one place that knows which object is which buffer: NumPy arrays, torch tensors and whatever else carries DLPack's C
 * exchange table, an array interface (CPU or CUDA), the buffer protocol or __dlpack__. No framework is imported. */
#ifndef CD_PY_ARRAY_H
#define CD_PY_ARRAY_H

#include "py/state.h"

#include "base/op.h"

/* What an object says about its memory. `span.dims` points into the struct itself, so it must not be moved. */
typedef struct {
    cd_span span;      /* dims == NULL: elements lie one behind the other in C order */
    PyObject *keep;    /* owned: what must live as long as the memory is used, beside the object; or NULL */
    PyObject *object;  /* borrowed: as the caller gave it */
    cd_dtype dtype;
    cd_device device;
    int device_index;
    bool writable;
    bool swapped;      /* bytes of the other order: may be moved, not reduced (dtype is CD_BYTES) */
    uint32_t meaning;  /* as in cd_op */
    int ndim;
    void *stream;      /* CUDA: the caller's current stream */
    int64_t shape[CD_MAX_DIMS];
    cd_dims dims;
} cd_py_array;

typedef enum { CD_PY_INPUT = 0, CD_PY_OUTPUT } cd_py_use;

/* Reads `object`, the value of the argument `name` (for texts). Needs the GIL, which is not dropped. The memory is valid while
 * the object and `keep` live. 0, or −1 with TypeError (no array; elements that are Python objects; unknown device),
 * ValueError (output that is read-only or whose elements share memory). */
int cd_py_array_read(cd_py_state *state, PyObject *object, const char *name, cd_py_use use, cd_py_array *out);
/* Drops `keep`. */
static inline void cd_py_array_release(cd_py_array *array)
{
    Py_CLEAR(array->keep);
}
/* The current stream of the framework that `array` comes from, asked again. */
int cd_py_array_stream(cd_py_state *state, PyObject *object, int device_index, void **stream_p);
/* True when the two share memory. In doubt, after many tries, true. */
bool cd_py_array_overlaps(const cd_py_array *a, const cd_py_array *b);
/* True when the shapes are the same. */
bool cd_py_array_same_shape(const cd_py_array *a, const cd_py_array *b);
/* "float32 (2, 3)" for texts; returns out. */
const char *cd_py_array_text(const cd_py_array *array, char *out, size_t bytes);
/* dtype argument (anything that numpy.dtype takes, a torch dtype, or a name such as "bfloat16") → code; −1 with TypeError. */
int cd_py_dtype_of(PyObject *object, cd_dtype *dtype_p, uint32_t *item_bytes_p);

int cd_py_array_add(PyObject *module);

#endif
