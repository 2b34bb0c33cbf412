/* GradientHook: what torch calls for each parameter whose gradient is complete. */
#include "py/reducer_impl.h"

#include <structmember.h>

/* What torch calls as hook(parameter) when its gradient is complete. */
typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    cd_py_reducer *reducer;
    PyObject *view; /* of the gradient in its bucket */
    PyObject *copy; /* its bound method copy_ */
    PyObject *dtype;
    cd_py_state *state;
    void *place;    /* address of the view */
    size_t bytes;   /* of the view if it is contiguous and small, otherwise 0 */
    int index;
    bool link;      /* parameter.grad becomes the view */
    bool late;      /* copied together with others (on a GPU, where each copy is a launch) */
} hook_object;

/* Up to here the call of copy_ costs more than the copy: the bytes are moved right here. Beyond it torch may use its threads. */
#define DIRECT_BYTES ((size_t)262144)

static int hook_traverse(PyObject *object, visitproc visit, void *arg)
{
    hook_object *self = (hook_object *)object;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT((PyObject *)self->reducer);
    Py_VISIT(self->view);
    Py_VISIT(self->copy);
    Py_VISIT(self->dtype);
    return 0;
}

static int hook_clear(PyObject *object)
{
    hook_object *self = (hook_object *)object;
    Py_CLEAR(self->reducer);
    Py_CLEAR(self->view);
    Py_CLEAR(self->copy);
    Py_CLEAR(self->dtype);
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

/* Whether object.method() is true; an error (sparse tensors have no such layout) is a no. */
static bool answers_true(PyObject *object, PyObject *method)
{
    PyObject *answer = PyObject_CallMethodNoArgs(object, method);
    bool truth = answer == Py_True;
    Py_XDECREF(answer);
    PyErr_Clear();
    return truth;
}

/* A plain contiguous tensor of the bucket's dtype, of small size: its bytes are moved without torch. False: not done. The shape
 * is the parameter's, which torch itself sees to. */
static bool copy_directly(const hook_object *self, PyObject *grad)
{
    const cd_py_state *state = self->state;
    if (!self->bytes || Py_TYPE(grad) != Py_TYPE(self->view))
        return false;
    PyObject *dtype = PyObject_GetAttr(grad, state->dtype_name);
    bool same = dtype == self->dtype;
    Py_XDECREF(dtype);
    if (!same || !answers_true(grad, state->is_contiguous_name)) {
        PyErr_Clear();
        return false;
    }
    PyObject *address = PyObject_CallMethodNoArgs(grad, state->data_ptr_name);
    void *from = address ? PyLong_AsVoidPtr(address) : NULL;
    Py_XDECREF(address);
    if (!from || PyErr_Occurred()) {
        PyErr_Clear();
        return false;
    }
    memcpy(self->place, from, self->bytes);
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
    if (grad == Py_None || grad == self->view) {
        self->reducer->linked += grad != Py_None;
        Py_DECREF(grad);
        return 0;
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

/* Size of the view if copy_directly may fill it. */
static int direct_bytes(cd_py_state *state, PyObject *view, size_t *bytes_p)
{
    PyObject *bytes = PyObject_GetAttrString(view, "nbytes");
    if (!bytes)
        return -1;
    size_t size = PyLong_AsSize_t(bytes);
    Py_DECREF(bytes);
    if (PyErr_Occurred())
        return -1;
    *bytes_p = size <= DIRECT_BYTES && answers_true(view, state->is_contiguous_name) ? size : 0;
    return 0;
}

PyObject *cd_py_reducer_hook(PyObject *object, PyObject *args)
{
    cd_py_reducer *self = (cd_py_reducer *)object;
    PyObject *number, *view;
    int link, direct, index;
    size_t bytes = 0;
    if (!PyArg_ParseTuple(args, "OOpp:hook", &number, &view, &link, &direct) || cd_py_reducer_index(self, number, &index) < 0)
        return NULL;
    cd_py_state *state = cd_py_state_of_type(Py_TYPE(self));
    PyObject *copy = state ? PyObject_GetAttrString(view, "copy_") : NULL;
    PyObject *dtype = copy ? PyObject_GetAttr(view, state->dtype_name) : NULL;
    hook_object *hook = NULL;
    if (dtype && (!direct || direct_bytes(state, view, &bytes) == 0))
        hook = PyObject_GC_New(hook_object, (PyTypeObject *)state->gradient_hook_type);
    if (!hook) {
        Py_XDECREF(dtype);
        Py_XDECREF(copy);
        return NULL;
    }
    hook->call = hook_call;
    hook->copy = copy;
    hook->dtype = dtype;
    hook->state = state;
    hook->place = cd_reducer_view(self->reducer, index);
    hook->bytes = bytes;
    hook->reducer = (cd_py_reducer *)Py_NewRef(object);
    hook->view = Py_NewRef(view);
    hook->index = index;
    hook->link = link != 0;
    hook->late = !direct;
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
    state->is_contiguous_name = PyUnicode_InternFromString("is_contiguous");
    state->data_ptr_name = PyUnicode_InternFromString("data_ptr");
    return state->gradient_hook_type && state->grad_name && state->requires_grad_name && state->is_contiguous_name &&
                   state->data_ptr_name
               ? 0
               : -1;
}
