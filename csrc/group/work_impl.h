/* The insides of a work, shared by the files of group/ alone. */
#ifndef CD_GROUP_WORK_IMPL_H
#define CD_GROUP_WORK_IMPL_H

#include "group/group_impl.h"

struct cd_work {
    _Atomic int refs;
    _Atomic uint64_t done; /* 1 when complete (release: status, error and data are visible) */
    cd_bell bell;          /* of done: rung by the worker */
    _Atomic uint32_t finishing; /* p2p: the right to finish */
    cd_work *next; /* in the queue, or among the orphans */
    cd_group *group;
    cd_record *record; /* in the ring, while it still holds `ticket` */
    uint64_t ticket;
    cd_op op;          /* with its own lists, behind this struct */
    uint64_t timeout_ns;    /* from its start */
    cd_deadline latest;     /* of a caller that waits behind the queue; else CD_NEVER */
    _Atomic bool begun;     /* the worker has it */
    uint64_t queued_ns, started_ns, done_ns;
    cd_status status;
    cd_event *event;   /* GPU */
    bool joined;       /* a stream waits for it */
    const cd_backend_ops *event_ops;
    bool is_p2p, is_usual; /* usual: of a size that is used again */
    cd_xfer xfer;      /* SEND, RECV */
    void *packed;      /* p2p of a strided span: what travels */
    void *owner;
    void (*release_owner)(void *owner);
    cd_error error;    /* last: only what is before it is cleared */
};

cd_status cd_work_create(cd_group *group, const cd_op *op, uint64_t timeout_ns, cd_work **out);
void cd_work_complete(cd_work *work, cd_status status);
/* p2p.c: moves the result out when the transfer is complete; idempotent. True when the work is done. */
bool cd_p2p_finish(cd_work *work);

#endif
