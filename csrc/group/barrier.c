/* The monitored barrier: rank 0 of the group hears from everyone and tells everyone the verdict, so that all pass or all fail
 * and all know who was missing. 2 (n − 1) small messages; not for the hot path. */
#include "group/group_impl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* How much longer than rank 0 the others wait for its verdict. */
#define VERDICT_GRACE_NS (2 * CD_NS_PER_S)

typedef struct {
    cd_group *group;
    cd_match match;
    cd_xfer *xfers; /* [size] */
    uint8_t *arrived, *missing; /* [size] */
    uint64_t limit_ns;          /* how long the caller is willing to wait */
    cd_error lost;              /* code CD_OK: nobody died or left */
} roll_call;

static cd_patience patience_of(const cd_group *g, const cd_patience *patience)
{
    cd_patience own = *patience;
    own.cause = g->cause;
    own.gone = g->world->gone;
    return own;
}

static cd_status hear_roll_call(roll_call *call, bool wait_all, const cd_patience *patience)
{
    cd_group *g = call->group;
    cd_mesh *mesh = g->world->mesh;
    cd_patience own = patience_of(g, patience);
    for (int r = 1; r < g->size; r++)
        cd_mesh_recv(mesh, &call->xfers[r], g->world_ranks[r], call->match, 0, &call->arrived[r], 1, false, false);
    bool late = false;
    cd_status status = CD_OK;
    for (int r = 1; r < g->size && status != CD_INTERRUPTED; r++) {
        cd_xfer *xfer = &call->xfers[r];
        if (late && wait_all)
            own.deadline = (cd_deadline){0}; /* the time is up: only look who has come */
        status = cd_mesh_wait(mesh, &xfer, 1, &own);
        if (status == CD_PEER_LOST && call->lost.code == CD_OK)
            call->lost = *cd_last_error();
        call->missing[r] = status != CD_OK && !(late && !wait_all);
        late = late || status != CD_OK;
    }
    cd_error why = *cd_last_error();
    for (int r = 1; r < g->size; r++) {
        cd_mesh_cancel(mesh, &call->xfers[r]);
        cd_xfer_clear(&call->xfers[r]);
    }
    if (status == CD_INTERRUPTED)
        return cd_fail_with(&why);
    return CD_OK;
}

static void tell_verdict(roll_call *call)
{
    cd_group *g = call->group;
    for (int r = 1; r < g->size; r++) {
        cd_xfer xfer = {0};
        /* Eager: complete, or failed, on return. */
        cd_mesh_send(g->world->mesh, &xfer, g->world_ranks[r], call->match, 0, call->missing, (size_t)g->size, false);
        cd_mesh_cancel(g->world->mesh, &xfer);
        cd_xfer_clear(&xfer);
    }
}

static cd_status answer_roll_call(roll_call *call, const cd_patience *patience)
{
    cd_group *g = call->group;
    cd_patience own = patience_of(g, patience);
    if (own.deadline.at_ns < UINT64_MAX - VERDICT_GRACE_NS)
        own.deadline.at_ns += VERDICT_GRACE_NS;
    uint8_t here = 1;
    cd_xfer *send = &call->xfers[0], *verdict = &call->xfers[1];
    cd_mesh_send(g->world->mesh, send, g->world_ranks[0], call->match, 0, &here, 1, false);
    cd_mesh_recv(g->world->mesh, verdict, g->world_ranks[0], call->match, 0, call->missing, (size_t)g->size, false, false);
    cd_status status = cd_mesh_wait(g->world->mesh, &verdict, 1, &own);
    cd_error why = *cd_last_error();
    for (int i = 0; i < 2; i++) {
        cd_mesh_cancel(g->world->mesh, &call->xfers[i]);
        cd_xfer_clear(&call->xfers[i]);
    }
    if (status == CD_TIMED_OUT) {
        call->missing[0] = 1;
        return CD_OK;
    }
    return status == CD_OK ? CD_OK : cd_fail_with(&why);
}

static cd_status judge(roll_call *call, uint8_t *missing)
{
    cd_group *g = call->group;
    char list[256] = "";
    size_t used = 0;
    int count = 0, first = -1;
    for (int r = 0; r < g->size; r++) {
        if (!call->missing[r])
            continue;
        if (missing)
            missing[g->world_ranks[r]] = 1;
        first = first < 0 ? (int)g->world_ranks[r] : first;
        if (used < sizeof list - 16)
            used += (size_t)snprintf(list + used, sizeof list - used, "%s%d", count ? ", " : "", (int)g->world_ranks[r]);
        count++;
    }
    if (!count)
        return CD_OK;
    if (g->rank == 0)
        return cd_fail_rank(CD_WAIT_EXPIRED, first, "[Rank %d]: Rank%s %s failed to pass monitoredBarrier in %llu ms",
                            g->world->rank, count > 1 ? "s" : "", list,
                            (unsigned long long)((call->limit_ns + CD_NS_PER_MS / 2) / CD_NS_PER_MS));
    return cd_fail_rank(CD_WAIT_EXPIRED, first,
                        "Rank %d successfully reached monitoredBarrier, but received errors while waiting for send/recv from "
                        "rank %d. Please check rank %d logs for faulty rank: missing rank%s %s",
                        g->world->rank, (int)g->world_ranks[0], (int)g->world_ranks[0], count > 1 ? "s" : "", list);
}

cd_status cd_group_monitored_barrier(cd_group *g, bool wait_all, const cd_patience *patience, uint8_t *missing)
{
    CD_TRY(cd_group_refuse(g));
    if (g->size == 1)
        return CD_OK;
    size_t size = (size_t)g->size;
    roll_call call = {.group = g, .limit_ns = cd_deadline_left_ns(patience->deadline)};
    call.xfers = calloc(size, sizeof *call.xfers);
    call.arrived = calloc(size, 2);
    cd_status status = call.xfers && call.arrived ? CD_OK : cd_fail(CD_NO_MEMORY, "monitored_barrier: no memory");
    if (status == CD_OK) {
        call.missing = call.arrived + size;
        /* Every call has a tag of its own, so that who comes late to one does not answer the next. */
        call.match = (cd_match){g->context ^ 2, (int64_t)atomic_fetch_add_explicit(&g->roll_calls, 1, memory_order_relaxed)};
        if (g->rank == 0) {
            status = hear_roll_call(&call, wait_all, patience);
            /* Of a loss all learn by the group's cause. */
            if (status == CD_OK && call.lost.code == CD_OK)
                tell_verdict(&call);
        } else {
            status = answer_roll_call(&call, patience);
        }
    }
    if (status == CD_OK && call.lost.code != CD_OK) {
        status = cd_fail_with(&call.lost);
        if (missing)
            missing[call.lost.rank] = 1;
    } else if (status == CD_OK) {
        status = judge(&call, missing);
    }
    /* Who died or left ends the group, here as in any other call. */
    if (status == CD_PEER_LOST || status == CD_ABORTED) {
        const cd_op op = {.kind = CD_BARRIER, .dtype = CD_BYTES, .root = -1, .sequence = g->sequence};
        status = cd_group_settle(g, &op, status);
    }
    free(call.xfers);
    free(call.arrived);
    return status;
}
