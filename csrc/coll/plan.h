/* Which algorithm runs an operation: a table, first row that fits wins. Override for tests and tuning:
 *   CDIST_PLAN="all_reduce:0-64K:shm_small;all_reduce:64K-:shm_stage"     CDIST_LOG=plan prints each first choice. */
#ifndef CD_COLL_PLAN_H
#define CD_COLL_PLAN_H

#include "coll/team.h"

enum {
    CD_NEEDS_SHM = 1,   /* all ranks on this host */
    CD_NEEDS_ARENA = 2, /* in and out lie in the shared arena on every rank: announced by the op's row */
    CD_NEEDS_MESH = 4,
};

typedef struct {
    cd_kind kind;
    size_t bytes_below; /* of the largest buffer of the operation; SIZE_MAX: any */
    int ranks_below;    /* INT_MAX: any */
    unsigned needs;
    const char *name;
    cd_coll_func run;
} cd_plan_row;

/* The row for this operation; never NULL for a legal op (there is an algorithm for every kind over shm and over the mesh).
 * Rows depend only on what all ranks know alike. */
const cd_plan_row *cd_plan_find(const cd_team *team, const cd_op *op);
/* Whether CDIST_PLAN can be read: CD_BAD_ARGUMENT names the part that cannot. For whoever opens a CPU backend, so that a bad
 * setting is refused before the first operation; cd_plan_find takes the table alone when the setting is bad. */
cd_status cd_plan_check(void);
/* The bytes that the table compares: of the largest buffer of the operation on any rank; SIZE_MAX for CD_OP_UNEVEN, where only
 * rows without limit fit. */
size_t cd_plan_bytes(const cd_team *team, const cd_op *op);
/* The whole table in order, for docs, tests (thresholds ± 1) and the benchmark. */
const cd_plan_row *cd_plan_rows(size_t *count_p);

#endif
