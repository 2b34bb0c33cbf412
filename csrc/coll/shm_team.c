#include "coll/shm_team_impl.h"

#include "base/clock.h"
#include "base/host.h"
#include "simd/copy.h"

#include <stdlib.h>
#include <unistd.h>

#define PAGE ((size_t)4096)
#define KIB ((size_t)1024)
/* Smaller pieces of an operation that writes past the caches go through them all the same: the fence would cost more. */
#define FAR_LEAST ((size_t)2048)

/* A ring's footprint is 1.5 × L2 of a core where the slots allow it: lines have then left the writer's L2 when the peer reads
 * them (measured with 2 ranks on an EPYC with 1 MiB of L2: all_reduce of 1 MiB 7 GB/s with 192 KiB, 18–19.5 with 1.5 MiB, 7
 * with 12 MiB). */
static size_t choose_ring_bytes(const cd_shm_layout *layout)
{
    long l2 = sysconf(_SC_LEVEL2_CACHE_SIZE);
    size_t wanted = l2 > 0 ? (size_t)l2 / 2 * 3 : 1536 * KIB;
    if (wanted < 384 * KIB)
        wanted = 384 * KIB;
    return cd_least(wanted, layout->ring_stride) / (CD_SHM_SLOTS * PAGE) * (CD_SHM_SLOTS * PAGE);
}

size_t cd_shm_small_limit(int ranks)
{
    return ranks <= 16 ? 64 * KIB : ranks <= 64 ? 16 * KIB : 4 * KIB;
}

cd_shm_layout cd_shm_layout_of(int ranks)
{
    size_t count = (size_t)ranks;
    cd_shm_layout layout = {.small_bytes = cd_shm_small_limit(ranks)};
    /* Upper bounds: a page costs memory only when it is touched. */
    layout.ring_stride = (ranks <= 16 ? 4096 : ranks <= 64 ? 1536 : 384) * KIB;
    layout.ring_stride = cd_round_up(layout.ring_stride, CD_SHM_SLOTS * PAGE);
    size_t rows_at = cd_round_up(sizeof(cd_shm_board), PAGE);
    layout.counts_at = cd_round_up(rows_at + count * sizeof(cd_shm_row), PAGE);
    /* A rank's counts: [parity][gives, takes][peer]. */
    layout.small_at = cd_round_up(layout.counts_at + count * 4 * count * sizeof(uint64_t), PAGE);
    layout.small_stride = layout.ring_stride;
    layout.ring_at = layout.small_at + count * layout.small_stride;
    layout.bytes = layout.ring_at + count * layout.ring_stride;
    return layout;
}

size_t cd_shm_team_bytes(int ranks)
{
    return cd_shm_layout_of(ranks).bytes;
}

/* All ranks use the footprint that the first of them chose: cores of one host may differ in their caches. */
static size_t agree_on_ring_bytes(cd_shm_board *board, const cd_shm_layout *layout)
{
    uint64_t agreed = 0;
    uint64_t mine = choose_ring_bytes(layout);
    /* Relaxed: the value is all that is passed on. */
    if (atomic_compare_exchange_strong_explicit(&board->ring_bytes, &agreed, mine, memory_order_relaxed,
                                                memory_order_relaxed))
        return (size_t)mine;
    return (size_t)agreed;
}

cd_status cd_shm_team_open(void *memory, int ranks, int rank, const cd_arena *arena, cd_shm_team **out)
{
    if (ranks < 1 || rank < 0 || rank >= ranks)
        return cd_fail(CD_BAD_ARGUMENT, "shared memory of a group: rank %d of %d", rank, ranks);
    cd_shm_team *shm = calloc(1, sizeof *shm);
    if (!shm)
        return cd_fail(CD_NO_MEMORY, "shared memory of a group: no memory for its view");
    shm->rank = rank;
    shm->ranks = ranks;
    shm->board = memory;
    shm->layout = cd_shm_layout_of(ranks);
    shm->rows = (cd_shm_row *)((char *)memory + cd_round_up(sizeof(cd_shm_board), PAGE));
    shm->arena = arena && arena->base ? arena : NULL;
    size_t ring_bytes = agree_on_ring_bytes(shm->board, &shm->layout);
    shm->slot_bytes = ring_bytes / CD_SHM_SLOTS;
    shm->small_ring = ring_bytes;
    if (ring_bytes > shm->layout.ring_stride || shm->slot_bytes < CD_SHM_GRAIN * (size_t)ranks ||
        ring_bytes < 3 * shm->layout.small_bytes) {
        free(shm);
        return cd_fail(CD_PROTOCOL, "shared memory of a group: rings of %zu bytes for %d ranks", ring_bytes, ranks);
    }
    shm->scratch_bytes = shm->slot_bytes > shm->layout.small_bytes ? shm->slot_bytes : shm->layout.small_bytes;
    shm->inputs = calloc((size_t)ranks, sizeof *shm->inputs);
    shm->gives = calloc((size_t)ranks, sizeof *shm->gives);
    shm->takes = calloc((size_t)ranks, sizeof *shm->takes);
    shm->scratch = aligned_alloc(CD_SHM_GRAIN, cd_round_up(shm->scratch_bytes, CD_SHM_GRAIN));
    if (!shm->inputs || !shm->gives || !shm->takes || !shm->scratch) {
        cd_shm_team_free(shm);
        return cd_fail(CD_NO_MEMORY, "shared memory of a group: no memory for %d ranks", ranks);
    }
    cd_status status = cd_shm_reach_open(shm);
    if (status != CD_OK) {
        cd_shm_team_free(shm);
        return status;
    }
    *out = shm;
    return CD_OK;
}

void cd_shm_team_free(cd_shm_team *team)
{
    if (!team)
        return;
    cd_shm_reach_close(team);
    free(team->scratch);
    free(team->takes);
    free(team->gives);
    free(team->inputs);
    free(team);
}

cd_cause *cd_shm_team_cause(cd_shm_team *team)
{
    return &team->board->cause;
}

/* ---- waits that are not over at once ---- */

typedef struct {
    cd_team *team;
    const cd_patience *patience;
} watch;

static cd_status leave_shared_core(void *ctx)
{
    const watch *w = ctx;
    cd_shm_leave_shared_core(w->team->shm);
    return w->patience->idle ? w->patience->idle(w->patience->idle_ctx) : CD_OK;
}

/* Looks at the heads that have come. Two ranks that differ find each other here even if both wait for a third that is late:
 * the first look may miss a head posted at the same moment, a later one does not. */
static cd_status look_for_differences(void *ctx)
{
    const watch *w = ctx;
    const cd_shm_team *shm = w->team->shm;
    uint32_t signature = shm->draft.signature;
    for (int peer = 0; peer < shm->ranks; peer++) {
        const cd_shm_head *head = cd_shm_head_of(shm, peer);
        if (atomic_load_explicit(&head->number, memory_order_acquire) >= shm->number && head->signature != signature)
            return cd_shm_differs(w->team, peer);
    }
    return leave_shared_core(ctx);
}

cd_status cd_shm_wait_head(cd_team *team, const cd_op *op, int peer, const cd_patience *patience)
{
    (void)op;
    cd_shm_team *shm = team->shm;
    uint64_t began_ns = shm->timed ? cd_now_ns() : 0;
    watch w = {team, patience};
    cd_patience watching = *patience;
    watching.idle = look_for_differences;
    watching.idle_ctx = &w;
    cd_status status = cd_wait_at_least(&cd_shm_head_of(shm, peer)->number, shm->number, peer, &watching);
    if (shm->timed)
        shm->waited_ns += cd_now_ns() - began_ns;
    return status;
}

cd_status cd_shm_wait_word(cd_team *team, const _Atomic uint64_t *word, uint64_t value, int peer, const cd_patience *patience)
{
    watch w = {team, patience};
    cd_patience watching = *patience;
    watching.idle = leave_shared_core;
    watching.idle_ctx = &w;
    return cd_wait_at_least(word, value, peer, &watching);
}

/* Fails with the cause that all ranks will report: this thread's error, unless another rank was first. */
static cd_status publish(cd_team *team)
{
    cd_cause *cause = &team->shm->board->cause;
    cd_cause_publish(cause, cd_last_error());
    return cd_cause_check(cause);
}

cd_status cd_shm_differs(cd_team *team, int peer)
{
    const cd_shm_team *shm = team->shm;
    const cd_descriptor *mine = &shm->rows[shm->rank].descriptor[shm->number & 1];
    const cd_descriptor *other = &shm->rows[peer].descriptor[shm->number & 1];
    char text[256];
    if (memcmp(mine, other, sizeof *mine) == 0)
        (void)cd_fail_rank(CD_MISMATCH, cd_shm_world_rank(team, peer),
                           "rank %d and rank %d run %s by different algorithms: CDIST_PLAN must be the same on all ranks",
                           cd_shm_world_rank(team, shm->rank), cd_shm_world_rank(team, peer),
                           cd_descriptor_text(mine, text, sizeof text));
    else
        (void)cd_op_mismatch(cd_shm_world_rank(team, shm->rank), mine, cd_shm_world_rank(team, peer), other);
    return publish(team);
}

/* ---- uneven operations ---- */

enum { GIVES = 0, TAKES = 1 };

static uint64_t *counts_of(const cd_shm_team *shm, int rank, int which)
{
    size_t ranks = (size_t)shm->ranks;
    uint64_t *counts = (uint64_t *)(void *)((char *)shm->board + shm->layout.counts_at);
    return counts + (((size_t)rank * 2 + (shm->number & 1)) * 2 + (size_t)which) * ranks;
}

void cd_shm_write_counts(cd_shm_team *shm)
{
    uint64_t *gives = counts_of(shm, shm->rank, GIVES), *takes = counts_of(shm, shm->rank, TAKES);
    for (int peer = 0; peer < shm->ranks; peer++) {
        gives[peer] = shm->gives[peer].bytes;
        takes[peer] = shm->takes[peer].bytes;
    }
}

void cd_shm_give_eagerly(cd_shm_team *shm, bool one_for_all)
{
    /* As large as can be: what a rank gives is no common fact. */
    cd_shm_claim_small(shm, shm->layout.small_bytes);
    size_t all = 0, room = shm->layout.small_bytes;
    for (int peer = 0; peer < shm->ranks; peer++) {
        size_t bytes = shm->gives[peer].bytes;
        if (bytes > room || (!one_for_all && bytes > room - all))
            return;
        all += one_for_all ? 0 : bytes;
    }
    char *to = cd_shm_small_of(shm, shm->rank);
    for (int peer = 0; peer < shm->ranks; peer++) {
        const cd_shm_piece *give = &shm->gives[peer];
        cd_piece_read(give, 0, give->bytes, to);
        if (one_for_all && give->bytes)
            break;
        to += give->bytes;
    }
    shm->draft.eager = 1;
}

size_t cd_shm_given_before(const cd_shm_team *shm, int peer)
{
    const uint64_t *gives = counts_of(shm, peer, GIVES);
    size_t bytes = 0;
    for (int before = 0; before < shm->rank; before++)
        bytes += (size_t)gives[before];
    return bytes;
}

bool cd_shm_take_eagerly(cd_shm_team *shm, bool one_for_all)
{
    for (int peer = 0; peer < shm->ranks; peer++)
        if (!cd_shm_head_of(shm, peer)->eager)
            return false;
    for (int peer = 0; peer < shm->ranks; peer++)
        shm->inputs[peer] = cd_shm_small_of(shm, peer) + (one_for_all ? 0 : cd_shm_given_before(shm, peer));
    return true;
}

cd_status cd_shm_check_counts(cd_team *team, const cd_op *op, size_t *largest_p)
{
    cd_shm_team *shm = team->shm;
    *largest_p = 0;
    for (int giver = 0; giver < shm->ranks; giver++) {
        const uint64_t *gives = counts_of(shm, giver, GIVES);
        for (int taker = 0; taker < shm->ranks; taker++) {
            uint64_t takes = counts_of(shm, taker, TAKES)[giver];
            if (cd_unlikely(gives[taker] != takes)) {
                (void)cd_op_block_mismatch(op, cd_shm_world_rank(team, giver), gives[taker], cd_shm_world_rank(team, taker),
                                           takes);
                return publish(team);
            }
            if (takes > *largest_p)
                *largest_p = (size_t)takes;
        }
    }
    return CD_OK;
}

/* ---- pieces ---- */

static void resolve_blocks(const cd_blocks *blocks, int ranks, cd_shm_piece *pieces)
{
    size_t at = 0;
    for (int j = 0; j < ranks; j++) {
        const cd_span *span = &blocks->list[blocks->spans > 1 ? j : 0];
        size_t item = span->item_bytes;
        if (blocks->spans > 1 || ranks == 1) {
            pieces[j] = cd_piece_whole(span);
            continue;
        }
        size_t bytes = (blocks->counts ? blocks->counts[j] : span->count / (size_t)ranks) * item;
        pieces[j] = (cd_shm_piece){.span = span, .at = at, .bytes = bytes};
        at += bytes;
    }
}

static void resolve_same(const cd_span *span, int ranks, cd_shm_piece *pieces)
{
    for (int j = 0; j < ranks; j++)
        pieces[j] = cd_piece_whole(span);
}

void cd_shm_resolve(cd_shm_team *shm, const cd_op *op)
{
    int ranks = shm->ranks;
    bool is_root = shm->rank == op->root;
    memset(shm->gives, 0, (size_t)ranks * sizeof *shm->gives);
    memset(shm->takes, 0, (size_t)ranks * sizeof *shm->takes);
    switch (op->kind) {
    case CD_BROADCAST:
        if (is_root)
            resolve_same(&op->in.list[0], ranks, shm->gives);
        else
            shm->takes[op->root] = cd_piece_whole(&op->out.list[0]);
        /* The root keeps what it has. */
        shm->gives[shm->rank] = shm->takes[shm->rank] = (cd_shm_piece){0};
        break;
    case CD_ALL_GATHER:
        resolve_same(&op->in.list[0], ranks, shm->gives);
        resolve_blocks(&op->out, ranks, shm->takes);
        break;
    case CD_GATHER:
        shm->gives[op->root] = cd_piece_whole(&op->in.list[0]);
        if (is_root)
            resolve_blocks(&op->out, ranks, shm->takes);
        break;
    case CD_SCATTER:
        if (is_root)
            resolve_blocks(&op->in, ranks, shm->gives);
        shm->takes[op->root] = cd_piece_whole(&op->out.list[0]);
        break;
    case CD_REDUCE_SCATTER:
        resolve_blocks(&op->in, ranks, shm->gives);
        resolve_same(&op->out.list[0], ranks, shm->takes);
        break;
    case CD_ALL_TO_ALL:
        resolve_blocks(&op->in, ranks, shm->gives);
        resolve_blocks(&op->out, ranks, shm->takes);
        break;
    default: break;
    }
}

/* Address of the element with this logical index. */
static char *element_at(const cd_span *span, size_t index)
{
    char *at = span->data;
    for (int d = span->dims->ndim - 1; d >= 0; d--) {
        size_t extent = span->dims->shape[d];
        at += (ptrdiff_t)(index % extent) * span->dims->strides[d];
        index /= extent;
    }
    return at;
}

/* A strided piece: the ends may cut elements, the middle is whole ones. */
static void pass_strided(const cd_shm_piece *piece, size_t at, size_t bytes, char *packed, bool write)
{
    const cd_span *span = piece->span;
    size_t item = span->item_bytes;
    at += piece->at;
    while (bytes) {
        size_t index = at / item, inside = at % item, part;
        if (inside || bytes < item) {
            part = cd_least(item - inside, bytes);
            char *element = element_at(span, index) + inside;
            memcpy(write ? element : packed, write ? packed : element, part);
        } else {
            part = bytes / item * item;
            if (write)
                cd_span_write(span, index, bytes / item, packed);
            else
                cd_span_read(span, index, bytes / item, packed);
        }
        at += part;
        packed += part;
        bytes -= part;
    }
}

void cd_piece_read(const cd_shm_piece *piece, size_t at, size_t bytes, void *out)
{
    if (!bytes)
        return;
    const char *from = cd_piece_at(piece, at);
    if (cd_likely(from != NULL))
        cd_copy_near(out, from, bytes);
    else
        pass_strided(piece, at, bytes, out, false);
}

void cd_shm_give(const cd_shm_team *shm, void *out, const void *from, size_t bytes)
{
    if (shm->is_far && bytes >= FAR_LEAST)
        cd_copy_far(out, from, bytes);
    else
        cd_copy_near(out, from, bytes);
}

void cd_piece_give(const cd_shm_team *shm, const cd_shm_piece *piece, size_t at, size_t bytes, void *out)
{
    const char *from = bytes ? cd_piece_at(piece, at) : NULL;
    if (cd_likely(from != NULL))
        cd_shm_give(shm, out, from, bytes);
    else
        cd_piece_read(piece, at, bytes, out);
}

void cd_piece_write(const cd_shm_piece *piece, size_t at, size_t bytes, const void *in)
{
    if (!bytes)
        return;
    char *to = cd_piece_at(piece, at);
    if (cd_likely(to != NULL))
        cd_copy_near(to, in, bytes);
    else
        pass_strided(piece, at, bytes, (char *)(uintptr_t)in, true);
}

void cd_piece_receive(const cd_shm_piece *piece, size_t at, size_t bytes, const void *in)
{
    char *to = cd_piece_at(piece, at);
    if (to && piece->bytes >= CD_SHM_FAR_BYTES)
        cd_copy_far(to, in, bytes);
    else
        cd_piece_write(piece, at, bytes, in);
}

void cd_shm_copy_own(cd_shm_team *shm)
{
    const cd_shm_piece *give = &shm->gives[shm->rank], *take = &shm->takes[shm->rank];
    size_t bytes = cd_least(give->bytes, take->bytes);
    if (!bytes)
        return;
    const char *from = cd_piece_at(give, 0);
    if (from) {
        /* A rank may gather into the buffer that it gives from. */
        if (from != cd_piece_at(take, 0))
            cd_piece_receive(take, 0, bytes, from);
        return;
    }
    for (size_t at = 0; at < bytes; at += shm->scratch_bytes) {
        size_t part = cd_least(shm->scratch_bytes, bytes - at);
        cd_piece_read(give, at, part, shm->scratch);
        cd_piece_write(take, at, part, shm->scratch);
    }
}
