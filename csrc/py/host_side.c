#include "py/host_side.h"

#include "py/group.h"

typedef struct {
    PyObject_HEAD
    PyObject *group;
} host_side;

bool cd_py_is_host_side(const cd_py_state *state, PyObject *object)
{
    return object && Py_TYPE(object) == (PyTypeObject *)state->host_side_type;
}

PyObject *cd_py_host_side_group(PyObject *object)
{
    return ((host_side *)object)->group;
}

int cd_py_refuse_device(const char *function, cd_device device)
{
    PyErr_Format(PyExc_TypeError,
                 "%s: No backend type associated with device type %s: the group was made for arrays %s alone; name a backend "
                 "for each (backend='cpu:gloo,cuda:nccl'), or move the array there",
                 function, device == CD_CPU ? "cpu" : "cuda", device == CD_CPU ? "in GPU memory" : "in host memory");
    return -1;
}

static void free_host_side(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    Py_DECREF(((host_side *)object)->group);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyType_Slot host_side_slots[] = {
    {Py_tp_dealloc, free_host_side},
    {0, NULL},
};

static PyType_Spec host_side_spec = {
    .name = "cdist._core._HostSide",
    .basicsize = sizeof(host_side),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = host_side_slots,
};

/* What is no group passes through: the call that gets it says so. */
static PyObject *make_host_side(PyObject *module, PyObject *group)
{
    cd_py_state *state = cd_py_state_of(module);
    if (group == Py_None && state->default_group)
        group = state->default_group;
    if (!PyObject_TypeCheck(group, (PyTypeObject *)state->group_type))
        return Py_NewRef(group);
    PyTypeObject *type = (PyTypeObject *)state->host_side_type;
    host_side *self = (host_side *)type->tp_alloc(type, 0);
    if (self)
        self->group = Py_NewRef(group);
    return (PyObject *)self;
}

static PyObject *set_served(PyObject *module, PyObject *args)
{
    PyObject *object;
    int cpu, cuda;
    if (!PyArg_ParseTuple(args, "O!pp:_serve", cd_py_state_of(module)->group_type, &object, &cpu, &cuda))
        return NULL;
    cd_py_group *group = (cd_py_group *)object;
    group->serves[CD_CPU] = cpu != 0;
    group->serves[CD_CUDA] = cuda != 0;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"_serve", set_served, METH_VARARGS,
     "_serve(group, cpu, cuda): whether a backend was named for arrays there; both at first."},
    {"_host_side", make_host_side, METH_O,
     "_host_side(group): for values of cdist's own in host memory, which move in groups for GPUs alone too."},
    {NULL, NULL, 0, NULL},
};

int cd_py_host_side_add(PyObject *module)
{
    cd_py_state *state = cd_py_state_of(module);
    state->host_side_type = PyType_FromModuleAndSpec(module, &host_side_spec, NULL);
    return state->host_side_type ? PyModule_AddFunctions(module, functions) : -1;
}
