/* How cdist.objects pickles small NumPy arrays. */
#ifndef CD_PY_ARRAY_PICKLE_H
#define CD_PY_ARRAY_PICKLE_H

#include "py/state.h"

int cd_py_array_pickle_add(PyObject *module);

#endif
