/* What Python needs of a group's GPU side beyond the operations: connecting early, its memory, coalesced launches. */
#ifndef CD_PY_GPU_H
#define CD_PY_GPU_H

#include "py/state.h"

int cd_py_gpu_add(PyObject *module);

#endif
