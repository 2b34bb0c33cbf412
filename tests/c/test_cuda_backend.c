/* Every kind of operation through the GPU backend, on the fake NCCL: data, order, packing, streams, events, groups, graphs. */
#include "gpu_ranks.h"

#include "../fake_nccl/fake_cuda.h"

#include <math.h>

enum { N = 4, COUNT = 30000 }; /* above the fake's chunk */

static cd_span span_of(void *data, size_t count, uint32_t item)
{
    return (cd_span){.data = data, .count = count, .item_bytes = item};
}

static cd_op op_of(cd_kind kind, cd_dtype dtype, cd_span *in, cd_span *out)
{
    cd_op op = {.kind = kind, .dtype = dtype, .device = CD_CUDA, .root = -1, .item_bytes = (uint32_t)cd_dtype_bytes(dtype)};
    if (in)
        op.in = (cd_blocks){in, 0, 1};
    if (out)
        op.out = (cd_blocks){out, 0, 1};
    return op;
}

static void run(gpu_rank *r, const cd_op *op)
{
    CHECK_OK(r->backend->ops->run(r->backend, op, &r->patience));
}

static void check_all_reduce(gpu_rank *r, int rank)
{
    float *x = gpu_alloc(r, COUNT * sizeof *x);
    for (int i = 0; i < COUNT; i++)
        x[i] = (float)(i % 97 + rank);
    cd_span span = span_of(x, COUNT, 4);
    cd_op op = op_of(CD_ALL_REDUCE, CD_FLOAT32, &span, &span);
    run(r, &op);
    gpu_flush(r);
    for (int i = 0; i < COUNT; i++)
        CHECK(x[i] == (float)(i % 97 * N + 6));
    op.redop = CD_AVG;
    run(r, &op);
    op.redop = CD_PREMUL_SUM;
    op.factor = 0.5;
    run(r, &op);
    gpu_flush(r);
    for (int i = 0; i < COUNT; i++)
        CHECK(x[i] == (float)(i % 97 * N + 6) * 2);
    gpu_release(r, x);
}

static void check_rooted(gpu_rank *r, int rank)
{
    double *x = gpu_alloc(r, N * 8), *all = gpu_alloc(r, N * N * 8);
    cd_span mine = span_of(x, N, 8), blocks = span_of(all, N * N, 8);
    for (int root = 0; root < N; root++) {
        for (int i = 0; i < N; i++)
            x[i] = rank * 10 + i;
        cd_op op = op_of(CD_REDUCE, CD_FLOAT64, &mine, rank == root ? &mine : 0);
        op.root = root;
        op.redop = CD_MAX;
        run(r, &op);
        gpu_flush(r);
        for (int i = 0; i < N; i++)
            CHECK(x[i] == (rank == root ? 30 + i : rank * 10 + i));
        op = op_of(CD_BROADCAST, CD_FLOAT64, rank == root ? &mine : 0, rank == root ? 0 : &mine);
        op.root = root;
        run(r, &op);
        gpu_flush(r);
        CHECK(x[3] == 33);
        x[0] = rank;
        op = op_of(CD_GATHER, CD_FLOAT64, &mine, rank == root ? &blocks : 0);
        op.root = root;
        run(r, &op);
        gpu_flush(r);
        for (int j = 0; rank == root && j < N; j++)
            CHECK(all[j * N] == j && all[j * N + 3] == 33);
        for (int i = 0; i < N * N; i++)
            all[i] = 100 * root + i;
        op = op_of(CD_SCATTER, CD_FLOAT64, rank == root ? &blocks : 0, &mine);
        op.root = root;
        run(r, &op);
        gpu_flush(r);
        for (int i = 0; i < N; i++)
            CHECK(x[i] == 100 * root + rank * N + i);
    }
    gpu_release(r, x);
    gpu_release(r, all);
}

static void check_gathers(gpu_rank *r, int rank)
{
    int32_t *x = gpu_alloc(r, N * N * 4), *all = gpu_alloc(r, N * N * 4);
    cd_span list[N], mine = span_of(x, 3, 4), out = span_of(all, 3 * N, 4);
    for (int i = 0; i < N * N; i++)
        x[i] = rank * 100 + i;
    cd_op op = op_of(CD_ALL_GATHER, CD_INT32, &mine, &out);
    run(r, &op);
    gpu_flush(r);
    for (int i = 0; i < 3 * N; i++)
        CHECK(all[i] == i / 3 * 100 + i % 3);
    /* Uneven: rank j gives j + 1 elements, to blocks in reverse order in memory. */
    for (int j = 0; j < N; j++)
        list[j] = span_of(all + (N - 1 - j) * N, (size_t)j + 1, 4);
    mine.count = (size_t)rank + 1;
    op = op_of(CD_ALL_GATHER, CD_INT32, &mine, 0);
    op.out = (cd_blocks){list, 0, N};
    run(r, &op);
    gpu_flush(r);
    for (int j = 0; j < N; j++)
        for (int i = 0; i <= j; i++)
            CHECK(all[(N - 1 - j) * N + i] == j * 100 + i);
    gpu_release(r, x);
    gpu_release(r, all);
}

static void check_reduce_scatter(gpu_rank *r, int rank)
{
    float *x = gpu_alloc(r, N * N * 4), *y = gpu_alloc(r, N * 4);
    static const size_t uneven[N] = {1, 0, 3, 2};
    for (int i = 0; i < N * N; i++)
        x[i] = (float)(i + rank);
    cd_span in = span_of(x, N * N, 4), out = span_of(y, N, 4);
    cd_op op = op_of(CD_REDUCE_SCATTER, CD_FLOAT32, &in, &out);
    run(r, &op);
    gpu_flush(r);
    for (int i = 0; i < N; i++)
        CHECK(y[i] == (float)((rank * N + i) * N + 6));
    in.count = 6;
    out.count = uneven[rank];
    op = op_of(CD_REDUCE_SCATTER, CD_FLOAT32, &in, &out);
    op.in.counts = uneven;
    run(r, &op);
    gpu_flush(r);
    size_t first = 0;
    for (int j = 0; j < rank; j++)
        first += uneven[j];
    for (size_t i = 0; i < uneven[rank]; i++)
        CHECK(y[i] == (float)((first + i) * N + 6));
    gpu_release(r, x);
    gpu_release(r, y);
}

static void check_all_to_all(gpu_rank *r, int rank)
{
    enum { BIG = 9000 };
    int64_t *x = gpu_alloc(r, N * BIG * 8), *y = gpu_alloc(r, N * BIG * 8);
    for (int i = 0; i < N * BIG; i++)
        x[i] = rank * 1000000 + i;
    cd_span in = span_of(x, N * BIG, 8), out = span_of(y, N * BIG, 8);
    cd_op op = op_of(CD_ALL_TO_ALL, CD_INT64, &in, &out);
    run(r, &op);
    gpu_flush(r);
    for (int j = 0; j < N; j++)
        for (int i = 0; i < BIG; i++)
            CHECK(y[j * BIG + i] == j * 1000000 + rank * BIG + i);
    gpu_release(r, x);
    gpu_release(r, y);
}

static void check_ring(gpu_rank *r, int rank)
{
    int32_t *x = gpu_alloc(r, COUNT * 4), *y = gpu_alloc(r, COUNT * 4);
    for (int i = 0; i < COUNT; i++)
        x[i] = rank * COUNT + i;
    cd_span out = span_of(x, COUNT, 4), in = span_of(y, COUNT, 4);
    cd_op send = op_of(CD_SEND, CD_INT32, &out, 0), recv = op_of(CD_RECV, CD_INT32, 0, &in);
    send.peer = (rank + 1) % N;
    recv.peer = (rank + N - 1) % N;
    /* All send first: only a coalesced group lets this end. */
    CHECK_OK(r->backend->ops->group_begin(r->backend, &r->patience));
    cd_event *sent = 0, *received = 0;
    CHECK_OK(r->backend->ops->start(r->backend, &send, &r->patience, &sent));
    CHECK_OK(r->backend->ops->start(r->backend, &recv, &r->patience, &received));
    bool done = true;
    CHECK_OK(r->backend->ops->event_done(received, &done));
    CHECK(!done);
    CHECK_FAILS(r->backend->ops->event_join_stream(received, 0), CD_BAD_ARGUMENT);
    CHECK_OK(r->backend->ops->group_end(r->backend, &r->patience));
    CHECK_OK(r->backend->ops->event_wait_host(received, &r->patience));
    CHECK_OK(r->backend->ops->event_wait_host(sent, &r->patience));
    for (int i = 0; i < COUNT; i++)
        CHECK(y[i] == (rank + N - 1) % N * COUNT + i);
    r->backend->ops->event_free(sent);
    r->backend->ops->event_free(received);
    recv.peer = -1;
    CHECK_FAILS(r->backend->ops->run(r->backend, &recv, &r->patience), CD_UNSUPPORTED);
    gpu_release(r, x);
    gpu_release(r, y);
}

/* Columns 1 and 3 of a 100 × 4 matrix, a reversed vector, and both inside a coalesced group: packed and unpacked. */
static void check_strided(gpu_rank *r, int rank)
{
    float *x = gpu_alloc(r, 400 * 4), *v = gpu_alloc(r, 50 * 4);
    for (int i = 0; i < 400; i++)
        x[i] = (float)(i * (rank + 1));
    for (int i = 0; i < 50; i++)
        v[i] = (float)(i + rank);
    cd_dims columns = {.ndim = 2, .shape = {100, 2}, .strides = {16, 8}};
    cd_dims reversed = {.ndim = 1, .shape = {50}, .strides = {-4}};
    cd_span a = {x + 1, 200, &columns, 4}, b = {v + 49, 50, &reversed, 4};
    cd_op one = op_of(CD_ALL_REDUCE, CD_FLOAT32, &a, &a), two = op_of(CD_ALL_REDUCE, CD_FLOAT32, &b, &b);
    CHECK_OK(r->backend->ops->group_begin(r->backend, &r->patience));
    run(r, &one);
    run(r, &two);
    CHECK_OK(r->backend->ops->group_end(r->backend, &r->patience));
    two.redop = CD_MIN;
    run(r, &two);
    gpu_flush(r);
    for (int i = 0; i < 400; i++)
        CHECK(x[i] == (float)(i * (i % 2 ? 10 : rank + 1)));
    for (int i = 0; i < 50; i++)
        CHECK(v[i] == (float)(i * N + 6));
    gpu_release(r, x);
    gpu_release(r, v);
}

static void check_types(gpu_rank *r, int rank)
{
    uint16_t *h = gpu_alloc(r, 64);
    uint8_t *b = gpu_alloc(r, 64);
    float *c = gpu_alloc(r, 64);
    h[0] = 0x3e00; /* 1.5 as float16, 0.125 as bfloat16 */
    cd_span halves = span_of(h, 1, 2), bools = span_of(b, 2, 1), complexes = span_of(c, 2, 8);
    cd_op op = op_of(CD_ALL_REDUCE, CD_FLOAT16, &halves, &halves);
    op.redop = CD_PREMUL_SUM;
    op.factor = 0.25;
    run(r, &op);
    gpu_flush(r);
    CHECK(h[0] == 0x3e00);
    b[0] = rank == 2;
    b[1] = rank != 2;
    op = op_of(CD_ALL_REDUCE, CD_BOOL, &bools, &bools);
    run(r, &op);
    gpu_flush(r);
    CHECK(b[0] == 1 && b[1] == 1);
    b[1] = rank != 2;
    op.redop = CD_BAND;
    run(r, &op);
    gpu_flush(r);
    CHECK(b[0] == 1 && b[1] == 0);
    for (int i = 0; i < 4; i++)
        c[i] = (float)(rank + i);
    op = op_of(CD_ALL_REDUCE, CD_COMPLEX64, &complexes, &complexes);
    run(r, &op);
    gpu_flush(r);
    for (int i = 0; i < 4; i++)
        CHECK(c[i] == (float)(6 + 4 * i));
    op.redop = CD_PRODUCT;
    CHECK_FAILS(r->backend->ops->run(r->backend, &op, &r->patience), CD_UNSUPPORTED);
    gpu_release(r, h);
    gpu_release(r, b);
    gpu_release(r, c);
}

/* An asynchronous operation runs in the group's stream, behind the caller's and before what joins it. */
static void check_async(gpu_rank *r, int rank)
{
    void (*drain)(void *) = FAKE_CUDA_CALL(void (*)(void *), fake_stream_drain);
    int (*create)(void **, unsigned, int) = FAKE_CUDA_CALL(int (*)(void **, unsigned, int), cuStreamCreateWithPriority);
    int (*destroy)(void *) = FAKE_CUDA_CALL(int (*)(void *), cuStreamDestroy_v2);
    int (*copy)(unsigned long long, unsigned long long, size_t, void *) =
        FAKE_CUDA_CALL(int (*)(unsigned long long, unsigned long long, size_t, void *), cuMemcpyAsync);
    void *stream = 0;
    CHECK(create(&stream, 1, 0) == 0);
    int32_t *x = gpu_alloc(r, COUNT * 4), *y = gpu_alloc(r, COUNT * 4), *z = gpu_alloc(r, COUNT * 4);
    for (int round = 0; round < 5; round++) {
        for (int i = 0; i < COUNT; i++)
            x[i] = i + rank + round;
        copy((uintptr_t)y, (uintptr_t)x, COUNT * 4, stream);
        cd_span span = span_of(y, COUNT, 4);
        cd_op op = op_of(CD_ALL_REDUCE, CD_INT32, &span, &span);
        op.stream = stream;
        cd_event *event = 0;
        CHECK_OK(r->backend->ops->start(r->backend, &op, &r->patience, &event));
        CHECK_OK(r->backend->ops->event_join_stream(event, stream));
        copy((uintptr_t)z, (uintptr_t)y, COUNT * 4, stream);
        drain(stream);
        bool done = false;
        CHECK_OK(r->backend->ops->event_done(event, &done));
        CHECK(done);
        r->backend->ops->event_free(event);
        for (int i = 0; i < COUNT; i++)
            CHECK(z[i] == (i + round) * N + 6);
    }
    gpu_release(r, x);
    gpu_release(r, y);
    gpu_release(r, z);
    CHECK(destroy(stream) == 0);
}

static void check_capture(gpu_rank *r)
{
    void (*begin)(void *) = FAKE_CUDA_CALL(void (*)(void *), fake_capture_begin);
    void (*end)(void *) = FAKE_CUDA_CALL(void (*)(void *), fake_capture_end);
    void (*drain)(void *) = FAKE_CUDA_CALL(void (*)(void *), fake_stream_drain);
    int (*create)(void **, unsigned, int) = FAKE_CUDA_CALL(int (*)(void **, unsigned, int), cuStreamCreateWithPriority);
    int (*destroy)(void *) = FAKE_CUDA_CALL(int (*)(void *), cuStreamDestroy_v2);
    int (*violations)(void) = FAKE_CUDA_CALL(int (*)(void), fake_capture_violations);
    void *stream = 0;
    CHECK(create(&stream, 1, 0) == 0);
    int32_t *x = gpu_alloc(r, 64);
    cd_span span = span_of(x, 16, 4);
    cd_op op = op_of(CD_ALL_REDUCE, CD_INT32, &span, &span);
    op.stream = stream;
    begin(stream);
    for (int i = 0; i < 3; i++) {
        cd_event *event = 0;
        run(r, &op);
        CHECK_OK(r->backend->ops->start(r->backend, &op, &r->patience, &event));
        CHECK_OK(r->backend->ops->event_join_stream(event, stream));
        bool done = false;
        CHECK_OK(r->backend->ops->event_done(event, &done));
        CHECK(done);
        r->backend->ops->event_free(event);
    }
    drain(stream);
    cd_sleep_ns(60 * CD_NS_PER_MS); /* the watch looks in between */
    pthread_barrier_wait(&r->group->barrier);
    end(stream);
    CHECK(violations() == 0);
    gpu_release(r, x);
    CHECK(destroy(stream) == 0);
}

static void rank_main(int rank, void *ctx)
{
    gpu_rank r;
    gpu_rank_open(&r, ctx, rank);
    check_all_reduce(&r, rank);
    check_rooted(&r, rank);
    check_gathers(&r, rank);
    check_reduce_scatter(&r, rank);
    check_all_to_all(&r, rank);
    check_ring(&r, rank);
    check_strided(&r, rank);
    check_types(&r, rank);
    check_async(&r, rank);
    check_capture(&r);
    gpu_rank_close(&r);
}

int main(void)
{
    static gpu_group group;
    gpu_use_fakes();
    gpu_group_init(&group, N);
    check_on_ranks(N, rank_main, &group);
    CHECK(FAKE_NCCL_CALL(int (*)(void), fake_nccl_left)() == 0);
    CHECK(FAKE_NCCL_CALL(int (*)(void), fake_nccl_aborts)() == 0);
    CHECK(FAKE_NCCL_CALL(int (*)(void), fake_nccl_factors)() == 0);
    CHECK(FAKE_NCCL_CALL(int (*)(void), fake_nccl_early_calls)() == 0);
    CHECK(FAKE_CUDA_CALL(long (*)(void), fake_cuda_left)() == 0);
    puts("test_cuda_backend: ok");
    return 0;
}
