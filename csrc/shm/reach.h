/* Reading the memory of another process of the host (process_vm_readv). The kernel allows it between processes of one user that
 * may trace each other; containers and hardened kernels often forbid it. Whether it works is found out by doing: a process
 * leaves a card with a random number and the place where it keeps it, and who can read the number there has found the right
 * process, whatever process ids mean here. */
#ifndef CD_SHM_REACH_H
#define CD_SHM_REACH_H

#include <stddef.h>
#include <stdint.h>

/* Lies in shared memory, written by the process that it is of. */
typedef struct {
    uint64_t token, token_at;
    int32_t process, pad;
} cd_reach_card;

/* Fills the card of the calling process; *token, which it names, must stay as long as the card is used. */
void cd_reach_offer(cd_reach_card *card, uint64_t *token);
/* 0, or the errno that says why its memory cannot be read. Does not block. */
int cd_reach_probe(const cd_reach_card *card);
/* Copies from `there` in that process. 0, or errno; then a part of `out` may be written. */
int cd_reach_read(const cd_reach_card *card, void *out, uint64_t there, size_t bytes);

#endif
