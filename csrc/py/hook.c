/* GradientHook: what torch calls for each parameter whose gradient is complete. */
#include "py/array_impl.h"
#include "py/reducer_impl.h"

#include "simd/copy.h"

#include <structmember.h>

/* Gradients from here on are copied around the caches. 2 ranks on a 2-core EPYC that each write gradients and copy them to
 * their buckets, milliseconds over writing alone: 64 × 256 KiB 2.2 by memcpy, 1.2 around the caches; 19 × 2.25 MiB 6.1 and
 * 2.4. With the reduction of both 3.1 and 2.9; 11.8 and 5.0. What synchronising costs a step of benchmarks/ddp.py's MLP, which
 * uses its caches itself: 1.3 ms and 0.74. */
#define FAR_FROM ((size_t)65536)

/* What torch calls as hook(parameter) when its gradient is complete. */
typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    cd_py_reducer *reducer;
    PyObject *view; /* of the gradient in its bucket */
    PyObject *copy; /* its bound method copy_ */
    cd_py_state *state;
    const cd_dl_exchange *api; /* of tensors, NULL: torch copies */
    cd_dl_tensor place;        /* the view; shape and strides are its own */
    size_t bytes;              /* of the view */
    int index;
    bool link;                 /* parameter.grad becomes the view */
    bool late;                 /* copied together with others (on a GPU, where each copy is a launch) */
} hook_object;

static int hook_traverse(PyObject *object, visitproc visit, void *arg)
{
    hook_object *self = (hook_object *)object;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT((PyObject *)self->reducer);
    Py_VISIT(self->view);
    Py_VISIT(self->copy);
    return 0;
}

static int hook_clear(PyObject *object)
{
    hook_object *self = (hook_object *)object;
    Py_CLEAR(self->reducer);
    Py_CLEAR(self->view);
    Py_CLEAR(self->copy);
    return 0;
}

static void hook_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    hook_clear(object);
    type->tp_free(object);
    Py_DECREF(type);
}

/* backward(create_graph=True) gives gradients that have a graph themselves: the bucket must not join it. Steals `grad`. */
static PyObject *without_graph(const hook_object *self, PyObject *grad)
{
    PyObject *needs = PyObject_GetAttr(grad, self->state->requires_grad_name);
    if (needs == Py_True)
        Py_SETREF(grad, PyObject_CallMethod(grad, "detach", NULL));
    else if (!needs)
        Py_CLEAR(grad);
    Py_XDECREF(needs);
    return grad;
}

/* Whether the elements of both lie in the same places of their memory; dimensions of extent 1 have no stride that matters. */
static bool is_laid_out_alike(const cd_dl_tensor *a, const cd_dl_tensor *b)
{
    if (a->ndim != b->ndim || a->dtype.code != b->dtype.code || a->dtype.bits != b->dtype.bits ||
        a->dtype.lanes != b->dtype.lanes || a->device.device_type != CD_DL_CPU || (a->ndim && (!a->strides || !b->strides)))
        return false;
    for (int i = 0; i < a->ndim; i++)
        if (a->shape[i] != b->shape[i] || (a->strides[i] != b->strides[i] && a->shape[i] != 1))
            return false;
    return true;
}

/* A plain tensor of the bucket's dtype with the view's strides: its bytes are moved without torch. False: not done. */
static bool copy_directly(const hook_object *self, PyObject *grad)
{
    cd_dl_tensor given;
    if (!self->api || Py_TYPE(grad) != Py_TYPE(self->view))
        return false;
    if (self->api->export_borrowed(grad, &given) < 0) {
        PyErr_Clear(); /* sparse, without memory of its own: torch knows */
        return false;
    }
    const char *data = (char *)given.data + given.byte_offset;
    if (!is_laid_out_alike(&given, &self->place) || cd_py_array_may_be_imaginary(data, given.dtype.bits / 8))
        return false;
    char *to = (char *)self->place.data + self->place.byte_offset;
    if (self->bytes < FAR_FROM)
        memcpy(to, data, self->bytes);
    else
        cd_copy_far(to, data, self->bytes);
    return true;
}

/* Copies with torch. Steals `grad`. */
static int copy_by_torch(const hook_object *self, PyObject *grad)
{
    grad = without_graph(self, grad);
    PyObject *copied = grad ? PyObject_CallOneArg(self->copy, grad) : NULL;
    Py_XDECREF(copied);
    Py_XDECREF(grad);
    return copied ? 0 : -1;
}

/* The gradient goes to its place in the bucket unless it is there already. */
static int place_gradient(hook_object *self, PyObject *param)
{
    PyObject *grad = PyObject_GetAttr(param, self->state->grad_name);
    if (!grad)
        return -1;
    if (grad == self->view) {
        self->reducer->linked++;
        Py_DECREF(grad);
        return 0;
    }
    if (grad == Py_None) { /* a function that autograd went through has said so, or another hook has taken it */
        Py_DECREF(grad);
        PyObject *zeroed = PyObject_CallMethod(self->view, "zero_", NULL);
        Py_XDECREF(zeroed);
        return zeroed ? 0 : -1;
    }
    if (self->late) {
        grad = without_graph(self, grad);
        int postponed = grad ? cd_py_reducer_postpone(self->reducer, self->view, grad, self->link ? param : NULL) : -1;
        Py_XDECREF(grad);
        self->reducer->linked += self->link;
        return postponed;
    }
    if (copy_directly(self, grad))
        Py_DECREF(grad);
    else if (copy_by_torch(self, grad) < 0)
        return -1;
    if (!self->link)
        return 0;
    self->reducer->linked++;
    return PyObject_SetAttr(param, self->state->grad_name, self->view);
}

static PyObject *hook_call(PyObject *object, PyObject *const *args, size_t nargs, PyObject *names)
{
    hook_object *self = (hook_object *)object;
    cd_py_reducer *reducer = self->reducer;
    if (PyVectorcall_NARGS(nargs) != 1 || names || !reducer)
        return PyErr_Format(PyExc_TypeError, "a gradient hook takes one parameter");
    if (!reducer->backward) {
        PyObject *begun = reducer->owner ? PyObject_CallMethod(reducer->owner, "_begin_backward", NULL) : NULL;
        if (!begun)
            return NULL;
        int go = PyObject_IsTrue(begun);
        Py_DECREF(begun);
        if (go < 1)
            return go < 0 ? NULL : Py_NewRef(Py_None);
    }
    if (reducer->step != CD_STEP_LOCAL && place_gradient(self, args[0]) < 0)
        return NULL;
    return cd_py_reducer_mark(reducer, self->index);
}

/* Sets api, place and bytes where copy_directly may fill the view: it has no gaps, and no lazy conjugation, of which the table
 * does not tell. */
static void set_direct(hook_object *hook, size_t most_bytes)
{
    const cd_dl_exchange *api = cd_py_dlpack_table(hook->state, Py_TYPE(hook->view));
    if (!api || !api->export_borrowed || api->export_borrowed(hook->view, &hook->place) < 0) {
        PyErr_Clear();
        return;
    }
    const cd_dl_tensor *place = &hook->place;
    size_t count = 1, reach = 1;
    for (int i = 0; i < place->ndim; i++) {
        count *= (size_t)place->shape[i];
        if (place->shape[i] > 1 && place->strides)
            reach += (size_t)(place->shape[i] - 1) * (size_t)place->strides[i];
    }
    hook->bytes = count * ((size_t)place->dtype.bits / 8 * place->dtype.lanes);
    if (count == reach && place->dtype.code != CD_DL_COMPLEX && hook->bytes <= most_bytes)
        hook->api = api;
}

PyObject *cd_py_reducer_hook(PyObject *object, PyObject *args)
{
    cd_py_reducer *self = (cd_py_reducer *)object;
    PyObject *number, *view;
    int link, index;
    Py_ssize_t direct;
    if (!PyArg_ParseTuple(args, "OOpn:hook", &number, &view, &link, &direct) || cd_py_reducer_index(self, number, &index) < 0)
        return NULL;
    cd_py_state *state = cd_py_state_of_type(Py_TYPE(self));
    PyObject *copy = state ? PyObject_GetAttrString(view, "copy_") : NULL;
    hook_object *hook = copy ? PyObject_GC_New(hook_object, (PyTypeObject *)state->gradient_hook_type) : NULL;
    if (!hook) {
        Py_XDECREF(copy);
        return NULL;
    }
    hook->call = hook_call;
    hook->copy = copy;
    hook->state = state;
    hook->api = NULL;
    hook->bytes = 0;
    hook->reducer = (cd_py_reducer *)Py_NewRef(object);
    hook->view = Py_NewRef(view);
    hook->index = index;
    hook->link = link != 0;
    hook->late = direct == 0;
    if (direct > 0)
        set_direct(hook, (size_t)direct);
    PyObject_GC_Track(hook);
    return (PyObject *)hook;
}

static PyMemberDef hook_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(hook_object, call), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot hook_slots[] = {
    {Py_tp_dealloc, hook_dealloc},   {Py_tp_traverse, hook_traverse},     {Py_tp_clear, hook_clear},
    {Py_tp_members, hook_members},   {Py_tp_call, PyVectorcall_Call},     {0, NULL},
};

static PyType_Spec hook_spec = {"cdist._core.GradientHook", sizeof(hook_object), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
                                    Py_TPFLAGS_DISALLOW_INSTANTIATION,
                                hook_slots};

int cd_py_hook_add(PyObject *module)
{
    cd_py_state *state = cd_py_state_of(module);
    state->gradient_hook_type = PyType_FromModuleAndSpec(module, &hook_spec, NULL);
    state->grad_name = PyUnicode_InternFromString("grad");
    state->requires_grad_name = PyUnicode_InternFromString("requires_grad");
    return state->gradient_hook_type && state->grad_name && state->requires_grad_name ? 0 : -1;
}
