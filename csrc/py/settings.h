#ifndef CD_PY_SETTINGS_H
#define CD_PY_SETTINGS_H

#include "py/state.h"

int cd_py_settings_add(PyObject *module);

#endif
