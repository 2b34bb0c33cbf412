/* Vectors of more than 2^32 bytes (K49): all of them is the same piece of memory again and again, so that a few megabytes do. */
#include "mesh_world.h"
#include "shm_ranks.h"

#include "coll/net_run.h"

#include <sys/mman.h>

#define PIECE ((size_t)8 << 20)
#define MOST (((size_t)1 << 32) + 2 * PIECE)

typedef struct {
    mesh_world w;
    shm_ranks g;
    cd_coll_func run;
    cd_kind kind;
    size_t count;
} huge;

/* `MOST` bytes of addresses, PIECE bytes of memory. */
static unsigned char *map_again_and_again(void)
{
    int fd = memfd_create("huge", MFD_CLOEXEC);
    CHECK(fd >= 0 && ftruncate(fd, (off_t)PIECE) == 0);
    unsigned char *base = mmap(NULL, MOST, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(base != MAP_FAILED);
    for (size_t at = 0; at < MOST; at += PIECE)
        CHECK(mmap(base + at, PIECE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == base + at);
    close(fd);
    return base;
}

static unsigned char content(size_t at)
{
    return (unsigned char)(at % PIECE * 31 >> 3);
}

static void run_huge(int rank, void *ctx)
{
    huge *h = ctx;
    unsigned char *in = map_again_and_again(), *out = map_again_and_again();
    /* The last piece lies elsewhere: it is right only if the operation came to the end. */
    size_t last = h->count / PIECE * PIECE;
    CHECK(mmap(out + last, PIECE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == out + last);
    for (size_t i = 0; i < PIECE; i++)
        in[i] = content(i);
    cd_span from = shm_span(in, h->count, 1), to = shm_span(out, h->count, 1);
    size_t moved = h->kind == CD_ALL_TO_ALL && rank == 0 ? h->count / 2 : 0; /* the last block is the other's first */
    bool root = rank == 0, broadcasts = h->kind == CD_BROADCAST;
    cd_op op = {.kind = h->kind, .dtype = CD_UINT8, .redop = CD_MAX, .root = broadcasts ? 0 : -1, .count = h->count,
                .item_bytes = 1, .ndim = 1, .shape = {(int64_t)h->count}, .sequence = 1};
    if (!broadcasts || root)
        op.in = shm_one(&from);
    if (!broadcasts || !root)
        op.out = shm_one(&to);
    cd_patience patience = shm_ranks_patience(&h->g, 200 * CD_NS_PER_S);
    CHECK_OK(h->run(&h->g.teams[rank], &op, &patience));
    if (!broadcasts || !root)
        for (size_t at = h->count - 4096; at < h->count; at++)
            CHECK(out[at] == content(at - moved));
    munmap(in, MOST);
    munmap(out, MOST);
}

static void test(cd_kind kind, cd_coll_func run, bool messages)
{
    huge h = {.run = run, .kind = kind, .count = ((size_t)1 << 32) + 4096 + 8};
    h.count -= h.count % 2; /* two blocks */
    shm_ranks_make(&h.g, 2, 0);
    if (messages) {
        h.w = world_open(2, WORLD_SHM);
        for (int r = 0; r < 2; r++) {
            h.g.world_ranks[r] = r;
            h.g.teams[r].shm = NULL;
            h.g.teams[r].mesh = h.w.mesh[r];
            h.g.teams[r].context = 5;
        }
    }
    check_on_ranks(2, run_huge, &h);
    shm_ranks_free(&h.g);
    if (messages)
        world_close(&h.w);
}

int main(void)
{
    test(CD_BROADCAST, cd_shm_move_run, false);
    test(CD_ALL_REDUCE, cd_shm_stage_run, false);
    test(CD_ALL_TO_ALL, cd_net_move_run, true);
    puts("coll huge: ok");
    return 0;
}
