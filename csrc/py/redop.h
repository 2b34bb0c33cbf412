/* ReduceOp: a reduction with its factor. */
#ifndef CD_PY_REDOP_H
#define CD_PY_REDOP_H

#include "py/state.h"

#include "base/op.h"

int cd_py_redop_add(PyObject *module);
/* The value of an `op` argument: NULL (SUM), an int or RedOpType, a ReduceOp. 0, or −1 with TypeError/ValueError. */
int cd_py_redop_read(cd_py_state *state, PyObject *object, cd_redop *redop_p, double *factor_p);
/* The (op, dtype) arguments of the questions whether a reduction is defined for a dtype. 0, or −1 with an exception. */
int cd_py_redop_read_pair(cd_py_state *state, PyObject *args, cd_redop *redop_p, cd_dtype *dtype_p);

#endif
