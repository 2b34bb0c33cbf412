/* Arguments of the reducer, and assign_buckets. */
#include "py/reducer.h"

#include "py/array.h"

#include "ddp/reducer.h"

cd_reducer_param *cd_py_reducer_params(PyObject *counts, PyObject *dtypes, cd_device device, int *count_p)
{
    PyObject *fast = PySequence_Fast(counts, "counts must be a sequence of integers");
    PyObject *types = fast ? PySequence_Fast(dtypes, "dtypes must be a sequence") : NULL;
    cd_reducer_param *params = NULL;
    Py_ssize_t count = fast ? PySequence_Fast_GET_SIZE(fast) : 0;
    if (!types)
        goto undo_sequences;
    if (PySequence_Fast_GET_SIZE(types) != count || count > INT_MAX / 2) {
        PyErr_SetString(PyExc_ValueError, "counts and dtypes must have the same length");
        goto undo_sequences;
    }
    params = PyMem_Calloc((size_t)count + 1, sizeof *params);
    if (!params) {
        PyErr_NoMemory();
        goto undo_sequences;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        uint32_t item;
        params[i].device = device;
        params[i].count = PyLong_AsSize_t(PySequence_Fast_GET_ITEM(fast, i));
        if (PyErr_Occurred() || cd_py_dtype_of(PySequence_Fast_GET_ITEM(types, i), &params[i].dtype, &item) < 0) {
            PyMem_Free(params);
            params = NULL;
            goto undo_sequences;
        }
    }
    *count_p = (int)count;
undo_sequences:
    Py_XDECREF(types);
    Py_XDECREF(fast);
    return params;
}

int *cd_py_reducer_ints(PyObject *object, int expected, int *count_p)
{
    PyObject *fast = PySequence_Fast(object, "expected a sequence of integers");
    if (!fast)
        return NULL;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(fast);
    int *out = PyMem_Calloc((size_t)count + 1, sizeof *out);
    if (!out) {
        PyErr_NoMemory();
    } else if (expected >= 0 && count != expected) {
        PyErr_Format(PyExc_ValueError, "expected %d integers, got %zd", expected, count);
    } else {
        for (Py_ssize_t i = 0; i < count && !PyErr_Occurred(); i++) {
            long value = PyLong_AsLong(PySequence_Fast_GET_ITEM(fast, i));
            if (!PyErr_Occurred() && (value < INT_MIN || value > INT_MAX))
                PyErr_SetString(PyExc_OverflowError, "integer out of range");
            out[i] = (int)value;
        }
        *count_p = (int)count;
    }
    Py_DECREF(fast);
    if (PyErr_Occurred()) {
        PyMem_Free(out);
        return NULL;
    }
    return out;
}

int *cd_py_reducer_order(PyObject *object, int count)
{
    int entries;
    int *order = cd_py_reducer_ints(object, count, &entries);
    char *seen = order ? PyMem_Calloc((size_t)count + 1, 1) : NULL;
    if (order && !seen)
        PyErr_NoMemory();
    for (int i = 0; seen && i < count && !PyErr_Occurred(); i++)
        if (order[i] < 0 || order[i] >= count || seen[order[i]]++)
            PyErr_SetString(PyExc_ValueError, "order must hold each parameter once");
    PyMem_Free(seen);
    if (!PyErr_Occurred())
        return order;
    PyMem_Free(order);
    return NULL;
}

int cd_py_reducer_memory(PyObject *memory, int buckets, void ***out)
{
    if (memory == Py_None)
        return 0;
    PyObject *fast = PySequence_Fast(memory, "memory must be a sequence of addresses");
    if (!fast)
        return -1;
    if (PySequence_Fast_GET_SIZE(fast) != buckets)
        PyErr_Format(PyExc_ValueError, "expected memory of %d buckets", buckets);
    else if (!(*out = PyMem_Calloc((size_t)buckets + 1, sizeof **out)))
        PyErr_NoMemory();
    for (int k = 0; k < buckets && !PyErr_Occurred(); k++)
        (*out)[k] = PyLong_AsVoidPtr(PySequence_Fast_GET_ITEM(fast, k));
    Py_DECREF(fast);
    return PyErr_Occurred() ? -1 : 0;
}

int cd_py_reducer_device(const char *text, cd_device *device_p)
{
    *device_p = strcmp(text, "cuda") == 0 ? CD_CUDA : CD_CPU;
    if (*device_p == CD_CUDA || strcmp(text, "cpu") == 0)
        return 0;
    PyErr_Format(PyExc_ValueError, "device must be 'cpu' or 'cuda', not '%s'", text);
    return -1;
}

int cd_py_reducer_mode(const char *text, cd_reduce_mode *mode_p)
{
    *mode_p = strcmp(text, "sum") == 0 ? CD_REDUCE_SUM : CD_REDUCE_MEAN;
    if (*mode_p == CD_REDUCE_SUM || strcmp(text, "mean") == 0)
        return 0;
    PyErr_Format(PyExc_ValueError, "mode must be 'mean' or 'sum', not '%s'", text);
    return -1;
}

static PyObject *assign_buckets(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *counts, *dtypes, *caps_object, *order_object = Py_None;
    if (!PyArg_ParseTuple(args, "OOO|O:assign_buckets", &counts, &dtypes, &caps_object, &order_object))
        return NULL;
    int count = 0;
    PyObject *answer = NULL, *caps_list = PySequence_Fast(caps_object, "caps must be a sequence of bytes");
    Py_ssize_t caps_count = caps_list ? PySequence_Fast_GET_SIZE(caps_list) : 0;
    size_t *caps = caps_list ? PyMem_Calloc((size_t)caps_count + 1, sizeof *caps) : NULL;
    cd_reducer_param *params = caps ? cd_py_reducer_params(counts, dtypes, CD_CPU, &count) : NULL;
    int *order = params && order_object != Py_None ? cd_py_reducer_order(order_object, count) : NULL;
    int *bucket_of = params ? PyMem_Calloc((size_t)count + 1, sizeof *bucket_of) : NULL;
    if (!bucket_of || (order_object != Py_None && !order))
        goto undo_all;
    for (Py_ssize_t i = 0; i < caps_count; i++)
        caps[i] = PyLong_AsSize_t(PySequence_Fast_GET_ITEM(caps_list, i));
    if (!PyErr_Occurred() && caps_count == 0)
        PyErr_SetString(PyExc_ValueError, "at least one cap is needed");
    if (PyErr_Occurred())
        goto undo_all;
    cd_bucket_assign(params, order, count, caps, (int)caps_count, bucket_of);
    answer = PyList_New(count);
    for (int i = 0; answer && i < count; i++)
        PyList_SET_ITEM(answer, i, PyLong_FromLong(bucket_of[i]));
undo_all:
    if (!answer && !PyErr_Occurred())
        PyErr_NoMemory();
    PyMem_Free(bucket_of);
    PyMem_Free(order);
    PyMem_Free(params);
    PyMem_Free(caps);
    Py_XDECREF(caps_list);
    return answer;
}

static PyMethodDef functions[] = {
    {"assign_buckets", assign_buckets, METH_VARARGS,
     "assign_buckets(counts, dtypes, caps, order=None): bucket of each gradient, by size."},
    {NULL, NULL, 0, NULL},
};

int cd_py_buckets_add(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
