/* Large messages that are read in the sender's memory: both ways of moving them, offers, and ends at any time. */
#include "mesh_world.h"

#include <sys/mman.h>

/* A receiver that reads the sender's memory: what it cannot read comes through the pipe. */
static void test_unreadable_memory(void)
{
    mesh_world w = world_open(2, WORLD_SHM);
    size_t room = (LARGE + 4095) & ~(size_t)4095;
    uint8_t *out = mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), *in = calloc(1, LARGE);
    CHECK(out != MAP_FAILED);
    for (size_t i = 0; i < LARGE; i++)
        out[i] = pattern(0, 1, i);
    cd_xfer a, b;
    cd_mesh_recv(w.mesh[1], &b, 0, (cd_match){1, 1}, 0, in, LARGE, false, false);
    cd_mesh_send(w.mesh[0], &a, 1, (cd_match){1, 1}, 0, out, LARGE, false);
    CHECK(mprotect(out, room, PROT_NONE) == 0);
    for (int i = 0; i < 4; i++)
        CHECK(!cd_mesh_test(w.mesh[1], &b));
    CHECK(mprotect(out, room, PROT_READ) == 0);
    while (!(cd_mesh_test(w.mesh[0], &a) & cd_mesh_test(w.mesh[1], &b)))
        continue;
    CHECK(!a.error && !b.error);
    check_message(in, 0, 1, LARGE);
    world_close(&w);
    munmap(out, room);
    free(in);
}

typedef enum { LOST, CANCELLED, CLOSED, ENDS } end_kind;

/* The send ends in some way while its memory is read, or after all was read and taken and before its side has heard so. */
static void test_ends_while_read(end_kind end)
{
    enum { READS = (LARGE + (1 << 20) - 1) >> 20 };
    for (int turns = 1; turns <= READS; turns++) {
        mesh_world w = world_open(2, WORLD_SHM);
        uint8_t *out = make_message(0, 1, LARGE), *in = calloc(1, LARGE);
        cd_xfer a, b;
        cd_mesh_recv(w.mesh[1], &b, 0, (cd_match){1, 1}, 0, in, LARGE, false, false);
        cd_mesh_send(w.mesh[0], &a, 1, (cd_match){1, 1}, 0, out, LARGE, false);
        bool is_taken = turns == READS;
        for (int i = 1; i <= turns; i++)
            CHECK(cd_mesh_test(w.mesh[1], &b) == (i == READS));
        CHECK(!atomic_load(&a.done));
        cd_error why = {.code = CD_PEER_LOST, .rank = 0, .text = "rank 0 was killed by SIGKILL"};
        if (end == LOST)
            cd_mesh_fail_peer(w.mesh[1], 0, &why);
        else if (end == CANCELLED)
            cd_mesh_cancel(w.mesh[0], &a);
        else
            cd_mesh_close(w.mesh[0], &why);
        if (end != LOST) {
            CHECK(atomic_load(&a.done) && is_taken == !a.error);
            memset(out, 0xEE, LARGE);
        }
        while (!cd_mesh_test(w.mesh[1], &b))
            continue;
        if (is_taken) {
            CHECK(!b.error);
            check_message(in, 0, 1, LARGE);
        } else {
            CHECK(b.error && b.error->code == (end == CANCELLED ? CD_ABORTED : CD_PEER_LOST));
            memset(in, 0xEE, LARGE);
        }
        cd_mesh_cancel(w.mesh[0], &a);
        CHECK(cd_mesh_bytes_sent(w.mesh[0]) == (is_taken ? LARGE : 0));
        cd_mesh_test(w.mesh[1], &b);
        if (!is_taken)
            CHECK(in[0] == 0xEE && in[LARGE - 1] == 0xEE);
        cd_xfer_clear(&a);
        cd_xfer_clear(&b);
        world_close(&w);
        free(in);
        free(out);
    }
}

/* More large messages under way than can be offered, taken the last first, cancelled, refused; then every offer is free again:
 * its message is read while the sender stands still. */
static void test_many_offers(void)
{
    enum { MANY = CD_PIPE_OFFERS + 9, BYTES = 20000 };
    mesh_world w = world_open(2, WORLD_SHM);
    uint8_t *out[MANY], *in = calloc(1, BYTES);
    for (int i = 0; i < MANY; i++)
        out[i] = make_message(i, 1, BYTES);
    for (int round = 0; round < 3; round++) {
        cd_xfer a[MANY], b;
        for (int i = 0; i < MANY; i++)
            cd_mesh_send(w.mesh[0], &a[i], 1, (cd_match){1, i}, 0, out[i], BYTES, false);
        if (round == 1) /* refused, cancelled: free too */
            for (int i = 0; i < MANY; i += 2)
                cd_mesh_cancel(w.mesh[0], &a[i]);
        for (int i = MANY - 1; i >= 0; i--) {
            if (a[i].error)
                continue;
            cd_mesh_recv(w.mesh[1], &b, 0, (cd_match){1, i}, 0, in, i % 5 ? BYTES : BYTES - 1, false, false);
            while (!(cd_mesh_test(w.mesh[0], &a[i]) & cd_mesh_test(w.mesh[1], &b)))
                continue;
            CHECK(!a[i].error == !!(i % 5) && !b.error == !!(i % 5));
            if (!b.error)
                check_message(in, i, 1, BYTES);
            cd_xfer_clear(&b);
        }
        for (int i = 0; i < MANY; i++)
            cd_xfer_clear(&a[i]);
    }
    for (int i = 0; i < (int)CD_PIPE_OFFERS; i++) {
        cd_xfer a, b;
        cd_mesh_send(w.mesh[0], &a, 1, (cd_match){1, i}, 0, out[i], BYTES, false);
        cd_mesh_recv(w.mesh[1], &b, 0, (cd_match){1, i}, 0, in, BYTES, false, false);
        for (int turn = 0; turn < 3; turn++)
            cd_mesh_test(w.mesh[1], &b);
        CHECK(atomic_load(&b.done) && !atomic_load(&a.done));
        check_message(in, i, 1, BYTES);
        CHECK(cd_mesh_test(w.mesh[0], &a) && !a.error);
    }
    world_close(&w);
    for (int i = 0; i < MANY; i++)
        free(out[i]);
    free(in);
}

static void test_setting(void)
{
    cd_mesh *mesh;
    setenv("CDIST_SINGLE_COPY", "sometimes", 1);
    CHECK_FAILS(cd_mesh_create(0, 2, &mesh), CD_BAD_ARGUMENT);
    CHECK(strstr(cd_last_error()->text, "CDIST_SINGLE_COPY") && strstr(cd_last_error()->text, "never"));
}

/* More than are tried either way at first. */
static void test_many_large(void)
{
    mesh_world w = world_open(2, WORLD_SHM);
    uint8_t *out = make_message(0, 1, LARGE), *in = calloc(1, LARGE);
    for (int i = 0; i < 80; i++) {
        cd_xfer a, b;
        memset(in, 0, LARGE);
        cd_mesh_send(w.mesh[0], &a, 1, (cd_match){1, 1}, 0, out, LARGE, false);
        cd_mesh_recv(w.mesh[1], &b, 0, (cd_match){1, 1}, 0, in, LARGE, false, false);
        while (!(cd_mesh_test(w.mesh[0], &a) & cd_mesh_test(w.mesh[1], &b)))
            continue;
        CHECK(!a.error && !b.error && !memcmp(in, out, LARGE));
    }
    CHECK(cd_mesh_bytes_sent(w.mesh[0]) == UINT64_C(80) * LARGE);
    world_close(&w);
    free(in);
    free(out);
}

/* Large messages both ways at once are read, though their sender does not move, however often. */
static void test_both_ways(void)
{
    mesh_world w = world_open(2, WORLD_SHM);
    uint8_t *out[2], *in[2];
    for (int r = 0; r < 2; r++) {
        out[r] = make_message(r, 1, LARGE);
        in[r] = calloc(1, LARGE);
    }
    for (int i = 0; i < 40; i++) {
        cd_xfer send[2], recv[2];
        memset(in[1], 0, LARGE);
        for (int r = 0; r < 2; r++)
            cd_mesh_send(w.mesh[r], &send[r], !r, (cd_match){1, 1}, 0, out[r], LARGE, false);
        cd_mesh_recv(w.mesh[1], &recv[1], 0, (cd_match){1, 1}, 0, in[1], LARGE, false, false);
        for (int turn = 0; turn < 8; turn++)
            cd_mesh_test(w.mesh[1], &recv[1]);
        check_message(in[1], 0, 1, LARGE);
        cd_mesh_recv(w.mesh[0], &recv[0], 1, (cd_match){1, 1}, 0, in[0], LARGE, false, false);
        for (int r = 0; r < 2; r++) {
            while (!(cd_mesh_test(w.mesh[!r], &send[!r]) & cd_mesh_test(w.mesh[r], &recv[r])))
                continue;
            CHECK(!send[!r].error && !recv[r].error);
            check_message(in[r], !r, 1, LARGE);
        }
    }
    world_close(&w);
    for (int r = 0; r < 2; r++) {
        free(in[r]);
        free(out[r]);
    }
}

int main(void)
{
    setenv("CDIST_SINGLE_COPY", "never", 1);
    test_many_large();
    setenv("CDIST_SINGLE_COPY", "auto", 1);
    test_many_large();
    test_both_ways();
    setenv("CDIST_SINGLE_COPY", "always", 1);
    test_many_large();
    test_unreadable_memory();
    for (end_kind end = 0; end < ENDS; end++)
        test_ends_while_read(end);
    test_many_offers();
    test_setting();
    puts("net mesh reach: ok");
    return 0;
}
