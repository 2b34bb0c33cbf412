/* Frames on the control connections: every rank has one to rank 0 and, where there are several hosts, one to the deputy
 * (connect.c); these two pass on what concerns all. Private to group/. */
#ifndef CD_GROUP_CONTROL_H
#define CD_GROUP_CONTROL_H

#include "base/wait.h"

#include <stddef.h>
#include <stdint.h>

#define CD_MEMBER_NONCE_BYTES 16
#define CD_CONTROL_MAGIC UINT32_C(0x31574443) /* "CDW1" read as little endian: an other-endian peer is refused */
#define CD_CONTROL_MAX_BYTES (64u << 20)      /* the table of 100,000 members is 25 MB */

typedef enum {
    CD_CONTROL_HELLO = 1, /* rank → rank 0: cd_hello */
    CD_CONTROL_DATA,      /* rank → other rank's listener: cd_hello; the connection becomes a data link */
    CD_CONTROL_REFUSED,   /* answer to a hello, or end of bootstrap: a cd_error */
    CD_CONTROL_WELCOME,   /* answer to a hello: proof of the side that was dialled */
    CD_CONTROL_TABLE,     /* rank 0 → all: generation and all members */
    CD_CONTROL_ATTACHED,  /* rank → rank 0: uint8 whether the host's memory was attached */
    CD_CONTROL_HOSTS,     /* rank 0 → all: int32 host of each rank */
    CD_CONTROL_READY,     /* rank → rank 0: connected to all others */
    CD_CONTROL_GO,        /* rank 0 → all */
    CD_CONTROL_LOST,      /* a rank is lost: cd_notice */
    CD_CONTROL_BYE,       /* a rank left in good order: cd_notice with the default group's context, its last sequence as text;
                             without body in bootstrap: this rank gives up, and may come again */
    CD_CONTROL_ABORT,     /* a group was aborted: cd_notice with its context */
    CD_CONTROL_WAITING,   /* a rank waits: cd_notice with the group's context, as text the sequence, or "0 R" for a message
                             with rank R */
    CD_CONTROL_STALE,     /* answer to a hello that was meant for an earlier process: read the address again */
    CD_CONTROL_SECOND     /* rank → deputy: cd_hello; the connection becomes a control connection */
} cd_control_kind;

typedef struct {
    uint32_t magic;
    uint16_t kind;
    uint16_t pad;
    uint64_t bytes; /* of the body */
} cd_control_head;
_Static_assert(sizeof(cd_control_head) == 16, "crosses processes");

/* A lost host is noticed here before it is on the data connections (15 s), so that the text that names all its ranks comes
 * first. */
#define CD_CONTROL_PATIENCE_MS 12000u

/* One rank of the world, as all others know it. */
typedef struct {
    int32_t rank, world;
    uint8_t nonce[CD_MEMBER_NONCE_BYTES]; /* new for every init: tells this process from its predecessors */
    char boot_id[40];
    uint64_t net_namespace; /* inode: abstract Unix sockets reach no further; 0: wants no shared memory */
    uint64_t pid_namespace; /* inode: process ids mean the same only within one */
    uint32_t user, process;
    char address[48]; /* numeric, of the data listener */
    uint16_t port, pad[3];
    char host_name[40];
} cd_member;
_Static_assert(sizeof(cd_member) == 184, "crosses processes");
/* This process, with a fresh nonce. `address`, or what a setting names, or "": the route is to tell. A setting that names no
 * interface fails here, on every rank before it has met another. CD_BAD_ARGUMENT, CD_IO. */
cd_status cd_member_fill(cd_member *me, int rank, int world, bool shares_memory, const char *address);

typedef struct {
    cd_member me;
    uint8_t target[CD_MEMBER_NONCE_BYTES]; /* nonce of the process that this is meant for */
    uint8_t proof[32]; /* HMAC-SHA256 under the job secret of all of the above; both nonces are fresh, so it
                          cannot be used again */
} cd_hello;

#define CD_MEMBER_PROOF_BYTES 32
/* Fills / checks hello->proof. Without a secret proofs are zero and always fine. */
void cd_hello_sign(cd_hello *hello, const uint8_t *secret);
bool cd_hello_is_genuine(const cd_hello *hello, const uint8_t *secret);
/* The answer's proof: of the side that was dialled, over both nonces. */
void cd_answer_proof(const cd_hello *hello, const uint8_t *secret, uint8_t out[CD_MEMBER_PROOF_BYTES]);
bool cd_proof_equal(const uint8_t a[CD_MEMBER_PROOF_BYTES], const uint8_t b[CD_MEMBER_PROOF_BYTES]); /* in constant time */

/* What rank 0 says about all. A table must name every rank once, in order; its texts are made to end. Hosts may only be fewer
 * than `host_of` says: a rank that shares no memory after all is a host of its own. Errors: CD_PROTOCOL, nothing is taken. */
bool cd_member_shares_host(const cd_member *a, const cd_member *b); /* as far as they say */
bool cd_member_is_same_process(const cd_member *a, const cd_member *b);
cd_status cd_members_take(cd_member *members, const void *table, int world);
cd_status cd_hosts_take(int32_t *host_of, const int32_t *told, int world);

typedef struct {
    uint64_t context;
    int32_t rank; /* world rank concerned */
    int32_t code;
    char text[CD_ERROR_TEXT_BYTES];
} cd_notice;

/* An error that another process sent becomes one that may be raised here: its text ends, its code is a failure that we know
 * (CD_PROTOCOL otherwise). */
void cd_error_settle(cd_error *error);

/* Whether the other end has closed. */
bool cd_control_is_closed(int socket);

/* Whole frames over a non-blocking socket, under patience. Errors: CD_PEER_LOST when the other end closed, CD_PROTOCOL,
 * CD_TIMED_OUT, CD_IO and those of patience. */
cd_status cd_control_send(int socket, cd_control_kind kind, const void *body, size_t bytes, const cd_patience *patience);
cd_status cd_control_recv_head(int socket, cd_control_head *head, const cd_patience *patience);
cd_status cd_control_recv_body(int socket, void *body, size_t bytes, const cd_patience *patience);
/* The body of a REFUSED frame becomes the thread's error; never CD_OK. */
cd_status cd_control_recv_refusal(int socket, const cd_patience *patience);
/* The next frame must be of this kind and size. A REFUSED frame becomes the thread's error instead. */
cd_status cd_control_expect(int socket, cd_control_kind kind, void *body, size_t bytes, const cd_patience *patience);

#endif
