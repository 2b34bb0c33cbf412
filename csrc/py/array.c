#include "py/array.h"

#include "py/array_impl.h"
#include "simd/strided.h"

#include <limits.h>
#include <numpy/arrayobject.h>
#include <stdio.h>
#include <string.h>

/* ------------------------------------------------------------------------------------------------- element types */

cd_dtype cd_py_dtype_of_family(char family, size_t bytes)
{
    static const cd_dtype signed_of[] = {[1] = CD_INT8, [2] = CD_INT16, [4] = CD_INT32, [8] = CD_INT64};
    static const cd_dtype unsigned_of[] = {[1] = CD_UINT8, [2] = CD_UINT16, [4] = CD_UINT32, [8] = CD_UINT64};
    switch (family) {
    case 'b': return bytes == 1 ? CD_BOOL : CD_BYTES;
    case 'i': return bytes <= 8 ? signed_of[bytes] : CD_BYTES;
    case 'u': return bytes <= 8 ? unsigned_of[bytes] : CD_BYTES;
    case 'f':
        return bytes == 4                     ? CD_FLOAT32
               : bytes == 8                   ? CD_FLOAT64
               : bytes == 2                   ? CD_FLOAT16
               : bytes == sizeof(long double) ? CD_LONGDOUBLE
                                              : CD_BYTES;
    case 'c':
        return bytes == 8                         ? CD_COMPLEX64
               : bytes == 16                      ? CD_COMPLEX128
               : bytes == 2 * sizeof(long double) ? CD_CLONGDOUBLE
                                                  : CD_BYTES;
    default: return CD_BYTES;
    }
}

/* Element types that NumPy gets from ml_dtypes have no number of their own: their scalar type's name tells. */
static cd_dtype dtype_of_name(const char *name)
{
    static const cd_dtype named[] = {CD_BFLOAT16, CD_FLOAT8_E4M3FN, CD_FLOAT8_E5M2};
    const char *dot = strrchr(name, '.');
    const char *last = dot ? dot + 1 : name;
    for (size_t i = 0; i < sizeof named / sizeof *named; i++)
        if (strcmp(last, cd_dtype_name(named[i])) == 0)
            return named[i];
    return CD_BYTES;
}

static cd_dtype dtype_of_descr(const PyArray_Descr *descr, size_t bytes, bool *swapped_p)
{
    *swapped_p = !PyArray_ISNBO(descr->byteorder);
    if (*swapped_p)
        return CD_BYTES;
    if (descr->type_num < NPY_USERDEF)
        return cd_py_dtype_of_family(descr->kind, bytes);
    return dtype_of_name(descr->typeobj->tp_name);
}

/* What bytes mean to NumPy, as a hash (FNV-1a, public domain): unit, byte order, fields. 0 for types of other libraries, whose
 * arrays may come here under more than one name. */
static int set_meaning(PyArray_Descr *descr, cd_py_array *out)
{
    out->meaning = 0;
    if (cd_likely(out->dtype != CD_BYTES) || descr->type_num >= NPY_USERDEF)
        return 0;
    PyObject *text = PyDataType_HASFIELDS(descr) ? PyObject_Str((PyObject *)descr)
                                                 : PyObject_GetAttrString((PyObject *)descr, "str");
    const char *c = text ? PyUnicode_AsUTF8(text) : NULL;
    uint32_t hash = UINT32_C(2166136261);
    for (const char *at = c; at && *at; at++)
        hash = (hash ^ (uint8_t)*at) * UINT32_C(16777619);
    Py_XDECREF(text);
    out->meaning = hash ? hash : 1;
    return c ? 0 : -1;
}

static int refuse_objects(PyArray_Descr *descr, const char *name)
{
    if (!PyDataType_REFCHK(descr))
        return 0;
    PyErr_Format(PyExc_TypeError,
                 "parameter `%s` has elements that are Python objects (dtype %S): arrays of numbers and bytes can be sent, "
                 "objects go through all_gather_object and its siblings",
                 name, (PyObject *)descr);
    return -1;
}

/* numpy.ma: its mask lies beside the memory. One that hides nothing does no harm. */
static int refuse_mask(PyObject *object, const char *name)
{
    if (!PyObject_HasAttrString(object, "filled") || !PyObject_HasAttrString(object, "harden_mask"))
        return 0;
    PyObject *mask = PyObject_GetAttrString(object, "mask");
    PyObject *any = mask ? PyObject_CallMethod(mask, "any", NULL) : NULL; /* fails for the masks of records */
    int hides = any ? PyObject_IsTrue(any) : 1;
    Py_XDECREF(mask);
    Py_XDECREF(any);
    PyErr_Clear();
    if (!hides)
        return 0;
    PyErr_Format(PyExc_TypeError,
                 "parameter `%s` is a masked array, and masks are not sent: pass x.filled(value), or x.data and "
                 "numpy.ma.getmaskarray(x) one by one",
                 name);
    return -1;
}

/* --------------------------------------------------------------------------------------------------------- layout */

int cd_py_array_refuse_dims(const char *name, int ndim)
{
    PyErr_Format(PyExc_ValueError, "parameter `%s` has %d dimensions, at most %d are supported", name, ndim, CD_MAX_DIMS);
    return -1;
}

static int refuse_reach(const cd_py_array *out, const char *name)
{
    PyErr_Format(PyExc_ValueError,
                 "parameter `%s` (%s) says of itself, by shape, strides or address, that it reaches beyond what can be "
                 "addressed: no such array is there", name, Py_TYPE(out->object)->tp_name);
    return -1;
}

/* Whether the address space has room from the first byte of the lowest element to the last of the highest. */
static bool can_be_addressed(const cd_py_array *out)
{
    ptrdiff_t low = 0, high = (ptrdiff_t)out->span.item_bytes, reach;
    uintptr_t end;
    for (int i = 0; i < out->dims.ndim; i++) {
        if (__builtin_mul_overflow((ptrdiff_t)out->dims.shape[i] - 1, out->dims.strides[i], &reach) ||
            __builtin_add_overflow(*(reach < 0 ? &low : &high), reach, reach < 0 ? &low : &high))
            return false;
    }
    return (uintptr_t)out->span.data >= 0 - (uintptr_t)low &&
           !__builtin_add_overflow((uintptr_t)out->span.data, (uintptr_t)high, &end);
}

int cd_py_array_set_layout(cd_py_array *out, const int64_t *strides, ptrdiff_t unit, const char *name)
{
    bool packed = true, fits = true, empty = false;
    size_t count = 1;
    ptrdiff_t bytes = (ptrdiff_t)out->span.item_bytes; /* of what lies within this dimension */
    for (int i = out->ndim - 1; i >= 0; i--) {
        ptrdiff_t extent = (ptrdiff_t)out->shape[i], step = 0;
        if (cd_unlikely(extent < 0)) {
            PyErr_Format(PyExc_ValueError, "parameter `%s` says that it has %zd elements in dimension %d", name, extent, i);
            return -1;
        }
        fits &= !strides || !__builtin_mul_overflow((ptrdiff_t)strides[i], unit, &step);
        packed &= !strides || extent == 1 || step == bytes;
        out->dims.shape[i] = (size_t)extent;
        out->dims.strides[i] = step;
        empty |= extent == 0;
        /* Of an empty array too, as NumPy does: its other dimensions are multiplied elsewhere. */
        fits &= extent == 0 || (!__builtin_mul_overflow(bytes, extent, &bytes) &&
                                !__builtin_mul_overflow(count, (size_t)extent, &count));
    }
    if (cd_unlikely(!fits))
        return refuse_reach(out, name);
    out->span.count = empty ? 0 : count;
    out->span.dims = NULL;
    if (empty)
        return 0;
    uintptr_t end;
    if (cd_likely(packed))
        return cd_likely(!__builtin_add_overflow((uintptr_t)out->span.data, (uintptr_t)bytes, &end)) ? 0
                                                                                                 : refuse_reach(out, name);
    out->dims.ndim = out->ndim;
    if (!can_be_addressed(out))
        return refuse_reach(out, name);
    if (!cd_dims_normalise(&out->dims, out->span.item_bytes))
        out->span.dims = &out->dims;
    return 0;
}

int cd_py_array_set_device(cd_py_array *out, int64_t index, const char *name)
{
    if (index < 0 || index >= INT_MAX) { /* 1 is added to it elsewhere */
        PyErr_Format(PyExc_ValueError, "parameter `%s` says that it lies on GPU %lld", name, (long long)index);
        return -1;
    }
    out->device_index = (int)index;
    return 0;
}

static int check_output(const cd_py_array *array, const char *name)
{
    if (!array->writable) {
        PyErr_Format(PyExc_ValueError,
                     "parameter `%s` is written to, but the array given is read-only (JAX's always are): pass numpy.array(x)",
                     name);
        return -1;
    }
    for (int i = 0; array->span.dims && i < array->dims.ndim; i++)
        if (array->dims.strides[i] == 0 && array->dims.shape[i] > 1) {
            PyErr_Format(PyExc_ValueError,
                         "parameter `%s` is written to, but several of its elements share one place in memory (an expanded or "
                         "broadcast view): pass a copy",
                         name);
            return -1;
        }
    return 0;
}

/* ------------------------------------------------------------------------------------------------------ the sources */

static int read_numpy(PyArrayObject *array, const char *name, cd_py_array *out)
{
    PyArray_Descr *descr = PyArray_DESCR(array);
    if (refuse_objects(descr, name) < 0)
        return -1;
    int ndim = PyArray_NDIM(array);
    out->span.data = PyArray_DATA(array);
    out->span.item_bytes = (uint32_t)PyArray_ITEMSIZE(array);
    out->dtype = dtype_of_descr(descr, out->span.item_bytes, &out->swapped);
    if (cd_unlikely(set_meaning(descr, out) < 0))
        return -1;
    out->device = CD_CPU;
    out->writable = PyArray_ISWRITEABLE(array);
    out->ndim = ndim;
    const npy_intp *shape = PyArray_DIMS(array);
    size_t count = 1;
    for (int i = 0; i < ndim; i++) {
        out->shape[i] = shape[i];
        count *= (size_t)shape[i];
    }
    if (cd_likely(PyArray_IS_C_CONTIGUOUS(array))) {
        out->span.count = count;
        out->span.dims = NULL;
        return 0;
    }
    int64_t strides[CD_MAX_DIMS];
    for (int i = 0; i < ndim; i++)
        strides[i] = PyArray_STRIDES(array)[i];
    return cd_py_array_set_layout(out, strides, 1, name);
}

/* Says of which argument an exception of another library tells, in a line. What is no fault of the argument passes. */
int cd_py_array_name_error(PyObject *object, const char *name)
{
    if (PyErr_ExceptionMatches(PyExc_MemoryError) || !PyErr_ExceptionMatches(PyExc_Exception))
        return -1;
    PyObject *kind = PyErr_ExceptionMatches(PyExc_ValueError) ? PyExc_ValueError : PyExc_TypeError;
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *text = value ? PyObject_Str(value) : NULL;
    const char *why = text ? PyUnicode_AsUTF8(text) : NULL;
    PyErr_Clear();
    char line[200];
    snprintf(line, sizeof line, "%.*s", why ? (int)strcspn(why, "\n") : 0, why ? why : "");
    PyErr_Format(kind, "parameter `%s` (%s) is no array that can be read: %s", name, Py_TYPE(object)->tp_name,
                 line[0] ? line : "no reason given");
    Py_XDECREF(text);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    return -1;
}

/* A view without a copy, made by NumPy: buffers and __array_interface__. */
static int read_view(PyObject *object, const char *name, cd_py_array *out)
{
    /* bytes alone would be taken for a string and copied. */
    PyObject *source = PyObject_CheckBuffer(object) ? PyMemoryView_FromObject(object) : Py_NewRef(object);
    PyObject *view = source ? PyArray_FromAny(source, NULL, 0, 0, 0, NULL) : NULL;
    Py_XDECREF(source);
    if (!view)
        return cd_py_array_name_error(object, name);
    out->keep = view;
    return read_numpy((PyArrayObject *)view, name, out);
}

int cd_py_array_set_dtype(PyObject *dtype, const char *name, cd_py_array *out)
{
    PyArray_Descr *descr = NULL;
    if (PyArray_DescrCheck(dtype))
        descr = (PyArray_Descr *)Py_NewRef(dtype);
    else if (!PyArray_DescrConverter(dtype, &descr))
        return -1;
    int result = refuse_objects(descr, name);
    out->span.item_bytes = (uint32_t)PyDataType_ELSIZE(descr);
    out->dtype = dtype_of_descr(descr, out->span.item_bytes, &out->swapped);
    if (result == 0)
        result = set_meaning(descr, out);
    Py_DECREF(descr);
    return result;
}

/* The array's own attribute knows more than a typestr of types that NumPy lacks (bfloat16: '<V2'). */
int cd_py_array_set_told_dtype(PyObject *object, PyObject *typestr, const char *name, cd_py_array *out)
{
    PyArray_Descr *told = NULL;
    PyObject *own = PyObject_GetAttrString(object, "dtype");
    PyErr_Clear();
    int result = -1;
    if (!PyArray_DescrConverter(typestr, &told)) {
        PyErr_Clear();
        PyErr_Format(PyExc_TypeError, "parameter `%s`: malformed __cuda_array_interface__: its typestr is %R", name, typestr);
    } else if (!own || !PyArray_DescrCheck(own)) {
        result = cd_py_array_set_dtype((PyObject *)told, name, out);
    } else if (PyDataType_ELSIZE((PyArray_Descr *)own) != PyDataType_ELSIZE(told) ||
               (told->kind != 'V' && ((PyArray_Descr *)own)->type_num < NPY_USERDEF &&
                !PyArray_EquivTypes((PyArray_Descr *)own, told))) {
        PyErr_Format(PyExc_TypeError, "parameter `%s`: malformed __cuda_array_interface__: its typestr is %R, its dtype %S", name,
                     typestr, own);
    } else {
        result = cd_py_array_set_dtype(own, name, out);
    }
    Py_XDECREF(own);
    Py_XDECREF(told);
    return result;
}

/* --------------------------------------------------------------------------------------------------------- dispatch */

static int refuse_object(PyObject *object, const char *name)
{
    if (PyArray_IsAnyScalar(object) || PyBool_Check(object)) {
        PyErr_Format(PyExc_TypeError,
                     "Invalid function argument. Expected parameter `%s` of type numpy.ndarray, torch.Tensor or another array, "
                     "but got the scalar %R of type %s, which cannot be changed in place: pass numpy.array(value)",
                     name, object, Py_TYPE(object)->tp_name);
        return -1;
    }
    if (PyList_Check(object) || PyTuple_Check(object)) {
        PyErr_Format(PyExc_TypeError,
                     "Invalid function argument. Expected parameter `%s` of type numpy.ndarray, torch.Tensor or another array, "
                     "but got %s instead: numbers go as numpy.array(x), several arrays one by one, other objects through "
                     "all_gather_object and its siblings",
                     name, Py_TYPE(object)->tp_name);
        return -1;
    }
    PyErr_Format(PyExc_TypeError,
                 "Invalid function argument. Expected parameter `%s` of type numpy.ndarray, torch.Tensor or another array "
                 "(DLPack, array interface or buffer protocol), but got %s instead.",
                 name, Py_TYPE(object)->tp_name);
    return -1;
}

/* Keeps the exception that is set. */
static bool has_attribute(PyObject *object, const char *attribute)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    bool has = PyObject_HasAttrString(object, attribute);
    PyErr_Restore(type, value, trace);
    return has;
}

static int read_other(cd_py_state *state, PyObject *object, const char *name, cd_py_array *out)
{
    if (cd_py_cupy_find(state, Py_TYPE(object)))
        return cd_py_cupy_read(state, object, name, out);
    if (PyArray_Check(object))
        return refuse_mask(object, name) < 0 ? -1 : read_numpy((PyArrayObject *)object, name, out);
    if (PyType_Check(object) || (PyArray_IsAnyScalar(object) && !PyBytes_Check(object)))
        return refuse_object(object, name);
    PyObject *interface = PyObject_GetAttrString(object, "__cuda_array_interface__");
    if (interface)
        return cd_py_array_interface_read(object, interface, name, out);
    /* A framework may have no interface for what it has DLPack for; otherwise why there is none is the answer. */
    if (!PyErr_ExceptionMatches(PyExc_AttributeError) && !has_attribute(object, "__dlpack__"))
        return cd_py_array_name_error(object, name);
    PyErr_Clear();
    if (PyObject_CheckBuffer(object) || PyObject_HasAttrString(object, "__array_interface__"))
        return read_view(object, name, out);
    if (PyObject_HasAttrString(object, "__dlpack__"))
        return cd_py_dlpack_read(object, name, out);
    return refuse_object(object, name);
}

int cd_py_array_read(cd_py_state *state, PyObject *object, const char *name, cd_py_use use, cd_py_array *out)
{
    out->object = object;
    out->keep = NULL;
    out->swapped = false;
    out->meaning = 0;
    out->device_index = 0;
    out->stream = NULL;
    int result;
    const cd_dl_exchange *api;
    if (cd_likely(PyArray_CheckExact(object)))
        result = read_numpy((PyArrayObject *)object, name, out);
    else if ((PyObject *)Py_TYPE(object) == state->cupy_type)
        result = cd_py_cupy_read(state, object, name, out);
    else if ((api = cd_py_dlpack_table(state, Py_TYPE(object))))
        result = cd_py_dlpack_export(state, api, object, name, out);
    else
        result = read_other(state, object, name, out);
    if (cd_likely(result == 0) && use == CD_PY_OUTPUT)
        result = check_output(out, name);
    if (cd_unlikely(result < 0))
        cd_py_array_release(out);
    return result;
}

int cd_py_array_stream(cd_py_state *state, PyObject *object, int device_index, void **stream_p)
{
    *stream_p = NULL;
    if ((PyObject *)Py_TYPE(object) == state->cupy_type)
        return cd_py_cupy_stream(state, stream_p);
    const cd_dl_exchange *api = cd_py_dlpack_table(state, Py_TYPE(object));
    if (api)
        return api->current_stream(CD_DL_CUDA, device_index, stream_p);
    PyObject *interface = PyObject_GetAttrString(object, "__cuda_array_interface__");
    if (!interface)
        PyErr_Clear(); /* made by __dlpack__: work in the legacy default stream is what is known */
    int result = interface && PyDict_Check(interface) ? cd_py_array_interface_stream(interface, "tensor", stream_p) : 0;
    Py_XDECREF(interface);
    return result;
}

/* -------------------------------------------------------------------------------------------------------- questions */

bool cd_py_array_same_shape(const cd_py_array *a, const cd_py_array *b)
{
    if (a->ndim != b->ndim)
        return false;
    for (int i = 0; i < a->ndim; i++)
        if (a->shape[i] != b->shape[i])
            return false;
    return true;
}

const char *cd_py_array_text(const cd_py_array *array, char *out, size_t bytes)
{
    size_t used = (size_t)snprintf(out, bytes, "%s (", cd_dtype_name(array->dtype));
    for (int i = 0; i < array->ndim && used < bytes; i++)
        used += (size_t)snprintf(out + used, bytes - used, "%s%lld%s", i ? ", " : "", (long long)array->shape[i],
                                 array->ndim == 1 ? "," : "");
    if (used < bytes)
        snprintf(out + used, bytes - used, ")");
    return out;
}

int cd_py_dtype_of(PyObject *object, cd_dtype *dtype_p, uint32_t *item_bytes_p)
{
    PyObject *text = PyObject_Str(object); /* "bfloat16", "torch.bfloat16", "<class 'ml_dtypes.bfloat16'>" */
    const char *name = text ? PyUnicode_AsUTF8(text) : NULL;
    if (!name)
        return -1;
    if (strncmp(name, "torch.", 6) == 0)
        name += 6;
    for (int i = CD_BOOL; i < CD_DTYPES; i++)
        if (strcmp(name, cd_dtype_name((cd_dtype)i)) == 0) {
            Py_DECREF(text);
            *dtype_p = (cd_dtype)i;
            *item_bytes_p = (uint32_t)cd_dtype_bytes((cd_dtype)i);
            return 0;
        }
    Py_DECREF(text);
    PyArray_Descr *descr = NULL;
    if (!PyArray_DescrConverter(object, &descr))
        return -1;
    bool swapped;
    *item_bytes_p = (uint32_t)PyDataType_ELSIZE(descr);
    *dtype_p = dtype_of_descr(descr, *item_bytes_p, &swapped);
    int result = refuse_objects(descr, "dtype");
    Py_DECREF(descr);
    return result;
}

/* _describe(array): what was read, for tests. */
static PyObject *describe(PyObject *module, PyObject *args)
{
    PyObject *object, *shape;
    int output = 0;
    if (!PyArg_ParseTuple(args, "O|p", &object, &output))
        return NULL;
    cd_py_array array;
    if (cd_py_array_read(cd_py_state_of(module), object, "tensor", output ? CD_PY_OUTPUT : CD_PY_INPUT, &array) < 0)
        return NULL;
    size_t bytes = array.device == CD_CPU ? array.span.count * array.span.item_bytes : 0;
    PyObject *packed = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)bytes);
    if (packed && bytes)
        cd_span_read(&array.span, 0, array.span.count, PyBytes_AS_STRING(packed));
    shape = PyTuple_New(array.ndim);
    for (int i = 0; shape && i < array.ndim; i++)
        PyTuple_SET_ITEM(shape, i, PyLong_FromLongLong(array.shape[i]));
    PyObject *result = NULL;
    if (packed && shape)
        result = Py_BuildValue("{s:s,s:O,s:i,s:O,s:O,s:O,s:O,s:n}", "dtype", cd_dtype_name(array.dtype), "shape", shape,
                               "item_bytes", (int)array.span.item_bytes, "writable", array.writable ? Py_True : Py_False,
                               "swapped", array.swapped ? Py_True : Py_False, "strided",
                               array.span.dims ? Py_True : Py_False, "bytes", packed, "data", (Py_ssize_t)array.span.data);
    Py_XDECREF(shape);
    Py_XDECREF(packed);
    cd_py_array_release(&array);
    return result;
}

static PyMethodDef methods[] = {
    {"_describe", describe, METH_VARARGS,
     "_describe(tensor, output=False)\n--\n\nHow an array is read: dtype, shape, layout and its bytes in C order (tests)."},
    {NULL, NULL, 0, NULL},
};

static int import_numpy(void)
{
    /* Before NumPy's macro, which prints whatever ends the import and raises ImportError for it: Ctrl-C would be lost. */
    PyObject *numpy = PyImport_ImportModule("numpy");
    if (!numpy)
        return -1;
    Py_DECREF(numpy);
    import_array1(-1);
    return 0;
}

int cd_py_array_add(PyObject *module)
{
    if (import_numpy() < 0)
        return -1;
    cd_py_state *state = cd_py_state_of(module);
    state->array_types = PyDict_New();
    state->data_name = PyUnicode_InternFromString("data");
    state->ptr_name = PyUnicode_InternFromString("ptr");
    state->device_id_name = PyUnicode_InternFromString("device_id");
    state->shape_name = PyUnicode_InternFromString("shape");
    state->strides_name = PyUnicode_InternFromString("strides");
    state->dtype_name = PyUnicode_InternFromString("dtype");
    state->packed_name = PyUnicode_InternFromString("_c_contiguous");
    state->is_neg_name = PyUnicode_InternFromString("is_neg");
    state->is_conj_name = PyUnicode_InternFromString("is_conj");
    bool made = state->array_types && state->data_name && state->ptr_name && state->device_id_name && state->shape_name &&
                state->strides_name && state->dtype_name && state->packed_name && state->is_neg_name && state->is_conj_name;
    return made ? PyModule_AddFunctions(module, methods) : -1;
}
