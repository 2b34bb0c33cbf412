/* The wire protocol of the TCP store (torch's): opcodes, shapes of requests, and a scanner that finds the end of a request in a
 * stream that comes in any pieces. Integers are little-endian. */
#ifndef CD_STORE_PROTO_H
#define CD_STORE_PROTO_H

#include "base/wire.h"

#include <stdint.h>

enum {
    CD_REQ_VALIDATE = 0,
    CD_REQ_SET,
    CD_REQ_COMPARE_SET,
    CD_REQ_GET,
    CD_REQ_ADD,
    CD_REQ_CHECK,
    CD_REQ_WAIT,
    CD_REQ_NUM_KEYS,
    CD_REQ_DELETE,
    CD_REQ_APPEND,
    CD_REQ_MULTI_GET,
    CD_REQ_MULTI_SET,
    CD_REQ_CANCEL_WAIT,
    CD_REQ_PING,
    CD_REQ_QUEUE_PUSH,
    CD_REQ_QUEUE_POP,
    CD_REQ_QUEUE_LEN,
    CD_REQ_LIST_KEYS,
    CD_REQ_BARRIER,
    CD_REQUESTS
};

/* What a server without a free descriptor answers to any greeting, before the reason as text; then it closes. */
#define CD_STORE_FULL "full"
#define CD_STORE_MAGIC UINT32_C(0x3C85F7CE)
#define CD_STORE_KEY_MOST 8192u
#define CD_STORE_VALUE_MOST (8u << 20)
#define CD_STORE_KEYS_MOST 131072u
/* Of one request with many values. */
#define CD_STORE_REQUEST_MOST ((size_t)256 << 20)

/* Unsent answers of one connection: beyond it, whoever asks for one large value a hundred thousand times is dropped. */
#define CD_STORE_ANSWERS_MOST ((size_t)1 << 30)

enum { CD_ANSWER_READY = 0, CD_ANSWER_NOT_READY = 1, CD_ANSWER_STOP_WAITING = 0, CD_ANSWER_CANCELED = 1 };

/* Where the scan of the current request stands. Zero it before each request. */
typedef struct {
    const char *shape; /* what is still to come */
    const char *again; /* start of the repeated part, NULL if none */
    uint64_t left;     /* repetitions still to come */
    size_t at;         /* scanned bytes; the length of the request when done */
} cd_scan;

typedef enum { CD_SCAN_MORE, CD_SCAN_DONE, CD_SCAN_BAD } cd_scan_result;

/* Goes on scanning the request that begins at data, of which `bytes` have come. Reads nothing beyond, allocates nothing.
 * BAD: unknown opcode, or a key, value, count or request over its limit. */
cd_scan_result cd_proto_scan(cd_scan *scan, const uint8_t *data, size_t bytes);

#endif
