/* Between the files of Python's stores: store.c makes the types, store_methods.c has the methods that all of them share. */
#ifndef CD_PY_STORE_IMPL_H
#define CD_PY_STORE_IMPL_H

#include "py/store.h"

typedef struct cd_py_server cd_py_server;

typedef struct {
    PyObject_HEAD
    cd_store *store;      /* NULL: a subclass in Python that brings its own methods */
    cd_py_server *server; /* TCPStore that hosts */
    PyObject *module;     /* beside it: a type that the garbage collector takes too no longer knows its module */
    PyObject *under;      /* PrefixStore: the object it was given */
    PyObject *host, *path;
    int port;
    char use_libuv;
} cd_py_store;

/* The C store of the object, or NULL with NotImplementedError. */
cd_store *cd_py_store_of(PyObject *self);

extern PyMethodDef cd_py_store_methods[];
extern PyGetSetDef cd_py_store_getset[];

#endif
