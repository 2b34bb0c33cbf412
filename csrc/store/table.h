/* The table of keys of one store: values, queues, and who watches a key. Not locked: the hash store locks around it, the server
 * uses it from its one thread. */
#ifndef CD_STORE_TABLE_H
#define CD_STORE_TABLE_H

#include "store/store.h"

typedef struct cd_item {
    struct cd_item *next;
    size_t bytes;
    char data[];
} cd_item;

typedef struct cd_entry {
    struct cd_entry *next;
    uint64_t hash;
    cd_buffer value;
    bool has_value;
    cd_item *first, *last;  /* queue */
    int64_t queued;
    void *watchers[2], *last_watchers[2]; /* the server's lists; an entry that is watched stays */
    size_t key_bytes;
    char key[];
} cd_entry;

typedef struct {
    cd_entry **slots;
    size_t slot_count, entries; /* slot_count: power of two, 0 before the first key */
    int64_t values;
    uint64_t seed;              /* so that nobody can choose keys that collide */
} cd_table;

cd_status cd_table_init(cd_table *table);
void cd_table_clear(cd_table *table);
/* NULL when the key is neither set, queued nor watched. */
cd_entry *cd_table_find(const cd_table *table, cd_bytes key);
/* Finds or makes; NULL when memory ran out (recorded). */
cd_entry *cd_table_entry(cd_table *table, cd_bytes key);
/* Removes the entry if it is neither set, queued nor watched. */
void cd_table_tidy(cd_table *table, cd_entry *entry);
/* Set, or a queue that is not empty. */
static inline bool cd_entry_is_present(const cd_entry *entry)
{
    return entry && (entry->has_value || entry->queued);
}

/* The operations; *entry_p (may be NULL) gets the entry whose watchers are to be told. */
cd_status cd_table_set(cd_table *table, cd_bytes key, cd_bytes value, cd_entry **entry_p);
cd_status cd_table_append(cd_table *table, cd_bytes key, cd_bytes value, cd_entry **entry_p);
/* CD_STORE when the value is no decimal number or the sum does not fit. */
cd_status cd_table_add(cd_table *table, cd_bytes key, int64_t delta, int64_t *value_p, cd_entry **entry_p);
/* *result_p: what is stored afterwards, or `expected` for a missing key that was expected to have a value; it points into the
 * table or the arguments. *entry_p is NULL when nothing was stored. */
cd_status cd_table_compare_set(cd_table *table, cd_bytes key, cd_bytes expected, cd_bytes desired, cd_bytes *result_p,
                               cd_entry **entry_p);
bool cd_table_delete(cd_table *table, cd_bytes key);
cd_status cd_table_push(cd_table *table, cd_bytes key, cd_bytes value, cd_entry **entry_p);
/* The first item, the caller's to free; NULL when the queue is empty. */
cd_item *cd_table_pop(cd_table *table, cd_bytes key);
int64_t cd_table_queued(const cd_table *table, cd_bytes key);

#endif
