/* NCCL, opened at run time. */
#ifndef CD_CUDA_NCCL_H
#define CD_CUDA_NCCL_H

#include "base/status.h"
#include "cuda/library.h"
#include "cuda/nccl_abi.h"

typedef struct {
    cd_library library;
    int version; /* 22807 = 2.28.7 */
#define CD_FIELD(field, symbol, parameters) cd_nccl_result(*field) parameters;
    CD_NCCL_FUNCTIONS(CD_FIELD)
    CD_NCCL_OPTIONAL(CD_FIELD)
#undef CD_FIELD
#define CD_FIELD(field, symbol, parameters) const char *(*field)parameters;
    CD_NCCL_TEXTS(CD_FIELD)
#undef CD_FIELD
} cd_nccl;

/* CD_UNSUPPORTED with what was looked for and where, or that the library is older than 2.18. */
cd_status cd_nccl_open(cd_nccl *nccl);
void cd_nccl_close(cd_nccl *nccl);
/* A config that asks for calls that return when all is done: in the other mode NCCL starts a thread for each call (60 µs).
 * Before 2.22, where ncclCommAbort cannot be split in raising the flag and freeing, that other mode. */
cd_nccl_config cd_nccl_config_make(const cd_nccl *nccl);
/* Records CD_GPU, or CD_PEER_LOST for an error that NCCL ascribes to a peer: "what: NCCL's words". comm may be NULL. */
cd_status cd_nccl_fail(const cd_nccl *nccl, cd_nccl_comm comm, cd_nccl_result result, const char *what) CD_COLD;

#endif
