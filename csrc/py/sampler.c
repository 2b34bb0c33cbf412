/* The sampler's Python face: index_count, index_fill, and an iterator over int64 indices that tells how far
 * it is. */
#include "py/sampler.h"
#include "py/errors.h"

#include "sampler/index.h"

#include <structmember.h>

/* A spec that was checked. */
static int parse_spec(PyObject *module, PyObject *args, cd_index_spec *spec, unsigned long long *position_p, PyObject **out_p)
{
    unsigned long long length, seed, first;
    long long rank, world;
    int shuffle, pad;
    /* K takes any Python int modulo 2^64, which is what torch's generator does with a negative seed. */
    if (!PyArg_ParseTuple(args, "KKKLLpi|KO:index", &length, &seed, &first, &rank, &world, &shuffle, &pad,
                          position_p, out_p))
        return -1;
    if (pad < CD_PAD_REPEAT || pad > CD_PAD_NONE) {
        PyErr_SetString(PyExc_ValueError, "pad should be 0 (repeat), 1 (drop) or 2 (none)");
        return -1;
    }
    *spec = (cd_index_spec){.length = length,
                            .seed = seed,
                            .first = first,
                            .rank = rank,
                            .world = world,
                            .shuffle = shuffle != 0,
                            .pad = (cd_pad)pad};
    cd_status status = cd_index_check(spec);
    if (status != CD_OK)
        cd_py_raise(cd_py_state_of(module), status);
    return status == CD_OK ? 0 : -1;
}

static PyObject *index_count(PyObject *module, PyObject *args)
{
    cd_index_spec spec;
    unsigned long long position = 0;
    PyObject *out = NULL;
    if (parse_spec(module, args, &spec, &position, &out) < 0)
        return NULL;
    return Py_BuildValue("KK", (unsigned long long)cd_index_count(&spec),
                         (unsigned long long)cd_index_padding(&spec));
}

/* A C-contiguous buffer of 8-byte items; flags adds PyBUF_WRITABLE. 0, or −1 with an exception. */
static int get_int64(PyObject *object, Py_buffer *view, int flags)
{
    if (PyObject_GetBuffer(object, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | flags) < 0)
        return -1;
    const char *format = view->format ? view->format : "B";
    if (view->itemsize == 8 && (strcmp(format, "l") == 0 || strcmp(format, "q") == 0))
        return 0;
    PyErr_Format(PyExc_TypeError, "indices should be a C-contiguous array of int64, not of format '%s'",
                 format);
    PyBuffer_Release(view);
    return -1;
}

static PyObject *index_fill(PyObject *module, PyObject *args)
{
    cd_index_spec spec;
    unsigned long long position = 0;
    PyObject *out = NULL;
    if (parse_spec(module, args, &spec, &position, &out) < 0)
        return NULL;
    if (!out)
        return PyErr_Format(PyExc_TypeError, "index_fill: position and out are needed");
    Py_buffer view;
    if (get_int64(out, &view, PyBUF_WRITABLE) < 0)
        return NULL;
    size_t count = (size_t)view.len / 8;
    uint64_t all = cd_index_count(&spec);
    if (position > all || count > all - position) {
        PyBuffer_Release(&view);
        return PyErr_Format(PyExc_ValueError,
                            "index_fill: %zu indices from position %llu on, but the rank has %llu", count,
                            position, (unsigned long long)all);
    }
    cd_status status;
    Py_BEGIN_ALLOW_THREADS
    status = cd_index_fill(&spec, position, view.buf, count);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&view);
    if (status != CD_OK)
        return cd_py_raise(cd_py_state_of(module), status);
    Py_RETURN_NONE;
}

/* Iterator: Python ints out of an int64 buffer. Its view is released when it runs out. */
typedef struct {
    PyObject_HEAD Py_buffer view; /* obj NULL when released */
    Py_ssize_t count, position;
} iterator;

static PyObject *iterator_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *indices;
    static char *names[] = {"indices", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:IndexIterator", names, &indices))
        return NULL;
    iterator *self = (iterator *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    if (get_int64(indices, &self->view, 0) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    self->count = self->view.len / 8;
    return (PyObject *)self;
}

static PyObject *iterator_next(PyObject *object)
{
    iterator *self = (iterator *)object;
    if (self->position < self->count)
        return PyLong_FromLongLong(((const long long *)self->view.buf)[self->position++]);
    PyBuffer_Release(&self->view);
    return NULL;
}

static PyObject *iterator_length_hint(PyObject *object, PyObject *unused)
{
    (void)unused;
    iterator *self = (iterator *)object;
    return PyLong_FromSsize_t(self->count - self->position);
}

static int iterator_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(((iterator *)object)->view.obj);
    return 0;
}

static int iterator_clear(PyObject *object)
{
    iterator *self = (iterator *)object;
    self->count = self->position;
    PyBuffer_Release(&self->view);
    return 0;
}

static void iterator_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    PyBuffer_Release(&((iterator *)object)->view);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMethodDef iterator_methods[] = {
    {"__length_hint__", iterator_length_hint, METH_NOARGS, "How many indices are left."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef iterator_members[] = {
    {"position", T_PYSSIZET, offsetof(iterator, position), READONLY, "How many indices were given out."},
    {"count", T_PYSSIZET, offsetof(iterator, count), READONLY, "How many there were at the start."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot iterator_slots[] = {
    {Py_tp_new, iterator_new},
    {Py_tp_iter, PyObject_SelfIter},
    {Py_tp_iternext, iterator_next},
    {Py_tp_traverse, iterator_traverse},
    {Py_tp_clear, iterator_clear},
    {Py_tp_dealloc, iterator_dealloc},
    {Py_tp_methods, iterator_methods},
    {Py_tp_members, iterator_members},
    {Py_tp_doc,
     "IndexIterator(indices)\n--\n\nIterator of ints over a C-contiguous int64 array; .position counts."},
    {0, NULL},
};

static PyType_Spec iterator_spec = {
    .name = "cdist._core.IndexIterator",
    .basicsize = sizeof(iterator),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = iterator_slots,
};

static PyMethodDef functions[] = {
    {"index_count", index_count, METH_VARARGS,
     "index_count(length, seed, first, rank, world, shuffle, pad) -> (count, padding)\n\n"
     "Number of indices of this rank, and how many of them, at the end, are padding."},
    {"index_fill", index_fill, METH_VARARGS,
     "index_fill(length, seed, first, rank, world, shuffle, pad, position, out)\n\n"
     "Writes this rank's indices from `position` on into the int64 array `out`, as many as it holds."},
    {NULL, NULL, 0, NULL},
};

int cd_py_sampler_add(PyObject *module)
{
    if (PyModule_AddFunctions(module, functions) < 0)
        return -1;
    PyObject *type = PyType_FromModuleAndSpec(module, &iterator_spec, NULL);
    if (!type)
        return -1;
    int added = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return added;
}
