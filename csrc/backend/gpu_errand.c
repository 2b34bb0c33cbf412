/* Calls that wait for other ranks inside NCCL, where no wait of ours can look at deadline, cause and signals. */
#include "backend/gpu_impl.h"

#include <signal.h>
#include <stdlib.h>

struct cd_gpu_errand_state {
    cd_status (*body)(void *arg);
    void *arg;
    cd_status status;
    cd_error error;
    _Atomic uint64_t done;
    _Atomic uint32_t refs; /* the thread's and the caller's */
    cd_bell bell;
    pthread_t thread;
};
typedef struct cd_gpu_errand_state errand;

static void unref(errand *e)
{
    /* Acquire and release: who frees it does so after the other's last use. */
    if (atomic_fetch_sub_explicit(&e->refs, 1, memory_order_acq_rel) == 1)
        free(e);
}

static void *errand_main(void *arg)
{
    errand *e = arg;
    e->status = e->body(e->arg);
    if (e->status != CD_OK)
        e->error = *cd_last_error();
    /* Release: who sees it done sees how it went. */
    atomic_store_explicit(&e->done, 1, memory_order_release);
    cd_bell_ring(&e->bell);
    unref(e);
    return 0;
}

cd_status cd_gpu_errand_begin(cd_status (*body)(void *arg), void *arg, cd_gpu_errand_state **out)
{
    sigset_t all, before;
    errand *e = calloc(1, sizeof *e);
    if (!e)
        return cd_fail(CD_NO_MEMORY, "no memory for a call into NCCL");
    *e = (errand){.body = body, .arg = arg, .refs = 2};
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&e->thread, 0, errand_main, e);
    pthread_sigmask(SIG_SETMASK, &before, 0);
    if (error) {
        free(e);
        return cd_fail_errno(CD_NO_MEMORY, error, "a thread for a call into NCCL cannot be started");
    }
    *out = e;
    return CD_OK;
}

cd_status cd_gpu_errand_end(cd_gpu_errand_state *e, void (*stop)(void *arg), const cd_patience *patience)
{
    cd_patience own = *patience;
    own.bell = &e->bell;
    own.spin = own.yields = 0;
    cd_status status = cd_wait_at_least(&e->done, 1, -1, &own);
    cd_error why = *cd_last_error();
    if (status != CD_OK && stop)
        stop(e->arg);
    if (status != CD_OK && !stop)
        pthread_detach(e->thread);
    else
        pthread_join(e->thread, 0);
    if (status == CD_OK && (status = e->status) != CD_OK)
        why = e->error;
    unref(e);
    return status == CD_OK ? CD_OK : cd_fail_with(&why);
}

cd_status cd_gpu_errand(cd_status (*body)(void *arg), void (*stop)(void *arg), void *arg, const cd_patience *patience)
{
    errand *e;
    CD_TRY(cd_gpu_errand_begin(body, arg, &e));
    return cd_gpu_errand_end(e, stop, patience);
}
