/* The table of settings, for `python -m cdist.settings`, the README and its test. */
#include "py/settings.h"

#include "base/knob.h"

static PyObject *settings(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    size_t count;
    const cd_knob_row *rows = cd_knob_rows(&count);
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list && i < count; i++) {
        PyObject *row = Py_BuildValue("(sss)", rows[i].name, rows[i].fallback, rows[i].help);
        if (!row) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, (Py_ssize_t)i, row);
    }
    return list;
}

static PyMethodDef functions[] = {
    {"settings", settings, METH_NOARGS, "settings()\n--\n\nRows (name, default, meaning) of all settings."},
    {NULL, NULL, 0, NULL},
};

int cd_py_settings_add(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
