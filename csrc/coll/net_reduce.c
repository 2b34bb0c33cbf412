/* Reductions over messages, in rank order, so that the bits are those of the shared-memory algorithms.
 *
 *   path       kind            steps  payload bytes sent by a rank (N = bytes of the vector, P = ranks, h = 80)
 *   net_small  all_reduce      1      (P − 1)(h + N)
 *              reduce          1 + a  h × log2 P + h + N, the root without the last two; a: log2 P, at the same time
 *              reduce_scatter  1      (P − 1)h + N(P − 1)/P
 *   net_slice  all_reduce      3      (P − 1)h + 2N(P − 1)/P
 *              reduce          3      (P − 1)h + N(P − 1)/P + N/P, root without the last
 *              reduce_scatter  2      (P − 1)h + N(P − 1)/P
 *
 * net_small: the whole vector rides in the hello. net_slice: after the hellos each rank owns a slice, receives it from all
 * others chunk by chunk, reduces and (all_reduce, reduce) sends the result on. WINDOW chunks are under way at a time.
 *
 * In place: a rank's memory of slice k gets the result of chunk c only after the owner k has received the rank's own chunk c
 * whole, so nothing is overwritten that still has to be sent. */
#include "coll/net_run.h"
#include "simd/reduce.h"
#include "simd/strided.h"

#include <string.h>

enum { WINDOW = 4, STREAMS = 4 };
enum { IN = 0, OUT = 1, RESULT_OUT = 2, RESULT_IN = 3 }; /* streams of a chunk */
#define CHUNK_MOST (UINT64_C(256) << 10)
#define CHUNK_LEAST (UINT64_C(4) << 10)

typedef struct {
    cd_net_run *run;
    int world, me;
    bool scatters, takes, to_root;
    int step; /* of the hellos with data: those to a root alone are beside the agreement */
    cd_shm_piece own;
} small;

static cd_shm_piece small_give(const small *s, int peer)
{
    const cd_op *op = s->run->op;
    if (!s->scatters)
        return cd_piece_whole(&op->in.list[0]);
    size_t first, count;
    const cd_span *span = cd_blocks_at(&op->in, s->world, peer, &first, &count);
    return (cd_shm_piece){span, first * span->item_bytes, count * span->item_bytes};
}

static void small_post(small *s)
{
    for (int i = 1; s->takes && i < s->world; i++)
        cd_net_await_greeting(s->run, s->step, (s->me + i) % s->world);
    for (int i = 1; i < s->world; i++) {
        int peer = (s->me + i) % s->world;
        if (s->to_root && peer != s->run->op->root)
            continue;
        cd_shm_piece give = small_give(s, peer);
        int memory = s->scatters ? peer : s->me;
        if (s->scatters || s->to_root || i == 1)
            cd_net_fill(s->run, s->step, memory, &give);
        cd_net_greet(s->run, s->step, peer, memory);
    }
}

/* Data of all ranks → inputs, the own one as it lies or packed. */
static cd_status small_collect(const small *s, const void **inputs)
{
    const cd_team *team = s->run->team;
    const cd_net_hello *hello;
    if (s->to_root)
        CD_TRY(cd_net_agree(s->run, NULL));
    CD_TRY(cd_net_wait(s->run, 0, s->run->first_slot));
    for (int peer = 0; s->takes && peer < s->world; peer++) {
        if (peer == s->me)
            continue;
        CD_TRY(cd_net_check(s->run, s->step, peer, &hello));
        if (hello->carried != s->own.bytes)
            return cd_op_block_mismatch(s->run->op, team->world_ranks[peer], hello->carried, team->world_ranks[s->me],
                                        s->own.bytes);
        inputs[peer] = cd_net_carried(hello);
    }
    if (s->run->op->flags & CD_OP_UNEVEN)
        CD_TRY(cd_net_agree_on_blocks(s->run));
    inputs[s->me] = cd_piece_at(&s->own, 0);
    if (!inputs[s->me]) {
        inputs[s->me] = s->run->work;
        cd_piece_read(&s->own, 0, s->own.bytes, s->run->work);
    }
    return CD_OK;
}

static cd_status small_run(small *s)
{
    const cd_op *op = s->run->op;
    const void *inputs[s->world];
    small_post(s);
    CD_TRY(small_collect(s, inputs));
    if (!s->takes || !s->own.bytes)
        return CD_OK;
    const cd_span *out = &op->out.list[0];
    size_t count = s->own.bytes / out->item_bytes;
    char *result = out->dims ? s->run->work + CD_NET_CARRY : out->data;
    cd_reduce_find(op->redop, op->dtype)(result, inputs, s->world, count, op->factor);
    if (out->dims)
        cd_span_write(out, 0, count, result);
    return CD_OK;
}

cd_status cd_net_small_run(cd_team *team, const cd_op *op, const cd_patience *patience)
{
    cd_net_run run = {.op = op};
    small s = {.run = &run, .world = team->world, .me = team->rank};
    s.scatters = op->kind == CD_REDUCE_SCATTER;
    s.to_root = op->kind == CD_REDUCE;
    s.step = s.to_root ? CD_NET_BLOCK : CD_NET_HELLO;
    s.takes = !s.to_root || team->rank == op->root;
    for (int peer = 0; peer < team->world; peer++) {
        if (small_give(&s, peer).bytes > CD_NET_CARRY)
            return cd_net_slice_run(team, op, patience); /* chosen by hand for what does not fit: the same on all ranks */
    }
    s.own = small_give(&s, team->rank);
    CD_TRY(cd_net_begin(&run, team, op, patience, 0, 2 * CD_NET_CARRY));
    return cd_net_end(&run, small_run(&s));
}

/* ---- slices ---- */

typedef struct {
    cd_net_run *run;
    int world, me;
    size_t chunk_bytes, chunks; /* chunks: of the largest slice */
    bool sends_result, takes_result; /* to others, from others */
    bool keeps_result;               /* own result goes to `out` */
    cd_reduce_func reduce;
    const cd_span *out;
    bool out_is_slice; /* reduce_scatter: `out` holds the own slice alone */
} slices;

static cd_shm_piece slice_of(const slices *s, int owner)
{
    const cd_op *op = s->run->op;
    size_t first, count;
    const cd_span *span = &op->in.list[0];
    if (op->kind == CD_REDUCE_SCATTER) {
        span = cd_blocks_at(&op->in, s->world, owner, &first, &count);
    } else {
        size_t each = cd_round_up((span->count + (size_t)s->world - 1) / (size_t)s->world, 64);
        first = cd_least(span->count, each * (size_t)owner);
        count = cd_least(span->count - first, each);
    }
    return (cd_shm_piece){span, first * span->item_bytes, count * span->item_bytes};
}

/* Bytes of a chunk of a piece, 0 beyond its end. */
static size_t chunk_of(const slices *s, const cd_shm_piece *piece, size_t chunk)
{
    size_t at = chunk * s->chunk_bytes;
    return at < piece->bytes ? cd_least(piece->bytes - at, s->chunk_bytes) : 0;
}

static int slot_of(const slices *s, size_t chunk, int stream, int peer)
{
    return s->run->first_slot + ((int)(chunk % WINDOW) * STREAMS + stream) * s->world + peer;
}

/* Work memory of a slot; RESULT_OUT of `me` is the own result, IN of `me` the own packed input. */
static char *work_of(const slices *s, size_t chunk, int stream, int peer)
{
    return s->run->work + (size_t)(slot_of(s, chunk, stream, peer) - s->run->first_slot) * s->chunk_bytes;
}

static cd_shm_piece out_of(const slices *s, int owner)
{
    cd_shm_piece piece = slice_of(s, owner);
    if (s->out_is_slice)
        piece.at = 0;
    piece.span = s->out;
    return piece;
}

static void post(const slices *s, size_t chunk)
{
    const cd_shm_piece mine = slice_of(s, s->me);
    size_t at = chunk * s->chunk_bytes, own_bytes = chunk_of(s, &mine, chunk);
    for (int i = 1; i < s->world; i++) {
        int from = (s->me - i + s->world) % s->world;
        if (own_bytes)
            cd_net_recv(s->run, slot_of(s, chunk, IN, from), from, CD_NET_DATA, work_of(s, chunk, IN, from), own_bytes);
    }
    for (int i = 1; i < s->world; i++) {
        int to = (s->me + i) % s->world;
        const cd_shm_piece theirs = slice_of(s, to);
        size_t bytes = chunk_of(s, &theirs, chunk);
        if (!bytes)
            continue;
        char *data = cd_piece_at(&theirs, at);
        if (!data) {
            data = work_of(s, chunk, OUT, to);
            cd_piece_read(&theirs, at, bytes, data);
        }
        cd_net_send(s->run, slot_of(s, chunk, OUT, to), to, CD_NET_DATA, data, bytes);
        if (s->takes_result) {
            const cd_shm_piece result = out_of(s, to);
            char *into = cd_piece_at(&result, at);
            cd_net_recv(s->run, slot_of(s, chunk, RESULT_IN, to), to, CD_NET_RESULT,
                        into ? into : work_of(s, chunk, RESULT_IN, to), bytes);
        }
    }
}

/* The own chunk: reduce what has come, send the result on. */
static cd_status reduce_chunk(const slices *s, size_t chunk)
{
    const cd_shm_piece mine = slice_of(s, s->me);
    size_t at = chunk * s->chunk_bytes, bytes = chunk_of(s, &mine, chunk);
    if (!bytes)
        return CD_OK;
    CD_TRY(cd_net_wait(s->run, slot_of(s, chunk, IN, 0), s->world));
    const void *inputs[s->world];
    for (int peer = 0; peer < s->world; peer++)
        inputs[peer] = work_of(s, chunk, IN, peer);
    if (cd_piece_at(&mine, at))
        inputs[s->me] = cd_piece_at(&mine, at);
    else
        cd_piece_read(&mine, at, bytes, work_of(s, chunk, IN, s->me));
    char *result = work_of(s, chunk, RESULT_OUT, s->me);
    cd_shm_piece out = {0};
    if (s->keeps_result) {
        out = out_of(s, s->me);
        if (cd_piece_at(&out, at))
            result = cd_piece_at(&out, at);
    }
    s->reduce(result, inputs, s->world, bytes / mine.span->item_bytes, s->run->op->factor);
    if (s->keeps_result && !cd_piece_at(&out, at))
        cd_piece_write(&out, at, bytes, result);
    for (int i = 1; s->sends_result && i < s->world; i++) {
        int to = (s->me + i) % s->world;
        if (s->run->op->kind == CD_ALL_REDUCE || to == s->run->op->root)
            cd_net_send(s->run, slot_of(s, chunk, RESULT_OUT, to), to, CD_NET_RESULT, result, bytes);
    }
    return CD_OK;
}

/* All transfers of the chunk are over afterwards, and its results are in place. */
static cd_status finish_chunk(const slices *s, size_t chunk)
{
    CD_TRY(cd_net_wait(s->run, slot_of(s, chunk, 0, 0), STREAMS * s->world));
    if (!s->takes_result || !s->out->dims)
        return CD_OK;
    for (int peer = 0; peer < s->world; peer++) {
        const cd_shm_piece out = out_of(s, peer);
        size_t bytes = chunk_of(s, &out, chunk);
        if (bytes && peer != s->me)
            cd_piece_write(&out, chunk * s->chunk_bytes, bytes, work_of(s, chunk, RESULT_IN, peer));
    }
    return CD_OK;
}

static cd_status run_chunks(const slices *s)
{
    uint64_t gives[s->world];
    for (int peer = 0; peer < s->world; peer++)
        gives[peer] = slice_of(s, peer).bytes;
    bool compares = s->run->op->flags & CD_OP_UNEVEN;
    CD_TRY(cd_net_meet(s->run, compares ? gives : NULL, compares ? s->out->count * s->out->item_bytes : 0));
    for (size_t c = 0; c < WINDOW && c < s->chunks; c++)
        post(s, c);
    for (size_t c = 0; c < s->chunks; c++) {
        CD_TRY(reduce_chunk(s, c));
        /* One chunk late, so that the results of a slower rank are not waited for at once. */
        if (c > 0) {
            CD_TRY(finish_chunk(s, c - 1));
            if (c - 1 + WINDOW < s->chunks)
                post(s, c - 1 + WINDOW);
        }
    }
    return s->chunks ? finish_chunk(s, s->chunks - 1) : CD_OK;
}

static size_t choose_chunk(int world, size_t item_bytes)
{
    size_t most = (size_t)(CD_NET_MEMORY / ((uint64_t)WINDOW * STREAMS * (uint64_t)world));
    size_t bytes = most < CHUNK_LEAST ? CHUNK_LEAST : most < CHUNK_MOST ? most : CHUNK_MOST;
    /* Whole elements and whole lines, so that all chunks are aligned as the slice is. */
    size_t unit = 64 * item_bytes;
    return bytes < unit ? unit : bytes / unit * unit;
}

cd_status cd_net_slice_run(cd_team *team, const cd_op *op, const cd_patience *patience)
{
    cd_net_run run;
    slices s = {.run = &run, .world = team->world, .me = team->rank, .reduce = cd_reduce_find(op->redop, op->dtype)};
    bool is_root = op->root == team->rank;
    s.sends_result = op->kind == CD_ALL_REDUCE || (op->kind == CD_REDUCE && !is_root);
    s.takes_result = op->kind == CD_ALL_REDUCE || (op->kind == CD_REDUCE && is_root);
    s.keeps_result = op->kind != CD_REDUCE || is_root;
    s.out_is_slice = op->kind == CD_REDUCE_SCATTER;
    s.out = s.keeps_result ? &op->out.list[0] : NULL;
    run.op = op;
    size_t largest = 0;
    for (int owner = 0; owner < team->world; owner++) {
        size_t bytes = slice_of(&s, owner).bytes;
        largest = bytes > largest ? bytes : largest;
    }
    s.chunk_bytes = choose_chunk(team->world, op->in.list[0].item_bytes);
    s.chunks = (largest + s.chunk_bytes - 1) / s.chunk_bytes;
    int slots = WINDOW * STREAMS * team->world;
    CD_TRY(cd_net_begin(&run, team, op, patience, slots, (size_t)slots * s.chunk_bytes));
    return cd_net_end(&run, run_chunks(&s));
}
