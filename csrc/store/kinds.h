/* The kinds of store. Each constructor gives a store with one reference: cd_store_release. */
#ifndef CD_STORE_KINDS_H
#define CD_STORE_KINDS_H

#include "net/auth.h"
#include "store/store.h"

/* A table in this process. */
cd_status cd_hash_store_create(cd_store **out);

/* prefix "/" key in another store, which it retains. */
cd_status cd_prefix_store_create(cd_bytes prefix, cd_store *under, cd_store **out);
/* The store under a prefix store, NULL for other kinds; not retained. */
cd_store *cd_prefix_store_under(cd_store *store);
cd_bytes cd_prefix_store_prefix(cd_store *store);

/* A file that all processes append to (torch's format). world ≥ 0: the last of them to close removes it. */
cd_status cd_file_store_open(const char *path, int64_t world, const cd_patience *patience, cd_store **out);

/* A client of the TCP server here (store/server.h) or of torch's. Connects until patience ends.
 * Errors: CD_NETWORK (never reached), CD_REFUSED (another secret), CD_PROTOCOL (no store answers there). */
cd_status cd_tcp_store_open(const char *host, uint16_t port, const cd_secret *secret,
                            const cd_patience *patience, cd_store **out);
/* Counts this process in; with `wait_all` until `world` have been. CD_STORE_TIMEOUT "Timed out after 2 seconds waiting …". */
cd_status cd_tcp_store_join(cd_store *store, int64_t world, bool wait_all, const cd_patience *patience);
/* More than `world` had joined then: the server may be one that the group before met at, and that its rank 0 is about to
 * close. */
bool cd_tcp_store_joined_late(const cd_store *store);

#endif
