#include "store/table.h"

#include "base/host.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FIRST_SLOTS 64

static uint64_t hash_of(const cd_table *table, cd_bytes key)
{
    uint64_t hash = table->seed;
    const unsigned char *at = key.data;
    for (size_t i = 0; i < key.bytes; i++) {
        hash = (hash ^ at[i]) * UINT64_C(0x100000001b3);
        hash ^= hash >> 29;
    }
    return hash ^ hash >> 32;
}

cd_status cd_table_init(cd_table *table)
{
    *table = (cd_table){0};
    return cd_host_random(&table->seed, sizeof table->seed);
}

static void free_entry(cd_entry *entry)
{
    while (entry->first) {
        cd_item *item = entry->first;
        entry->first = item->next;
        free(item);
    }
    free(entry->value.data);
    free(entry);
}

void cd_table_clear(cd_table *table)
{
    for (size_t i = 0; i < table->slot_count; i++)
        while (table->slots[i]) {
            cd_entry *entry = table->slots[i];
            table->slots[i] = entry->next;
            free_entry(entry);
        }
    free(table->slots);
    *table = (cd_table){0};
}

cd_entry *cd_table_find(const cd_table *table, cd_bytes key)
{
    if (!table->slot_count)
        return NULL;
    uint64_t hash = hash_of(table, key);
    cd_entry *entry = table->slots[hash & (table->slot_count - 1)];
    while (entry && (entry->hash != hash || entry->key_bytes != key.bytes ||
                     (key.bytes && memcmp(entry->key, key.data, key.bytes))))
        entry = entry->next;
    return entry;
}

static bool grow(cd_table *table)
{
    size_t count = table->slot_count ? 2 * table->slot_count : FIRST_SLOTS;
    cd_entry **slots = calloc(count, sizeof *slots);
    if (!slots)
        return table->slot_count != 0; /* longer chains do too */
    for (size_t i = 0; i < table->slot_count; i++)
        while (table->slots[i]) {
            cd_entry *entry = table->slots[i];
            table->slots[i] = entry->next;
            entry->next = slots[entry->hash & (count - 1)];
            slots[entry->hash & (count - 1)] = entry;
        }
    free(table->slots);
    table->slots = slots;
    table->slot_count = count;
    return true;
}

cd_entry *cd_table_entry(cd_table *table, cd_bytes key)
{
    cd_entry *entry = cd_table_find(table, key);
    if (entry)
        return entry;
    bool room = table->entries < table->slot_count || grow(table);
    entry = room ? calloc(1, sizeof *entry + key.bytes) : NULL;
    if (!entry) {
        cd_fail(CD_NO_MEMORY, "no memory for a key of %zu bytes", key.bytes);
        return NULL;
    }
    entry->hash = hash_of(table, key);
    entry->key_bytes = key.bytes;
    if (key.bytes)
        memcpy(entry->key, key.data, key.bytes);
    cd_entry **slot = &table->slots[entry->hash & (table->slot_count - 1)];
    entry->next = *slot;
    *slot = entry;
    table->entries++;
    return entry;
}

void cd_table_tidy(cd_table *table, cd_entry *entry)
{
    if (cd_entry_is_present(entry) || entry->watchers[0] || entry->watchers[1])
        return;
    cd_entry **link = &table->slots[entry->hash & (table->slot_count - 1)];
    while (*link != entry)
        link = &(*link)->next;
    *link = entry->next;
    table->entries--;
    free_entry(entry);
}

static void put_value(cd_table *table, cd_entry *entry, cd_buffer value)
{
    free(entry->value.data);
    entry->value = value;
    table->values += !entry->has_value;
    entry->has_value = true;
}

cd_status cd_table_set(cd_table *table, cd_bytes key, cd_bytes value, cd_entry **entry_p)
{
    cd_buffer copy;
    CD_TRY(cd_buffer_copy(value.data, value.bytes, &copy));
    cd_entry *entry = cd_table_entry(table, key);
    if (!entry) {
        cd_buffer_free(&copy);
        return CD_NO_MEMORY;
    }
    put_value(table, entry, copy);
    if (entry_p)
        *entry_p = entry;
    return CD_OK;
}

cd_status cd_table_append(cd_table *table, cd_bytes key, cd_bytes value, cd_entry **entry_p)
{
    cd_entry *entry = cd_table_find(table, key);
    if (!entry || !entry->has_value)
        return cd_table_set(table, key, value, entry_p);
    size_t bytes = entry->value.bytes + value.bytes;
    char *longer = realloc(entry->value.data, bytes ? bytes : 1);
    if (!longer)
        return cd_fail(CD_NO_MEMORY, "no memory for a value of %zu bytes", bytes);
    if (value.bytes)
        memcpy(longer + entry->value.bytes, value.data, value.bytes);
    entry->value = (cd_buffer){longer, bytes};
    if (entry_p)
        *entry_p = entry;
    return CD_OK;
}

static cd_status number_of(const cd_entry *entry, int64_t *number_p)
{
    char text[24], *end = text;
    bool fits = entry->value.bytes > 0 && entry->value.bytes < sizeof text;
    if (fits) {
        memcpy(text, entry->value.data, entry->value.bytes);
        text[entry->value.bytes] = 0;
        errno = 0;
        *number_p = strtoll(text, &end, 10);
        fits = errno == 0 && end == text + entry->value.bytes;
    }
    if (!fits)
        return cd_fail(CD_STORE, "add: the value of key '%.*s' is not a decimal number of 64 bits",
                       (int)entry->key_bytes, entry->key);
    return CD_OK;
}

cd_status cd_table_add(cd_table *table, cd_bytes key, int64_t delta, int64_t *value_p, cd_entry **entry_p)
{
    cd_entry *entry = cd_table_find(table, key);
    int64_t sum = 0;
    if (entry && entry->has_value)
        CD_TRY(number_of(entry, &sum));
    if (__builtin_add_overflow(sum, delta, &sum))
        return cd_fail(CD_STORE, "add: the sum at key '%.*s' does not fit in 64 bits", (int)key.bytes, (const char *)key.data);
    char text[24];
    int bytes = snprintf(text, sizeof text, "%" PRId64, sum);
    CD_TRY(cd_table_set(table, key, (cd_bytes){text, (size_t)bytes}, entry_p));
    *value_p = sum;
    return CD_OK;
}

cd_status cd_table_compare_set(cd_table *table, cd_bytes key, cd_bytes expected, cd_bytes desired, cd_bytes *result_p,
                               cd_entry **entry_p)
{
    cd_entry *entry = cd_table_find(table, key);
    *entry_p = NULL;
    bool matches = expected.bytes == 0;
    if (entry && entry->has_value)
        matches = entry->value.bytes == expected.bytes &&
                  (!expected.bytes || memcmp(entry->value.data, expected.data, expected.bytes) == 0);
    if (matches) {
        CD_TRY(cd_table_set(table, key, desired, entry_p));
        *result_p = desired;
    } else {
        *result_p = entry && entry->has_value ? (cd_bytes){entry->value.data, entry->value.bytes} : expected;
    }
    return CD_OK;
}

bool cd_table_delete(cd_table *table, cd_bytes key)
{
    cd_entry *entry = cd_table_find(table, key);
    if (!entry || !entry->has_value)
        return false;
    cd_buffer_free(&entry->value);
    entry->has_value = false;
    table->values--;
    cd_table_tidy(table, entry);
    return true;
}

cd_status cd_table_push(cd_table *table, cd_bytes key, cd_bytes value, cd_entry **entry_p)
{
    cd_item *item = malloc(sizeof *item + value.bytes);
    cd_entry *entry = item ? cd_table_entry(table, key) : NULL;
    if (!entry) {
        free(item);
        return cd_fail(CD_NO_MEMORY, "no memory for a value of %zu bytes", value.bytes);
    }
    item->next = NULL;
    item->bytes = value.bytes;
    if (value.bytes)
        memcpy(item->data, value.data, value.bytes);
    if (entry->last)
        entry->last->next = item;
    else
        entry->first = item;
    entry->last = item;
    entry->queued++;
    if (entry_p)
        *entry_p = entry;
    return CD_OK;
}

cd_item *cd_table_pop(cd_table *table, cd_bytes key)
{
    cd_entry *entry = cd_table_find(table, key);
    if (!entry || !entry->first)
        return NULL;
    cd_item *item = entry->first;
    entry->first = item->next;
    if (!entry->first)
        entry->last = NULL;
    entry->queued--;
    cd_table_tidy(table, entry);
    return item;
}

int64_t cd_table_queued(const cd_table *table, cd_bytes key)
{
    cd_entry *entry = cd_table_find(table, key);
    return entry ? entry->queued : 0;
}
