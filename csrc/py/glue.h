/* How a call from Python waits: timeouts, the GIL, Ctrl-C.
 *
 *     uint64_t ns;
 *     if (cd_py_timeout_ns(timeout_argument, default_ns, &ns) < 0)
 *         return NULL;
 *     cd_py_wait wait;
 *     cd_patience patience = cd_py_wait_begin(&wait, cd_py_deadline(ns), ranks);
 *     cd_py_wait_detach(&wait);           // only where the call is expected to take long
 *     cd_status status = cd_…(…, &patience);
 *     cd_py_wait_end(&wait);              // the GIL is held again
 *     if (status != CD_OK)
 *         return cd_py_raise(state, status);
 *
 * The GIL is kept at first: a call that needs a few µs is over before giving it up would pay. The first idle turn of the wait
 * drops it; from then on the main thread takes it back at each idle turn (50 ms) to run signal handlers. An exception from a
 * handler ends the wait with CD_INTERRUPTED. */
#ifndef CD_PY_GLUE_H
#define CD_PY_GLUE_H

#include "py/state.h"

#include "base/wait.h"

struct cd_world;
typedef struct {
    struct cd_world *world;  /* where this rank waits is noted there for the others; may be NULL */
    PyThreadState *detached; /* the thread's state while the GIL is dropped */
    int8_t is_main;          /* 1: may run signal handlers; 0: not known before the first idle turn; −1: may not */
} cd_py_wait;

/* Seconds (int or float), a timedelta, or None → nanoseconds. None gives default_ns; inf gives UINT64_MAX (never); 0 is 0
 * (poll once). 0, or −1 with ValueError (negative, NaN) or TypeError. */
int cd_py_timeout_ns(PyObject *timeout, uint64_t default_ns, uint64_t *ns_p);
/* The deadline for it, from now. */
cd_deadline cd_py_deadline(uint64_t ns);

/* Fills *wait; the patience points to it. `ranks`: how many ranks share this host's cores (1 where no peer computes). */
cd_patience cd_py_wait_begin(cd_py_wait *wait, cd_deadline deadline, int ranks);
/* The idle callback, for patience that is built by hand: ctx is the cd_py_wait. */
cd_status cd_py_wait_idle(void *wait);
/* Drops the GIL now. After it no Python object may be touched until the end. */
void cd_py_wait_detach(cd_py_wait *wait);
/* Takes the GIL back if it was dropped. Must follow every begin. */
void cd_py_wait_end(cd_py_wait *wait);

#endif
