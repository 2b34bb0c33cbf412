/* The table of settings, for `python -m cdist.settings`, the README and its test; the check of values. */
#include "py/settings.h"

#include "base/knob.h"
#include "coll/plan.h"
#include "net/sock.h"
#include "py/errors.h"

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

static cd_status check(void)
{
    unsigned first, last;
    CD_TRY(cd_knob_check());
    CD_TRY(cd_sock_port_range(&first, &last));
    return cd_plan_check();
}

static PyObject *check_settings(PyObject *module, PyObject *unused)
{
    (void)unused;
    cd_status status = check();
    return status == CD_OK ? Py_NewRef(Py_None) : cd_py_raise(cd_py_state_of(module), status);
}

static PyObject *report_unknown_settings(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    cd_knob_report_unknown();
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"_check_settings", check_settings, METH_NOARGS,
     "_check_settings()\n--\n\nValueError for a setting with a value that it may not have."},
    {"_report_unknown_settings", report_unknown_settings, METH_NOARGS,
     "_report_unknown_settings()\n--\n\nLogs a warning of CDIST_ variables that are no setting, once."},
    {"settings", settings, METH_NOARGS, "settings()\n--\n\nRows (name, default, meaning) of all settings."},
    {NULL, NULL, 0, NULL},
};

int cd_py_settings_add(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
