/* A store under a prefix: every key goes to the store below as prefix "/" key. */
#include "store/kinds.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    cd_store base;
    cd_store *under;
    size_t prefix_bytes; /* with the slash */
    char prefix[];
} prefix_store;

/* Room for `count` long keys: an array of cd_bytes and behind it the text. NULL when memory ran out (recorded). */
static cd_bytes *lengthen(const prefix_store *s, const cd_bytes *keys, size_t count)
{
    size_t bytes = (count + 1) * sizeof *keys;
    for (size_t i = 0; i < count; i++)
        bytes += s->prefix_bytes + keys[i].bytes;
    cd_bytes *longer = malloc(bytes);
    if (!longer) {
        cd_fail(CD_NO_MEMORY, "no memory for %zu keys", count);
        return NULL;
    }
    char *text = (char *)(longer + count + 1);
    for (size_t i = 0; i < count; i++) {
        longer[i] = (cd_bytes){text, s->prefix_bytes + keys[i].bytes};
        memcpy(text, s->prefix, s->prefix_bytes);
        if (keys[i].bytes)
            memcpy(text + s->prefix_bytes, keys[i].data, keys[i].bytes);
        text += longer[i].bytes;
    }
    return longer;
}

/* Calls the same function of the store below with long keys. */
#define PASS(keys, count, call)                          \
    do {                                                 \
        prefix_store *s = (prefix_store *)store;         \
        cd_store *under = s->under;                      \
        cd_bytes *longer = lengthen(s, keys, count);     \
        if (!longer)                                     \
            return CD_NO_MEMORY;                         \
        cd_status status = under->ops->call;             \
        free(longer);                                    \
        return status;                                   \
    } while (0)

static cd_status prefix_set(cd_store *store, cd_bytes key, cd_bytes value, const cd_patience *patience)
{
    PASS(&key, 1, set(under, longer[0], value, patience));
}

static cd_status prefix_get(cd_store *store, cd_bytes key, cd_buffer *out, const cd_patience *patience)
{
    PASS(&key, 1, get(under, longer[0], out, patience));
}

static cd_status prefix_add(cd_store *store, cd_bytes key, int64_t delta, int64_t *value_p, const cd_patience *patience)
{
    PASS(&key, 1, add(under, longer[0], delta, value_p, patience));
}

static cd_status prefix_compare_set(cd_store *store, cd_bytes key, cd_bytes expected, cd_bytes desired, cd_buffer *out,
                                    const cd_patience *patience)
{
    PASS(&key, 1, compare_set(under, longer[0], expected, desired, out, patience));
}

static cd_status prefix_check(cd_store *store, const cd_bytes *keys, size_t count, bool *all_p, const cd_patience *patience)
{
    PASS(keys, count, check(under, longer, count, all_p, patience));
}

static cd_status prefix_wait(cd_store *store, const cd_bytes *keys, size_t count, const cd_patience *patience)
{
    PASS(keys, count, wait(under, longer, count, patience));
}

static cd_status prefix_delete(cd_store *store, cd_bytes key, bool *existed_p, const cd_patience *patience)
{
    PASS(&key, 1, delete_key(under, longer[0], existed_p, patience));
}

static cd_status prefix_num_keys(cd_store *store, int64_t *count_p, const cd_patience *patience)
{
    cd_store *under = ((prefix_store *)store)->under;
    return under->ops->num_keys(under, count_p, patience);
}

static cd_status prefix_append(cd_store *store, cd_bytes key, cd_bytes value, const cd_patience *patience)
{
    PASS(&key, 1, append(under, longer[0], value, patience));
}

static cd_status prefix_multi_get(cd_store *store, const cd_bytes *keys, size_t count, cd_buffer *out,
                                  const cd_patience *patience)
{
    PASS(keys, count, multi_get(under, longer, count, out, patience));
}

static cd_status prefix_multi_set(cd_store *store, const cd_bytes *keys, const cd_bytes *values, size_t count,
                                  const cd_patience *patience)
{
    PASS(keys, count, multi_set(under, longer, values, count, patience));
}

static cd_status prefix_push(cd_store *store, cd_bytes key, cd_bytes value, const cd_patience *patience)
{
    PASS(&key, 1, queue_push(under, longer[0], value, patience));
}

static cd_status prefix_pop(cd_store *store, cd_bytes key, bool block, cd_buffer *out, const cd_patience *patience)
{
    PASS(&key, 1, queue_pop(under, longer[0], block, out, patience));
}

static cd_status prefix_queue_len(cd_store *store, cd_bytes key, int64_t *count_p, const cd_patience *patience)
{
    PASS(&key, 1, queue_len(under, longer[0], count_p, patience));
}

static cd_status prefix_list_keys(cd_store *store, cd_buffer **out_keys, size_t *count_p, const cd_patience *patience)
{
    prefix_store *s = (prefix_store *)store;
    cd_buffer *keys;
    size_t count, kept = 0;
    CD_TRY(s->under->ops->list_keys(s->under, &keys, &count, patience));
    for (size_t i = 0; i < count; i++) {
        cd_buffer key = keys[i];
        if (key.bytes < s->prefix_bytes || memcmp(key.data, s->prefix, s->prefix_bytes) != 0) {
            free(key.data);
            continue;
        }
        key.bytes -= s->prefix_bytes;
        memmove(key.data, (char *)key.data + s->prefix_bytes, key.bytes);
        keys[kept++] = key;
    }
    *out_keys = keys;
    *count_p = kept;
    return CD_OK;
}

/* The store below is shared: its owners close it. */
static void prefix_close(cd_store *store)
{
    (void)store;
}

static bool prefix_local_address(cd_store *store, char *out, size_t bytes)
{
    return cd_store_local_address(((prefix_store *)store)->under, out, bytes);
}

static void prefix_free(cd_store *store)
{
    if (!store)
        return;
    cd_store_release(((prefix_store *)store)->under);
    free(store);
}

#define OPS_WITHOUT_QUEUES                                                                                         \
    .name = "prefix", .set = prefix_set, .get = prefix_get, .add = prefix_add, .compare_set = prefix_compare_set,  \
    .check = prefix_check, .wait = prefix_wait, .delete_key = prefix_delete, .num_keys = prefix_num_keys,          \
    .append = prefix_append, .multi_get = prefix_multi_get, .multi_set = prefix_multi_set,                         \
    .list_keys = prefix_list_keys, .local_address = prefix_local_address, .close = prefix_close, .free = prefix_free

static const cd_store_ops plain_ops = {OPS_WITHOUT_QUEUES};
static const cd_store_ops queue_ops = {
    OPS_WITHOUT_QUEUES, .queue_push = prefix_push, .queue_pop = prefix_pop, .queue_len = prefix_queue_len};

cd_status cd_prefix_store_create(cd_bytes prefix, cd_store *under, cd_store **out)
{
    prefix_store *s = malloc(sizeof *s + prefix.bytes + 1);
    if (!s)
        return cd_fail(CD_NO_MEMORY, "no memory for a store");
    cd_store_init(&s->base, under->ops->queue_push ? &queue_ops : &plain_ops);
    atomic_store_explicit(&s->base.timeout_ns, atomic_load_explicit(&under->timeout_ns, memory_order_relaxed),
                          memory_order_relaxed);
    s->under = cd_store_retain(under);
    if (prefix.bytes)
        memcpy(s->prefix, prefix.data, prefix.bytes);
    s->prefix[prefix.bytes] = '/';
    s->prefix_bytes = prefix.bytes + 1;
    *out = &s->base;
    return CD_OK;
}

cd_store *cd_prefix_store_under(cd_store *store)
{
    return store->ops == &plain_ops || store->ops == &queue_ops ? ((prefix_store *)store)->under : NULL;
}

cd_bytes cd_prefix_store_prefix(cd_store *store)
{
    const prefix_store *s = (const prefix_store *)store;
    return (cd_bytes){s->prefix, s->prefix_bytes - 1};
}
