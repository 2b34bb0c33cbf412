/* Every kind over shared memory: paths × dtypes × layouts × sizes × worlds. */
#include "shm_cases.h"

static void add_sizes(case_list *l, cd_kind kind, cd_coll_func run, size_t limit, const size_t *sizes, size_t n)
{
    for (size_t i = 0; i < n; i++)
        for (int layout = 0; layout < LAYOUTS; layout++) {
            size_t pick = l->count;
            /* Large ones and large worlds in one layout each: time. */
            if ((sizes[i] > 5000 || l->g->world == 3 || l->g->world > 4 || CHECK_BRIEF) && sizes[i] < SIZE_MAX / 64 &&
                layout != (int)(i + (size_t)kind) % LAYOUTS)
                continue;
            test_case c = {.kind = kind, .run = run, .count = sizes[i], .layout = layout, .in_place = pick % 3 == 0,
                           .lists = pick % 2 == 0};
            if (is_reduction(kind)) {
                c.dtype = reductions[pick % 8].dtype;
                c.redop = reductions[pick % 8].redop;
                c.item = reductions[pick % 8].item;
            } else {
                c.dtype = moved[pick % 6].dtype;
                c.item = moved[pick % 6].item;
            }
            bool many = kind != CD_ALL_REDUCE && kind != CD_REDUCE && kind != CD_BROADCAST;
            if (c.count * c.item * (many ? (size_t)l->g->world : 1) > limit)
                c.count = limit / c.item / (many ? (size_t)l->g->world : 1);
            add(l, c);
            c.uneven = kind >= CD_ALL_GATHER && run != cd_shm_small_run;
            if (c.uneven)
                add(l, c);
        }
}

static void test_matrix(int world)
{
    static const size_t small[] = {0, 1, 2, 3, 7, 12, 13, 48, 100, 1000, SIZE_MAX / 64};
    static const size_t large[] = {0, 1, 5, 63, 1024, 16384, 16385, 40000, 70001};
    shm_ranks g;
    shm_ranks_make(&g, world, (size_t)4 << 20);
    case_list l = {.g = &g};
    for (int kind = CD_BARRIER; kind <= CD_ALL_TO_ALL; kind++) {
        add_sizes(&l, (cd_kind)kind, cd_shm_small_run, cd_shm_small_limit(world), small, 11);
        if (kind == CD_BARRIER)
            continue;
        size_t n = world > 5 || CHECK_BRIEF ? 5 : 9;
        add_sizes(&l, (cd_kind)kind, is_reduction((cd_kind)kind) ? cd_shm_stage_run : cd_shm_move_run, SIZE_MAX, large, n);
        add_sizes(&l, (cd_kind)kind, NULL, SIZE_MAX, large, n - 3);
    }
    check_on_ranks(world, run_list_on_rank, &l);
    free(l.list);
    shm_ranks_free(&g);
}

/* ---- many rounds: more than the ring has slots ---- */

static void add_large(case_list *l)
{
    size_t count = ((size_t)1 << 19) + 12345;
    for (int kind = CD_ALL_REDUCE; kind <= CD_ALL_TO_ALL; kind++) {
        cd_coll_func run = is_reduction((cd_kind)kind) ? cd_shm_stage_run : cd_shm_move_run;
        test_case c = {.kind = (cd_kind)kind, .run = run, .dtype = CD_FLOAT32, .redop = CD_SUM, .item = 4, .count = count};
        add(l, c);
        c.layout = GAPS;
        c.uneven = kind >= CD_ALL_GATHER;
        c.count = count / 3;
        add(l, c);
    }
}

static void test_many_rounds(int world)
{
    shm_ranks g;
    shm_ranks_make(&g, world, 0);
    case_list l = {.g = &g};
    add_large(&l);
    check_on_ranks(world, run_list_on_rank, &l);
    free(l.list);
    shm_ranks_free(&g);
}

/* Elements larger than a slice of the ring, in strided memory: they are cut. */
static void test_giant_items(void)
{
    shm_ranks g;
    shm_ranks_make(&g, 3, 0);
    case_list l = {.g = &g};
    for (int kind = CD_BROADCAST; kind <= CD_ALL_TO_ALL; kind++)
        if (!is_reduction((cd_kind)kind))
            add(&l, (test_case){.kind = (cd_kind)kind, .run = cd_shm_move_run, .dtype = CD_BYTES, .item = 300001, .count = 4,
                                .layout = GAPS});
    check_on_ranks(3, run_list_on_rank, &l);
    free(l.list);
    shm_ranks_free(&g);
}

/* ---- reading in the memory of others (shm_reach.c) ---- */

/* Every kind at sizes around the grain and the chunk; layouts that cannot be read go through the rings in between. */
static void test_reading(int world, bool refused)
{
    static const size_t sizes[] = {0, 1, 5, 1000, 16385, 140001};
    shm_ranks g;
    shm_ranks_make(&g, world, 0);
    shm_ranks_read_always(&g);
    case_list l = {.g = &g};
    for (int kind = CD_ALL_REDUCE; kind <= CD_ALL_TO_ALL; kind++)
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
            for (int more = 0; more < 4; more++) {
                test_case c = {.kind = (cd_kind)kind, .count = sizes[i], .layout = more == 3 ? GAPS : PLAIN,
                               .in_place = more == 1, .lists = more == 2};
                c.run = is_reduction(c.kind) ? cd_shm_stage_run : cd_shm_move_run;
                size_t pick = l.count % 8;
                c.dtype = is_reduction(c.kind) ? reductions[pick].dtype : moved[pick % 6].dtype;
                c.redop = reductions[pick].redop;
                c.item = is_reduction(c.kind) ? reductions[pick].item : moved[pick % 6].item;
                add(&l, c);
            }
    /* The last one is a rank whose memory none may read, though it could be probed: found out anew in each operation. */
    if (refused) {
        for (int r = 0; r < world; r++)
            CHECK(cd_shm_reaches(&g.teams[r]));
        g.shm[0]->rows[world - 1].card.process = -1;
    }
    check_on_ranks(world, run_list_on_rank, &l);
    for (int r = 0; r < world; r++)
        CHECK(g.shm[r]->reach == CD_SHM_REACH_FINE && g.shm[r]->reads_always);
    free(l.list);
    shm_ranks_free(&g);
}

/* What a rank measures decides, and all go the same way: both ways are taken, and give the same. */
static void test_large_by_either_way(void)
{
    shm_ranks g;
    shm_ranks_make(&g, 2, 0);
    case_list l = {.g = &g};
    for (int i = 0; i < 6; i++)
        for (int kind = CD_ALL_REDUCE; kind <= CD_ALL_TO_ALL; kind += 3)
            add(&l, (test_case){.kind = (cd_kind)kind, .dtype = CD_FLOAT32, .redop = CD_SUM, .item = 4,
                                .count = (CD_SHM_LARGE >> 2) / (kind == CD_ALL_REDUCE ? 1 : 2) + 77});
    check_on_ranks(2, run_list_on_rank, &l);
    cd_pace *pace = &g.shm[0]->paces[CD_SHM_SIZES - 1];
    CHECK(pace->ns[0] && pace->ns[1]);
    free(l.list);
    shm_ranks_free(&g);
}

/* ---- reading in the arena ---- */

#define ALL_RANKS UINT32_MAX

static test_case arena_case(cd_kind kind, size_t pick, size_t count, unsigned in_arena)
{
    test_case c = {.kind = kind, .count = count, .in_arena = in_arena};
    pick = count > 100000 ? pick % 2 : pick; /* narrow ones */
    c.dtype = is_reduction(kind) ? reductions[pick % 8].dtype : moved[pick % 6].dtype;
    c.redop = reductions[pick % 8].redop;
    c.item = is_reduction(kind) ? reductions[pick % 8].item : moved[pick % 6].item;
    if (!is_reduction(kind))
        c.run = cd_shm_move_run;
    else
        c.run = kind == CD_REDUCE_SCATTER ? cd_shm_stage_run : cd_shm_arena_run;
    return c;
}

/* Every kind; all ranks' buffers in the arena, or some of them: then the rings take the operation, or the kernel and the arena
 * each a part. */
static void test_arena(int world, bool reads)
{
    static const size_t sizes[] = {0, 1, 5, 1000, 16385, 140001};
    static const unsigned some[] = {ALL_RANKS, 1, ~1u, ALL_RANKS};
    shm_ranks g;
    shm_ranks_make(&g, world, (size_t)256 << 20);
    if (reads)
        shm_ranks_read_always(&g);
    case_list l = {.g = &g};
    for (int kind = CD_ALL_REDUCE; kind <= CD_ALL_TO_ALL; kind++)
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
            for (int more = 0; more < 6; more++) {
                test_case c = arena_case((cd_kind)kind, l.count, sizes[i], some[more % 4]);
                c.layout = more == 3 ? GAPS : PLAIN;
                c.gaps_out = more == 4;
                c.in_place = more % 2 == 1;
                c.lists = more == 4;
                c.uneven = more == 5 && kind >= CD_ALL_GATHER;
                add(&l, c);
            }
    check_on_ranks(world, run_list_on_rank, &l);
    free(l.list);
    shm_ranks_free(&g);
}

/* Read in the arena an operation takes one round, as a ticket; by the rings these would take many. Pieces that go past the caches
 * are among them. */
static void test_arena_takes_no_ring(int world)
{
    shm_ranks g;
    shm_ranks_make(&g, world, (size_t)256 << 20);
    case_list l = {.g = &g};
    for (int kind = CD_ALL_REDUCE; kind <= CD_ALL_TO_ALL; kind++)
        for (int more = 0; more < 3; more++) {
            test_case c = arena_case((cd_kind)kind, 0, more == 2 ? CD_SHM_FAR_BYTES / 4 + 77 : 140001, ALL_RANKS);
            c.uneven = more == 1 && kind >= CD_ALL_GATHER;
            c.gaps_out = more == 1 && kind >= CD_SCATTER;
            add(&l, c);
        }
    check_on_ranks(world, run_list_on_rank, &l);
    for (int r = 0; r < world; r++)
        CHECK(g.shm[r]->rounds == l.count);
    free(l.list);
    shm_ranks_free(&g);
}

int main(void)
{
    static const int worlds[] = {1, 2, 3, 4, 5, 16};
    for (size_t i = CHECK_BRIEF; i < sizeof worlds / sizeof *worlds - CHECK_BRIEF; i++)
        test_matrix(worlds[i]);
    test_many_rounds(2);
    if (!CHECK_BRIEF)
        test_many_rounds(3);
    test_giant_items();
    test_reading(2, false);
    test_reading(3, true);
    test_arena(2, false);
    test_arena(3, true);
    test_arena_takes_no_ring(2);
    test_arena_takes_no_ring(3);
    if (!CHECK_BRIEF) {
        test_reading(3, false);
        test_reading(5, false);
        test_large_by_either_way();
    }
    puts("coll shm: ok");
    return 0;
}
