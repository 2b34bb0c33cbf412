/* A pipe (base/pipe.h) of two byte rings in shared memory, one for each direction. Single producer, single consumer. */
#ifndef CD_SHM_CHANNEL_H
#define CD_SHM_CHANNEL_H

#include "base/pipe.h"

#include <stddef.h>
#include <stdint.h>

/* Bytes of shared memory for all ordered pairs of `ranks` ranks; the ring of a pair is smaller the more ranks there are, so
 * that a rank that talks to all others touches at most about 4 MiB. Zero-filled memory is a valid set of empty rings. */
size_t cd_channels_bytes(int ranks);
/* The pipe between `local` and `peer_local` (positions among the ranks of the host) in memory laid out by the rule above.
 * The memory must outlive the pipe. Like a socket, the pipe may take bytes for a peer that has closed already: the loss shows
 * in recv, and in send when the ring is full. */
cd_status cd_channel_open(void *memory, int ranks, int local, int peer_local, int peer_world_rank, cd_pipe **out);

#endif
