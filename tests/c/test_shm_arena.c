/* The arena: blocks do not overlap, are aligned, come back whole, and stay in the own region. */
#include "check.h"

#include "base/host.h"
#include "shm/arena.h"
#include "shm/segment.h"

#include <sys/stat.h>

#define REGION ((size_t)8 << 20)

static void test_blocks(void)
{
    cd_segment segment;
    cd_arena *arena;
    CHECK_OK(cd_segment_create(3 * REGION, &segment));
    CHECK_OK(cd_arena_open(segment.base, REGION, 3, 1, &arena));
    void *a, *b, *c, *whole;
    CHECK_OK(cd_arena_alloc(arena, 5, &a));
    CHECK_OK(cd_arena_alloc(arena, 0, &b));
    CHECK_OK(cd_arena_alloc(arena, 100000, &c));
    CHECK((uintptr_t)a % CD_LINE == 0 && (uintptr_t)b % CD_LINE == 0 && a != b);
    CHECK((uintptr_t)c % cd_host_page_bytes() == 0);
    CHECK(cd_arena_offset(arena, a, 5) == 0);
    CHECK(cd_arena_at(arena, 1, cd_arena_offset(arena, c, 100000)) == c);
    CHECK(cd_arena_offset(arena, segment.base, 1) == SIZE_MAX);
    CHECK(cd_arena_offset(arena, (char *)segment.base + 2 * REGION, 1) == SIZE_MAX);
    CHECK(cd_arena_offset(arena, (char *)segment.base + 2 * REGION - 1, 1) == REGION - 1);
    CHECK(cd_arena_offset(arena, (char *)segment.base + 2 * REGION - 1, 2) == SIZE_MAX);
    CHECK_FAILS(cd_arena_alloc(arena, REGION, &whole), CD_NO_MEMORY);
    CHECK_FAILS(cd_arena_alloc(arena, SIZE_MAX, &whole), CD_NO_MEMORY);
    cd_arena_release(arena, b);
    cd_arena_release(arena, a);
    cd_arena_release(arena, c);
    cd_arena_release(arena, NULL);
    CHECK_OK(cd_arena_alloc(arena, REGION, &whole));
    CHECK(whole == cd_arena_at(arena, 1, 0));
    cd_arena_release(arena, whole);
    /* Memory to which others may still write is not given out again. */
    CHECK_OK(cd_arena_alloc(arena, 100, &a));
    CHECK_OK(cd_arena_alloc(arena, 100, &b));
    cd_arena_retire(arena, segment.base);
    cd_arena_retire(arena, (char *)a + 99);
    cd_arena_release(arena, a);
    cd_arena_release(arena, b);
    CHECK_OK(cd_arena_alloc(arena, 1, &c));
    CHECK(c == b);
    cd_arena_release(arena, c);
    cd_arena_free(arena);
    cd_segment_free(&segment);
}

static void test_a_forked_child_gives_nothing_back(void)
{
    cd_segment segment;
    cd_arena *arena;
    CHECK_OK(cd_segment_create(REGION, &segment));
    CHECK_OK(cd_arena_open(segment.base, REGION, 1, 0, &arena));
    _Atomic uint32_t alive = 1;
    arena->alive = &alive;
    void *block, *next;
    CHECK_OK(cd_arena_alloc(arena, REGION / 2, &block));
    memset(block, 7, REGION / 2);
    alive = 0;
    cd_arena_release(arena, block);
    CHECK(((char *)block)[0] == 7 && ((char *)block)[REGION / 2 - 1] == 7);
    alive = 1;
    CHECK_OK(cd_arena_alloc(arena, REGION / 4, &next));
    CHECK(next != block);
    cd_arena_release(arena, next);
    cd_arena_release(arena, block);
    CHECK(((char *)block)[0] == 0);
    cd_arena_free(arena);
    cd_segment_free(&segment);
}

/* Random allocations against a map of who owns each line. */
static void test_random(void)
{
    enum { BLOCKS = 64 };
    char *memory = aligned_alloc(4096, REGION);
    cd_arena *arena;
    CHECK(memory);
    CHECK_OK(cd_arena_open(memory, REGION, 1, 0, &arena));
    unsigned char *owner = calloc(REGION, 1);
    struct {
        unsigned char *at;
        size_t bytes;
    } live[BLOCKS] = {0};
    uint32_t seed = 12345;
    for (int step = 0; step < 3000; step++) {
        seed = seed * 1664525 + 1013904223;
        size_t i = (seed >> 8) % BLOCKS;
        if (live[i].at) {
            for (size_t at = 0; at < live[i].bytes; at++)
                CHECK(owner[(size_t)(live[i].at - (unsigned char *)memory) + at] == i + 1);
            memset(owner + (live[i].at - (unsigned char *)memory), 0, live[i].bytes);
            cd_arena_release(arena, live[i].at);
            live[i].at = NULL;
            continue;
        }
        size_t bytes = (seed >> 16) % ((seed & 7) == 0 ? 300000 : 3000) + 1;
        void *got;
        if (cd_arena_alloc(arena, bytes, &got) != CD_OK)
            continue;
        live[i].at = got;
        live[i].bytes = bytes;
        CHECK(cd_arena_offset(arena, got, bytes) != SIZE_MAX);
        for (size_t at = 0; at < bytes; at++)
            CHECK(owner[(size_t)((char *)got - memory) + at] == 0);
        memset(owner + ((char *)got - memory), (int)i + 1, bytes);
    }
    for (int i = 0; i < BLOCKS; i++)
        cd_arena_release(arena, live[i].at);
    void *whole;
    CHECK_OK(cd_arena_alloc(arena, REGION, &whole));
    cd_arena_free(arena);
    free(owner);
    free(memory);
}

static void test_pages_go_back(void)
{
    cd_segment segment;
    cd_arena *arena;
    struct stat before, used, after;
    void *block;
    CHECK_OK(cd_segment_create(REGION, &segment));
    CHECK_OK(cd_arena_open(segment.base, REGION, 1, 0, &arena));
    fstat(segment.fd, &before);
    CHECK_OK(cd_arena_alloc(arena, (size_t)4 << 20, &block));
    memset(block, 1, (size_t)4 << 20);
    fstat(segment.fd, &used);
    cd_arena_release(arena, block);
    fstat(segment.fd, &after);
    CHECK(used.st_blocks >= before.st_blocks + 8192 && after.st_blocks == before.st_blocks);
    cd_arena_free(arena);
    cd_segment_free(&segment);
}

/* Large blocks begin with a huge page where there is room, do without where there is none, and what lies beside them stays. */
static void test_huge_blocks(void)
{
    cd_segment segment;
    cd_arena *arena;
    void *before, *large, *after, *tight;
    size_t huge = CD_SEGMENT_HUGE_BYTES, bytes = 2 * huge + 5000;
    CHECK_OK(cd_segment_create(2 * REGION, &segment));
    CHECK((uintptr_t)segment.base % huge == 0);
    CHECK_OK(cd_arena_open(segment.base, REGION, 2, 1, &arena));
    CHECK_OK(cd_arena_alloc(arena, 100, &before));
    memset(before, 1, 100);
    CHECK_OK(cd_arena_alloc(arena, bytes, &large));
    CHECK((uintptr_t)large % huge == 0);
    CHECK_OK(cd_arena_alloc(arena, 1000, &after));
    memset(after, 2, 1000);
    memset(large, 3, bytes);
    cd_arena_release(arena, large);
    CHECK_OK(cd_arena_alloc(arena, bytes, &large));
    for (size_t i = 0; i < 1000; i++)
        CHECK(((char *)before)[i % 100] == 1 && ((char *)after)[i] == 2);
    cd_arena_release(arena, large);
    /* 4 MiB and all that is left: no huge page begins where they would have to. */
    cd_arena_release(arena, after);
    CHECK_OK(cd_arena_alloc(arena, REGION - huge + 5000, &tight));
    CHECK((uintptr_t)tight % huge != 0);
    memset(tight, 4, REGION - huge + 5000);
    CHECK(((char *)before)[99] == 1);
    cd_arena_release(arena, tight);
    cd_arena_release(arena, before);
    cd_arena_free(arena);
    cd_segment_free(&segment);
}

static void test_none(void)
{
    cd_arena *arena;
    void *block;
    CHECK_FAILS(cd_arena_open(NULL, 0, 2, 2, &arena), CD_BAD_ARGUMENT);
    CHECK_OK(cd_arena_open(NULL, REGION, 2, 0, &arena));
    CHECK_FAILS(cd_arena_alloc(arena, 8, &block), CD_UNSUPPORTED);
    int here;
    CHECK(cd_arena_offset(arena, &here, 4) == SIZE_MAX);
    cd_arena_free(arena);
    cd_arena_free(NULL);
}

int main(void)
{
    test_blocks();
    test_random();
    test_pages_go_back();
    test_a_forked_child_gives_nothing_back();
    test_huge_blocks();
    test_none();
    puts("shm arena: ok");
    return 0;
}
