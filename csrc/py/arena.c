#include "py/arena.h"

#include "py/errors.h"
#include "py/group.h"

/* One block of the arena as an object with the buffer protocol: NumPy and torch make arrays over it and keep it alive. */
typedef struct {
    PyObject_HEAD
    cd_arena *arena;
    PyObject *group; /* keeps the mapping */
    void *data;
    Py_ssize_t bytes;
} cd_py_block;

static int get_buffer(PyObject *object, Py_buffer *view, int flags)
{
    cd_py_block *self = (cd_py_block *)object;
    return PyBuffer_FillInfo(view, object, self->data, self->bytes, 0, flags);
}

static int traverse_block(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(((cd_py_block *)object)->group);
    return 0;
}

static void free_block(PyObject *object)
{
    cd_py_block *self = (cd_py_block *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    if (self->data)
        cd_arena_release(self->arena, self->data);
    Py_CLEAR(self->group);
    type->tp_free(object);
    Py_DECREF(type);
}

/* _arena_block(group, bytes): a writable buffer in the arena, or None where the group's host has none. */
static PyObject *make_block(PyObject *module, PyObject *args)
{
    PyObject *group;
    Py_ssize_t bytes;
    cd_py_state *state = cd_py_state_of(module);
    if (!PyArg_ParseTuple(args, "O!n", state->group_type, &group, &bytes))
        return NULL;
    cd_group *inner = ((cd_py_group *)group)->group;
    cd_arena *arena = cd_world_arena(cd_group_world(inner));
    if (!arena)
        Py_RETURN_NONE;
    PyTypeObject *type = (PyTypeObject *)state->block_type;
    cd_py_block *self = (cd_py_block *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    cd_status status;
    Py_BEGIN_ALLOW_THREADS /* the kernel fills huge pages with zeros: some ms for each 64 MiB */
    status = cd_arena_alloc(arena, (size_t)bytes, &self->data);
    Py_END_ALLOW_THREADS
    if (status != CD_OK) {
        Py_DECREF(self);
        return cd_py_raise_from(state, status, "empty");
    }
    self->arena = arena;
    self->group = Py_NewRef(group);
    self->bytes = bytes;
    return (PyObject *)self;
}

static PyType_Slot slots[] = {
    {Py_tp_doc, "Memory that all ranks of the host have mapped."},
    {Py_tp_dealloc, free_block},
    {Py_tp_traverse, traverse_block},
    {Py_bf_getbuffer, get_buffer},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "cdist._core.ArenaBlock",
    .basicsize = sizeof(cd_py_block),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = slots,
};

static PyMethodDef methods[] = {
    {"_arena_block", make_block, METH_VARARGS, "_arena_block(group, bytes)\n--\n\nA buffer in the arena, or None."},
    {NULL, NULL, 0, NULL},
};

int cd_py_arena_add(PyObject *module)
{
    cd_py_state *state = cd_py_state_of(module);
    state->block_type = PyType_FromModuleAndSpec(module, &spec, NULL);
    return state->block_type ? PyModule_AddFunctions(module, methods) : -1;
}
