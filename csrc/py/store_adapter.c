/* A Python object as a cd_store: each function takes the GIL and calls the method of that name. */
#include "py/store.h"

#include "net/addr.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    cd_store base;
    PyObject *object;
} adapter;

/* Makes a Python exception the status of the call: the wait of the caller may be without the GIL, so it keeps the text only. */
static cd_status fail_from_exception(const char *method)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    PyObject *text = value ? PyObject_Str(value) : NULL;
    const char *words = text ? PyUnicode_AsUTF8(text) : NULL;
    const char *class_name = type ? ((PyTypeObject *)type)->tp_name : "?";
    bool timeout = words && (strstr(words, "imeout") || strstr(words, "imed out"));
    cd_status status = cd_fail(timeout ? CD_STORE_TIMEOUT : CD_STORE, "%s of the store raised %s: %s", method, class_name,
                               words ? words : "?");
    if (type && (PyErr_GivenExceptionMatches(type, PyExc_KeyboardInterrupt) ||
                 PyErr_GivenExceptionMatches(type, PyExc_SystemExit))) {
        status = cd_fail(CD_INTERRUPTED, "interrupted in %s of the store", method);
        Py_XINCREF(type);
        Py_XINCREF(value);
        Py_XINCREF(trace);
        PyErr_Restore(type, value, trace);
    } else {
        PyErr_Clear();
    }
    Py_XDECREF(text);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    return status;
}

/* Keys are text in Python; what is not UTF-8 survives as surrogates. */
static PyObject *text_of(cd_bytes bytes)
{
    return PyUnicode_DecodeUTF8(bytes.data, (Py_ssize_t)bytes.bytes, "surrogateescape");
}

static PyObject *list_of(const cd_bytes *items, size_t count, bool text)
{
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list && i < count; i++) {
        PyObject *item = text ? text_of(items[i]) : PyBytes_FromStringAndSize(items[i].data, (Py_ssize_t)items[i].bytes);
        if (!item)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, (Py_ssize_t)i, item);
    }
    return list;
}

/* Calls the method with arguments built from `format` and gives its result; steals nothing. */
static cd_status call(cd_store *store, const char *method, PyObject *arguments, PyObject **out)
{
    PyObject *found = arguments ? PyObject_GetAttrString(((adapter *)store)->object, method) : NULL;
    *out = found ? PyObject_CallObject(found, arguments) : NULL;
    Py_XDECREF(found);
    Py_XDECREF(arguments);
    return *out ? CD_OK : fail_from_exception(method);
}

static cd_status bytes_out(const char *method, PyObject *result, cd_buffer *out)
{
    char *data;
    Py_ssize_t bytes;
    cd_status status;
    PyObject *raw = PyUnicode_Check(result) ? PyUnicode_AsUTF8String(result) : Py_NewRef(result);
    if (!raw || PyBytes_AsStringAndSize(raw, &data, &bytes) < 0)
        status = fail_from_exception(method);
    else
        status = cd_buffer_copy(data, (size_t)bytes, out);
    Py_XDECREF(raw);
    return status;
}

/* torch's and our classes take a timedelta. */
static PyObject *timeout_of(const cd_patience *patience)
{
    uint64_t left = cd_deadline_left_ns(patience->deadline);
    if (left > UINT64_C(1000000) * CD_NS_PER_S)
        left = UINT64_C(1000000) * CD_NS_PER_S;
    if (left < CD_NS_PER_MS)
        left = CD_NS_PER_MS; /* 0 would mean for ever in torch's */
    PyObject *module = PyImport_ImportModule("datetime");
    PyObject *delta = module ? PyObject_CallMethod(module, "timedelta", "id", 0, (double)left / 1e9) : NULL;
    Py_XDECREF(module);
    return delta;
}

static cd_status python_set(cd_store *store, cd_bytes key, cd_bytes value, const cd_patience *patience)
{
    (void)patience;
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *result = NULL;
    cd_status status = call(
        store, "set",
        Py_BuildValue("(Ny#)", text_of(key), value.data ? value.data : "", (Py_ssize_t)value.bytes), &result);
    Py_XDECREF(result);
    PyGILState_Release(gil);
    return status;
}

static cd_status python_wait(cd_store *store, const cd_bytes *keys, size_t count, const cd_patience *patience)
{
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *result = NULL;
    cd_status status = call(store, "wait", Py_BuildValue("(NN)", list_of(keys, count, true), timeout_of(patience)), &result);
    Py_XDECREF(result);
    PyGILState_Release(gil);
    return status;
}

/* The wait goes first, for its deadline; a class without wait has a get that waits by itself. */
static cd_status python_get(cd_store *store, cd_bytes key, cd_buffer *out, const cd_patience *patience)
{
    PyGILState_STATE gil = PyGILState_Ensure();
    cd_status status = CD_OK;
    if (PyObject_HasAttrString(((adapter *)store)->object, "wait"))
        status = python_wait(store, &key, 1, patience);
    PyObject *result = NULL;
    if (status == CD_OK)
        status = call(store, "get", Py_BuildValue("(N)", text_of(key)), &result);
    if (status == CD_OK)
        status = bytes_out("get", result, out);
    Py_XDECREF(result);
    PyGILState_Release(gil);
    return status;
}

static cd_status number_out(cd_store *store, const char *method, PyObject *arguments, int64_t *value_p)
{
    PyObject *result = NULL;
    CD_TRY(call(store, method, arguments, &result));
    long long value = PyLong_AsLongLong(result);
    Py_DECREF(result);
    if (value == -1 && PyErr_Occurred())
        return fail_from_exception(method);
    *value_p = value;
    return CD_OK;
}

static cd_status python_add(cd_store *store, cd_bytes key, int64_t delta, int64_t *value_p, const cd_patience *patience)
{
    (void)patience;
    PyGILState_STATE gil = PyGILState_Ensure();
    cd_status status = number_out(store, "add", Py_BuildValue("(NL)", text_of(key), (long long)delta), value_p);
    PyGILState_Release(gil);
    return status;
}

static cd_status python_compare_set(cd_store *store, cd_bytes key, cd_bytes expected, cd_bytes desired, cd_buffer *out,
                                    const cd_patience *patience)
{
    (void)patience;
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *result = NULL, *arguments = Py_BuildValue("(NNN)", text_of(key), text_of(expected), text_of(desired));
    cd_status status = call(store, "compare_set", arguments, &result);
    if (status == CD_OK)
        status = bytes_out("compare_set", result, out);
    Py_XDECREF(result);
    PyGILState_Release(gil);
    return status;
}

static cd_status python_check(cd_store *store, const cd_bytes *keys, size_t count, bool *all_p, const cd_patience *patience)
{
    (void)patience;
    PyGILState_STATE gil = PyGILState_Ensure();
    int64_t value = 0;
    cd_status status = number_out(store, "check", Py_BuildValue("(N)", list_of(keys, count, true)), &value);
    if (status == CD_OK)
        *all_p = value != 0;
    PyGILState_Release(gil);
    return status;
}

static cd_status python_delete(cd_store *store, cd_bytes key, bool *existed_p, const cd_patience *patience)
{
    (void)patience;
    PyGILState_STATE gil = PyGILState_Ensure();
    int64_t value = 0;
    cd_status status = number_out(store, "delete_key", Py_BuildValue("(N)", text_of(key)), &value);
    if (status == CD_OK)
        *existed_p = value != 0;
    PyGILState_Release(gil);
    return status;
}

static cd_status python_num_keys(cd_store *store, int64_t *count_p, const cd_patience *patience)
{
    (void)patience;
    PyGILState_STATE gil = PyGILState_Ensure();
    cd_status status = number_out(store, "num_keys", PyTuple_New(0), count_p);
    PyGILState_Release(gil);
    return status;
}

static cd_status python_list_keys(cd_store *store, cd_buffer **out_keys, size_t *count_p, const cd_patience *patience)
{
    (void)patience;
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *result = NULL, *fast = NULL;
    cd_status status = call(store, "list_keys", PyTuple_New(0), &result);
    if (status == CD_OK && !(fast = PySequence_Fast(result, "list_keys of the store gave no list")))
        status = fail_from_exception("list_keys");
    size_t count = status == CD_OK ? (size_t)PySequence_Fast_GET_SIZE(fast) : 0, done = 0;
    cd_buffer *keys = calloc(count + 1, sizeof *keys);
    if (!keys)
        status = cd_fail(CD_NO_MEMORY, "no memory for the list of keys");
    while (status == CD_OK && done < count) {
        status = bytes_out("list_keys", PySequence_Fast_GET_ITEM(fast, (Py_ssize_t)done), &keys[done]);
        done += status == CD_OK;
    }
    Py_XDECREF(fast);
    Py_XDECREF(result);
    PyGILState_Release(gil);
    if (status != CD_OK) {
        cd_buffers_free(keys, done);
        return status;
    }
    *out_keys = keys;
    *count_p = count;
    return CD_OK;
}

static void python_close(cd_store *store)
{
    (void)store; /* the object is the user's */
}

static void python_free(cd_store *store)
{
    if (!store)
        return;
    if (Py_IsInitialized()) {
        PyGILState_STATE gil = PyGILState_Ensure();
        Py_DECREF(((adapter *)store)->object);
        PyGILState_Release(gil);
    }
    free(store);
}

/* A store with a server has the attribute that torch's TCPStore has. */
static bool python_local_address(cd_store *store, char *out, size_t bytes)
{
    char host[256] = "";
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *found = PyObject_GetAttrString(((adapter *)store)->object, "host");
    const char *text = found && PyUnicode_Check(found) ? PyUnicode_AsUTF8(found) : NULL;
    if (text && strlen(text) < sizeof host)
        memcpy(host, text, strlen(text) + 1);
    Py_XDECREF(found);
    PyErr_Clear();
    PyGILState_Release(gil);
    return host[0] && cd_addr_local_for(host, 1, out, bytes) == CD_OK;
}

static const cd_store_ops python_ops = {
    .name = "python",
    .set = python_set,
    .get = python_get,
    .add = python_add,
    .compare_set = python_compare_set,
    .check = python_check,
    .wait = python_wait,
    .delete_key = python_delete,
    .num_keys = python_num_keys,
    .append = cd_store_append_by_swap,
    .multi_get = cd_store_multi_get_each,
    .multi_set = cd_store_multi_set_each,
    .list_keys = python_list_keys,
    .local_address = python_local_address,
    .close = python_close,
    .free = python_free,
};

int cd_py_store_adapt(PyObject *object, cd_store **out)
{
    static const char *const needed[] = {"set", "get", "add", "wait"};
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++)
        if (!PyObject_HasAttrString(object, needed[i])) {
            PyErr_Format(PyExc_TypeError, "store must be a Store, or have its methods set, get, add and wait; %s has no %s",
                         Py_TYPE(object)->tp_name, needed[i]);
            return -1;
        }
    adapter *made = calloc(1, sizeof *made);
    if (!made) {
        PyErr_NoMemory();
        return -1;
    }
    cd_store_init(&made->base, &python_ops);
    made->object = Py_NewRef(object);
    *out = &made->base;
    return 0;
}

