/* Arrays by DLPack: through a type's table of C functions, or through the capsule that __dlpack__() gives. */
#include "py/array_impl.h"

#include <stdio.h>
#include <string.h>

static int dtype_of_dlpack(cd_dl_dtype dl, const char *name, cd_py_array *out)
{
    unsigned bits = (unsigned)dl.bits * dl.lanes;
    if (bits == 0 || bits % 8 != 0) {
        PyErr_Format(PyExc_TypeError, "parameter `%s` has elements of %u bits: only whole bytes can be sent", name, bits);
        return -1;
    }
    size_t bytes = bits / 8;
    out->span.item_bytes = (uint32_t)bytes;
    out->dtype = CD_BYTES;
    if (dl.lanes != 1)
        return 0;
    switch (dl.code) {
    case CD_DL_INT: out->dtype = cd_py_dtype_of_family('i', bytes); break;
    case CD_DL_UINT: out->dtype = cd_py_dtype_of_family('u', bytes); break;
    case CD_DL_FLOAT: out->dtype = cd_py_dtype_of_family('f', bytes); break;
    case CD_DL_COMPLEX: out->dtype = cd_py_dtype_of_family('c', bytes); break;
    case CD_DL_BOOL: out->dtype = cd_py_dtype_of_family('b', bytes); break;
    case CD_DL_BFLOAT: out->dtype = bytes == 2 ? CD_BFLOAT16 : CD_BYTES; break;
    case CD_DL_FLOAT8_E4M3FN: out->dtype = CD_FLOAT8_E4M3FN; break;
    case CD_DL_FLOAT8_E5M2: out->dtype = CD_FLOAT8_E5M2; break;
    default: break;
    }
    return 0;
}

static int read_dl_tensor(const cd_dl_tensor *dl, const char *name, cd_py_array *out)
{
    if (dl->ndim < 0 || dl->ndim > CD_MAX_DIMS)
        return cd_py_array_refuse_dims(name, dl->ndim);
    if (dl->ndim > 0 && !dl->shape) {
        PyErr_Format(PyExc_TypeError, "parameter `%s` has %d dimensions by DLPack and no shape", name, dl->ndim);
        return -1;
    }
    switch (dl->device.device_type) {
    case CD_DL_CPU:
    case CD_DL_CUDA_HOST: out->device = CD_CPU; break;
    case CD_DL_CUDA:
    case CD_DL_CUDA_MANAGED: out->device = CD_CUDA; break;
    default:
        PyErr_Format(PyExc_TypeError, "parameter `%s` lies on a device of DLPack's kind %d: only CPU and CUDA are supported",
                     name, (int)dl->device.device_type);
        return -1;
    }
    if (dtype_of_dlpack(dl->dtype, name, out) < 0)
        return -1;
    if (out->device == CD_CUDA && cd_py_array_set_device(out, dl->device.device_id, name) < 0)
        return -1;
    uintptr_t first;
    bool wraps = __builtin_add_overflow((uintptr_t)dl->data, dl->byte_offset, &first);
    out->span.data = (void *)first;
    out->ndim = dl->ndim;
    for (int i = 0; i < dl->ndim; i++)
        out->shape[i] = dl->shape[i];
    if (cd_unlikely(wraps)) {
        PyErr_Format(PyExc_ValueError, "parameter `%s` begins, by DLPack, beyond the end of the address space", name);
        return -1;
    }
    if (cd_py_array_set_layout(out, dl->strides, (ptrdiff_t)out->span.item_bytes, name) < 0)
        return -1;
    if (!dl->data && out->span.count) {
        PyErr_Format(PyExc_TypeError, "parameter `%s` (%s) has no memory of its own", name, Py_TYPE(out->object)->tp_name);
        return -1;
    }
    return 0;
}

/* What torch's tensors without plain memory are, and what to do; NULL for others. */
static const char *find_remedy(PyObject *object)
{
    static const struct {
        const char *attribute, *text;
    } kinds[] = {
        {"is_sparse", "it is sparse; pass its indices and values, or tensor.to_dense()"},
        {"is_sparse_csr", "it is sparse; pass its parts, or tensor.to_dense()"},
        {"is_meta", "it is a meta tensor, a shape without values; make it on a device"},
        {"is_quantized", "it is quantized; pass tensor.int_repr() or tensor.dequantize()"},
        {"is_nested", "it is nested; pass its tensors one by one"},
    };
    const char *found = NULL;
    for (size_t i = 0; !found && i < sizeof kinds / sizeof *kinds; i++) {
        PyObject *truth = PyObject_GetAttrString(object, kinds[i].attribute);
        if (truth == Py_True)
            found = kinds[i].text;
        Py_XDECREF(truth);
        PyErr_Clear();
    }
    return found;
}

/* The framework's text can be pages of C++ frames: its first line becomes ours. */
static int refuse_export(PyObject *object, const char *name)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *text = value ? PyObject_Str(value) : NULL;
    const char *why = text ? PyUnicode_AsUTF8(text) : NULL;
    if (!why)
        why = "no reason given";
    const char *remedy = find_remedy(object);
    char line[200];
    snprintf(line, sizeof line, "%.*s", (int)strcspn(why, "\n"), why);
    if (remedy)
        snprintf(line, sizeof line, "%s", remedy);
    PyErr_Clear();
    PyErr_Format(PyExc_TypeError, "parameter `%s` (%s) has no memory that can be sent: %s", name, Py_TYPE(object)->tp_name,
                 line);
    Py_XDECREF(text);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    return -1;
}

/* From here on the question costs little beside the operation. */
#define ALWAYS_ASK_BYTES ((size_t)64 << 10)

static bool answers_true(PyObject *object, PyObject *method)
{
    PyObject *answer = PyObject_CallMethodNoArgs(object, method);
    if (!answer)
        PyErr_Clear();
    bool is_true = answer == Py_True;
    Py_XDECREF(answer);
    return is_true;
}

/* torch keeps a conjugation or a sign as a bit beside the memory; the table does not tell of it. To ask takes half as long as
 * a small all_reduce in a group of one, so tensors that cannot be views into complex memory are not asked about. (The private
 * torch._neg_view gives a small packed tensor a sign all the same: that one goes unseen.) */
static int refuse_lazy(const cd_py_state *state, PyObject *object, const char *name, const cd_py_array *array)
{
    const cd_span *span = &array->span;
    bool is_complex = cd_dtype_is_complex(array->dtype);
    bool may_be_one = span->count == 1 && cd_py_array_may_be_imaginary(span->data, span->item_bytes);
    if (cd_likely(!is_complex && !span->dims && !may_be_one && span->count * span->item_bytes < ALWAYS_ASK_BYTES))
        return 0;
    bool conjugate = is_complex && answers_true(object, state->is_conj_name);
    if (!conjugate && !answers_true(object, state->is_neg_name))
        return 0;
    PyErr_Format(PyExc_ValueError, "parameter `%s` is a lazy %s view: pass tensor.resolve_%s()", name,
                 conjugate ? "conjugate" : "negative", conjugate ? "conj" : "neg");
    return -1;
}

int cd_py_dlpack_export(const cd_py_state *state, const cd_dl_exchange *api, PyObject *object, const char *name,
                        cd_py_array *out)
{
    cd_dl_tensor dl;
    if (api->export_borrowed(object, &dl) < 0)
        return refuse_export(object, name);
    out->writable = true;
    if (read_dl_tensor(&dl, name, out) < 0 || refuse_lazy(state, object, name, out) < 0)
        return -1;
    if (out->device == CD_CUDA)
        return api->current_stream(CD_DL_CUDA, out->device_index, &out->stream);
    return 0;
}

/* The capsule is kept, not consumed: its destructor gives the memory back to the producer. */
static int read_capsule(PyObject *capsule, const char *name, cd_py_array *out)
{
    out->keep = capsule;
    if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        const cd_dl_versioned *managed = PyCapsule_GetPointer(capsule, "dltensor_versioned");
        if (managed->version.major != CD_DL_MAJOR) {
            PyErr_Format(PyExc_TypeError, "parameter `%s` speaks version %u of DLPack, version %d is supported", name,
                         managed->version.major, CD_DL_MAJOR);
            return -1;
        }
        out->writable = !(managed->flags & CD_DL_READ_ONLY);
        return read_dl_tensor(&managed->tensor, name, out);
    }
    if (!PyCapsule_IsValid(capsule, "dltensor")) {
        PyErr_Format(PyExc_TypeError, "parameter `%s`: __dlpack__ gave %R, which is no DLPack tensor, or one that was used", name,
                     capsule);
        return -1;
    }
    const cd_dl_managed *managed = PyCapsule_GetPointer(capsule, "dltensor");
    /* The old form has no flag; JAX, whose arrays never change, still hands it out. */
    out->writable = strncmp(Py_TYPE(out->object)->tp_name, "jax", 3) != 0;
    return read_dl_tensor(&managed->tensor, name, out);
}

int cd_py_dlpack_read(PyObject *object, const char *name, cd_py_array *out)
{
    PyObject *method = PyObject_GetAttrString(object, "__dlpack__");
    if (!method)
        return -1;
    PyObject *none = PyTuple_New(0);
    PyObject *version = none ? Py_BuildValue("{s:(ii)}", "max_version", CD_DL_MAJOR, 0) : NULL;
    PyObject *capsule = version ? PyObject_Call(method, none, version) : NULL;
    if (!capsule && PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear();
        capsule = PyObject_CallNoArgs(method);
    }
    Py_DECREF(method);
    Py_XDECREF(none);
    Py_XDECREF(version);
    return capsule ? read_capsule(capsule, name, out) : cd_py_array_name_error(object, name);
}

static const cd_dl_exchange *find_exchange(PyTypeObject *type)
{
    PyObject *capsule = PyObject_GetAttrString((PyObject *)type, "__dlpack_c_exchange_api__");
    if (!capsule) {
        PyErr_Clear();
        return NULL;
    }
    const cd_dl_exchange *api = NULL;
    if (PyCapsule_IsValid(capsule, "dlpack_exchange_api"))
        api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_DECREF(capsule);
    while (api && api->version.major != CD_DL_MAJOR)
        api = api->older;
    return api && api->export_borrowed && api->current_stream ? api : NULL;
}

const cd_dl_exchange *cd_py_dlpack_table(cd_py_state *state, PyTypeObject *type)
{
    if (cd_likely((PyObject *)type == state->exchange_type))
        return state->exchange_api;
    PyObject *known = PyDict_GetItemWithError(state->array_types, (PyObject *)type);
    const cd_dl_exchange *api = known ? PyCapsule_GetPointer(known, NULL) : find_exchange(type);
    if (!api)
        return NULL;
    if (!known) {
        PyObject *capsule = PyCapsule_New((void *)(uintptr_t)api, NULL, NULL);
        if (capsule)
            PyDict_SetItem(state->array_types, (PyObject *)type, capsule);
        Py_XDECREF(capsule);
        PyErr_Clear();
    }
    Py_XSETREF(state->exchange_type, Py_NewRef((PyObject *)type));
    state->exchange_api = api;
    return api;
}
