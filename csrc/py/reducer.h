/* The Python face of ddp/: Reducer (buckets of gradients), its buffers, and the hook that torch calls per gradient. */
#ifndef CD_PY_REDUCER_H
#define CD_PY_REDUCER_H

#include "py/state.h"

/* Adds the type Reducer and the function assign_buckets. */
int cd_py_reducer_add(PyObject *module);

#endif
