/* Worlds of many ranks over shared memory (K50): elsewhere blocks of an all_gather were wrong above 256 ranks. */
#include "shm_cases.h"

static void test_world(int world)
{
    shm_ranks *g = calloc(1, sizeof *g);
    CHECK(g);
    shm_ranks_make(g, world, 0);
    case_list l = {.g = g};
    for (int kind = CD_BARRIER; kind <= CD_ALL_TO_ALL; kind++) {
        test_case c = {.kind = (cd_kind)kind, .dtype = CD_INT64, .redop = CD_SUM, .item = 8, .count = 1};
        add(&l, c);
        if (kind == CD_ALL_GATHER || kind == CD_ALL_REDUCE) {
            c.count = 37;
            add(&l, c);
        }
    }
    check_on_ranks(world, run_list_on_rank, &l);
    free(l.list);
    shm_ranks_free(g);
    free(g);
}

int main(void)
{
    static const int worlds[] = {17, 32, 64, 255, 256, 257};
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++)
        test_world(worlds[i]);
    puts("coll worlds: ok");
    return 0;
}
