/* Anonymous shared memory (memfd), mapped by several processes of a host. It has no name, so nothing leaks on SIGKILL and the
 * size of /dev/shm does not matter. Pages cost memory only when touched. */
#ifndef CD_SHM_SEGMENT_H
#define CD_SHM_SEGMENT_H

#include "base/status.h"

#include <stddef.h>
#include <stdint.h>

typedef struct {
    void *base;
    size_t bytes;
    int fd; /* −1 once cd_segment_seal has closed it */
} cd_segment;

/* Segments from here on are mapped at multiples of it, so that whole huge pages can be mapped as such (where the machine has
 * them of that size). */
#define CD_SEGMENT_HUGE_BYTES ((size_t)2 << 20)

/* Zero-filled; sealed against resize. */
cd_status cd_segment_create(size_t bytes, cd_segment *out);
/* Maps what another process created; the descriptor becomes the segment's, also on failure. Checks size and seals. */
cd_status cd_segment_attach(int fd, cd_segment *out);
/* Unmaps and closes; takes a zero or half-built object. */
void cd_segment_free(cd_segment *segment);

/* Passing descriptors over a Unix socket (SCM_RIGHTS), together with a few bytes; non-blocking sockets answer CD_IO with
 * EAGAIN in the text only when the caller did not wait for readiness first. */
cd_status cd_fd_send(int socket, int fd, const void *bytes, size_t count);
/* CD_PEER_LOST: the other end closed. CD_IO where a message comes without a descriptor; `bytes` are filled all the same. */
cd_status cd_fd_recv(int socket, int *fd_p, void *bytes, size_t count, size_t *got_p);

#endif
