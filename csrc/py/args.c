#include "py/args.h"

#include <limits.h>

static int find_name(const cd_py_signature *signature, PyObject *name)
{
    for (int i = 0; i < signature->count; i++)
        if (PyUnicode_CompareWithASCIIString(name, signature->names[i]) == 0)
            return i;
    PyErr_Format(PyExc_TypeError, "%s() got an unexpected keyword argument '%U'", signature->function, name);
    return -1;
}

int cd_py_args(const cd_py_signature *signature, PyObject *const *args, Py_ssize_t given, PyObject *names, PyObject **out)
{
    if (given > signature->count) {
        PyErr_Format(PyExc_TypeError, "%s() takes at most %d arguments (%zd given)", signature->function,
                     signature->count, given);
        return -1;
    }
    for (int i = 0; i < signature->count; i++)
        out[i] = i < given ? args[i] : NULL;
    Py_ssize_t named = names ? PyTuple_GET_SIZE(names) : 0;
    for (Py_ssize_t i = 0; i < named; i++) {
        int at = find_name(signature, PyTuple_GET_ITEM(names, i));
        if (at < 0)
            return -1;
        if (out[at]) {
            PyErr_Format(PyExc_TypeError, "%s() got multiple values for argument '%s'", signature->function,
                         signature->names[at]);
            return -1;
        }
        out[at] = args[given + i];
    }
    for (int i = 0; i < signature->required; i++)
        if (!out[i]) {
            PyErr_Format(PyExc_TypeError, "%s() missing required argument: '%s'", signature->function,
                         signature->names[i]);
            return -1;
        }
    return 0;
}

int cd_py_int(PyObject *argument, const char *name, int *value_p)
{
    PyObject *number = PyNumber_Index(argument);
    if (!number) {
        PyErr_Format(PyExc_TypeError, "%s must be an integer, not %s", name, Py_TYPE(argument)->tp_name);
        return -1;
    }
    int overflow;
    long value = PyLong_AsLongAndOverflow(number, &overflow);
    Py_DECREF(number);
    if (overflow || value < INT_MIN || value > INT_MAX) {
        PyErr_Format(PyExc_ValueError, "%s is out of range: %R", name, argument);
        return -1;
    }
    *value_p = (int)value;
    return 0;
}
