/* The insides of a world, shared by the files of group/ alone. */
#ifndef CD_GROUP_WORLD_IMPL_H
#define CD_GROUP_WORLD_IMPL_H

#include "coll/shm_team.h"
#include "group/control.h"
#include "group/greeter.h"
#include "group/group.h"
#include "group/handout.h"
#include "group/recorder.h"
#include "net/mesh.h"
#include "shm/channel.h"
#include "shm/segment.h"

#include <pthread.h>

#define CD_WANTING_BYTES 256

/* Head of the host's shared memory: what a rank says about itself to the others of its host. */
typedef struct {
    CD_ALIGNED(CD_LINE) _Atomic uint32_t left; /* CD_LEFT_*: its last word, after which its end is no news any more */
    char why[CD_ERROR_TEXT_BYTES];             /* of CD_LEFT_LOST */
    char wanting[CD_WANTING_BYTES];            /* "new_group([0, 1])" while it waits there; for texts only */
} cd_host_row;

enum { CD_LEFT_NOT = 0, CD_LEFT_IN_ORDER = 1, CD_LEFT_LOST = 2 };

typedef struct {
    cd_host_row *rows;  /* by local index */
    cd_record_page *pages; /* by local index */
    void *channels;
    void *team;         /* memory of the default group */
    void *arena;
    size_t arena_bytes; /* per rank, 0: none */
} cd_host_layout;

/* The last waits that a rank told of: words of their own, written by the monitor; for texts only. */
typedef struct {
    _Atomic uint64_t context, sequence;  /* the newest collective */
    _Atomic uint64_t message_ns;         /* when a wait for a message was told; 0: never */
    _Atomic int message_peer;            /* with whom */
} cd_waiting;

struct cd_world {
    _Atomic int refs;
    int rank, world;
    uint64_t timeout_ns;
    char prefix[256];
    cd_store *store;
    const _Atomic uint32_t *alive; /* 1; a page that the kernel wipes in forked children */
    _Atomic bool closing;
    bool closed;

    cd_member *members; /* [world] */
    uint8_t generation[CD_MEMBER_NONCE_BYTES];
    int32_t *host_of;   /* [world] */
    int32_t *local_of;  /* [world] position among the ranks of its own host */
    int local, locals;
    bool force_tcp;
    uint8_t secret[32];
    bool has_secret;

    cd_segment segment;
    cd_host_layout host;
    cd_record_page *page;     /* of this rank: in the host's memory, or own_page */
    cd_record_page *own_page; /* where this rank is alone on its host */
    uint64_t stall_ns;        /* after how long a wait is reported */
    cd_waiting *waiting;      /* [world]: what ranks said that they wait for */
    cd_arena *arena;
    cd_mesh *mesh;
    _Atomic uint32_t *gone; /* [world]; by world rank: left or lost */
    _Atomic int first_gone; /* the first of them; −1: none; for texts only */
    _Atomic uint32_t *unexplained; /* [world]; something failed because of it, and no cause was told in time */
    _Atomic uint32_t *untold;      /* [world]; a notice to it failed: the error of its control connection is used up */
    _Atomic bool lost;             /* this rank itself is, and has said so: it does not leave in good order */
    _Atomic uint64_t cut_ns;       /* when it found its connections cut; 0: never */

    bool published;         /* rank 0: its address stands in the store */
    int data_listener;      /* TCP; on rank 0 also for control; −1: not open */
    cd_greeter *greeter;    /* the monitor's once it runs */
    cd_handout *handout;    /* Unix socket that hands out descriptors of shared memory */
    int *controls;          /* [world]: rank 0 and the deputy have one to each rank, the others to these two; −1 = none */
    int deputy;             /* passes notices on as rank 0 does; −1: one host only */
    _Atomic bool controls_live; /* bootstrap is over: the monitor reads them */
    _Atomic uint64_t links; /* data links accepted so far */
    pthread_mutex_t control_lock; /* writing to controls after bootstrap */

    struct cd_monitor *monitor;

    pthread_mutex_t groups_lock; /* the list and the counters of sets */
    cd_group *groups;
    cd_group *expected; /* being made: their members meet */
    struct cd_set_count *sets;
    cd_group *group; /* the default one */
};

/* The secret for proofs, NULL: none. */
static inline const uint8_t *cd_world_secret(const cd_world *world)
{
    return world->has_secret ? world->secret : NULL;
}

/* world.c */
bool cd_world_forked(const cd_world *world);
cd_status cd_world_refuse_fork(const cd_world *world);
/* The lists of groups. In a forked child, which has but the thread that forked, what another one held stays locked: it goes
 * without. */
void cd_world_lock_groups(cd_world *world);
void cd_world_unlock_groups(cd_world *world);
void cd_world_peer_lost(cd_world *world, int rank, const cd_error *why);
void cd_world_peer_left(cd_world *world, int rank);
/* This rank is the one that is lost (it dies, or its connections were cut): the cause of its groups, and its last word to the
 * others of its host, by shared memory, which no cut reaches. The first call counts. */
void cd_world_confess(cd_world *world, const cd_error *why);
/* Whether process ids and open sockets of that rank's process mean the same here: same kernel, same namespaces. */
bool cd_world_sees_process(const cd_world *world, int rank);
/* Whether this rank passes notices on. */
bool cd_world_is_hub(const cd_world *world, int rank);
/* To all other ranks: directly on rank 0 and the deputy, through them elsewhere. Never blocks for long; a full socket drops the
 * notice (its reader is stuck and learns by its own deadline). `skip`: not to this rank. */
void cd_world_tell(cd_world *world, cd_control_kind kind, const cd_notice *notice, int skip);
/* Of who makes the host's memory: no larger arenas than a limit of addresses leaves room for. */
void cd_world_limit_arena(cd_world *world);
/* Lays out what the maker made, whatever this rank would have made. */
cd_status cd_world_lay_out(cd_world *world, void *base, size_t bytes);
size_t cd_world_host_bytes(const cd_world *world);

/* bootstrap.c: meets, connects, fills in members to mesh; undoes nothing (world.c does). */
cd_status cd_world_bootstrap(cd_world *world, const cd_world_config *config, const cd_patience *patience);

/* connect.c: who runs on whose host, as far as the members say; the host's memory; data pipes to all ranks, the control
 * connection to the deputy. */
void cd_world_find_hosts(cd_world *world);
/* The same patience, which in bootstrap also hears who cannot go on: on rank 0 any rank, elsewhere what rank 0 says of all. Then
 * the wait ends with that error, which names the rank. `listening` is its memory. */
typedef struct {
    cd_world *world;
    const cd_patience *outer;
} cd_listening;
cd_patience cd_world_listening(cd_world *world, const cd_patience *patience, cd_listening *listening);
/* Makes or maps this host's memory. *attached_p = 0: the proof by doing failed, this rank counts as a host of its own. */
cd_status cd_world_share_host(cd_world *world, const cd_patience *patience, uint8_t *attached_p);
cd_status cd_world_connect(cd_world *world, const cd_member *me, const cd_patience *patience);

/* monitor.c */
cd_status cd_monitor_start(cd_world *world);
void cd_monitor_stop(cd_world *world);
void cd_monitor_wake(cd_world *world);

#endif
