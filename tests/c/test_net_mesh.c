/* The message engine: order, matching, large messages, cancelling, peers that go, close. Each over every kind of pipe. */
#include "mesh_world.h"

#include "base/clock.h"

/* Every rank sends to every rank, itself included, all sizes, large ones crossing; receives are posted in reverse order. */
static void exchange_all(int rank, void *ctx)
{
    static const size_t sizes[] = {0, 1, 24, 25, 64, 1000, 16384, 16385, 262144, LARGE};
    enum { SIZES = 10 };
    mesh_world *w = ctx;
    int n = 0, total = 2 * SIZES * w->ranks;
    cd_xfer *x = calloc((size_t)total, sizeof *x), **list = calloc((size_t)total, sizeof *list);
    uint8_t **out = calloc((size_t)(SIZES * w->ranks), sizeof *out), **in = calloc((size_t)(SIZES * w->ranks), sizeof *in);
    for (int peer = 0; peer < w->ranks; peer++) {
        for (int s = 0; s < SIZES; s++) {
            out[peer * SIZES + s] = make_message(rank, peer, sizes[s]);
            cd_mesh_send(w->mesh[rank], &x[n], peer, (cd_match){5, s}, 9, out[peer * SIZES + s], sizes[s], s % 2);
            list[n] = &x[n];
            n++;
        }
    }
    for (int peer = w->ranks - 1; peer >= 0; peer--) {
        for (int s = SIZES - 1; s >= 0; s--) {
            in[peer * SIZES + s] = calloc(1, sizes[s] + 1);
            cd_mesh_recv(w->mesh[rank], &x[n], peer, (cd_match){5, s}, 9, in[peer * SIZES + s], sizes[s], false, s % 2);
            list[n] = &x[n];
            n++;
        }
    }
    cd_patience patience = patience_s(60, w->ranks);
    CHECK_OK(cd_mesh_wait(w->mesh[rank], list, n, &patience));
    for (int peer = 0; peer < w->ranks; peer++) {
        for (int s = 0; s < SIZES; s++) {
            check_message(in[peer * SIZES + s], peer, rank, sizes[s]);
            free(in[peer * SIZES + s]);
            free(out[peer * SIZES + s]);
        }
    }
    free(in);
    free(out);
    free(list);
    free(x);
}

static void test_exchange(world_kind kind)
{
    for (int ranks = 1; ranks <= 4; ranks += ranks == 2 ? 2 : 1) {
        mesh_world w = world_open(ranks, kind);
        check_on_ranks(ranks, exchange_all, &w);
        world_close(&w);
    }
}

/* Same tag: first in, first out, also when small and large alternate; another context does not take part (K109). */
static void order_body(int rank, void *ctx)
{
    mesh_world *w = ctx;
    enum { N = 40 };
    cd_xfer x[2 * N], *list[2 * N];
    uint32_t *data[N];
    for (int i = 0; i < N; i++) {
        size_t bytes = i % 3 == 0 ? 100000 : i % 3 == 1 ? 8 : 4000;
        data[i] = calloc(1, bytes);
        uint64_t context = i % 2 ? 100 : 200;
        if (rank == 0) {
            data[i][0] = (uint32_t)i;
            cd_mesh_send(w->mesh[0], &x[i], 1, (cd_match){context, 4}, 0, data[i], bytes, false);
        } else {
            cd_mesh_recv(w->mesh[1], &x[i], 0, (cd_match){context, 4}, 0, data[i], bytes, false, false);
        }
        list[i] = &x[i];
    }
    cd_patience patience = patience_s(30, 2);
    CHECK_OK(cd_mesh_wait(w->mesh[rank], list, N, &patience));
    for (int i = 0; i < N; i++) {
        CHECK(data[i][0] == (uint32_t)i);
        free(data[i]);
    }
}

/* K110: any source takes each rank's message once and names it. */
static void any_source_body(int rank, void *ctx)
{
    mesh_world *w = ctx;
    for (int round = 0; round < 20; round++) {
        size_t bytes = round % 2 ? 8 : 50000;
        uint8_t *data = make_message(rank, round, bytes);
        if (rank != 2) {
            CHECK_OK(send_to(w->mesh[rank], 2, round, data, bytes, 30));
        } else {
            int seen = 0, source;
            for (int i = 0; i < 2; i++) {
                CHECK_OK(recv_from(w->mesh[2], -1, round, data, bytes, 30, &source));
                check_message(data, source, round, bytes);
                seen |= 1 << source;
            }
            CHECK(seen == 3);
        }
        free(data);
    }
}

static void test_sizes_and_signatures_must_agree(world_kind kind)
{
    mesh_world w = world_open(2, kind);
    char out[64] = "hello", in[64];
    CHECK_OK(send_to(w.mesh[0], 1, 1, out, 32, 5));
    CHECK_FAILS(recv_from(w.mesh[1], 0, 1, in, 16, 5, NULL), CD_MISMATCH);
    CHECK(strstr(cd_last_error()->text, "32 bytes") && strstr(cd_last_error()->text, "16"));
    CHECK_OK(send_to(w.mesh[0], 1, 1, out, 32, 5));
    CHECK_FAILS(recv_from(w.mesh[1], 0, 1, in, 48, 5, NULL), CD_MISMATCH);
    cd_xfer a, b, *list = &b;
    cd_patience patience = patience_s(5, 2);
    cd_mesh_send(w.mesh[0], &a, 1, (cd_match){1, 2}, 77, out, 32, false);
    cd_mesh_recv(w.mesh[1], &b, 0, (cd_match){1, 2}, 78, in, 32, false, false);
    CHECK_FAILS(cd_mesh_wait(w.mesh[1], &list, 1, &patience), CD_MISMATCH);
    cd_xfer_clear(&b);
    cd_mesh_send(w.mesh[0], &a, 1, (cd_match){1, 2}, 77, out, 32, false);
    cd_mesh_recv(w.mesh[1], &b, 0, (cd_match){1, 2}, 77, in, 48, true, false);
    CHECK_OK(cd_mesh_wait(w.mesh[1], &list, 1, &patience));
    CHECK(b.bytes == 32 && b.source == 0 && !strcmp(in, "hello"));
    world_close(&w);
}

/* A large message that does not fit its receive fails on both sides; the pair goes on. */
static void large_mismatch_body(int rank, void *ctx)
{
    mesh_world *w = ctx;
    uint8_t *data = make_message(rank, 0, LARGE);
    if (rank == 0)
        CHECK_FAILS(send_to(w->mesh[0], 1, 1, data, LARGE, 30), CD_MISMATCH);
    else
        CHECK_FAILS(recv_from(w->mesh[1], 0, 1, data, LARGE - 1, 30, NULL), CD_MISMATCH);
    if (rank == 0)
        CHECK_OK(send_to(w->mesh[0], 1, 2, data, LARGE, 30));
    else
        CHECK_OK(recv_from(w->mesh[1], 0, 2, data, LARGE, 30, NULL));
    check_message(data, 0, 0, LARGE);
    free(data);
}

/* K104: both send a large message first: each times out with a text that says why, and then the pair still works. */
static void send_send_body(int rank, void *ctx)
{
    mesh_world *w = ctx;
    uint8_t *out = make_message(rank, 1 - rank, LARGE), *in = calloc(1, LARGE);
    CHECK_OK(send_to(w->mesh[rank], 1 - rank, 1, out, 1000, 30));
    CHECK_OK(recv_from(w->mesh[rank], 1 - rank, 1, in, 1000, 30, NULL));
    CHECK_FAILS(send_to(w->mesh[rank], 1 - rank, 2, out, LARGE, 0.2), CD_TIMED_OUT);
    CHECK(cd_last_error()->rank == 1 - rank && strstr(cd_last_error()->text, "both send first"));
    cd_xfer x[2], *list[2] = {&x[0], &x[1]};
    cd_mesh_send(w->mesh[rank], &x[0], 1 - rank, (cd_match){1, 3}, 0, out, LARGE, true);
    cd_mesh_recv(w->mesh[rank], &x[1], 1 - rank, (cd_match){1, 3}, 0, in, LARGE, false, true);
    cd_patience patience = patience_s(30, 2);
    CHECK_OK(cd_mesh_wait(w->mesh[rank], list, 2, &patience));
    check_message(in, 1 - rank, rank, LARGE);
    free(out);
    free(in);
}

static void test_probe(world_kind kind)
{
    mesh_world w = world_open(2, kind);
    size_t bytes;
    int source;
    cd_patience patience = patience_s(0.05, 2);
    CHECK_FAILS(cd_mesh_probe(w.mesh[1], 0, (cd_match){1, 6}, &bytes, &source, &patience), CD_TIMED_OUT);
    uint8_t *out = make_message(0, 1, LARGE), *in = calloc(1, LARGE);
    cd_xfer x;
    cd_mesh_send(w.mesh[0], &x, 1, (cd_match){1, 6}, 0, out, LARGE, true);
    patience = patience_s(30, 2);
    CHECK_OK(cd_mesh_probe(w.mesh[1], -1, (cd_match){1, 6}, &bytes, &source, &patience));
    CHECK(bytes == LARGE && source == 0);
    CHECK_OK(recv_from(w.mesh[1], 0, 6, in, LARGE, 30, NULL)); /* the helper of rank 0 sends */
    check_message(in, 0, 1, LARGE);
    cd_xfer *list = &x;
    CHECK_OK(cd_mesh_wait(w.mesh[0], &list, 1, &patience));
    free(in);
    free(out);
    world_close(&w);
}

/* A cancelled transfer, wherever it stands, leaves its memory alone and the pair usable. */
static void test_cancel(world_kind kind)
{
    for (int turns = 0; turns < 12; turns++) {
        for (int who = 0; who < 2; who++) {
            mesh_world w = world_open(2, kind);
            uint8_t *out = make_message(0, 1, LARGE), *in = calloc(1, LARGE);
            cd_xfer a, b;
            cd_mesh_recv(w.mesh[1], &b, 0, (cd_match){1, 1}, 0, in, LARGE, false, false);
            cd_mesh_send(w.mesh[0], &a, 1, (cd_match){1, 1}, 0, out, LARGE, false);
            for (int i = 0; i < turns; i++)
                cd_mesh_test(w.mesh[i % 2], i % 2 ? &b : &a);
            bool was_done = atomic_load(who ? &b.done : &a.done) != 0;
            cd_mesh_cancel(w.mesh[who], who ? &b : &a);
            CHECK(atomic_load(who ? &b.done : &a.done) == 1);
            /* A send whose message was read and taken before is complete, and nothing was cancelled. */
            bool cancelled = who ? !was_done : a.error != NULL;
            CHECK(!(was_done && cancelled));
            if (cancelled)
                CHECK((who ? b.error : a.error)->code == CD_ABORTED);
            memset(who ? in : out, 0xEE, LARGE);
            cd_deadline soon = cd_deadline_after_ns(who == 1 && turns < 4 ? 100 * CD_NS_PER_MS : 20 * CD_NS_PER_S);
            while (!(cd_mesh_test(w.mesh[0], &a) & cd_mesh_test(w.mesh[1], &b)) && !cd_deadline_passed(soon))
                continue;
            CHECK(atomic_load(&b.done));
            if (!atomic_load(&a.done)) { /* the receive went before the message was matched: it waits for another one */
                CHECK(who == 1 && turns < 4);
                cd_mesh_cancel(w.mesh[0], &a);
            }
            if (who == 0) {
                CHECK(cancelled == (b.error != NULL)); /* nothing that was cancelled is delivered, and all that was not */
                if (!b.error)
                    check_message(in, 0, 1, LARGE);
            }
            if (!was_done && who == 1)
                CHECK(in[LARGE - 1] == 0xEE && in[0] == 0xEE);
            cd_xfer_clear(&a);
            cd_xfer_clear(&b);
            char text[6];
            cd_xfer r, *list = &r;
            cd_patience patience = patience_s(20, 2);
            cd_mesh_recv(w.mesh[1], &r, 0, (cd_match){1, 2}, 0, text, 6, false, true);
            CHECK_OK(send_to(w.mesh[0], 1, 2, "again", 6, 20));
            CHECK_OK(cd_mesh_wait(w.mesh[1], &list, 1, &patience));
            CHECK(!strcmp(text, "again"));
            world_close(&w);
            free(in);
            free(out);
        }
    }
}

typedef struct {
    mesh_world w;
    _Atomic int waiting;
    cd_status expected;
} ending;

static void wait_for_the_end(int thread, void *ctx)
{
    ending *e = ctx;
    if (thread == 3) {
        while (atomic_load(&e->waiting) < 3)
            cd_sleep_ns(1000000);
        cd_sleep_ns(20000000);
        cd_error why = {.code = e->expected, .rank = 1, .text = "rank 1 was killed by SIGKILL"};
        if (e->expected == CD_PEER_LOST)
            cd_mesh_fail_peer(e->w.mesh[0], 1, &why);
        else
            cd_mesh_close(e->w.mesh[0], &why);
        return;
    }
    static char data[3][100000];
    cd_xfer x, *list = &x;
    if (thread == 0)
        cd_mesh_recv(e->w.mesh[0], &x, 1, (cd_match){1, 1}, 0, data[0], 8, false, false);
    else if (thread == 1)
        cd_mesh_send(e->w.mesh[0], &x, 1, (cd_match){1, 2}, 0, data[1], 100000, false);
    else
        cd_mesh_recv(e->w.mesh[0], &x, 1, (cd_match){1, 3}, 0, data[2], 100000, false, true);
    atomic_fetch_add(&e->waiting, 1);
    cd_patience patience = patience_s(30, 8);
    CHECK_FAILS(cd_mesh_wait(e->w.mesh[0], &list, 1, &patience), e->expected);
    CHECK(strstr(cd_last_error()->text, "SIGKILL"));
    cd_xfer_clear(&x);
}

/* K08, K25: threads that wait are all told; later transfers fail with the same cause. */
static void test_ends_reach_all_waiters(world_kind kind, cd_status expected)
{
    ending e = {.w = world_open(2, kind), .expected = expected};
    check_on_ranks(4, wait_for_the_end, &e);
    char byte;
    CHECK_FAILS(send_to(e.w.mesh[0], 1, 1, &byte, 1, 5), expected);
    CHECK_FAILS(recv_from(e.w.mesh[0], 1, 1, &byte, 1, 5, NULL), expected);
    CHECK(strstr(cd_last_error()->text, "SIGKILL"));
    world_close(&e.w);
}

/* What a peer sent before it closed is received; then its loss is seen. */
static void test_peer_closes(world_kind kind)
{
    mesh_world w = world_open(2, kind);
    char out[300] = "last words", in[300];
    CHECK_OK(send_to(w.mesh[1], 0, 1, out, sizeof out, 5));
    cd_error why = {.code = CD_ABORTED, .rank = -1, .text = "bye"};
    cd_mesh_close(w.mesh[1], &why);
    CHECK_FAILS(recv_from(w.mesh[0], 1, 2, in, 1, 5, NULL), CD_PEER_LOST);
    CHECK(cd_last_error()->rank == 1);
    CHECK_OK(recv_from(w.mesh[0], 1, 1, in, sizeof in, 5, NULL));
    CHECK(!strcmp(in, "last words"));
    CHECK_FAILS(send_to(w.mesh[0], 1, 2, in, 1, 5), CD_PEER_LOST);
    world_close(&w);
}

/* A sender that nobody listens to: memory is bounded, small messages turn into announced ones, nothing is lost. */
static void test_flood(world_kind kind)
{
    mesh_world w = world_open(2, kind);
    enum { N = 3000, BYTES = 16000 };
    cd_xfer *x = calloc(N, sizeof *x), **list = calloc(N, sizeof *list);
    uint8_t *out = make_message(0, 1, BYTES), *in = calloc(1, BYTES), mark[8] = {0};
    for (int i = 0; i < N; i++) {
        cd_mesh_send(w.mesh[0], &x[i], 1, (cd_match){1, i % 2}, 0, out, BYTES, false);
        list[i] = &x[i];
        cd_xfer none = {0};
        cd_mesh_test(w.mesh[1], &none);
        cd_mesh_test(w.mesh[0], &none);
    }
    uint64_t done = 0;
    for (int i = 0; i < N; i++)
        done += atomic_load(&x[i].done) != 0;
    CHECK(done * BYTES >= (UINT64_C(7) << 20) && done * BYTES <= (UINT64_C(16) << 20));
    /* Another group's message passes. */
    cd_xfer other, extra;
    cd_mesh_recv(w.mesh[1], &other, 0, (cd_match){2, 0}, 0, mark, 8, false, false);
    cd_mesh_send(w.mesh[0], &extra, 1, (cd_match){2, 0}, 0, "passed!", 8, false);
    for (int i = 0; i < 1000 && !(cd_mesh_test(w.mesh[1], &other) & cd_mesh_test(w.mesh[0], &extra)); i++)
        continue;
    CHECK(!strcmp((char *)mark, "passed!"));
    for (int i = 0; i < N; i++) {
        cd_xfer r;
        memset(in, 0, BYTES);
        cd_mesh_recv(w.mesh[1], &r, 0, (cd_match){1, i % 2}, 0, in, BYTES, false, false);
        while (!cd_mesh_test(w.mesh[1], &r))
            cd_mesh_test(w.mesh[0], &x[i]);
        CHECK(!r.error);
        check_message(in, 0, 1, BYTES);
    }
    cd_patience patience = patience_s(10, 2);
    CHECK_OK(cd_mesh_wait(w.mesh[0], list, N, &patience));
    free(in);
    free(out);
    free(list);
    free(x);
    world_close(&w);
}

static void test_forget(world_kind kind)
{
    mesh_world w = world_open(2, kind);
    char small[100] = {0}, in[100];
    static char large[100000];
    cd_xfer x, r, *list = &x;
    CHECK_OK(send_to(w.mesh[0], 1, 1, small, sizeof small, 5));
    cd_mesh_send(w.mesh[0], &x, 1, (cd_match){1, 2}, 0, large, sizeof large, true);
    cd_mesh_recv(w.mesh[1], &r, 0, (cd_match){3, 0}, 0, in, 1, false, false);
    cd_mesh_test(w.mesh[1], &r);
    cd_mesh_forget(w.mesh[1], 1);
    cd_patience patience = patience_s(5, 2);
    CHECK_FAILS(cd_mesh_wait(w.mesh[0], &list, 1, &patience), CD_PEER_LOST);
    CHECK(cd_last_error()->rank == 1 && strstr(cd_last_error()->text, "rank 1 left the group"));
    /* Who knows that rank 1 is lost knows why. */
    char text[256];
    CHECK(cd_mesh_untold(w.mesh[0], text, sizeof text) == 1);
    cd_mesh_tell_loss(w.mesh[0], 1);
    CHECK(cd_mesh_untold(w.mesh[0], text, sizeof text) == 0);
    cd_xfer_clear(&x);
    CHECK_OK(send_to(w.mesh[0], 1, 1, small, sizeof small, 5));
    CHECK_FAILS(send_to(w.mesh[0], 1, 1, large, sizeof large, 0.05), CD_TIMED_OUT); /* nobody reads yet */
    cd_mesh_send(w.mesh[0], &x, 1, (cd_match){3, 0}, 0, small, 1, false);
    while (!cd_mesh_test(w.mesh[1], &r))
        continue;
    size_t bytes;
    int source;
    patience = patience_s(0, 2);
    CHECK_FAILS(cd_mesh_probe(w.mesh[1], 0, (cd_match){1, 1}, &bytes, &source, &patience), CD_TIMED_OUT);
    world_close(&w);
}

/* Several threads of one rank wait at the same time, each for its own messages. */
static void many_threads_body(int thread, void *ctx)
{
    mesh_world *w = ctx;
    int rank = thread % 2, lane = thread / 2;
    uint8_t *out = make_message(rank, lane, 40000), *in = calloc(1, 40000);
    for (int i = 0; i < 100; i++) {
        size_t bytes = i % 4 == 0 ? 40000 : (size_t)i;
        if (rank == 0) {
            CHECK_OK(send_to(w->mesh[0], 1, lane, out, bytes, 60));
            CHECK_OK(recv_from(w->mesh[0], 1, lane, in, bytes, 60, NULL));
            check_message(in, 1, lane, bytes);
        } else {
            CHECK_OK(recv_from(w->mesh[1], 0, lane, in, bytes, 60, NULL));
            CHECK_OK(send_to(w->mesh[1], 0, lane, out, bytes, 60));
            check_message(in, 0, lane, bytes);
        }
    }
    free(in);
    free(out);
}

static void on_world(world_kind kind, int ranks, int threads, check_rank_func body)
{
    mesh_world w = world_open(ranks, kind);
    check_on_ranks(threads, body, &w);
    world_close(&w);
}

static void test_all(world_kind kind)
{
    test_exchange(kind);
    on_world(kind, 2, 2, order_body);
    on_world(kind, 3, 3, any_source_body);
    test_sizes_and_signatures_must_agree(kind);
    on_world(kind, 2, 2, large_mismatch_body);
    on_world(kind, 2, 2, send_send_body);
    test_probe(kind);
    test_cancel(kind);
    test_ends_reach_all_waiters(kind, CD_PEER_LOST);
    test_ends_reach_all_waiters(kind, CD_ABORTED);
    test_peer_closes(kind);
    test_flood(kind);
    test_forget(kind);
    on_world(kind, 2, 8, many_threads_body);
}

int main(void)
{
    setenv("CDIST_SINGLE_COPY", "never", 1);
    for (world_kind kind = 0; kind < WORLD_KINDS; kind++)
        test_all(kind);
    setenv("CDIST_SINGLE_COPY", "always", 1);
    test_all(WORLD_SHM);
    puts("net mesh: ok");
    return 0;
}
