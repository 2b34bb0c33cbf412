/* Long random sequences of operations: sizes, kinds and paths that follow each other in every order, and memory that does not
 * grow. The jitter build (make JITTER=1) puts yields and naps before every post. */
#include "shm_cases.h"

static uint64_t next_random(uint64_t *state)
{
    *state += UINT64_C(0x9E3779B97F4A7C15);
    return scramble(*state);
}

/* Mostly small, sometimes a few rounds. */
static size_t random_count(uint64_t *state)
{
    uint64_t bits = next_random(state);
    size_t most = bits % 64 == 0 ? 60000 : bits % 8 == 0 ? 3000 : 40;
    return (size_t)(next_random(state) % (most + 1));
}

static void add_random(case_list *l, uint64_t *state)
{
    test_case c = {.kind = (cd_kind)(next_random(state) % (CD_ALL_TO_ALL + 1)), .count = random_count(state),
                   .layout = (int)(next_random(state) % 6), .in_place = next_random(state) % 2 == 0,
                   .lists = next_random(state) % 2 == 0};
    if (c.layout >= LAYOUTS)
        c.layout = PLAIN;
    size_t pick = (size_t)next_random(state);
    if (is_reduction(c.kind)) {
        c.dtype = reductions[pick % 8].dtype;
        c.redop = reductions[pick % 8].redop;
        c.item = reductions[pick % 8].item;
    } else {
        c.dtype = moved[pick % 6].dtype;
        c.item = moved[pick % 6].item;
    }
    c.uneven = c.kind >= CD_ALL_GATHER && next_random(state) % 3 == 0;
    if (c.kind != CD_ALL_REDUCE && c.kind != CD_REDUCE && c.kind != CD_BROADCAST)
        c.count /= (size_t)l->g->world;
    if (next_random(state) % 4 == 0 && c.kind != CD_BARRIER)
        c.run = is_reduction(c.kind) ? cd_shm_stage_run : cd_shm_move_run;
    add(l, c);
}

static void test_soak(int world, size_t count, uint64_t seed)
{
    shm_ranks g;
    shm_ranks_make(&g, world, 0);
    case_list l = {.g = &g};
    for (size_t i = 0; i < count; i++)
        add_random(&l, &seed);
    check_on_ranks(world, run_list_on_rank, &l);
    free(l.list);
    shm_ranks_free(&g);
}

/* ---- memory ---- */

static size_t resident_pages(void)
{
    FILE *f = fopen("/proc/self/statm", "r");
    size_t size, resident;
    CHECK(f && fscanf(f, "%zu %zu", &size, &resident) == 2);
    fclose(f);
    return resident;
}

/* Not of the heap: a sanitizer keeps what is freed, and that grows. */
static float values[2][65536];

static void reduce_many(int rank, void *ctx)
{
    shm_ranks *g = ctx;
    cd_patience patience = shm_ranks_patience(g, 120 * CD_NS_PER_S);
    float *data = values[rank];
    uint64_t state = 1;
    for (uint64_t i = 0; i < 20000; i++) {
        size_t count = (size_t)(next_random(&state) % (i % 50 == 0 ? 65536 : 512));
        cd_span span = shm_span(data, count, 4);
        cd_op op = {.kind = CD_ALL_REDUCE, .dtype = CD_FLOAT32, .redop = CD_MAX, .root = -1, .in = shm_one(&span),
                    .out = shm_one(&span), .count = count, .item_bytes = 4, .sequence = i};
        CHECK_OK(cd_plan_find(&g->teams[rank], &op)->run(&g->teams[rank], &op, &patience));
    }
}

static void test_memory_does_not_grow(void)
{
    shm_ranks g;
    shm_ranks_make(&g, 2, 0);
    for (int i = 0; i < 2; i++) /* what the first threads leave behind counts only then */
        check_on_ranks(2, reduce_many, &g);
    size_t before = resident_pages();
    check_on_ranks(2, reduce_many, &g);
    CHECK(resident_pages() < before + 256);
    shm_ranks_free(&g);
}

int main(void)
{
    test_soak(2, 8000, 1);
    test_soak(3, 6000, 2);
    test_soak(4, 6000, 3);
    test_soak(7, 1000, 4);
    test_memory_does_not_grow();
    puts("coll shm soak: ok");
    return 0;
}
