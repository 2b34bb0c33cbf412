/* Facts about this host and process. */
#ifndef CD_BASE_HOST_H
#define CD_BASE_HOST_H

#include "base/status.h"

#include <stddef.h>
#include <stdint.h>

/* Cores that this process may use (sched affinity), at least 1; read once per process start of the library's use. */
int cd_host_cores(void);
/* The kernel's boot id (36 characters and NUL), the same for all containers of a host; "" where it cannot be read. */
void cd_host_boot_id(char out[40]);
/* Random bytes from the kernel; blocks only before the kernel's pool is first filled. */
cd_status cd_host_random(void *out, size_t bytes) CD_MUST_USE;
/* Host name, cut to fit. For messages only: never resolved. */
void cd_host_name(char *out, size_t bytes);
size_t cd_host_page_bytes(void);
/* Bytes of addresses that this process may still map under its limit (ulimit -v); UINT64_MAX where there is none. */
uint64_t cd_host_address_room(void);
/* Raises the soft limit of open files to `count`, as far as the hard one lets it. */
void cd_host_want_files(uint64_t count);
/* A number kept free, for when there is no other: the null device; −1: there was none left. */
int cd_host_spare_file(void);
/* The letter of its state in /proc; 'X' from when it begins to end, before its sockets are closed; 0 where that is not known. */
char cd_host_process_state(uint32_t process);
/* Opens the null device on those of the descriptors 0 to 2 that are closed, for child processes too: else a socket or pipe
 * takes such a number, and with it what is printed there. */
void cd_host_hold_standard(void);

#endif
