/* The table of algorithms: thresholds, needs, CDIST_PLAN. The setting is read once a process, so each text has its own. */
#include "shm_ranks.h"

#include <limits.h>
#include <sys/wait.h>
#include <unistd.h>

static const char *choice(const cd_team *team, cd_kind kind, size_t bytes, uint32_t flags)
{
    cd_span span = shm_span(NULL, bytes / (kind >= CD_ALL_GATHER && kind <= CD_REDUCE_SCATTER ? (size_t)team->world : 1), 1);
    cd_op op = {.kind = kind, .dtype = CD_UINT8, .in = shm_one(&span), .out = shm_one(&span), .item_bytes = 1, .flags = flags};
    return cd_plan_find(team, &op)->name;
}

static void test_thresholds(void)
{
    size_t count;
    const cd_plan_row *rows = cd_plan_rows(&count);
    for (size_t i = 0; i < count; i++) {
        size_t below = rows[i].bytes_below;
        if (below == SIZE_MAX || (rows[i].needs & CD_NEEDS_MESH))
            continue;
        shm_ranks g;
        shm_ranks_make(&g, rows[i].ranks_below == INT_MAX ? 8 : rows[i].ranks_below - 1, (size_t)1 << 20);
        CHECK(strcmp(choice(&g.teams[0], rows[i].kind, below - 1, 0), rows[i].name) == 0);
        CHECK(strcmp(choice(&g.teams[0], rows[i].kind, below + 15, 0), rows[i].name) != 0);
        CHECK(strcmp(choice(&g.teams[0], rows[i].kind, below - 1, CD_OP_UNEVEN), rows[i].name) != 0);
        shm_ranks_free(&g);
    }
}

static void test_table(void)
{
    shm_ranks g;
    shm_ranks_make(&g, 2, (size_t)1 << 20);
    CHECK_OK(cd_plan_check());
    for (int kind = CD_BARRIER; kind <= CD_ALL_TO_ALL; kind++)
        for (size_t bytes = 0; bytes < SIZE_MAX / 4; bytes = bytes * 3 + 2)
            CHECK(strncmp(choice(&g.teams[0], (cd_kind)kind, bytes, 0), "shm_", 4) == 0);
    CHECK(strcmp(choice(&g.teams[0], CD_ALL_REDUCE, 1 << 20, 0), "shm_arena") == 0);
    CHECK(strcmp(choice(&g.teams[0], CD_REDUCE, 1 << 20, 0), "shm_arena") == 0);
    shm_ranks_free(&g);
    shm_ranks_make(&g, 2, 0);
    CHECK(strcmp(choice(&g.teams[0], CD_ALL_REDUCE, 1 << 20, 0), "shm_stage") == 0);
    shm_ranks_free(&g);
    /* Slots are smaller the more ranks there are, and the plan knows. */
    shm_ranks_make(&g, 64, 0);
    CHECK(strcmp(choice(&g.teams[0], CD_BROADCAST, 16384, 0), "shm_small") == 0);
    CHECK(strcmp(choice(&g.teams[0], CD_BROADCAST, 16385, 0), "shm_move") == 0);
    shm_ranks_free(&g);
}

static void in_child(const char *text, void (*body)(const char *))
{
    int state;
    pid_t child = fork();
    if (child == 0) {
        setenv("CDIST_PLAN", text, 1);
        body(text);
        _exit(0);
    }
    CHECK(waitpid(child, &state, 0) == child && state == 0);
}

static void expect_refused(const char *text)
{
    CHECK_FAILS(cd_plan_check(), CD_BAD_ARGUMENT);
    CHECK(strstr(cd_last_error()->text, "CDIST_PLAN"));
    const char *bad = strchr(text, '!');
    CHECK(!bad || strstr(cd_last_error()->text, bad));
    CHECK_FAILS(cd_plan_check(), CD_BAD_ARGUMENT);
}

static void expect_staged(const char *text)
{
    (void)text;
    shm_ranks g;
    shm_ranks_make(&g, 2, (size_t)1 << 20);
    CHECK_OK(cd_plan_check());
    CHECK(strcmp(choice(&g.teams[0], CD_ALL_REDUCE, 32767, 0), "shm_small") == 0);
    CHECK(strcmp(choice(&g.teams[0], CD_ALL_REDUCE, 32768, 0), "shm_stage") == 0);
    CHECK(strcmp(choice(&g.teams[0], CD_ALL_REDUCE, 2u << 20, 0), "shm_stage") == 0);
    CHECK(strcmp(choice(&g.teams[0], CD_BROADCAST, 2048, 0), "shm_small") == 0);
    CHECK(strcmp(choice(&g.teams[0], CD_GATHER, 0, 0), "shm_move") == 0);
    shm_ranks_free(&g);
}

/* A slot that is too small cannot be forced. */
static void expect_small_stays_small(const char *text)
{
    (void)text;
    shm_ranks g;
    shm_ranks_make(&g, 2, 0);
    CHECK(strcmp(choice(&g.teams[0], CD_ALL_REDUCE, 65536, 0), "shm_small") == 0);
    CHECK(strcmp(choice(&g.teams[0], CD_ALL_REDUCE, 65537, 0), "shm_stage") == 0);
    shm_ranks_free(&g);
}

int main(void)
{
    static const char *const refused[] = {"!nonsense", "all_reduce:0-64K:shm_small;!x", "all_reduce:0-64K:!ring", "all_reduce",
                                          "all_reduce:64K-1K:shm_small", "all_reduce:0-64Q:shm_small", "all_reduce:0:shm_small",
                                          "all_reduce:0-:shm_move", "barrier:0-:shm_stage", "all_reduce:-1--2:shm_small",
                                          "all_reduce:0-99999999999999999999999:shm_small", "all_reduce:0-17179869184G:shm_small",
                                          ";", "all_reduce:0-64K:shm_small ", "ALL_REDUCE:0-:shm_small"};
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        in_child(refused[i], expect_refused);
    in_child("all_reduce:0-32K:shm_small;all_reduce:32K-:shm_stage;gather:-:shm_move", expect_staged);
    in_child("all_reduce:0-:shm_small", expect_small_stays_small);
    unsetenv("CDIST_PLAN");
    test_thresholds();
    test_table();
    puts("coll plan: ok");
    return 0;
}
