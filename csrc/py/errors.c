#include "py/errors.h"
#include "py/recorder.h"

#include "py/glue.h"

/* Builtin classes where `cdist` is NULL, otherwise a name in cdist.errors. */
typedef struct {
    const char *cdist;
    PyObject **builtin;
} class_of_code;

static class_of_code find_class(cd_status code)
{
    switch (code) {
    case CD_BAD_ARGUMENT: return (class_of_code){NULL, &PyExc_ValueError};
    case CD_BAD_TYPE:
    case CD_UNSUPPORTED: return (class_of_code){NULL, &PyExc_TypeError};
    case CD_NO_MEMORY: return (class_of_code){NULL, &PyExc_MemoryError};
    case CD_NOT_FOUND: return (class_of_code){"QueueEmptyError", NULL};
    case CD_WAIT_EXPIRED:
    case CD_TIMED_OUT: return (class_of_code){"DistTimeoutError", NULL};
    case CD_STORE_TIMEOUT: return (class_of_code){"DistStoreTimeoutError", NULL};
    case CD_STORE: return (class_of_code){"DistStoreError", NULL};
    case CD_PEER_LOST: return (class_of_code){"PeerLostError", NULL};
    case CD_ABORTED: return (class_of_code){"AbortedError", NULL};
    case CD_MISMATCH: return (class_of_code){"MismatchError", NULL};
    case CD_GPU: return (class_of_code){"DistBackendError", NULL};
    case CD_REFUSED: return (class_of_code){"RefusedError", NULL};
    case CD_IO:
    case CD_PROTOCOL:
    case CD_NETWORK: return (class_of_code){"DistNetworkError", NULL};
    case CD_NESTED:
    case CD_OK:
    case CD_INTERRUPTED: break;
    }
    return (class_of_code){"DistError", NULL};
}

static PyObject *find_errors(cd_py_state *state)
{
    if (!state->errors)
        state->errors = PyImport_ImportModule("cdist.errors");
    return state->errors;
}

/* What the detector cannot know: which call it was for, where memory ran out or a store is closed or lost, and what can be done
 * about memory, unless it names the limit that was met (of files, of threads, …). */
static PyObject *text_of(const cd_error *error, const char *operation)
{
    const char *remedy = error->code == CD_NO_MEMORY && !strstr(error->text, "ulimit")
                             ? " (free some first, or raise the limit of this process: ulimit -v, the container's)" : "";
    bool is_named = (error->code != CD_NO_MEMORY && error->code != CD_STORE) || !operation || strstr(error->text, operation);
    PyObject *text = PyUnicode_DecodeUTF8(error->text, (Py_ssize_t)strlen(error->text), "replace");
    PyObject *whole = text ? PyUnicode_FromFormat("%s%s%U%s", is_named ? "" : operation, is_named ? "" : ": ", text, remedy)
                           : NULL;
    Py_XDECREF(text);
    return whole;
}

PyObject *cd_py_exception_of(cd_py_state *state, const cd_error *error, const char *operation)
{
    class_of_code found = find_class(error->code);
    PyObject *text = text_of(error, operation);
    if (!text)
        return NULL;
    PyObject *raised = NULL;
    if (found.builtin) {
        raised = PyObject_CallOneArg(*found.builtin, text);
    } else {
        PyObject *errors = find_errors(state);
        PyObject *type = errors ? PyObject_GetAttrString(errors, found.cdist) : NULL;
        PyObject *fields = type ? Py_BuildValue("{s:O,s:z}", "rank", Py_None, "operation", operation) : NULL;
        PyObject *rank = fields && error->rank >= 0 ? PyLong_FromLong(error->rank) : NULL;
        if (fields && (error->rank < 0 || (rank && PyDict_SetItemString(fields, "rank", rank) == 0)))
            raised = PyObject_VectorcallDict(type, &text, 1, fields);
        Py_XDECREF(rank);
        Py_XDECREF(fields);
        Py_XDECREF(type);
    }
    Py_DECREF(text);
    return raised;
}

PyObject *cd_py_raise_from(cd_py_state *state, cd_status status, const char *operation)
{
    if (status == CD_INTERRUPTED && PyErr_Occurred())
        return NULL;
    cd_error error = *cd_last_error();
    error.code = status;
    PyObject *raised = cd_py_exception_of(state, &error, operation);
    if (raised) {
        if (cd_status_is_sticky(status))
            cd_py_report(raised);
        PyErr_SetObject((PyObject *)Py_TYPE(raised), raised);
        Py_DECREF(raised);
    }
    return NULL;
}

/* _raise(code, text, rank=-1): the exception that the C core would raise, for tests of the mapping. */
static PyObject *raise_for_test(PyObject *module, PyObject *args)
{
    int code, rank = -1;
    const char *text, *operation = NULL;
    if (!PyArg_ParseTuple(args, "is|iz", &code, &text, &rank, &operation))
        return NULL;
    return cd_py_raise_from(cd_py_state_of(module), cd_fail_rank((cd_status)code, rank, "%s", text), operation);
}

static PyObject *wait_for_test(PyObject *module, PyObject *timeout)
{
    uint64_t ns;
    if (cd_py_timeout_ns(timeout, UINT64_MAX, &ns) < 0)
        return NULL;
    cd_py_wait wait;
    cd_patience patience = cd_py_wait_begin(&wait, cd_py_deadline(ns), 1);
    _Atomic uint64_t never = 0;
    cd_status status = cd_wait_at_least(&never, 1, -1, &patience);
    cd_py_wait_end(&wait);
    return cd_py_raise(cd_py_state_of(module), status);
}

static PyMethodDef methods[] = {
    {"_raise", raise_for_test, METH_VARARGS,
     "_raise(code, text, rank=-1, operation=None)\n--\n\nRaises what the C core raises for a status code (tests)."},
    {"_wait", wait_for_test, METH_O,
     "_wait(timeout)\n--\n\nWaits for something that never comes, as every blocking call does (tests)."},
    {NULL, NULL, 0, NULL},
};

int cd_py_errors_add(PyObject *module)
{
    return PyModule_AddFunctions(module, methods);
}
