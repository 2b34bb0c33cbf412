/* A small plain array as a call: _array_of(shape, type number, bytes). NumPy's own form pickles a dtype, a buffer and three
 * global names each time. Those names lie in packages, and the unpickler looks for a name of a package through Python code of
 * the import system; this module is none. An array of 4 B, to a pickle and back: 7 µs instead of 13 (CPython 3.11, a 2-core
 * EPYC). */
#include "py/array_pickle.h"

#include <numpy/arrayobject.h>
#include <stdbool.h>
#include <string.h>

/* Buffers of so many bytes and more stay outside of the pickle: the copies cost more than a message of their own. */
#define OUT_OF_BAND_BYTES (64 << 10)

static bool is_number(int type)
{
    return (type >= NPY_BOOL && type <= NPY_CDOUBLE && type != NPY_LONGDOUBLE) || type == NPY_HALF;
}

/* Shape, type number and bytes are all there is to know: C order, writable, and the dtype is NumPy's one of that number, neither
 * of another byte order nor with metadata. */
static bool is_plain(PyArrayObject *array)
{
    if (!PyArray_ISCARRAY(array) || !is_number(PyArray_TYPE(array)) || PyArray_NBYTES(array) >= OUT_OF_BAND_BYTES)
        return false;
    PyArray_Descr *usual = PyArray_DescrFromType(PyArray_TYPE(array));
    bool is_usual = usual == PyArray_DESCR(array);
    Py_DECREF(usual);
    return is_usual;
}

static PyObject *reduce_array(PyObject *module, PyObject *thing)
{
    if (!PyArray_CheckExact(thing) || !is_plain((PyArrayObject *)thing))
        Py_RETURN_NOTIMPLEMENTED;
    PyArrayObject *array = (PyArrayObject *)thing;
    PyObject *make = PyObject_GetAttrString(module, "_array_of");
    PyObject *shape = make ? PyArray_IntTupleFromIntp(PyArray_NDIM(array), PyArray_DIMS(array)) : NULL;
    if (!shape) {
        Py_XDECREF(make);
        return NULL;
    }
    return Py_BuildValue("N(Niy#)", make, shape, PyArray_TYPE(array), PyArray_BYTES(array),
                         (Py_ssize_t)PyArray_NBYTES(array));
}

/* False unless it is the shape of at most `most` elements. */
static bool read_shape(PyObject *shape, Py_ssize_t most, npy_intp *dims)
{
    Py_ssize_t count = 1;
    bool is_empty = false, is_small = true;
    if (PyTuple_GET_SIZE(shape) > NPY_MAXDIMS)
        return false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(shape); i++) {
        Py_ssize_t extent = PyLong_AsSsize_t(PyTuple_GET_ITEM(shape, i));
        if (extent < 0)
            return false;
        dims[i] = extent;
        is_empty |= extent == 0;
        is_small = is_small && (extent == 0 || count <= most / extent);
        count = is_small ? count * extent : 1;
    }
    return is_empty || is_small;
}

/* What comes in here came from another process: nothing is allocated that its bytes do not pay for. */
static PyObject *array_of(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *shape, *data, *array = NULL;
    npy_intp dims[NPY_MAXDIMS];
    int type;
    if (!PyArg_ParseTuple(args, "O!iS", &PyTuple_Type, &shape, &type, &data))
        return NULL;
    if (is_number(type) && read_shape(shape, PyBytes_GET_SIZE(data), dims))
        array = PyArray_SimpleNew((int)PyTuple_GET_SIZE(shape), dims, type);
    if (array && PyArray_NBYTES((PyArrayObject *)array) == PyBytes_GET_SIZE(data)) {
        memcpy(PyArray_DATA((PyArrayObject *)array), PyBytes_AS_STRING(data), (size_t)PyBytes_GET_SIZE(data));
        return array;
    }
    Py_XDECREF(array);
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "the shape, dtype and bytes of a pickled array do not fit together");
    return NULL;
}

static PyMethodDef functions[] = {
    {"_reduce_array", reduce_array, METH_O,
     "_reduce_array(thing)\n--\n\nFor Pickler.reducer_override: small plain NumPy arrays; NotImplemented for all else."},
    {"_array_of", array_of, METH_VARARGS, "_array_of(shape, type, data)\n--\n\nThe array that _reduce_array took apart."},
    {NULL, NULL, 0, NULL},
};

static int import_numpy(void)
{
    import_array1(-1);
    return 0;
}

int cd_py_array_pickle_add(PyObject *module)
{
    if (import_numpy() < 0 || PyModule_AddIntConstant(module, "_OUT_OF_BAND_BYTES", OUT_OF_BAND_BYTES) < 0)
        return -1;
    return PyModule_AddFunctions(module, functions);
}
