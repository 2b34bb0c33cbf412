/* Calls that wait for other ranks inside NCCL, where no wait of ours can look at deadline, cause and signals. */
#include "backend/gpu_impl.h"

#include <signal.h>

typedef struct {
    cd_status (*body)(void *arg);
    void *arg;
    cd_status status;
    cd_error error;
    _Atomic uint64_t done;
    cd_bell bell;
} errand;

static void *errand_main(void *arg)
{
    errand *e = arg;
    e->status = e->body(e->arg);
    if (e->status != CD_OK)
        e->error = *cd_last_error();
    /* Release: who sees it done sees how it went. */
    atomic_store_explicit(&e->done, 1, memory_order_release);
    cd_bell_ring(&e->bell);
    return 0;
}

static cd_status start(errand *e, pthread_t *out)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(out, 0, errand_main, e);
    pthread_sigmask(SIG_SETMASK, &before, 0);
    return error ? cd_fail_errno(CD_NO_MEMORY, error, "a thread for a call into NCCL cannot be started") : CD_OK;
}

cd_status cd_gpu_errand(cd_status (*body)(void *arg), void (*stop)(void *arg), void *arg, const cd_patience *patience)
{
    errand e = {.body = body, .arg = arg};
    pthread_t thread;
    CD_TRY(start(&e, &thread));
    cd_patience own = *patience;
    own.bell = &e.bell;
    own.spin = own.yields = 0;
    cd_status status = cd_wait_at_least(&e.done, 1, -1, &own);
    cd_error why = {.code = CD_OK};
    if (status != CD_OK) {
        why = *cd_last_error();
        stop(arg);
    }
    pthread_join(thread, 0);
    if (status != CD_OK)
        return cd_fail_with(&why);
    return e.status == CD_OK ? CD_OK : cd_fail_with(&e.error);
}
