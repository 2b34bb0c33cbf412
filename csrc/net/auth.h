/* The preamble of a connection within a job that has a secret: both ends prove with HMAC-SHA256 over both nonces that they know
 * it, before anything else is parsed. It proves who connects; it does not encrypt.
 *
 *     client → hello   "CDA1", nonce_c[32]
 *     server → reply   nonce_s[32], HMAC(secret, "server" nonce_c nonce_s)
 *     client → proof   HMAC(secret, "client" nonce_c nonce_s)         and, without waiting, its first request
 */
#ifndef CD_NET_AUTH_H
#define CD_NET_AUTH_H

#include "base/hmac.h"
#include "base/wait.h"

#define CD_NONCE_BYTES 32
#define CD_AUTH_HELLO_BYTES (4 + CD_NONCE_BYTES)
#define CD_AUTH_REPLY_BYTES (CD_NONCE_BYTES + CD_SHA256_BYTES)
#define CD_AUTH_PROOF_BYTES CD_SHA256_BYTES
/* A connection that has not proved itself by then is dropped. */
#define CD_AUTH_DEADLINE_NS (10 * CD_NS_PER_S)

typedef struct {
    uint8_t key[32];
    bool is_set;
} cd_secret;

/* CDIST_JOB_SECRET (64 hexadecimal digits), or not set. CD_BAD_ARGUMENT when it is something else; the text never shows it. */
cd_status cd_secret_read(cd_secret *out);

/* Both nonces of one handshake. */
typedef struct {
    uint8_t client[CD_NONCE_BYTES], server[CD_NONCE_BYTES];
} cd_auth;

/* The four steps, for ends that are event-driven. Errors: CD_REFUSED. */
cd_status cd_auth_hello(cd_auth *auth, uint8_t hello[CD_AUTH_HELLO_BYTES]);
cd_status cd_auth_reply(cd_auth *auth, const cd_secret *secret, const uint8_t hello[CD_AUTH_HELLO_BYTES],
                        uint8_t reply[CD_AUTH_REPLY_BYTES]);
cd_status cd_auth_prove(cd_auth *auth, const cd_secret *secret, const uint8_t reply[CD_AUTH_REPLY_BYTES],
                        uint8_t proof[CD_AUTH_PROOF_BYTES]);
cd_status cd_auth_verify(const cd_auth *auth, const cd_secret *secret, const uint8_t proof[CD_AUTH_PROOF_BYTES]);

/* The whole handshake on a connected socket, within patience and CD_AUTH_DEADLINE_NS. Without a set secret: nothing is sent.
 * Errors: CD_REFUSED (wrong secret, or no reply), CD_PEER_LOST (closed before its reply), those of patience. */
cd_status cd_auth_connect(int fd, const cd_secret *secret, const cd_patience *patience);
cd_status cd_auth_accept(int fd, const cd_secret *secret, const cd_patience *patience);

#endif
