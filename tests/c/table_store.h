/* A store for tests of the group room: a table in the process, only what bootstrap needs. */
#ifndef CD_TEST_TABLE_STORE_H
#define CD_TEST_TABLE_STORE_H

#include "store/store.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    cd_store base;
    pthread_mutex_t lock;
    char key[300];
    void *value;
    size_t bytes;
} table_store;

static cd_status table_set(cd_store *store, cd_bytes key, cd_bytes value, const cd_patience *patience)
{
    (void)patience;
    table_store *t = (table_store *)store;
    pthread_mutex_lock(&t->lock);
    memcpy(t->key, key.data, key.bytes);
    t->key[key.bytes] = 0;
    free(t->value);
    t->value = malloc(value.bytes);
    memcpy(t->value, value.data, value.bytes);
    t->bytes = value.bytes;
    pthread_mutex_unlock(&t->lock);
    return CD_OK;
}

static cd_status table_get(cd_store *store, cd_bytes key, cd_buffer *out, const cd_patience *patience)
{
    table_store *t = (table_store *)store;
    cd_waiter waiter = cd_waiter_start(patience);
    for (;;) {
        pthread_mutex_lock(&t->lock);
        bool there = t->value && strlen(t->key) == key.bytes && memcmp(t->key, key.data, key.bytes) == 0;
        if (there) {
            out->data = malloc(t->bytes);
            memcpy(out->data, t->value, t->bytes);
            out->bytes = t->bytes;
        }
        pthread_mutex_unlock(&t->lock);
        if (there)
            return CD_OK;
        cd_status status = cd_waiter_turn(&waiter);
        if (status != CD_OK)
            return status == CD_TIMED_OUT ? cd_fail(CD_STORE_TIMEOUT, "wait timeout") : status;
    }
}

static cd_status table_delete(cd_store *store, cd_bytes key, bool *existed_p, const cd_patience *patience)
{
    (void)key;
    (void)patience;
    table_store *t = (table_store *)store;
    pthread_mutex_lock(&t->lock);
    *existed_p = t->value != 0;
    free(t->value);
    t->value = 0;
    pthread_mutex_unlock(&t->lock);
    return CD_OK;
}

static const cd_store_ops table_ops = {.name = "table", .set = table_set, .get = table_get, .delete_key = table_delete};

#endif
