#include "py/call.h"

#include "backend/gpu.h"
#include "py/args.h"
#include "py/errors.h"
#include "py/glue.h"
#include "py/host_side.h"
#include "py/redop.h"
#include "py/work.h"
#include "simd/strided.h"

#include <stdlib.h>
#include <string.h>

int cd_py_call_begin(cd_py_call *call, cd_py_state *state, const char *function, PyObject *group, PyObject *is_async,
                     PyObject *timeout)
{
    call->state = state;
    call->function = function;
    call->arrays = call->lists = 0;
    call->is_typed = false;
    call->is_host_side = cd_py_is_host_side(state, group);
    call->scratch = call->counts[0] = call->counts[1] = NULL;
    int truth = is_async && is_async != Py_False ? PyObject_IsTrue(is_async) : 0;
    if (truth < 0)
        return -1;
    call->is_async = truth != 0;
    int go = cd_py_group_get(state, group, function, &call->group);
    if (go <= 0)
        return go;
    if (cd_py_timeout_ns(timeout, cd_group_timeout_ns(call->group->group), &call->timeout_ns) < 0) {
        Py_DECREF(call->group);
        return -1;
    }
    memset(&call->op, 0, sizeof call->op);
    call->op.root = -1;
    return 1;
}

/* ---------------------------------------------------------------------------------------------------------- arrays */

static int check_kind(cd_py_call *call, const cd_py_array *array, const char *name)
{
    cd_op *op = &call->op;
    if (!call->is_typed) {
        if (cd_unlikely(!call->group->serves[array->device]) && !call->is_host_side)
            return cd_py_refuse_device(call->function, array->device);
        call->is_typed = true;
        op->dtype = array->dtype;
        op->item_bytes = array->span.item_bytes;
        op->meaning = array->meaning;
        op->device = array->device;
        op->stream = array->stream;
        op->gpu = array->device == CD_CUDA && array->device_index >= 0 ? array->device_index + 1 : 0;
        return 0;
    }
    if (array->dtype != op->dtype || array->span.item_bytes != op->item_bytes) {
        PyErr_Format(PyExc_ValueError,
                     "%s: Invalid usage of tensors with different dtypes: found %s (%u bytes) and, in `%s`, %s (%u bytes)",
                     call->function, cd_dtype_name(op->dtype), op->item_bytes, name, cd_dtype_name(array->dtype),
                     array->span.item_bytes);
        return -1;
    }
    if (array->meaning != op->meaning) {
        PyErr_Format(PyExc_ValueError,
                     "%s: Invalid usage of tensors with different dtypes: the elements of `%s` have another unit, byte order or "
                     "fields than those before", call->function, name);
        return -1;
    }
    if (array->device != op->device) {
        PyErr_Format(PyExc_ValueError, "%s: the arrays lie on different devices (CPU and CUDA)", call->function);
        return -1;
    }
    if (array->device_index + 1 != op->gpu)
        op->gpu = 0;
    return 0;
}

cd_py_array *cd_py_call_array(cd_py_call *call, PyObject *object, const char *name, cd_py_use use)
{
    cd_py_array *array = &call->array[call->arrays];
    if (cd_py_array_read(call->state, object, name, use, array) < 0)
        return NULL;
    if (check_kind(call, array, name) < 0) {
        cd_py_array_release(array);
        return NULL;
    }
    call->spans[call->arrays] = array->span;
    call->arrays++;
    return array;
}

static void free_list(cd_py_list *list)
{
    for (int i = 0; i < list->count; i++)
        cd_py_array_release(&list->items[i]);
    free(list->items);
    free(list->spans);
}

static int read_items(cd_py_call *call, PyObject *sequence, const char *name, cd_py_use use, cd_py_list *list)
{
    int world = call->group->size;
    list->items = malloc((size_t)world * sizeof *list->items);
    list->spans = malloc((size_t)world * sizeof *list->spans);
    if (!list->items || !list->spans) {
        PyErr_NoMemory();
        return -1;
    }
    for (int i = 0; i < world; i++) {
        if (cd_py_array_read(call->state, PySequence_Fast_GET_ITEM(sequence, i), name, use, &list->items[i]) < 0)
            return -1;
        list->count = i + 1;
        if (check_kind(call, &list->items[i], name) < 0)
            return -1;
        list->spans[i] = list->items[i].span;
    }
    return 0;
}

cd_py_list *cd_py_call_list(cd_py_call *call, PyObject *object, const char *name, cd_py_use use)
{
    if (!PyList_Check(object) && !PyTuple_Check(object)) {
        PyErr_Format(PyExc_TypeError,
                     "Invalid function argument. Expected parameter `%s` of type List[array], a list with one array for each "
                     "rank, but got %s instead: pass list(x) of an array with a row for each, or use the call's form for one "
                     "tensor (all_gather_into_tensor, reduce_scatter_tensor, all_to_all_single)",
                     name, Py_TYPE(object)->tp_name);
        return NULL;
    }
    Py_ssize_t given = PySequence_Fast_GET_SIZE(object);
    if (given != call->group->size) {
        PyErr_Format(PyExc_ValueError, "%s: parameter `%s` has %zd arrays, the group has %d ranks: one for each is needed",
                     call->function, name, given, call->group->size);
        return NULL;
    }
    cd_py_list *list = &call->list[call->lists];
    *list = (cd_py_list){0};
    call->lists++;
    return read_items(call, object, name, use, list) < 0 ? NULL : list;
}

void cd_py_call_agree(cd_py_call *call, const cd_py_array *array)
{
    call->op.count = array->span.count;
    call->op.ndim = array->ndim;
    for (int i = 0; i < array->ndim && i < 8; i++)
        call->op.shape[i] = array->shape[i];
}

static void refuse_bytes(const cd_py_call *call)
{
    PyObject *object = call->arrays ? call->array[0].object : call->lists ? call->list[0].items[0].object : NULL;
    PyObject *dtype = object ? PyObject_GetAttrString(object, "dtype") : NULL;
    PyObject *text = dtype ? PyObject_Str(dtype) : NULL;
    PyErr_Clear();
    PyErr_Format(PyExc_TypeError,
                 "%s: elements of dtype %V (%u bytes each) can be moved but not reduced: reduce a copy in numbers of this "
                 "machine, such as x.astype(float), x.view('i8') of dates, or x['name'] of records",
                 call->function, text, "unknown", call->op.item_bytes);
    Py_XDECREF(text);
    Py_XDECREF(dtype);
}

int cd_py_call_reduction(cd_py_call *call, PyObject *op)
{
    if (cd_py_redop_read(call->state, op, &call->op.redop, &call->op.factor) < 0)
        return -1;
    if (cd_likely(cd_redop_supports(call->op.redop, call->op.dtype)))
        return 0;
    const char *name = cd_redop_name(call->op.redop);
    if (cd_dtype_is_complex(call->op.dtype))
        PyErr_Format(PyExc_TypeError, "%s does not support ReduceOp.%s on complex tensors (%s)", call->function, name,
                     cd_dtype_name(call->op.dtype));
    else if (call->op.dtype == CD_BYTES)
        refuse_bytes(call);
    else
        PyErr_Format(PyExc_TypeError, "%s: Cannot use ReduceOp.%s with %s%s", call->function, name,
                     cd_dtype_name(call->op.dtype),
                     call->op.redop >= CD_BAND && call->op.redop <= CD_BXOR ? " (non-integral dtype)" : "");
    return -1;
}

int cd_py_call_disjoint(const cd_py_call *call, const cd_py_array *in, const cd_py_array *out)
{
    if (!cd_py_array_overlaps(in, out))
        return 0;
    PyErr_Format(PyExc_ValueError, "%s: an input and an output share memory, which this operation does not allow",
                 call->function);
    return -1;
}

int cd_py_call_detach_input(cd_py_call *call, const cd_py_array *out)
{
    cd_span *span = &call->spans[0];
    if (call->op.device != CD_CPU || !cd_py_array_overlaps(&call->array[0], out))
        return 0;
    call->scratch = malloc(span->count * span->item_bytes);
    if (!call->scratch) {
        PyErr_NoMemory();
        return -1;
    }
    cd_span_read(span, 0, span->count, call->scratch);
    *span = (cd_span){.data = call->scratch, .count = span->count, .item_bytes = span->item_bytes};
    return 0;
}

cd_blocks cd_py_blocks_of_span(cd_span *span)
{
    return (cd_blocks){.list = span, .spans = 1};
}

cd_blocks cd_py_blocks_of_list(const cd_py_list *list)
{
    return (cd_blocks){.list = list->spans, .spans = list->count};
}

/* ------------------------------------------------------------------------------------------------------------ end */

static void release_call(cd_py_call *call)
{
    for (int i = 0; i < call->arrays; i++)
        cd_py_array_release(&call->array[i]);
    for (int i = 0; i < call->lists; i++)
        free_list(&call->list[i]);
    free(call->scratch);
    free(call->counts[0]);
    free(call->counts[1]);
    Py_DECREF(call->group);
}

static const cd_py_array *first_array(const cd_py_call *call)
{
    return call->arrays ? &call->array[0] : call->lists ? &call->list[0].items[0] : NULL;
}

/* The GPU's backend is connected by the first operation on GPU memory; all ranks come here with it. */
static cd_status open_device(cd_py_call *call, const cd_patience *patience)
{
    return cd_group_open_device(call->group->group, call->op.device, first_array(call)->device_index, false, patience);
}

static cd_status run_call(cd_py_call *call)
{
    cd_group *group = call->group->group;
    cd_py_wait wait = {.world = cd_group_world(group)};
    cd_patience patience = {.deadline = cd_py_deadline(call->timeout_ns),
                            .idle = cd_py_wait_idle,
                            .idle_ctx = &wait,
                            .spin = call->group->spin,
                            .yields = call->group->yields};
    bool quick = cd_group_is_quick(group, &call->op);
    if (!quick)
        cd_py_wait_detach(&wait);
    cd_status status = CD_OK;
    if (cd_unlikely(call->op.device != CD_CPU && !cd_group_backend(group, call->op.device)))
        status = open_device(call, &patience);
    if (cd_likely(status == CD_OK))
        status = cd_group_run(group, &call->op, &patience);
    cd_py_wait_end(&wait);
    return status;
}

/* What an asynchronous operation needs until it is complete, beside the descriptions that the Work copies. */
typedef struct {
    PyObject *objects; /* tuple: the arrays, and what keeps their memory */
    void *scratch;
} pinned;

/* An array that needs nothing else. */
static void free_object(void *object)
{
    if (!Py_IsInitialized()) /* the interpreter is gone, and the arrays with it */
        return;
    PyGILState_STATE gil = PyGILState_Ensure();
    Py_DECREF((PyObject *)object);
    PyGILState_Release(gil);
}

static void free_pinned(void *owner)
{
    pinned *pin = owner;
    PyObject *objects = pin->objects;
    free(pin->scratch);
    free(pin);
    free_object(objects);
}

static void keep_object(PyObject *objects, Py_ssize_t *at, const cd_py_array *array)
{
    PyTuple_SET_ITEM(objects, (*at)++, Py_NewRef(array->object));
    PyTuple_SET_ITEM(objects, (*at)++, Py_NewRef(array->keep ? array->keep : Py_None));
}

static PyObject *collect_objects(const cd_py_call *call)
{
    Py_ssize_t count = call->arrays;
    for (int i = 0; i < call->lists; i++)
        count += call->list[i].count;
    PyObject *objects = PyTuple_New(2 * count);
    Py_ssize_t at = 0;
    for (int i = 0; objects && i < call->arrays; i++)
        keep_object(objects, &at, &call->array[i]);
    for (int i = 0; objects && i < call->lists; i++)
        for (int j = 0; j < call->list[i].count; j++)
            keep_object(objects, &at, &call->list[i].items[j]);
    return objects;
}

/* What the work is to own, with the function that frees it; NULL with MemoryError. */
static void *pin_call(cd_py_call *call, void (**free_p)(void *))
{
    if (call->arrays == 1 && call->lists == 0 && !call->array[0].keep && !call->scratch) {
        *free_p = free_object;
        return Py_NewRef(call->array[0].object);
    }
    *free_p = free_pinned;
    pinned *pin = malloc(sizeof *pin);
    PyObject *objects = pin ? collect_objects(call) : NULL;
    if (!objects) {
        free(pin);
        PyErr_NoMemory();
        return NULL;
    }
    *pin = (pinned){objects, call->scratch};
    call->scratch = NULL;
    return pin;
}

/* A launch waits while the GPU's queue is full, and the first of a kind for the other ranks. */
static cd_status issue_on_gpu(cd_py_call *call, cd_work **out)
{
    cd_py_wait wait;
    cd_patience patience = cd_py_wait_begin(&wait, cd_py_deadline(call->timeout_ns), 1);
    cd_py_wait_detach(&wait);
    cd_status status = cd_group_issue_patiently(call->group->group, &call->op, call->timeout_ns, &patience, out);
    cd_py_wait_end(&wait);
    return status;
}

static cd_status open_for_issue(cd_py_call *call)
{
    if (call->op.device == CD_CPU || cd_group_backend(call->group->group, call->op.device))
        return CD_OK;
    cd_py_wait wait;
    cd_patience patience = cd_py_wait_begin(&wait, cd_py_deadline(call->timeout_ns), 1);
    cd_py_wait_detach(&wait);
    cd_status status = open_device(call, &patience);
    cd_py_wait_end(&wait);
    return status;
}

static PyObject *issue_call(cd_py_call *call, PyObject *outputs)
{
    cd_status status = open_for_issue(call);
    /* A list is copied, since the caller may change it. */
    bool is_list = outputs && (PyList_Check(outputs) || PyTuple_Check(outputs));
    PyObject *kept = is_list ? PySequence_List(outputs) : Py_XNewRef(outputs);
    void (*free_pin)(void *);
    void *pin = status == CD_OK && (kept || !outputs) ? pin_call(call, &free_pin) : NULL;
    cd_work *work = NULL;
    if (pin) {
        status = call->op.device == CD_CPU ? cd_group_issue(call->group->group, &call->op, call->timeout_ns, &work)
                                           : issue_on_gpu(call, &work);
        if (status != CD_OK)
            free_pin(pin);
        else
            cd_work_set_owner(work, pin, free_pin);
    }
    if (!work)
        Py_XDECREF(kept);
    if (status != CD_OK)
        return cd_py_raise_from(call->state, status, call->function);
    if (!work)
        return NULL;
    /* Not the array's word for its GPU, which some interfaces do not say. */
    int device = call->op.device == CD_CPU ? -1 : cd_gpu_describe(cd_group_backend(call->group->group, CD_CUDA)).index;
    const cd_py_array *array = first_array(call);
    return cd_py_work_new(call->state, work, call->group, call->function, kept, array ? array->object : NULL, device);
}

PyObject *cd_py_call_end(cd_py_call *call, PyObject *outputs, bool ok)
{
    PyObject *result = NULL;
    if (cd_likely(ok)) {
        if (call->is_async) {
            result = issue_call(call, outputs);
        } else {
            cd_status status = run_call(call);
            if (cd_likely(status == CD_OK))
                result = Py_NewRef(Py_None);
            else
                cd_py_raise_from(call->state, status, call->function);
        }
    }
    release_call(call);
    return result;
}
