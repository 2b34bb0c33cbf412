/* Runs operations on the CPU: the algorithm that the plan picks. */
#include "backend/backend.h"
#include "coll/plan.h"

#include <stdlib.h>

typedef struct {
    cd_backend base;
    cd_team *team;
} cpu;

/* Up to here all ranks are through within about 10 µs of the last arrival (copies at 10 GB/s and more). */
#define QUICK_BYTES 65536

static cd_status cpu_supports(cd_kind kind, cd_redop redop, cd_dtype dtype)
{
    bool reduces = kind == CD_ALL_REDUCE || kind == CD_REDUCE || kind == CD_REDUCE_SCATTER;
    if (reduces && !cd_redop_supports(redop, dtype))
        return cd_fail(CD_UNSUPPORTED, "%s: ReduceOp.%s is not defined for %s", cd_kind_name(kind), cd_redop_name(redop),
                       cd_dtype_name(dtype));
    return CD_OK;
}

static bool cpu_is_quick(cd_backend *backend, const cd_op *op)
{
    cpu *self = (cpu *)backend;
    return self->team->shm && cd_plan_bytes(self->team, op) <= QUICK_BYTES;
}

static cd_status cpu_run(cd_backend *backend, const cd_op *op, const cd_patience *patience)
{
    cpu *self = (cpu *)backend;
    const cd_plan_row *row = cd_plan_find(self->team, op);
    if (cd_unlikely(!row))
        return cd_fail(CD_BAD_ARGUMENT, "CDIST_PLAN: no algorithm fits %s", cd_kind_name(op->kind));
    return row->run(self->team, op, patience);
}

static void cpu_abort(cd_backend *backend)
{
    (void)backend; /* every wait looks at the group's cause */
}

static void cpu_free(cd_backend *backend)
{
    free(backend);
}

static const cd_backend_ops ops = {.name = "cpu", .device = CD_CPU, .supports = cpu_supports, .is_quick = cpu_is_quick,
                                   .run = cpu_run, .abort = cpu_abort, .free = cpu_free};

cd_status cd_backend_open_cpu(const cd_backend_env *env, cd_backend **out)
{
    CD_TRY(cd_plan_check());
    cpu *self = malloc(sizeof *self);
    if (!self)
        return cd_fail(CD_NO_MEMORY, "no memory for a backend");
    *self = (cpu){.base = {&ops}, .team = env->team};
    *out = &self->base;
    return CD_OK;
}
