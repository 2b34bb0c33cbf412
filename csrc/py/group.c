#include "py/group.h"

#include "py/args.h"
#include "py/errors.h"
#include "py/glue.h"
#include "py/host_side.h"
#include "py/store.h"

#include <string.h>
#include <structmember.h>

/* ---------------------------------------------------------------------------------------------------- for the others */

static int refuse_without_default(cd_py_state *state, const char *function)
{
    const char *ended = " The one that was there is destroyed: by destroy_process_group(), or because the program ends";
    PyErr_Format(PyExc_ValueError, "%s%sDefault process group has not been initialized, please make sure to call "
                 "init_process_group.%s", function, *function ? ": " : "", state->had_default_group ? ended : "");
    return -1;
}

static int warn_outsider(cd_py_state *state, const char *function)
{
    if (!state->default_group)
        return refuse_without_default(state, function);
    int rank = ((cd_py_group *)state->default_group)->world_rank;
    return PyErr_WarnFormat(PyExc_UserWarning, 1, "Running %s on global rank %d which does not belong to the given group.",
                            function, rank);
}

int cd_py_group_get(cd_py_state *state, PyObject *object, const char *function, cd_py_group **out)
{
    if (!cd_py_is_given(object)) {
        object = state->default_group;
        if (!object)
            return warn_outsider(state, function);
    } else if (cd_py_is_host_side(state, object)) {
        object = cd_py_host_side_group(object);
    } else if (!PyObject_TypeCheck(object, (PyTypeObject *)state->group_type)) {
        if (PyLong_Check(object) && PyLong_AsLong(object) == -100)
            return warn_outsider(state, function);
        PyErr_Format(PyExc_TypeError, "%s: group must be a ProcessGroup or None, not %s", function,
                     Py_TYPE(object)->tp_name);
        return -1;
    }
    cd_py_group *group = (cd_py_group *)object;
    if (!group->group) {
        PyErr_Format(PyExc_ValueError, "%s: Invalid process group specified (it was destroyed)", function);
        return -1;
    }
    *out = (cd_py_group *)Py_NewRef(object);
    return 1;
}

static const char *role_of(const char *function)
{
    return strstr(function, "send") ? "destination" : strstr(function, "recv") ? "source" : "root";
}

static int group_rank_of(const cd_py_group *group, const char *function, int world_rank)
{
    const int32_t *ranks = cd_group_world_ranks(group->group);
    for (int i = 0; i < group->size; i++)
        if (ranks[i] == world_rank)
            return i;
    PyErr_Format(PyExc_ValueError, "%s: invalid %s rank: %d. Global rank %d is not part of group %R", function,
                 role_of(function), world_rank, world_rank, group->ranks);
    return -1;
}

int cd_py_group_peer(const cd_py_group *group, const char *function, PyObject *global, PyObject *local, int fallback,
                     int *rank_p)
{
    if (cd_py_is_given(global) && cd_py_is_given(local)) {
        PyErr_Format(PyExc_ValueError, "%s: Can't specify both group_rank and global_rank", function);
        return -1;
    }
    int rank = fallback;
    if (cd_py_is_given(local)) {
        if (cd_py_int(local, "group rank", &rank) < 0)
            return -1;
        if (rank < 0 || rank >= group->size) {
            PyErr_Format(PyExc_ValueError, "%s: invalid %s rank: %d. Group rank %d is not part of a group of %d", function,
                         role_of(function), rank, rank, group->size);
            return -1;
        }
        *rank_p = rank;
        return 0;
    }
    if (cd_py_is_given(global) && cd_py_int(global, "rank", &rank) < 0)
        return -1;
    if (!cd_py_is_given(global) && fallback < 0) {
        PyErr_Format(PyExc_ValueError, "%s: Must specify global_rank or group_rank: a %s is given as src= or dst=, or as "
                     "group_src= or group_dst= where it is a rank of the group", function, role_of(function));
        return -1;
    }
    *rank_p = group_rank_of(group, function, rank);
    return *rank_p < 0 ? -1 : 0;
}

/* ------------------------------------------------------------------------------------------------------ construction */

static cd_py_group *make_group(PyTypeObject *type, cd_group *group, cd_world *world)
{
    cd_py_group *self = (cd_py_group *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->group = group;
    self->world = world;
    self->serves[CD_CPU] = self->serves[CD_CUDA] = true;
    self->rank = cd_group_rank(group);
    self->size = cd_group_size(group);
    const int32_t *ranks = cd_group_world_ranks(group);
    self->world_rank = ranks[self->rank];
    cd_patience patience = cd_patience_until(CD_NEVER, cd_world_local_size(cd_group_world(group)));
    self->spin = patience.spin;
    self->yields = patience.yields;
    self->ranks = PyTuple_New(self->size);
    for (int i = 0; self->ranks && i < self->size; i++) {
        PyObject *rank = PyLong_FromLong(ranks[i]);
        if (!rank)
            Py_CLEAR(self->ranks);
        else
            PyTuple_SET_ITEM(self->ranks, i, rank);
    }
    if (!self->ranks)
        Py_CLEAR(self);
    return self;
}

typedef struct {
    cd_world_config config;
    uint64_t init_ns;
    PyObject *store;
} open_args;

static int parse_open(PyObject *args, PyObject *keywords, open_args *out)
{
    static char *names[] = {"store",  "rank",         "world_size", "prefix", "timeout", "init_timeout",
                            "secret", "bind_address", "force_tcp",  NULL};
    PyObject *timeout, *init_timeout;
    const char *secret = NULL;
    Py_ssize_t secret_bytes = 0;
    int force_tcp = 0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OiisOO|z#zp", names, &out->store, &out->config.rank,
                                     &out->config.world, &out->config.prefix, &timeout, &init_timeout, &secret,
                                     &secret_bytes, &out->config.bind_address, &force_tcp))
        return -1;
    if (secret && secret_bytes != 32) {
        PyErr_SetString(PyExc_ValueError, "the job secret must have 32 bytes");
        return -1;
    }
    out->config.secret = (const uint8_t *)secret;
    out->config.force_tcp = force_tcp != 0;
    if (cd_py_timeout_ns(timeout, UINT64_MAX, &out->config.timeout_ns) < 0)
        return -1;
    return cd_py_timeout_ns(init_timeout, out->config.timeout_ns, &out->init_ns);
}

static PyObject *open_world(PyObject *type, PyObject *args, PyObject *keywords)
{
    open_args parsed = {0};
    cd_py_state *state = cd_py_state_of_type((PyTypeObject *)type);
    if (!state || parse_open(args, keywords, &parsed) < 0)
        return NULL;
    cd_store *store = NULL;
    if (cd_py_store_get(state, parsed.store, &store) < 0)
        return NULL;
    cd_world *world = NULL;
    cd_py_wait wait;
    cd_patience patience = cd_py_wait_begin(&wait, cd_py_deadline(parsed.init_ns), 1);
    cd_py_wait_detach(&wait);
    cd_status status = cd_world_open(&parsed.config, store, &patience, &world);
    cd_py_wait_end(&wait);
    cd_store_release(store);
    if (status != CD_OK)
        return cd_py_raise_from(state, status, "init_process_group");
    cd_py_group *self = make_group((PyTypeObject *)type, cd_group_retain(cd_world_group(world)), world);
    if (!self) {
        cd_world_close(world);
        cd_world_release(world);
    }
    return (PyObject *)self;
}

static PyObject *create_group(PyObject *type, PyObject *args)
{
    PyObject *parent, *ranks, *timeout, *init_timeout;
    cd_py_state *state = cd_py_state_of_type((PyTypeObject *)type);
    if (!state ||
        !PyArg_ParseTuple(args, "O!O!OO", state->group_type, &parent, &PyTuple_Type, &ranks, &timeout, &init_timeout))
        return NULL;
    cd_group *base = ((cd_py_group *)parent)->group;
    uint64_t ns, init_ns;
    if (cd_py_timeout_ns(timeout, cd_group_timeout_ns(base), &ns) < 0 || cd_py_timeout_ns(init_timeout, ns, &init_ns) < 0)
        return NULL;
    int count = (int)PyTuple_GET_SIZE(ranks);
    int *list = PyMem_Malloc((size_t)(count + 1) * sizeof *list);
    if (!list)
        return PyErr_NoMemory();
    for (int i = 0; i < count; i++)
        list[i] = (int)PyLong_AsLong(PyTuple_GET_ITEM(ranks, i));
    cd_group *group = NULL;
    cd_py_wait wait;
    cd_patience patience = cd_py_wait_begin(&wait, cd_py_deadline(init_ns), 1);
    cd_py_wait_detach(&wait);
    cd_status status = cd_group_create(cd_group_world(base), list, count, ns, &patience, &group);
    cd_py_wait_end(&wait);
    PyMem_Free(list);
    if (status != CD_OK)
        return cd_py_raise_from(state, status, "new_group");
    cd_py_group *self = make_group((PyTypeObject *)type, group, NULL);
    if (!self) {
        cd_group_close(group);
        cd_group_release(group);
    }
    return (PyObject *)self;
}

/* -------------------------------------------------------------------------------------------------------- teardown */

/* Waits up to a second for threads of the world: the GIL is dropped. */
static void close_world(cd_py_group *self)
{
    cd_world *world = self->world;
    self->world = NULL;
    if (!world)
        return;
    Py_BEGIN_ALLOW_THREADS
    cd_world_close(world);
    cd_world_release(world);
    Py_END_ALLOW_THREADS
}

static PyObject *shut_group(PyObject *object, PyObject *unused)
{
    (void)unused;
    cd_py_group *self = (cd_py_group *)object;
    if (self->world) {
        close_world(self);
    } else if (self->group) {
        Py_BEGIN_ALLOW_THREADS
        cd_group_close(self->group);
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

/* Ends the group on all its ranks because of the loss of a rank, which need not be one of them; lost < 0: this rank ends it. */
static void fail_group(cd_py_group *self, const char *text, int lost)
{
    if (!self->group)
        return;
    cd_error error = {.code = lost < 0 ? CD_ABORTED : CD_PEER_LOST, .rank = lost < 0 ? self->world_rank : lost};
    PyOS_snprintf(error.text, sizeof error.text, "%s", text);
    cd_group_abort(self->group, &error);
}

static PyObject *abort_group(PyObject *object, PyObject *args)
{
    cd_py_group *self = (cd_py_group *)object;
    const char *why = NULL;
    if (!PyArg_ParseTuple(args, "|z:abort", &why))
        return NULL;
    char text[CD_ERROR_TEXT_BYTES];
    PyOS_snprintf(text, sizeof text, "rank %d aborted the group%s%s", self->world_rank, why ? ": " : "", why ? why : "");
    fail_group(self, text, -1);
    Py_RETURN_NONE;
}

static PyObject *fail_for_all(PyObject *object, PyObject *args)
{
    const char *text;
    int lost = -1;
    if (!PyArg_ParseTuple(args, "s|i:_fail", &text, &lost))
        return NULL;
    fail_group((cd_py_group *)object, text, lost);
    Py_RETURN_NONE;
}

/* Who dies of another rank's loss is not to blame: the cause of all is that loss. */
static PyObject *announce_death(PyObject *object, PyObject *args)
{
    cd_py_group *self = (cd_py_group *)object;
    const char *text;
    int lost = -1;
    if (!PyArg_ParseTuple(args, "s|i:_announce_death", &text, &lost))
        return NULL;
    if (lost >= 0 && lost != self->world_rank)
        fail_group(self, text, lost);
    if (self->world)
        cd_world_announce_death(self->world, text);
    Py_RETURN_NONE;
}

static PyObject *count_pending(PyObject *object, PyObject *unused)
{
    (void)unused;
    cd_py_group *self = (cd_py_group *)object;
    return PyLong_FromUnsignedLong(self->group ? cd_group_pending(self->group) : 0);
}

static PyObject *drain_group(PyObject *object, PyObject *arg)
{
    cd_py_group *self = (cd_py_group *)object;
    double seconds = PyFloat_AsDouble(arg);
    if (PyErr_Occurred())
        return NULL;
    if (self->group && seconds > 0) {
        cd_py_wait wait;
        cd_patience patience = cd_py_wait_begin(&wait, cd_deadline_after_ns((uint64_t)(seconds * 1e9)), 1);
        cd_py_wait_detach(&wait);
        cd_group_drain(self->group, &patience);
        cd_py_wait_end(&wait);
        if (PyErr_Occurred()) /* of a signal handler */
            return NULL;
    }
    return PyBool_FromLong(self->group && cd_group_status(self->group) == CD_OK);
}

static PyObject *note_raised(PyObject *object, PyObject *arg)
{
    cd_py_group *self = (cd_py_group *)object;
    long lost = PyLong_AsLong(arg);
    if (lost == -1 && PyErr_Occurred())
        return NULL;
    if (self->group && lost >= 0)
        cd_group_tell_loss(self->group, (int)lost);
    self->cause_raised |= self->group && cd_group_status(self->group) != CD_OK;
    Py_RETURN_NONE;
}

/* The user knows why all ended: it was raised, or it is this rank's own doing. */
static bool cause_is_known(const cd_py_group *self)
{
    if (cd_group_status(self->group) == CD_OK)
        return false;
    const cd_error *cause = cd_last_error();
    return self->cause_raised || (cause->code == CD_ABORTED && cause->rank == self->world_rank);
}

static PyObject *count_untold(PyObject *object, PyObject *unused)
{
    (void)unused;
    cd_py_group *self = (cd_py_group *)object;
    char text[256] = "";
    size_t count = self->group && !cause_is_known(self) ? cd_group_untold(self->group, text, sizeof text) : 0;
    return Py_BuildValue("(nN)", (Py_ssize_t)count, PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace"));
}

static int traverse_group(PyObject *object, visitproc visit, void *arg)
{
    cd_py_group *self = (cd_py_group *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->dict);
    Py_VISIT(self->ranks);
    return 0;
}

static int clear_group(PyObject *object)
{
    cd_py_group *self = (cd_py_group *)object;
    Py_CLEAR(self->dict);
    Py_CLEAR(self->ranks);
    return 0;
}

static void free_group(PyObject *object)
{
    cd_py_group *self = (cd_py_group *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    if (self->weak)
        PyObject_ClearWeakRefs(object);
    close_world(self);
    /* A signal's exception may have come between making the group and keeping it, or in destroy_process_group: nobody can close
     * it any more. Both may join a thread that is about to take the GIL. */
    Py_BEGIN_ALLOW_THREADS
    cd_group_close(self->group);
    cd_group_release(self->group);
    Py_END_ALLOW_THREADS
    clear_group(object);
    type->tp_free(object);
    Py_DECREF(type);
}

/* -------------------------------------------------------------------------------------------------------- questions */

static PyObject *get_rank(PyObject *object, PyObject *unused)
{
    (void)unused;
    return PyLong_FromLong(((cd_py_group *)object)->rank);
}

static PyObject *get_size(PyObject *object, PyObject *unused)
{
    (void)unused;
    return PyLong_FromLong(((cd_py_group *)object)->size);
}

static PyObject *set_timeout(PyObject *object, PyObject *timeout)
{
    uint64_t ns;
    if (cd_py_timeout_ns(timeout, UINT64_MAX, &ns) < 0)
        return NULL;
    cd_group_set_timeout_ns(((cd_py_group *)object)->group, ns);
    Py_RETURN_NONE;
}

static PyObject *get_local(PyObject *object, PyObject *unused)
{
    (void)unused;
    const cd_world *world = cd_group_world(((cd_py_group *)object)->group);
    return Py_BuildValue("ii", cd_world_local_rank(world), cd_world_local_size(world));
}

static PyObject *check_group(PyObject *object, PyObject *unused)
{
    (void)unused;
    cd_status status = cd_group_status(((cd_py_group *)object)->group);
    if (status != CD_OK)
        return cd_py_raise(cd_py_state_of_type(Py_TYPE(object)), status);
    Py_RETURN_NONE;
}

static PyObject *check_fork(PyObject *object, PyObject *unused)
{
    (void)unused;
    cd_status status = cd_group_check_fork(((cd_py_group *)object)->group);
    if (status != CD_OK)
        return cd_py_raise(cd_py_state_of_type(Py_TYPE(object)), status);
    Py_RETURN_NONE;
}

static PyObject *monitored_barrier(PyObject *object, PyObject *args)
{
    cd_py_group *self = (cd_py_group *)object;
    cd_py_state *state = cd_py_state_of_type(Py_TYPE(object));
    PyObject *timeout, *result = NULL;
    int wait_all;
    uint64_t ns;
    if (!state || !PyArg_ParseTuple(args, "Op", &timeout, &wait_all) ||
        cd_py_timeout_ns(timeout, cd_group_timeout_ns(self->group), &ns) < 0)
        return NULL;
    int world = ((cd_py_group *)(state->default_group ? state->default_group : object))->size;
    size_t most = (size_t)(world > self->size ? world : self->size);
    uint8_t *missing = PyMem_Calloc(most, 1);
    if (!missing)
        return PyErr_NoMemory();
    cd_py_wait wait;
    cd_patience patience = cd_py_wait_begin(&wait, cd_py_deadline(ns), self->size);
    cd_py_wait_detach(&wait);
    cd_status status = cd_group_monitored_barrier(self->group, wait_all != 0, &patience, missing);
    cd_py_wait_end(&wait);
    if (status == CD_OK) {
        result = Py_NewRef(Py_None);
    } else {
        result = cd_py_raise_from(state, status, "monitored_barrier");
    }
    PyMem_Free(missing);
    return result;
}

static PyObject *get_ranks(PyObject *object, void *unused)
{
    (void)unused;
    return Py_NewRef(((cd_py_group *)object)->ranks);
}

static PyObject *get_transport(PyObject *object, void *unused)
{
    (void)unused;
    return PyUnicode_FromString(cd_group_transport(((cd_py_group *)object)->group));
}

static PyObject *get_sequence(PyObject *object, void *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLongLong(cd_group_sequence(((cd_py_group *)object)->group));
}

static PyObject *get_timeout(PyObject *object, void *unused)
{
    (void)unused;
    uint64_t ns = cd_group_timeout_ns(((cd_py_group *)object)->group);
    return PyFloat_FromDouble(ns == UINT64_MAX ? Py_HUGE_VAL : (double)ns / 1e9);
}

static PyMemberDef members[] = {
    {"__dictoffset__", T_PYSSIZET, offsetof(cd_py_group, dict), READONLY, NULL},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(cd_py_group, weak), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef fields[] = {
    {"_ranks", get_ranks, NULL, "World rank of each group rank.", NULL},
    {"_transport", get_transport, NULL, "How data moves: \"shm\", \"tcp\" or \"self\".", NULL},
    {"_sequence", get_sequence, NULL, "Number of the last collective that was issued.", NULL},
    {"_timeout", get_timeout, NULL, "Default timeout in seconds.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef methods[] = {
    {"_open", (PyCFunction)(void (*)(void))open_world, METH_CLASS | METH_VARARGS | METH_KEYWORDS,
     "Meets the other ranks through the store; returns the default group."},
    {"_create", create_group, METH_CLASS | METH_VARARGS,
     "_create(parent, ranks, timeout, init_timeout)\n--\n\nMakes a group of some of the parent's world; its members call it."},
    {"rank", get_rank, METH_NOARGS, "rank($self, /)\n--\n\nRank of this process in the group."},
    {"size", get_size, METH_NOARGS, "size($self, /)\n--\n\nNumber of ranks in the group."},
    {"abort", abort_group, METH_VARARGS,
     "abort" "($self, why=None, /)\n--\n\nEnds running and later operations of all ranks with AbortedError. Does not block."},
    {"shutdown", shut_group, METH_NOARGS,
     "shutdown($self, /)\n--\n\nCloses this rank's end: later calls fail, running ones end with AbortedError."},
    {"set_timeout", set_timeout, METH_O,
     "set_timeout($self, timeout, /)\n--\n\nDefault timeout of later operations: a timedelta or seconds."},
    {"_fail", fail_for_all, METH_VARARGS,
     "_fail(why, lost=-1): ends a group that has no error yet, on all its ranks, for the loss of a rank."},
    {"_announce_death", announce_death, METH_VARARGS,
     "_announce_death(why, lost=-1): tells all peers why this rank goes; lost: of whose loss it dies."},
    {"_pending", count_pending, METH_NOARGS, "Asynchronous operations under way (messages: of all groups, by the default one)."},
    {"_drain", drain_group, METH_O,
     "_drain(seconds): lets queued operations and sends end; whether the group has no error then."},
    {"_untold", count_untold, METH_NOARGS,
     "(number, first as text or '') of failed sends that nobody waited for and no error that was raised explains."},
    {"_note_raised", note_raised, METH_O,
     "_note_raised(lost): an error was raised, by the loss of this rank (-1: by another thing)."},
    {"_local", get_local, METH_NOARGS, "(rank, size) among the ranks of this host."},
    {"_check_fork", check_fork, METH_NOARGS, "Raises AbortedError in a child that was forked after the group was made."},
    {"_check", check_group, METH_NOARGS, "Raises what broke the group, if anything did."},
    {"_monitored_barrier", monitored_barrier, METH_VARARGS, "_monitored_barrier(timeout, wait_all_ranks)"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "A set of ranks that communicate. Made by init_process_group and new_group."},
    {Py_tp_dealloc, free_group},
    {Py_tp_traverse, traverse_group},
    {Py_tp_clear, clear_group},
    {Py_tp_members, members},
    {Py_tp_getset, fields},
    {Py_tp_methods, methods},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "cdist._core.ProcessGroup",
    .basicsize = sizeof(cd_py_group),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = slots,
};

/* _set_default_group(group or None): what group=None means from now on. */
static PyObject *set_default_group(PyObject *module, PyObject *group)
{
    cd_py_state *state = cd_py_state_of(module);
    if (group != Py_None && !PyObject_TypeCheck(group, (PyTypeObject *)state->group_type)) {
        PyErr_SetString(PyExc_TypeError, "the default group must be a ProcessGroup or None");
        return NULL;
    }
    state->had_default_group |= state->default_group != NULL;
    Py_XSETREF(state->default_group, group == Py_None ? NULL : Py_NewRef(group));
    Py_RETURN_NONE;
}

static PyObject *get_default_group(PyObject *module, PyObject *unused)
{
    (void)unused;
    cd_py_state *state = cd_py_state_of(module);
    return Py_NewRef(state->default_group ? state->default_group : Py_None);
}

/* _need_default_group(function): the default group, or the error of `function` ("": not known) that there is none. */
static PyObject *need_default_group(PyObject *module, PyObject *function)
{
    cd_py_state *state = cd_py_state_of(module);
    const char *name = state->default_group ? NULL : PyUnicode_AsUTF8(function);
    if (name)
        refuse_without_default(state, name);
    return Py_XNewRef(state->default_group);
}

static PyMethodDef functions[] = {
    {"_set_default_group", set_default_group, METH_O, "Sets what group=None means."},
    {"_get_default_group", get_default_group, METH_NOARGS, "The group that group=None means, or None."},
    {"_need_default_group", need_default_group, METH_O, "The same, or a ValueError of the function that is named."},
    {NULL, NULL, 0, NULL},
};

int cd_py_group_add(PyObject *module)
{
    cd_py_state *state = cd_py_state_of(module);
    state->group_type = PyType_FromModuleAndSpec(module, &spec, NULL);
    if (!state->group_type || PyModule_AddType(module, (PyTypeObject *)state->group_type) < 0)
        return -1;
    return PyModule_AddFunctions(module, functions);
}
