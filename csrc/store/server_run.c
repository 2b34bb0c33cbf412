#include "store/server_impl.h"

#include <stdlib.h>

/* Returns the entry it watched, NULL if it was out of its list already. */
static cd_entry *unlink_watch(watch *w)
{
    cd_entry *entry = w->entry;
    if (!entry)
        return NULL;
    if (w->prev)
        w->prev->next = w->next;
    else
        entry->watchers[w->list] = w->next;
    if (w->next)
        w->next->prev = w->prev;
    else
        entry->last_watchers[w->list] = w->prev;
    w->entry = NULL;
    return entry;
}

void hub_forget_watches(hub *h, conn *c)
{
    for (size_t i = 0; i < c->watch_count; i++) {
        cd_entry *entry = unlink_watch(&c->watches[i]);
        if (entry)
            cd_table_tidy(&h->table, entry);
    }
    free(c->watches);
    c->watches = NULL;
    c->watch_count = c->missing = 0;
}

static void answer_byte(hub *h, conn *c, uint8_t byte)
{
    hub_answer(h, c, &byte, 1);
}

static void answer_number(hub *h, conn *c, uint64_t number)
{
    uint8_t raw[8];
    cd_writer writer = cd_writer_of(raw, sizeof raw);
    cd_put_u64(&writer, number);
    hub_answer(h, c, raw, sizeof raw);
}

static void answer_string(hub *h, conn *c, const void *data, size_t bytes)
{
    answer_number(h, c, bytes);
    hub_answer(h, c, data, bytes);
}

/* Wakes watchers of the entry, oldest first, at most `most`. */
static void wake(hub *h, cd_entry *entry, int list, size_t most)
{
    watch *w;
    while (most-- && (w = entry->watchers[list])) {
        conn *c = w->owner;
        unlink_watch(w);
        if (--c->missing)
            continue;
        free(c->watches); /* all of them are out of their lists */
        c->watches = NULL;
        c->watch_count = 0;
        answer_byte(h, c, CD_ANSWER_STOP_WAITING);
        hub_flush(h, c);
    }
}

static void watch_entry(conn *c, cd_entry *entry, int list)
{
    watch *w = &c->watches[c->watch_count++];
    watch *last = entry->last_watchers[list];
    *w = (watch){.prev = last, .owner = c, .entry = entry, .list = list};
    if (last)
        last->next = w;
    else
        entry->watchers[list] = w;
    entry->last_watchers[list] = w;
    c->missing++;
}

static cd_bytes take_string(cd_reader *reader)
{
    size_t bytes;
    const void *data = cd_take_string(reader, CD_STORE_VALUE_MOST, &bytes);
    return (cd_bytes){data, bytes};
}

static bool run_wait(hub *h, conn *c, cd_reader *reader)
{
    uint64_t count = cd_take_u64(reader);
    hub_forget_watches(h, c);
    c->watches = count ? calloc(count, sizeof *c->watches) : NULL;
    if (count && !c->watches)
        return false;
    for (uint64_t i = 0; i < count; i++) {
        cd_bytes key = take_string(reader);
        if (cd_entry_is_present(cd_table_find(&h->table, key)))
            continue;
        cd_entry *entry = cd_table_entry(&h->table, key);
        if (!entry)
            return false;
        watch_entry(c, entry, WATCH_WAIT);
    }
    if (!c->missing) {
        hub_forget_watches(h, c);
        answer_byte(h, c, CD_ANSWER_STOP_WAITING);
    }
    return true;
}

static bool run_check(hub *h, conn *c, cd_reader *reader)
{
    uint64_t count = cd_take_u64(reader);
    bool all = true;
    for (uint64_t i = 0; i < count && all; i++)
        all = cd_entry_is_present(cd_table_find(&h->table, take_string(reader)));
    answer_byte(h, c, all ? CD_ANSWER_READY : CD_ANSWER_NOT_READY);
    return true;
}

static void run_get(hub *h, conn *c, cd_bytes key)
{
    const cd_entry *entry = cd_table_find(&h->table, key);
    bool has = entry && entry->has_value;
    answer_string(h, c, has ? entry->value.data : "", has ? entry->value.bytes : 0);
}

static bool run_add(hub *h, conn *c, cd_bytes key, int64_t delta)
{
    int64_t sum;
    cd_entry *entry;
    if (cd_table_add(&h->table, key, delta, &sum, &entry) != CD_OK)
        return false;
    answer_number(h, c, (uint64_t)sum);
    wake(h, entry, WATCH_WAIT, SIZE_MAX);
    return true;
}

static bool run_compare_set(hub *h, conn *c, cd_reader *reader)
{
    cd_bytes key = take_string(reader), expected = take_string(reader), desired = take_string(reader), result;
    cd_entry *entry;
    if (cd_table_compare_set(&h->table, key, expected, desired, &result, &entry) != CD_OK)
        return false;
    answer_string(h, c, result.data, result.bytes);
    if (entry)
        wake(h, entry, WATCH_WAIT, SIZE_MAX);
    return true;
}

static bool run_store(hub *h, cd_bytes key, cd_bytes value,
                      cd_status (*store)(cd_table *, cd_bytes, cd_bytes, cd_entry **), size_t most)
{
    cd_entry *entry;
    if (store(&h->table, key, value, &entry) != CD_OK)
        return false;
    wake(h, entry, WATCH_WAIT, most);
    return true;
}

static bool run_multi(hub *h, conn *c, cd_reader *reader, bool set)
{
    uint64_t count = cd_take_u64(reader);
    for (uint64_t i = 0; i < count; i++) {
        cd_bytes key = take_string(reader);
        if (!set)
            run_get(h, c, key);
        else if (!run_store(h, key, take_string(reader), cd_table_set, SIZE_MAX))
            return false;
    }
    return true;
}

static void run_pop(hub *h, conn *c, cd_bytes key)
{
    answer_number(h, c, (uint64_t)cd_table_queued(&h->table, key));
    cd_item *item = cd_table_pop(&h->table, key);
    if (item)
        answer_string(h, c, item->data, item->bytes);
    free(item);
}

static void run_list(hub *h, conn *c)
{
    answer_number(h, c, (uint64_t)h->table.values);
    for (size_t i = 0; i < h->table.slot_count; i++)
        for (cd_entry *e = h->table.slots[i]; e; e = e->next)
            if (e->has_value)
                answer_string(h, c, e->key, e->key_bytes);
}

/* Counts the caller in; all who came are answered by each world-th arrival. */
static bool run_barrier(hub *h, conn *c, cd_bytes key, int64_t world)
{
    int64_t arrived;
    cd_entry *entry;
    if (world < 1 || cd_table_add(&h->table, key, 1, &arrived, &entry) != CD_OK)
        return false;
    wake(h, entry, WATCH_WAIT, SIZE_MAX);
    if (arrived % world == 0) {
        wake(h, entry, WATCH_BARRIER, SIZE_MAX);
        answer_byte(h, c, CD_ANSWER_STOP_WAITING);
        return true;
    }
    hub_forget_watches(h, c);
    c->watches = calloc(1, sizeof *c->watches);
    if (c->watches)
        watch_entry(c, entry, WATCH_BARRIER);
    return c->watches != NULL;
}

bool hub_run(hub *h, conn *c, const uint8_t *data, size_t bytes)
{
    cd_reader reader = cd_reader_of(data, bytes);
    uint8_t request = cd_take_u8(&reader);
    cd_bytes key = {0};
    switch (request) {
    case CD_REQ_VALIDATE: return cd_take_u32(&reader) == CD_STORE_MAGIC;
    case CD_REQ_COMPARE_SET: return run_compare_set(h, c, &reader);
    case CD_REQ_CHECK: return run_check(h, c, &reader);
    case CD_REQ_WAIT: return run_wait(h, c, &reader);
    case CD_REQ_NUM_KEYS: answer_number(h, c, (uint64_t)h->table.values); return true;
    case CD_REQ_MULTI_GET: return run_multi(h, c, &reader, false);
    case CD_REQ_MULTI_SET: return run_multi(h, c, &reader, true);
    case CD_REQ_CANCEL_WAIT:
        hub_forget_watches(h, c);
        answer_byte(h, c, CD_ANSWER_CANCELED);
        return true;
    case CD_REQ_PING: hub_answer(h, c, data + 1, 4); return true;
    case CD_REQ_LIST_KEYS: run_list(h, c); return true;
    default: key = take_string(&reader);
    }
    switch (request) {
    case CD_REQ_SET: return run_store(h, key, take_string(&reader), cd_table_set, SIZE_MAX);
    case CD_REQ_APPEND: return run_store(h, key, take_string(&reader), cd_table_append, SIZE_MAX);
    case CD_REQ_QUEUE_PUSH: return run_store(h, key, take_string(&reader), cd_table_push, 1);
    case CD_REQ_GET: run_get(h, c, key); return true;
    case CD_REQ_ADD: return run_add(h, c, key, (int64_t)cd_take_u64(&reader));
    case CD_REQ_DELETE: answer_number(h, c, cd_table_delete(&h->table, key)); return true;
    case CD_REQ_QUEUE_POP: run_pop(h, c, key); return true;
    case CD_REQ_QUEUE_LEN: answer_number(h, c, (uint64_t)cd_table_queued(&h->table, key)); return true;
    case CD_REQ_BARRIER: return run_barrier(h, c, key, (int64_t)cd_take_u64(&reader));
    default: return false;
    }
}
