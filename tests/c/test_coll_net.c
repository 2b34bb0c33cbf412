/* Every kind over messages: paths × dtypes × layouts × sizes × worlds × kinds of pipe; bytes against the tables of the files;
 * what happens when ranks disagree or do not come. */
#include "mesh_world.h"
#include "shm_cases.h"

#include "coll/net_run.h"

typedef struct {
    mesh_world w;
    shm_ranks g; /* its shared memory holds the group's cause and nothing else here */
} net_ranks;

/* Ranks of the group are not ranks of the world, as in a group that was reordered. */
static void net_ranks_make(net_ranks *n, int ranks, world_kind kind)
{
    n->w = world_open(ranks, kind);
    shm_ranks_make(&n->g, ranks, 0);
    for (int r = 0; r < ranks; r++)
        n->g.world_ranks[r] = (r + 1) % ranks;
    for (int r = 0; r < ranks; r++) {
        n->g.teams[r].shm = NULL;
        n->g.teams[r].mesh = n->w.mesh[(r + 1) % ranks];
        n->g.teams[r].context = 4711;
    }
}

static void net_ranks_free(net_ranks *n)
{
    shm_ranks_free(&n->g);
    world_close(&n->w);
}

static cd_coll_func small_path(cd_kind kind)
{
    return kind == CD_BARRIER ? cd_net_barrier_run : kind == CD_BROADCAST ? cd_net_tree_run
           : is_reduction(kind) ? cd_net_small_run : cd_net_move_run;
}

static cd_coll_func large_path(cd_kind kind)
{
    return kind == CD_BARRIER ? cd_net_barrier_run : kind == CD_BROADCAST ? cd_net_chain_run
           : is_reduction(kind) ? cd_net_slice_run : cd_net_move_run;
}

static void add_net(case_list *l, cd_kind kind, cd_coll_func run, size_t count, int layout)
{
    size_t pick = l->count;
    test_case c = {.kind = kind, .run = run, .count = count, .layout = layout, .in_place = pick % 3 == 0, .lists = pick % 2 == 0};
    if (is_reduction(kind)) {
        c.dtype = reductions[pick % 8].dtype;
        c.redop = reductions[pick % 8].redop;
        c.item = reductions[pick % 8].item;
    } else {
        c.dtype = moved[pick % 6].dtype;
        c.item = moved[pick % 6].item;
    }
    if (count > 1000)
        c.count = count * 4 / c.item; /* as many bytes for every dtype: time */
    add(l, c);
    c.uneven = kind >= CD_ALL_GATHER && run != cd_net_small_run;
    if (c.uneven)
        add(l, c);
}

static void test_matrix(int ranks, world_kind pipes)
{
    static const size_t few[] = {0, 1, 2, 13, 100, 1023};
    static const size_t many[] = {3, 5000, 16385, 70001};
    net_ranks n;
    net_ranks_make(&n, ranks, pipes);
    case_list l = {.g = &n.g};
    for (int kind = CD_BARRIER; kind <= CD_ALL_TO_ALL; kind++) {
        for (int i = 0; i < 6; i++) {
            for (int layout = 0; layout < (CHECK_BRIEF ? 1 : LAYOUTS); layout++)
                add_net(&l, (cd_kind)kind, i % 2 ? NULL : small_path((cd_kind)kind), few[i], (layout + i + kind) % LAYOUTS);
        }
        for (int i = 0; i < (ranks > 4 || CHECK_BRIEF ? 2 : ranks > 2 ? 3 : 4); i++)
            add_net(&l, (cd_kind)kind, large_path((cd_kind)kind), many[i], (i + kind) % LAYOUTS);
    }
    check_on_ranks(ranks, run_list_on_rank, &l);
    free(l.list);
    net_ranks_free(&n);
}

/* More chunks than are under way at a time, in place and strided (K05: non-roots keep their input, checked by the cases). */
static void test_many_chunks(int ranks, world_kind pipes)
{
    net_ranks n;
    net_ranks_make(&n, ranks, pipes);
    case_list l = {.g = &n.g};
    size_t count = ((size_t)3 << 18) + 12345;
    for (int kind = CD_ALL_REDUCE; kind <= CD_ALL_TO_ALL; kind++) {
        test_case c = {.kind = (cd_kind)kind, .run = large_path((cd_kind)kind), .dtype = CD_FLOAT32, .redop = CD_SUM, .item = 4,
                       .count = count, .in_place = true};
        add(&l, c);
        c.layout = GAPS;
        c.uneven = kind >= CD_ALL_GATHER;
        c.count = count / 3;
        add(&l, c);
        c.run = small_path((cd_kind)kind); /* a path for small ones takes large ones too */
        c.uneven = false;
        add(&l, c);
    }
    check_on_ranks(ranks, run_list_on_rank, &l);
    free(l.list);
    net_ranks_free(&n);
}

/* A long random sequence: kinds, sizes and paths that follow each other in every order. The jitter build (make JITTER=1) puts
 * yields and naps before every call on a socket. */
static void test_soak(int ranks, world_kind pipes)
{
    size_t count = CHECK_BRIEF ? 200 : pipes == WORLD_MIXED ? 1000 : 2000;
    net_ranks n;
    net_ranks_make(&n, ranks, pipes);
    case_list l = {.g = &n.g};
    uint64_t state = (uint64_t)ranks;
    while (l.count < count) {
        state = scramble(state + 1);
        cd_kind kind = (cd_kind)(state % (CD_ALL_TO_ALL + 1));
        size_t most = state >> 8 & 31 ? 200 : 20000;
        cd_coll_func run = state >> 16 & 1 ? NULL : state >> 17 & 1 ? small_path(kind) : large_path(kind);
        add_net(&l, kind, run, (size_t)(state >> 20) % most, (int)(state >> 40) % LAYOUTS);
    }
    check_on_ranks(ranks, run_list_on_rank, &l);
    free(l.list);
    net_ranks_free(&n);
}

/* K50: no power of two, and many. */
static void test_large_world(int ranks, world_kind pipes)
{
    net_ranks n;
    net_ranks_make(&n, ranks, pipes);
    case_list l = {.g = &n.g};
    for (int kind = CD_BARRIER; kind <= CD_ALL_TO_ALL; kind++) {
        add_net(&l, (cd_kind)kind, small_path((cd_kind)kind), 2, 0);
        add_net(&l, (cd_kind)kind, large_path((cd_kind)kind), 5000, 1);
    }
    check_on_ranks(ranks, run_list_on_rank, &l);
    free(l.list);
    net_ranks_free(&n);
}

/* ---- bytes ---- */

typedef struct {
    net_ranks *n;
    test_case c;
    uint64_t sent[16];
} byte_case;

static void run_byte_case(int rank, void *ctx)
{
    byte_case *b = ctx;
    cd_mesh *mesh = b->n->g.teams[rank].mesh;
    uint64_t before = cd_mesh_bytes_sent(mesh);
    run_case(&b->n->g, rank, &b->c, 50);
    b->sent[rank] = cd_mesh_bytes_sent(mesh) - before;
}

/* The tables at the top of coll/net_*.c, for a vector (blocks: one block) of `bytes`. */
static uint64_t table_bytes(const test_case *c, uint64_t bytes, int ranks, int rank)
{
    uint64_t h = sizeof(cd_net_hello), others = (uint64_t)ranks - 1, log = 0, children = 0;
    while ((1 << log) < ranks)
        log++;
    bool root = rank == c->root;
    int place = (rank - c->root + ranks) % ranks;
    switch (c->kind) {
    case CD_BARRIER: return h * log;
    case CD_ALL_REDUCE:
        return c->run == cd_net_small_run ? others * (h + bytes) : others * h + 2 * bytes / (uint64_t)ranks * others;
    case CD_REDUCE:
        if (c->run == cd_net_small_run)
            return h * log + (root ? 0 : h + bytes);
        return others * h + bytes / (uint64_t)ranks * (others + !root);
    case CD_BROADCAST:
        for (int distance = 1; distance < ranks; distance <<= 1)
            children += place < distance && place + distance < ranks;
        return h * log + bytes * (bytes <= CD_NET_CARRY ? children : place != ranks - 1); /* in the hellos or by the chain */
    case CD_ALL_GATHER: return others * (h + bytes);
    case CD_GATHER: return h * (1 + log) + (root ? 0 : h + bytes);
    case CD_SCATTER: return h * (1 + log) + (root ? others * (h + bytes) : 0);
    default: return others * (h + bytes); /* REDUCE_SCATTER, ALL_TO_ALL: blocks */
    }
}

static void test_bytes(int ranks, world_kind pipes)
{
    static byte_case b;
    net_ranks n;
    net_ranks_make(&n, ranks, pipes);
    for (int kind = CD_BARRIER; kind <= CD_ALL_TO_ALL; kind++) {
        for (int large = 0; large < 2; large++) {
            size_t count = large ? 64 * 1024 * (size_t)ranks : 64 * (size_t)ranks;
            bool rooted = kind == CD_REDUCE || kind == CD_BROADCAST || kind == CD_GATHER || kind == CD_SCATTER;
            b = (byte_case){.n = &n, .c = {.kind = (cd_kind)kind, .dtype = CD_FLOAT32, .redop = CD_SUM, .item = 4, .count = count,
                                           .root = rooted ? ranks - 1 : -1}};
            b.c.run = large || kind == CD_BROADCAST ? large_path((cd_kind)kind) : small_path((cd_kind)kind);
            check_on_ranks(ranks, run_byte_case, &b);
            for (int rank = 0; rank < ranks; rank++)
                CHECK(b.sent[rank] == table_bytes(&b.c, count * 4, ranks, rank));
        }
    }
    net_ranks_free(&n);
}

/* ---- disagreement ---- */

typedef struct {
    net_ranks *n;
    cd_op ops[4];
    cd_coll_func runs[4];
    cd_status expected;
    const char *says;
    int blamed;
} dispute;

static void disagree(int rank, void *ctx)
{
    dispute *d = ctx;
    cd_op op = d->ops[rank];
    if (!d->runs[rank])
        return;
    size_t bytes = op.count * 4;
    unsigned char *in = malloc(bytes + 1), *out = malloc(bytes + 1);
    memset(in, 7, bytes + 1);
    memset(out, 9, bytes + 1);
    cd_span from = shm_span(in, op.count, 4), to = shm_span(out, op.count, 4);
    op.in = shm_one(&from);
    op.out = shm_one(&to);
    cd_patience patience = shm_ranks_patience(&d->n->g, d->expected == CD_TIMED_OUT ? 200 * CD_NS_PER_MS : 30 * CD_NS_PER_S);
    CHECK_FAILS(d->runs[rank](&d->n->g.teams[rank], &op, &patience), d->expected);
    if (d->expected == CD_MISMATCH)
        cd_cause_publish(d->n->g.teams[rank].cause, cd_last_error()); /* as a group does */
    CHECK(strstr(cd_last_error()->text, d->says));
    if (d->blamed >= 0)
        CHECK(cd_last_error()->rank == d->blamed);
    for (size_t i = 0; i < bytes + 1; i++)
        CHECK(in[i] == 7 && (d->expected != CD_MISMATCH || out[i] == 9));
    free(in);
    free(out);
}

static cd_op op_for(cd_kind kind, size_t count)
{
    return (cd_op){.kind = kind, .dtype = CD_FLOAT32, .redop = CD_SUM, .root = -1, .count = count, .item_bytes = 4, .ndim = 1,
                   .shape = {(int64_t)count}, .sequence = 12};
}

static void test_disagreement(int unused, world_kind pipes)
{
    (void)unused;
    static const size_t counts[] = {10, 2000, 100000, 400000};
    for (int a = 0; a < 4; a++) {
        for (int b = 0; b < 4; b++) {
            if (a == b)
                continue;
            net_ranks n;
            net_ranks_make(&n, 2, pipes);
            dispute d = {.n = &n, .expected = CD_MISMATCH, .says = "element count differs", .blamed = -1};
            d.ops[0] = op_for(CD_ALL_REDUCE, counts[a]);
            d.ops[1] = op_for(CD_ALL_REDUCE, counts[b]);
            for (int r = 0; r < 2; r++)
                d.runs[r] = d.ops[r].count * 4 <= CD_NET_CARRY ? cd_net_small_run : cd_net_slice_run;
            check_on_ranks(2, disagree, &d);
            net_ranks_free(&n);
        }
    }
    net_ranks n;
    net_ranks_make(&n, 3, pipes);
    dispute d = {.n = &n, .expected = CD_MISMATCH, .says = "(operation differs)", .blamed = -1};
    for (int r = 0; r < 3; r++) {
        d.ops[r] = op_for(r == 1 ? CD_BARRIER : CD_ALL_REDUCE, r == 1 ? 0 : 100000);
        d.runs[r] = r == 1 ? cd_net_barrier_run : cd_net_slice_run;
    }
    check_on_ranks(3, disagree, &d);
    net_ranks_free(&n);
}

typedef struct {
    net_ranks *n;
    cd_op ops[5];
    cd_coll_func runs[5];
} rooted_dispute;

static void disagree_about_root(int rank, void *ctx)
{
    rooted_dispute *d = ctx;
    cd_op op = d->ops[rank];
    int ranks = d->n->w.ranks;
    size_t room = (op.count + 1) * 4 * (size_t)ranks;
    unsigned char *in = malloc(room), *out = malloc(room);
    memset(in, 7, room);
    memset(out, 9, room);
    bool gathers = op.kind == CD_GATHER && op.root == rank, scatters = op.kind == CD_SCATTER && op.root == rank;
    cd_span from = shm_span(in, op.count * (scatters ? (size_t)ranks : 1), 4);
    cd_span to = shm_span(out, op.count * (gathers ? (size_t)ranks : 1), 4);
    op.in = shm_one(&from);
    op.out = shm_one(&to);
    cd_patience patience = shm_ranks_patience(&d->n->g, 30 * CD_NS_PER_S);
    CHECK_FAILS(d->runs[rank](&d->n->g.teams[rank], &op, &patience), CD_MISMATCH);
    cd_cause_publish(d->n->g.teams[rank].cause, cd_last_error()); /* as a group does */
    CHECK(strstr(cd_last_error()->text, "differs)"));
    for (size_t i = 0; i < room; i++)
        CHECK(in[i] == 7 && out[i] == 9);
    free(in);
    free(out);
}

/* One of several ranks calls something else, be it one that would only send: all fail in that call, nothing is written. */
static void test_rooted_disagreement(int ranks, world_kind pipes)
{
    static const cd_kind kinds[] = {CD_BROADCAST, CD_REDUCE, CD_GATHER, CD_SCATTER, CD_ALL_REDUCE, CD_BARRIER};
    for (int trial = 0; trial < 6 * 4 * ranks; trial++) {
        cd_kind kind = kinds[trial % 6];
        int how = trial / 6 % 4, odd = trial / 24;
        size_t count = trial % 5 < 3 ? 10 : 70000;
        net_ranks n;
        net_ranks_make(&n, ranks, pipes);
        rooted_dispute d = {.n = &n};
        for (int r = 0; r < ranks; r++) {
            cd_kind called = r == odd && how == 0 ? kinds[(trial + 1 + trial / 6 % 5) % 6] : kind;
            bool rooted = called == CD_BROADCAST || called == CD_REDUCE || called == CD_GATHER || called == CD_SCATTER;
            d.ops[r] = op_for(called, called == CD_BARRIER ? 0 : r == odd && how == 1 ? count + 3 : count);
            d.ops[r].root = rooted ? (trial + (r == odd && how == 2)) % ranks : -1;
            d.ops[r].dtype = r == odd && (how == 3 || !rooted || called == CD_BARRIER) ? CD_INT32 : CD_FLOAT32;
            bool small = d.ops[r].count * 4 <= CD_NET_CARRY;
            d.runs[r] = small ? small_path(called) : large_path(called);
        }
        check_on_ranks(ranks, disagree_about_root, &d);
        net_ranks_free(&n);
    }
}

/* A rank that does not come is named; so is one that left, long before the deadline. */
static void test_absence(int unused, world_kind pipes)
{
    (void)unused;
    for (int left = 0; left < 2; left++) {
        for (int large = 0; large < 2; large++) {
            net_ranks n;
            net_ranks_make(&n, 3, pipes);
            dispute d = {.n = &n, .expected = left ? CD_PEER_LOST : CD_TIMED_OUT, .says = "all_reduce",
                         .blamed = n.g.world_ranks[2]};
            for (int r = 0; r < 2; r++) {
                d.ops[r] = op_for(CD_ALL_REDUCE, large ? 100000 : 10);
                d.runs[r] = large ? cd_net_slice_run : cd_net_small_run;
            }
            atomic_store(&n.g.gone[2], (uint32_t)left);
            check_on_ranks(2, disagree, &d);
            net_ranks_free(&n);
        }
    }
}

/* The connection to a rank breaks in the middle: the others are told and blame it (K08). */
static void break_off(int rank, void *ctx)
{
    dispute *d = ctx;
    if (rank < 2) {
        disagree(rank, ctx);
        return;
    }
    cd_sleep_ns(30 * CD_NS_PER_MS);
    cd_error why = {.code = CD_PEER_LOST, .rank = d->blamed, .text = "rank 0 was killed by SIGKILL"};
    for (int r = 0; r < 2; r++)
        cd_mesh_fail_peer(d->n->g.teams[r].mesh, d->blamed, &why);
}

static void test_loss(int unused, world_kind pipes)
{
    (void)unused;
    net_ranks n;
    net_ranks_make(&n, 3, pipes);
    dispute d = {.n = &n, .expected = CD_PEER_LOST, .says = "SIGKILL", .blamed = n.g.world_ranks[2]};
    for (int r = 0; r < 2; r++) {
        d.ops[r] = op_for(CD_ALL_REDUCE, 100000);
        d.runs[r] = cd_net_slice_run;
    }
    check_on_ranks(3, break_off, &d);
    net_ranks_free(&n);
}

typedef struct {
    const char *name;
    void (*run)(int ranks, world_kind pipes);
    int ranks;
    world_kind pipes;
} step;

static step steps[64];
static int step_count;

static void plan(const char *name, void (*run)(int ranks, world_kind pipes), int ranks, world_kind pipes)
{
    CHECK(step_count < (int)(sizeof steps / sizeof *steps));
    steps[step_count++] = (step){name, run, ranks, pipes};
}

static void plan_all(void)
{
    static const int worlds[] = {1, 2, 3, 4, 5, 8};
    for (world_kind pipes = 0; pipes < WORLD_KINDS; pipes++) {
        for (size_t i = CHECK_BRIEF; i < sizeof worlds / sizeof *worlds - CHECK_BRIEF; i++) {
            if (pipes == WORLD_SHM || worlds[i] == 2 || (pipes == WORLD_TCP && worlds[i] == 3) || (pipes == WORLD_MIXED && worlds[i] == 5))
                plan("matrix", test_matrix, worlds[i], pipes);
        }
        plan("disagreement", test_disagreement, 2, pipes);
        plan("rooted disagreement", test_rooted_disagreement, 2, pipes);
        plan("absence", test_absence, 3, pipes);
        plan("loss", test_loss, 3, pipes);
    }
    plan("soak", test_soak, 2, WORLD_TCP);
    plan("soak", test_soak, 3, WORLD_TCP);
    plan("soak", test_soak, 4, WORLD_MIXED);
    plan("rooted disagreement", test_rooted_disagreement, 4, WORLD_MIXED);
    plan("rooted disagreement", test_rooted_disagreement, 5, WORLD_SHM);
    plan("many chunks", test_many_chunks, 2, WORLD_SHM);
    if (!CHECK_BRIEF) {
        plan("many chunks", test_many_chunks, 3, WORLD_MIXED);
        plan("large world", test_large_world, 17, WORLD_SHM);
        plan("large world", test_large_world, 32, WORLD_SHM);
    }
    for (int ranks = 2; ranks <= (CHECK_BRIEF ? 3 : 5); ranks++)
        plan("bytes", test_bytes, ranks, WORLD_SHM);
}

/* Without arguments all. "2 6": the third of six parts, which tells the time of each step. */
int main(int count, char **arguments)
{
    int part = count > 2 ? atoi(arguments[1]) : 0, parts = count > 2 ? atoi(arguments[2]) : 1;
    plan_all();
    CHECK(parts > 0 && part >= 0 && part < parts);
    for (int i = part; i < step_count; i += parts) {
        uint64_t began = cd_now_ns();
        steps[i].run(steps[i].ranks, steps[i].pipes);
        if (parts > 1)
            printf("step %d of %d, %s, %d ranks, pipes %d: %.1f s\n", i, step_count, steps[i].name, steps[i].ranks,
                   (int)steps[i].pipes, (double)(cd_now_ns() - began) / 1e9);
        fflush(stdout);
    }
    puts("coll net: ok");
    return 0;
}
