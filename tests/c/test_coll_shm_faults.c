/* What goes wrong between ranks that share memory: differing calls, late, departed and aborted ranks. */
#include "shm_ranks.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef struct {
    shm_ranks *g;
    cd_op ops[MOST_RANKS];       /* buffers are set per rank */
    cd_coll_func run[MOST_RANKS];
    bool absent[MOST_RANKS];
    uint64_t patience_ns;
    cd_status status[MOST_RANKS];
    cd_error error[MOST_RANKS];
} scene;

#define COUNT 40000

static cd_op plain_op(cd_kind kind, size_t count)
{
    return (cd_op){.kind = kind, .dtype = CD_FLOAT32, .redop = CD_SUM, .root = -1, .count = count, .item_bytes = 4, .ndim = 1,
                   .shape = {(int64_t)count}, .sequence = 5};
}

static cd_coll_func plain_run(cd_op *op)
{
    return op->count * 4 <= 65536 ? cd_shm_small_run : op->kind <= CD_REDUCE ? cd_shm_stage_run : cd_shm_move_run;
}

static void scene_make(scene *s, shm_ranks *g, int world, cd_op op)
{
    memset(s, 0, sizeof *s);
    shm_ranks_make(g, world, 0);
    s->g = g;
    s->patience_ns = 60 * CD_NS_PER_S;
    for (int r = 0; r < world; r++) {
        s->ops[r] = op;
        s->run[r] = plain_run(&s->ops[r]);
    }
}

static void act(int rank, void *ctx)
{
    scene *s = ctx;
    if (s->absent[rank])
        return;
    cd_op *op = &s->ops[rank];
    size_t bytes = op->count * op->item_bytes;
    unsigned char *in = malloc(bytes), *out = malloc(bytes * (size_t)s->g->world);
    memset(in, rank + 1, bytes);
    memset(out, 77, bytes * (size_t)s->g->world);
    bool gathers = op->kind == CD_ALL_GATHER;
    cd_span from = shm_span(in, op->count, op->item_bytes);
    cd_span to = shm_span(out, op->count * (gathers ? (size_t)s->g->world : 1), op->item_bytes);
    op->in = shm_one(&from);
    op->out = shm_one(&to);
    cd_patience patience = shm_ranks_patience(s->g, s->patience_ns);
    s->status[rank] = s->run[rank](&s->g->teams[rank], op, &patience);
    s->error[rank] = *cd_last_error();
    for (size_t i = 0; s->status[rank] == CD_MISMATCH && i < bytes; i++)
        CHECK(in[i] == rank + 1 && out[i] == 77);
    free(in);
    free(out);
}

static void expect_mismatch(scene *s, const char *word_a, const char *word_b)
{
    check_on_ranks(s->g->world, act, s);
    for (int r = 0; r < s->g->world; r++) {
        CHECK(s->absent[r] || s->status[r] == CD_MISMATCH);
        CHECK(s->absent[r] || (strstr(s->error[r].text, word_a) && strstr(s->error[r].text, word_b)));
        CHECK(s->absent[r] || strstr(s->error[r].text, "rank 10"));
    }
    CHECK(cd_cause_check(cd_shm_team_cause(s->g->shm[0])) == CD_MISMATCH);
    shm_ranks_free(s->g);
}

static void test_differing_calls(int world)
{
    static scene s;
    shm_ranks g;
    int odd = world - 1;
    for (int large = 0; large < 2; large++) {
        cd_op op = plain_op(CD_ALL_REDUCE, large ? COUNT : 10);
        scene_make(&s, &g, world, op);
        s.ops[odd].dtype = CD_INT32;
        expect_mismatch(&s, "int32", "dtype differs");
        scene_make(&s, &g, world, op);
        s.ops[odd].redop = CD_MAX;
        expect_mismatch(&s, "MAX", "reduction differs");
        scene_make(&s, &g, world, op);
        s.ops[odd].count = s.ops[odd].count + 1;
        expect_mismatch(&s, "all_reduce", "element count differs");
        scene_make(&s, &g, world, op);
        s.ops[odd].ndim = 2;
        s.ops[odd].shape[1] = 1;
        expect_mismatch(&s, ", 1)", "shape differs");
        op.kind = CD_BROADCAST;
        op.root = 0;
        scene_make(&s, &g, world, op);
        s.ops[odd].root = 1;
        expect_mismatch(&s, "root 1", "root differs");
    }
}

/* Ranks that take different paths because their calls differ. */
static void test_across_paths(int world)
{
    static scene s;
    shm_ranks g;
    scene_make(&s, &g, world, plain_op(CD_ALL_REDUCE, 10));
    s.ops[0] = plain_op(CD_ALL_REDUCE, COUNT);
    s.run[0] = cd_shm_stage_run;
    expect_mismatch(&s, "(40000,)", "(10,)");
    scene_make(&s, &g, world, plain_op(CD_BARRIER, 0));
    s.ops[1] = plain_op(CD_ALL_GATHER, COUNT);
    s.run[1] = cd_shm_move_run;
    expect_mismatch(&s, "barrier", "all_gather");
    scene_make(&s, &g, world, plain_op(CD_ALL_REDUCE, 10));
    s.run[1] = cd_shm_stage_run;
    expect_mismatch(&s, "CDIST_PLAN", "all_reduce");
}

/* Two ranks that differ find each other while a third is missing, whoever comes first. */
static void test_third_rank_is_late(void)
{
    static scene s;
    shm_ranks g;
    for (int absent = 0; absent < 3; absent++) {
        scene_make(&s, &g, 3, plain_op(CD_ALL_REDUCE, 10));
        s.absent[absent] = true;
        s.ops[absent == 1 ? 2 : 1].dtype = CD_INT32;
        expect_mismatch(&s, "int32", "float32");
    }
}

/* ---- uneven: what is given and what is expected ---- */

static void act_uneven(int rank, void *ctx)
{
    scene *s = ctx;
    size_t each = s->ops[0].count, world = (size_t)s->g->world;
    /* Rank 1 gives one element more than rank 0 expects. */
    size_t counts[MOST_RANKS];
    for (size_t j = 0; j < world; j++)
        counts[j] = each + (j == 1 && rank != 0);
    float *in = calloc(each + 1, 4), *out = calloc((each + 1) * world, 4);
    cd_span from = shm_span(in, each + (rank == 1), 4), to = shm_span(out, each * world + (rank != 0), 4);
    cd_op op = s->ops[rank];
    op.flags = CD_OP_UNEVEN;
    op.in = shm_one(&from);
    op.out = (cd_blocks){.list = &to, .spans = 1, .counts = counts};
    for (size_t i = 0; i < each; i++)
        in[i] = 3;
    cd_patience patience = shm_ranks_patience(s->g, s->patience_ns);
    CHECK_FAILS(cd_shm_move_run(&s->g->teams[rank], &op, &patience), CD_MISMATCH);
    const char *text = cd_last_error()->text;
    CHECK(strstr(text, "rank 101 gives") && strstr(text, "to rank 100") && strstr(text, "all_gather"));
    for (size_t i = 0; i < each * world; i++)
        CHECK(out[i] == 0);
    free(in);
    free(out);
}

static void test_uneven_counts_differ(void)
{
    static scene s;
    shm_ranks g;
    for (int large = 0; large < 2; large++) {
        scene_make(&s, &g, 3, plain_op(CD_ALL_GATHER, large ? COUNT : 4));
        check_on_ranks(3, act_uneven, &s);
        shm_ranks_free(&g);
    }
}

/* ---- absent ranks ---- */

static void test_timeout_names_the_late_rank(void)
{
    static scene s;
    shm_ranks g;
    for (int large = 0; large < 2; large++) {
        scene_make(&s, &g, 3, plain_op(CD_ALL_REDUCE, large ? COUNT : 10));
        s.absent[1] = true;
        s.patience_ns = 100 * CD_NS_PER_MS;
        check_on_ranks(3, act, &s);
        for (int r = 0; r < 3; r += 2)
            CHECK(s.status[r] == CD_TIMED_OUT && s.error[r].rank == 101 && strstr(s.error[r].text, "101"));
        shm_ranks_free(&g);
    }
}

static void test_departed_rank(void)
{
    static scene s;
    shm_ranks g;
    scene_make(&s, &g, 3, plain_op(CD_ALL_REDUCE, COUNT));
    s.absent[2] = true;
    atomic_store(&g.gone[2], 1);
    check_on_ranks(3, act, &s);
    for (int r = 0; r < 2; r++)
        CHECK(s.status[r] == CD_PEER_LOST && s.error[r].rank == 102);
    shm_ranks_free(&g);
}

/* A rank that dies in the middle of the rounds: the others wait in the rings, not in the meeting. */
static void act_or_die(int rank, void *ctx)
{
    scene *s = ctx;
    if (rank != 2) {
        act(rank, s);
        return;
    }
    cd_shm_team *shm = s->g->shm[2];
    cd_shm_begin(shm, &s->ops[2], CD_SHM_ROUNDS)->where = (cd_shm_where){0};
    cd_shm_enter(shm);
    cd_sleep_ns(20 * CD_NS_PER_MS);
    cd_error error = {.code = CD_PEER_LOST, .rank = 102, .text = "rank 102 was killed by SIGKILL"};
    cd_cause_publish(cd_shm_team_cause(shm), &error);
}

static void test_abort_in_the_middle(void)
{
    static scene s;
    shm_ranks g;
    static const cd_kind kinds[] = {CD_ALL_REDUCE, CD_ALL_GATHER};
    for (size_t i = 0; i < 2; i++) {
        scene_make(&s, &g, 3, plain_op(kinds[i], 4000000));
        check_on_ranks(3, act_or_die, &s);
        for (int r = 0; r < 2; r++)
            CHECK(s.status[r] == CD_PEER_LOST && s.error[r].rank == 102 && strstr(s.error[r].text, "SIGKILL"));
        shm_ranks_free(&g);
    }
}

static void test_open_refuses(void)
{
    cd_shm_team *shm;
    void *memory = aligned_alloc(4096, cd_round_up(cd_shm_team_bytes(2), 4096));
    memset(memory, 0, 65536);
    CHECK_FAILS(cd_shm_team_open(memory, 2, 2, NULL, &shm), CD_BAD_ARGUMENT);
    CHECK_FAILS(cd_shm_team_open(memory, 0, 0, NULL, &shm), CD_BAD_ARGUMENT);
    ((cd_shm_board *)memory)->ring_bytes = UINT64_C(1) << 40;
    CHECK_FAILS(cd_shm_team_open(memory, 2, 0, NULL, &shm), CD_PROTOCOL);
    cd_shm_team_free(NULL);
    free(memory);
}

/* ---- what cuts off an operation that reads in the memory of others (shm_reach.c) ---- */

#define ROOM ((size_t)3 << 20)

/* How rank 1's memory is: as any, with a part in the middle that no rank may read, or with one that only rank 1 may read. */
typedef enum { PLAIN_MEMORY, HOLE, SECRET } memory_sort;

/* Memory that its own process alone can read, where the kernel has some; NULL otherwise. */
static void *secret_memory(void *at, size_t bytes)
{
    int fd = (int)syscall(SYS_memfd_secret, 0);
    if (fd < 0)
        return NULL;
    void *memory = MAP_FAILED;
    if (ftruncate(fd, (off_t)bytes) == 0)
        memory = mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
    close(fd);
    return memory == MAP_FAILED ? NULL : memory;
}

static void run_by_reading(scene *s, int rank, memory_sort sort, cd_idle_func idle)
{
    cd_op *op = &s->ops[rank];
    unsigned char *in = mmap(NULL, ROOM, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(in != MAP_FAILED);
    unsigned char *out = calloc((size_t)s->g->world, ROOM);
    /* The ends can be read; and rank 1 does not read the hole. */
    CHECK(rank != 1 || sort != HOLE || mprotect(in + ROOM / 6, ROOM / 6, PROT_NONE) == 0);
    if (rank == 1 && sort == SECRET && !secret_memory(in + ROOM / 2, ROOM / 4))
        s->g->shm[0]->rows[1].card.process = -1;
    if (sort != HOLE)
        memset(in, rank + 1, ROOM);
    cd_span from = shm_span(in, ROOM, 1), to = shm_span(out, ROOM * (op->kind == CD_ALL_REDUCE ? 1 : (size_t)s->g->world), 1);
    op->in = shm_one(&from);
    op->out = shm_one(&to);
    cd_patience patience = shm_ranks_patience(s->g, s->patience_ns);
    if (rank == 0) {
        patience.idle = idle;
        patience.idle_ctx = s;
    }
    cd_coll_func run = op->kind == CD_ALL_REDUCE ? cd_shm_stage_run : cd_shm_move_run;
    s->status[rank] = run(&s->g->teams[rank], op, &patience);
    s->error[rank] = *cd_last_error();
    if (s->status[rank] != CD_OK)
        cd_cause_publish(cd_shm_team_cause(s->g->shm[rank]), cd_last_error());
    bool takes = op->kind == CD_ALL_GATHER || (op->kind == CD_GATHER && rank == op->root);
    for (size_t i = 0; s->status[rank] == CD_OK && takes && i < ROOM * (size_t)s->g->world; i++)
        CHECK(out[i] == i / ROOM + 1);
    free(out);
    munmap(in, ROOM);
}

static void run_with_a_hole(int rank, void *ctx)
{
    run_by_reading(ctx, rank, HOLE, NULL);
}

static void run_with_a_secret(int rank, void *ctx)
{
    run_by_reading(ctx, rank, SECRET, NULL);
}

/* Ctrl-C once both have entered: from there on the root waits for nobody. */
static cd_status interrupt_reading(void *ctx)
{
    const shm_ranks *g = ((const scene *)ctx)->g;
    for (int r = 0; r < g->world; r++)
        if (atomic_load_explicit(&g->shm[0]->rows[r].enter[1].head.number, memory_order_acquire) == 0)
            return CD_OK;
    return cd_fail(CD_INTERRUPTED, "interrupted by a signal");
}

static void run_interrupted(int rank, void *ctx)
{
    run_by_reading(ctx, rank, PLAIN_MEMORY, interrupt_reading);
}

static void scene_of_reading(scene *s, shm_ranks *g, int world, cd_kind kind)
{
    cd_op op = {.kind = kind, .dtype = CD_UINT8, .redop = CD_SUM, .root = kind == CD_GATHER ? 0 : -1, .count = ROOM,
                .item_bytes = 1, .ndim = 1, .shape = {(int64_t)ROOM}, .sequence = 5};
    scene_make(s, g, world, op);
    shm_ranks_read_always(g);
    for (int r = 0; r < world; r++)
        CHECK(cd_shm_reaches(&g->teams[r]));
}

static void test_reading_cut_off(void)
{
    static scene s;
    shm_ranks g;
    /* An all_reduce may have changed its input when it finds the hole. */
    scene_of_reading(&s, &g, 2, CD_ALL_REDUCE);
    check_on_ranks(2, run_with_a_hole, &s);
    for (int r = 0; r < 2; r++) {
        CHECK(s.status[r] == CD_PEER_LOST && s.error[r].rank == 101);
        CHECK(strstr(s.error[r].text, "memory of rank 101") && strstr(s.error[r].text, "CDIST_SINGLE_COPY=never"));
    }
    shm_ranks_free(&g);
    scene_of_reading(&s, &g, 2, CD_GATHER);
    check_on_ranks(2, run_interrupted, &s);
    CHECK(s.status[0] == CD_INTERRUPTED && s.status[1] != CD_OK);
    shm_ranks_free(&g);
}

/* Ranks that could read a part only: all learn it, and the rings bring what was asked for; also the one that could read all, and
 * one that takes nothing. Each operation finds it out anew. */
static void test_reading_that_fails(void)
{
    static scene s;
    shm_ranks g;
    static const cd_kind kinds[] = {CD_GATHER, CD_ALL_GATHER};
    for (int world = 2; world <= 3; world++)
        for (size_t i = 0; i < 2; i++) {
            scene_of_reading(&s, &g, world, kinds[i]);
            for (int turn = 0; turn < 2; turn++) {
                uint64_t rounds = g.shm[0]->rounds;
                check_on_ranks(world, run_with_a_secret, &s);
                for (int r = 0; r < world; r++)
                    CHECK(s.status[r] == CD_OK && g.shm[r]->rounds == g.shm[0]->rounds);
                CHECK(g.shm[0]->rounds > rounds + 1); /* one is the ticket */
            }
            shm_ranks_free(&g);
        }
}

int main(void)
{
    for (int world = 2; world <= 4; world++) {
        test_differing_calls(world);
        test_across_paths(world);
    }
    test_third_rank_is_late();
    test_uneven_counts_differ();
    test_timeout_names_the_late_rank();
    test_departed_rank();
    test_abort_in_the_middle();
    test_open_refuses();
    test_reading_cut_off();
    test_reading_that_fails();
    puts("coll shm faults: ok");
    return 0;
}
