#ifndef CD_PY_SAMPLER_H
#define CD_PY_SAMPLER_H

#include "py/state.h"

/* index_count, index_fill and the type IndexIterator. */
int cd_py_sampler_add(PyObject *module);

#endif
