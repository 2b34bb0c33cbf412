#include "py/glue.h"

#include "py/recorder.h"

#include <math.h>
#include <sys/syscall.h>
#include <unistd.h>

static int ns_of_seconds(PyObject *timeout, double seconds, uint64_t *ns_p)
{
    if (isnan(seconds) || seconds < 0) {
        PyErr_Format(PyExc_ValueError, "timeout must be a non-negative number of seconds or a timedelta, not %R", timeout);
        return -1;
    }
    /* Beyond 2^63 ns (292 years) is never. */
    *ns_p = seconds >= 9.2e9 ? UINT64_MAX : (uint64_t)(seconds * 1e9);
    return 0;
}

int cd_py_timeout_ns(PyObject *timeout, uint64_t default_ns, uint64_t *ns_p)
{
    if (!timeout || timeout == Py_None) {
        *ns_p = default_ns;
        return 0;
    }
    bool is_number = PyFloat_Check(timeout) || PyLong_Check(timeout) || !PyObject_HasAttrString(timeout, "total_seconds");
    PyObject *number = is_number ? Py_NewRef(timeout) : PyObject_CallMethod(timeout, "total_seconds", NULL);
    if (!number)
        return -1;
    double seconds = PyFloat_AsDouble(number); /* NumPy's numbers too, but no text */
    Py_DECREF(number);
    if (seconds == -1.0 && PyErr_Occurred()) {
        if (is_number && PyErr_ExceptionMatches(PyExc_TypeError))
            PyErr_Format(PyExc_TypeError, "timeout must be a timedelta or a number of seconds, not %s",
                         Py_TYPE(timeout)->tp_name);
        return -1;
    }
    return ns_of_seconds(timeout, seconds, ns_p);
}

cd_deadline cd_py_deadline(uint64_t ns)
{
    return ns == 0 ? (cd_deadline){0} : cd_deadline_after_ns(ns);
}

cd_patience cd_py_wait_begin(cd_py_wait *wait, cd_deadline deadline, int ranks)
{
    *wait = (cd_py_wait){0};
    cd_patience patience = cd_patience_until(deadline, ranks);
    patience.idle = cd_py_wait_idle;
    patience.idle_ctx = wait;
    return patience;
}

void cd_py_wait_detach(cd_py_wait *wait)
{
    wait->detached = PyEval_SaveThread();
}

cd_status cd_py_wait_idle(void *ctx)
{
    cd_py_wait *wait = ctx;
    if (!wait->detached) {
        cd_py_wait_detach(wait);
        return CD_OK;
    }
    /* Python runs handlers in the thread whose id is the process id, also after a fork in another thread. */
    if (wait->is_main == 0)
        wait->is_main = (pid_t)syscall(SYS_gettid) == getpid() ? 1 : -1;
    if (wait->is_main < 0)
        return CD_OK;
    PyEval_RestoreThread(wait->detached);
    wait->detached = NULL;
    if (wait->world)
        cd_py_note_site(wait->world);
    wait->world = NULL;
    if (PyErr_CheckSignals() < 0) {
        wait->is_main = -1; /* should the wait go on: with that exception under way no further handler may run */
        return cd_fail(CD_INTERRUPTED, "interrupted by a signal"); /* recorded: callers keep and restore the last error */
    }
    wait->detached = PyEval_SaveThread();
    return CD_OK;
}

void cd_py_wait_end(cd_py_wait *wait)
{
    if (wait->detached)
        PyEval_RestoreThread(wait->detached);
    wait->detached = NULL;
}
