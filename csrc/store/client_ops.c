#include "base/host.h"
#include "net/sock.h"
#include "store/client_impl.h"

#include <poll.h>
#include <stdlib.h>
#include <string.h>

/* What a server (torch's older one has no limits) may make us allocate before its bytes have come. */
#define TRUST_BYTES ((size_t)1 << 20)
#define ANSWER_MOST ((uint64_t)1 << 32)

/* ---- answers ---- */

cd_status tcp_read(tcp_line *line, void *out, size_t bytes, const cd_patience *patience)
{
    cd_waiter waiter = cd_waiter_start(patience);
    uint64_t began_ns = 0;
    uint8_t *next = out;
    for (;;) {
        size_t have = line->end - line->start, part = have < bytes ? have : bytes;
        memcpy(next, line->buffer + line->start, part);
        line->start += part;
        next += part;
        bytes -= part;
        if (!bytes)
            return CD_OK;
        if (bytes > sizeof line->buffer)
            return cd_sock_recv_all(line->fd, next, bytes, patience);
        size_t got = 0;
        CD_TRY(cd_sock_recv_some(line->fd, line->buffer, sizeof line->buffer, &got));
        line->start = 0;
        line->end = got;
        if (!got)
            CD_TRY(cd_sock_await(line->fd, POLLIN, &waiter, &began_ns));
    }
}

static cd_status read_byte(tcp_line *line, void *out, const cd_patience *patience)
{
    return tcp_read(line, out, 1, patience);
}

static cd_status read_number(tcp_line *line, void *out, const cd_patience *patience)
{
    uint8_t raw[8];
    CD_TRY(tcp_read(line, raw, sizeof raw, patience));
    cd_reader reader = cd_reader_of(raw, sizeof raw);
    *(uint64_t *)out = cd_take_u64(&reader);
    return CD_OK;
}

static cd_status read_string(tcp_line *line, void *out, const cd_patience *patience)
{
    uint64_t bytes;
    CD_TRY(read_number(line, &bytes, patience));
    if (bytes > ANSWER_MOST)
        return cd_fail(CD_PROTOCOL, "the store announced a value of %llu bytes", (unsigned long long)bytes);
    size_t room = bytes < TRUST_BYTES ? (size_t)bytes : TRUST_BYTES, have = 0;
    uint8_t *data = malloc(room + 1);
    while (data) {
        cd_status status = tcp_read(line, data + have, room - have, patience);
        if (status != CD_OK) {
            free(data);
            return status;
        }
        have = room;
        if (have == bytes) {
            *(cd_buffer *)out = (cd_buffer){data, have};
            return CD_OK;
        }
        room = 2 * room < bytes ? 2 * room : (size_t)bytes;
        uint8_t *larger = realloc(data, room + 1);
        if (!larger)
            free(data);
        data = larger;
    }
    return cd_fail(CD_NO_MEMORY, "no memory for a value of %llu bytes", (unsigned long long)bytes);
}

typedef struct {
    cd_buffer *list;
    size_t count;
} string_list;

static cd_status read_strings(tcp_line *line, void *out, const cd_patience *patience)
{
    string_list *strings = out;
    for (size_t i = 0; i < strings->count; i++) {
        cd_status status = read_string(line, &strings->list[i], patience);
        if (status != CD_OK) {
            while (i)
                cd_buffer_free(&strings->list[--i]);
            return status;
        }
    }
    return CD_OK;
}

static cd_status read_key_list(tcp_line *line, void *out, const cd_patience *patience)
{
    string_list *keys = out;
    uint64_t count;
    CD_TRY(read_number(line, &count, patience));
    size_t room = 0, have = 0;
    cd_status status = CD_OK;
    for (; status == CD_OK && have < count; have += status == CD_OK) {
        if (have == room) {
            room = room ? 2 * room : 64; /* grows with what has come, not with what was announced */
            cd_buffer *larger = realloc(keys->list, room * sizeof *larger);
            if (!larger) {
                status = cd_fail(CD_NO_MEMORY, "no memory for the list of keys");
                break;
            }
            keys->list = larger;
        }
        status = read_string(line, &keys->list[have], patience);
    }
    keys->count = have;
    return status;
}

static cd_status read_popped(tcp_line *line, void *out, const cd_patience *patience)
{
    uint64_t queued;
    CD_TRY(read_number(line, &queued, patience));
    return queued ? read_string(line, out, patience) : CD_OK;
}

/* ---- requests ---- */

/* Room for a request of `bytes`; the writer stands behind the opcode. */
static cd_status begin(tcp_message *message, uint8_t request, size_t bytes, cd_writer *out)
{
    message->bytes = 1 + bytes;
    message->data = message->small;
    if (message->bytes > sizeof message->small)
        message->data = malloc(message->bytes);
    if (!message->data)
        return cd_fail(CD_NO_MEMORY, "no memory for a request of %zu bytes", message->bytes);
    *out = cd_writer_of(message->data, message->bytes);
    cd_put_u8(out, request);
    return CD_OK;
}

static void end(tcp_message *message)
{
    if (message->data != message->small)
        free(message->data);
}

static size_t key_room(cd_bytes key)
{
    return 8 + 1 + key.bytes;
}

static void put_key(cd_writer *writer, cd_bytes key)
{
    cd_put_u64(writer, 1 + key.bytes);
    cd_put_u8(writer, '/');
    cd_put_raw(writer, key.data, key.bytes);
}

static cd_status check_key(cd_bytes key)
{
    if (key.bytes + 1 > CD_STORE_KEY_MOST)
        return cd_fail(CD_BAD_ARGUMENT, "key of %zu bytes: the TCP store takes at most %u", key.bytes, CD_STORE_KEY_MOST - 1);
    return CD_OK;
}

static cd_status check_value(cd_bytes key, cd_bytes value)
{
    if (value.bytes > CD_STORE_VALUE_MOST)
        return cd_fail(
            CD_BAD_ARGUMENT,
            "value of %zu bytes for key '%.*s': the TCP store takes at most %u (8 MiB); split it over keys",
            value.bytes, (int)key.bytes, (const char *)key.data, CD_STORE_VALUE_MOST);
    return CD_OK;
}

/* A request of one key and up to two values. */
static cd_status ask(cd_store *store, uint8_t request, cd_bytes key, const cd_bytes *values, int count,
                     cd_status (*read)(tcp_line *, void *, const cd_patience *), void *out, const cd_patience *patience)
{
    CD_TRY(check_key(key));
    size_t bytes = key_room(key);
    for (int i = 0; i < count; i++) {
        CD_TRY(check_value(key, values[i]));
        bytes += 8 + values[i].bytes;
    }
    tcp_message message;
    cd_writer writer;
    CD_TRY(begin(&message, request, bytes, &writer));
    put_key(&writer, key);
    for (int i = 0; i < count; i++)
        cd_put_string(&writer, values[i].data, values[i].bytes);
    cd_status status = tcp_quick((tcp_store *)store, &message, read, out, patience);
    end(&message);
    return status;
}

/* A request of a count and many keys (with values, if there are any). */
static cd_status begin_many(tcp_message *message, uint8_t request, const cd_bytes *keys, const cd_bytes *values, size_t count)
{
    if (count > CD_STORE_KEYS_MOST)
        return cd_fail(CD_BAD_ARGUMENT, "%zu keys in one call: the TCP store takes at most %u", count, CD_STORE_KEYS_MOST);
    size_t bytes = 8;
    for (size_t i = 0; i < count; i++) {
        CD_TRY(check_key(keys[i]));
        if (values)
            CD_TRY(check_value(keys[i], values[i]));
        bytes += key_room(keys[i]) + (values ? 8 + values[i].bytes : 0);
    }
    if (bytes >= CD_STORE_REQUEST_MOST)
        return cd_fail(CD_BAD_ARGUMENT, "%zu bytes in one call: the TCP store takes at most %zu", bytes, CD_STORE_REQUEST_MOST);
    cd_writer writer;
    CD_TRY(begin(message, request, bytes, &writer));
    cd_put_u64(&writer, count);
    for (size_t i = 0; i < count; i++) {
        put_key(&writer, keys[i]);
        if (values)
            cd_put_string(&writer, values[i].data, values[i].bytes);
    }
    return CD_OK;
}

static cd_status tcp_set(cd_store *store, cd_bytes key, cd_bytes value, const cd_patience *patience)
{
    return ask(store, CD_REQ_SET, key, &value, 1, NULL, NULL, patience);
}

static cd_status tcp_append(cd_store *store, cd_bytes key, cd_bytes value, const cd_patience *patience)
{
    return ask(store, CD_REQ_APPEND, key, &value, 1, NULL, NULL, patience);
}

static cd_status tcp_compare_set(cd_store *store, cd_bytes key, cd_bytes expected, cd_bytes desired, cd_buffer *out,
                                 const cd_patience *patience)
{
    cd_bytes values[2] = {expected, desired};
    return ask(store, CD_REQ_COMPARE_SET, key, values, 2, read_string, out, patience);
}

cd_status tcp_add_raw(tcp_store *s, cd_bytes key, int64_t delta, int64_t *value_p, const cd_patience *patience)
{
    tcp_message message;
    cd_writer writer;
    CD_TRY(begin(&message, CD_REQ_ADD, 8 + key.bytes + 8, &writer));
    cd_put_string(&writer, key.data, key.bytes);
    cd_put_u64(&writer, (uint64_t)delta);
    uint64_t value;
    cd_status status = tcp_quick(s, &message, read_number, &value, patience);
    end(&message);
    if (status == CD_OK)
        *value_p = (int64_t)value;
    return status;
}

static cd_status tcp_add(cd_store *store, cd_bytes key, int64_t delta, int64_t *value_p, const cd_patience *patience)
{
    CD_TRY(check_key(key));
    char longer[CD_STORE_KEY_MOST];
    longer[0] = '/';
    if (key.bytes)
        memcpy(longer + 1, key.data, key.bytes);
    return tcp_add_raw((tcp_store *)store, (cd_bytes){longer, 1 + key.bytes}, delta, value_p, patience);
}

static cd_status tcp_check(cd_store *store, const cd_bytes *keys, size_t count, bool *all_p, const cd_patience *patience)
{
    *all_p = true;
    if (!count)
        return CD_OK;
    tcp_message message;
    CD_TRY(begin_many(&message, CD_REQ_CHECK, keys, NULL, count));
    uint8_t answer;
    cd_status status = tcp_quick((tcp_store *)store, &message, read_byte, &answer, patience);
    end(&message);
    if (status == CD_OK)
        *all_p = answer == CD_ANSWER_READY;
    return status;
}

/* Looks first, on the shared connection: mostly the keys are there, and then this is the one round trip. */
static cd_status tcp_wait(cd_store *store, const cd_bytes *keys, size_t count, const cd_patience *patience)
{
    uint64_t budget_ns = cd_deadline_left_ns(patience->deadline);
    bool all;
    CD_TRY(tcp_check(store, keys, count, &all, patience));
    if (all)
        return CD_OK;
    if (patience->deadline.at_ns == 0)
        return cd_store_expired(0, "/", keys, count);
    tcp_message message;
    CD_TRY(begin_many(&message, CD_REQ_WAIT, keys, NULL, count));
    cd_status status = tcp_await((tcp_store *)store, &message, keys, count, budget_ns, patience);
    end(&message);
    return status;
}

/* The plain GET ends the connection of torch's older server when the key is missing, and WAIT before it costs a second round
 * trip. A compare_set that expects a fresh random value, and would store the same, tells both apart in one. */
static cd_status tcp_get(cd_store *store, cd_bytes key, cd_buffer *out, const cd_patience *patience)
{
    uint8_t nonce[16];
    CD_TRY(cd_host_random(nonce, sizeof nonce));
    cd_bytes missing = {nonce, sizeof nonce};
    cd_buffer seen = {0};
    CD_TRY(tcp_compare_set(store, key, missing, missing, &seen, patience));
    if (seen.bytes != sizeof nonce || memcmp(seen.data, nonce, sizeof nonce) != 0) {
        *out = seen;
        return CD_OK;
    }
    cd_buffer_free(&seen);
    CD_TRY(tcp_wait(store, &key, 1, patience));
    return ask(store, CD_REQ_GET, key, NULL, 0, read_string, out, patience);
}

static cd_status tcp_delete(cd_store *store, cd_bytes key, bool *existed_p, const cd_patience *patience)
{
    uint64_t count = 0;
    CD_TRY(ask(store, CD_REQ_DELETE, key, NULL, 0, read_number, &count, patience));
    *existed_p = count != 0;
    return CD_OK;
}

static cd_status tcp_num_keys(cd_store *store, int64_t *count_p, const cd_patience *patience)
{
    tcp_message message;
    cd_writer writer;
    CD_TRY(begin(&message, CD_REQ_NUM_KEYS, 0, &writer));
    uint64_t count;
    CD_TRY(tcp_quick((tcp_store *)store, &message, read_number, &count, patience));
    *count_p = (int64_t)count;
    return CD_OK;
}

static cd_status tcp_multi_get(cd_store *store, const cd_bytes *keys, size_t count, cd_buffer *out, const cd_patience *patience)
{
    CD_TRY(tcp_wait(store, keys, count, patience));
    if (!count)
        return CD_OK;
    tcp_message message;
    CD_TRY(begin_many(&message, CD_REQ_MULTI_GET, keys, NULL, count));
    string_list strings = {out, count};
    cd_status status = tcp_quick((tcp_store *)store, &message, read_strings, &strings, patience);
    end(&message);
    return status;
}

static cd_status tcp_multi_set(cd_store *store, const cd_bytes *keys, const cd_bytes *values, size_t count,
                               const cd_patience *patience)
{
    if (!count)
        return CD_OK;
    tcp_message message;
    CD_TRY(begin_many(&message, CD_REQ_MULTI_SET, keys, values, count));
    cd_status status = tcp_quick((tcp_store *)store, &message, NULL, NULL, patience);
    end(&message);
    return status;
}

static cd_status tcp_push(cd_store *store, cd_bytes key, cd_bytes value, const cd_patience *patience)
{
    return ask(store, CD_REQ_QUEUE_PUSH, key, &value, 1, NULL, NULL, patience);
}

static cd_status tcp_pop(cd_store *store, cd_bytes key, bool block, cd_buffer *out, const cd_patience *patience)
{
    for (;;) {
        cd_buffer item = {0};
        CD_TRY(ask(store, CD_REQ_QUEUE_POP, key, NULL, 0, read_popped, &item, patience));
        if (item.data) {
            *out = item;
            return CD_OK;
        }
        if (!block)
            return cd_store_queue_empty(key);
        if (patience->deadline.at_ns && cd_deadline_passed(patience->deadline))
            return cd_store_expired(0, "/", &key, 1);
        CD_TRY(tcp_wait(store, &key, 1, patience)); /* then another may be faster: look again */
    }
}

static cd_status tcp_queue_len(cd_store *store, cd_bytes key, int64_t *count_p, const cd_patience *patience)
{
    uint64_t count;
    CD_TRY(ask(store, CD_REQ_QUEUE_LEN, key, NULL, 0, read_number, &count, patience));
    *count_p = (int64_t)count;
    return CD_OK;
}

static cd_status tcp_list_keys(cd_store *store, cd_buffer **out_keys, size_t *count_p, const cd_patience *patience)
{
    tcp_message message;
    cd_writer writer;
    CD_TRY(begin(&message, CD_REQ_LIST_KEYS, 0, &writer));
    string_list keys = {0};
    cd_status status = tcp_quick((tcp_store *)store, &message, read_key_list, &keys, patience);
    if (status != CD_OK) {
        cd_buffers_free(keys.list, keys.count);
        return status;
    }
    size_t kept = 0;
    for (size_t i = 0; i < keys.count; i++) {
        cd_buffer key = keys.list[i];
        if (!key.bytes || *(char *)key.data != '/') { /* the server's own */
            free(key.data);
            continue;
        }
        key.bytes--;
        memmove(key.data, (char *)key.data + 1, key.bytes);
        keys.list[kept++] = key;
    }
    *out_keys = keys.list;
    *count_p = kept;
    return CD_OK;
}

static bool tcp_local_address(cd_store *store, char *out, size_t bytes)
{
    tcp_store *s = (tcp_store *)store;
    if (tcp_is_inherited(s))
        return false;
    pthread_mutex_lock(&s->lock);
    bool connected = s->quick.fd >= 0;
    if (connected)
        cd_sock_local_address(s->quick.fd, out, bytes);
    pthread_mutex_unlock(&s->lock);
    return connected;
}

const cd_store_ops tcp_ops = {
    .name = "tcp",
    .set = tcp_set,
    .get = tcp_get,
    .add = tcp_add,
    .compare_set = tcp_compare_set,
    .check = tcp_check,
    .wait = tcp_wait,
    .delete_key = tcp_delete,
    .num_keys = tcp_num_keys,
    .append = tcp_append,
    .multi_get = tcp_multi_get,
    .multi_set = tcp_multi_set,
    .queue_push = tcp_push,
    .queue_pop = tcp_pop,
    .queue_len = tcp_queue_len,
    .list_keys = tcp_list_keys,
    .local_address = tcp_local_address,
    .close = tcp_close,
    .free = tcp_free,
};
