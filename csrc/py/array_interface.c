/* Arrays by __cuda_array_interface__, a dict whose words anybody can write: none of them is believed before it was looked at. */
#include "py/array_impl.h"

static int refuse(const char *name, const char *entry, PyObject *value)
{
    PyErr_Clear();
    PyErr_Format(PyExc_TypeError, "parameter `%s`: malformed __cuda_array_interface__: its %s is %R", name, entry,
                 value ? value : Py_None);
    return -1;
}

/* A whole number, NumPy's too. */
static int read_whole(PyObject *number, const char *name, const char *entry, PyObject *whole, int64_t *value_p)
{
    *value_p = PyLong_AsLongLong(number);
    if (*value_p != -1 || !PyErr_Occurred())
        return 0;
    bool is_wrong = PyErr_ExceptionMatches(PyExc_TypeError) || PyErr_ExceptionMatches(PyExc_OverflowError);
    return is_wrong ? refuse(name, entry, whole) : -1;
}

/* A tuple of `ndim` numbers, or of at most CD_MAX_DIMS where ndim is −1. How many, or −1. */
static int read_tuple(PyObject *tuple, int ndim, const char *name, const char *entry, int64_t *values)
{
    if (!tuple || !PyTuple_Check(tuple) || (ndim >= 0 && PyTuple_GET_SIZE(tuple) != ndim))
        return refuse(name, entry, tuple);
    if (PyTuple_GET_SIZE(tuple) > CD_MAX_DIMS)
        return cd_py_array_refuse_dims(name, (int)PyTuple_GET_SIZE(tuple));
    int count = (int)PyTuple_GET_SIZE(tuple);
    for (int i = 0; i < count; i++)
        if (read_whole(PyTuple_GET_ITEM(tuple, i), name, entry, tuple, &values[i]) < 0)
            return -1;
    return count;
}

/* (address, read-only). */
static int read_data(PyObject *data, const char *name, cd_py_array *out)
{
    if (!data || !PyTuple_Check(data) || PyTuple_GET_SIZE(data) != 2)
        return refuse(name, "data", data);
    PyObject *number = PyNumber_Index(PyTuple_GET_ITEM(data, 0));
    unsigned long long address = number ? PyLong_AsUnsignedLongLong(number) : 0;
    Py_XDECREF(number);
    if (PyErr_Occurred())
        return refuse(name, "data", data);
    out->span.data = (void *)(uintptr_t)address;
    int read_only = PyObject_IsTrue(PyTuple_GET_ITEM(data, 1));
    out->writable = read_only == 0;
    return read_only < 0 ? -1 : 0;
}

static int read_layout(PyObject *interface, const char *name, cd_py_array *out)
{
    int64_t strides[CD_MAX_DIMS];
    PyObject *steps = PyDict_GetItemString(interface, "strides"), *mask = PyDict_GetItemString(interface, "mask");
    bool strided = steps && steps != Py_None;
    out->ndim = read_tuple(PyDict_GetItemString(interface, "shape"), -1, name, "shape", out->shape);
    if (out->ndim < 0 || read_data(PyDict_GetItemString(interface, "data"), name, out) < 0 ||
        (strided && read_tuple(steps, out->ndim, name, "strides", strides) < 0) ||
        cd_py_array_set_layout(out, strided ? strides : NULL, 1, name) < 0)
        return -1;
    if (mask && mask != Py_None) {
        PyErr_Format(PyExc_TypeError, "parameter `%s` is a masked array, and masks are not sent: pass values and mask one by one",
                     name);
        return -1;
    }
    return out->span.data || out->span.count == 0 ? 0 : refuse(name, "data", PyDict_GetItemString(interface, "data"));
}

/* CuPy's way to say it, device.id; −1 where the array does not tell. */
static int read_device(PyObject *object, const char *name, cd_py_array *out)
{
    PyObject *device = PyObject_GetAttrString(object, "device");
    PyObject *id = device ? PyObject_GetAttrString(device, "id") : NULL;
    PyErr_Clear();
    int result = 0, overflow = 0;
    out->device_index = -1;
    if (id && PyLong_Check(id)) {
        int64_t index = PyLong_AsLongLongAndOverflow(id, &overflow);
        result = cd_py_array_set_device(out, overflow ? -1 : index, name);
    }
    Py_XDECREF(id);
    Py_XDECREF(device);
    return result;
}

int cd_py_array_interface_stream(PyObject *interface, const char *name, void **stream_p)
{
    PyObject *number = PyDict_GetItemString(interface, "stream"); /* borrowed */
    int64_t stream = 0;
    *stream_p = NULL;
    if (!number || number == Py_None)
        return 0;
    if (!PyLong_Check(number) || read_whole(number, name, "stream", number, &stream) < 0 || stream < 0)
        return PyErr_Occurred() ? -1 : refuse(name, "stream", number);
    if (stream == 0) {
        PyErr_Format(PyExc_ValueError,
                     "parameter `%s`: the stream in its __cuda_array_interface__ is 0, which the interface does not allow, since "
                     "it may mean two: 1 is the legacy default stream, 2 that of the thread, None says that all work is through",
                     name);
        return -1;
    }
    *stream_p = (void *)(intptr_t)stream;
    return 0;
}

int cd_py_array_interface_read(PyObject *object, PyObject *interface, const char *name, cd_py_array *out)
{
    out->keep = interface;
    out->device = CD_CUDA;
    if (!PyDict_Check(interface)) {
        PyErr_Format(PyExc_TypeError, "parameter `%s`: malformed __cuda_array_interface__: it is no dict but %R", name,
                     interface);
        return -1;
    }
    PyObject *typestr = PyDict_GetItemString(interface, "typestr");
    if (!typestr || !PyUnicode_Check(typestr))
        return refuse(name, "typestr", typestr);
    if (cd_py_array_set_told_dtype(object, typestr, name, out) < 0 || read_layout(interface, name, out) < 0 ||
        read_device(object, name, out) < 0)
        return -1;
    return cd_py_array_interface_stream(interface, name, &out->stream);
}
