/* A store's file in which anything stands, and what several stores of it do one after the other: what can be read is read alike by
 * all, writing works whatever a writer that died has left, and a value is what was last written. */
#include "fuzz.h"
#include "store/kinds.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define STORES 2
#define KEYS 4

static const char *const names[KEYS] = {"a", "bc", "", "a/b"};
static char path[64];

static void remove_file(void)
{
    unlink(path);
}

static void write_file(int flags, const uint8_t *data, size_t bytes)
{
    if (!path[0]) {
        const char *folder = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
        snprintf(path, sizeof path, "%s/fuzz-store-%d", folder, (int)getpid());
        atexit(remove_file);
    }
    int fd = open(path, O_WRONLY | O_CREAT | flags, 0600);
    FUZZ_CHECK(fd >= 0 && write(fd, data, bytes) == (ssize_t)bytes);
    close(fd);
}

static cd_patience some_time(void)
{
    return cd_patience_until(cd_deadline_after_ns(10 * CD_NS_PER_S), 1);
}

/* ---- anything in the file ---- */

/* Each key that is listed is there, and its value can be had. */
static void read_all(cd_store *s, const cd_patience *patience, size_t *count_p)
{
    cd_buffer *keys, value;
    bool there;
    FUZZ_CHECK(s->ops->list_keys(s, &keys, count_p, patience) == CD_OK);
    for (size_t i = 0; i < *count_p; i++) {
        cd_bytes key = {keys[i].data, keys[i].bytes};
        FUZZ_CHECK(s->ops->check(s, &key, 1, &there, patience) == CD_OK && there);
        FUZZ_CHECK(s->ops->get(s, key, &value, patience) == CD_OK);
        cd_buffer_free(&value);
    }
    cd_buffers_free(keys, *count_p);
}

static void use(cd_store *s, cd_store *other, const cd_patience *patience)
{
    size_t count, seen;
    int64_t number;
    cd_buffer value;
    read_all(s, patience, &count);
    read_all(other, patience, &seen);
    FUZZ_CHECK(count == seen);
    FUZZ_CHECK(other->ops->set(other, cd_bytes_of("new"), cd_bytes_of("7"), patience) == CD_OK);
    FUZZ_CHECK(s->ops->add(s, cd_bytes_of("new"), 1, &number, patience) == CD_OK && number == 8);
    FUZZ_CHECK(other->ops->get(other, cd_bytes_of("new"), &value, patience) == CD_OK);
    FUZZ_CHECK(value.bytes == 1 && *(char *)value.data == '8');
    cd_buffer_free(&value);
}

static void read_anything(const uint8_t *data, size_t bytes)
{
    write_file(O_TRUNC, data, bytes);
    cd_patience patience = some_time();
    cd_store *s, *other;
    if (cd_file_store_open(path, -1, &patience, &s) != CD_OK)
        return; /* its counter of users holds no number */
    if (cd_file_store_open(path, -1, &patience, &other) == CD_OK) {
        use(s, other, &patience);
        cd_store_release(other);
    }
    cd_store_release(s);
}

/* ---- a sequence of operations ---- */

typedef struct {
    const uint8_t *next, *end;
    cd_store *stores[STORES];
} script;

static uint8_t take(script *it)
{
    return it->next < it->end ? *it->next++ : 0;
}

/* The value of a key as a store sees it; false: there is none. */
static bool look(cd_store *s, const char *name, cd_buffer *out)
{
    cd_patience patience = some_time();
    cd_bytes key = cd_bytes_of(name);
    bool there;
    FUZZ_CHECK(s->ops->check(s, &key, 1, &there, &patience) == CD_OK);
    if (there)
        FUZZ_CHECK(s->ops->get(s, key, out, &patience) == CD_OK);
    return there;
}

static bool is(const cd_buffer *value, const void *data, size_t bytes)
{
    return value->bytes == bytes && (!bytes || memcmp(value->data, data, bytes) == 0);
}

static void agree(script *it, int first_key, int end)
{
    for (int key = first_key; key < end; key++) {
        cd_buffer first, other;
        bool there = look(it->stores[0], names[key], &first);
        for (int i = 1; i < STORES; i++) {
            FUZZ_CHECK(look(it->stores[i], names[key], &other) == there);
            if (there) {
                FUZZ_CHECK(is(&other, first.data, first.bytes));
                cd_buffer_free(&other);
            }
        }
        if (there)
            cd_buffer_free(&first);
    }
}

static bool open_store(script *it, int i)
{
    cd_patience patience = some_time();
    return cd_file_store_open(path, -1, &patience, &it->stores[i]) == CD_OK;
}

/* Writes through one store and sees it through the last. */
static void change(script *it, uint8_t what, cd_store *s, const char *name)
{
    cd_patience patience = some_time();
    cd_store *reader = it->stores[STORES - 1];
    cd_bytes key = cd_bytes_of(name), value;
    size_t most = take(it) % 40;
    value = (cd_bytes){it->next, most < (size_t)(it->end - it->next) ? most : (size_t)(it->end - it->next)};
    cd_buffer before = {0}, after = {0};
    bool was = look(reader, name, &before);
    int64_t number = 0;
    bool fine, there;
    switch (what) {
    case 0:
        FUZZ_CHECK(s->ops->set(s, key, value, &patience) == CD_OK);
        FUZZ_CHECK(look(reader, name, &after) && is(&after, value.data, value.bytes));
        break;
    case 1:
        FUZZ_CHECK(s->ops->delete_key(s, key, &there, &patience) == CD_OK);
        FUZZ_CHECK(!look(reader, name, &after));
        break;
    case 2:
        fine = s->ops->add(s, key, (int8_t)take(it), &number, &patience) == CD_OK;
        there = look(reader, name, &after);
        char text[24];
        FUZZ_CHECK(there == (was || fine) && (fine || is(&after, before.data, before.bytes)));
        FUZZ_CHECK(!fine || is(&after, text, (size_t)snprintf(text, sizeof text, "%lld", (long long)number)));
        break;
    case 3:
        FUZZ_CHECK(s->ops->append(s, key, value, &patience) == CD_OK);
        FUZZ_CHECK(look(reader, name, &after) && after.bytes == before.bytes + value.bytes);
        FUZZ_CHECK(!value.bytes || memcmp((char *)after.data + before.bytes, value.data, value.bytes) == 0);
        break;
    default: { /* expects what is there, or something else */
        cd_bytes expected = take(it) & 1 && was ? (cd_bytes){before.data, before.bytes} : (cd_bytes){"?", 1};
        cd_buffer told;
        FUZZ_CHECK(s->ops->compare_set(s, key, expected, value, &told, &patience) == CD_OK);
        there = look(reader, name, &after);
        FUZZ_CHECK(!there || is(&told, after.data, after.bytes));
        FUZZ_CHECK(!was || is(&before, expected.data, expected.bytes) || is(&after, before.data, before.bytes));
        cd_buffer_free(&told);
    }
    }
    cd_buffer_free(&before);
    cd_buffer_free(&after);
}

/* What others do to the file: a writer that dies in the middle, a file cut short or made again. False: no store can open it. */
static bool disturb(script *it, uint8_t what)
{
    size_t left = (size_t)(it->end - it->next), most = take(it);
    struct stat now;
    switch (what) {
    case 0:
        left = left ? left - 1 : 0;
        write_file(O_APPEND, it->next, most < left ? most : left);
        return true;
    case 1:
        FUZZ_CHECK(stat(path, &now) == 0 && truncate(path, now.st_size > (off_t)most ? now.st_size - (off_t)most : 0) == 0);
        return true;
    case 2:
        unlink(path);
        write_file(O_TRUNC, it->next, 0);
        return true;
    default:
        cd_store_release(it->stores[most % STORES]);
        it->stores[most % STORES] = NULL;
        return open_store(it, (int)(most % STORES));
    }
}

static void run_script(const uint8_t *data, size_t bytes)
{
    script it = {.next = data, .end = data + bytes};
    write_file(O_TRUNC, data, 0);
    bool open = true;
    for (int i = 0; i < STORES && open; i++)
        open = open_store(&it, i);
    while (open && it.next < it.end) {
        uint8_t what = take(&it);
        int key = what >> 4 & 3;
        if (what % 8 < 5) {
            change(&it, what % 8, it.stores[what >> 3 & 1], names[key]);
            agree(&it, key, key + 1);
        } else {
            open = disturb(&it, what >> 3 & 3);
            if (open)
                agree(&it, 0, KEYS);
        }
    }
    for (int i = 0; i < STORES; i++)
        cd_store_release(it.stores[i]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    if (bytes && bytes < 2048 && *data == 0xFF)
        run_script(data + 1, bytes - 1);
    else
        read_anything(data, bytes);
    return 0;
}
