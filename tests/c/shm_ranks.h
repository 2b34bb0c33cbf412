/* A group of ranks as threads over one block of memory, for the tests and benchmarks of the shared-memory algorithms. */
#ifndef CD_TEST_SHM_RANKS_H
#define CD_TEST_SHM_RANKS_H

#include "check.h"

#include "base/host.h"
#include "coll/plan.h"
#include "coll/shm_team_impl.h"
#include "shm/segment.h"

#define MOST_RANKS 257

typedef struct {
    int world;
    cd_segment board, arena_memory;
    cd_arena *arenas[MOST_RANKS];
    cd_shm_team *shm[MOST_RANKS];
    cd_team teams[MOST_RANKS];
    int32_t world_ranks[MOST_RANKS];
    _Atomic uint32_t gone[MOST_RANKS];
} shm_ranks;

static inline void shm_ranks_make(shm_ranks *g, int world, size_t arena_bytes)
{
    memset(g, 0, sizeof *g);
    g->world = world;
    CHECK_OK(cd_segment_create(cd_shm_team_bytes(world), &g->board));
    if (arena_bytes)
        CHECK_OK(cd_segment_create(arena_bytes * (size_t)world, &g->arena_memory));
    for (int r = 0; r < world; r++)
        g->world_ranks[r] = 100 + r;
    for (int r = world - 1; r >= 0; r--) {
        CHECK_OK(cd_arena_open(g->arena_memory.base, arena_bytes, world, r, &g->arenas[r]));
        CHECK_OK(cd_shm_team_open(g->board.base, world, r, g->arenas[r], &g->shm[r]));
        g->teams[r] = (cd_team){.rank = r, .world = world, .world_ranks = g->world_ranks, .shm = g->shm[r],
                                .cause = cd_shm_team_cause(g->shm[r]), .gone = g->gone};
    }
}

/* Operations of any size that can be run by reading in the memory of others are run so. */
static inline void shm_ranks_read_always(shm_ranks *g)
{
    for (int r = 0; r < g->world; r++) {
        g->shm[r]->reads_always = true;
        g->shm[r]->reads_least = 0;
    }
}

static inline void shm_ranks_free(shm_ranks *g)
{
    for (int r = 0; r < g->world; r++) {
        cd_shm_team_free(g->shm[r]);
        cd_arena_free(g->arenas[r]);
    }
    cd_segment_free(&g->board);
    cd_segment_free(&g->arena_memory);
}

static inline cd_patience shm_ranks_patience(shm_ranks *g, uint64_t ns)
{
    cd_patience patience = cd_patience_until(cd_deadline_after_ns(ns), g->world);
    patience.cause = cd_shm_team_cause(g->shm[0]);
    patience.gone = g->gone;
    patience.world_ranks = g->world_ranks;
    return patience;
}

static inline cd_span shm_span(void *data, size_t count, size_t item)
{
    return (cd_span){.data = data, .count = count, .item_bytes = (uint32_t)item};
}

static inline cd_blocks shm_one(const cd_span *span)
{
    return (cd_blocks){.list = span, .spans = 1};
}

/* The algorithm of that name for a kind; the test ends when there is none. */
static inline cd_coll_func shm_path(cd_kind kind, const char *name)
{
    size_t count;
    const cd_plan_row *rows = cd_plan_rows(&count);
    for (size_t i = 0; i < count; i++)
        if (rows[i].kind == kind && strcmp(rows[i].name, name) == 0)
            return rows[i].run;
    fprintf(stderr, "no row %s for %s\n", name, cd_kind_name(kind));
    exit(1);
}

#endif
