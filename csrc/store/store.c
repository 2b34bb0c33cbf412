#include "store/store.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TIMEOUT_NS (300 * CD_NS_PER_S)

void cd_buffer_free(cd_buffer *buffer)
{
    free(buffer->data);
    *buffer = (cd_buffer){0};
}

void cd_buffers_free(cd_buffer *buffers, size_t count)
{
    for (size_t i = 0; buffers && i < count; i++)
        free(buffers[i].data);
    free(buffers);
}

cd_status cd_buffer_copy(const void *data, size_t bytes, cd_buffer *out)
{
    void *copy = malloc(bytes ? bytes : 1);
    if (!copy)
        return cd_fail(CD_NO_MEMORY, "no memory for a value of %zu bytes", bytes);
    if (bytes)
        memcpy(copy, data, bytes);
    *out = (cd_buffer){copy, bytes};
    return CD_OK;
}

void cd_store_init(cd_store *store, const cd_store_ops *ops)
{
    store->ops = ops;
    atomic_init(&store->refs, 1);
    atomic_init(&store->timeout_ns, TIMEOUT_NS);
}

cd_store *cd_store_retain(cd_store *store)
{
    /* Relaxed: who retains has a reference already, so the count cannot reach zero meanwhile. */
    atomic_fetch_add_explicit(&store->refs, 1, memory_order_relaxed);
    return store;
}

void cd_store_release(cd_store *store)
{
    /* Release: what this owner did is visible to the one that frees; acquire: for the one that frees. */
    if (!store || atomic_fetch_sub_explicit(&store->refs, 1, memory_order_acq_rel) != 1)
        return;
    store->ops->close(store);
    store->ops->free(store);
}

cd_status cd_store_expired(uint64_t waited_ns, const char *lead, const cd_bytes *keys, size_t count)
{
    char names[512];
    size_t used = 0, i = 0;
    names[0] = 0;
    for (; i < count && used < sizeof names - 1; i++)
        used += (size_t)snprintf(names + used, sizeof names - used, "%s%s%.*s", i ? ", " : "", lead,
                                 keys[i].bytes < 256 ? (int)keys[i].bytes : 256, (const char *)keys[i].data);
    return cd_fail(CD_STORE_TIMEOUT, "wait timeout after %" PRIu64 "ms, keys: %s%s",
                   (waited_ns + CD_NS_PER_MS / 2) / CD_NS_PER_MS, names,
                   i < count || used >= sizeof names ? ", …" : "");
}

cd_status cd_store_queue_empty(cd_bytes key)
{
    return cd_fail(CD_NOT_FOUND, "queue is empty: key '%.*s'; block=True waits for an item",
                   key.bytes < 256 ? (int)key.bytes : 256, (const char *)key.data);
}

cd_status cd_store_append_by_swap(cd_store *store, cd_bytes key, cd_bytes value, const cd_patience *patience)
{
    cd_waiter waiter = cd_waiter_start(patience);
    for (;;) {
        bool exists;
        cd_buffer old = {0}, seen = {0};
        CD_TRY(store->ops->check(store, &key, 1, &exists, patience));
        if (exists)
            CD_TRY(store->ops->get(store, key, &old, patience));
        size_t bytes = old.bytes + value.bytes;
        char *joined = malloc(bytes ? bytes : 1);
        cd_status status = joined ? CD_OK : cd_fail(CD_NO_MEMORY, "no memory for a value of %zu bytes", bytes);
        if (status == CD_OK) {
            if (old.bytes)
                memcpy(joined, old.data, old.bytes);
            if (value.bytes)
                memcpy(joined + old.bytes, value.data, value.bytes);
            status = store->ops->compare_set(store, key, (cd_bytes){old.data, old.bytes},
                                             (cd_bytes){joined, bytes}, &seen, patience);
        }
        bool done = status == CD_OK && seen.bytes == bytes && (!bytes || memcmp(seen.data, joined, bytes) == 0);
        free(joined);
        cd_buffer_free(&old);
        cd_buffer_free(&seen);
        CD_TRY(status);
        if (done)
            return CD_OK;
        CD_TRY(cd_waiter_turn(&waiter));
    }
}

cd_status cd_store_multi_get_each(cd_store *store, const cd_bytes *keys, size_t count, cd_buffer *out,
                                  const cd_patience *patience)
{
    for (size_t i = 0; i < count; i++) {
        cd_status status = store->ops->get(store, keys[i], &out[i], patience);
        if (status != CD_OK) {
            while (i)
                cd_buffer_free(&out[--i]);
            return status;
        }
    }
    return CD_OK;
}

cd_status cd_store_multi_set_each(cd_store *store, const cd_bytes *keys, const cd_bytes *values, size_t count,
                                  const cd_patience *patience)
{
    for (size_t i = 0; i < count; i++)
        CD_TRY(store->ops->set(store, keys[i], values[i], patience));
    return CD_OK;
}

cd_status cd_store_barrier(cd_store *store, cd_bytes key, int64_t world, const cd_patience *patience)
{
    if (world < 1)
        return cd_fail(CD_BAD_ARGUMENT, "barrier: world_size must be at least 1, not %" PRId64, world);
    int64_t arrived;
    CD_TRY(store->ops->add(store, key, 1, &arrived, patience));
    size_t bytes = key.bytes + 32;
    char *done = malloc(bytes);
    if (!done)
        return cd_fail(CD_NO_MEMORY, "no memory for a key of %zu bytes", bytes);
    int round_bytes = snprintf(done + key.bytes, 32, "/done/%" PRId64, (arrived - 1) / world);
    memcpy(done, key.data, key.bytes);
    cd_bytes round = {done, key.bytes + (size_t)round_bytes};
    cd_status status = arrived % world == 0 ? store->ops->set(store, round, cd_bytes_of("1"), patience)
                                            : store->ops->wait(store, &round, 1, patience);
    free(done);
    return status;
}

bool cd_store_local_address(cd_store *store, char *out, size_t bytes)
{
    return store->ops->local_address && store->ops->local_address(store, out, bytes);
}
