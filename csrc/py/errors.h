/* From a cd_status to a Python exception. The classes are defined in python/cdist/errors.py. */
#ifndef CD_PY_ERRORS_H
#define CD_PY_ERRORS_H

#include "py/state.h"

#include "base/status.h"

int cd_py_errors_add(PyObject *module);

/* Sets the Python exception for a call that returned `status`, from the calling thread's last error; CD_INTERRUPTED means
 * that one is set already. `operation`: name of the public function for the exception's .operation, or NULL.
 * Needs the GIL. Returns NULL always. */
PyObject *cd_py_raise_from(cd_py_state *state, cd_status status, const char *operation);
static inline PyObject *cd_py_raise(cd_py_state *state, cd_status status)
{
    return cd_py_raise_from(state, status, NULL);
}
/* The exception object of a stored error, for Work.exception(): a new reference, or NULL with an exception set. */
PyObject *cd_py_exception_of(cd_py_state *state, const cd_error *error, const char *operation);

#endif
