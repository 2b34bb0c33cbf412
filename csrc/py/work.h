/* Work: the shell around cd_work. */
#ifndef CD_PY_WORK_H
#define CD_PY_WORK_H

#include "py/group.h"

#include "group/work.h"

int cd_py_work_add(PyObject *module);
/* Takes over one reference of `work`, on failure too. `outputs`: stolen: an array, a list that nobody else has, or NULL;
 * result() makes a list of it. `array`: one of the arrays, borrowed; NULL: there are none. `device_index`: their GPU, −1 on the
 * CPU. */
PyObject *cd_py_work_new(cd_py_state *state, cd_work *work, cd_py_group *group, const char *function, PyObject *outputs,
                         PyObject *array, int device_index);

#endif
