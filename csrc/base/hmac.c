#include "base/hmac.h"

#include <string.h>

#define BLOCK_BYTES 64

static const uint32_t rounds[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01,
    0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc,
    0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147,
    0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08,
    0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208,
    0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static uint32_t turn(uint32_t x, int bits)
{
    return x >> bits | x << (32 - bits);
}

static void mix(uint32_t state[8], const uint8_t *block)
{
    uint32_t w[64];
    for (int i = 0; i < 16; i++)
        w[i] = (uint32_t)block[4 * i] << 24 | (uint32_t)block[4 * i + 1] << 16 |
               (uint32_t)block[4 * i + 2] << 8 | block[4 * i + 3];
    for (int i = 16; i < 64; i++) {
        uint32_t low = turn(w[i - 15], 7) ^ turn(w[i - 15], 18) ^ w[i - 15] >> 3;
        uint32_t high = turn(w[i - 2], 17) ^ turn(w[i - 2], 19) ^ w[i - 2] >> 10;
        w[i] = w[i - 16] + low + w[i - 7] + high;
    }
    uint32_t v[8];
    memcpy(v, state, sizeof v);
    for (int i = 0; i < 64; i++) {
        uint32_t sum_e = turn(v[4], 6) ^ turn(v[4], 11) ^ turn(v[4], 25);
        uint32_t chosen = (v[4] & v[5]) ^ (~v[4] & v[6]);
        uint32_t first = v[7] + sum_e + chosen + rounds[i] + w[i];
        uint32_t sum_a = turn(v[0], 2) ^ turn(v[0], 13) ^ turn(v[0], 22);
        uint32_t second = sum_a + ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
        memmove(v + 1, v, 7 * sizeof *v);
        v[4] += first;
        v[0] = first + second;
    }
    for (int i = 0; i < 8; i++)
        state[i] += v[i];
}

void cd_sha256_start(cd_sha256 *hash)
{
    *hash = (cd_sha256){.state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c,
                                  0x1f83d9ab, 0x5be0cd19}};
}

void cd_sha256_add(cd_sha256 *hash, const void *data, size_t bytes)
{
    const uint8_t *next = data;
    while (bytes) {
        size_t used = hash->bytes % BLOCK_BYTES;
        size_t part = BLOCK_BYTES - used < bytes ? BLOCK_BYTES - used : bytes;
        memcpy(hash->block + used, next, part);
        hash->bytes += part;
        next += part;
        bytes -= part;
        if (hash->bytes % BLOCK_BYTES == 0)
            mix(hash->state, hash->block);
    }
}

void cd_sha256_finish(cd_sha256 *hash, uint8_t out[CD_SHA256_BYTES])
{
    uint64_t bits = hash->bytes * 8;
    const uint8_t one = 0x80, zero = 0;
    cd_sha256_add(hash, &one, 1);
    while (hash->bytes % BLOCK_BYTES != BLOCK_BYTES - 8)
        cd_sha256_add(hash, &zero, 1);
    uint8_t tail[8];
    for (int i = 0; i < 8; i++)
        tail[i] = (uint8_t)(bits >> (56 - 8 * i));
    cd_sha256_add(hash, tail, sizeof tail);
    for (int i = 0; i < CD_SHA256_BYTES; i++)
        out[i] = (uint8_t)(hash->state[i / 4] >> (24 - 8 * (i % 4)));
}

void cd_hmac_sha256(const void *key, size_t key_bytes, const void *text, size_t text_bytes, uint8_t out[CD_SHA256_BYTES])
{
    uint8_t pad[BLOCK_BYTES] = {0};
    cd_sha256 hash;
    if (key_bytes > BLOCK_BYTES) {
        cd_sha256_start(&hash);
        cd_sha256_add(&hash, key, key_bytes);
        cd_sha256_finish(&hash, pad);
    } else if (key_bytes) {
        memcpy(pad, key, key_bytes);
    }
    for (int i = 0; i < BLOCK_BYTES; i++)
        pad[i] ^= 0x36;
    cd_sha256_start(&hash);
    cd_sha256_add(&hash, pad, sizeof pad);
    cd_sha256_add(&hash, text, text_bytes);
    uint8_t inner[CD_SHA256_BYTES];
    cd_sha256_finish(&hash, inner);
    for (int i = 0; i < BLOCK_BYTES; i++)
        pad[i] ^= 0x36 ^ 0x5c;
    cd_sha256_start(&hash);
    cd_sha256_add(&hash, pad, sizeof pad);
    cd_sha256_add(&hash, inner, sizeof inner);
    cd_sha256_finish(&hash, out);
}

bool cd_hmac_equal(const void *a, const void *b, size_t bytes)
{
    const volatile uint8_t *x = a, *y = b; /* volatile: the compiler may not leave the loop early */
    uint8_t different = 0;
    for (size_t i = 0; i < bytes; i++)
        different |= (uint8_t)(x[i] ^ y[i]);
    return different == 0;
}
