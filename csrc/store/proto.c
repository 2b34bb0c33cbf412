#include "store/proto.h"

/* k key, v value, 4 and 8 integers of that width, * a count of which the rest is repeated. */
static const char *const shapes[CD_REQUESTS] = {
    [CD_REQ_VALIDATE] = "4",     [CD_REQ_SET] = "kv",       [CD_REQ_COMPARE_SET] = "kvv", [CD_REQ_GET] = "k",
    [CD_REQ_ADD] = "k8",         [CD_REQ_CHECK] = "*k",     [CD_REQ_WAIT] = "*k",         [CD_REQ_NUM_KEYS] = "",
    [CD_REQ_DELETE] = "k",       [CD_REQ_APPEND] = "kv",    [CD_REQ_MULTI_GET] = "*k",    [CD_REQ_MULTI_SET] = "*kv",
    [CD_REQ_CANCEL_WAIT] = "",   [CD_REQ_PING] = "4",       [CD_REQ_QUEUE_PUSH] = "kv",   [CD_REQ_QUEUE_POP] = "k",
    [CD_REQ_QUEUE_LEN] = "k",    [CD_REQ_LIST_KEYS] = "",   [CD_REQ_BARRIER] = "k8",
};

/* Bytes of the next part, 0 when its length has not come yet; bad lengths set *bad_p. */
static uint64_t part_bytes(char kind, const uint8_t *data, size_t have, bool *bad_p)
{
    if (kind == '4')
        return 4;
    if (kind == '8' || kind == '*')
        return 8;
    if (have < 8)
        return 0;
    cd_reader reader = cd_reader_of(data, 8);
    uint64_t bytes = cd_take_u64(&reader);
    if (bytes > (kind == 'k' ? CD_STORE_KEY_MOST : CD_STORE_VALUE_MOST)) {
        *bad_p = true;
        return 0;
    }
    return 8 + bytes;
}

cd_scan_result cd_proto_scan(cd_scan *scan, const uint8_t *data, size_t bytes)
{
    if (!bytes)
        return CD_SCAN_MORE;
    if (!scan->shape) {
        if (data[0] >= CD_REQUESTS)
            return CD_SCAN_BAD;
        scan->shape = shapes[data[0]];
        scan->at = 1;
    }
    for (;;) {
        if (!*scan->shape && scan->again && scan->left > 1) {
            scan->left--;
            scan->shape = scan->again;
        }
        if (!*scan->shape)
            return CD_SCAN_DONE;
        bool bad = false;
        uint64_t part = part_bytes(*scan->shape, data + scan->at, bytes - scan->at, &bad);
        if (bad || scan->at + part > CD_STORE_REQUEST_MOST)
            return CD_SCAN_BAD;
        if (!part || part > bytes - scan->at)
            return CD_SCAN_MORE;
        if (*scan->shape == '*') {
            cd_reader reader = cd_reader_of(data + scan->at, 8);
            scan->left = cd_take_u64(&reader);
            if (scan->left > CD_STORE_KEYS_MOST)
                return CD_SCAN_BAD;
            scan->again = scan->shape + 1;
            scan->at += part;
            if (!scan->left)
                return CD_SCAN_DONE;
            scan->shape++;
            continue;
        }
        scan->at += part;
        scan->shape++;
    }
}
