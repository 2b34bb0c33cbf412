/* cdist.empty: NumPy arrays in the host's shared arena. */
#ifndef CD_PY_ARENA_H
#define CD_PY_ARENA_H

#include "py/state.h"

int cd_py_arena_add(PyObject *module);

#endif
