/* CuPy's arrays by their attributes: the dict of the array interface takes 1.0 µs, an attribute 25 to 70 ns (CuPy 14 on an
 * H200's host). The getters of its extension types are called without the look-up by name, and the current stream is asked from
 * the C function that CuPy offers to other Cython modules. CuPy is looked for among the loaded modules, never imported. */
#include "py/array_impl.h"

#include <string.h>

static bool is_named(PyTypeObject *type)
{
    const char *dot = strrchr(type->tp_name, '.');
    return strcmp(dot ? dot + 1 : type->tp_name, "ndarray") == 0;
}

/* cupy_backends.cuda.stream.get_current_stream_ptr as Cython exports it: a capsule whose name is the signature. 0: not there. */
static cd_py_stream_func find_stream_function(void)
{
    PyObject *name = PyUnicode_FromString("cupy_backends.cuda.stream");
    PyObject *module = name ? PyImport_GetModule(name) : NULL;
    PyObject *table = module ? PyObject_GetAttrString(module, "__pyx_capi__") : NULL;
    PyObject *capsule = NULL; /* borrowed */
    if (table && PyDict_Check(table))
        capsule = PyDict_GetItemString(table, "get_current_stream_ptr");
    static const char signature[] = "intptr_t (void)";
    void *address = capsule && PyCapsule_IsValid(capsule, signature) ? PyCapsule_GetPointer(capsule, signature) : NULL;
    cd_py_stream_func function = 0;
    memcpy(&function, &address, sizeof function);
    PyErr_Clear();
    Py_XDECREF(table);
    Py_XDECREF(module);
    Py_XDECREF(name);
    return function;
}

bool cd_py_cupy_find(cd_py_state *state, PyTypeObject *type)
{
    if (state->cupy_type || !is_named(type))
        return state->cupy_type == (PyObject *)type;
    PyObject *name = PyUnicode_FromString("cupy");
    PyObject *module = name ? PyImport_GetModule(name) : NULL;
    PyObject *found = module ? PyObject_GetAttrString(module, "ndarray") : NULL;
    PyObject *cuda = found == (PyObject *)type ? PyObject_GetAttrString(module, "cuda") : NULL;
    PyObject *stream = cuda ? PyObject_GetAttrString(cuda, "get_current_stream") : NULL;
    if (stream) {
        state->cupy_type = Py_NewRef(found);
        state->cupy_stream = Py_NewRef(stream);
        state->cupy_stream_function = find_stream_function();
    }
    PyErr_Clear(); /* another module of that name: its arrays have the interface, or are none */
    bool is_cupy = stream != NULL;
    Py_XDECREF(stream);
    Py_XDECREF(cuda);
    Py_XDECREF(found);
    Py_XDECREF(module);
    Py_XDECREF(name);
    return is_cupy;
}

/* object.attribute, new reference. What the class has as a getter in C is remembered; anything else is looked up as usual. */
static PyObject *get(PyObject *object, PyObject *attribute, cd_py_getter *known)
{
    if (cd_likely(known->type == Py_TYPE(object)))
        return known->get(object, known->closure);
    PyObject *found = PyObject_GetAttr((PyObject *)Py_TYPE(object), attribute);
    if (found && Py_TYPE(found) == &PyGetSetDescr_Type && !known->type) {
        /* Getters in C go before what an instance holds. The class is never let go: it lives as long as the process. */
        PyGetSetDef *row = ((PyGetSetDescrObject *)found)->d_getset;
        *known = (cd_py_getter){(PyTypeObject *)Py_NewRef((PyObject *)Py_TYPE(object)), row->get, row->closure};
    }
    Py_XDECREF(found);
    PyErr_Clear();
    return PyObject_GetAttr(object, attribute);
}

static int read_number(PyObject *number, void **out)
{
    if (!number)
        return -1;
    *out = PyLong_AsVoidPtr(number);
    Py_DECREF(number);
    return !*out && PyErr_Occurred() ? -1 : 0;
}

int cd_py_cupy_stream(const cd_py_state *state, void **stream_p)
{
    if (cd_likely(state->cupy_stream_function)) {
        *stream_p = (void *)state->cupy_stream_function();
        return PyErr_Occurred() ? -1 : 0; /* which number stands for a failure is CuPy's to choose */
    }
    PyObject *stream = PyObject_CallNoArgs(state->cupy_stream);
    int result = stream ? read_number(PyObject_GetAttr(stream, state->ptr_name), stream_p) : -1;
    Py_XDECREF(stream);
    return result;
}

static int read_memory(cd_py_state *state, PyObject *object, const char *name, cd_py_array *out)
{
    PyObject *data = get(object, state->data_name, &state->cupy_getters[CD_PY_CUPY_DATA]);
    PyObject *device = data ? get(data, state->device_id_name, &state->cupy_getters[CD_PY_CUPY_DEVICE]) : NULL;
    int result = -1;
    if (device)
        result = read_number(get(data, state->ptr_name, &state->cupy_getters[CD_PY_CUPY_PTR]), &out->span.data);
    if (result == 0) {
        int64_t index = PyLong_AsLongLong(device);
        result = index == -1 && PyErr_Occurred() ? -1 : cd_py_array_set_device(out, index, name);
    }
    Py_XDECREF(device);
    Py_XDECREF(data);
    return result;
}

/* A tuple of at most CD_MAX_DIMS whole numbers, into `values`; how many, or −1. Steals `tuple`. */
static int read_numbers(PyObject *tuple, PyObject *attribute, const char *name, int64_t *values)
{
    if (!tuple)
        return -1;
    int count = -1;
    if (!PyTuple_Check(tuple))
        PyErr_Format(PyExc_TypeError, "parameter `%s`: %S is no tuple", name, attribute);
    else if (PyTuple_GET_SIZE(tuple) > CD_MAX_DIMS)
        cd_py_array_refuse_dims(name, (int)PyTuple_GET_SIZE(tuple));
    else
        count = (int)PyTuple_GET_SIZE(tuple);
    for (int i = 0; i < count; i++)
        values[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i));
    Py_DECREF(tuple);
    return PyErr_Occurred() ? -1 : count;
}

/* Whether the array says by itself that it lies in C order without gaps (CuPy's own mark): its strides need not be read. */
static bool is_packed(cd_py_state *state, PyObject *object)
{
    PyObject *packed = get(object, state->packed_name, &state->cupy_getters[CD_PY_CUPY_PACKED]);
    bool answer = packed == Py_True;
    Py_XDECREF(packed);
    PyErr_Clear();
    return answer;
}

int cd_py_cupy_read(cd_py_state *state, PyObject *object, const char *name, cd_py_array *out)
{
    int64_t strides[CD_MAX_DIMS];
    cd_py_getter *getters = state->cupy_getters;
    out->device = CD_CUDA;
    out->writable = true;
    PyObject *dtype = get(object, state->dtype_name, &getters[CD_PY_CUPY_DTYPE]);
    int result = dtype ? cd_py_array_set_dtype(dtype, name, out) : -1;
    Py_XDECREF(dtype);
    if (result < 0 || read_memory(state, object, name, out) < 0)
        return -1;
    PyObject *shape = get(object, state->shape_name, &getters[CD_PY_CUPY_SHAPE]);
    out->ndim = read_numbers(shape, state->shape_name, name, out->shape);
    if (out->ndim < 0)
        return -1;
    bool packed = is_packed(state, object);
    if (!packed) {
        PyObject *steps = get(object, state->strides_name, &getters[CD_PY_CUPY_STRIDES]);
        int count = read_numbers(steps, state->strides_name, name, strides);
        if (count != out->ndim && count >= 0)
            PyErr_Format(PyExc_TypeError, "parameter `%s` has %d strides for %d dimensions", name, count, out->ndim);
        if (count != out->ndim)
            return -1;
    }
    if (cd_py_array_set_layout(out, packed ? NULL : strides, 1, name) < 0)
        return -1;
    return cd_py_cupy_stream(state, &out->stream);
}
