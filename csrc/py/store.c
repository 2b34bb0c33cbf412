#include "py/store.h"

#include "py/args.h"
#include "py/errors.h"
#include "py/glue.h"
#include "py/store_impl.h"

#include "base/knob.h"
#include "store/kinds.h"
#include "store/server.h"

/* One server of this process; shared by the TCPStores of a port where they ask for multi_tenant. Guarded by the GIL. */
struct cd_py_server {
    cd_py_server *next;
    cd_server *server;
    int refs;
    bool listed;
};

/* ---- life ---- */

static void leave_server(cd_py_state *state, cd_py_server *shared)
{
    if (--shared->refs)
        return;
    cd_py_server **link = (cd_py_server **)&state->store_servers;
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
    cd_py_store *self = (cd_py_store *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->module);
    Py_VISIT(self->under);
    return 0;
}

static int store_clear(PyObject *object)
{
    Py_CLEAR(((cd_py_store *)object)->under);
    return 0;
}

static void store_dealloc(PyObject *object)
{
    cd_py_store *self = (cd_py_store *)object;
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
    if (self->server)
        leave_server(cd_py_state_of(self->module), self->server);
    Py_CLEAR(self->module);
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

static int already_made(cd_py_store *self)
{
    if (self->store)
        PyErr_SetString(PyExc_RuntimeError, "the store was made already");
    return self->store != NULL;
}

/* ---- TCPStore ---- */

static cd_py_server *find_shared(cd_py_state *state, int port)
{
    cd_py_server *shared = state->store_servers;
    while (shared && cd_server_port(shared->server) != port)
        shared = shared->next;
    return port ? shared : NULL;
}

/* Whether the launcher told that all ranks are of this host. */
static bool is_one_host(void)
{
    const char *world = getenv("WORLD_SIZE"), *local = getenv("LOCAL_WORLD_SIZE");
    return world && local && atoi(local) > 0 && atoi(world) == atoi(local);
}

static int start_server(cd_py_store *self, cd_py_state *state, const char *host, int port, int listen_fd, bool multi_tenant,
                        const cd_secret *secret)
{
    cd_py_server *shared = multi_tenant ? find_shared(state, port) : NULL;
    if (!shared) {
        const char *bind = cd_knob("CDIST_STORE_BIND");
        cd_server_options options = {
            .host = *bind ? bind : host, .is_one_host = is_one_host(), .port = (uint16_t)port, .listen_fd = listen_fd,
            .secret = *secret};
        cd_server *server = NULL;
        cd_status status;
        Py_BEGIN_ALLOW_THREADS
        status = cd_server_start(&options, &server);
        Py_END_ALLOW_THREADS
        if (status == CD_NETWORK)
            cd_fail_prefix("The server socket has failed to listen on any local network address (rank 0 belongs on the host that "
                           "MASTER_ADDR names; CDIST_STORE_BIND names another address of it): ");
        if (status != CD_OK) {
            cd_py_raise_from(state, status, "TCPStore");
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
    self->module = Py_NewRef(PyType_GetModuleByDef(Py_TYPE(self), &cd_py_module));
    self->port = cd_server_port(shared->server);
    return 0;
}

/* With join_all counted as one of `world` clients; with await_all there must be so many before it returns. */
static int open_client(cd_py_store *self, cd_py_state *state, const char *host, const cd_secret *secret,
                       long world, bool await_all, bool join_all, uint64_t ns)
{
    cd_py_wait waiting;
    cd_patience patience = cd_py_wait_begin(&waiting, cd_py_deadline(ns), 1);
    cd_store *store = NULL;
    cd_py_wait_detach(&waiting);
    cd_status status;
    do {
        status = cd_tcp_store_open(host, (uint16_t)self->port, secret, &patience, &store);
        if (status == CD_OK && world > 0 && join_all)
            status = cd_tcp_store_join(store, world, await_all, &patience);
        if (status != CD_OK && store) {
            cd_store_release(store);
            store = NULL;
        }
        /* Lost in between: that server was on its way out, as the one of the group before is. The next one is waited for. */
    } while (status == CD_STORE && !self->server && !cd_deadline_passed(patience.deadline));
    cd_py_wait_end(&waiting);
    if (status != CD_OK) {
        cd_py_raise_from(state, status, "TCPStore");
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

/* A script under cdistrun has changed MASTER_PORT. A torchrun that the script starts has so too, but each launcher gives its
 * workers an error file of their own: theirs is then another than the one that came with the port. */
static bool has_moved_away(int port)
{
    const char *agent = cd_knob("CDIST_AGENT"), *file = strchr(agent, ':'), *given = getenv("TORCHELASTIC_ERROR_FILE");
    return file && given && strcmp(file + 1, given) == 0 && atoi(agent) != port;
}

/* The launcher's store: torchrun's, or cdistrun's, which torch's clients use too. It speaks the plain protocol, also where the
 * job has a secret; that is for the connections between ranks then. */
static bool is_agents_store(const char *host, int port)
{
    const char *used = getenv("TORCHELASTIC_USE_AGENT_STORE");
    const char *address = getenv("MASTER_ADDR"), *number = getenv("MASTER_PORT");
    return used && strcmp(used, "True") == 0 && address && strcmp(address, host) == 0 && number && atoi(number) == port &&
           !has_moved_away(port);
}

static PyObject *tell_whether_agents(PyObject *module, PyObject *args)
{
    (void)module;
    const char *host;
    int port;
    return PyArg_ParseTuple(args, "si", &host, &port) ? PyBool_FromLong(is_agents_store(host, port)) : NULL;
}

static int tcp_init(PyObject *object, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"host_name", "port", "world_size", "is_master", "timeout", "wait_for_workers", "multi_tenant",
                            "master_listen_fd", "use_libuv", "join_only", NULL};
    cd_py_store *self = (cd_py_store *)object;
    cd_py_state *state = cd_py_state_of_type(Py_TYPE(object));
    PyObject *host, *world_object = NULL, *timeout = NULL, *fd_object = NULL;
    int port, is_master = 0, wait_all = 1, multi_tenant = 0, use_libuv = 1, join_only = 0, world, listen_fd;
    uint64_t ns;
    if (!state || already_made(self) ||
        !PyArg_ParseTupleAndKeywords(args, keywords, "Ui|OpOppOpp:TCPStore", names, &host, &port,
                                     &world_object, &is_master, &timeout, &wait_all, &multi_tenant,
                                     &fd_object, &use_libuv, &join_only) ||
        cd_py_timeout_ns(timeout, 300 * CD_NS_PER_S, &ns) < 0 ||
        number_or(world_object, "world_size", -1, &world) < 0 ||
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
    return open_client(self, state, name, &secret, world, is_master && !join_only, wait_all, ns);
}

static PyObject *tcp_clone(PyObject *object, PyObject *unused)
{
    (void)unused;
    cd_py_store *self = (cd_py_store *)object;
    cd_py_state *state = cd_py_state_of_type(Py_TYPE(object));
    if (!state || !cd_py_store_of(object))
        return NULL;
    double seconds = (double)atomic_load_explicit(&self->store->timeout_ns, memory_order_relaxed) / 1e9;
    return PyObject_CallFunction(state->tcp_store_type, "OiOOdO", self->host, self->port, Py_None, Py_False, seconds, Py_False);
}

static PyObject *tcp_host(PyObject *self, void *unused)
{
    (void)unused;
    PyObject *host = ((cd_py_store *)self)->host;
    return Py_NewRef(host ? host : Py_None);
}

static PyObject *tcp_port(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromLong(((cd_py_store *)self)->port);
}

static PyObject *tcp_libuv(PyObject *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(((cd_py_store *)self)->use_libuv);
}

static PyObject *tcp_local_address(PyObject *self, void *unused)
{
    (void)unused;
    char text[64];
    cd_store *store = cd_py_store_of(self);
    if (!store)
        return NULL;
    return PyUnicode_FromString(cd_store_local_address(store, text, sizeof text) ? text : "");
}

static PyMethodDef tcp_methods[] = {
    {"clone", tcp_clone, METH_NOARGS, "clone($self)\n--\n\nA new connection to the same server."},
    {NULL, NULL, 0, NULL},
};

static PyObject *tcp_joined_late(PyObject *object, void *context)
{
    (void)context;
    cd_store *store = cd_py_store_of(object);
    return store ? PyBool_FromLong(cd_tcp_store_joined_late(store)) : NULL;
}

static PyGetSetDef tcp_getset[] = {
    {"host", tcp_host, NULL, "Host name as given.", NULL},
    {"port", tcp_port, NULL, "Port of the server; the one found free if 0 was given.", NULL},
    {"libuvBackend", tcp_libuv, NULL, "use_libuv as given; the server is the same either way.", NULL},
    {"_joined_late", tcp_joined_late, NULL, "More clients than world_size had joined before this one.", NULL},
    {"local_address", tcp_local_address, NULL, "Numeric address of this end of the connection, '' when it is closed.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

/* ---- the others ---- */

static int file_init(PyObject *object, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"file_name", "world_size", NULL};
    cd_py_store *self = (cd_py_store *)object;
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
        cd_py_raise_from(state, status, "FileStore");
    return status == CD_OK ? 0 : -1;
}

static PyObject *file_path(PyObject *self, void *unused)
{
    (void)unused;
    PyObject *path = ((cd_py_store *)self)->path;
    return Py_NewRef(path ? path : Py_None);
}

static PyGetSetDef file_getset[] = {
    {"path", file_path, NULL, "Path of the file.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static int hash_init(PyObject *object, PyObject *args, PyObject *keywords)
{
    static char *names[] = {NULL};
    cd_py_store *self = (cd_py_store *)object;
    if (already_made(self) || !PyArg_ParseTupleAndKeywords(args, keywords, ":HashStore", names))
        return -1;
    cd_status status = cd_hash_store_create(&self->store);
    if (status != CD_OK)
        cd_py_raise_from(cd_py_state_of_type(Py_TYPE(object)), status, "HashStore");
    return status == CD_OK ? 0 : -1;
}

static int prefix_init(PyObject *object, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"prefix", "store", NULL};
    cd_py_store *self = (cd_py_store *)object;
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
        cd_py_raise_from(state, status, "PrefixStore");
        return -1;
    }
    Py_XSETREF(self->under, Py_NewRef(under));
    return 0;
}

static PyObject *prefix_under(PyObject *self, void *unused)
{
    (void)unused;
    PyObject *under = ((cd_py_store *)self)->under;
    return Py_NewRef(under ? under : Py_None);
}

static PyObject *prefix_bottom(PyObject *self, void *unused)
{
    (void)unused;
    cd_py_state *state = cd_py_state_of_type(Py_TYPE(self));
    if (!state)
        return NULL;
    PyObject *at = self;
    while (PyObject_TypeCheck(at, (PyTypeObject *)state->prefix_store_type) && ((cd_py_store *)at)->under)
        at = ((cd_py_store *)at)->under;
    return Py_NewRef(at);
}

static PyObject *prefix_text(PyObject *self, void *unused)
{
    (void)unused;
    cd_store *store = cd_py_store_of(self);
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
    {Py_tp_methods, cd_py_store_methods},
    {Py_tp_getset, cd_py_store_getset},
    {Py_tp_doc, "Base of all key-value stores. Keys are str, values str or bytes; what comes back is bytes. "
                "May be subclassed in\n"
                "Python: such a class defines set, get, add, wait and whichever others it needs."},
    {0, NULL},
};

static PyType_Slot tcp_slots[] = {
    LIFE,
    {Py_tp_init, tcp_init},
    {Py_tp_methods, tcp_methods},
    {Py_tp_getset, tcp_getset},
    {Py_tp_doc,
     "TCPStore(host_name, port, world_size=None, is_master=False, timeout=300, wait_for_workers=True,\n"
     "         multi_tenant=False, master_listen_fd=None, use_libuv=True, join_only=False)\n--\n\n"
     "A client of the server at host_name:port; with is_master the server too, which listens on that name's addresses only (or\n"
     "on CDIST_STORE_BIND; port 0 picks a free one). Client and server understand torch's. With CDIST_JOB_SECRET both ends\n"
     "prove that they know it. world_size: is_master waits until so many have connected (join_only: it only counts them).\n"
     "timeout: of connecting and of each call, seconds or a timedelta.\n"
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
    {Py_tp_doc, "PrefixStore(prefix, store)\n--\n\nAnother store whose keys all begin with prefix + \"/\". "
                "num_keys and the timeout\n"
                "are those of the store below."},
    {0, NULL},
};

#define SPEC(name_, slots_)                                                                          \
    {                                                                                                \
        .name = name_, .basicsize = sizeof(cd_py_store),                                            \
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
        if ((PyObject *)type == ours[i] && ((cd_py_store *)object)->store) {
            *out = cd_store_retain(((cd_py_store *)object)->store);
            return 0;
        }
    return cd_py_store_adapt(object, out); /* subclasses too: they may have replaced methods */
}

static PyMethodDef functions[] = {
    {"_is_agents_store", tell_whether_agents, METH_VARARGS,
     "_is_agents_store(host, port)\n--\n\nWhether the launcher's store is there, as far as the environment tells."},
    {NULL, NULL, 0, NULL},
};

int cd_py_store_add(PyObject *module)
{
    if (PyModule_AddFunctions(module, functions) < 0)
        return -1;
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
