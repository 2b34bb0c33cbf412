/* Takes connections on a world's TCP listener and reads their hellos without ever waiting for one of them: a port scan, a
 * silent client or junk costs a slot for a while, never time. Private to group/. */
#ifndef CD_GROUP_GREETER_H
#define CD_GROUP_GREETER_H

#include "group/control.h"

#include <stdbool.h>

typedef struct cd_greeter cd_greeter;
struct pollfd;

/* A hello that came in whole (and proved the job secret, if there is one): the callee owns the socket. */
typedef void (*cd_greeted_func)(void *ctx, int socket, cd_control_kind kind, const cd_hello *hello);

/* The listener stays the caller's. secret: 32 bytes or NULL. */
cd_status cd_greeter_open(int rank, int listener, const uint8_t *secret, cd_greeter **out);
void cd_greeter_free(cd_greeter *greeter);
/* For poll(2): fills at most `room` entries, returns how many. */
int cd_greeter_poll_set(cd_greeter *greeter, struct pollfd *entries, int room);
/* Accepts and reads what is there, calls back for each whole hello, drops connections that are silent for 10 s or speak
 * another protocol. Never blocks. One thread at a time. CD_NETWORK: this process may open no further connection; who dialled
 * was told so (REFUSED), naming `rank` and the limit. */
cd_status cd_greeter_serve(cd_greeter *greeter, cd_greeted_func greeted, void *ctx);

#endif
