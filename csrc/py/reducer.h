/* The Python face of ddp/: Reducer (buckets of gradients), its buffers, and the hook that torch calls per
 * gradient. */
#ifndef CD_PY_REDUCER_H
#define CD_PY_REDUCER_H

#include "py/state.h"

#include "ddp/reducer.h"

/* Adds the type Reducer and the function assign_buckets. */
int cd_py_reducer_add(PyObject *module);

/* Sequences of element counts and of dtypes → a new array, to be freed by PyMem_Free; NULL with an
 * exception. */
cd_reducer_param *cd_py_reducer_params(PyObject *counts, PyObject *dtypes, cd_device device, int *count_p);
/* A sequence of ints → a new array, to be freed by PyMem_Free; NULL with an exception. `expected` < 0: any
 * length. */
int *cd_py_reducer_ints(PyObject *object, int expected, int *count_p);
/* A sequence that holds each of 0…count − 1 once → a new array, to be freed by PyMem_Free; NULL with an exception. */
int *cd_py_reducer_order(PyObject *object, int count);
/* Addresses of bucket memory as Python ints → a new array in *out, to be freed by PyMem_Free; it stays
 * NULL for None. 0, or −1 with an exception. */
int cd_py_reducer_memory(PyObject *memory, int buckets, void ***out);
/* "cpu" or "cuda", "mean" or "sum"; 0, or −1 with ValueError. */
int cd_py_reducer_device(const char *text, cd_device *device_p);
int cd_py_reducer_mode(const char *text, cd_reduce_mode *mode_p);
/* Adds assign_buckets (buckets.c). */
int cd_py_buckets_add(PyObject *module);

#endif
