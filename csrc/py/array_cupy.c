/* CuPy's arrays by their attributes: the dict of the array interface takes 1.0 µs, each attribute 0.1 (CuPy 14). CuPy is looked
 * for among the loaded modules, never imported. */
#include "py/array_impl.h"

#include <string.h>

static bool is_named(PyTypeObject *type)
{
    const char *dot = strrchr(type->tp_name, '.');
    return strcmp(dot ? dot + 1 : type->tp_name, "ndarray") == 0;
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

static int read_pointer(PyObject *object, PyObject *attribute, void **out)
{
    PyObject *number = PyObject_GetAttr(object, attribute);
    if (!number)
        return -1;
    *out = PyLong_AsVoidPtr(number);
    Py_DECREF(number);
    return !*out && PyErr_Occurred() ? -1 : 0;
}

int cd_py_cupy_stream(const cd_py_state *state, void **stream_p)
{
    PyObject *stream = PyObject_CallNoArgs(state->cupy_stream);
    int result = stream ? read_pointer(stream, state->ptr_name, stream_p) : -1;
    Py_XDECREF(stream);
    return result;
}

static int read_memory(const cd_py_state *state, PyObject *object, cd_py_array *out)
{
    PyObject *data = PyObject_GetAttr(object, state->data_name);
    PyObject *device = data ? PyObject_GetAttr(data, state->device_id_name) : NULL;
    int result = device ? read_pointer(data, state->ptr_name, &out->span.data) : -1;
    if (result == 0) {
        out->device_index = (int)PyLong_AsLong(device);
        result = out->device_index == -1 && PyErr_Occurred() ? -1 : 0;
    }
    Py_XDECREF(device);
    Py_XDECREF(data);
    return result;
}

/* A tuple of at most CD_MAX_DIMS whole numbers, into `values`; how many, or −1. */
static int read_numbers(PyObject *object, PyObject *attribute, const char *name, int64_t *values)
{
    PyObject *tuple = PyObject_GetAttr(object, attribute);
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

int cd_py_cupy_read(const cd_py_state *state, PyObject *object, const char *name, cd_py_array *out)
{
    int64_t strides[CD_MAX_DIMS];
    out->device = CD_CUDA;
    out->writable = true;
    PyObject *dtype = PyObject_GetAttr(object, state->dtype_name);
    int result = dtype ? cd_py_array_set_dtype(dtype, name, out) : -1;
    Py_XDECREF(dtype);
    if (result < 0 || read_memory(state, object, out) < 0)
        return -1;
    out->ndim = read_numbers(object, state->shape_name, name, out->shape);
    int steps = out->ndim < 0 ? -1 : read_numbers(object, state->strides_name, name, strides);
    if (steps != out->ndim && steps >= 0)
        PyErr_Format(PyExc_TypeError, "parameter `%s` has %d strides for %d dimensions", name, steps, out->ndim);
    if (steps < 0 || steps != out->ndim)
        return -1;
    cd_py_array_set_layout(out, strides, 1);
    return cd_py_cupy_stream(state, &out->stream);
}
