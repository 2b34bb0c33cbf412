/* One error mechanism: a status code, and a text that the first detector writes. */
#ifndef CD_BASE_STATUS_H
#define CD_BASE_STATUS_H

#include "base/attr.h"

#include <stdarg.h>
#include <stdbool.h>

/* Codes are grouped by the largest thing that is lost: this call, this group, this connection. */
typedef enum {
    CD_OK = 0,
    /* This call: the group is as before. */
    CD_BAD_ARGUMENT,  /* ValueError */
    CD_BAD_TYPE,      /* TypeError */
    CD_UNSUPPORTED,   /* TypeError: this (operation, dtype, device) is not offered */
    CD_NO_MEMORY,     /* MemoryError */
    CD_NOT_FOUND,     /* KeyError, QueueEmptyError */
    CD_WAIT_EXPIRED,  /* DistTimeoutError: what was waited for goes on */
    CD_STORE_TIMEOUT, /* DistStoreError and DistTimeoutError: a key did not come in time */
    CD_STORE,         /* DistStoreError: the store refused, is closed or is lost */
    CD_INTERRUPTED,   /* a Python exception (Ctrl-C) is set by the idle callback; passed on as it is */
    CD_NESTED,        /* DistError: it would wait for an operation that its own thread is in the middle of */
    /* The group: sticky, the same cause for all later calls. */
    CD_GROUP_FIRST = 32,
    CD_TIMED_OUT = CD_GROUP_FIRST, /* DistTimeoutError: the deadline of an operation passed */
    CD_PEER_LOST,                  /* PeerLostError */
    CD_ABORTED,                    /* AbortedError */
    CD_MISMATCH,                   /* MismatchError */
    CD_IO,                         /* DistNetworkError: a socket failed in the middle of an operation */
    CD_GPU,                        /* DistBackendError: CUDA or NCCL failed */
    /* One connection, before any group existed. */
    CD_REFUSED = 64, /* RefusedError: authentication, version, duplicate rank, other world size */
    CD_PROTOCOL,     /* DistNetworkError: the peer does not speak our protocol */
    CD_NETWORK       /* DistNetworkError: cannot listen, resolve or connect */
} cd_status;

#define CD_ERROR_TEXT_BYTES 1024

/* What went wrong, as a value that can be stored and handed on. `rank` is the peer at fault in the world, −1 if none. */
typedef struct {
    cd_status code;
    int rank;
    char text[CD_ERROR_TEXT_BYTES];
} cd_error;

/* Records the error of the calling thread and returns `code`. Only the function that decides that something is an error
 * calls it, once; everyone above passes the code on. Never blocks, never allocates. Text style: name of the thing first,
 * lower case, exact cause, remedy where there is one. */
cd_status cd_fail(cd_status code, const char *format, ...) CD_PRINTF(2, 3) CD_COLD;
/* The same, and names the world rank at fault. */
cd_status cd_fail_rank(cd_status code, int rank, const char *format, ...) CD_PRINTF(3, 4) CD_COLD;
/* The same from errno: appends ": <strerror> (errno N)", and the limit of this process that it met where that tells. */
cd_status cd_fail_errno(cd_status code, int error, const char *format, ...) CD_PRINTF(3, 4) CD_COLD;
/* Makes a stored error the calling thread's, returns its code. */
cd_status cd_fail_with(const cd_error *error) CD_COLD;
/* Puts words before the text of the calling thread's error ("init_process_group: "), returns its code. */
cd_status cd_fail_prefix(const char *format, ...) CD_PRINTF(1, 2) CD_COLD;
/* The calling thread's last error; valid until its next cd_fail. Meaningful only after a call returned non-OK. */
const cd_error *cd_last_error(void);
/* Stable lower-case word of a code ("peer lost"). */
const char *cd_status_name(cd_status code);

static inline bool cd_status_is_sticky(cd_status code)
{
    return code >= CD_GROUP_FIRST && code < CD_REFUSED;
}

/* Leaves the function with the status of `call` unless it is CD_OK. */
#define CD_TRY(call)                          \
    do {                                      \
        cd_status cd_try_ = (call);           \
        if (cd_unlikely(cd_try_ != CD_OK))    \
            return cd_try_;                   \
    } while (0)

#endif
