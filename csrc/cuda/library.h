/* Finds a shared library at run time and remembers every place that was tried, so that its absence can be explained. */
#ifndef CD_CUDA_LIBRARY_H
#define CD_CUDA_LIBRARY_H

#include "base/status.h"

typedef struct {
    void *handle;    /* of dlopen; NULL: not open */
    char tried[640]; /* "name (why not), name (why not)" */
} cd_library;

/* What to look for. `folder` is relative to a Python site folder ("nvidia/nccl/lib"); NULL: wheels do not carry it. */
typedef struct {
    const char *title;   /* for texts: "NCCL" */
    const char *setting; /* the knob that names a path; set, it is the only place that is tried */
    const char *const *names;
    int name_count;
    const char *folder;
} cd_library_wish;

/* Opens the library: the path in the setting; otherwise the one that this process has already loaded, then below each Python
 * site folder from which this process has loaded anything (NumPy is in one), then the system's search path.
 * CD_UNSUPPORTED with all places tried. Blocks for the disk only. */
cd_status cd_library_open(cd_library *library, const cd_library_wish *wish);
/* Address of a symbol, NULL if absent. */
void *cd_library_find(const cd_library *library, const char *symbol);
/* The file that was opened, for texts; valid until close. */
const char *cd_library_path(const cd_library *library);
/* Takes one that was never opened. */
void cd_library_close(cd_library *library);

#endif
