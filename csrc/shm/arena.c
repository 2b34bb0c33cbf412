#include "shm/arena.h"

#include "base/host.h"
#include "shm/segment.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/mman.h>

#define ALIGN_SMALL ((size_t)CD_LINE)
/* From here on blocks are whole pages, so that they can be given back and no two ranks' kernels share one. */
#define PAGES_FROM ((size_t)65536)
#define GIVE_BACK_FROM ((size_t)1 << 20)
/* From here on they lie in huge pages, as NumPy's arrays do. Copying 64 MiB of shared memory takes 3.4 ms so and 4.4 to 5.1 on
 * small pages (EPYC, Zen 4, a virtual machine), making and filling such an array 13 ms and 58 to 75, where the host has given the
 * memory before. */
#define HUGE_FROM ((size_t)4 << 20)
/* MADV_COLLAPSE: in Linux since 6.1, not yet in every C library's headers. */
#define COLLAPSE 25

/* The region as a chain of blocks in address order, used and free ones, without gaps; free neighbours are merged. */
struct cd_arena_block {
    struct cd_arena_block *next, *previous;
    size_t at, bytes;
    bool used, retired;
};

typedef struct cd_arena_block block;

cd_status cd_arena_open(void *memory, size_t region_bytes, int ranks, int local, cd_arena **out)
{
    if (local < 0 || local >= ranks)
        return cd_fail(CD_BAD_ARGUMENT, "arena: local rank %d of %d", local, ranks);
    cd_arena *arena = calloc(1, sizeof *arena);
    block *whole = calloc(1, sizeof *whole);
    if (!arena || !whole) {
        free(arena);
        free(whole);
        return cd_fail(CD_NO_MEMORY, "arena: no memory for its book-keeping");
    }
    *whole = (block){.bytes = memory ? region_bytes / ALIGN_SMALL * ALIGN_SMALL : 0};
    *arena = (cd_arena){.base = memory, .region_bytes = memory ? region_bytes : 0, .ranks = ranks,
                        .local = local, .blocks = whole};
    pthread_mutex_init(&arena->lock, NULL);
    *out = arena;
    return CD_OK;
}

void cd_arena_free(cd_arena *arena)
{
    if (!arena)
        return;
    for (block *b = arena->blocks; b;) {
        block *next = b->next;
        free(b);
        b = next;
    }
    pthread_mutex_destroy(&arena->lock);
    free(arena);
}

static bool is_inherited(const cd_arena *arena)
{
    return arena->alive && atomic_load_explicit(arena->alive, memory_order_relaxed) == 0;
}

/* Cuts b at `at` (inside of it); what follows becomes a free block. */
static bool split(block *b, size_t at)
{
    block *rest = calloc(1, sizeof *rest);
    if (!rest)
        return false;
    *rest = (block){.next = b->next, .previous = b, .at = at, .bytes = b->bytes - (at - b->at)};
    if (rest->next)
        rest->next->previous = rest;
    b->next = rest;
    b->bytes = at - b->at;
    return true;
}

static void merge_next(block *b)
{
    block *gone = b->next;
    b->bytes += gone->bytes;
    b->next = gone->next;
    if (b->next)
        b->next->previous = b;
    free(gone);
}

/* The block that will hold `bytes` at a multiple of `align`, marked used; NULL when none is large enough. Offsets are
 * relative to the region, whose address is page aligned or at least as aligned as anybody asked for. */
static block *take(cd_arena *arena, size_t bytes, size_t align)
{
    size_t skew = (size_t)((uintptr_t)cd_arena_at(arena, arena->local, 0) % align);
    for (block *b = arena->blocks; b; b = b->next) {
        size_t at = cd_round_up(b->at + skew, align) - skew;
        size_t lost = at - b->at;
        if (b->used || b->bytes < bytes || b->bytes - bytes < lost)
            continue;
        if (lost) {
            if (!split(b, at))
                return NULL;
            b = b->next;
        }
        if (b->bytes > bytes && !split(b, at + bytes)) {
            if (lost)
                merge_next(b->previous);
            return NULL;
        }
        b->used = true;
        return b;
    }
    return NULL;
}

/* Asks for huge pages where the block holds whole ones. The kernel gives those of shared memory by itself only where an
 * administrator says so, but makes them of pages that are there when it is asked to: one of each is enough. Where it cannot, the
 * pages stay small. */
static void use_huge_pages(char *memory, size_t bytes)
{
    size_t skip = cd_round_up((uintptr_t)memory, CD_SEGMENT_HUGE_BYTES) - (uintptr_t)memory;
    if (bytes < HUGE_FROM || bytes - skip < CD_SEGMENT_HUGE_BYTES)
        return;
    size_t whole = (bytes - skip) / CD_SEGMENT_HUGE_BYTES * CD_SEGMENT_HUGE_BYTES;
    for (size_t at = 0; at < whole; at += CD_SEGMENT_HUGE_BYTES)
        *(volatile char *)(memory + skip + at) = 0;
    (void)madvise(memory + skip, whole, COLLAPSE);
}

/* Large blocks begin with a huge page if there is room for it; NULL: there is no room at all. */
static block *take_aligned(cd_arena *arena, size_t bytes)
{
    size_t page = cd_host_page_bytes(), align = bytes >= PAGES_FROM ? page : ALIGN_SMALL;
    size_t wanted = cd_round_up(bytes == 0 ? ALIGN_SMALL : bytes, align);
    block *b = bytes >= HUGE_FROM ? take(arena, wanted, CD_SEGMENT_HUGE_BYTES) : NULL;
    return b ? b : take(arena, wanted, align);
}

cd_status cd_arena_alloc(cd_arena *arena, size_t bytes, void **out)
{
    if (!arena->base)
        return cd_fail(CD_UNSUPPORTED, "arena: the ranks of this host share no memory");
    block *b = NULL;
    if (bytes <= arena->region_bytes) {
        pthread_mutex_lock(&arena->lock);
        b = take_aligned(arena, bytes);
        pthread_mutex_unlock(&arena->lock);
    }
    if (!b)
        return cd_fail(CD_NO_MEMORY, "arena: %zu bytes do not fit in what is left of this rank's %zu bytes", bytes,
                       arena->region_bytes);
    *out = cd_arena_at(arena, arena->local, b->at);
    use_huge_pages(*out, bytes);
    return CD_OK;
}

void cd_arena_retire(cd_arena *arena, const void *memory)
{
    size_t at = cd_arena_offset(arena, memory, 0);
    if (at == SIZE_MAX)
        return;
    pthread_mutex_lock(&arena->lock);
    block *b = arena->blocks;
    while (b && at - b->at >= b->bytes)
        b = b->next;
    if (b && b->used)
        b->retired = true;
    pthread_mutex_unlock(&arena->lock);
}

void cd_arena_release(cd_arena *arena, void *memory)
{
    if (!memory || is_inherited(arena))
        return;
    size_t at = cd_arena_offset(arena, memory, 0);
    pthread_mutex_lock(&arena->lock);
    block *b = arena->blocks;
    while (b && !(b->used && b->at == at))
        b = b->next;
    if (b) {
        /* Pages of memory that is no shared mapping (tests) stay: the call fails and that is all. */
        if (b->bytes >= GIVE_BACK_FROM)
            (void)madvise(memory, b->bytes, MADV_REMOVE);
        b->used = b->retired;
    }
    if (b && !b->used) {
        if (b->next && !b->next->used)
            merge_next(b);
        if (b->previous && !b->previous->used)
            merge_next(b->previous);
    }
    pthread_mutex_unlock(&arena->lock);
}
