/* SHA-256 and HMAC-SHA256 (FIPS 180-4, RFC 2104), for proofs that a peer knows the job secret. */
#ifndef CD_BASE_HMAC_H
#define CD_BASE_HMAC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define CD_SHA256_BYTES 32

typedef struct {
    uint32_t state[8];
    uint64_t bytes;
    uint8_t block[64];
} cd_sha256;

void cd_sha256_start(cd_sha256 *hash);
void cd_sha256_add(cd_sha256 *hash, const void *data, size_t bytes);
void cd_sha256_finish(cd_sha256 *hash, uint8_t out[CD_SHA256_BYTES]);

void cd_hmac_sha256(const void *key, size_t key_bytes, const void *text, size_t text_bytes, uint8_t out[CD_SHA256_BYTES]);
/* Equality in a time that does not depend on where the difference is. */
bool cd_hmac_equal(const void *a, const void *b, size_t bytes);

#endif
