/* The store in a file, in torch's format: a log of records (u32 key length, key, u32 value length, value), read and written under
 * flock. Keys of users begin with '/', "-/key" deletes, "refcount/" and "cleanup/" count who is there and who has left. */
#include "base/wire.h"
#include "store/kinds.h"
#include "store/table.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define LOOK_NS (2 * CD_NS_PER_MS)
#define REFS_KEY "refcount/"
#define LEFT_KEY "cleanup/"

typedef struct {
    cd_store base;
    pthread_mutex_t lock; /* of what follows; held for one look at the file, never while waiting */
    cd_table table;
    off_t read_bytes;     /* of the log, in whole records */
    ino_t inode;
    int64_t world;
    pid_t pid;
    _Atomic bool closed;
    char path[];
} file_store;

/* ---- the log ---- */

static cd_status read_from(int fd, off_t at, uint8_t *out, size_t bytes, size_t *got_p)
{
    size_t got = 0;
    while (got < bytes) {
        ssize_t part = pread(fd, out + got, bytes - got, at + (off_t)got);
        if (part < 0 && errno == EINTR)
            continue;
        if (part < 0)
            return cd_fail_errno(CD_STORE, errno, "cannot read the store's file");
        if (part == 0)
            break;
        got += (size_t)part;
    }
    *got_p = got;
    return CD_OK;
}

static cd_status apply(file_store *s, cd_bytes key, cd_bytes value)
{
    if (key.bytes && *(const char *)key.data == '-') {
        cd_table_delete(&s->table, (cd_bytes){(const char *)key.data + 1, key.bytes - 1});
        return CD_OK;
    }
    return cd_table_set(&s->table, key, value, NULL);
}

/* Takes in what others have written since. A half record at the end is of a writer that died: it is left alone. */
static cd_status catch_up(file_store *s, int fd)
{
    struct stat now;
    if (fstat(fd, &now) != 0)
        return cd_fail_errno(CD_STORE, errno, "cannot look at %s", s->path);
    if (now.st_ino != s->inode || now.st_size < s->read_bytes) { /* removed and made again */
        cd_table_clear(&s->table);
        CD_TRY(cd_table_init(&s->table));
        s->read_bytes = 0;
        s->inode = now.st_ino;
    }
    if (now.st_size == s->read_bytes)
        return CD_OK;
    size_t bytes = (size_t)(now.st_size - s->read_bytes);
    uint8_t *data = malloc(bytes);
    if (!data)
        return cd_fail(CD_NO_MEMORY, "no memory for %zu bytes of %s", bytes, s->path);
    cd_status status = read_from(fd, s->read_bytes, data, bytes, &bytes);
    cd_reader reader = cd_reader_of(data, bytes);
    while (status == CD_OK) {
        const uint8_t *start = reader.next;
        uint32_t key_bytes = cd_take_u32(&reader);
        const void *key = cd_take_raw(&reader, key_bytes);
        uint32_t value_bytes = cd_take_u32(&reader);
        const void *value = cd_take_raw(&reader, value_bytes);
        if (reader.broken)
            break;
        status = apply(s, (cd_bytes){key, key_bytes}, (cd_bytes){value, value_bytes});
        if (status == CD_OK)
            s->read_bytes += reader.next - start;
    }
    free(data);
    return status;
}

static cd_status write_record(file_store *s, int fd, cd_bytes key, cd_bytes value)
{
    if (key.bytes > UINT32_MAX || value.bytes > UINT32_MAX)
        return cd_fail(CD_BAD_ARGUMENT, "a file store takes at most 4 GiB a value");
    size_t bytes = 8 + key.bytes + value.bytes;
    uint8_t *data = malloc(bytes);
    if (!data)
        return cd_fail(CD_NO_MEMORY, "no memory for a record of %zu bytes", bytes);
    cd_writer writer = cd_writer_of(data, bytes);
    cd_put_u32(&writer, (uint32_t)key.bytes);
    cd_put_raw(&writer, key.data, key.bytes);
    cd_put_u32(&writer, (uint32_t)value.bytes);
    cd_put_raw(&writer, value.data, value.bytes);
    cd_status status = CD_OK;
    if (ftruncate(fd, s->read_bytes) != 0) /* what a dead writer left half done */
        status = cd_fail_errno(CD_STORE, errno, "cannot write %s", s->path);
    for (size_t done = 0; status == CD_OK && done < bytes;) {
        ssize_t part = pwrite(fd, data + done, bytes - done, s->read_bytes + (off_t)done);
        if (part < 0 && errno != EINTR)
            status = cd_fail_errno(CD_STORE, errno, "cannot write %s", s->path);
        done += part > 0 ? (size_t)part : 0;
    }
    free(data);
    if (status == CD_OK)
        status = apply(s, key, value);
    if (status == CD_OK)
        s->read_bytes += (off_t)bytes;
    else
        s->inode = 0; /* the table may be ahead of the file: read all of it next time */
    return status;
}

/* ---- turns ---- */

static cd_status check_usable(const file_store *s)
{
    if (s->pid != getpid())
        return cd_fail(CD_STORE, "file store %s was inherited over fork: make a new one in the child", s->path);
    if (atomic_load_explicit(&s->closed, memory_order_acquire))
        return cd_fail(CD_STORE, CD_STORE_CLOSED_TEXT);
    return CD_OK;
}

static void leave(file_store *s, int fd)
{
    close(fd); /* and so unlocks it */
    pthread_mutex_unlock(&s->lock);
}

/* Opens and locks the file; 0, or an errno. Who had opened it when another removed it waits for the lock of a file that nobody
 * will find again: it comes once more, as if the lock were another's. */
static int open_locked(const file_store *s, int create, int mode, int *fd_p)
{
    struct stat now;
    int fd = open(s->path, O_RDWR | create | O_CLOEXEC, 0644);
    if (fd < 0)
        return errno;
    int error = flock(fd, mode | LOCK_NB) != 0 ? errno : fstat(fd, &now) != 0 ? errno : now.st_nlink == 0 ? EWOULDBLOCK : 0;
    if (error)
        close(fd);
    else
        *fd_p = fd;
    return error;
}

/* Locks object and file and catches up; `create` is O_CREAT or 0. The object is not locked while the file is another's. */
static cd_status enter_file(file_store *s, int create, int mode, const cd_patience *patience, int *fd_p)
{
    uint64_t began = cd_now_ns();
    cd_waiter waiter = cd_waiter_start(patience);
    for (;;) {
        pthread_mutex_lock(&s->lock);
        int fd = -1;
        int error = open_locked(s, create, mode, &fd);
        if (!error) {
            cd_status status = catch_up(s, fd);
            if (status != CD_OK)
                leave(s, fd);
            else
                *fd_p = fd;
            return status;
        }
        pthread_mutex_unlock(&s->lock);
        if (error != EWOULDBLOCK && error != EINTR)
            return cd_fail_errno(CD_STORE, error, "cannot open the store's file %s", s->path);
        cd_status status = cd_waiter_turn(&waiter);
        if (status == CD_TIMED_OUT && cd_now_ns() - began < CD_NS_PER_S)
            continue; /* holders are quick: a deadline that passed still gets its look */
        if (status == CD_TIMED_OUT)
            return cd_fail(CD_STORE_TIMEOUT, "timeout: %s is locked by another process", s->path);
        CD_TRY(status);
    }
}

static cd_status enter(file_store *s, int mode, const cd_patience *patience, int *fd_p)
{
    return enter_file(s, O_CREAT, mode, patience, fd_p);
}

/* The key with its '/'; `lead` is "/" or "-/". NULL when memory ran out (recorded). */
static cd_bytes lengthen(const char *lead, cd_bytes key)
{
    size_t lead_bytes = strlen(lead);
    char *data = malloc(lead_bytes + key.bytes);
    if (!data) {
        cd_fail(CD_NO_MEMORY, "no memory for a key of %zu bytes", key.bytes);
        return (cd_bytes){0};
    }
    memcpy(data, lead, lead_bytes);
    if (key.bytes)
        memcpy(data + lead_bytes, key.data, key.bytes);
    return (cd_bytes){data, lead_bytes + key.bytes};
}

static cd_entry *find(file_store *s, cd_bytes key)
{
    cd_bytes longer = lengthen("/", key);
    cd_entry *entry = longer.data ? cd_table_find(&s->table, longer) : NULL;
    free((void *)longer.data);
    return entry;
}

static cd_status write_key(cd_store *store, const char *lead, cd_bytes key, cd_bytes value, const cd_patience *patience)
{
    file_store *s = (file_store *)store;
    CD_TRY(check_usable(s));
    cd_bytes longer = lengthen(lead, key);
    if (!longer.data)
        return CD_NO_MEMORY;
    int fd;
    cd_status status = enter(s, LOCK_EX, patience, &fd);
    if (status == CD_OK) {
        status = write_record(s, fd, longer, value);
        leave(s, fd);
    }
    free((void *)longer.data);
    return status;
}

static cd_status file_set(cd_store *store, cd_bytes key, cd_bytes value, const cd_patience *patience)
{
    return write_key(store, "/", key, value, patience);
}

static cd_status file_delete(cd_store *store, cd_bytes key, bool *existed_p, const cd_patience *patience)
{
    CD_TRY(write_key(store, "-/", key, (cd_bytes){"", 0}, patience));
    *existed_p = true; /* as torch's: the log does not tell */
    return CD_OK;
}

static cd_status add_entered(file_store *s, int fd, cd_bytes key, int64_t delta, int64_t *value_p)
{
    cd_entry *entry;
    CD_TRY(cd_table_add(&s->table, key, delta, value_p, &entry));
    char text[24];
    size_t bytes = entry->value.bytes;
    memcpy(text, entry->value.data, bytes);
    return write_record(s, fd, key, (cd_bytes){text, bytes});
}

static cd_status add_raw(file_store *s, cd_bytes key, int64_t delta, int64_t *value_p, const cd_patience *patience)
{
    int fd;
    CD_TRY(enter(s, LOCK_EX, patience, &fd));
    cd_status status = add_entered(s, fd, key, delta, value_p);
    leave(s, fd);
    return status;
}

static cd_status file_add(cd_store *store, cd_bytes key, int64_t delta, int64_t *value_p, const cd_patience *patience)
{
    file_store *s = (file_store *)store;
    CD_TRY(check_usable(s));
    cd_bytes longer = lengthen("/", key);
    if (!longer.data)
        return CD_NO_MEMORY;
    cd_status status = add_raw(s, longer, delta, value_p, patience);
    free((void *)longer.data);
    return status;
}

static cd_status file_compare_set(cd_store *store, cd_bytes key, cd_bytes expected, cd_bytes desired, cd_buffer *out,
                                  const cd_patience *patience)
{
    file_store *s = (file_store *)store;
    CD_TRY(check_usable(s));
    cd_bytes longer = lengthen("/", key);
    if (!longer.data)
        return CD_NO_MEMORY;
    int fd;
    cd_status status = enter(s, LOCK_EX, patience, &fd);
    if (status == CD_OK) {
        cd_bytes result;
        cd_entry *stored;
        status = cd_table_compare_set(&s->table, longer, expected, desired, &result, &stored);
        if (status == CD_OK)
            status = cd_buffer_copy(result.data, result.bytes, out);
        if (status == CD_OK && stored) {
            status = write_record(s, fd, longer, desired);
            if (status != CD_OK)
                cd_buffer_free(out);
        }
        leave(s, fd);
    }
    free((void *)longer.data);
    return status;
}

static cd_status file_check(cd_store *store, const cd_bytes *keys, size_t count, bool *all_p, const cd_patience *patience)
{
    file_store *s = (file_store *)store;
    CD_TRY(check_usable(s));
    int fd;
    CD_TRY(enter(s, LOCK_SH, patience, &fd));
    bool all = true;
    for (size_t i = 0; i < count && all; i++)
        all = find(s, keys[i]) != NULL;
    leave(s, fd);
    *all_p = all;
    return CD_OK;
}

static cd_status file_wait(cd_store *store, const cd_bytes *keys, size_t count, const cd_patience *patience)
{
    uint64_t budget_ns = cd_deadline_left_ns(patience->deadline);
    cd_waiter waiter = cd_waiter_start(patience);
    for (;;) {
        bool all;
        CD_TRY(file_check(store, keys, count, &all, patience));
        if (all)
            return CD_OK;
        cd_status status = cd_waiter_check(&waiter);
        if (status == CD_TIMED_OUT)
            return cd_store_expired(budget_ns, "/", keys, count);
        CD_TRY(status);
        uint64_t left = cd_deadline_left_ns(patience->deadline);
        cd_sleep_ns(left < LOOK_NS ? left : LOOK_NS);
    }
}

static cd_status file_get(cd_store *store, cd_bytes key, cd_buffer *out, const cd_patience *patience)
{
    file_store *s = (file_store *)store;
    for (;;) {
        CD_TRY(file_wait(store, &key, 1, patience));
        int fd;
        CD_TRY(enter(s, LOCK_SH, patience, &fd));
        cd_entry *entry = find(s, key);
        cd_status status = entry ? cd_buffer_copy(entry->value.data, entry->value.bytes, out) : CD_OK;
        leave(s, fd);
        if (entry || status != CD_OK) /* otherwise it was deleted in between */
            return status;
    }
}

static cd_status file_num_keys(cd_store *store, int64_t *count_p, const cd_patience *patience)
{
    file_store *s = (file_store *)store;
    CD_TRY(check_usable(s));
    int fd;
    CD_TRY(enter(s, LOCK_SH, patience, &fd));
    *count_p = s->table.values;
    leave(s, fd);
    return CD_OK;
}

static cd_status file_list_keys(cd_store *store, cd_buffer **out_keys, size_t *count_p, const cd_patience *patience)
{
    file_store *s = (file_store *)store;
    CD_TRY(check_usable(s));
    int fd;
    CD_TRY(enter(s, LOCK_SH, patience, &fd));
    size_t count = 0;
    cd_buffer *keys = calloc((size_t)s->table.values + 1, sizeof *keys);
    cd_status status = keys ? CD_OK : cd_fail(CD_NO_MEMORY, "no memory for the list of keys");
    for (size_t i = 0; status == CD_OK && i < s->table.slot_count; i++)
        for (cd_entry *e = s->table.slots[i]; e && status == CD_OK; e = e->next)
            if (e->has_value && e->key_bytes && e->key[0] == '/') {
                status = cd_buffer_copy(e->key + 1, e->key_bytes - 1, &keys[count]);
                count += status == CD_OK;
            }
    leave(s, fd);
    if (status != CD_OK) {
        cd_buffers_free(keys, count);
        return status;
    }
    *out_keys = keys;
    *count_p = count;
    return CD_OK;
}

/* ---- the object ---- */

static void file_close(cd_store *store)
{
    atomic_store_explicit(&((file_store *)store)->closed, true, memory_order_release);
}

/* The last one that leaves removes the file, if all that were announced have been there. In one turn: of two that leave at once
 * neither would be the last otherwise, and who opens the file meanwhile would write to one that is gone. */
static void sign_off(file_store *s)
{
    cd_patience patience = {.deadline = cd_deadline_after_ns(CD_NS_PER_S)};
    int64_t left, refs;
    int fd;
    if (s->pid != getpid() || enter_file(s, 0, LOCK_EX, &patience, &fd) != CD_OK)
        return;
    if (add_entered(s, fd, cd_bytes_of(LEFT_KEY), 1, &left) == CD_OK &&
        add_entered(s, fd, cd_bytes_of(REFS_KEY), -1, &refs) == CD_OK && refs == 0 && s->world >= 0 && left >= s->world)
        unlink(s->path);
    leave(s, fd);
}

static void file_free(cd_store *store)
{
    if (!store)
        return;
    file_store *s = (file_store *)store;
    sign_off(s);
    cd_table_clear(&s->table);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

static const cd_store_ops file_ops = {
    .name = "file",
    .set = file_set,
    .get = file_get,
    .add = file_add,
    .compare_set = file_compare_set,
    .check = file_check,
    .wait = file_wait,
    .delete_key = file_delete,
    .num_keys = file_num_keys,
    .append = cd_store_append_by_swap,
    .multi_get = cd_store_multi_get_each,
    .multi_set = cd_store_multi_set_each,
    .list_keys = file_list_keys,
    .close = file_close,
    .free = file_free,
};

cd_status cd_file_store_open(const char *path, int64_t world, const cd_patience *patience, cd_store **out)
{
    size_t bytes = strlen(path) + 1;
    file_store *s = calloc(1, sizeof *s + bytes);
    if (!s)
        return cd_fail(CD_NO_MEMORY, "no memory for a store");
    cd_store_init(&s->base, &file_ops);
    memcpy(s->path, path, bytes);
    s->world = world;
    s->pid = getpid();
    pthread_mutex_init(&s->lock, NULL);
    cd_status status = cd_table_init(&s->table);
    int64_t refs;
    if (status == CD_OK)
        status = add_raw(s, cd_bytes_of(REFS_KEY), 1, &refs, patience);
    if (status != CD_OK) {
        cd_table_clear(&s->table);
        pthread_mutex_destroy(&s->lock);
        free(s);
        return status;
    }
    *out = &s->base;
    return CD_OK;
}
