/* Hands descriptors of shared memory to other ranks of the host: an abstract Unix socket (no name in the file system), served
 * by the monitor. A request for memory that is not there yet waits until it is. */
#ifndef CD_GROUP_HANDOUT_H
#define CD_GROUP_HANDOUT_H

#include "base/wait.h"
#include "shm/segment.h"

#include <stdint.h>

typedef struct cd_handout cd_handout;

/* What a request must show. */
typedef struct {
    uint8_t generation[16]; /* of the world; known to its members alone */
    uint64_t key[2];        /* of the group */
} cd_handout_key;

/* Listens on a name made of `nonce` (16 bytes), the one that others know of this rank. */
cd_status cd_handout_open(const uint8_t nonce[16], cd_handout **out);
void cd_handout_free(cd_handout *handout);
/* Offers fd (not owned) under the key from now on until withdrawn. Any thread; wake the monitor afterwards. */
cd_status cd_handout_offer(cd_handout *handout, const cd_handout_key *key, int fd);
void cd_handout_withdraw(cd_handout *handout, const cd_handout_key *key);
/* For poll(2): fills at most `room` entries, returns how many. Monitor thread alone. */
struct pollfd;
int cd_handout_poll_set(cd_handout *handout, struct pollfd *entries, int room);
/* Accepts, reads requests, answers those that can be. Never blocks. Monitor thread alone. */
void cd_handout_serve(cd_handout *handout);
/* Asks the rank with `nonce` for the memory of the key and maps it. Errors: CD_NOT_FOUND when nobody listens there (another
 * network namespace or a dead process), CD_PEER_LOST, those of patience. */
cd_status cd_handout_fetch(const uint8_t nonce[16], const cd_handout_key *key, const cd_patience *patience, cd_segment *out);

#endif
