/* The collectives that move elements and do not reduce them, and barrier. */
#include "py/collectives.h"

#include <stdlib.h>

CD_PY_FUNCTION(broadcast)
{
    CD_PY_BEGIN("broadcast", 1, 2, 3, 5, "tensor", "src", "group", "async_op", "group_src", "timeout");
    bool ok = cd_py_group_peer(call.group, "broadcast", a[1], a[4], -1, &call.op.root) == 0;
    bool is_root = ok && call.op.root == call.group->rank;
    cd_py_array *tensor = ok ? cd_py_call_array(&call, a[0], "tensor", is_root ? CD_PY_INPUT : CD_PY_OUTPUT) : NULL;
    if (tensor) {
        call.op.kind = CD_BROADCAST;
        *(is_root ? &call.op.in : &call.op.out) = cd_py_blocks_of_span(&call.spans[0]);
        cd_py_call_agree(&call, tensor);
    }
    return cd_py_call_end(&call, a[0], tensor != NULL);
}

/* ------------------------------------------------------------------------------------------------------- all_gather */

/* The own entry of a list must fit the own tensor; differing entries make the operation uneven. An entry that overlaps the
 * tensor (a gather in place) makes the input a copy. */
static int fit_own(cd_py_call *call, cd_py_array *tensor, const cd_py_list *list, const char *name)
{
    const cd_py_array *own = &list->items[call->group->rank];
    if (!cd_py_array_same_shape(own, tensor)) {
        char have[256], want[256];
        PyErr_Format(PyExc_ValueError, "%s: the entry of this rank (%d) in %s is %s, but the tensor is %s", call->function,
                     call->group->rank, name, cd_py_array_text(own, have, sizeof have),
                     cd_py_array_text(tensor, want, sizeof want));
        return -1;
    }
    for (int i = 0; i < list->count; i++) {
        if (!cd_py_array_same_shape(&list->items[i], tensor))
            call->op.flags |= CD_OP_UNEVEN;
        if (!call->scratch && cd_py_call_detach_input(call, &list->items[i]) < 0)
            return -1;
    }
    return 0;
}

static int fit_disjoint(const cd_py_call *call, const cd_py_list *outputs, const char *name)
{
    for (int i = 0; i < outputs->count; i++)
        for (int j = 0; j < i; j++)
            if (cd_py_array_overlaps(&outputs->items[i], &outputs->items[j])) {
                PyErr_Format(PyExc_ValueError,
                             "%s: entries %d and %d of `%s` share memory, but each rank's data needs a place of its own "
                             "([x] * n is n times the same array: write [numpy.empty_like(x) for _ in range(n)])",
                             call->function, j, i, name);
                return -1;
            }
    return 0;
}

CD_PY_FUNCTION(all_gather)
{
    CD_PY_BEGIN("all_gather", 2, 2, 3, 4, "tensor_list", "tensor", "group", "async_op", "timeout");
    cd_py_array *tensor = cd_py_call_array(&call, a[1], "tensor", CD_PY_INPUT);
    cd_py_list *list = tensor ? cd_py_call_list(&call, a[0], "tensor_list", CD_PY_OUTPUT) : NULL;
    bool ok = list && fit_own(&call, tensor, list, "tensor_list") == 0 && fit_disjoint(&call, list, "tensor_list") == 0;
    if (ok) {
        call.op.kind = CD_ALL_GATHER;
        call.op.in = cd_py_blocks_of_span(&call.spans[0]);
        call.op.out = cd_py_blocks_of_list(list);
        cd_py_call_agree(&call, tensor);
    }
    return cd_py_call_end(&call, a[0], ok);
}

static int fit_whole(const cd_py_call *call, const cd_py_array *input, const cd_py_array *output)
{
    if (output->span.count == input->span.count * (size_t)call->group->size)
        return 0;
    char in[256], out[256];
    PyErr_Format(PyExc_ValueError,
                 "%s: output tensor size must be equal to world_size times input tensor size: input %s, output %s, world size %d",
                 call->function, cd_py_array_text(input, in, sizeof in), cd_py_array_text(output, out, sizeof out),
                 call->group->size);
    return -1;
}

static PyObject *all_gather_into(const char *function, PyObject *module, PyObject *const *args, Py_ssize_t given,
                                 PyObject *keywords)
{
    CD_PY_BEGIN("all_gather_into_tensor", 2, 2, 3, 4, "output_tensor", "input_tensor", "group", "async_op", "timeout");
    call.function = function;
    cd_py_array *input = cd_py_call_array(&call, a[1], "input_tensor", CD_PY_INPUT);
    cd_py_array *output = input ? cd_py_call_array(&call, a[0], "output_tensor", CD_PY_OUTPUT) : NULL;
    bool ok = output && fit_whole(&call, input, output) == 0 && cd_py_call_detach_input(&call, output) == 0;
    if (ok) {
        call.op.kind = CD_ALL_GATHER;
        call.op.in = cd_py_blocks_of_span(&call.spans[0]);
        call.op.out = cd_py_blocks_of_span(&call.spans[1]);
        cd_py_call_agree(&call, input);
    }
    return cd_py_call_end(&call, a[0], ok);
}

CD_PY_FUNCTION(all_gather_into_tensor)
{
    return all_gather_into("all_gather_into_tensor", module, args, given, keywords);
}

CD_PY_FUNCTION(all_gather_base)
{
    return all_gather_into("_all_gather_base", module, args, given, keywords);
}

/* --------------------------------------------------------------------------------------------------- gather, scatter */

/* Programs for torch pass an empty list where there is none. */
static bool is_list_given(PyObject *list)
{
    bool is_empty = list && (PyList_Check(list) || PyTuple_Check(list)) && PySequence_Fast_GET_SIZE(list) == 0;
    return cd_py_is_given(list) && !is_empty;
}

/* The list belongs to the root alone. */
static int check_root_list(const cd_py_call *call, PyObject *list, const char *name, const char *place)
{
    bool is_root = call->op.root == call->group->rank;
    if (is_root == is_list_given(list))
        return 0;
    if (is_root)
        PyErr_Format(PyExc_ValueError, "%s: Argument ``%s`` must be specified on %s rank.", call->function, name, place);
    else
        PyErr_Format(PyExc_ValueError, "%s: Argument ``%s`` must NOT be specified on non-%s ranks.", call->function, name,
                     place);
    return -1;
}

/* Whether the blocks are even is known to the root alone, so the operation is always one of blocks that may differ. */
CD_PY_FUNCTION(gather)
{
    CD_PY_BEGIN("gather", 1, 3, 4, 6, "tensor", "gather_list", "dst", "group", "async_op", "group_dst", "timeout");
    bool ok = cd_py_group_peer(call.group, "gather", a[2], a[5], 0, &call.op.root) == 0 &&
              check_root_list(&call, a[1], "gather_list", "destination") == 0;
    cd_py_array *tensor = ok ? cd_py_call_array(&call, a[0], "tensor", CD_PY_INPUT) : NULL;
    ok = tensor != NULL;
    if (ok && call.op.root == call.group->rank) {
        cd_py_list *list = cd_py_call_list(&call, a[1], "gather_list", CD_PY_OUTPUT);
        ok = list && fit_own(&call, tensor, list, "gather_list") == 0 && fit_disjoint(&call, list, "gather_list") == 0;
        if (ok)
            call.op.out = cd_py_blocks_of_list(list);
    }
    if (ok) {
        call.op.kind = CD_GATHER;
        call.op.flags = CD_OP_UNEVEN;
        call.op.in = cd_py_blocks_of_span(&call.spans[0]);
        cd_py_call_agree(&call, tensor);
    }
    return cd_py_call_end(&call, cd_py_is_given(a[1]) ? a[1] : NULL, ok);
}

CD_PY_FUNCTION(scatter)
{
    CD_PY_BEGIN("scatter", 1, 3, 4, 6, "tensor", "scatter_list", "src", "group", "async_op", "group_src", "timeout");
    bool ok = cd_py_group_peer(call.group, "scatter", a[2], a[5], 0, &call.op.root) == 0 &&
              check_root_list(&call, a[1], "scatter_list", "source") == 0;
    cd_py_array *tensor = ok ? cd_py_call_array(&call, a[0], "tensor", CD_PY_OUTPUT) : NULL;
    ok = tensor != NULL;
    if (ok && call.op.root == call.group->rank) {
        cd_py_list *list = cd_py_call_list(&call, a[1], "scatter_list", CD_PY_INPUT);
        ok = list && fit_own(&call, tensor, list, "scatter_list") == 0;
        for (int i = 0; ok && i < list->count; i++)
            ok = cd_py_call_disjoint(&call, &list->items[i], tensor) == 0;
        if (ok)
            call.op.in = cd_py_blocks_of_list(list);
    }
    if (ok) {
        call.op.kind = CD_SCATTER;
        call.op.flags = CD_OP_UNEVEN;
        call.op.out = cd_py_blocks_of_span(&call.spans[0]);
        cd_py_call_agree(&call, tensor);
    }
    return cd_py_call_end(&call, a[0], ok);
}

/* ------------------------------------------------------------------------------------------------------- all_to_all */

CD_PY_FUNCTION(all_to_all)
{
    CD_PY_BEGIN("all_to_all", 2, 2, 3, 4, "output_tensor_list", "input_tensor_list", "group", "async_op", "timeout");
    cd_py_list *in = cd_py_call_list(&call, a[1], "input_tensor_list", CD_PY_INPUT);
    cd_py_list *out = in ? cd_py_call_list(&call, a[0], "output_tensor_list", CD_PY_OUTPUT) : NULL;
    bool ok = out && fit_disjoint(&call, out, "output_tensor_list") == 0;
    for (int i = 0; ok && i < in->count; i++)
        for (int j = 0; ok && j < out->count; j++)
            ok = cd_py_call_disjoint(&call, &in->items[i], &out->items[j]) == 0;
    if (ok) {
        const cd_py_array *mine = &in->items[call.group->rank], *own = &out->items[call.group->rank];
        if (mine->span.count != own->span.count) {
            PyErr_Format(PyExc_ValueError, "all_to_all: this rank (%d) sends %zu elements to itself but receives %zu",
                         call.group->rank, mine->span.count, own->span.count);
            ok = false;
        }
    }
    if (ok) {
        call.op.kind = CD_ALL_TO_ALL;
        call.op.flags = CD_OP_UNEVEN;
        call.op.in = cd_py_blocks_of_list(in);
        call.op.out = cd_py_blocks_of_list(out);
        cd_py_call_agree(&call, &in->items[0]);
    }
    return cd_py_call_end(&call, a[0], ok);
}

/* Rows per rank → elements per rank; NULL and ok for equal parts. */
static bool read_splits(cd_py_call *call, PyObject *splits, const cd_py_array *array, const char *name, size_t **counts_p)
{
    int world = call->group->size;
    size_t rows = array->ndim ? (size_t)array->shape[0] : 0;
    *counts_p = NULL;
    if (!cd_py_is_given(splits) || (PySequence_Check(splits) && PySequence_Size(splits) == 0)) {
        if (array->ndim && rows % (size_t)world == 0)
            return true;
        PyErr_Format(PyExc_ValueError, "all_to_all_single: Tensor's dim 0 does not divide equally across group size (%zu, %d)",
                     rows, world);
        return false;
    }
    PyObject *list = PySequence_Fast(splits, "all_to_all_single: split sizes must be a list of integers");
    if (!list)
        return false;
    size_t *counts = PySequence_Fast_GET_SIZE(list) == world ? malloc((size_t)world * sizeof *counts) : NULL;
    size_t total = 0, row = rows ? array->span.count / rows : 0;
    int part = 0;
    for (int i = 0; counts && i < world; i++) {
        if (cd_py_int(PySequence_Fast_GET_ITEM(list, i), name, &part) < 0 || part < 0) {
            if (!PyErr_Occurred())
                PyErr_Format(PyExc_ValueError, "all_to_all_single: %s has the negative entry %d", name, part);
            free(counts);
            Py_DECREF(list);
            return false;
        }
        total += (size_t)part;
        counts[i] = (size_t)part * row;
    }
    Py_DECREF(list);
    *counts_p = counts;
    if (counts && total == rows)
        return true;
    if (!counts)
        PyErr_Format(PyExc_ValueError, "all_to_all_single: %s must have one entry for each of the %d ranks", name, world);
    else
        PyErr_Format(PyExc_ValueError, "all_to_all_single: Split sizes doesn't match total dim 0 size (%s: %zu, dim 0: %zu)",
                     name, total, rows);
    return false;
}

static int fit_single(cd_py_call *call, const cd_py_array *input, const cd_py_array *output)
{
    int me = call->group->rank;
    if (call->counts[0] || call->counts[1])
        call->op.flags = CD_OP_UNEVEN;
    else if (input->span.count != output->span.count) {
        PyErr_Format(PyExc_ValueError, "all_to_all_single: input has %zu elements, output %zu", input->span.count,
                     output->span.count);
        return -1;
    }
    size_t each = (size_t)call->group->size;
    size_t sends = call->counts[0] ? call->counts[0][me] : input->span.count / each;
    size_t takes = call->counts[1] ? call->counts[1][me] : output->span.count / each;
    if (sends != takes) {
        PyErr_Format(PyExc_ValueError, "all_to_all_single: this rank (%d) sends %zu elements to itself but receives %zu", me,
                     sends, takes);
        return -1;
    }
    return cd_py_call_disjoint(call, input, output);
}

CD_PY_FUNCTION(all_to_all_single)
{
    CD_PY_BEGIN("all_to_all_single", 2, 4, 5, 6, "output", "input", "output_split_sizes", "input_split_sizes", "group",
                "async_op", "timeout");
    cd_py_array *input = cd_py_call_array(&call, a[1], "input", CD_PY_INPUT);
    cd_py_array *output = input ? cd_py_call_array(&call, a[0], "output", CD_PY_OUTPUT) : NULL;
    bool ok = output && read_splits(&call, a[3], input, "input_split_sizes", &call.counts[0]) &&
              read_splits(&call, a[2], output, "output_split_sizes", &call.counts[1]) &&
              fit_single(&call, input, output) == 0;
    if (ok) {
        call.op.kind = CD_ALL_TO_ALL;
        call.op.in = cd_py_blocks_of_span(&call.spans[0]);
        call.op.out = cd_py_blocks_of_span(&call.spans[1]);
        call.op.in.counts = call.counts[0];
        call.op.out.counts = call.counts[1];
        call.op.count = input->span.count;
        call.op.ndim = 1;
        call.op.shape[0] = (int64_t)input->span.count;
    }
    return cd_py_call_end(&call, a[0], ok);
}

CD_PY_FUNCTION(barrier)
{
    CD_PY_BEGIN("barrier", 0, 0, 1, 3, "group", "async_op", "device_ids", "timeout");
    call.op.kind = CD_BARRIER;
    return cd_py_call_end(&call, NULL, true);
}

static PyMethodDef methods[] = {
    CD_PY_METHOD("broadcast", broadcast,
                 "broadcast(tensor, src=None, group=None, async_op=False, group_src=None, timeout=None)\n--\n\n"
                 "Copies `tensor` of rank `src` into the tensors of all ranks.\n\n"
                 "Args:\n"
                 "    tensor: any dtype, the same shape and dtype on all ranks; may be read-only on the source.\n"
                 "    src: global rank, or group_src: rank in the group.\n" CD_PY_DOC_COMMON),
    CD_PY_METHOD("all_gather", all_gather,
                 "all_gather(tensor_list, tensor, group=None, async_op=False, timeout=None)\n--\n\n"
                 "Gathers the tensors of all ranks into the list of each.\n\n"
                 "Args:\n"
                 "    tensor_list: one array for each rank, of the shape of that rank's tensor (shapes may differ).\n"
                 "    tensor: any dtype, the same on all ranks; may be an entry of the list.\n" CD_PY_DOC_COMMON),
    CD_PY_METHOD("all_gather_into_tensor", all_gather_into_tensor,
                 "all_gather_into_tensor(output_tensor, input_tensor, group=None, async_op=False, timeout=None)\n--\n\n"
                 "Gathers the tensors of all ranks into one, in rank order.\n\n"
                 "Args:\n"
                 "    output_tensor: (group size) × n elements, seen in C order: concatenated along dim 0 or stacked.\n"
                 "    input_tensor: n elements; may be this rank's part of the output.\n" CD_PY_DOC_COMMON),
    CD_PY_METHOD("_all_gather_base", all_gather_base,
                 "_all_gather_base(output_tensor, input_tensor, group=None, async_op=False, timeout=None)\n--\n\n"
                 "The old name of all_gather_into_tensor."),
    CD_PY_METHOD("gather", gather,
                 "gather(tensor, gather_list=None, dst=None, group=None, async_op=False, group_dst=None, timeout=None)\n--\n\n"
                 "Gathers the tensors of all ranks into the list of rank `dst`.\n\n"
                 "Args:\n"
                 "    tensor: any dtype, the same on all ranks.\n"
                 "    gather_list: on `dst` only: one array for each rank, of the shape of that rank's tensor.\n"
                 "    dst: global rank (0 if neither is given), or group_dst: rank in the group.\n" CD_PY_DOC_COMMON),
    CD_PY_METHOD("scatter", scatter,
                 "scatter(tensor, scatter_list=None, src=None, group=None, async_op=False, group_src=None, timeout=None)\n--\n\n"
                 "Gives each rank its entry of the list of rank `src`.\n\n"
                 "Args:\n"
                 "    tensor: receives; any dtype, the same on all ranks.\n"
                 "    scatter_list: on `src` only: one array for each rank, of the shape of that rank's tensor.\n"
                 "    src: global rank (0 if neither is given), or group_src: rank in the group.\n" CD_PY_DOC_COMMON),
    CD_PY_METHOD("all_to_all", all_to_all,
                 "all_to_all(output_tensor_list, input_tensor_list, group=None, async_op=False, timeout=None)\n--\n\n"
                 "Sends the j-th input to rank j, and receives from rank j into the j-th output.\n\n"
                 "Args:\n"
                 "    output_tensor_list, input_tensor_list: one array for each rank, of any sizes that fit together.\n"
                 CD_PY_DOC_COMMON),
    CD_PY_METHOD("all_to_all_single", all_to_all_single,
                 "all_to_all_single(output, input, output_split_sizes=None, input_split_sizes=None, group=None, "
                 "async_op=False, timeout=None)\n--\n\n"
                 "Cuts `input` along dim 0, sends the j-th part to rank j, and puts what comes in rank order into `output`.\n\n"
                 "Args:\n"
                 "    output, input: arrays of one dtype; they must not overlap.\n"
                 "    output_split_sizes, input_split_sizes: rows for each rank; None or [] is equal parts.\n" CD_PY_DOC_COMMON),
    CD_PY_METHOD("barrier", barrier,
                 "barrier(group=None, async_op=False, device_ids=None, timeout=None)\n--\n\n"
                 "Returns when all ranks have called it: None, or with async_op=True a Work at once.\n\n"
                 "Args:\n"
                 "    device_ids: accepted, not needed.\n" CD_PY_DOC_OPTIONS CD_PY_DOC_RAISES),
    {NULL, NULL, 0, NULL},
};

int cd_py_moves_add(PyObject *module)
{
    return PyModule_AddFunctions(module, methods);
}
