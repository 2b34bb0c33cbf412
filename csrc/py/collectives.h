/* The collectives and point-to-point functions: C callables of the module, without a Python frame in between. */
#ifndef CD_PY_COLLECTIVES_H
#define CD_PY_COLLECTIVES_H

#include "py/args.h"
#include "py/call.h"

int cd_py_reductions_add(PyObject *module); /* all_reduce, reduce, reduce_scatter, reduce_scatter_tensor, supports */
int cd_py_moves_add(PyObject *module);      /* broadcast, all_gather, gather, scatter, all_to_all, …, barrier */
int cd_py_p2p_add(PyObject *module);        /* send, recv, isend, irecv */

/* The start of every such function: parses its arguments into `a` (which must be in scope of the names array), returns from
 * the function unless there is a call to make. `group_at`, `async_at`, `timeout_at`: their places among the names. */
#define CD_PY_BEGIN(FUNCTION, REQUIRED, GROUP_AT, ASYNC_AT, TIMEOUT_AT, ...)                                      \
    static const char *const names[] = {__VA_ARGS__};                                                             \
    enum { NAMES = sizeof names / sizeof *names };                                                                \
    static const cd_py_signature signature = {FUNCTION, names, NAMES, REQUIRED};                                  \
    PyObject *a[NAMES];                                                                                           \
    cd_py_call call;                                                                                              \
    if (cd_py_args(&signature, args, given, keywords, a) < 0)                                                     \
        return NULL;                                                                                              \
    int go = cd_py_call_begin(&call, cd_py_state_of(module), FUNCTION, a[GROUP_AT],                               \
                              (ASYNC_AT) < 0 ? NULL : a[(ASYNC_AT) < 0 ? 0 : (ASYNC_AT)], a[TIMEOUT_AT]);         \
    if (go <= 0)                                                                                                  \
        return go < 0 ? NULL : Py_NewRef(Py_None)

#define CD_PY_FUNCTION(name)                                                                                      \
    static PyObject *name(PyObject *module, PyObject *const *args, Py_ssize_t given, PyObject *keywords)

#define CD_PY_METHOD(NAME, FUNCTION, DOC)                                                                         \
    {                                                                                                             \
        NAME, (PyCFunction)(void (*)(void))FUNCTION, METH_FASTCALL | METH_KEYWORDS, DOC                           \
    }

/* What every docstring of this family ends with. */
#define CD_PY_DOC_COMMON CD_PY_DOC_OPTIONS CD_PY_DOC_ARRAYS CD_PY_DOC_RAISES
#define CD_PY_DOC_OPTIONS                                                                                         \
    "    group: the ranks that take part; None is the default group.\n"                                           \
    "    async_op: return a Work at once instead of waiting.\n"                                                   \
    "    timeout: seconds or timedelta; None is the group's; 0 polls once.\n\n"
#define CD_PY_DOC_ARRAYS                                                                                          \
    "Arrays are NumPy arrays, torch tensors or anything with DLPack, an array interface or the buffer protocol, of any\n" \
    "strides; they are used in place. Returns None, or a Work.\n\n"
#define CD_PY_DOC_RAISES                                                                                          \
    "Raises:\n"                                                                                                   \
    "    TypeError, ValueError: wrong arguments, before anything is sent.\n"                                      \
    "    MismatchError: other ranks made another call; DistTimeoutError, PeerLostError, AbortedError.\n"

#endif
