/* The channel: a byte stream through rings smaller than the stream, both ways, any cut; close; sizes by rank count. */
#include "check.h"

#include "shm/channel.h"

#include <stdatomic.h>

enum { STREAM = 5 * 1000 * 1000 + 3 };

static uint8_t at(size_t i, int rank)
{
    return (uint8_t)(i * 13 + (i >> 9) + (size_t)rank);
}

static void *make_memory(int ranks)
{
    size_t bytes = (cd_channels_bytes(ranks) + 4095) & ~(size_t)4095;
    void *memory = aligned_alloc(4096, bytes);
    CHECK(memory);
    return memset(memory, 0, bytes);
}

typedef struct {
    cd_pipe *pipe[2];
} ends;

/* K167: flags and data handed over without the right order would show as wrong bytes here, or to ThreadSanitizer in CI.
 * Sends in three pieces and receives in odd amounts, whatever fits, until both streams are through. */
static void stream_body(int rank, void *ctx)
{
    cd_pipe *pipe = ((ends *)ctx)->pipe[rank];
    uint8_t *out = malloc(STREAM), *in = malloc(STREAM);
    for (size_t i = 0; i < STREAM; i++)
        out[i] = at(i, rank);
    size_t sent = 0, got = 0, turn = 0;
    while (sent < STREAM || got < STREAM) {
        size_t moved, a = 7 + turn % 50, b = turn % 3 ? 100000 : 0, left = STREAM - sent;
        a = a < left ? a : left;
        b = b < left - a ? b : left - a;
        cd_piece pieces[3] = {{out + sent, a}, {NULL, 0}, {out + sent + a, b}};
        if (sent < STREAM) {
            CHECK_OK(pipe->ops->send(pipe, pieces, 3, &moved));
            CHECK(moved <= a + b);
            sent += moved;
        }
        size_t want = 1 + turn * 977 % 300000;
        want = want < STREAM - got ? want : STREAM - got;
        if (want) {
            CHECK_OK(pipe->ops->recv(pipe, in + got, want, &moved));
            CHECK(moved <= want);
            got += moved;
        }
        turn++;
    }
    for (size_t i = 0; i < STREAM; i++)
        CHECK(in[i] == at(i, 1 - rank));
    free(out);
    free(in);
}

static void test_stream(int ranks)
{
    void *memory = make_memory(ranks);
    ends e;
    CHECK_OK(cd_channel_open(memory, ranks, 0, ranks - 1, 41, &e.pipe[0]));
    CHECK_OK(cd_channel_open(memory, ranks, ranks - 1, 0, 40, &e.pipe[1]));
    CHECK(e.pipe[0]->fd == -1 && e.pipe[0]->peer == 41);
    check_on_ranks(2, stream_body, &e);
    for (int i = 0; i < 2; i++)
        e.pipe[i]->ops->free(e.pipe[i]);
    free(memory);
}

/* What was written before the close arrives; then the loss is told, also to the sender. */
static void test_close(void)
{
    void *memory = make_memory(2);
    cd_pipe *a, *b;
    char in[64];
    size_t moved;
    CHECK_OK(cd_channel_open(memory, 2, 0, 1, 1, &a));
    CHECK_OK(cd_channel_open(memory, 2, 1, 0, 0, &b));
    CHECK_OK(b->ops->recv(b, in, 64, &moved));
    CHECK(moved == 0);
    CHECK_OK(a->ops->send(a, &(cd_piece){"last", 5}, 1, &moved));
    a->ops->close(a);
    CHECK_FAILS(a->ops->send(a, &(cd_piece){"last", 5}, 1, &moved), CD_PEER_LOST);
    static char much[3 << 20];
    cd_status status = CD_OK;
    for (int i = 0; i < 3 && status == CD_OK; i++)
        status = b->ops->send(b, &(cd_piece){much, sizeof much}, 1, &moved);
    CHECK(status == CD_PEER_LOST);
    CHECK(cd_last_error()->rank == 0);
    CHECK_OK(b->ops->recv(b, in, 64, &moved));
    CHECK(moved == 5 && !strcmp(in, "last"));
    CHECK_FAILS(b->ops->recv(b, in, 64, &moved), CD_PEER_LOST);
    a->ops->free(a);
    b->ops->free(b);
    free(memory);
}

/* A peer that writes nonsense into the indices is a protocol error, not a copy out of bounds. */
static void test_corrupt_indices(void)
{
    void *memory = make_memory(2);
    cd_pipe *a;
    char in[64];
    size_t moved;
    CHECK_OK(cd_channel_open(memory, 2, 0, 1, 1, &a));
    for (size_t ring = 0; ring < 4; ring++)
        memset((char *)memory + ring * (cd_channels_bytes(2) / 4), 0xEE, 8);
    CHECK_FAILS(a->ops->recv(a, in, 64, &moved), CD_PROTOCOL);
    a->ops->free(a);
    free(memory);
}

int main(void)
{
    test_stream(2);
    test_stream(7);
    test_stream(300);
    test_close();
    test_corrupt_indices();
    /* A rank that talks to all touches about 4 MiB: two rings a peer. */
    for (size_t ranks = 2; ranks <= 128; ranks++) {
        size_t ring = cd_channels_bytes((int)ranks) / (ranks * ranks);
        CHECK(ring * 2 * (ranks - 1) <= 4456448);
    }
    cd_pipe *none;
    CHECK_FAILS(cd_channel_open(NULL, 2, 1, 1, 1, &none), CD_BAD_ARGUMENT);
    puts("shm channel: ok");
    return 0;
}
