#include "py/reducer_impl.h"

#include "py/errors.h"
#include "py/glue.h"
#include "py/group.h"

#include "ddp/reducer.h"

#include <structmember.h>

/* Memory of a bucket with the buffer protocol; keeps the reducer alive. */
typedef struct {
    PyObject_HEAD
    PyObject *owner;
    void *memory;
    Py_ssize_t bytes;
} buffer_object;

static PyObject *raise(PyObject *self, cd_status status, const char *operation)
{
    cd_py_state *state = cd_py_state_of_type(Py_TYPE(self));
    return state ? cd_py_raise_from(state, status, operation) : NULL;
}

static int create_reducer(cd_py_reducer *self, cd_py_state *state, PyObject *group, const cd_reducer_spec *spec)
{
    cd_py_group *shell;
    int member = cd_py_group_get(state, group, "Reducer", &shell);
    if (member == 0)
        PyErr_SetString(PyExc_ValueError, "Reducer: this rank does not belong to the group");
    if (member <= 0)
        return -1;
    self->group = shell->group;
    cd_status status = cd_reducer_create(shell->group, spec, &self->reducer);
    Py_DECREF(shell);
    if (status == CD_OK)
        return 0;
    cd_py_raise(state, status);
    return -1;
}

static int reducer_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"group", "counts", "dtypes", "bucket_of", "mode", "device", "memory", "order", NULL};
    cd_py_reducer *self = (cd_py_reducer *)object;
    PyObject *group, *counts, *dtypes, *bucket_of, *memory = Py_None, *order = Py_None;
    const char *mode = "mean", *device = "cpu";
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOO|ssOO:Reducer", names, &group, &counts, &dtypes, &bucket_of,
                                     &mode, &device, &memory, &order))
        return -1;
    cd_py_state *state = cd_py_state_of_type(Py_TYPE(self));
    cd_reducer_spec spec = {0};
    cd_device where;
    if (!state || cd_py_reducer_mode(mode, &spec.mode) < 0 || cd_py_reducer_device(device, &where) < 0)
        return -1;
    if (self->reducer) {
        PyErr_SetString(PyExc_RuntimeError, "a Reducer is made once");
        return -1;
    }
    int made = -1, entries;
    void **addresses = NULL;
    cd_reducer_param *params = cd_py_reducer_params(counts, dtypes, where, &spec.count);
    int *buckets = params ? cd_py_reducer_ints(bucket_of, spec.count, &entries) : NULL;
    int *sequence = buckets && order != Py_None ? cd_py_reducer_order(order, spec.count) : NULL;
    if (buckets && (sequence || order == Py_None)) {
        for (int i = 0; i < spec.count; i++)
            if (buckets[i] >= spec.buckets)
                spec.buckets = buckets[i] < spec.count ? buckets[i] + 1 : spec.count;
        spec.params = params;
        spec.bucket_of = buckets;
        spec.order = sequence;
        if (cd_py_reducer_memory(memory, spec.buckets, &addresses) == 0) {
            spec.memory = addresses;
            made = create_reducer(self, state, group, &spec);
        }
        self->count = spec.count;
        self->on_gpu = where != CD_CPU;
    }
    PyMem_Free(addresses);
    PyMem_Free(sequence);
    PyMem_Free(buckets);
    PyMem_Free(params);
    return made;
}

static int reducer_traverse(PyObject *object, visitproc visit, void *arg)
{
    cd_py_reducer *self = (cd_py_reducer *)object;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->owner);
    Py_VISIT(self->late_views);
    Py_VISIT(self->late_grads);
    Py_VISIT(self->late_params);
    return 0;
}

static void drop_late(cd_py_reducer *self)
{
    Py_CLEAR(self->late_views);
    Py_CLEAR(self->late_grads);
    Py_CLEAR(self->late_params);
}

static int reducer_clear(PyObject *object)
{
    cd_py_reducer *self = (cd_py_reducer *)object;
    Py_CLEAR(self->owner);
    drop_late(self);
    return 0;
}

static void reducer_dealloc(PyObject *object)
{
    cd_py_reducer *self = (cd_py_reducer *)object;
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    reducer_clear(object);
    cd_reducer_free(self->reducer);
    type->tp_free(self);
    Py_DECREF(type);
}

static void buffer_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    Py_CLEAR(((buffer_object *)object)->owner);
    type->tp_free(object);
    Py_DECREF(type);
}

static int buffer_get(PyObject *object, Py_buffer *view, int flags)
{
    buffer_object *self = (buffer_object *)object;
    return PyBuffer_FillInfo(view, object, self->memory, self->bytes, 0, flags);
}

/* Methods are of no use before __init__ succeeded. */
static int check_made(cd_py_reducer *self)
{
    if (self->reducer)
        return 0;
    PyErr_SetString(PyExc_RuntimeError, "this Reducer was not initialised");
    return -1;
}

int cd_py_reducer_index(cd_py_reducer *self, PyObject *object, int *index_p)
{
    long index = PyLong_AsLong(object);
    if (index == -1 && PyErr_Occurred())
        return -1;
    if (check_made(self) < 0)
        return -1;
    if (index < 0 || index >= self->count) {
        PyErr_Format(PyExc_IndexError, "there is no gradient %ld among %d", index, self->count);
        return -1;
    }
    *index_p = (int)index;
    return 0;
}

static PyObject *reducer_bucket(PyObject *object, PyObject *number)
{
    cd_py_reducer *self = (cd_py_reducer *)object;
    long k = PyLong_AsLong(number);
    if ((k == -1 && PyErr_Occurred()) || check_made(self) < 0)
        return NULL;
    if (k < 0 || k >= cd_reducer_buckets(self->reducer))
        return PyErr_Format(PyExc_IndexError, "there is no bucket %ld among %d", k, cd_reducer_buckets(self->reducer));
    cd_py_state *state = cd_py_state_of_type(Py_TYPE(self));
    buffer_object *buffer = state ? PyObject_New(buffer_object, (PyTypeObject *)state->bucket_buffer_type) : NULL;
    if (!buffer)
        return NULL;
    size_t bytes;
    buffer->memory = cd_reducer_bucket(self->reducer, (int)k, &bytes);
    buffer->bytes = (Py_ssize_t)bytes;
    buffer->owner = Py_NewRef(object);
    return (PyObject *)buffer;
}

static PyObject *reducer_offset(PyObject *object, PyObject *number)
{
    cd_py_reducer *self = (cd_py_reducer *)object;
    int index;
    if (cd_py_reducer_index(self, number, &index) < 0)
        return NULL;
    size_t offset;
    int bucket = cd_reducer_place(self->reducer, index, &offset);
    return Py_BuildValue("in", bucket, (Py_ssize_t)offset);
}

static PyObject *reducer_begin(PyObject *object, PyObject *step)
{
    cd_py_reducer *self = (cd_py_reducer *)object;
    long value = PyLong_AsLong(step);
    if ((value == -1 && PyErr_Occurred()) || check_made(self) < 0)
        return NULL;
    if (value < CD_STEP_LOCAL || value > CD_STEP_HANDOUT)
        return PyErr_Format(PyExc_ValueError, "step must be 0 (local), 1 (reduce) or 2 (hand out), not %ld", value);
    cd_py_wait wait;
    cd_patience patience = cd_py_wait_begin(&wait, cd_py_deadline(cd_group_timeout_ns(self->group)), 1);
    if (self->on_gpu)
        cd_py_wait_detach(&wait);
    cd_status status = cd_reducer_begin(self->reducer, (cd_step)value, &patience);
    cd_py_wait_end(&wait);
    if (status != CD_OK)
        return raise(object, status, "gradient reduction");
    self->step = (cd_step)value;
    self->linked = 0;
    /* What a backward pass that failed has left. */
    drop_late(self);
    Py_RETURN_NONE;
}

/* Calls owner._twice(index), which raises with the parameter's name. */
static PyObject *raise_twice(cd_py_reducer *self, int index)
{
    if (!self->owner)
        return raise((PyObject *)self, CD_BAD_ARGUMENT, NULL);
    PyObject *answer = PyObject_CallMethod(self->owner, "_twice", "i", index);
    Py_XDECREF(answer);
    if (answer)
        PyErr_Format(PyExc_RuntimeError, "gradient %d was marked ready twice", index);
    return NULL;
}

int cd_py_reducer_postpone(cd_py_reducer *self, PyObject *view, PyObject *grad, PyObject *param)
{
    if (!self->late_views) {
        self->late_views = PyList_New(0);
        self->late_grads = PyList_New(0);
        self->late_params = PyList_New(0);
        if (!self->late_views || !self->late_grads || !self->late_params) {
            drop_late(self);
            return -1;
        }
    }
    if (PyList_Append(self->late_views, view) < 0 || PyList_Append(self->late_grads, grad) < 0)
        return -1;
    return PyList_Append(self->late_params, param ? param : Py_None);
}

static int link_late(PyObject *grad_name, PyObject *params, PyObject *views)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(params); i++) {
        PyObject *param = PyList_GET_ITEM(params, i);
        if (param != Py_None && PyObject_SetAttr(param, grad_name, PyList_GET_ITEM(views, i)) < 0)
            return -1;
    }
    return 0;
}

int cd_py_reducer_flush(cd_py_reducer *self)
{
    if (cd_likely(!self->late_views))
        return 0;
    cd_py_state *state = cd_py_state_of_type(Py_TYPE(self));
    PyObject *views = self->late_views, *grads = self->late_grads, *params = self->late_params;
    self->late_views = self->late_grads = self->late_params = NULL;
    if (state && !state->foreach_copy) {
        PyObject *torch = PyImport_ImportModule("torch"); /* loaded: its tensors wait here */
        state->foreach_copy = torch ? PyObject_GetAttrString(torch, "_foreach_copy_") : NULL;
        Py_XDECREF(torch);
    }
    PyObject *copied = state && state->foreach_copy
                           ? PyObject_CallFunctionObjArgs(state->foreach_copy, views, grads, NULL)
                           : NULL;
    int result = copied ? link_late(state->grad_name, params, views) : -1;
    Py_XDECREF(copied);
    Py_DECREF(views);
    Py_DECREF(grads);
    Py_DECREF(params);
    return result;
}

/* Other threads, which may be those that the ranks wait for, go on while NCCL waits. */
static cd_status ready_on_gpu(cd_py_reducer *self, int index)
{
    cd_py_wait wait;
    cd_patience patience = cd_py_wait_begin(&wait, cd_py_deadline(cd_group_timeout_ns(self->group)), 1);
    cd_py_wait_detach(&wait);
    cd_status status = cd_reducer_ready(self->reducer, index, &patience);
    cd_py_wait_end(&wait);
    return status;
}

PyObject *cd_py_reducer_mark(cd_py_reducer *self, int index)
{
    bool completes = cd_unlikely(self->on_gpu || self->late_views) && cd_reducer_completes(self->reducer, index);
    if (completes && self->late_views && cd_py_reducer_flush(self) < 0)
        return NULL;
    cd_status status =
        completes && self->on_gpu ? ready_on_gpu(self, index) : cd_reducer_ready(self->reducer, index, NULL);
    if (cd_unlikely(status == CD_BAD_ARGUMENT))
        return raise_twice(self, index);
    if (cd_unlikely(status != CD_OK))
        return raise((PyObject *)self, status, "gradient reduction");
    if (self->step == CD_STEP_HANDOUT && self->owner)
        return PyObject_CallMethod(self->owner, "_hand_out", NULL);
    Py_RETURN_NONE;
}

static PyObject *reducer_ready(PyObject *object, PyObject *number)
{
    int index;
    if (cd_py_reducer_index((cd_py_reducer *)object, number, &index) < 0)
        return NULL;
    return cd_py_reducer_mark((cd_py_reducer *)object, index);
}

static PyObject *reducer_flush(PyObject *object, PyObject *Py_UNUSED(none))
{
    cd_py_reducer *self = (cd_py_reducer *)object;
    if (check_made(self) < 0 || cd_py_reducer_flush(self) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *reducer_seen(PyObject *object, PyObject *number)
{
    int index;
    if (cd_py_reducer_index((cd_py_reducer *)object, number, &index) < 0)
        return NULL;
    return PyLong_FromLong(cd_reducer_seen(((cd_py_reducer *)object)->reducer, index));
}

static PyObject *reducer_next_full(PyObject *object, PyObject *Py_UNUSED(none))
{
    cd_py_reducer *self = (cd_py_reducer *)object;
    return check_made(self) < 0 ? NULL : PyLong_FromLong(cd_reducer_next_full(self->reducer));
}

static PyObject *reducer_fill(PyObject *object, PyObject *expected)
{
    cd_py_reducer *self = (cd_py_reducer *)object;
    int truth = PyObject_IsTrue(expected), filled;
    if (truth < 0 || check_made(self) < 0)
        return NULL;
    cd_status status = cd_reducer_fill(self->reducer, truth, &filled);
    return status == CD_OK ? PyLong_FromLong(filled) : raise(object, status, "gradient reduction");
}

static PyObject *reducer_finish(PyObject *object, PyObject *expected)
{
    cd_py_reducer *self = (cd_py_reducer *)object;
    int truth = PyObject_IsTrue(expected);
    if (truth < 0 || check_made(self) < 0)
        return NULL;
    cd_py_wait wait;
    cd_patience patience = cd_py_wait_begin(&wait, CD_NEVER, cd_group_size(self->group)); /* each operation has a deadline */
    if (self->on_gpu)
        cd_py_wait_detach(&wait);
    cd_status status = cd_reducer_finish(self->reducer, truth, &patience);
    cd_py_wait_end(&wait);
    if (status == CD_BAD_ARGUMENT)
        Py_RETURN_FALSE;
    if (status != CD_OK)
        return raise(object, status, "gradient reduction");
    Py_RETURN_TRUE;
}

static PyObject *reducer_missing(PyObject *object, PyObject *Py_UNUSED(none))
{
    cd_py_reducer *self = (cd_py_reducer *)object;
    if (check_made(self) < 0)
        return NULL;
    Py_ssize_t bytes = (Py_ssize_t)self->count * cd_group_size(self->group);
    PyObject *out = PyBytes_FromStringAndSize(NULL, bytes);
    if (!out)
        return NULL;
    cd_py_wait wait;
    uint64_t timeout = cd_group_timeout_ns(self->group);
    cd_patience patience = cd_py_wait_begin(&wait, cd_py_deadline(timeout), cd_group_size(self->group));
    cd_status status = cd_reducer_gather_missing(self->reducer, (uint8_t *)PyBytes_AS_STRING(out), &patience);
    cd_py_wait_end(&wait);
    if (status == CD_OK)
        return out;
    Py_DECREF(out);
    return raise(object, status, "gradient reduction");
}

static PyObject *reducer_ready_order(PyObject *object, PyObject *Py_UNUSED(none))
{
    cd_py_reducer *self = (cd_py_reducer *)object;
    if (check_made(self) < 0)
        return NULL;
    int count;
    const int *order = cd_reducer_ready_order(self->reducer, &count);
    PyObject *list = PyList_New(count);
    for (int i = 0; list && i < count; i++) {
        PyObject *number = PyLong_FromLong(order[i]);
        if (!number) {
            Py_DECREF(list);
            return NULL;
        }
        PyList_SET_ITEM(list, i, number);
    }
    return list;
}

static PyObject *reducer_set_divisor(PyObject *object, PyObject *value)
{
    double divisor = PyFloat_AsDouble(value);
    if (PyErr_Occurred() || check_made((cd_py_reducer *)object) < 0)
        return NULL;
    if (!(divisor > 0)) {
        PyErr_SetString(PyExc_ValueError, "the divisor must be positive");
        return NULL;
    }
    cd_reducer_set_divisor(((cd_py_reducer *)object)->reducer, divisor);
    Py_RETURN_NONE;
}

static PyObject *reducer_set_scale(PyObject *object, PyObject *value)
{
    double scale = PyFloat_AsDouble(value);
    if (PyErr_Occurred() || check_made((cd_py_reducer *)object) < 0)
        return NULL;
    cd_reducer_set_scale(((cd_py_reducer *)object)->reducer, scale);
    Py_RETURN_NONE;
}

static PyObject *reducer_set_uses(PyObject *object, PyObject *uses)
{
    cd_py_reducer *self = (cd_py_reducer *)object;
    int count;
    if (check_made(self) < 0)
        return NULL;
    int *list = cd_py_reducer_ints(uses, self->count, &count);
    if (!list)
        return NULL;
    cd_reducer_set_uses(self->reducer, list);
    PyMem_Free(list);
    Py_RETURN_NONE;
}

static PyObject *reducer_set_stream(PyObject *object, PyObject *stream)
{
    void *address = PyLong_AsVoidPtr(stream);
    if (PyErr_Occurred() || check_made((cd_py_reducer *)object) < 0)
        return NULL;
    cd_reducer_set_stream(((cd_py_reducer *)object)->reducer, address);
    Py_RETURN_NONE;
}

static PyObject *reducer_launched(PyObject *object, void *Py_UNUSED(closure))
{
    cd_py_reducer *self = (cd_py_reducer *)object;
    if (check_made(self) < 0)
        return NULL;
    uint64_t buckets, bytes;
    cd_reducer_launched(self->reducer, &buckets, &bytes);
    return Py_BuildValue("KK", (unsigned long long)buckets, (unsigned long long)bytes);
}

static PyObject *reducer_first_launch(PyObject *object, void *Py_UNUSED(closure))
{
    cd_py_reducer *self = (cd_py_reducer *)object;
    if (check_made(self) < 0)
        return NULL;
    return PyLong_FromUnsignedLongLong(cd_reducer_first_launch_ns(self->reducer));
}

static PyObject *reducer_unready(PyObject *object, void *Py_UNUSED(closure))
{
    cd_py_reducer *self = (cd_py_reducer *)object;
    if (check_made(self) < 0)
        return NULL;
    int ready;
    (void)cd_reducer_ready_order(self->reducer, &ready);
    return PyLong_FromLong(self->count - ready);
}

static PyObject *reducer_buckets(PyObject *object, void *Py_UNUSED(closure))
{
    cd_py_reducer *self = (cd_py_reducer *)object;
    return check_made(self) < 0 ? NULL : PyLong_FromLong(cd_reducer_buckets(self->reducer));
}

/* ---- types ---- */

static PyMethodDef reducer_methods[] = {
    {"bucket", reducer_bucket, METH_O, "bucket(k): memory of the gradients of bucket k, as a writable buffer of bytes."},
    {"place", reducer_offset, METH_O, "place(i): (bucket, offset in bytes) of gradient i."},
    {"begin", reducer_begin, METH_O, "begin(step): all gradients become unready; 0 local, 1 reduce, 2 hand out."},
    {"ready", reducer_ready, METH_O, "ready(i): gradient i lies complete in its place."},
    {"flush", reducer_flush, METH_NOARGS, "Copies the gradients that hooks have not copied yet to their places."},
    {"seen", reducer_seen, METH_O, "seen(i): how often gradient i was marked since begin."},
    {"next_full", reducer_next_full, METH_NOARGS, "The next full bucket to be handed out, or -1."},
    {"fill", reducer_fill, METH_O, "fill(expected): zeros for unready gradients; returns how many."},
    {"finish", reducer_finish, METH_O, "finish(expected): waits for all buckets; False if a gradient was missing on a rank."},
    {"missing", reducer_missing, METH_NOARGS, "bytes of (world, count): 1 where a rank missed a gradient. Collective."},
    {"ready_order", reducer_ready_order, METH_NOARGS, "Gradients in the order in which they became ready."},
    {"set_divisor", reducer_set_divisor, METH_O, "Divides by this instead of the group's size."},
    {"set_scale", reducer_set_scale, METH_O, "Multiplies this rank's gradients before the sum."},
    {"set_uses", reducer_set_uses, METH_O, "How often each gradient is marked in a step before it counts."},
    {"set_stream", reducer_set_stream, METH_O, "The CUDA stream that computes the gradients."},
    {"hook", cd_py_reducer_hook, METH_VARARGS,
     "hook(i, view, link, direct): callable(parameter) that places and marks gradient i. `link`: its grad becomes the view; "
     "`direct`: up to how many bytes a gradient in CPU memory is copied without torch; 0: it lies in GPU memory, and is copied "
     "together with others when a bucket is full."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef reducer_getset[] = {
    {"launched", reducer_launched, NULL, "(buckets, bytes) sent since it was made.", NULL},
    {"first_launch_ns", reducer_first_launch, NULL, "When this step's first reduction began (monotonic ns); 0: none did.",
     NULL},
    {"unready", reducer_unready, NULL, "Gradients that are not ready yet in this step.", NULL},
    {"buckets", reducer_buckets, NULL, "Number of buckets.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef reducer_members[] = {
    {"owner", T_OBJECT, offsetof(cd_py_reducer, owner), 0, "Object with _begin_backward, _hand_out and _twice."},
    {"backward", T_BOOL, offsetof(cd_py_reducer, backward), 0, "A backward pass goes on: hooks do not announce it."},
    {"linked", T_INT, offsetof(cd_py_reducer, linked), READONLY, "Gradients that hooks made views since begin."},
    {"step", T_INT, offsetof(cd_py_reducer, step), READONLY, "Kind of the step: 0 local, 1 reduce, 2 hand out."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot reducer_slots[] = {
    {Py_tp_doc, "Reducer(group, counts, dtypes, bucket_of, mode='mean', device='cpu', memory=None)\n--\n\n"
                "Buckets of gradients that are reduced over the ranks of a group while backward goes on."},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, reducer_init},
    {Py_tp_dealloc, reducer_dealloc},
    {Py_tp_traverse, reducer_traverse},
    {Py_tp_clear, reducer_clear},
    {Py_tp_methods, reducer_methods},
    {Py_tp_getset, reducer_getset},
    {Py_tp_members, reducer_members},
    {0, NULL},
};

static PyType_Slot buffer_slots[] = {
    {Py_tp_dealloc, buffer_dealloc},
    {Py_bf_getbuffer, buffer_get},
    {0, NULL},
};

static PyType_Spec reducer_spec = {"cdist._core.Reducer", sizeof(cd_py_reducer), 0,
                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, reducer_slots};
static PyType_Spec buffer_spec = {"cdist._core.BucketBuffer", sizeof(buffer_object), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, buffer_slots};
int cd_py_reducer_add(PyObject *module)
{
    cd_py_state *state = cd_py_state_of(module);
    state->reducer_type = PyType_FromModuleAndSpec(module, &reducer_spec, NULL);
    if (!state->reducer_type || PyModule_AddType(module, (PyTypeObject *)state->reducer_type) < 0)
        return -1;
    state->bucket_buffer_type = PyType_FromModuleAndSpec(module, &buffer_spec, NULL);
    if (!state->bucket_buffer_type || cd_py_hook_add(module) < 0)
        return -1;
    return cd_py_buckets_add(module);
}
