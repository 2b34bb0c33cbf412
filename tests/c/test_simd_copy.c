/* Copies of every length and alignment around the places where the loops begin and end: the right bytes, and none beside them. */
#include "check.h"

#include "simd/copy.h"

enum { ROOM = 1 << 14, GUARD = 64 };

typedef void (*copy_func)(void *to, const void *from, size_t bytes);

static void check_copy(copy_func copy, size_t bytes, size_t to_at, size_t from_at)
{
    static _Alignas(4096) unsigned char from[ROOM], to[ROOM];
    for (size_t i = 0; i < ROOM; i++)
        from[i] = (unsigned char)(i * 7 + i / 251);
    memset(to, 0xEE, bytes + to_at + 2 * GUARD);
    copy(to + GUARD + to_at, from + from_at, bytes);
    CHECK(memcmp(to + GUARD + to_at, from + from_at, bytes) == 0);
    for (size_t i = 0; i < GUARD + to_at; i++)
        CHECK(to[i] == 0xEE);
    for (size_t i = 0; i < GUARD; i++)
        CHECK(to[GUARD + to_at + bytes + i] == 0xEE);
}

int main(void)
{
    static const copy_func copies[] = {cd_copy_near, cd_copy_far};
    static const size_t lengths[] = {0, 1, 15, 63, 64, 65, 127, 128, 129, 2047, 2048, 2049, 2111, 2112, 2175, 2176, 2177, 8191, 8192};
    static const size_t places[] = {0, 1, 8, 16, 31, 63, 64, 80};
    for (size_t c = 0; c < 2; c++)
        for (size_t l = 0; l < sizeof lengths / sizeof *lengths; l++)
            for (size_t t = 0; t < sizeof places / sizeof *places; t++)
                for (size_t f = 0; f < sizeof places / sizeof *places; f++)
                    check_copy(copies[c], lengths[l], places[t], places[f]);
    return 0;
}
