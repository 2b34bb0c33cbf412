/* send, recv, isend, irecv. */
#include "py/collectives.h"

/* Fills peer and tag. `self_name` is for the text of a message to oneself; NULL where that is allowed. */
static bool set_peer(cd_py_call *call, PyObject *global, PyObject *local, PyObject *tag, bool any, const char *self_name)
{
    call->op.peer = -1;
    if (!any || cd_py_is_given(global) || cd_py_is_given(local))
        if (cd_py_group_peer(call->group, call->function, global, local, -1, &call->op.peer) < 0)
            return false;
    if (self_name && call->op.peer == call->group->rank) {
        PyErr_Format(PyExc_ValueError,
                     "%s: Invalid %s rank: %s rank should not be the same as the rank of the current process (%d); isend and "
                     "irecv may", call->function, self_name, self_name, call->group->world_rank);
        return false;
    }
    if (!cd_py_is_given(tag))
        return true;
    call->op.tag = PyLong_AsLongLong(tag);
    if (call->op.tag != -1 || !PyErr_Occurred())
        return true;
    if (PyErr_ExceptionMatches(PyExc_TypeError))
        PyErr_Format(PyExc_TypeError, "%s: tag must be an integer, not %s", call->function, Py_TYPE(tag)->tp_name);
    else if (PyErr_ExceptionMatches(PyExc_OverflowError))
        PyErr_Format(PyExc_ValueError, "%s: tag must be from -2**63 to 2**63 - 1, not %R", call->function, tag);
    return false;
}

static bool set_tensor(cd_py_call *call, PyObject *object, cd_kind kind)
{
    cd_py_array *tensor = cd_py_call_array(call, object, "tensor", kind == CD_SEND ? CD_PY_INPUT : CD_PY_OUTPUT);
    if (!tensor)
        return false;
    call->op.kind = kind;
    *(kind == CD_SEND ? &call->op.in : &call->op.out) = cd_py_blocks_of_span(&call->spans[0]);
    cd_py_call_agree(call, tensor);
    return true;
}

CD_PY_FUNCTION(send)
{
    CD_PY_BEGIN("send", 1, 2, -1, 5, "tensor", "dst", "group", "tag", "group_dst", "timeout");
    bool ok = set_peer(&call, a[1], a[4], a[3], false, "destination") && set_tensor(&call, a[0], CD_SEND);
    return cd_py_call_end(&call, NULL, ok);
}

CD_PY_FUNCTION(isend)
{
    CD_PY_BEGIN("isend", 1, 2, -1, 5, "tensor", "dst", "group", "tag", "group_dst", "timeout");
    call.is_async = true;
    bool ok = set_peer(&call, a[1], a[4], a[3], false, NULL) && set_tensor(&call, a[0], CD_SEND);
    return cd_py_call_end(&call, a[0], ok);
}

CD_PY_FUNCTION(recv)
{
    static const char *const names[] = {"tensor", "src", "group", "tag", "group_src", "timeout"};
    static const cd_py_signature signature = {"recv", names, 6, 1};
    PyObject *a[6];
    cd_py_call call;
    if (cd_py_args(&signature, args, given, keywords, a) < 0)
        return NULL;
    int go = cd_py_call_begin(&call, cd_py_state_of(module), "recv", a[2], NULL, a[5]);
    if (go <= 0)
        return go < 0 ? NULL : PyLong_FromLong(-1);
    bool ok = set_peer(&call, a[1], a[4], a[3], true, "source") && set_tensor(&call, a[0], CD_RECV);
    PyObject *ranks = Py_NewRef(call.group->ranks);
    PyObject *done = cd_py_call_end(&call, NULL, ok);
    PyObject *source = NULL;
    if (done && call.op.peer >= 0 && call.op.peer < PyTuple_GET_SIZE(ranks))
        source = Py_NewRef(PyTuple_GET_ITEM(ranks, call.op.peer)); /* the group wrote down who sent */
    else if (done)
        source = PyLong_FromLong(-1);
    Py_XDECREF(done);
    Py_DECREF(ranks);
    return source;
}

CD_PY_FUNCTION(irecv)
{
    CD_PY_BEGIN("irecv", 1, 2, -1, 5, "tensor", "src", "group", "tag", "group_src", "timeout");
    call.is_async = true;
    bool ok = set_peer(&call, a[1], a[4], a[3], true, NULL) && set_tensor(&call, a[0], CD_RECV);
    return cd_py_call_end(&call, a[0], ok);
}

#define DOC_SEND                                                                                                  \
    "    tensor: any dtype; the receiver's has as many elements of the same dtype.\n"                             \
    "    dst: global rank, or group_dst: rank in the group.\n"                                                    \
    "    tag: 64-bit integer; messages are matched by (sender, tag, group), first in, first out.\n"
#define DOC_RECV                                                                                                  \
    "    tensor: as many elements of the same dtype as are sent; written in place.\n"                             \
    "    src: global rank, or group_src: rank in the group; neither: from whoever sends first.\n"                 \
    "    tag: 64-bit integer; only messages with this tag.\n"
#define DOC_NOW "    timeout: seconds or timedelta; None is the group's; 0 polls once.\n\n"
#define DOC_LATER                                                                                                 \
    "    timeout: seconds or timedelta of a Work.wait() that is given none, from then on; None is the group's.\n\n"
#define DOC_RAISES                                                                                                \
    "Raises:\n"                                                                                                   \
    "    TypeError, ValueError: wrong arguments, before anything is sent.\n"                                      \
    "    MismatchError: sizes or dtypes of the two ends differ; DistTimeoutError, PeerLostError, AbortedError.\n"

static PyMethodDef methods[] = {
    CD_PY_METHOD("send", send,
                 "send(tensor, dst=None, group=None, tag=0, group_dst=None, timeout=None)\n--\n\n"
                 "Sends `tensor`; returns when the array may be changed again (large ones: when the receiver has come).\n\n"
                 "Args:\n" DOC_SEND DOC_NOW DOC_RAISES),
    CD_PY_METHOD("recv", recv,
                 "recv(tensor, src=None, group=None, tag=0, group_src=None, timeout=None)\n--\n\n"
                 "Receives into `tensor`; returns the global rank of the sender.\n\n"
                 "Args:\n" DOC_RECV DOC_NOW DOC_RAISES),
    CD_PY_METHOD("isend", isend,
                 "isend(tensor, dst=None, group=None, tag=0, group_dst=None, timeout=None)\n--\n\n"
                 "Starts to send and returns a Work. The array must not be changed before Work.wait().\n\n"
                 "Args:\n" DOC_SEND DOC_LATER DOC_RAISES),
    CD_PY_METHOD("irecv", irecv,
                 "irecv(tensor, src=None, group=None, tag=0, group_src=None, timeout=None)\n--\n\n"
                 "Starts to receive and returns a Work; Work.source_rank() tells the sender afterwards.\n\n"
                 "Args:\n" DOC_RECV DOC_LATER DOC_RAISES),
    {NULL, NULL, 0, NULL},
};

int cd_py_p2p_add(PyObject *module)
{
    return PyModule_AddFunctions(module, methods);
}
