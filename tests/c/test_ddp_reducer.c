/* The reducer over a group that is played by this file: ranks are threads, an operation meets at a barrier and sums at once.
 * What is defined here takes the place of the real group, so that counters, order and flags are tested alone. */
#include "check.h"
#include "ddp/reducer.h"
#include "base/host.h"
#include "simd/reduce.h"

#include <math.h>
#include <stdlib.h>

enum { MAX_RANKS = 4, MAX_LOG = 64, REGION = 1 << 20 };

typedef struct {
    pthread_barrier_t barrier;
    int ranks;
    const char *transport;
    const cd_op *ops[MAX_RANKS];
    float sum[1 << 20];
    char *memory; /* a region a rank; NULL: no arena */
} hub;

struct cd_group {
    hub *hub;
    int rank;
    cd_redop redops[MAX_LOG];
    size_t counts[MAX_LOG];
    int issued, met, fail_at;
    cd_arena arena;
    size_t arena_used;
    int freed; /* blocks given back */
};

#define TIMEOUT_NS (UINT64_C(60) * CD_NS_PER_S)

struct cd_work {
    void *owner;
    void (*release)(void *);
};

static void meet(cd_group *g, const cd_op *op)
{
    hub *h = g->hub;
    h->ops[g->rank] = op;
    pthread_barrier_wait(&h->barrier);
    if (op->kind == CD_ALL_GATHER) {
        for (int r = 0; r < h->ranks; r++)
            memcpy((char *)op->out.list->data + (size_t)r * op->count, h->ops[r]->in.list->data, op->count);
    } else if (g->rank == 0) {
        CHECK(op->count <= 1 << 20);
        for (size_t i = 0; i < op->count; i++) {
            float sum = 0;
            for (int r = 0; r < h->ranks; r++)
                sum += ((float *)h->ops[r]->in.list->data)[i] * (op->redop == CD_PREMUL_SUM ? (float)op->factor : 1.0f);
            h->sum[i] = op->redop == CD_AVG ? sum / (float)h->ranks : sum;
        }
    }
    pthread_barrier_wait(&h->barrier);
    if (op->kind == CD_ALL_REDUCE)
        memcpy(op->out.list->data, h->sum, op->count * sizeof(float));
    pthread_barrier_wait(&h->barrier);
}

cd_status cd_group_issue(cd_group *g, const cd_op *op, uint64_t timeout_ns, cd_work **out)
{
    CHECK(timeout_ns == TIMEOUT_NS && op->kind == CD_ALL_REDUCE);
    if (op->dtype == CD_UINT8) { /* finish waits for a rank that is behind */
        g->met++;
        pthread_barrier_wait(&g->hub->barrier);
        *out = calloc(1, sizeof **out);
        return CD_OK;
    }
    CHECK(op->dtype == CD_FLOAT32);
    if (g->fail_at == g->issued)
        return cd_fail(CD_PEER_LOST, "rank 1 is lost");
    g->redops[g->issued % MAX_LOG] = op->redop;
    g->counts[g->issued++ % MAX_LOG] = op->count;
    meet(g, op);
    *out = calloc(1, sizeof **out);
    return CD_OK;
}

cd_status cd_group_issue_patiently(cd_group *g, const cd_op *op, uint64_t timeout_ns, const cd_patience *patience, cd_work **out)
{
    (void)patience;
    return cd_group_issue(g, op, timeout_ns, out);
}

cd_status cd_group_run(cd_group *g, cd_op *op, cd_patience *patience)
{
    (void)patience;
    if (op->dtype == CD_UINT8 && op->kind == CD_ALL_REDUCE) {
        g->met++;
        pthread_barrier_wait(&g->hub->barrier);
        return CD_OK;
    }
    meet(g, op);
    return CD_OK;
}

cd_group *cd_group_retain(cd_group *g) { return g; }
void cd_group_release(cd_group *g) { (void)g; }
cd_status cd_group_check_fork(const cd_group *g) { (void)g; return CD_OK; }
int cd_group_size(const cd_group *g) { return g->hub->ranks; }
int cd_group_rank(const cd_group *g) { return g->rank; }
uint64_t cd_group_timeout_ns(const cd_group *g) { (void)g; return TIMEOUT_NS; }
/* The group is its world. */
cd_world *cd_group_world(cd_group *g) { return (cd_world *)(void *)g; }
int cd_world_local_size(const cd_world *w) { return ((const cd_group *)(const void *)w)->hub->ranks; }
const char *cd_group_transport(const cd_group *g) { return g->hub->transport; }
cd_arena *cd_world_arena(cd_world *w)
{
    cd_group *g = (cd_group *)(void *)w;
    return g->hub->memory ? &g->arena : 0;
}

static cd_group *owner_of(cd_arena *a)
{
    return (cd_group *)(void *)((char *)a - offsetof(cd_group, arena));
}

cd_status cd_arena_alloc(cd_arena *a, size_t bytes, void **out)
{
    cd_group *g = owner_of(a);
    CHECK(g->arena_used + bytes + CD_LINE <= REGION);
    *out = cd_arena_at(a, a->local, g->arena_used);
    g->arena_used += (bytes + CD_LINE - 1) / CD_LINE * CD_LINE;
    return CD_OK;
}
void cd_arena_release(cd_arena *a, void *block)
{
    CHECK(block);
    owner_of(a)->freed++;
}
cd_status cd_work_wait(cd_work *w, const cd_patience *p) { (void)w; (void)p; return CD_OK; }
cd_status cd_work_join_stream(cd_work *w, void *s, const cd_patience *p) { (void)w; (void)s; (void)p; return CD_OK; }
void cd_work_set_owner(cd_work *w, void *owner, void (*release)(void *)) { w->owner = owner; w->release = release; }
void cd_work_release(cd_work *w)
{
    if (!w)
        return;
    if (w->release)
        w->release(w->owner);
    free(w);
}

static void multiply(void *out, const void *const *in, int inputs, size_t count, double factor)
{
    for (size_t i = 0; i < count; i++) {
        float sum = 0;
        for (int k = 0; k < inputs; k++)
            sum += ((const float *)in[k])[i] * (float)factor;
        ((float *)out)[i] = sum;
    }
}
static void average(void *out, const void *const *in, int inputs, size_t count, double factor)
{
    CHECK(factor == 1.0);
    multiply(out, in, inputs, count, 1.0);
    for (size_t i = 0; i < count; i++)
        ((float *)out)[i] /= (float)inputs;
}
cd_reduce_func cd_reduce_find(cd_redop redop, cd_dtype dtype)
{
    CHECK(dtype == CD_FLOAT32 && (redop == CD_PREMUL_SUM || redop == CD_SUM || redop == CD_AVG));
    return redop == CD_AVG ? average : multiply;
}

/* Five gradients of 1…5 elements in three buckets, the last parameters first. */
static const int bucket_of[5] = {2, 1, 1, 0, 0};

static cd_reducer *make_reducer(cd_group *g, cd_reduce_mode mode)
{
    cd_reducer_param params[5];
    for (int i = 0; i < 5; i++)
        params[i] = (cd_reducer_param){(size_t)i + 1, CD_FLOAT32, CD_CPU};
    cd_reducer_spec spec = {params, 5, bucket_of, 3, mode, 0, 0};
    cd_reducer *r;
    CHECK_OK(cd_reducer_create(g, &spec, &r));
    return r;
}

static void put(cd_reducer *r, int param, float value)
{
    for (int i = 0; i <= param; i++)
        ((float *)cd_reducer_view(r, param))[i] = value;
    CHECK_OK(cd_reducer_ready(r, param, NULL));
}

static void check_value(cd_reducer *r, int param, float value)
{
    for (int i = 0; i <= param; i++)
        CHECK(fabsf(((float *)cd_reducer_view(r, param))[i] - value) < 1e-6f);
}

static void run_with(const char *transport, char *memory, int ranks, void (*body)(cd_group *))
{
    static hub h;
    h = (hub){.ranks = ranks, .transport = transport, .memory = memory};
    pthread_barrier_init(&h.barrier, 0, (unsigned)ranks);
    cd_group groups[MAX_RANKS];
    pthread_t threads[MAX_RANKS];
    for (int r = 0; r < ranks; r++) {
        groups[r] = (cd_group){.hub = &h, .rank = r, .fail_at = -1};
        groups[r].arena = (cd_arena){.base = memory, .region_bytes = REGION, .ranks = ranks, .local = r};
        CHECK(pthread_create(&threads[r], 0, (void *(*)(void *))(void *)body, &groups[r]) == 0);
    }
    for (int r = 0; r < ranks; r++)
        pthread_join(threads[r], 0);
    pthread_barrier_destroy(&h.barrier);
}

static void run_over(const char *transport, int ranks, void (*body)(cd_group *))
{
    run_with(transport, 0, ranks, body);
}

static void run_on_ranks(int ranks, void (*body)(cd_group *))
{
    run_over("tcp", ranks, body);
}

/* In memory that all ranks see. */
static void run_inplace(int ranks, void (*body)(cd_group *))
{
    char *memory = aligned_alloc(4096, (size_t)ranks * REGION);
    CHECK(memory);
    run_with("shm", memory, ranks, body);
    free(memory);
}

/* Gradients come in a different order on each rank; buckets are launched 0, 1, 2 all the same. */
static void body_order(cd_group *g)
{
    cd_patience patience = {.deadline = CD_NEVER};
    cd_reducer *r = make_reducer(g, CD_REDUCE_MEAN);
    for (int step = 0; step < 50; step++) {
        CHECK_OK(cd_reducer_begin(r, CD_STEP_REDUCE, &patience));
        for (int i = 0; i < 5; i++) {
            int param = (i * (g->rank + 1) + step) % 5;
            put(r, param, (float)(param + 10 * g->rank));
            CHECK(cd_reducer_seen(r, param) == 1);
        }
        CHECK_OK(cd_reducer_finish(r, false, &patience));
        for (int i = 0; i < 5; i++)
            check_value(r, i, (float)i + 5.0f * (float)(g->hub->ranks - 1));
        int count;
        const int *order = cd_reducer_ready_order(r, &count);
        CHECK(count == 5 && order[0] == step % 5);
    }
    CHECK(g->issued == 150);
    for (int k = 0; k < 60; k++) {
        static const size_t counts[3] = {9 + 1, 5 + 1, 1 + 1};
        CHECK(g->counts[k] == counts[k % 3] || k + MAX_LOG < g->issued);
        CHECK(g->redops[k] == (g->hub->ranks > 1 ? CD_AVG : CD_SUM));
    }
    uint64_t buckets, bytes;
    cd_reducer_launched(r, &buckets, &bytes);
    CHECK(buckets == 150 && bytes == 50 * 15 * 4);
    cd_reducer_free(r);
}

/* A gradient that is missing on one rank fails finish on all, is named on all, and the next step works. */
static void body_missing(cd_group *g)
{
    cd_patience patience = {.deadline = CD_NEVER};
    cd_reducer *r = make_reducer(g, CD_REDUCE_MEAN);
    for (int strict = 0; strict < 2; strict++) {
        CHECK_OK(cd_reducer_begin(r, CD_STEP_REDUCE, &patience));
        for (int i = 0; i < 5; i++)
            if (!(g->rank == 1 && i == 2))
                put(r, i, 4.0f);
        cd_status status = cd_reducer_finish(r, !strict, &patience);
        CHECK(status == (strict ? CD_BAD_ARGUMENT : CD_OK));
        check_value(r, 1, 4.0f);
        if (!strict)
            check_value(r, 2, 4.0f * (float)(g->hub->ranks - 1) / (float)g->hub->ranks);
    }
    uint8_t missing[MAX_RANKS * 5];
    CHECK_OK(cd_reducer_gather_missing(r, missing, &patience));
    for (int i = 0; i < g->hub->ranks * 5; i++)
        CHECK(missing[i] == (i == 5 + 2));
    CHECK_OK(cd_reducer_begin(r, CD_STEP_REDUCE, &patience));
    for (int i = 0; i < 5; i++)
        put(r, i, 1.0f);
    CHECK_OK(cd_reducer_finish(r, false, &patience));
    check_value(r, 2, 1.0f);
    cd_reducer_free(r);
}

/* Sum, own divisor, weights. */
static void body_modes(cd_group *g)
{
    cd_patience patience = {.deadline = CD_NEVER};
    float ranks = (float)g->hub->ranks;
    cd_reducer *sum = make_reducer(g, CD_REDUCE_SUM);
    cd_reducer_set_scale(sum, (double)(g->rank + 1));
    CHECK_OK(cd_reducer_begin(sum, CD_STEP_REDUCE, &patience));
    for (int i = 0; i < 5; i++)
        put(sum, i, 2.0f);
    CHECK_OK(cd_reducer_finish(sum, false, &patience));
    check_value(sum, 4, 2.0f * ranks * (ranks + 1) / 2);
    cd_reducer_free(sum);

    cd_reducer *mean = make_reducer(g, CD_REDUCE_MEAN);
    cd_reducer_set_divisor(mean, 3.0);
    CHECK_OK(cd_reducer_begin(mean, CD_STEP_REDUCE, &patience));
    for (int i = 0; i < 5; i++)
        put(mean, i, 6.0f);
    CHECK_OK(cd_reducer_finish(mean, false, &patience));
    check_value(mean, 4, 2.0f * ranks);
    CHECK(g->redops[g->issued - 1] == (ranks == 3 ? CD_AVG : CD_PREMUL_SUM));
    cd_reducer_free(mean);
}

/* Local steps send nothing, count everything; handed-out buckets come in order. */
static void body_steps(cd_group *g)
{
    cd_patience patience = {.deadline = CD_NEVER};
    cd_reducer *r = make_reducer(g, CD_REDUCE_MEAN);
    CHECK_OK(cd_reducer_begin(r, CD_STEP_LOCAL, &patience));
    for (int i = 0; i < 12; i++)
        put(r, i % 5, 1.0f);
    CHECK(cd_reducer_seen(r, 0) == 3 && cd_reducer_seen(r, 4) == 2);
    CHECK_OK(cd_reducer_finish(r, false, &patience));

    CHECK_OK(cd_reducer_begin(r, CD_STEP_HANDOUT, &patience));
    put(r, 0, 1.0f);
    CHECK(cd_reducer_next_full(r) == -1);
    put(r, 3, 1.0f);
    put(r, 4, 1.0f);
    CHECK(cd_reducer_next_full(r) == 0 && cd_reducer_next_full(r) == -1);
    put(r, 1, 1.0f);
    int filled;
    CHECK_OK(cd_reducer_fill(r, false, &filled));
    CHECK(filled == 1 && cd_reducer_next_full(r) == 1 && cd_reducer_next_full(r) == 2 && cd_reducer_next_full(r) == -1);
    CHECK_OK(cd_reducer_finish(r, false, &patience));
    CHECK(g->issued == 0);
    cd_reducer_free(r);
}

static void body_errors(cd_group *g)
{
    cd_patience patience = {.deadline = CD_NEVER};
    cd_reducer *r = make_reducer(g, CD_REDUCE_MEAN);
    CHECK_OK(cd_reducer_begin(r, CD_STEP_REDUCE, &patience));
    CHECK_OK(cd_reducer_ready(r, 1, NULL));
    CHECK_FAILS(cd_reducer_ready(r, 1, NULL), CD_BAD_ARGUMENT);
    CHECK_FAILS(cd_reducer_ready(r, 5, NULL), CD_BAD_ARGUMENT);
    CHECK_FAILS(cd_reducer_ready(r, -1, NULL), CD_BAD_ARGUMENT);

    const int uses[5] = {1, 3, 1, 1, 0};
    cd_reducer_set_uses(r, uses);
    CHECK_OK(cd_reducer_begin(r, CD_STEP_REDUCE, &patience));
    for (int i = 0; i < 3; i++)
        CHECK_OK(cd_reducer_ready(r, 1, NULL));
    CHECK_FAILS(cd_reducer_ready(r, 1, NULL), CD_BAD_ARGUMENT);

    CHECK_OK(cd_reducer_begin(r, CD_STEP_REDUCE, &patience));
    g->fail_at = g->issued;
    CHECK_OK(cd_reducer_ready(r, 3, NULL));
    CHECK_FAILS(cd_reducer_ready(r, 4, NULL), CD_PEER_LOST);
    CHECK_FAILS(cd_reducer_finish(r, false, &patience), CD_PEER_LOST);
    cd_reducer_free(r);

    cd_reducer_param integer = {1, CD_INT32, CD_CPU}, real = {1, CD_FLOAT32, CD_CPU};
    int zero = 0, one = 1;
    CHECK_FAILS(cd_reducer_create(g, &(cd_reducer_spec){&integer, 1, &zero, 1, CD_REDUCE_MEAN, 0, 0}, &r), CD_BAD_TYPE);
    CHECK_FAILS(cd_reducer_create(g, &(cd_reducer_spec){&real, 1, &one, 1, CD_REDUCE_MEAN, 0, 0}, &r), CD_BAD_ARGUMENT);
    CHECK_FAILS(cd_reducer_create(g, &(cd_reducer_spec){&real, 1, &one, 2, CD_REDUCE_MEAN, 0, 0}, &r), CD_BAD_ARGUMENT);
    CHECK_OK(cd_reducer_create(g, &(cd_reducer_spec){0, 0, 0, 0, CD_REDUCE_MEAN, 0, 0}, &r));
    CHECK_OK(cd_reducer_begin(r, CD_STEP_REDUCE, &patience));
    CHECK_OK(cd_reducer_finish(r, false, &patience));
    cd_reducer_free(r);
}

/* Gradients of one rank become ready in several threads at once. */
typedef struct {
    cd_reducer *reducer;
    int first;
} share;

static void *mark_share(void *arg)
{
    share *s = arg;
    for (int i = s->first; i < 64; i += 4) {
        *(float *)cd_reducer_view(s->reducer, i) = (float)i;
        CHECK_OK(cd_reducer_ready(s->reducer, i, NULL));
    }
    return 0;
}

static void body_threads(cd_group *g)
{
    cd_patience patience = {.deadline = CD_NEVER};
    cd_reducer_param params[64];
    int buckets[64];
    for (int i = 0; i < 64; i++) {
        params[i] = (cd_reducer_param){1, CD_FLOAT32, CD_CPU};
        buckets[i] = i / 5;
    }
    cd_reducer *r;
    CHECK_OK(cd_reducer_create(g, &(cd_reducer_spec){params, 64, buckets, 13, CD_REDUCE_SUM, 0, 0}, &r));
    for (int step = 0; step < 100; step++) {
        CHECK_OK(cd_reducer_begin(r, CD_STEP_REDUCE, &patience));
        pthread_t threads[4];
        share shares[4];
        for (int t = 0; t < 4; t++) {
            shares[t] = (share){r, t};
            CHECK(pthread_create(&threads[t], 0, mark_share, &shares[t]) == 0);
        }
        for (int t = 0; t < 4; t++)
            pthread_join(threads[t], 0);
        CHECK(g->issued == (step + 1) * 13);
        CHECK_OK(cd_reducer_finish(r, false, &patience));
        for (int i = 0; i < 64; i++)
            CHECK(*(float *)cd_reducer_view(r, i) == (float)(i * g->hub->ranks));
    }
    cd_reducer_free(r);
}

/* In shared memory a bucket goes in pieces of 1 MiB, in the given order; the flag is with its last piece. */
static void body_pieces(cd_group *g)
{
    enum { MIB = 1 << 18 };
    cd_patience patience = {.deadline = CD_NEVER};
    cd_reducer_param params[4] = {{3, CD_FLOAT32, CD_CPU}, {MIB, CD_FLOAT32, CD_CPU}, {MIB - 1, CD_FLOAT32, CD_CPU},
                                  {5, CD_FLOAT32, CD_CPU}};
    const int buckets[4] = {1, 0, 0, 0}, order[4] = {2, 3, 1, 0};
    cd_reducer *r;
    CHECK_OK(cd_reducer_create(g, &(cd_reducer_spec){params, 4, buckets, 2, CD_REDUCE_SUM, 0, order}, &r));
    bool cuts = strcmp(g->hub->transport, "shm") == 0;
    size_t offset;
    CHECK(cd_reducer_place(r, 1, &offset) == 0 && offset == (MIB + 4) * sizeof(float));
    for (int step = 0; step < 2; step++) {
        CHECK_OK(cd_reducer_begin(r, CD_STEP_REDUCE, &patience));
        int before = g->issued;
        ((float *)cd_reducer_view(r, 2))[MIB - 2] = 1.0f;
        CHECK_OK(cd_reducer_ready(r, 2, NULL));
        CHECK(g->issued == before);
        CHECK_OK(cd_reducer_ready(r, 3, NULL));
        CHECK(g->issued == before + cuts);
        ((float *)cd_reducer_view(r, 1))[0] = 2.0f;
        if (step == 0 || g->rank)
            CHECK_OK(cd_reducer_ready(r, 1, NULL));
        CHECK_OK(cd_reducer_ready(r, 0, NULL));
        CHECK(cd_reducer_finish(r, false, &patience) == (step == 0 ? CD_OK : CD_BAD_ARGUMENT));
        CHECK(g->issued == before + 2 + cuts && g->counts[g->issued - 1] == 3 + 1);
        CHECK(g->counts[before] == (cuts ? MIB + 4 : 2 * MIB + 5) && (!cuts || g->counts[before + 1] == MIB + 1));
        CHECK(((float *)cd_reducer_view(r, 2))[MIB - 2] == (float)g->hub->ranks);
    }
    uint64_t sent, bytes;
    cd_reducer_launched(r, &sent, &bytes);
    CHECK(sent == 4 && bytes == 2 * (2 * MIB + 7) * sizeof(float));
    cd_reducer_free(r);
}

/* From the second step on nothing is issued: two meetings a step, whatever the order of gradients, a slow rank, threads. */
static void body_inplace(cd_group *g)
{
    cd_patience patience = {.deadline = CD_NEVER};
    enum { COUNT = 22, EACH = 9000 }; /* a bucket is several of the blocks that ranks take */
    cd_reducer_param params[COUNT];
    int buckets[COUNT];
    for (int i = 0; i < COUNT; i++) {
        params[i] = (cd_reducer_param){EACH + (size_t)i, CD_FLOAT32, CD_CPU};
        buckets[i] = i / 3;
    }
    cd_reducer *r;
    CHECK_OK(cd_reducer_create(g, &(cd_reducer_spec){params, COUNT, buckets, 8, CD_REDUCE_MEAN, 0, 0}, &r));
    int first_issued = 0;
    for (int step = 0; step < 40; step++) {
        bool behind = step == 20 && g->rank == 0; /* longer than finish looks by itself */
        cd_reducer_set_divisor(r, step % 2 ? 4.0 : (double)g->hub->ranks);
        cd_reducer_set_scale(r, step % 3 ? 1.0 : 2.0);
        CHECK_OK(cd_reducer_begin(r, CD_STEP_REDUCE, &patience));
        if (behind)
            cd_sleep_ns(120 * CD_NS_PER_MS);
        for (int i = 0; i < COUNT; i++) {
            int param = (i * (g->rank * 2 + 1) + step * 3) % COUNT;
            float *view = cd_reducer_view(r, param);
            for (int k = 0; k < EACH + param; k++)
                view[k] = (float)(param + step + 8 * g->rank + k % 7);
            CHECK_OK(cd_reducer_ready(r, param, NULL));
        }
        CHECK_OK(cd_reducer_finish(r, false, &patience));
        float ranks = (float)g->hub->ranks, scale = step % 3 ? 1.0f : 2.0f, divisor = step % 2 ? 4.0f : ranks;
        for (int i = 0; i < COUNT; i++)
            for (int k = 0; k < EACH + i; k++) {
                float sum = ranks * (float)(i + step + k % 7) + 8 * ranks * (ranks - 1) / 2;
                CHECK(fabsf(((float *)cd_reducer_view(r, i))[k] - sum * scale / divisor) < 1e-3f);
            }
        if (step == 0)
            first_issued = g->issued;
        CHECK(g->issued == first_issued && g->met == 2 * step);
    }
    uint64_t sent, bytes;
    cd_reducer_launched(r, &sent, &bytes);
    CHECK(sent == 40 * 8);
    cd_reducer_free(r);
    CHECK(g->freed == 8);
}

/* A step that one rank begins anew after some of its gradients went out fails on all ranks; the next is right. A step of which
 * nothing went out can be begun anew. */
static void body_inplace_begun_anew(cd_group *g)
{
    cd_patience patience = {.deadline = CD_NEVER};
    cd_reducer *r = make_reducer(g, CD_REDUCE_MEAN);
    for (int step = 0; step < 5; step++) {
        CHECK_OK(cd_reducer_begin(r, CD_STEP_REDUCE, &patience));
        bool breaks = step == 2 && g->rank == 1, restarts = step == 3 && g->rank == 1;
        if (restarts) {
            put(r, 0, 100.0f);
            CHECK_OK(cd_reducer_begin(r, CD_STEP_REDUCE, &patience));
        }
        for (int i = 4; i >= (breaks ? 2 : 0); i--)
            put(r, i, 6.0f);
        if (breaks)
            continue;
        CHECK(cd_reducer_finish(r, false, &patience) == (step == 2 ? CD_BAD_ARGUMENT : CD_OK));
        check_value(r, 4, 6.0f);
    }
    /* Freed in the middle of a step: the others may still write there. */
    CHECK_OK(cd_reducer_begin(r, CD_STEP_REDUCE, &patience));
    put(r, 4, 1.0f);
    put(r, 3, 1.0f);
    cd_reducer_free(r);
    CHECK(g->freed == 0);
}

int main(void)
{
    setenv("CDIST_REDUCER", "inline", 1);
    for (int ranks = 2; ranks <= 4; ranks++) {
        run_inplace(ranks, body_inplace);
        run_inplace(ranks, body_inplace_begun_anew);
        run_inplace(ranks, body_missing);
    }
    for (int ranks = 1; ranks <= 4; ranks++) {
        run_on_ranks(ranks, body_order);
        run_on_ranks(ranks, body_modes);
        if (ranks > 1)
            run_on_ranks(ranks, body_missing);
        run_on_ranks(ranks, body_threads);
        run_on_ranks(ranks, body_pieces);
        run_over("shm", ranks, body_pieces);
    }
    run_on_ranks(1, body_steps);
    run_on_ranks(1, body_errors);
    printf("ddp reducer: ok\n");
    return 0;
}
