/* The methods of Store: arguments in, one call of the C store, its answer out. */
#include "py/args.h"
#include "py/errors.h"
#include "py/glue.h"
#include "py/group.h"
#include "py/store_impl.h"

#include "group/recorder.h"
#include "store/kinds.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- arguments and answers ---- */

static int bytes_of(PyObject *value, const char *name, cd_bytes *out)
{
    Py_ssize_t bytes;
    if (PyUnicode_Check(value)) {
        out->data = PyUnicode_AsUTF8AndSize(value, &bytes);
        if (!out->data) {
            return -1;
        }
    } else if (PyBytes_Check(value)) {
        out->data = PyBytes_AS_STRING(value);
        bytes = PyBytes_GET_SIZE(value);
    } else {
        PyErr_Format(PyExc_TypeError, "%s must be str or bytes, not %s", name, Py_TYPE(value)->tp_name);
        return -1;
    }
    out->bytes = (size_t)bytes;
    return 0;
}

/* A value: as bytes_of, or a buffer (bytearray, memoryview), whose bytes are copied. *kept_p holds them: a new reference, NULL
 * on failure. */
static int value_of(PyObject *value, const char *name, PyObject **kept_p, cd_bytes *out)
{
    bool is_buffer = !PyBytes_Check(value) && PyObject_CheckBuffer(value);
    *kept_p = is_buffer ? PyBytes_FromObject(value) : Py_NewRef(value);
    if (!*kept_p)
        return -1;
    if (bytes_of(*kept_p, name, out) == 0)
        return 0;
    Py_CLEAR(*kept_p);
    return -1;
}

/* An array of the items of a sequence of str, bytes or buffers; *fast_p keeps them alive. Free both. */
static int bytes_list_of(PyObject *sequence, const char *name, PyObject **fast_p, cd_bytes **out, size_t *count_p)
{
    if (PyUnicode_Check(sequence) || PyBytes_Check(sequence)) {
        PyErr_Format(PyExc_TypeError, "%s must be a list of str, not %s", name, Py_TYPE(sequence)->tp_name);
        return -1;
    }
    PyObject *fast = PySequence_List(sequence);
    if (!fast)
        return -1;
    Py_ssize_t count = PyList_GET_SIZE(fast);
    cd_bytes *list = PyMem_Calloc((size_t)count + 1, sizeof *list);
    if (!list)
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; list && i < count; i++) {
        PyObject *kept;
        if (value_of(PyList_GET_ITEM(fast, i), name, &kept, &list[i]) < 0 || PyList_SetItem(fast, i, kept) < 0) {
            PyMem_Free(list);
            list = NULL;
        }
    }
    if (!list) {
        Py_DECREF(fast);
        return -1;
    }
    *fast_p = fast;
    *out = list;
    *count_p = (size_t)count;
    return 0;
}

static PyObject *take_buffer(cd_buffer *buffer)
{
    PyObject *result = PyBytes_FromStringAndSize(buffer->data, (Py_ssize_t)buffer->bytes);
    cd_buffer_free(buffer);
    return result;
}

cd_store *cd_py_store_of(PyObject *self)
{
    cd_store *store = ((cd_py_store *)self)->store;
    if (!store)
        PyErr_Format(PyExc_NotImplementedError, "%s does not implement this method of Store", Py_TYPE(self)->tp_name);
    return store;
}

/* The store that has the timeout: below all prefixes. */
static cd_store *bottom_of(cd_store *store)
{
    for (cd_store *under; (under = cd_prefix_store_under(store));)
        store = under;
    return store;
}

/* A wait in the store for what a lost rank was to write would last to its deadline: where there is a process group, the loss
 * of one of its ranks ends waits of more than this. What is there already comes sooner. */
#define LOSS_ENDS_NS (300 * CD_NS_PER_MS)

typedef struct {
    cd_py_wait waiting;
    cd_group *group; /* the default one, or NULL; ours until the wait has ended */
    uint64_t began_ns;
    bool was_well;  /* the group, when the wait began */
    cd_error lost;  /* code CD_OK: nobody */
} store_wait;

static cd_status wait_idle(void *ctx)
{
    store_wait *wait = ctx;
    if (wait->group && cd_now_ns() - wait->began_ns > LOSS_ENDS_NS && cd_group_status(wait->group) == CD_PEER_LOST) {
        wait->lost = *cd_last_error();
        return cd_fail(CD_ABORTED, "%s", wait->lost.text); /* to the store CD_PEER_LOST means that the server is lost */
    }
    return cd_py_wait_idle(&wait->waiting);
}

static cd_patience begin_wait(store_wait *wait, PyObject *self, uint64_t ns)
{
    cd_py_state *state = cd_py_state_of_type(Py_TYPE(self));
    cd_group *group = state && state->default_group ? ((cd_py_group *)state->default_group)->group : NULL;
    *wait = (store_wait){.group = group ? cd_group_retain(group) : NULL, .began_ns = cd_now_ns()};
    wait->was_well = group && cd_group_status(group) == CD_OK;
    cd_patience patience = cd_py_wait_begin(&wait->waiting, cd_py_deadline(ns), 1);
    patience.idle = wait_idle;
    patience.idle_ctx = wait;
    return patience;
}

/* " (ranks [1, 2] have left the process group)" behind the text of a key that did not come. */
static void name_departed(cd_group *group)
{
    char list[128] = "";
    size_t used = 0;
    for (int r = 0; r < cd_group_size(group) && used < sizeof list - 16; r++)
        if (cd_world_is_gone(cd_group_world(group), r))
            used += (size_t)snprintf(list + used, sizeof list - used, "%s%d", used ? ", " : "", r);
    if (used) {
        cd_error why = *cd_last_error();
        cd_fail_rank(why.code, cd_world_first_gone(cd_group_world(group)), "%s; ranks [%s] have left the process group",
                     why.text, list);
    }
}

/* A store that is lost may have died with the rank that hosts it, of which the group is told in the same instant. */
static void await_loss_of_host(store_wait *wait)
{
    if (!wait->waiting.detached)
        cd_py_wait_detach(&wait->waiting);
    cd_error why = *cd_last_error();
    cd_deadline end = cd_deadline_after_ns(LOSS_ENDS_NS);
    cd_status cause;
    while ((cause = cd_group_status(wait->group)) == CD_OK && !cd_deadline_passed(end))
        cd_sleep_ns(CD_NS_PER_MS);
    if (cause == CD_PEER_LOST)
        wait->lost = *cd_last_error();
    cd_fail_with(&why);
}

static cd_status end_wait(store_wait *wait, cd_status status)
{
    if (status == CD_STORE && wait->was_well)
        await_loss_of_host(wait);
    cd_py_wait_end(&wait->waiting);
    if (wait->lost.code != CD_OK && status != CD_OK)
        status = cd_fail_with(&wait->lost);
    else if (status == CD_STORE_TIMEOUT && wait->group)
        name_departed(wait->group);
    if (wait->group)
        cd_group_release(wait->group);
    return status;
}

/* `call` with the store's own timeout or the one given; statements around it see `store` and `patience`. */
#define RUN(timeout, call)                                                                              \
    do {                                                                                                \
        uint64_t ns = atomic_load_explicit(&bottom_of(store)->timeout_ns, memory_order_relaxed);         \
        if (cd_py_timeout_ns(timeout, ns, &ns) < 0)                                                     \
            break;                                                                                      \
        store_wait waiting;                                                                             \
        cd_patience patience = begin_wait(&waiting, self, ns);                                          \
        status = end_wait(&waiting, (call));                                                            \
        if (status != CD_OK)                                                                            \
            cd_py_raise_from(cd_py_state_of_type(Py_TYPE(self)), status, __func__);                     \
    } while (0)

#define PARSE(count_, required_, ...)                                                                   \
    static const char *const parameter_names[] = {__VA_ARGS__};                                         \
    const cd_py_signature signature = {__func__, parameter_names, count_, required_};                   \
    PyObject *a[count_];                                                                                \
    cd_store *store = cd_py_store_of(self);                                                                   \
    cd_status status = CD_BAD_ARGUMENT;                                                                 \
    if (!store || cd_py_args(&signature, args, given, names, a) < 0)                                    \
        return NULL

#define METHOD(name) static PyObject *name(PyObject *self, PyObject *const *args, Py_ssize_t given, PyObject *names)

/* ---- methods ---- */

METHOD(set)
{
    PARSE(2, 2, "key", "value");
    cd_bytes key, value;
    PyObject *kept;
    if (bytes_of(a[0], "key", &key) < 0 || value_of(a[1], "value", &kept, &value) < 0)
        return NULL;
    RUN(NULL, store->ops->set(store, key, value, &patience));
    Py_DECREF(kept);
    return status == CD_OK ? Py_NewRef(Py_None) : NULL;
}

METHOD(get)
{
    PARSE(1, 1, "key");
    cd_bytes key;
    cd_buffer out = {0};
    if (bytes_of(a[0], "key", &key) < 0)
        return NULL;
    RUN(NULL, store->ops->get(store, key, &out, &patience));
    return status == CD_OK ? take_buffer(&out) : NULL;
}

METHOD(add)
{
    PARSE(2, 2, "key", "value");
    cd_bytes key;
    int64_t sum = 0;
    long long delta;
    PyObject *number = PyNumber_Index(a[1]);
    if (!number)
        return NULL;
    delta = PyLong_AsLongLong(number);
    Py_DECREF(number);
    if ((delta == -1 && PyErr_Occurred()) || bytes_of(a[0], "key", &key) < 0)
        return NULL;
    RUN(NULL, store->ops->add(store, key, delta, &sum, &patience));
    return status == CD_OK ? PyLong_FromLongLong(sum) : NULL;
}

METHOD(compare_set)
{
    PARSE(3, 3, "key", "expected_value", "desired_value");
    cd_bytes key, expected, desired;
    cd_buffer out = {0};
    PyObject *old, *new;
    if (bytes_of(a[0], "key", &key) < 0 || value_of(a[1], "expected_value", &old, &expected) < 0)
        return NULL;
    if (value_of(a[2], "desired_value", &new, &desired) == 0) {
        RUN(NULL, store->ops->compare_set(store, key, expected, desired, &out, &patience));
        Py_DECREF(new);
    }
    Py_DECREF(old);
    return status == CD_OK ? take_buffer(&out) : NULL;
}

METHOD(check)
{
    PARSE(1, 1, "keys");
    PyObject *fast;
    cd_bytes *keys;
    size_t count;
    bool all = false;
    if (bytes_list_of(a[0], "keys", &fast, &keys, &count) < 0)
        return NULL;
    RUN(NULL, store->ops->check(store, keys, count, &all, &patience));
    PyMem_Free(keys);
    Py_DECREF(fast);
    return status == CD_OK ? PyBool_FromLong(all) : NULL;
}

METHOD(wait)
{
    PARSE(2, 1, "keys", "timeout");
    PyObject *fast;
    cd_bytes *keys;
    size_t count;
    if (bytes_list_of(a[0], "keys", &fast, &keys, &count) < 0)
        return NULL;
    RUN(a[1], store->ops->wait(store, keys, count, &patience));
    PyMem_Free(keys);
    Py_DECREF(fast);
    return status == CD_OK ? Py_NewRef(Py_None) : NULL;
}

METHOD(delete_key)
{
    PARSE(1, 1, "key");
    cd_bytes key;
    bool existed = false;
    if (bytes_of(a[0], "key", &key) < 0)
        return NULL;
    RUN(NULL, store->ops->delete_key(store, key, &existed, &patience));
    return status == CD_OK ? PyBool_FromLong(existed) : NULL;
}

static PyObject *num_keys(PyObject *self, PyObject *unused)
{
    (void)unused;
    cd_store *store = cd_py_store_of(self);
    cd_status status = CD_BAD_ARGUMENT;
    int64_t count = 0;
    if (!store)
        return NULL;
    RUN(NULL, store->ops->num_keys(store, &count, &patience));
    return status == CD_OK ? PyLong_FromLongLong(count) : NULL;
}

METHOD(append)
{
    PARSE(2, 2, "key", "value");
    cd_bytes key, value;
    PyObject *kept;
    if (bytes_of(a[0], "key", &key) < 0 || value_of(a[1], "value", &kept, &value) < 0)
        return NULL;
    RUN(NULL, store->ops->append(store, key, value, &patience));
    Py_DECREF(kept);
    return status == CD_OK ? Py_NewRef(Py_None) : NULL;
}

METHOD(multi_get)
{
    PARSE(1, 1, "keys");
    PyObject *fast, *result = NULL;
    cd_bytes *keys;
    size_t count;
    if (bytes_list_of(a[0], "keys", &fast, &keys, &count) < 0)
        return NULL;
    cd_buffer *out = calloc(count + 1, sizeof *out);
    if (!out)
        PyErr_NoMemory();
    else
        RUN(NULL, store->ops->multi_get(store, keys, count, out, &patience));
    if (status == CD_OK)
        result = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; result && i < count; i++) {
        PyObject *item = take_buffer(&out[i]);
        if (item)
            PyList_SET_ITEM(result, (Py_ssize_t)i, item);
        else
            Py_CLEAR(result);
    }
    cd_buffers_free(out, count);
    PyMem_Free(keys);
    Py_DECREF(fast);
    return result;
}

METHOD(multi_set)
{
    PARSE(2, 2, "keys", "values");
    PyObject *key_items, *value_items;
    cd_bytes *keys, *values;
    size_t count, value_count;
    if (bytes_list_of(a[0], "keys", &key_items, &keys, &count) < 0)
        return NULL;
    if (bytes_list_of(a[1], "values", &value_items, &values, &value_count) == 0) {
        if (count != value_count) {
            status = cd_fail(CD_STORE, "multiSet keys and values vectors must be of same size");
            cd_py_raise_from(cd_py_state_of_type(Py_TYPE(self)), status, __func__);
        } else {
            RUN(NULL, store->ops->multi_set(store, keys, values, count, &patience));
        }
        PyMem_Free(values);
        Py_DECREF(value_items);
    }
    PyMem_Free(keys);
    Py_DECREF(key_items);
    return status == CD_OK ? Py_NewRef(Py_None) : NULL;
}

static bool has_queues(PyObject *self, const cd_store *store)
{
    if (!store->ops->queue_push)
        PyErr_Format(PyExc_NotImplementedError, "%s has no queues; TCPStore and HashStore do", Py_TYPE(self)->tp_name);
    return store->ops->queue_push != NULL;
}

METHOD(queue_push)
{
    PARSE(2, 2, "key", "value");
    cd_bytes key, value;
    PyObject *kept;
    if (!has_queues(self, store) || bytes_of(a[0], "key", &key) < 0 || value_of(a[1], "value", &kept, &value) < 0)
        return NULL;
    RUN(NULL, store->ops->queue_push(store, key, value, &patience));
    Py_DECREF(kept);
    return status == CD_OK ? Py_NewRef(Py_None) : NULL;
}

METHOD(queue_pop)
{
    PARSE(2, 1, "key", "block");
    cd_bytes key;
    cd_buffer out = {0};
    int block = a[1] ? PyObject_IsTrue(a[1]) : 1;
    if (block < 0 || !has_queues(self, store) || bytes_of(a[0], "key", &key) < 0)
        return NULL;
    RUN(NULL, store->ops->queue_pop(store, key, block != 0, &out, &patience));
    return status == CD_OK ? take_buffer(&out) : NULL;
}

METHOD(queue_len)
{
    PARSE(1, 1, "key");
    cd_bytes key;
    int64_t count = 0;
    if (!has_queues(self, store) || bytes_of(a[0], "key", &key) < 0)
        return NULL;
    RUN(NULL, store->ops->queue_len(store, key, &count, &patience));
    return status == CD_OK ? PyLong_FromLongLong(count) : NULL;
}

static PyObject *list_keys(PyObject *self, PyObject *unused)
{
    (void)unused;
    cd_store *store = cd_py_store_of(self);
    cd_status status = CD_BAD_ARGUMENT;
    cd_buffer *keys = NULL;
    size_t count = 0;
    if (!store)
        return NULL;
    RUN(NULL, store->ops->list_keys(store, &keys, &count, &patience));
    if (status != CD_OK)
        return NULL;
    PyObject *result = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; result && i < count; i++) {
        PyObject *key = PyUnicode_DecodeUTF8(keys[i].data, (Py_ssize_t)keys[i].bytes, "surrogateescape");
        if (key)
            PyList_SET_ITEM(result, (Py_ssize_t)i, key);
        else
            Py_CLEAR(result);
    }
    cd_buffers_free(keys, count);
    return result;
}

METHOD(barrier)
{
    PARSE(3, 2, "key", "world_size", "timeout");
    cd_bytes key;
    int world;
    if (bytes_of(a[0], "key", &key) < 0 || cd_py_int(a[1], "world_size", &world) < 0)
        return NULL;
    RUN(a[2], cd_store_barrier(store, key, world, &patience));
    return status == CD_OK ? Py_NewRef(Py_None) : NULL;
}

static PyObject *has_extended_api(PyObject *self, PyObject *unused)
{
    (void)unused;
    cd_store *store = cd_py_store_of(self);
    if (!store)
        return NULL;
    return PyBool_FromLong(strcmp(bottom_of(store)->ops->name, "tcp") == 0 || strcmp(bottom_of(store)->ops->name, "hash") == 0);
}

static PyObject *set_timeout(PyObject *self, PyObject *timeout)
{
    cd_store *store = cd_py_store_of(self);
    uint64_t ns;
    if (!store || cd_py_timeout_ns(timeout, 0, &ns) < 0)
        return NULL;
    atomic_store_explicit(&bottom_of(store)->timeout_ns, ns, memory_order_relaxed);
    Py_RETURN_NONE;
}

static PyObject *get_timeout(PyObject *self, void *unused)
{
    (void)unused;
    cd_store *store = cd_py_store_of(self);
    PyObject *module = store ? PyImport_ImportModule("datetime") : NULL;
    if (!module)
        return NULL;
    uint64_t ns = atomic_load_explicit(&bottom_of(store)->timeout_ns, memory_order_relaxed);
    PyObject *delta = ns == UINT64_MAX ? PyObject_GetAttrString(module, "timedelta") : NULL;
    PyObject *result = delta ? PyObject_GetAttrString(delta, "max") : NULL;
    if (ns != UINT64_MAX)
        result = PyObject_CallMethod(module, "timedelta", "id", 0, (double)ns / 1e9);
    Py_XDECREF(delta);
    Py_DECREF(module);
    return result;
}

#define FAST(name, function, doc) {name, (PyCFunction)(void (*)(void))function, METH_FASTCALL | METH_KEYWORDS, doc}

PyMethodDef cd_py_store_methods[] = {
    FAST("set", set,
         "set($self, key, value)\n--\n\nStores str, bytes or the bytes of a buffer under a key and wakes those who wait for it."),
    FAST("get", get,
         "get($self, key)\n--\n\nThe value as bytes; waits for the key up to the store's timeout."),
    FAST("add", add,
         "add($self, key, value)\n--\n\nAdds to a decimal counter (missing: 0) and returns the sum."),
    FAST("compare_set", compare_set,
         "compare_set($self, key, expected_value, desired_value)\n--\n\n"
         "Stores desired_value if the key has expected_value (\"\": or is missing). Returns, as bytes, what "
         "is stored then;\n"
         "expected_value for a missing key that was expected to have a value."),
    FAST("check", check, "check($self, keys)\n--\n\nTrue if all keys are there; does not wait."),
    FAST("wait", wait,
         "wait($self, keys, timeout=None)\n--\n\n"
         "Waits until all keys are there. timeout: timedelta or seconds, for this call only; 0 looks once."),
    FAST("delete_key", delete_key,
         "delete_key($self, key)\n--\n\nTrue if the key was there (FileStore: always True)."),
    {"num_keys", num_keys, METH_NOARGS,
     "num_keys($self)\n--\n\nNumber of keys, with those that the store keeps for itself."},
    FAST("append", append, "append($self, key, value)\n--\n\nAppends to the value; a missing key is made."),
    FAST("multi_get", multi_get,
         "multi_get($self, keys)\n--\n\nThe values as a list of bytes; waits for all keys."),
    FAST("multi_set", multi_set,
         "multi_set($self, keys, values)\n--\n\nset for many keys, in one message where the store can."),
    FAST("queue_push", queue_push,
         "queue_push($self, key, value)\n--\n\nAppends to the queue of that name (TCPStore, HashStore)."),
    FAST("queue_pop", queue_pop,
         "queue_pop($self, key, block=True)\n--\n\nThe oldest entry as bytes; waits for one, or raises "
         "QueueEmptyError."),
    FAST("queue_len", queue_len, "queue_len($self, key)\n--\n\nNumber of entries of a queue."),
    {"list_keys", list_keys, METH_NOARGS, "list_keys($self)\n--\n\nThe keys, in no order, as a list of str."},
    FAST("barrier", barrier,
         "barrier($self, key, world_size, timeout=None)\n--\n\nWaits until world_size callers are here; may "
         "be used again."),
    {"has_extended_api", has_extended_api, METH_NOARGS,
     "has_extended_api($self)\n--\n\nWhether append, multi_get and multi_set are single messages."},
    {"set_timeout", set_timeout, METH_O,
     "set_timeout($self, timeout)\n--\n\ntimedelta or seconds, for calls without their own."},
    {NULL, NULL, 0, NULL},
};

PyGetSetDef cd_py_store_getset[] = {
    {"timeout", get_timeout, NULL, "The store's timeout as a timedelta (300 s at first).", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
