/* Arguments of C callables with the fast calling convention (METH_FASTCALL | METH_KEYWORDS). */
#ifndef CD_PY_ARGS_H
#define CD_PY_ARGS_H

#include "py/state.h"

#include <stdbool.h>

typedef struct {
    const char *function;
    const char *const *names; /* all may be given by position or by name */
    int count, required;
} cd_py_signature;

/* out[count]: borrowed, NULL where not given. 0, or −1 with TypeError. */
int cd_py_args(const cd_py_signature *signature, PyObject *const *args, Py_ssize_t given, PyObject *names, PyObject **out);
static inline bool cd_py_is_given(PyObject *argument)
{
    return argument && argument != Py_None;
}
/* Anything with __index__ → int. 0, or −1 with TypeError/ValueError that names the argument. */
int cd_py_int(PyObject *argument, const char *name, int *value_p);

#endif
