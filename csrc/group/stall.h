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
/* The page of a rank of this host (its own included), or NULL. */
cd_record_page *cd_world_page(const cd_world *world, int rank);

#endif
