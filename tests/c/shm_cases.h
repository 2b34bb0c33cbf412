/* One operation of any kind on one rank, checked bit for bit against plain loops: buffers in several layouts, values that are
 * a function of (case, giver, taker, index), so that every rank knows what all others give. */
#ifndef CD_TEST_SHM_CASES_H
#define CD_TEST_SHM_CASES_H

#include "shm_ranks.h"

enum { PLAIN, GAPS, BACKWARD, FORTRAN, LAYOUTS };

/* A buffer in some layout, filled with a pattern that must survive between the elements. */
typedef struct {
    unsigned char *base, *memory;
    cd_arena *arena; /* NULL: allocated */
    size_t bytes, count, item;
    cd_dims dims;
    cd_span span;
} buffer;

#define CANARY 0xA5

/* Bytes of a line by which this rank's buffers lie behind those of rank 0, so that no two ranks' lie alike. */
static _Thread_local size_t buffer_skew;
/* Where this rank's buffers of the running case lie; NULL: anywhere. */
static _Thread_local cd_arena *buffer_arena;

static inline buffer buffer_make(size_t count, size_t item, int layout)
{
    buffer b = {.count = count, .item = item, .bytes = (2 * count + 2) * item, .arena = buffer_arena};
    void *memory = b.arena ? NULL : malloc(buffer_skew + b.bytes);
    if (b.arena)
        CHECK_OK(cd_arena_alloc(b.arena, buffer_skew + b.bytes, &memory));
    CHECK(memory);
    b.base = memory;
    b.memory = b.base + buffer_skew;
    memset(b.memory, CANARY, b.bytes);
    b.span = shm_span(b.memory + item, count, item);
    ptrdiff_t step = (ptrdiff_t)item;
    if (layout == GAPS) {
        b.dims = (cd_dims){.ndim = 1, .shape = {count}, .strides = {2 * step}};
    } else if (layout == BACKWARD) {
        b.dims = (cd_dims){.ndim = 1, .shape = {count}, .strides = {-step}};
        b.span.data = b.memory + (count + 1) * item;
    } else if (layout == FORTRAN) {
        size_t rows = count % 3 == 0 ? 3 : count % 2 == 0 ? 2 : 1;
        b.dims = (cd_dims){.ndim = 2, .shape = {rows, count / rows}, .strides = {step, (ptrdiff_t)rows * step}};
    }
    return b;
}

static inline void buffer_free(buffer *b)
{
    if (b->arena)
        cd_arena_release(b->arena, b->base);
    else
        free(b->base);
}

static inline unsigned char *buffer_at(const buffer *b, size_t i)
{
    if (!b->dims.ndim)
        return (unsigned char *)b->span.data + i * b->item;
    if (b->dims.ndim == 1)
        return (unsigned char *)b->span.data + (ptrdiff_t)i * b->dims.strides[0];
    size_t columns = b->dims.shape[1];
    return (unsigned char *)b->span.data + (ptrdiff_t)(i / columns) * b->dims.strides[0] +
           (ptrdiff_t)(i % columns) * b->dims.strides[1];
}

/* The span must point at the dims of the buffer where it now lies. */
static inline cd_span *buffer_span(buffer *b)
{
    b->span.dims = b->dims.ndim && b->count ? &b->dims : NULL;
    return &b->span;
}

/* Many elements in one call where they lie side by side: a sanitizer takes its time with each. */
static inline void buffer_put(const buffer *b, size_t at, size_t count, const unsigned char *from)
{
    size_t run = b->dims.ndim ? 1 : count;
    for (size_t i = 0; i < count; i += run)
        memcpy(buffer_at(b, at + i), from + i * b->item, run * b->item);
}

static inline void buffer_check(const buffer *b, size_t at, size_t count, const unsigned char *expected)
{
    size_t run = b->dims.ndim ? 1 : count;
    for (size_t i = 0; i < count; i += run)
        CHECK(memcmp(buffer_at(b, at + i), expected + i * b->item, run * b->item) == 0);
}

static inline void check_canary(const unsigned char *at, size_t bytes)
{
    CHECK(bytes == 0 || (at[0] == CANARY && memcmp(at, at + 1, bytes - 1) == 0));
}

/* Around the elements and between them. */
static inline void buffer_check_gaps(const buffer *b)
{
    size_t item = b->item, apart = b->dims.ndim == 1 && b->dims.strides[0] > 0 ? b->count : 0;
    for (size_t i = 0; i < apart; i++)
        check_canary(b->memory + 2 * i * item, item);
    const unsigned char *next = b->memory + 2 * apart * item;
    if (b->count && !apart) {
        const unsigned char *first = buffer_at(b, 0), *last = buffer_at(b, b->count - 1);
        next = (first < last ? last : first) + item;
        check_canary(b->memory, (size_t)((first < last ? first : last) - b->memory));
    }
    check_canary(next, (size_t)(b->memory + b->bytes - next));
}

/* ---- values ---- */

typedef struct {
    cd_kind kind;
    cd_coll_func run; /* NULL: what the plan says */
    cd_dtype dtype;
    cd_redop redop;
    size_t item, count; /* elements of a block (of the buffer for all_reduce, reduce, broadcast) */
    int root, layout;
    bool in_place, uneven, lists;
    bool gaps_out;     /* the output of what reduces or scatters has gaps, whatever the layout */
    unsigned in_arena; /* bit per rank whose buffers lie in the arena */
    uint64_t salt;
} test_case;

/* What is no memory of a rank is nothing for a sanitizer, which would take most of a test's time there. */
#define OF_THE_TEST __attribute__((no_sanitize("address", "thread")))

OF_THE_TEST static inline uint64_t scramble(uint64_t x)
{
    x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
    return x ^ (x >> 31);
}

/* Element `i` of what `giver` gives to `taker` in case `salt`. Reduced types get numbers whose sums round. */
OF_THE_TEST static inline void value(cd_dtype dtype, size_t item, uint64_t salt, int giver, int taker, size_t i, void *out)
{
    uint64_t bits = scramble(salt * 1000003 + (uint64_t)giver * 7919 + (uint64_t)taker * 104729 + i * 31);
    double number = (double)(bits % 2001) / 7.0 - 140.0;
    float narrow = (float)number;
    switch (dtype) {
    case CD_FLOAT32: memcpy(out, &narrow, 4); break;
    case CD_FLOAT64: memcpy(out, &number, 8); break;
    case CD_BOOL: *(unsigned char *)out = bits & 1; break;
    case CD_BFLOAT16: {
        uint32_t word;
        memcpy(&word, &narrow, 4);
        uint16_t high = (uint16_t)(word >> 16);
        memcpy(out, &high, 2);
        break;
    }
    case CD_COMPLEX64: {
        float pair[2] = {narrow, (float)(bits % 77) / 3.0f};
        memcpy(out, pair, 8);
        break;
    }
    default:
        for (; item >= 8; item -= 8, out = (char *)out + 8, bits = scramble(bits + 1))
            memcpy(out, &bits, 8);
        for (size_t at = 0; at < item; at++)
            ((unsigned char *)out)[at] = (unsigned char)(bits >> (8 * at));
    }
}

/* How many elements are made at a time, into `piece`. */
static _Thread_local unsigned char piece[1 << 19];

static inline size_t piece_count(size_t item, size_t left)
{
    size_t most = item < 16384 ? 16384 / item : 1;
    CHECK(item <= sizeof piece);
    return left < most ? left : most;
}

OF_THE_TEST static inline void make_values(cd_dtype dtype, size_t item, uint64_t salt, int giver, int taker, size_t at,
                                           size_t count)
{
    for (size_t i = 0; i < count; i++)
        value(dtype, item, salt, giver, taker, at + i, piece + i * item);
}

static inline void fill(const buffer *b, size_t start, size_t count, cd_dtype dtype, uint64_t salt, int giver, int taker)
{
    for (size_t at = 0, n; at < count; at += n) {
        n = piece_count(b->item, count - at);
        make_values(dtype, b->item, salt, giver, taker, at, n);
        buffer_put(b, start + at, n, piece);
    }
}

static inline void check_filled(const buffer *b, size_t start, size_t count, cd_dtype dtype, uint64_t salt, int giver, int taker)
{
    for (size_t at = 0, n; at < count; at += n) {
        n = piece_count(b->item, count - at);
        make_values(dtype, b->item, salt, giver, taker, at, n);
        buffer_check(b, start + at, n, piece);
    }
}

/* The plain left-to-right loop, for the pairs that have one in C; otherwise the kernel over single elements. */
OF_THE_TEST static inline void reduced(cd_redop redop, cd_dtype dtype, size_t item, uint64_t salt, int world, int taker, size_t i,
                                       double factor, void *out)
{
    char parts[MOST_RANKS][32];
    const void *inputs[MOST_RANKS];
    for (int r = 0; r < world; r++) {
        value(dtype, item, salt, r, taker, i, parts[r]);
        inputs[r] = parts[r];
    }
    if (dtype == CD_FLOAT32 && (redop == CD_SUM || redop == CD_AVG || redop == CD_PREMUL_SUM)) {
        float sum = 0;
        for (int r = 0; r < world; r++) {
            float x;
            memcpy(&x, parts[r], 4);
            if (redop == CD_PREMUL_SUM)
                x *= (float)factor;
            sum = r ? sum + x : x;
        }
        if (redop == CD_AVG)
            sum /= (float)world;
        memcpy(out, &sum, 4);
    } else if (dtype == CD_INT32 && redop == CD_MAX) {
        int32_t most = INT32_MIN;
        for (int r = 0; r < world; r++) {
            int32_t x;
            memcpy(&x, parts[r], 4);
            most = x > most ? x : most;
        }
        memcpy(out, &most, 4);
    } else {
        cd_reduce_find(redop, dtype)(out, inputs, world, 1, factor);
    }
}

static inline void check_reduced(const buffer *b, const test_case *c, int world, int taker, double factor)
{
    for (size_t at = 0, n; at < b->count; at += n) {
        n = piece_count(b->item, b->count - at);
        for (size_t i = 0; i < n; i++)
            reduced(c->redop, c->dtype, c->item, c->salt, world, taker, at + i, factor, piece + i * c->item);
        buffer_check(b, at, n, piece);
    }
}

/* ---- one case on one rank ---- */

static inline size_t block_count(const test_case *c, int giver, int taker)
{
    if (!c->uneven)
        return c->count;
    switch (c->kind) {
    case CD_ALL_GATHER:
    case CD_GATHER: return c->count * (size_t)((giver * 5 + (int)c->salt) % 4);
    case CD_SCATTER:
    case CD_REDUCE_SCATTER: return c->count * (size_t)((taker * 3 + (int)c->salt) % 4);
    default: return c->count * (size_t)((giver * 3 + taker * 5 + (int)c->salt) % 5);
    }
}

/* Blocks of all peers: one span with counts, or a list of spans. */
typedef struct {
    buffer whole, each[MOST_RANKS];
    cd_span spans[MOST_RANKS];
    size_t counts[MOST_RANKS], starts[MOST_RANKS];
    cd_blocks blocks;
    bool lists;
} block_set;

static inline void blocks_make(block_set *s, const test_case *c, int world, int rank, bool gives)
{
    size_t total = 0;
    s->lists = c->lists && world > 1;
    for (int j = 0; j < world; j++) {
        s->counts[j] = gives ? block_count(c, rank, j) : block_count(c, j, rank);
        s->starts[j] = total;
        total += s->counts[j];
    }
    if (!s->lists) {
        s->whole = buffer_make(total, c->item, c->layout);
        s->spans[0] = *buffer_span(&s->whole);
        s->blocks = (cd_blocks){.list = s->spans, .spans = 1, .counts = c->uneven ? s->counts : NULL};
        return;
    }
    for (int j = 0; j < world; j++) {
        s->each[j] = buffer_make(s->counts[j], c->item, (c->layout + j) % LAYOUTS);
        s->spans[j] = *buffer_span(&s->each[j]);
    }
    s->blocks = (cd_blocks){.list = s->spans, .spans = world};
}

static inline const buffer *blocks_of(const block_set *s, int peer, size_t *start_p)
{
    *start_p = s->lists ? 0 : s->starts[peer];
    return s->lists ? &s->each[peer] : &s->whole;
}

static inline void blocks_fill(block_set *s, const test_case *c, int world, int rank)
{
    for (int j = 0; j < world; j++) {
        size_t start;
        const buffer *b = blocks_of(s, j, &start);
        fill(b, start, s->counts[j], c->dtype, c->salt, rank, j);
    }
}

static inline void blocks_free(block_set *s, int world)
{
    if (s->lists)
        for (int j = 0; j < world; j++) {
            buffer_check_gaps(&s->each[j]);
            buffer_free(&s->each[j]);
        }
    else {
        buffer_check_gaps(&s->whole);
        buffer_free(&s->whole);
    }
}

static inline cd_op op_of(const test_case *c, uint64_t sequence)
{
    return (cd_op){.kind = c->kind, .dtype = c->dtype, .redop = c->redop, .root = c->root, .factor = 1.25,
                   .count = c->count, .item_bytes = (uint32_t)c->item, .ndim = 1, .shape = {(int64_t)c->count},
                   .flags = c->uneven ? CD_OP_UNEVEN : 0, .sequence = sequence};
}

static inline void run_op(shm_ranks *g, int rank, const test_case *c, const cd_op *op)
{
    cd_patience patience = shm_ranks_patience(g, 120 * CD_NS_PER_S);
    cd_team *team = &g->teams[rank];
    CHECK_OK((c->run ? c->run : cd_plan_find(team, op)->run)(team, op, &patience));
}

static inline void run_reduction(shm_ranks *g, int rank, const test_case *c, cd_op op)
{
    bool has_out = c->kind == CD_ALL_REDUCE || rank == c->root;
    buffer in = buffer_make(c->count, c->item, c->layout);
    buffer out = buffer_make(c->count, c->item, c->gaps_out ? GAPS : c->in_arena ? c->layout : (c->layout + 1) % LAYOUTS);
    fill(&in, 0, c->count, c->dtype, c->salt, rank, 0);
    op.in = shm_one(buffer_span(&in));
    if (has_out)
        op.out = shm_one(buffer_span(c->in_place ? &in : &out));
    run_op(g, rank, c, &op);
    if (has_out)
        check_reduced(c->in_place ? &in : &out, c, g->world, 0, op.factor);
    if (!has_out || !c->in_place)
        check_filled(&in, 0, c->count, c->dtype, c->salt, rank, 0);
    buffer_check_gaps(&in);
    buffer_check_gaps(&out);
    buffer_free(&in);
    buffer_free(&out);
}

static inline void run_broadcast(shm_ranks *g, int rank, const test_case *c, cd_op op)
{
    buffer b = buffer_make(c->count, c->item, (c->layout + (c->in_arena ? abs(rank - c->root) : rank)) % LAYOUTS);
    if (rank == c->root) {
        fill(&b, 0, c->count, c->dtype, c->salt, c->root, 0);
        op.in = shm_one(buffer_span(&b));
    } else {
        op.out = shm_one(buffer_span(&b));
    }
    run_op(g, rank, c, &op);
    check_filled(&b, 0, c->count, c->dtype, c->salt, c->root, 0);
    buffer_check_gaps(&b);
    buffer_free(&b);
}

static inline void check_block(const test_case *c, int giver, int taker_salt, const block_set *s, int slot)
{
    size_t start;
    const buffer *b = blocks_of(s, slot, &start);
    check_filled(b, start, s->counts[slot], c->dtype, c->salt, giver, taker_salt);
}

/* all_gather, gather: one span in, blocks out. */
static inline void run_gathering(shm_ranks *g, int rank, const test_case *c, cd_op op)
{
    static _Thread_local block_set out;
    bool has_out = c->kind == CD_ALL_GATHER || rank == c->root;
    buffer in = buffer_make(block_count(c, rank, 0), c->item, c->layout);
    fill(&in, 0, in.count, c->dtype, c->salt, rank, 0);
    op.in = shm_one(buffer_span(&in));
    if (has_out) {
        blocks_make(&out, c, g->world, rank, false);
        op.out = out.blocks;
    }
    run_op(g, rank, c, &op);
    if (has_out) {
        for (int j = 0; j < g->world; j++)
            check_block(c, j, 0, &out, j);
        blocks_free(&out, g->world);
    }
    buffer_check_gaps(&in);
    buffer_free(&in);
}

/* scatter, reduce_scatter: blocks in, one span out. */
static inline void run_scattering(shm_ranks *g, int rank, const test_case *c, cd_op op)
{
    static _Thread_local block_set in;
    bool has_in = c->kind == CD_REDUCE_SCATTER || rank == c->root;
    buffer out = buffer_make(block_count(c, c->root, rank), c->item, c->gaps_out ? GAPS : c->layout);
    op.out = shm_one(buffer_span(&out));
    if (has_in) {
        blocks_make(&in, c, g->world, rank, true);
        blocks_fill(&in, c, g->world, rank);
        op.in = in.blocks;
    }
    run_op(g, rank, c, &op);
    if (c->kind == CD_REDUCE_SCATTER)
        check_reduced(&out, c, g->world, rank, op.factor);
    else
        check_filled(&out, 0, out.count, c->dtype, c->salt, c->root, rank);
    if (has_in) {
        for (int j = 0; j < g->world; j++)
            check_block(c, rank, j, &in, j);
        blocks_free(&in, g->world);
    }
    buffer_check_gaps(&out);
    buffer_free(&out);
}

static inline void run_exchange(shm_ranks *g, int rank, const test_case *c, cd_op op)
{
    static _Thread_local block_set in, out;
    blocks_make(&in, c, g->world, rank, true);
    blocks_fill(&in, c, g->world, rank);
    blocks_make(&out, c, g->world, rank, false);
    op.in = in.blocks;
    op.out = out.blocks;
    run_op(g, rank, c, &op);
    for (int j = 0; j < g->world; j++)
        check_block(c, j, rank, &out, j);
    blocks_free(&in, g->world);
    blocks_free(&out, g->world);
}

static inline void run_case(shm_ranks *g, int rank, const test_case *c, uint64_t sequence)
{
    cd_op op = op_of(c, sequence);
    switch (c->kind) {
    case CD_BARRIER: run_op(g, rank, c, &op); break;
    case CD_ALL_REDUCE:
    case CD_REDUCE: run_reduction(g, rank, c, op); break;
    case CD_BROADCAST: run_broadcast(g, rank, c, op); break;
    case CD_ALL_GATHER:
    case CD_GATHER: run_gathering(g, rank, c, op); break;
    case CD_SCATTER:
    case CD_REDUCE_SCATTER: run_scattering(g, rank, c, op); break;
    default: run_exchange(g, rank, c, op);
    }
}

/* ---- lists of cases ---- */

typedef struct {
    shm_ranks *g;
    test_case *list;
    size_t count;
} case_list;

static inline void add(case_list *l, test_case c)
{
    l->list = realloc(l->list, (l->count + 1) * sizeof c);
    c.salt = l->count + 1;
    c.root = c.kind == CD_REDUCE || c.kind == CD_BROADCAST || c.kind == CD_GATHER || c.kind == CD_SCATTER
                 ? (int)(l->count % (size_t)l->g->world)
                 : -1;
    l->list[l->count++] = c;
}

static inline bool is_reduction(cd_kind kind)
{
    return kind == CD_ALL_REDUCE || kind == CD_REDUCE || kind == CD_REDUCE_SCATTER;
}

static const struct {
    cd_dtype dtype;
    cd_redop redop;
    size_t item;
} reductions[] = {{CD_FLOAT32, CD_SUM, 4},     {CD_FLOAT32, CD_AVG, 4},    {CD_FLOAT32, CD_PREMUL_SUM, 4},
                  {CD_INT32, CD_MAX, 4},       {CD_FLOAT64, CD_SUM, 8},    {CD_BOOL, CD_SUM, 1},
                  {CD_BFLOAT16, CD_SUM, 2},    {CD_COMPLEX64, CD_PRODUCT, 8}};
static const struct {
    cd_dtype dtype;
    size_t item;
} moved[] = {{CD_FLOAT32, 4}, {CD_UINT8, 1}, {CD_BYTES, 12}, {CD_COMPLEX128, 16}, {CD_BYTES, 200}, {CD_INT64, 8}};

static inline void run_list_on_rank(int rank, void *ctx)
{
    const case_list *l = ctx;
    buffer_skew = (size_t)rank * 20 % CD_SHM_GRAIN;
    for (size_t i = 0; i < l->count; i++) {
        buffer_arena = rank < 32 && (l->list[i].in_arena >> rank & 1) ? l->g->arenas[rank] : NULL;
        run_case(l->g, rank, &l->list[i], i);
    }
}

#endif
