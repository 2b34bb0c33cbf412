/* ProcessGroup: the shell around cd_group. python/cdist/process_group.py derives the public class from it. */
#ifndef CD_PY_GROUP_H
#define CD_PY_GROUP_H

#include "py/state.h"

#include "group/group.h"

typedef struct {
    PyObject_HEAD
    PyObject *dict, *weak;
    cd_group *group;   /* NULL after the world was released */
    cd_world *world;   /* owned by the default group alone: NULL in the others */
    PyObject *ranks;   /* tuple: world rank of each group rank */
    int rank, size, world_rank;
    bool serves[2];    /* by cd_device: whether a backend was named for arrays there */
    bool cause_raised; /* an exception has told the user what ended the group */
    uint32_t spin, yields; /* of patience, worked out once */
} cd_py_group;

int cd_py_group_add(PyObject *module);

/* The group that a `group` argument means (None or NULL: the default one; a host side: that behind it). 1 and a new reference in
 * *out; 0 when it is GroupMember.NON_GROUP_MEMBER: the warning was given, the caller returns None; −1 with ValueError (no default
 * group) or TypeError. */
int cd_py_group_get(cd_py_state *state, PyObject *object, const char *function, cd_py_group **out);
/* Group rank of a peer that is given as world rank (`global`) or as group rank (`local`); `fallback`: world rank meant when
 * neither is given, −1 if that is an error. Names are for texts ("src", "group_src"). 0, or −1 with ValueError/TypeError. */
int cd_py_group_peer(const cd_py_group *group, const char *function, PyObject *global, PyObject *local, int fallback,
                     int *rank_p);

#endif
