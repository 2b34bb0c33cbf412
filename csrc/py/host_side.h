/* A group as this package uses it for its own values in host memory (pickles, shapes, flags): they move whatever backends the
 * user has named. Python code passes _host_side(group) where a group is asked for. */
#ifndef CD_PY_HOST_SIDE_H
#define CD_PY_HOST_SIDE_H

#include "py/state.h"

#include "base/op.h"

#include <stdbool.h>

int cd_py_host_side_add(PyObject *module); /* _host_side */

/* `object` may be NULL. */
bool cd_py_is_host_side(const cd_py_state *state, PyObject *object);
/* The group behind one. Borrowed. */
PyObject *cd_py_host_side_group(PyObject *object);
/* TypeError for arrays that no backend of the group was named for. −1. */
int cd_py_refuse_device(const char *function, cd_device device);

#endif
