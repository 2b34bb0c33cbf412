/* One call of a communication function: its group, deadline and operation, from the arguments to the result.
 *
 *     cd_py_call call;
 *     int go = cd_py_call_begin(&call, state, "broadcast", group, async_op, timeout);
 *     if (go <= 0)
 *         return go < 0 ? NULL : Py_NewRef(Py_None);       // not a member: warned
 *     … read arrays with cd_py_call_array / cd_py_call_list, fill call.op …
 *     return cd_py_call_end(&call, result, ok);            // runs or issues it, frees everything
 */
#ifndef CD_PY_CALL_H
#define CD_PY_CALL_H

#include "py/array.h"
#include "py/group.h"

/* A list of arrays, one for each rank. */
typedef struct {
    cd_py_array *items;
    cd_span *spans;
    int count;
} cd_py_list;

enum { CD_PY_CALL_ARRAYS = 2, CD_PY_CALL_LISTS = 2 };

typedef struct {
    cd_py_state *state;
    const char *function;
    cd_py_group *group; /* owned */
    bool is_async;
    bool is_host_side;  /* the group was given as one: values of this package */
    bool is_typed;      /* op has its dtype: an array was read */
    uint64_t timeout_ns;
    cd_op op;
    int arrays, lists;
    void *scratch;      /* owned: a packed copy of an input that overlaps its output */
    size_t *counts[2];  /* owned: elements per rank of uneven splits */
    cd_span spans[CD_PY_CALL_ARRAYS];
    cd_py_list list[CD_PY_CALL_LISTS];
    cd_py_array array[CD_PY_CALL_ARRAYS];
} cd_py_call;

/* 1: go on; 0: the caller is not a member (warned): return None; −1: exception. Only after 1 the call must be ended. */
int cd_py_call_begin(cd_py_call *call, cd_py_state *state, const char *function, PyObject *group, PyObject *is_async,
                     PyObject *timeout);
/* Reads the next array; the first one gives the operation its dtype, item size and device, the others must have the same
 * (ValueError). TypeError where the group has no backend for it. NULL with an exception. Its span is call->spans[same index]. */
cd_py_array *cd_py_call_array(cd_py_call *call, PyObject *object, const char *name, cd_py_use use);
/* Reads the next list, which must have one array for each rank (TypeError, ValueError). */
cd_py_list *cd_py_call_list(cd_py_call *call, PyObject *object, const char *name, cd_py_use use);
/* The tensor whose count and shape all ranks must have alike. */
void cd_py_call_agree(cd_py_call *call, const cd_py_array *array);
/* op.redop from an `op` argument; TypeError where it is not defined for the dtype. Needs an array first. */
int cd_py_call_reduction(cd_py_call *call, PyObject *op);
/* ValueError when the two overlap. */
int cd_py_call_disjoint(const cd_py_call *call, const cd_py_array *in, const cd_py_array *out);
/* Replaces the input by a packed copy if it overlaps the output (gathers in place: the input is the rank's own block). CPU. */
int cd_py_call_detach_input(cd_py_call *call, const cd_py_array *out);
/* Blocks as one span, as a list, or as cut by counts. */
cd_blocks cd_py_blocks_of_span(cd_span *span);
cd_blocks cd_py_blocks_of_list(const cd_py_list *list);

/* Runs op (result None) or issues it (result: a Work whose result() is the list in `outputs`), unless `ok` is false (an
 * exception is set). `outputs` is a borrowed array, list of arrays or NULL. Frees what the call holds. */
PyObject *cd_py_call_end(cd_py_call *call, PyObject *outputs, bool ok);

#endif
