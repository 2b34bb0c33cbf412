/* What the Reducer and its gradient hooks share. */
#ifndef CD_PY_REDUCER_IMPL_H
#define CD_PY_REDUCER_IMPL_H

#include "py/reducer.h"

typedef struct {
    PyObject_HEAD
    cd_reducer *reducer;
    cd_group *group;  /* borrowed from the reducer, which holds it */
    PyObject *owner;  /* the Python object whose methods the hooks call, or NULL */
    int count;
    bool on_gpu;      /* launches may wait in NCCL: without the interpreter lock */
    cd_step step;
    char backward; /* hooks have called owner._begin_backward() for the backward pass that goes on */
    int linked;    /* gradients that hooks have made views of their buckets since begin */
    /* Gradients on a GPU that wait for the one launch which copies them to their places: three lists of one length, with None
     * for a parameter whose grad does not become the view. */
    PyObject *late_views, *late_grads, *late_params;
} cd_py_reducer;

/* Reads the number of a gradient; −1 with IndexError, TypeError or (not initialised) RuntimeError. */
int cd_py_reducer_index(cd_py_reducer *self, PyObject *object, int *index_p);
/* Gradient `index` is ready: None, or NULL with an exception. */
PyObject *cd_py_reducer_mark(cd_py_reducer *self, int index);
/* Adds one to the gradients that wait; `param` NULL: its grad stays. */
int cd_py_reducer_postpone(cd_py_reducer *self, PyObject *view, PyObject *grad, PyObject *param);
/* Copies those that wait. Before their bucket is launched. */
int cd_py_reducer_flush(cd_py_reducer *self);
/* Reducer.hook (hook.c). */
PyObject *cd_py_reducer_hook(PyObject *object, PyObject *args);
int cd_py_hook_add(PyObject *module);

#endif
