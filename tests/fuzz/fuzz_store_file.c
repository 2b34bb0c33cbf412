/* A store's file in which anything stands: what can be read is read alike by two stores, and writing to it works. */
#include "fuzz.h"
#include "store/kinds.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char path[64];

static void remove_file(void)
{
    unlink(path);
}

static void write_file(const uint8_t *data, size_t bytes)
{
    if (!path[0]) {
        snprintf(path, sizeof path, "/tmp/cdist-fuzz-file-%d", (int)getpid());
        atexit(remove_file);
    }
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    FUZZ_CHECK(fd >= 0 && write(fd, data, bytes) == (ssize_t)bytes);
    close(fd);
}

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

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    write_file(data, bytes);
    cd_patience patience = cd_patience_until(cd_deadline_after_ns(10 * CD_NS_PER_S), 1);
    cd_store *s, *other;
    if (cd_file_store_open(path, -1, &patience, &s) != CD_OK)
        return 0; /* its counter of users holds no number */
    if (cd_file_store_open(path, -1, &patience, &other) == CD_OK) {
        use(s, other, &patience);
        cd_store_release(other);
    }
    cd_store_release(s);
    return 0;
}
