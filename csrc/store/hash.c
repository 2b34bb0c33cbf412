/* The store in the process: a table, a lock that is held only while the table is touched, and a condition for those who wait. */
#include "store/kinds.h"
#include "store/table.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef struct {
    cd_store base;
    pid_t pid;
    pthread_mutex_t lock;
    pthread_cond_t changed; /* on CLOCK_MONOTONIC */
    cd_table table;
    bool closed;
} hash_store;

/* By a forked child: what another thread of the parent held stays locked, and what it changed may be half done. */
static bool is_inherited(const hash_store *s)
{
    return s->pid != getpid();
}

static hash_store *enter(cd_store *store)
{
    hash_store *s = (hash_store *)store;
    if (!is_inherited(s))
        pthread_mutex_lock(&s->lock);
    return s;
}

/* After a change: wakes those who wait. */
static cd_status leave(hash_store *s, cd_status status)
{
    if (is_inherited(s))
        return status;
    if (status == CD_OK)
        pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
    return status;
}

static cd_status check_open(const hash_store *s)
{
    if (is_inherited(s))
        return cd_fail(CD_STORE, "the store was inherited over fork, and what is set there reaches nobody: make a TCPStore or "
                                 "FileStore that both processes open");
    return s->closed ? cd_fail(CD_STORE, CD_STORE_CLOSED_TEXT) : CD_OK;
}

/* One wait of at most 50 ms. The lock is open while idle runs, since that may take the GIL. */
static cd_status await_change(hash_store *s, cd_waiter *waiter, bool (*ready)(hash_store *, const void *), const void *what)
{
    pthread_mutex_unlock(&s->lock);
    cd_status status = cd_waiter_check(waiter);
    pthread_mutex_lock(&s->lock);
    if (status != CD_OK || ready(s, what))
        return status;
    uint64_t end = cd_now_ns() + (uint64_t)cd_waiter_nap_ms(waiter) * CD_NS_PER_MS;
    struct timespec at = {.tv_sec = (time_t)(end / CD_NS_PER_S), .tv_nsec = (long)(end % CD_NS_PER_S)};
    pthread_cond_timedwait(&s->changed, &s->lock, &at);
    return CD_OK;
}

typedef struct {
    const cd_bytes *keys;
    size_t count;
} key_list;

static bool all_present(hash_store *s, const void *what)
{
    const key_list *list = what;
    for (size_t i = 0; i < list->count; i++)
        if (!cd_entry_is_present(cd_table_find(&s->table, list->keys[i])))
            return false;
    return true;
}

static bool has_item(hash_store *s, const void *what)
{
    return cd_table_queued(&s->table, *(const cd_bytes *)what) > 0;
}

static cd_status await(hash_store *s, bool (*ready)(hash_store *, const void *), const void *what, const cd_bytes *keys,
                       size_t count, const cd_patience *patience)
{
    uint64_t budget_ns = cd_deadline_left_ns(patience->deadline);
    cd_waiter waiter = cd_waiter_start(patience);
    while (!ready(s, what)) {
        CD_TRY(check_open(s));
        cd_status status = await_change(s, &waiter, ready, what);
        if (status == CD_TIMED_OUT && ready(s, what))
            return CD_OK;
        if (status == CD_TIMED_OUT)
            return cd_store_expired(budget_ns, "", keys, count);
        CD_TRY(status);
    }
    return check_open(s);
}

static cd_status hash_set(cd_store *store, cd_bytes key, cd_bytes value, const cd_patience *patience)
{
    (void)patience;
    hash_store *s = enter(store);
    cd_status status = check_open(s);
    return leave(s, status == CD_OK ? cd_table_set(&s->table, key, value, NULL) : status);
}

static cd_status copy_value(hash_store *s, cd_bytes key, cd_buffer *out)
{
    cd_entry *entry = cd_table_find(&s->table, key);
    return cd_buffer_copy(entry->value.data, entry->value.bytes, out);
}

static cd_status hash_multi_get(cd_store *store, const cd_bytes *keys, size_t count, cd_buffer *out, const cd_patience *patience)
{
    hash_store *s = enter(store);
    key_list list = {keys, count};
    cd_status status = await(s, all_present, &list, keys, count, patience);
    size_t done = 0;
    while (status == CD_OK && done < count) {
        status = copy_value(s, keys[done], &out[done]);
        done += status == CD_OK;
    }
    pthread_mutex_unlock(&s->lock);
    while (status != CD_OK && done)
        cd_buffer_free(&out[--done]);
    return status;
}

static cd_status hash_get(cd_store *store, cd_bytes key, cd_buffer *out, const cd_patience *patience)
{
    return hash_multi_get(store, &key, 1, out, patience);
}

static cd_status hash_add(cd_store *store, cd_bytes key, int64_t delta, int64_t *value_p, const cd_patience *patience)
{
    (void)patience;
    hash_store *s = enter(store);
    cd_status status = check_open(s);
    return leave(s, status == CD_OK ? cd_table_add(&s->table, key, delta, value_p, NULL) : status);
}

static cd_status hash_compare_set(cd_store *store, cd_bytes key, cd_bytes expected, cd_bytes desired, cd_buffer *out,
                                  const cd_patience *patience)
{
    (void)patience;
    hash_store *s = enter(store);
    cd_status status = check_open(s);
    cd_bytes result = {0};
    cd_entry *changed;
    if (status == CD_OK)
        status = cd_table_compare_set(&s->table, key, expected, desired, &result, &changed);
    if (status == CD_OK)
        status = cd_buffer_copy(result.data, result.bytes, out);
    return leave(s, status);
}

static cd_status hash_check(cd_store *store, const cd_bytes *keys, size_t count, bool *all_p, const cd_patience *patience)
{
    (void)patience;
    hash_store *s = enter(store);
    key_list list = {keys, count};
    cd_status status = check_open(s);
    if (status == CD_OK)
        *all_p = all_present(s, &list);
    pthread_mutex_unlock(&s->lock);
    return status;
}

static cd_status hash_wait(cd_store *store, const cd_bytes *keys, size_t count, const cd_patience *patience)
{
    hash_store *s = enter(store);
    key_list list = {keys, count};
    cd_status status = await(s, all_present, &list, keys, count, patience);
    pthread_mutex_unlock(&s->lock);
    return status;
}

static cd_status hash_delete(cd_store *store, cd_bytes key, bool *existed_p, const cd_patience *patience)
{
    (void)patience;
    hash_store *s = enter(store);
    cd_status status = check_open(s);
    if (status == CD_OK)
        *existed_p = cd_table_delete(&s->table, key);
    pthread_mutex_unlock(&s->lock);
    return status;
}

static cd_status hash_num_keys(cd_store *store, int64_t *count_p, const cd_patience *patience)
{
    (void)patience;
    hash_store *s = enter(store);
    cd_status status = check_open(s);
    if (status == CD_OK)
        *count_p = s->table.values;
    pthread_mutex_unlock(&s->lock);
    return status;
}

static cd_status hash_append(cd_store *store, cd_bytes key, cd_bytes value, const cd_patience *patience)
{
    (void)patience;
    hash_store *s = enter(store);
    cd_status status = check_open(s);
    return leave(s, status == CD_OK ? cd_table_append(&s->table, key, value, NULL) : status);
}

static cd_status hash_push(cd_store *store, cd_bytes key, cd_bytes value, const cd_patience *patience)
{
    (void)patience;
    hash_store *s = enter(store);
    cd_status status = check_open(s);
    return leave(s, status == CD_OK ? cd_table_push(&s->table, key, value, NULL) : status);
}

static cd_status hash_pop(cd_store *store, cd_bytes key, bool block, cd_buffer *out, const cd_patience *patience)
{
    hash_store *s = enter(store);
    cd_status status = block ? await(s, has_item, &key, &key, 1, patience) : check_open(s);
    cd_item *item = status == CD_OK ? cd_table_pop(&s->table, key) : NULL;
    pthread_mutex_unlock(&s->lock);
    if (status == CD_OK && !item)
        return cd_store_queue_empty(key);
    if (status == CD_OK)
        status = cd_buffer_copy(item->data, item->bytes, out);
    free(item);
    return status;
}

static cd_status hash_queue_len(cd_store *store, cd_bytes key, int64_t *count_p, const cd_patience *patience)
{
    (void)patience;
    hash_store *s = enter(store);
    cd_status status = check_open(s);
    if (status == CD_OK)
        *count_p = cd_table_queued(&s->table, key);
    pthread_mutex_unlock(&s->lock);
    return status;
}

static cd_status hash_list_keys(cd_store *store, cd_buffer **out_keys, size_t *count_p, const cd_patience *patience)
{
    (void)patience;
    hash_store *s = enter(store);
    cd_status status = check_open(s);
    size_t most = (size_t)s->table.values, count = 0;
    cd_buffer *keys = calloc(most + 1, sizeof *keys);
    if (status == CD_OK && !keys)
        status = cd_fail(CD_NO_MEMORY, "no memory for the list of %zu keys", most);
    for (size_t i = 0; status == CD_OK && i < s->table.slot_count; i++)
        for (cd_entry *e = s->table.slots[i]; e && status == CD_OK; e = e->next)
            if (e->has_value) {
                status = cd_buffer_copy(e->key, e->key_bytes, &keys[count]);
                count += status == CD_OK;
            }
    pthread_mutex_unlock(&s->lock);
    if (status != CD_OK) {
        cd_buffers_free(keys, count);
        return status;
    }
    *out_keys = keys;
    *count_p = count;
    return CD_OK;
}

static cd_status hash_multi_set(cd_store *store, const cd_bytes *keys, const cd_bytes *values, size_t count,
                                const cd_patience *patience)
{
    (void)patience;
    hash_store *s = enter(store);
    cd_status status = check_open(s);
    for (size_t i = 0; status == CD_OK && i < count; i++)
        status = cd_table_set(&s->table, keys[i], values[i], NULL);
    return leave(s, status);
}

static void hash_close(cd_store *store)
{
    hash_store *s = enter(store);
    s->closed = true;
    leave(s, CD_OK);
}

static void hash_free(cd_store *store)
{
    if (!store)
        return;
    hash_store *s = (hash_store *)store;
    cd_table_clear(&s->table);
    if (!is_inherited(s)) /* for a thread of the parent that waits there it would wait for ever */
        pthread_cond_destroy(&s->changed);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

static const cd_store_ops hash_ops = {
    .name = "hash",
    .set = hash_set,
    .get = hash_get,
    .add = hash_add,
    .compare_set = hash_compare_set,
    .check = hash_check,
    .wait = hash_wait,
    .delete_key = hash_delete,
    .num_keys = hash_num_keys,
    .append = hash_append,
    .multi_get = hash_multi_get,
    .multi_set = hash_multi_set,
    .queue_push = hash_push,
    .queue_pop = hash_pop,
    .queue_len = hash_queue_len,
    .list_keys = hash_list_keys,
    .close = hash_close,
    .free = hash_free,
};

cd_status cd_hash_store_create(cd_store **out)
{
    hash_store *s = calloc(1, sizeof *s);
    if (!s)
        return cd_fail(CD_NO_MEMORY, "no memory for a store");
    cd_status status = cd_table_init(&s->table);
    if (status != CD_OK) {
        free(s);
        return status;
    }
    cd_store_init(&s->base, &hash_ops);
    s->pid = getpid();
    pthread_mutex_init(&s->lock, NULL);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&s->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    *out = &s->base;
    return CD_OK;
}
