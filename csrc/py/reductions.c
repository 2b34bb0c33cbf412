/* all_reduce, reduce, reduce_scatter, reduce_scatter_tensor. */
#include "py/collectives.h"

#include "py/redop.h"

CD_PY_FUNCTION(all_reduce)
{
    CD_PY_BEGIN("all_reduce", 1, 2, 3, 4, "tensor", "op", "group", "async_op", "timeout");
    cd_py_array *tensor = cd_py_call_array(&call, a[0], "tensor", CD_PY_OUTPUT);
    bool ok = tensor && cd_py_call_reduction(&call, a[1]) == 0;
    if (ok) {
        call.op.kind = CD_ALL_REDUCE;
        call.op.in = call.op.out = cd_py_blocks_of_span(&call.spans[0]);
        cd_py_call_agree(&call, tensor);
    }
    return cd_py_call_end(&call, a[0], ok);
}

CD_PY_FUNCTION(reduce)
{
    CD_PY_BEGIN("reduce", 1, 3, 4, 6, "tensor", "dst", "op", "group", "async_op", "group_dst", "timeout");
    bool ok = cd_py_group_peer(call.group, "reduce", a[1], a[5], -1, &call.op.root) == 0;
    bool is_root = ok && call.op.root == call.group->rank;
    cd_py_array *tensor = ok ? cd_py_call_array(&call, a[0], "tensor", is_root ? CD_PY_OUTPUT : CD_PY_INPUT) : NULL;
    ok = tensor && cd_py_call_reduction(&call, a[2]) == 0;
    if (ok) {
        call.op.kind = CD_REDUCE;
        call.op.in = cd_py_blocks_of_span(&call.spans[0]);
        if (is_root)
            call.op.out = call.op.in;
        cd_py_call_agree(&call, tensor);
    }
    return cd_py_call_end(&call, a[0], ok);
}

static int fit_list(cd_py_call *call, const cd_py_array *output, const cd_py_list *inputs)
{
    const cd_py_array *own = &inputs->items[call->group->rank];
    if (!cd_py_array_same_shape(own, output)) {
        char want[256], have[256];
        PyErr_Format(PyExc_ValueError, "reduce_scatter: output is %s, but the input of this rank (%d) in input_list is %s",
                     cd_py_array_text(output, have, sizeof have), call->group->rank,
                     cd_py_array_text(own, want, sizeof want));
        return -1;
    }
    for (int i = 0; i < inputs->count; i++) {
        if (cd_py_call_disjoint(call, &inputs->items[i], output) < 0)
            return -1;
        if (!cd_py_array_same_shape(&inputs->items[i], output))
            call->op.flags |= CD_OP_UNEVEN;
    }
    return 0;
}

CD_PY_FUNCTION(reduce_scatter)
{
    CD_PY_BEGIN("reduce_scatter", 2, 3, 4, 5, "output", "input_list", "op", "group", "async_op", "timeout");
    cd_py_array *output = cd_py_call_array(&call, a[0], "output", CD_PY_OUTPUT);
    cd_py_list *inputs = output ? cd_py_call_list(&call, a[1], "input_list", CD_PY_INPUT) : NULL;
    bool ok = inputs && cd_py_call_reduction(&call, a[2]) == 0 && fit_list(&call, output, inputs) == 0;
    if (ok) {
        call.op.kind = CD_REDUCE_SCATTER;
        call.op.in = cd_py_blocks_of_list(inputs);
        call.op.out = cd_py_blocks_of_span(&call.spans[0]);
        cd_py_call_agree(&call, output);
    }
    return cd_py_call_end(&call, a[0], ok);
}

static int fit_whole(const cd_py_call *call, const cd_py_array *input, const cd_py_array *output)
{
    if (input->span.count == output->span.count * (size_t)call->group->size)
        return 0;
    char in[256], out[256];
    PyErr_Format(PyExc_ValueError,
                 "%s: input tensor must be the same size as output size times world size: input %s, output %s, world size %d",
                 call->function, cd_py_array_text(input, in, sizeof in), cd_py_array_text(output, out, sizeof out),
                 call->group->size);
    return -1;
}

static PyObject *reduce_scatter_single(const char *function, PyObject *module, PyObject *const *args, Py_ssize_t given,
                                       PyObject *keywords)
{
    CD_PY_BEGIN("reduce_scatter_tensor", 2, 3, 4, 5, "output", "input", "op", "group", "async_op", "timeout");
    call.function = function;
    cd_py_array *input = cd_py_call_array(&call, a[1], "input", CD_PY_INPUT);
    cd_py_array *output = input ? cd_py_call_array(&call, a[0], "output", CD_PY_OUTPUT) : NULL;
    bool ok = output && cd_py_call_reduction(&call, a[2]) == 0 && fit_whole(&call, input, output) == 0 &&
              cd_py_call_detach_input(&call, output) == 0;
    if (ok) {
        call.op.kind = CD_REDUCE_SCATTER;
        call.op.in = cd_py_blocks_of_span(&call.spans[0]);
        call.op.out = cd_py_blocks_of_span(&call.spans[1]);
        cd_py_call_agree(&call, output);
    }
    return cd_py_call_end(&call, a[0], ok);
}

CD_PY_FUNCTION(reduce_scatter_tensor)
{
    return reduce_scatter_single("reduce_scatter_tensor", module, args, given, keywords);
}

CD_PY_FUNCTION(reduce_scatter_base)
{
    return reduce_scatter_single("_reduce_scatter_base", module, args, given, keywords);
}

/* _reduces(op, dtype): whether the reduction is defined for the dtype. */
static PyObject *reduces(PyObject *module, PyObject *args)
{
    cd_redop redop;
    cd_dtype number;
    if (cd_py_redop_read_pair(cd_py_state_of(module), args, &redop, &number) < 0)
        return NULL;
    return PyBool_FromLong(cd_redop_supports(redop, number));
}

#define DOC_OP                                                                                                    \
    "    op: ReduceOp. SUM, PRODUCT: all numbers and bool (logical or / and). MIN, MAX: not complex. AVG: not bool;\n" \
    "        integers are divided with truncation. BAND, BOR, BXOR: integers and bool. float16 and bfloat16 are\n" \
    "        accumulated in float32. Ranks are taken in order, so all ranks and all runs get the same bits.\n"

static PyMethodDef methods[] = {
    CD_PY_METHOD("all_reduce", all_reduce,
                 "all_reduce(tensor, op=0, group=None, async_op=False, timeout=None)\n--\n\n"
                 "Replaces `tensor` on every rank by the reduction of the tensors of all ranks.\n\n"
                 "Args:\n"
                 "    tensor: any shape (0-d and empty too), the same shape and dtype on all ranks; changed in place.\n" DOC_OP
                     CD_PY_DOC_COMMON),
    CD_PY_METHOD("reduce", reduce,
                 "reduce(tensor, dst=None, op=0, group=None, async_op=False, group_dst=None, timeout=None)\n--\n\n"
                 "Replaces `tensor` on rank `dst` by the reduction of the tensors of all ranks; the others stay untouched.\n\n"
                 "Args:\n"
                 "    tensor: the same shape and dtype on all ranks.\n"
                 "    dst: global rank, or group_dst: rank in the group.\n" DOC_OP CD_PY_DOC_COMMON),
    CD_PY_METHOD("reduce_scatter", reduce_scatter,
                 "reduce_scatter(output, input_list, op=0, group=None, async_op=False, timeout=None)\n--\n\n"
                 "Reduces a list of arrays over all ranks; rank r gets the reduction of the r-th ones in `output`.\n\n"
                 "Args:\n"
                 "    output: of the shape of input_list[rank]; must not overlap the inputs.\n"
                 "    input_list: one array for each rank; shapes may differ along the list, not between ranks.\n" DOC_OP
                     CD_PY_DOC_COMMON),
    CD_PY_METHOD("reduce_scatter_tensor", reduce_scatter_tensor,
                 "reduce_scatter_tensor(output, input, op=0, group=None, async_op=False, timeout=None)\n--\n\n"
                 "Reduces `input` over all ranks; rank r gets the r-th of its equal parts in `output`.\n\n"
                 "Args:\n"
                 "    output: n elements.\n"
                 "    input: n × (group size) elements in C order; `output` may be a part of it.\n" DOC_OP CD_PY_DOC_COMMON),
    CD_PY_METHOD("_reduce_scatter_base", reduce_scatter_base,
                 "_reduce_scatter_base(output, input, op=0, group=None, async_op=False, timeout=None)\n--\n\n"
                 "The old name of reduce_scatter_tensor."),
    {"_reduces", reduces, METH_VARARGS, "_reduces(op, dtype)\n--\n\nWhether the reduction is defined for the dtype."},
    {NULL, NULL, 0, NULL},
};

int cd_py_reductions_add(PyObject *module)
{
    return PyModule_AddFunctions(module, methods);
}
