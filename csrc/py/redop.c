/* The type below is the base of cdist.ReduceOp, which adds the members SUM, AVG, … (python/cdist/constants.py). */
#include "py/redop.h"

#include "py/args.h"
#include "py/array.h"

typedef struct {
    PyObject_HEAD
    int op;
    double factor;
} cd_py_redop;

int cd_py_redop_read(cd_py_state *state, PyObject *object, cd_redop *redop_p, double *factor_p)
{
    *factor_p = 1.0;
    if (!object) {
        *redop_p = CD_SUM;
        return 0;
    }
    if (!PyLong_Check(object)) {
        if (PyObject_TypeCheck(object, (PyTypeObject *)state->redop_type)) {
            *redop_p = (cd_redop)((cd_py_redop *)object)->op;
            *factor_p = ((cd_py_redop *)object)->factor;
            return 0;
        }
        PyErr_Format(PyExc_TypeError, "op must be a ReduceOp, such as cdist.ReduceOp.SUM, not %s", Py_TYPE(object)->tp_name);
        return -1;
    }
    long op = PyLong_AsLong(object);
    if (op < 0 || op >= CD_REDOPS) {
        PyErr_Clear();
        PyErr_Format(PyExc_ValueError, "op must be one of ReduceOp.SUM to ReduceOp.PREMUL_SUM, not %R", object);
        return -1;
    }
    *redop_p = (cd_redop)op;
    return 0;
}

static PyObject *make_redop(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"op", "factor", NULL};
    PyObject *op;
    PyObject *factor = NULL;
    cd_py_state *state = cd_py_state_of_type(type);
    if (!state || !PyArg_ParseTupleAndKeywords(args, keywords, "O|O", names, &op, &factor))
        return NULL;
    cd_redop redop;
    double number;
    if (cd_py_redop_read(state, op, &redop, &number) < 0)
        return NULL;
    if (cd_py_is_given(factor)) {
        number = PyFloat_AsDouble(factor);
        if (number == -1.0 && PyErr_Occurred())
            return NULL;
    }
    cd_py_redop *self = (cd_py_redop *)type->tp_alloc(type, 0);
    if (self) {
        self->op = (int)redop;
        self->factor = number;
    }
    return (PyObject *)self;
}

int cd_py_redop_read_pair(cd_py_state *state, PyObject *args, cd_redop *redop_p, cd_dtype *dtype_p)
{
    PyObject *op, *dtype;
    double factor;
    uint32_t bytes;
    if (!PyArg_ParseTuple(args, "OO", &op, &dtype) || cd_py_redop_read(state, op, redop_p, &factor) < 0 ||
        cd_py_dtype_of(dtype, dtype_p, &bytes) < 0)
        return -1;
    return 0;
}

static PyObject *compare_redop(PyObject *self, PyObject *other, int how)
{
    cd_py_state *state = cd_py_state_of_type(Py_TYPE(self));
    if (!state || (how != Py_EQ && how != Py_NE))
        Py_RETURN_NOTIMPLEMENTED;
    cd_redop redop;
    double factor;
    if (cd_py_redop_read(state, other, &redop, &factor) < 0) {
        PyErr_Clear();
        Py_RETURN_NOTIMPLEMENTED;
    }
    const cd_py_redop *mine = (const cd_py_redop *)self;
    bool same = (int)redop == mine->op && factor == mine->factor;
    return PyBool_FromLong(same == (how == Py_EQ));
}

/* Equal to the plain number where the factor is 1, so the hash is that number's. */
static Py_hash_t hash_redop(PyObject *self)
{
    return ((cd_py_redop *)self)->op;
}

static PyObject *get_factor(PyObject *self, void *unused)
{
    (void)unused;
    return PyFloat_FromDouble(((cd_py_redop *)self)->factor);
}

static PyObject *get_number(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromLong(((cd_py_redop *)self)->op);
}

static PyObject *reduce_redop(PyObject *self, PyObject *unused)
{
    (void)unused;
    return Py_BuildValue("O(id)", (PyObject *)Py_TYPE(self), ((cd_py_redop *)self)->op, ((cd_py_redop *)self)->factor);
}

static void free_redop(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyGetSetDef fields[] = {
    {"factor", get_factor, NULL, "What PREMUL_SUM multiplies each input by (1.0 for the others).", NULL},
    {"_number", get_number, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef methods[] = {
    {"__reduce__", reduce_redop, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "ReduceOp(op, factor=1.0)\n--\n\nA reduction."},
    {Py_tp_new, make_redop},
    {Py_tp_dealloc, free_redop},
    {Py_tp_richcompare, compare_redop},
    {Py_tp_hash, hash_redop},
    {Py_tp_getset, fields},
    {Py_tp_methods, methods},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "cdist._core.ReduceOp",
    .basicsize = sizeof(cd_py_redop),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = slots,
};

int cd_py_redop_add(PyObject *module)
{
    cd_py_state *state = cd_py_state_of(module);
    state->redop_type = PyType_FromModuleAndSpec(module, &spec, NULL);
    return state->redop_type ? PyModule_AddType(module, (PyTypeObject *)state->redop_type) : -1;
}
