/* Between the two halves of the TCP client: client.c keeps connections and turns, client_ops.c words the requests. */
#ifndef CD_STORE_CLIENT_IMPL_H
#define CD_STORE_CLIENT_IMPL_H

#include "net/auth.h"
#include "store/proto.h"
#include "store/store.h"

#include <pthread.h>
#include <sys/types.h>

/* One connection; used by one thread at a time. */
typedef struct tcp_line {
    struct tcp_line *next, **link; /* all open ones, under the lock */
    struct tcp_line *next_idle;
    int fd;                        /* −1: not connected */
    size_t start, end;             /* received, not yet read */
    uint8_t buffer[4096];
} tcp_line;

typedef struct {
    cd_store base;
    uint16_t port;
    pid_t pid;
    cd_secret secret;
    _Atomic bool closed;
    bool joined_late;          /* written by cd_tcp_store_join before others have the store */
    pthread_mutex_t lock;      /* of what follows; never held while waiting */
    pthread_cond_t quick_free;
    bool quick_busy;
    tcp_line quick;            /* of the thread that set quick_busy */
    tcp_line *lines, *idle;
    int idle_count;
    char host[];
} tcp_store;

typedef struct {
    uint8_t *data;
    size_t bytes;
    uint8_t small[480];
} tcp_message;

extern const cd_store_ops tcp_ops;

/* `bytes` bytes of an answer, by way of the line's buffer. */
cd_status tcp_read(tcp_line *line, void *out, size_t bytes, const cd_patience *patience);
/* One request on the shared connection; `read` takes its whole answer (NULL: there is none). */
cd_status tcp_quick(tcp_store *s, const tcp_message *message,
                    cd_status (*read)(tcp_line *, void *, const cd_patience *), void *out,
                    const cd_patience *patience);
/* A WAIT request on a connection of its own. For the text: `keys` without the leading slash, and the time that the call had. */
cd_status tcp_await(tcp_store *s, const tcp_message *message, const cd_bytes *keys, size_t count, uint64_t budget_ns,
                    const cd_patience *patience);
cd_status tcp_add_raw(tcp_store *s, cd_bytes key, int64_t delta, int64_t *value_p, const cd_patience *patience);
bool tcp_is_inherited(const tcp_store *s);
/* CD_PEER_LOST and CD_IO become CD_STORE "store at host:port lost"; others are passed on. */
cd_status tcp_lost(const tcp_store *s, cd_status status);
void tcp_close(cd_store *store);
void tcp_free(cd_store *store);

#endif
