#include "py/store.h"

#include "py/args.h"
#include "py/errors.h"
#include "py/glue.h"

#include "base/knob.h"
#include "store/kinds.h"
#include "store/server.h"

#include <string.h>

/* One server of this process; shared by the TCPStores of a port where they ask for multi_tenant. Guarded by the GIL. */
typedef struct shared_server {
    struct shared_server *next;
    cd_server *server;
    int refs;
    bool listed;
} shared_server;

typedef struct {
    PyObject_HEAD
    cd_store *store;      /* NULL: a subclass in Python that brings its own methods */
    shared_server *server;
    PyObject *under;      /* PrefixStore: the object it was given */
    PyObject *host, *path;
    int port;
    char use_libuv;
} store_object;

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

/* An array of the items of a sequence of str or bytes; *fast_p keeps them alive. Free both. */
static int bytes_list_of(PyObject *sequence, const char *name, PyObject **fast_p, cd_bytes **out, size_t *count_p)
{
    if (PyUnicode_Check(sequence) || PyBytes_Check(sequence)) {
        PyErr_Format(PyExc_TypeError, "%s must be a list of str, not %s", name, Py_TYPE(sequence)->tp_name);
        return -1;
    }
    PyObject *fast = PySequence_Tuple(sequence);
    if (!fast)
        return -1;
    Py_ssize_t count = PyTuple_GET_SIZE(fast);
    cd_bytes *list = PyMem_Calloc((size_t)count + 1, sizeof *list);
    if (!list)
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; list && i < count; i++)
        if (bytes_of(PyTuple_GET_ITEM(fast, i), name, &list[i]) < 0) {
            PyMem_Free(list);
            list = NULL;
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

static cd_store *store_of(PyObject *self)
{
    cd_store *store = ((store_object *)self)->store;
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

/* `call` with the store's own timeout or the one given; statements around it see `store` and `patience`. */
#define RUN(timeout, call)                                                                              \
    do {                                                                                                \
        uint64_t ns = atomic_load_explicit(&bottom_of(store)->timeout_ns, memory_order_relaxed);         \
        if (cd_py_timeout_ns(timeout, ns, &ns) < 0)                                                     \
            break;                                                                                      \
        cd_py_wait waiting;                                                                             \
        cd_patience patience = cd_py_wait_begin(&waiting, cd_py_deadline(ns), 1);                        \
        status = (call);                                                                                \
        cd_py_wait_end(&waiting);                                                                       \
        if (status != CD_OK)                                                                            \
            cd_py_raise(cd_py_state_of_type(Py_TYPE(self)), status);                                    \
    } while (0)

#define PARSE(count_, required_, ...)                                                                   \
    static const char *const parameter_names[] = {__VA_ARGS__};                                         \
    const cd_py_signature signature = {__func__, parameter_names, count_, required_};                   \
    PyObject *a[count_];                                                                                \
    cd_store *store = store_of(self);                                                                   \
    cd_status status = CD_BAD_ARGUMENT;                                                                 \
    if (!store || cd_py_args(&signature, args, given, names, a) < 0)                                    \
        return NULL

#define METHOD(name) static PyObject *name(PyObject *self, PyObject *const *args, Py_ssize_t given, PyObject *names)

/* ---- methods ---- */

METHOD(set)
{
    PARSE(2, 2, "key", "value");
    cd_bytes key, value;
    if (bytes_of(a[0], "key", &key) < 0 || bytes_of(a[1], "value", &value) < 0)
        return NULL;
    RUN(NULL, store->ops->set(store, key, value, &patience));
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
    if (bytes_of(a[0], "key", &key) < 0 || bytes_of(a[1], "expected_value", &expected) < 0 ||
        bytes_of(a[2], "desired_value", &desired) < 0)
        return NULL;
    RUN(NULL, store->ops->compare_set(store, key, expected, desired, &out, &patience));
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
    cd_store *store = store_of(self);
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
    if (bytes_of(a[0], "key", &key) < 0 || bytes_of(a[1], "value", &value) < 0)
        return NULL;
    RUN(NULL, store->ops->append(store, key, value, &patience));
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
            cd_py_raise(cd_py_state_of_type(Py_TYPE(self)), status);
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
    if (!has_queues(self, store) || bytes_of(a[0], "key", &key) < 0 || bytes_of(a[1], "value", &value) < 0)
        return NULL;
    RUN(NULL, store->ops->queue_push(store, key, value, &patience));
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
    cd_store *store = store_of(self);
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
    cd_store *store = store_of(self);
    if (!store)
        return NULL;
    return PyBool_FromLong(strcmp(bottom_of(store)->ops->name, "tcp") == 0 || strcmp(bottom_of(store)->ops->name, "hash") == 0);
}

static PyObject *set_timeout(PyObject *self, PyObject *timeout)
{
    cd_store *store = store_of(self);
    uint64_t ns;
    if (!store || cd_py_timeout_ns(timeout, 0, &ns) < 0)
        return NULL;
    atomic_store_explicit(&bottom_of(store)->timeout_ns, ns, memory_order_relaxed);
    Py_RETURN_NONE;
}

static PyObject *get_timeout(PyObject *self, void *unused)
{
    (void)unused;
    cd_store *store = store_of(self);
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

static PyMethodDef store_methods[] = {
    FAST("set", set, "set($self, key, value)\n--\n\nStores str or bytes under a key and wakes those who wait for it."),
    FAST("get", get, "get($self, key)\n--\n\nThe value as bytes; waits for the key up to the store's timeout."),
    FAST("add", add, "add($self, key, value)\n--\n\nAdds to a decimal counter (missing: 0) and returns the sum."),
    FAST("compare_set", compare_set,
         "compare_set($self, key, expected_value, desired_value)\n--\n\n"
         "Stores desired_value if the key has expected_value (\"\": or is missing). Returns, as bytes, what is stored then;\n"
         "expected_value for a missing key that was expected to have a value."),
    FAST("check", check, "check($self, keys)\n--\n\nTrue if all keys are there; does not wait."),
    FAST("wait", wait,
         "wait($self, keys, timeout=None)\n--\n\n"
         "Waits until all keys are there. timeout: timedelta or seconds, for this call only; 0 looks once."),
    FAST("delete_key", delete_key, "delete_key($self, key)\n--\n\nTrue if the key was there (FileStore: always True)."),
    {"num_keys", num_keys, METH_NOARGS, "num_keys($self)\n--\n\nNumber of keys, with those that the store keeps for itself."},
    FAST("append", append, "append($self, key, value)\n--\n\nAppends to the value; a missing key is made."),
    FAST("multi_get", multi_get, "multi_get($self, keys)\n--\n\nThe values as a list of bytes; waits for all keys."),
    FAST("multi_set", multi_set, "multi_set($self, keys, values)\n--\n\nset for many keys, in one message where the store can."),
    FAST("queue_push", queue_push, "queue_push($self, key, value)\n--\n\nAppends to the queue of that name (TCPStore, HashStore)."),
    FAST("queue_pop", queue_pop,
         "queue_pop($self, key, block=True)\n--\n\nThe oldest entry as bytes; waits for one, or raises QueueEmptyError."),
    FAST("queue_len", queue_len, "queue_len($self, key)\n--\n\nNumber of entries of a queue."),
    {"list_keys", list_keys, METH_NOARGS, "list_keys($self)\n--\n\nThe keys, in no order, as a list of str."},
    FAST("barrier", barrier,
         "barrier($self, key, world_size, timeout=None)\n--\n\nWaits until world_size callers are here; may be used again."),
    {"has_extended_api", has_extended_api, METH_NOARGS,
     "has_extended_api($self)\n--\n\nWhether append, multi_get and multi_set are single messages."},
    {"set_timeout", set_timeout, METH_O, "set_timeout($self, timeout)\n--\n\ntimedelta or seconds, for calls without their own."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef store_getset[] = {
    {"timeout", get_timeout, NULL, "The store's timeout as a timedelta (300 s at first).", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

/* ---- life ---- */

static void leave_server(cd_py_state *state, shared_server *shared)
{
    if (!shared || --shared->refs)
        return;
    shared_server **link = (shared_server **)&state->store_servers;
    while (shared->listed && *link != shared)
        link = &(*link)->next;
    if (shared->listed)
        *link = shared->next;
    cd_server *server = shared->server;
    PyMem_Free(shared);
    Py_BEGIN_ALLOW_THREADS
    cd_server_stop(server);
    Py_END_ALLOW_THREADS
}

static int store_traverse(PyObject *object, visitproc visit, void *arg)
{
    store_object *self = (store_object *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->under);
    return 0;
}

static int store_clear(PyObject *object)
{
    Py_CLEAR(((store_object *)object)->under);
    return 0;
}

static void store_dealloc(PyObject *object)
{
    store_object *self = (store_object *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    PyObject *type_of_error, *value, *trace;
    PyErr_Fetch(&type_of_error, &value, &trace);
    Py_CLEAR(self->under);
    Py_CLEAR(self->host);
    Py_CLEAR(self->path);
    cd_store *store = self->store;
    self->store = NULL;
    Py_BEGIN_ALLOW_THREADS
    cd_store_release(store);
    Py_END_ALLOW_THREADS
    if (self->server) {
        cd_py_state *state = cd_py_state_of_type(type);
        if (state)
            leave_server(state, self->server);
    }
    PyErr_Restore(type_of_error, value, trace);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyObject *store_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    (void)args;
    (void)keywords;
    return type->tp_alloc(type, 0);
}

static int already_made(store_object *self)
{
    if (self->store)
        PyErr_SetString(PyExc_RuntimeError, "the store was made already");
    return self->store != NULL;
}

/* ---- TCPStore ---- */

static shared_server *find_shared(cd_py_state *state, int port)
{
    shared_server *shared = state->store_servers;
    while (shared && cd_server_port(shared->server) != port)
        shared = shared->next;
    return port ? shared : NULL;
}

static int start_server(store_object *self, cd_py_state *state, const char *host, int port, int listen_fd, bool multi_tenant,
                        const cd_secret *secret)
{
    shared_server *shared = multi_tenant ? find_shared(state, port) : NULL;
    if (!shared) {
        const char *bind = cd_knob("CDIST_STORE_BIND");
        cd_server_options options = {
            .host = *bind ? bind : host, .port = (uint16_t)port, .listen_fd = listen_fd, .secret = *secret};
        cd_server *server = NULL;
        cd_status status;
        Py_BEGIN_ALLOW_THREADS
        status = cd_server_start(&options, &server);
        Py_END_ALLOW_THREADS
        if (status == CD_NETWORK)
            cd_fail_prefix("The server socket has failed to listen on any local network address. "
                           "(CDIST_STORE_BIND names another address to listen on.) ");
        if (status != CD_OK) {
            cd_py_raise(state, status);
            return -1;
        }
        shared = PyMem_Calloc(1, sizeof *shared);
        if (!shared) {
            cd_server_stop(server);
            PyErr_NoMemory();
            return -1;
        }
        shared->server = server;
        if (multi_tenant) {
            shared->listed = true;
            shared->next = state->store_servers;
            state->store_servers = shared;
        }
    }
    shared->refs++;
    self->server = shared;
    self->port = cd_server_port(shared->server);
    return 0;
}

static int open_client(store_object *self, cd_py_state *state, const char *host, const cd_secret *secret, long world, bool is_master,
                       bool wait_all, uint64_t ns)
{
    cd_py_wait waiting;
    cd_patience patience = cd_py_wait_begin(&waiting, cd_py_deadline(ns), 1);
    cd_store *store = NULL;
    cd_py_wait_detach(&waiting);
    cd_status status = cd_tcp_store_open(host, (uint16_t)self->port, secret, &patience, &store);
    if (status == CD_OK && world > 0 && wait_all)
        status = cd_tcp_store_join(store, world, is_master, &patience);
    if (status != CD_OK && store) {
        cd_store_release(store);
        store = NULL;
    }
    cd_py_wait_end(&waiting);
    if (status != CD_OK) {
        cd_py_raise(state, status);
        return -1;
    }
    atomic_store_explicit(&store->timeout_ns, ns, memory_order_relaxed);
    self->store = store;
    return 0;
}

static int number_or(PyObject *value, const char *name, int fallback, int *out)
{
    *out = fallback;
    return cd_py_is_given(value) ? cd_py_int(value, name, out) : 0;
}

/* The launcher's store: torchrun's, or cdistrun's, which torch's clients use too. It speaks the plain protocol, also where the
 * job has a secret; that is for the connections between ranks then. */
static bool is_agents_store(const char *host, int port)
{
    const char *used = getenv("TORCHELASTIC_USE_AGENT_STORE");
    const char *address = getenv("MASTER_ADDR"), *number = getenv("MASTER_PORT");
    return used && strcmp(used, "True") == 0 && address && strcmp(address, host) == 0 && number && atoi(number) == port;
}

static int tcp_init(PyObject *object, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"host_name", "port", "world_size", "is_master", "timeout", "wait_for_workers", "multi_tenant",
                            "master_listen_fd", "use_libuv", NULL};
    store_object *self = (store_object *)object;
    cd_py_state *state = cd_py_state_of_type(Py_TYPE(object));
    PyObject *host, *world_object = NULL, *timeout = NULL, *fd_object = NULL;
    int port, is_master = 0, wait_all = 1, multi_tenant = 0, use_libuv = 1, world, listen_fd;
    uint64_t ns;
    if (!state || already_made(self) ||
        !PyArg_ParseTupleAndKeywords(args, keywords, "Ui|OpOppOp:TCPStore", names, &host, &port, &world_object, &is_master, &timeout,
                                     &wait_all, &multi_tenant, &fd_object, &use_libuv) ||
        cd_py_timeout_ns(timeout, 300 * CD_NS_PER_S, &ns) < 0 || number_or(world_object, "world_size", -1, &world) < 0 ||
        number_or(fd_object, "master_listen_fd", -1, &listen_fd) < 0)
        return -1;
    if (world == 0) {
        PyErr_SetString(PyExc_ValueError, "TCPStore world size cannot be 0");
        return -1;
    }
    if (port < 0 || port > 65535 || (port == 0 && !is_master)) {
        PyErr_Format(PyExc_ValueError, "port must be from %d to 65535, not %d", is_master ? 0 : 1, port);
        return -1;
    }
    const char *name = PyUnicode_AsUTF8(host);
    cd_secret secret;
    if (!name)
        return -1;
    if (cd_secret_read(&secret) != CD_OK) {
        cd_py_raise(state, CD_BAD_ARGUMENT);
        return -1;
    }
    if (!is_master && is_agents_store(name, port))
        secret = (cd_secret){0};
    Py_XSETREF(self->host, Py_NewRef(host));
    self->port = port;
    self->use_libuv = (char)use_libuv;
    if (is_master && !self->server && start_server(self, state, name, port, listen_fd, multi_tenant, &secret) < 0)
        return -1;
    return open_client(self, state, name, &secret, world, is_master, wait_all, ns);
}

static PyObject *tcp_clone(PyObject *object, PyObject *unused)
{
    (void)unused;
    store_object *self = (store_object *)object;
    cd_py_state *state = cd_py_state_of_type(Py_TYPE(object));
    if (!state || !store_of(object))
        return NULL;
    double seconds = (double)atomic_load_explicit(&self->store->timeout_ns, memory_order_relaxed) / 1e9;
    return PyObject_CallFunction(state->tcp_store_type, "OiOOdO", self->host, self->port, Py_None, Py_False, seconds, Py_False);
}

static PyObject *tcp_host(PyObject *self, void *unused)
{
    (void)unused;
    PyObject *host = ((store_object *)self)->host;
    return Py_NewRef(host ? host : Py_None);
}

static PyObject *tcp_port(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromLong(((store_object *)self)->port);
}

static PyObject *tcp_libuv(PyObject *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(((store_object *)self)->use_libuv);
}

static PyObject *tcp_local_address(PyObject *self, void *unused)
{
    (void)unused;
    char text[64];
    cd_store *store = store_of(self);
    if (!store)
        return NULL;
    cd_tcp_store_local_address(store, text, sizeof text);
    return PyUnicode_FromString(text);
}

static PyMethodDef tcp_methods[] = {
    {"clone", tcp_clone, METH_NOARGS, "clone($self)\n--\n\nA new connection to the same server."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef tcp_getset[] = {
    {"host", tcp_host, NULL, "Host name as given.", NULL},
    {"port", tcp_port, NULL, "Port of the server; the one found free if 0 was given.", NULL},
    {"libuvBackend", tcp_libuv, NULL, "use_libuv as given; the server is the same either way.", NULL},
    {"local_address", tcp_local_address, NULL, "Numeric address of this end of the connection.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

/* ---- the others ---- */

static int file_init(PyObject *object, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"file_name", "world_size", NULL};
    store_object *self = (store_object *)object;
    cd_py_state *state = cd_py_state_of_type(Py_TYPE(object));
    PyObject *path;
    long long world = -1;
    if (!state || already_made(self) ||
        !PyArg_ParseTupleAndKeywords(args, keywords, "O&|L:FileStore", names, PyUnicode_FSDecoder, &path, &world))
        return -1;
    const char *name = PyUnicode_AsUTF8(path);
    if (!name) {
        Py_DECREF(path);
        return -1;
    }
    cd_py_wait waiting;
    cd_patience patience = cd_py_wait_begin(&waiting, cd_deadline_after_ns(300 * CD_NS_PER_S), 1);
    cd_status status = cd_file_store_open(name, world, &patience, &self->store);
    cd_py_wait_end(&waiting);
    Py_XSETREF(self->path, path);
    if (status != CD_OK)
        cd_py_raise(state, status);
    return status == CD_OK ? 0 : -1;
}

static PyObject *file_path(PyObject *self, void *unused)
{
    (void)unused;
    PyObject *path = ((store_object *)self)->path;
    return Py_NewRef(path ? path : Py_None);
}

static PyGetSetDef file_getset[] = {
    {"path", file_path, NULL, "Path of the file.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static int hash_init(PyObject *object, PyObject *args, PyObject *keywords)
{
    static char *names[] = {NULL};
    store_object *self = (store_object *)object;
    if (already_made(self) || !PyArg_ParseTupleAndKeywords(args, keywords, ":HashStore", names))
        return -1;
    cd_status status = cd_hash_store_create(&self->store);
    if (status != CD_OK)
        cd_py_raise(cd_py_state_of_type(Py_TYPE(object)), status);
    return status == CD_OK ? 0 : -1;
}

static int prefix_init(PyObject *object, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"prefix", "store", NULL};
    store_object *self = (store_object *)object;
    cd_py_state *state = cd_py_state_of_type(Py_TYPE(object));
    const char *prefix;
    Py_ssize_t bytes;
    PyObject *under;
    cd_store *store;
    if (!state || already_made(self) ||
        !PyArg_ParseTupleAndKeywords(args, keywords, "s#O:PrefixStore", names, &prefix, &bytes, &under) ||
        cd_py_store_get(state, under, &store) < 0)
        return -1;
    cd_status status = cd_prefix_store_create((cd_bytes){prefix, (size_t)bytes}, store, &self->store);
    cd_store_release(store);
    if (status != CD_OK) {
        cd_py_raise(state, status);
        return -1;
    }
    Py_XSETREF(self->under, Py_NewRef(under));
    return 0;
}

static PyObject *prefix_under(PyObject *self, void *unused)
{
    (void)unused;
    PyObject *under = ((store_object *)self)->under;
    return Py_NewRef(under ? under : Py_None);
}

static PyObject *prefix_bottom(PyObject *self, void *unused)
{
    (void)unused;
    cd_py_state *state = cd_py_state_of_type(Py_TYPE(self));
    if (!state)
        return NULL;
    PyObject *at = self;
    while (PyObject_TypeCheck(at, (PyTypeObject *)state->prefix_store_type) && ((store_object *)at)->under)
        at = ((store_object *)at)->under;
    return Py_NewRef(at);
}

static PyObject *prefix_text(PyObject *self, void *unused)
{
    (void)unused;
    cd_store *store = store_of(self);
    if (!store)
        return NULL;
    cd_bytes prefix = cd_prefix_store_prefix(store);
    return PyUnicode_DecodeUTF8(prefix.data, (Py_ssize_t)prefix.bytes, "surrogateescape");
}

static PyGetSetDef prefix_getset[] = {
    {"underlying_store", prefix_under, NULL, "The store that was given.", NULL},
    {"_underlying_non_prefix_store", prefix_bottom, NULL, "The first store below that is no PrefixStore.", NULL},
    {"prefix", prefix_text, NULL, "The prefix, without the slash that follows it.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

/* ---- types ---- */

#define LIFE {Py_tp_new, store_new}, {Py_tp_dealloc, store_dealloc}, {Py_tp_traverse, store_traverse}, {Py_tp_clear, store_clear}

static PyType_Slot store_slots[] = {
    LIFE,
    {Py_tp_methods, store_methods},
    {Py_tp_getset, store_getset},
    {Py_tp_doc, "Base of all key-value stores. Keys are str, values str or bytes; what comes back is bytes. May be subclassed in\n"
                "Python: such a class defines set, get, add, wait and whichever others it needs."},
    {0, NULL},
};

static PyType_Slot tcp_slots[] = {
    LIFE,
    {Py_tp_init, tcp_init},
    {Py_tp_methods, tcp_methods},
    {Py_tp_getset, tcp_getset},
    {Py_tp_doc,
     "TCPStore(host_name, port, world_size=None, is_master=False, timeout=timedelta(seconds=300), wait_for_workers=True,\n"
     "         multi_tenant=False, master_listen_fd=None, use_libuv=True)\n--\n\n"
     "A client of the server at host_name:port; with is_master the server too, which listens on that address only (or on\n"
     "CDIST_STORE_BIND; port 0 picks a free one). Client and server understand torch's. With CDIST_JOB_SECRET both ends prove\n"
     "that they know it. world_size: is_master waits until so many have connected. timeout: of connecting and of each call.\n"
     "Safe from many threads; a wait does not hold up the others. Raises DistNetworkError (cannot listen or connect),\n"
     "DistStoreError (workers missing), ValueError."},
    {0, NULL},
};

static PyType_Slot file_slots[] = {
    LIFE,
    {Py_tp_init, file_init},
    {Py_tp_getset, file_getset},
    {Py_tp_doc, "FileStore(file_name, world_size=-1)\n--\n\nA log in a file that all processes can reach, in torch's format.\n"
                "world_size >= 0: the last of so many that goes removes the file."},
    {0, NULL},
};

static PyType_Slot hash_slots[] = {
    LIFE,
    {Py_tp_init, hash_init},
    {Py_tp_doc, "HashStore()\n--\n\nA store within the process, for threads."},
    {0, NULL},
};

static PyType_Slot prefix_slots[] = {
    LIFE,
    {Py_tp_init, prefix_init},
    {Py_tp_getset, prefix_getset},
    {Py_tp_doc, "PrefixStore(prefix, store)\n--\n\nAnother store whose keys all begin with prefix + \"/\". num_keys and the timeout\n"
                "are those of the store below."},
    {0, NULL},
};

#define SPEC(name_, slots_)                                                                          \
    {                                                                                                \
        .name = name_, .basicsize = sizeof(store_object),                                            \
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, .slots = slots_,     \
    }

static PyType_Spec specs[] = {
    SPEC("cdist.store.Store", store_slots),       SPEC("cdist.store.TCPStore", tcp_slots),
    SPEC("cdist.store.FileStore", file_slots),    SPEC("cdist.store.HashStore", hash_slots),
    SPEC("cdist.store.PrefixStore", prefix_slots),
};

int cd_py_store_get(cd_py_state *state, PyObject *object, cd_store **out)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject *const ours[] = {state->tcp_store_type, state->file_store_type, state->hash_store_type, state->prefix_store_type};
    for (size_t i = 0; i < sizeof ours / sizeof *ours; i++)
        if ((PyObject *)type == ours[i] && ((store_object *)object)->store) {
            *out = cd_store_retain(((store_object *)object)->store);
            return 0;
        }
    return cd_py_store_adapt(object, out); /* subclasses too: they may have replaced methods */
}

int cd_py_store_add(PyObject *module)
{
    cd_py_state *state = cd_py_state_of(module);
    PyObject **const places[] = {&state->store_type, &state->tcp_store_type, &state->file_store_type, &state->hash_store_type,
                                 &state->prefix_store_type};
    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++) {
        *places[i] = PyType_FromModuleAndSpec(module, &specs[i], i ? state->store_type : NULL);
        if (!*places[i] || PyModule_AddType(module, (PyTypeObject *)*places[i]) < 0)
            return -1;
    }
    return 0;
}
