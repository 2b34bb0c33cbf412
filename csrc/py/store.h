/* Python's view of the stores: Store, TCPStore, FileStore, HashStore, PrefixStore. */
#ifndef CD_PY_STORE_H
#define CD_PY_STORE_H

#include "py/state.h"

#include "store/store.h"

int cd_py_store_add(PyObject *module);

/* The C store behind any store object: one of ours, or an adapter that calls the methods of a Python subclass of Store, of a
 * torch.distributed.Store or of whatever has set, get, add and wait. A new reference: cd_store_release, with or without the
 * GIL. 0, or −1 with TypeError. */
int cd_py_store_get(cd_py_state *state, PyObject *object, cd_store **out);

/* The adapter alone (store_adapter.c). Retains the object. */
int cd_py_store_adapt(PyObject *object, cd_store **out);

#endif
