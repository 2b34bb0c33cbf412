#include "py/recorder.h"

#include "py/group.h"

#include <stdio.h>
#include <string.h>

/* True for frames of this package: the caller's own line is the one that tells. */
static bool is_ours(PyFrameObject *frame)
{
    PyObject *globals = PyFrame_GetGlobals(frame);
    PyObject *name = globals ? PyDict_GetItemString(globals, "__name__") : NULL; /* borrowed */
    const char *text = name && PyUnicode_Check(name) ? PyUnicode_AsUTF8(name) : NULL;
    bool ours = text && strncmp(text, "cdist", 5) == 0 && (text[5] == '.' || text[5] == 0);
    Py_XDECREF(globals);
    return ours;
}

static void describe_frame(PyFrameObject *frame, char *out, size_t bytes)
{
    PyCodeObject *code = PyFrame_GetCode(frame);
    const char *file = PyUnicode_AsUTF8(code->co_filename);
    const char *tail = file ? strrchr(file, '/') : NULL;
    snprintf(out, bytes, "%s:%d", tail ? tail + 1 : file ? file : "?", PyFrame_GetLineNumber(frame));
    Py_DECREF(code);
}

static void find_site(char *out, size_t bytes)
{
    out[0] = 0;
    PyFrameObject *frame = PyThreadState_GetFrame(PyThreadState_Get());
    while (frame && is_ours(frame)) {
        PyFrameObject *back = PyFrame_GetBack(frame);
        Py_DECREF(frame);
        frame = back;
    }
    if (frame)
        describe_frame(frame, out, bytes);
    Py_XDECREF(frame);
}

void cd_py_note_site(cd_world *world)
{
    char site[8 * CD_RECORD_SITE_WORDS];
    PyObject *kind, *value, *trace;
    PyErr_Fetch(&kind, &value, &trace);
    find_site(site, sizeof site);
    cd_world_set_site(world, site);
    PyErr_Restore(kind, value, trace);
}

void cd_py_report(PyObject *error)
{
    PyObject *kind, *value, *trace;
    PyErr_Fetch(&kind, &value, &trace);
    PyObject *recorder = PyImport_ImportModule("cdist.recorder");
    PyObject *result = recorder ? PyObject_CallMethod(recorder, "_on_failure", "O", error) : NULL;
    Py_XDECREF(result);
    Py_XDECREF(recorder);
    PyErr_Restore(kind, value, trace);
}

static cd_py_group *group_of(PyObject *module, PyObject *object)
{
    cd_py_state *state = cd_py_state_of(module);
    cd_py_group *group = (cd_py_group *)object;
    if (!PyObject_TypeCheck(object, (PyTypeObject *)state->group_type) || !group->group) {
        PyErr_SetString(PyExc_TypeError, "a ProcessGroup that was not destroyed is needed");
        return NULL;
    }
    return group;
}

static PyObject *entry_of(const cd_record_view *view)
{
    char name[64];
    bool reduces = view->kind == CD_ALL_REDUCE || view->kind == CD_REDUCE || view->kind == CD_REDUCE_SCATTER;
    return Py_BuildValue("{s:K,s:s,s:s,s:K,s:s,s:z,s:K,s:K,s:i,s:s,s:d,s:d,s:d}", "ticket", (unsigned long long)view->ticket,
                         "operation", cd_kind_name(view->kind), "text", cd_record_name(view, name, sizeof name), "sequence",
                         (unsigned long long)view->sequence, "dtype",
                         view->kind == CD_BARRIER ? "" : cd_dtype_name(view->dtype), "reduction",
                         reduces ? cd_redop_name(view->redop) : NULL, "bytes", (unsigned long long)view->bytes, "group",
                         (unsigned long long)view->group, "peer", view->peer, "state", cd_record_state_name(view->state),
                         "queued", (double)view->queued_ns / 1e9, "started", (double)view->started_ns / 1e9, "done",
                         (double)view->done_ns / 1e9);
}

/* _records(group, rank, most): a dict about a rank of this host, or None. */
static PyObject *records(PyObject *module, PyObject *args)
{
    PyObject *object;
    int rank, most = (int)CD_RECORD_RING;
    if (!PyArg_ParseTuple(args, "Oi|i", &object, &rank, &most))
        return NULL;
    cd_py_group *group = group_of(module, object);
    if (!group)
        return NULL;
    cd_record_view views[CD_RECORD_RING];
    char site[8 * CD_RECORD_SITE_WORDS];
    uint32_t process = 0;
    const cd_world *world = cd_group_world(group->group);
    int room = most < (int)CD_RECORD_RING ? most : (int)CD_RECORD_RING;
    int count = cd_world_records(world, rank, views, room > 0 ? room : 0, &process);
    if (count < 0)
        Py_RETURN_NONE;
    PyObject *list = PyList_New(count);
    for (int i = 0; list && i < count; i++) {
        PyObject *entry = entry_of(&views[i]);
        if (!entry)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, i, entry);
    }
    return list ? Py_BuildValue("{s:i,s:I,s:s,s:N}", "rank", rank, "pid", process, "site", cd_world_site(world, rank, site),
                                "operations", list)
                : NULL;
}

/* _gone(group): for each rank of the world whether it left or is lost. */
static PyObject *gone(PyObject *module, PyObject *object)
{
    cd_py_group *group = group_of(module, object);
    if (!group)
        return NULL;
    cd_world *world = cd_group_world(group->group);
    int size = cd_group_size(cd_world_group(world));
    PyObject *list = PyList_New(size);
    for (int r = 0; list && r < size; r++)
        PyList_SET_ITEM(list, r, PyBool_FromLong(cd_world_is_gone(world, r)));
    return list;
}

/* _is_stopped(group, rank): whether its process is seen from here and is stopped. */
static PyObject *is_stopped(PyObject *module, PyObject *args)
{
    PyObject *object;
    int rank;
    if (!PyArg_ParseTuple(args, "Oi", &object, &rank))
        return NULL;
    cd_py_group *group = group_of(module, object);
    return group ? PyBool_FromLong(cd_world_is_stopped(cd_group_world(group->group), rank)) : NULL;
}

/* _describe_rank(group, rank): what is known of a rank, as a sentence. */
static PyObject *describe(PyObject *module, PyObject *args)
{
    PyObject *object;
    int rank;
    char text[512] = "";
    if (!PyArg_ParseTuple(args, "Oi", &object, &rank))
        return NULL;
    cd_py_group *group = group_of(module, object);
    if (!group)
        return NULL;
    cd_world *world = cd_group_world(group->group);
    if (rank >= 0 && rank < cd_group_size(cd_world_group(world)))
        cd_world_describe(world, rank, text, sizeof text);
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
}

/* _group_info(group): (context, sequence, what broke it or None, hex of the world's random generation). */
static PyObject *group_info(PyObject *module, PyObject *object)
{
    cd_py_group *group = group_of(module, object);
    if (!group)
        return NULL;
    cd_status status = cd_group_status(group->group);
    char generation[33];
    cd_world_generation(cd_group_world(group->group), generation);
    return Py_BuildValue("KKzs", (unsigned long long)cd_group_context(group->group),
                         (unsigned long long)cd_group_sequence(group->group), status == CD_OK ? NULL : cd_last_error()->text,
                         generation);
}

/* _note_site(group): for the others of this host. */
static PyObject *note_site(PyObject *module, PyObject *object)
{
    cd_py_group *group = group_of(module, object);
    if (!group)
        return NULL;
    cd_py_note_site(cd_group_world(group->group));
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"_records", records, METH_VARARGS,
     "_records(group, rank, most=256)\n--\n\nLast operations of a rank of this host, or None."},
    {"_gone", gone, METH_O, "_gone(group)\n--\n\nFor each rank of the world whether it left or is lost."},
    {"_is_stopped", is_stopped, METH_VARARGS,
     "_is_stopped(group, rank)\n--\n\nWhether its process is seen from here and is stopped."},
    {"_describe_rank", describe, METH_VARARGS, "_describe_rank(group, rank)\n--\n\nWhat is known of a rank, as a sentence."},
    {"_group_info", group_info, METH_O, "_group_info(group)\n--\n\n(context, sequence, what broke it or None, generation)."},
    {"_note_site", note_site, METH_O, "_note_site(group)\n--\n\nTells the others of this host where this rank is."},
    {NULL, NULL, 0, NULL},
};

int cd_py_recorder_add(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
