#include "py/work.h"

#include "py/args.h"
#include "py/array.h"
#include "py/errors.h"
#include "py/glue.h"

#include <structmember.h>

typedef struct {
    PyObject_HEAD
    PyObject *weak;
    cd_work *work;
    PyObject *group;   /* kept: its world must outlive the operation */
    PyObject *outputs; /* array, list of arrays, or NULL */
    PyObject *array;   /* whose framework's current stream waits for GPU work; NULL: none */
    PyObject *future;  /* made at first get_future() */
    const char *function;
    int device_index;
} cd_py_work;

PyObject *cd_py_work_new(cd_py_state *state, cd_work *work, cd_py_group *group, const char *function, PyObject *outputs,
                         PyObject *array, int device_index)
{
    PyTypeObject *type = (PyTypeObject *)state->work_type;
    cd_py_work *self = (cd_py_work *)type->tp_alloc(type, 0);
    if (!self) {
        Py_XDECREF(outputs);
        cd_work_release(work);
        return NULL;
    }
    self->work = work;
    self->group = Py_NewRef((PyObject *)group);
    self->outputs = outputs;
    self->array = Py_XNewRef(array);
    self->function = function;
    self->device_index = device_index;
    return (PyObject *)self;
}

static int find_stream(cd_py_work *self, cd_py_state *state, void **stream_p)
{
    *stream_p = NULL;
    if (self->device_index < 0 || !self->array)
        return 0;
    return cd_py_array_stream(state, self->array, self->device_index, stream_p);
}

/* on_host: waits until the data is there; otherwise GPU work only orders the current stream behind it. */
static PyObject *wait_work(cd_py_work *self, PyObject *timeout, bool on_host)
{
    cd_py_state *state = cd_py_state_of_type(Py_TYPE(self));
    uint64_t ns;
    void *stream;
    if (!state || cd_py_timeout_ns(timeout, UINT64_MAX, &ns) < 0 || find_stream(self, state, &stream) < 0)
        return NULL;
    cd_status status;
    if (self->device_index < 0 && cd_work_is_done(self->work)) {
        status = cd_work_status(self->work);
    } else {
        cd_py_wait wait;
        cd_patience patience = cd_py_wait_begin(&wait, cd_py_deadline(ns), 1);
        wait.world = cd_group_world(((cd_py_group *)self->group)->group);
        cd_py_wait_detach(&wait);
        status = on_host ? cd_work_wait(self->work, &patience) : cd_work_join_stream(self->work, stream, &patience);
        cd_py_wait_end(&wait);
    }
    if (status != CD_OK)
        return cd_py_raise_from(state, status, self->function);
    Py_RETURN_TRUE;
}

static PyObject *wait_fast(PyObject *object, PyObject *const *args, Py_ssize_t given, PyObject *keywords)
{
    static const char *const names[] = {"timeout"};
    static const cd_py_signature signature = {"wait", names, 1, 0};
    PyObject *timeout;
    if (cd_py_args(&signature, args, given, keywords, &timeout) < 0)
        return NULL;
    return wait_work((cd_py_work *)object, timeout, ((cd_py_work *)object)->device_index < 0 || cd_py_is_given(timeout));
}

static PyObject *synchronize(PyObject *object, PyObject *unused)
{
    (void)unused;
    PyObject *done = wait_work((cd_py_work *)object, NULL, false);
    Py_XDECREF(done);
    return done ? Py_NewRef(Py_None) : NULL;
}

static PyObject *is_completed(PyObject *object, PyObject *unused)
{
    (void)unused;
    return PyBool_FromLong(cd_work_is_done(((cd_py_work *)object)->work));
}

static PyObject *is_success(PyObject *object, PyObject *unused)
{
    (void)unused;
    cd_work *work = ((cd_py_work *)object)->work;
    return PyBool_FromLong(cd_work_is_done(work) && cd_work_status(work) == CD_OK);
}

static PyObject *get_exception(PyObject *object, PyObject *unused)
{
    (void)unused;
    cd_py_work *self = (cd_py_work *)object;
    cd_py_state *state = cd_py_state_of_type(Py_TYPE(object));
    if (!state)
        return NULL;
    if (!cd_work_is_done(self->work) || cd_work_status(self->work) == CD_OK)
        Py_RETURN_NONE;
    cd_error error = *cd_last_error();
    return cd_py_exception_of(state, &error, self->function);
}

static PyObject *get_result(PyObject *object, PyObject *unused)
{
    (void)unused;
    PyObject *outputs = ((cd_py_work *)object)->outputs;
    if (outputs && PyList_Check(outputs))
        return PySequence_List(outputs);
    PyObject *list = PyList_New(outputs ? 1 : 0);
    if (list && outputs)
        PyList_SET_ITEM(list, 0, Py_NewRef(outputs));
    return list;
}

static PyObject *get_future(PyObject *object, PyObject *unused)
{
    (void)unused;
    cd_py_work *self = (cd_py_work *)object;
    if (!self->future) {
        PyObject *module = PyImport_ImportModule("cdist.futures");
        self->future = module ? PyObject_CallMethod(module, "_of_work", "O", object) : NULL;
        Py_XDECREF(module);
    }
    return Py_XNewRef(self->future);
}

static PyObject *get_source(PyObject *object, PyObject *unused)
{
    (void)unused;
    return PyLong_FromLong(cd_work_source(((cd_py_work *)object)->work));
}

static PyObject *get_op_type(PyObject *object, PyObject *unused)
{
    (void)unused;
    return PyUnicode_FromString(((cd_py_work *)object)->function);
}

static PyObject *get_sequence_number(PyObject *object, PyObject *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLongLong(cd_work_op(((cd_py_work *)object)->work)->sequence);
}

static PyObject *get_duration(PyObject *object, PyObject *unused)
{
    (void)unused;
    return PyFloat_FromDouble((double)cd_work_duration_ns(((cd_py_work *)object)->work) / 1e6);
}

static PyObject *box(PyObject *object, PyObject *unused)
{
    (void)unused;
    return Py_NewRef(object);
}

static int traverse_work(PyObject *object, visitproc visit, void *arg)
{
    cd_py_work *self = (cd_py_work *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->group);
    Py_VISIT(self->outputs);
    Py_VISIT(self->array);
    Py_VISIT(self->future);
    return 0;
}

static int clear_work(PyObject *object)
{
    cd_py_work *self = (cd_py_work *)object;
    Py_CLEAR(self->future);
    Py_CLEAR(self->outputs);
    Py_CLEAR(self->array);
    return 0;
}

static void free_work(PyObject *object)
{
    cd_py_work *self = (cd_py_work *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    if (self->weak)
        PyObject_ClearWeakRefs(object);
    clear_work(object);
    cd_work_release(self->work);
    Py_CLEAR(self->group);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMemberDef members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(cd_py_work, weak), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyObject *get_group(PyObject *object, void *unused)
{
    (void)unused;
    return Py_NewRef(((cd_py_work *)object)->group);
}

static PyGetSetDef fields[] = {
    {"_group", get_group, NULL, "The group it runs on.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef methods[] = {
    {"wait", (PyCFunction)(void (*)(void))wait_fast, METH_FASTCALL | METH_KEYWORDS,
     "wait($self, /, timeout=None)\n--\n\n"
     "Blocks until the operation is complete; returns True or raises its error.\n\n"
     "With a timeout (seconds or timedelta) that ends first: DistTimeoutError, and the operation goes on. GPU: without\n"
     "a timeout the current stream waits, not the host."},
    {"is_completed", is_completed, METH_NOARGS, "is_completed($self, /)\n--\n\nTrue once it has ended, well or not."},
    {"is_success", is_success, METH_NOARGS, "is_success($self, /)\n--\n\nTrue once it has ended well."},
    {"exception", get_exception, METH_NOARGS, "exception($self, /)\n--\n\nIts error, or None (while it runs too)."},
    {"result", get_result, METH_NOARGS,
     "result($self, /)\n--\n\nThe output arrays, the same objects as were passed, in a list. Valid after wait()."},
    {"get_future", get_future, METH_NOARGS,
     "get_future($self, /)\n--\n\nA Future whose value() is the list of outputs (torch.futures.Future for torch tensors)."},
    {"source_rank", get_source, METH_NOARGS, "source_rank($self, /)\n--\n\nGlobal rank that a finished receive came from."},
    {"_source_rank", get_source, METH_NOARGS, "_source_rank($self, /)\n--\n\nSee source_rank."},
    {"synchronize", synchronize, METH_NOARGS, "synchronize($self, /)\n--\n\nGPU: orders the current stream; CPU: wait()."},
    {"block_current_stream", synchronize, METH_NOARGS, "block_current_stream($self, /)\n--\n\nSee synchronize."},
    {"boxed", box, METH_NOARGS, "boxed($self, /)\n--\n\nItself."},
    {"unbox", box, METH_NOARGS, "unbox($self, /)\n--\n\nItself."},
    {"_get_op_type", get_op_type, METH_NOARGS, "_get_op_type($self, /)\n--\n\nName of the function."},
    {"_get_sequence_number", get_sequence_number, METH_NOARGS,
     "_get_sequence_number($self, /)\n--\n\nPlace in the order of the group's collectives; 0 until it runs."},
    {"_get_duration", get_duration, METH_NOARGS, "_get_duration($self, /)\n--\n\nMilliseconds from start to end."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Handle of an operation that was started with async_op=True (or isend, irecv). It keeps the arrays alive."},
    {Py_tp_dealloc, free_work},
    {Py_tp_traverse, traverse_work},
    {Py_tp_clear, clear_work},
    {Py_tp_members, members},
    {Py_tp_getset, fields},
    {Py_tp_methods, methods},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "cdist._core.Work",
    .basicsize = sizeof(cd_py_work),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = slots,
};

int cd_py_work_add(PyObject *module)
{
    cd_py_state *state = cd_py_state_of(module);
    state->work_type = PyType_FromModuleAndSpec(module, &spec, NULL);
    return state->work_type ? PyModule_AddType(module, (PyTypeObject *)state->work_type) : -1;
}
