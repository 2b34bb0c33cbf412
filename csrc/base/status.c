#include "base/status.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

/* Per thread, like errno: no lock, no allocation, nothing shared. */
static _Thread_local cd_error last_error;

static cd_status record(cd_status code, int rank, const char *format, va_list args)
{
    /* The arguments may point into the old text, so write beside it first. */
    char text[CD_ERROR_TEXT_BYTES];
    vsnprintf(text, sizeof text, format, args);
    memcpy(last_error.text, text, sizeof text);
    last_error.code = code;
    last_error.rank = rank;
    return code;
}

cd_status cd_fail(cd_status code, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    record(code, -1, format, args);
    va_end(args);
    return code;
}

cd_status cd_fail_rank(cd_status code, int rank, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    record(code, rank, format, args);
    va_end(args);
    return code;
}

static void append(const char *format, ...) CD_PRINTF(1, 2);
static void append(const char *format, ...)
{
    size_t used = strlen(last_error.text);
    va_list args;
    va_start(args, format);
    vsnprintf(last_error.text + used, sizeof last_error.text - used, format, args);
    va_end(args);
}

/* The limit of this process that the error is likely to come from, and the remedy. */
static void append_limit(int error)
{
    struct rlimit limit;
    if (error != EMFILE && error != ENOMEM)
        return;
    if (getrlimit(error == EMFILE ? RLIMIT_NOFILE : RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY)
        return;
    if (error == EMFILE)
        append("; this process may open %llu files: ulimit -n raises it", (unsigned long long)limit.rlim_cur);
    else
        append("; the addresses of this process are limited to %llu MiB: ulimit -v unlimited lifts it",
               (unsigned long long)limit.rlim_cur >> 20);
}

cd_status cd_fail_errno(cd_status code, int error, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    record(code, -1, format, args);
    va_end(args);
    char buffer[128];
    /* GNU strerror_r may answer with a static string instead of the buffer. */
    append(": %s (errno %d)", strerror_r(error, buffer, sizeof buffer), error);
    append_limit(error);
    return code;
}

cd_status cd_fail_with(const cd_error *error)
{
    if (error != &last_error)
        last_error = *error;
    return error->code;
}

cd_status cd_fail_prefix(const char *format, ...)
{
    char old[CD_ERROR_TEXT_BYTES];
    memcpy(old, last_error.text, sizeof old);
    va_list args;
    va_start(args, format);
    vsnprintf(last_error.text, sizeof last_error.text, format, args);
    va_end(args);
    append("%s", old);
    return last_error.code;
}

const cd_error *cd_last_error(void)
{
    return &last_error;
}

const char *cd_status_name(cd_status code)
{
    switch (code) {
    case CD_OK: return "ok";
    case CD_BAD_ARGUMENT: return "bad argument";
    case CD_BAD_TYPE: return "bad type";
    case CD_UNSUPPORTED: return "unsupported";
    case CD_NO_MEMORY: return "no memory";
    case CD_NOT_FOUND: return "not found";
    case CD_WAIT_EXPIRED: return "wait expired";
    case CD_STORE_TIMEOUT: return "store timeout";
    case CD_STORE: return "store";
    case CD_INTERRUPTED: return "interrupted";
    case CD_NESTED: return "nested";
    case CD_TIMED_OUT: return "timed out";
    case CD_PEER_LOST: return "peer lost";
    case CD_ABORTED: return "aborted";
    case CD_MISMATCH: return "mismatch";
    case CD_IO: return "i/o";
    case CD_GPU: return "gpu";
    case CD_REFUSED: return "refused";
    case CD_PROTOCOL: return "protocol";
    case CD_NETWORK: return "network";
    }
    return "unknown";
}
