/* What the recorder tells Python, and where a Python program waits. */
#ifndef CD_PY_RECORDER_H
#define CD_PY_RECORDER_H

#include "py/state.h"

#include "group/recorder.h"

int cd_py_recorder_add(PyObject *module);

/* Notes file and line of the innermost frame outside of cdist for the other ranks of this host. Needs the GIL; sets no
 * exception. A µs: only for waits that already took long. */
void cd_py_note_site(cd_world *world);
/* Gives cdist.recorder the chance to add what is known to a failure that ends a group, and to write its dump. Needs the GIL;
 * whatever goes wrong there is dropped: the failure itself matters more. */
void cd_py_report(PyObject *error);

#endif
