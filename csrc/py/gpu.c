#include "py/gpu.h"

#include "backend/gpu.h"
#include "py/array.h"
#include "py/errors.h"
#include "py/glue.h"
#include "py/group.h"
#include "py/host_side.h"
#include "py/redop.h"

/* Connects the group's GPU side if that has not been done. */
static cd_status open_gpu(cd_group *group, int index)
{
    cd_py_wait wait;
    cd_patience patience = cd_py_wait_begin(&wait, cd_py_deadline(cd_group_timeout_ns(group)), 1);
    if (cd_group_backend(group, CD_CUDA))
        return CD_OK;
    cd_py_wait_detach(&wait);
    cd_status status = cd_group_open_device(group, CD_CUDA, index, true, &patience);
    cd_py_wait_end(&wait);
    return status;
}

static int check_named(PyObject *group)
{
    return ((cd_py_group *)group)->serves[CD_CUDA] ? 0 : cd_py_refuse_device("GPU of the group", CD_CUDA);
}

static cd_backend *gpu_of(cd_py_state *state, cd_group *group, const char *function)
{
    cd_backend *gpu = cd_group_backend(group, CD_CUDA);
    if (!gpu) {
        cd_fail(CD_BAD_ARGUMENT, "the group has no GPU yet: give device_id to init_process_group, or run a collective");
        cd_py_raise_from(state, CD_BAD_ARGUMENT, function);
    }
    return gpu;
}

/* _gpu_open(group, index): connects, collectively; what was found, as a dict. */
static PyObject *gpu_open(PyObject *module, PyObject *args)
{
    PyObject *object;
    int index;
    cd_py_state *state = cd_py_state_of(module);
    if (!PyArg_ParseTuple(args, "O!i", state->group_type, &object, &index))
        return NULL;
    cd_group *group = ((cd_py_group *)object)->group;
    if (check_named(object) < 0)
        return NULL;
    cd_status status = open_gpu(group, index);
    if (status != CD_OK)
        return cd_py_raise_from(state, status, "init_process_group");
    cd_gpu_facts facts = cd_gpu_describe(cd_group_backend(group, CD_CUDA));
    return Py_BuildValue("{s:i,s:i,s:s,s:s,s:s}", "index", facts.index, "nccl", facts.nccl_version, "kernels", facts.kernels,
                         "name", facts.name, "pci", facts.pci);
}

static const char memory_name[] = "cdist._core.gpu_memory";

static void free_memory(PyObject *capsule)
{
    void *memory = PyCapsule_GetPointer(capsule, memory_name);
    cd_backend *gpu = PyCapsule_GetContext(capsule);
    Py_BEGIN_ALLOW_THREADS
    cd_gpu_release(gpu, memory);
    Py_END_ALLOW_THREADS
}

static PyObject *gpu_alloc(PyObject *module, PyObject *args)
{
    PyObject *object;
    Py_ssize_t bytes;
    int plain = 0;
    void *memory = NULL;
    cd_py_state *state = cd_py_state_of(module);
    if (!PyArg_ParseTuple(args, "O!n|p", state->group_type, &object, &bytes, &plain))
        return NULL;
    cd_backend *gpu = gpu_of(state, ((cd_py_group *)object)->group, "empty");
    if (!gpu)
        return NULL;
    cd_py_wait wait;
    cd_patience patience = cd_py_wait_begin(&wait, cd_py_deadline(cd_group_timeout_ns(((cd_py_group *)object)->group)), 1);
    cd_py_wait_detach(&wait);
    cd_status status = (plain ? cd_gpu_alloc_plain : cd_gpu_alloc)(gpu, (size_t)bytes, &patience, &memory);
    cd_py_wait_end(&wait);
    if (status != CD_OK)
        return cd_py_raise_from(state, status, "empty");
    PyObject *owner = PyCapsule_New(memory, memory_name, free_memory);
    if (!owner) {
        cd_gpu_release(gpu, memory);
        return NULL;
    }
    PyCapsule_SetContext(owner, gpu);
    return Py_BuildValue("(NN)", PyLong_FromVoidPtr(memory), owner);
}

static PyObject *gpu_facts(PyObject *module, PyObject *object)
{
    cd_py_array array;
    if (cd_py_array_read(cd_py_state_of(module), object, "tensor", CD_PY_INPUT, &array) < 0)
        return NULL;
    PyObject *facts = array.device == CD_CUDA ? PyTuple_New(array.ndim) : Py_NewRef(Py_None);
    if (facts && array.device == CD_CUDA) {
        for (int i = 0; i < array.ndim; i++)
            PyTuple_SET_ITEM(facts, i, PyLong_FromLongLong(array.shape[i]));
        facts = Py_BuildValue("(isNIN)", array.device_index, cd_dtype_name(array.dtype), facts,
                              (unsigned)array.span.item_bytes, PyLong_FromVoidPtr(array.stream));
    }
    cd_py_array_release(&array);
    return facts;
}

/* What gpu_pack works on. */
typedef struct {
    cd_py_array *arrays;
    cd_span *spans;
    void **addresses;
    Py_ssize_t read; /* arrays that are to be released */
} pack_list;

static int read_pack(cd_py_state *state, PyObject *arrays, PyObject *addresses, PyObject *bytes, bool back, pack_list *list)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(arrays); i++) {
        PyObject *object = PyList_GET_ITEM(arrays, i);
        cd_py_array *array = &list->arrays[i];
        size_t room = PyLong_AsSize_t(PyList_GET_ITEM(bytes, i));
        list->addresses[i] = PyLong_AsVoidPtr(PyList_GET_ITEM(addresses, i));
        array->keep = NULL;
        list->spans[i] = (cd_span){.count = room, .item_bytes = 1};
        if (PyErr_Occurred())
            return -1;
        if (object != Py_None && cd_py_array_read(state, object, "gradient", back ? CD_PY_OUTPUT : CD_PY_INPUT, array) < 0)
            return -1;
        list->read = i + 1;
        if (object == Py_None)
            continue;
        if (array->device != CD_CUDA || array->span.count * array->span.item_bytes != room) {
            PyErr_Format(PyExc_ValueError, "gradient %zd: %zu bytes in GPU memory are expected", i, room);
            return -1;
        }
        list->spans[i] = array->span;
    }
    return 0;
}

static PyObject *gpu_pack(PyObject *module, PyObject *args)
{
    PyObject *object, *arrays, *addresses, *bytes, *stream;
    int back;
    cd_py_state *state = cd_py_state_of(module);
    if (!PyArg_ParseTuple(args, "O!O!O!O!Op", state->group_type, &object, &PyList_Type, &arrays, &PyList_Type, &addresses,
                          &PyList_Type, &bytes, &stream, &back))
        return NULL;
    cd_backend *gpu = gpu_of(state, ((cd_py_group *)object)->group, "gradient reduction");
    void *where = gpu ? PyLong_AsVoidPtr(stream) : NULL;
    if (!gpu || PyErr_Occurred())
        return NULL;
    Py_ssize_t count = PyList_GET_SIZE(arrays);
    if (PyList_GET_SIZE(addresses) != count || PyList_GET_SIZE(bytes) != count)
        return PyErr_Format(PyExc_ValueError, "one address and one size for each array");
    size_t room = (size_t)count + 1;
    pack_list list = {PyMem_Malloc(room * sizeof *list.arrays), PyMem_Malloc(room * sizeof *list.spans),
                      PyMem_Malloc(room * sizeof *list.addresses), 0};
    if (!list.arrays || !list.spans || !list.addresses) {
        PyErr_NoMemory();
    } else if (read_pack(state, arrays, addresses, bytes, back, &list) == 0) {
        cd_status status;
        Py_BEGIN_ALLOW_THREADS
        status = cd_gpu_pack(gpu, list.spans, list.addresses, (size_t)count, back, where);
        Py_END_ALLOW_THREADS
        if (status != CD_OK)
            cd_py_raise_from(state, status, "gradient reduction");
    }
    for (Py_ssize_t i = 0; i < list.read; i++)
        cd_py_array_release(&list.arrays[i]);
    PyMem_Free(list.arrays);
    PyMem_Free(list.spans);
    PyMem_Free(list.addresses);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

/* Where operations on `tensor` run: 1 on a GPU, 0 on the CPU; None: on a GPU if the group has one already. −1: exception. */
static int find_gpu(cd_py_state *state, cd_group *group, PyObject *tensor, int *index_p)
{
    cd_py_array array;
    if (tensor == Py_None)
        return cd_group_backend(group, CD_CUDA) != NULL;
    if (cd_py_array_read(state, tensor, "tensor", CD_PY_INPUT, &array) < 0)
        return -1;
    *index_p = array.device_index;
    int on_gpu = array.device == CD_CUDA;
    cd_py_array_release(&array);
    return on_gpu;
}

/* _gpu_coalesce_begin(group, tensor): False for arrays in host memory, where nothing is to be coalesced. */
static PyObject *coalesce_begin(PyObject *module, PyObject *args)
{
    PyObject *object, *tensor;
    int index = -1;
    cd_py_state *state = cd_py_state_of(module);
    if (!PyArg_ParseTuple(args, "O!O", state->group_type, &object, &tensor))
        return NULL;
    cd_group *group = ((cd_py_group *)object)->group;
    int on_gpu = find_gpu(state, group, tensor, &index);
    if (on_gpu <= 0)
        return on_gpu < 0 ? NULL : Py_NewRef(Py_False);
    if (check_named(object) < 0)
        return NULL;
    cd_status status = open_gpu(group, index);
    if (status == CD_OK) {
        cd_backend *gpu = cd_group_backend(group, CD_CUDA);
        cd_py_wait wait;
        cd_patience patience = cd_py_wait_begin(&wait, cd_py_deadline(cd_group_timeout_ns(group)), 1);
        cd_py_wait_detach(&wait);
        status = gpu->ops->group_begin(gpu, &patience);
        cd_py_wait_end(&wait);
    }
    return status == CD_OK ? Py_NewRef(Py_True) : cd_py_raise_from(state, status, "coalesced operations");
}

static PyObject *coalesce_end(PyObject *module, PyObject *args)
{
    PyObject *object;
    cd_py_state *state = cd_py_state_of(module);
    if (!PyArg_ParseTuple(args, "O!", state->group_type, &object))
        return NULL;
    cd_group *group = ((cd_py_group *)object)->group;
    cd_backend *gpu = gpu_of(state, group, "coalesced operations");
    if (!gpu)
        return NULL;
    cd_py_wait wait;
    cd_patience patience = cd_py_wait_begin(&wait, cd_py_deadline(cd_group_timeout_ns(group)), 1);
    cd_py_wait_detach(&wait);
    cd_status status = gpu->ops->group_end(gpu, &patience);
    cd_py_wait_end(&wait);
    if (status == CD_OK)
        Py_RETURN_NONE;
    if (cd_status_is_sticky(status)) {
        cd_error error = *cd_last_error();
        cd_group_abort(group, &error);
        cd_fail_with(&error);
    }
    return cd_py_raise_from(state, status, "coalesced operations");
}

/* _gpu_reduces(op, dtype): the backend's own table. */
static PyObject *gpu_reduces(PyObject *module, PyObject *args)
{
    cd_redop redop;
    cd_dtype number;
    if (cd_py_redop_read_pair(cd_py_state_of(module), args, &redop, &number) < 0)
        return NULL;
    return PyBool_FromLong(cd_gpu_supports(CD_ALL_REDUCE, redop, number) == CD_OK);
}

static PyMethodDef methods[] = {
    {"_gpu_reduces", gpu_reduces, METH_VARARGS, "_gpu_reduces(op, dtype)\n--\n\nWhether NCCL has the reduction for the dtype."},
    {"_gpu_open", gpu_open, METH_VARARGS, "_gpu_open(group, index)\n--\n\nConnects the GPUs of the group; collective."},
    {"_gpu_alloc", gpu_alloc, METH_VARARGS,
     "_gpu_alloc(group, bytes, plain=False)\n--\n\nAddress and owner of GPU memory, registered with NCCL unless plain."},
    {"_gpu_facts", gpu_facts, METH_O,
     "_gpu_facts(array)\n--\n\n(GPU or -1, dtype, shape, bytes of an element, current stream) of an array in GPU memory; None "
     "for\nan array elsewhere."},
    {"_gpu_pack", gpu_pack, METH_VARARGS,
     "_gpu_pack(group, arrays, addresses, bytes, stream, back)\n--\n\nEnqueues copies of arrays to packed memory or, back, from "
     "there; None stands for zeros."},
    {"_gpu_coalesce_begin", coalesce_begin, METH_VARARGS,
     "_gpu_coalesce_begin(group, tensor)\n--\n\nOperations from here to the end are one launch; False on the CPU. `tensor`\n"
     "tells where they run; None: where the group has connected GPUs already."},
    {"_gpu_coalesce_end", coalesce_end, METH_VARARGS, "_gpu_coalesce_end(group)\n--\n\nLaunches them."},
    {NULL, NULL, 0, NULL},
};

int cd_py_gpu_add(PyObject *module)
{
    return PyModule_AddFunctions(module, methods);
}
