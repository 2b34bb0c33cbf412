/* Between the two halves of the server: server.c moves bytes, server_run.c carries out requests. One thread, no locks. */
#ifndef CD_STORE_SERVER_IMPL_H
#define CD_STORE_SERVER_IMPL_H

#include "net/auth.h"
#include "store/proto.h"
#include "store/table.h"

#define PAUSE_BYTES ((size_t)1 << 20) /* unsent answers from which on a client is not read from */

typedef struct conn conn;
typedef struct hub hub;

/* A connection waits for a key: in the list of the key's entry. */
typedef struct watch {
    struct watch *next, *prev;
    conn *owner;
    cd_entry *entry; /* NULL: not in its list any more */
    int list;        /* of entry->watchers: WAIT or BARRIER */
} watch;

enum { WATCH_WAIT = 0, WATCH_BARRIER = 1 };

typedef struct {
    uint8_t *data;
    size_t start, end, room;
} pile;

typedef enum { STAGE_HELLO, STAGE_PROOF, STAGE_VALIDATE, STAGE_OPEN } conn_stage;

struct conn {
    conn *next, **link;           /* all connections, newest first */
    conn *next_doomed;
    int fd;
    uint32_t events;
    conn_stage stage;
    bool doomed;
    uint64_t handshake_end_ns;
    cd_auth auth;
    cd_scan scan;
    pile in, out;
    watch *watches;
    size_t watch_count, missing;
};

struct hub {
    cd_table table;
    conn *doomed;
};

/* Appends to the answers; a connection for which memory runs out is doomed. */
void hub_answer(hub *h, conn *c, const void *data, size_t bytes);
/* Sends what goes. */
void hub_flush(hub *h, conn *c);
/* The connection is closed after this turn. */
void hub_doom(hub *h, conn *c, const char *why);
/* Carries out one complete request; false when it makes no sense and the connection must go. */
bool hub_run(hub *h, conn *c, const uint8_t *data, size_t bytes);
void hub_forget_watches(hub *h, conn *c);

#endif
