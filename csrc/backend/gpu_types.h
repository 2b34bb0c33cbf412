/* How an operation's element type and reduction are said in NCCL's terms. */
#ifndef CD_BACKEND_GPU_TYPES_H
#define CD_BACKEND_GPU_TYPES_H

#include "base/op.h"
#include "cuda/nccl.h"

typedef struct {
    cd_nccl_type type;
    cd_nccl_redop redop;
    size_t per_item; /* NCCL elements in one element: the bytes of what is only moved, 2 for complex numbers */
} cd_gpu_type;

/* `nccl_version` 0: any. CD_UNSUPPORTED says which rule forbids it. Moves (kinds that reduce nothing) are bytes of any type.
 * PREMUL_SUM leaves redop to cd_gpu_premul. */
cd_status cd_gpu_type_of(cd_kind kind, cd_redop redop, cd_dtype dtype, uint32_t item_bytes, int nccl_version,
                         cd_gpu_type *out);
/* The factor in the element type's own bits (at most 8 bytes). */
void cd_gpu_scalar(cd_nccl_type type, double factor, void *out);

#endif
