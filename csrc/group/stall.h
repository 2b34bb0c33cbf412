/* Who is late: what a wait that takes too long says about the other ranks. Private to group/. */
#ifndef CD_GROUP_STALL_H
#define CD_GROUP_STALL_H

#include "group/group_impl.h"

/* One wait: wraps the caller's idle callback, so that it costs nothing before the first idle turn. */
typedef struct {
    cd_group *group;
    const cd_op *op;
    int peer; /* −1: a collective; otherwise a message: world rank of the other side, −2 for any */
    cd_idle_func idle;
    void *ctx;
    cd_deadline deadline;
    uint64_t started_ns; /* of the first idle turn; 0: it never came so far */
    bool told, warned;
} cd_watch;

/* Puts the watch between patience and its idle callback. Undo with end before the watch's memory goes. */
void cd_watch_begin(cd_watch *watch, cd_group *group, const cd_op *op, int peer, cd_patience *patience);
void cd_watch_end(const cd_watch *watch, cd_patience *patience);

/* "waited 2.0 s; arrived ranks: [0, 1]; missing ranks: [2]; rank 2 last finished barrier 5 0.8 s ago"; returns out. What is
 * known of ranks on other hosts is what they told after a second of waiting. `suspect`: world rank waited for, −1. */
const char *cd_watch_describe(const cd_watch *watch, int suspect, char *out, size_t bytes);
/* A message that does not come: who is at the end of the chain of ranks that each wait for the next one. The chain as text
 * in out ("" when the other side waits for nobody). A chain that ends here is a cycle, and the direct peer is the answer. */
int cd_watch_find_cause(const cd_watch *watch, char *out, size_t bytes);
/* The same with what is known of that rank: "rank 2 itself waits for rank 1; rank 1 last finished …". `suspect`: the rank if
 * the other side may be any. */
int cd_watch_blame(const cd_watch *watch, int suspect, char *out, size_t bytes);
/* A collective that does not end: the stopped process, else who did not arrive, else `suspect`. World ranks, −1 if none. */
int cd_watch_first_missing(const cd_watch *watch, int suspect);
/* The page of a rank of this host (its own included), or NULL. */
cd_record_page *cd_world_page(const cd_world *world, int rank);

#endif
