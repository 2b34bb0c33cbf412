/* Assignment of parameters to buckets. */
#include "check.h"
#include "ddp/bucket.h"

#define MIB ((size_t)1 << 20)

static cd_reducer_param f32(size_t count)
{
    return (cd_reducer_param){count, CD_FLOAT32, CD_CPU};
}

/* 10 × (Linear(1000, 1000) + BatchNorm1d(1000)), order reversed as gradients come: the sizes that torch reports. */
static void test_sizes_known_from_torch(void)
{
    cd_reducer_param params[22];
    int order[22], bucket_of[22];
    for (int i = 0; i < 20; i++)
        params[i] = f32(i % 2 ? 1000 : 1000000);
    params[20] = params[21] = f32(1000);
    for (int i = 0; i < 22; i++)
        order[i] = 21 - i;
    order[0] = 20;
    order[1] = 21;
    size_t caps[2] = {1 * MIB, 25 * MIB}, bytes[3] = {0};
    CHECK(cd_bucket_assign(params, order, 22, caps, 2, bucket_of) == 3);
    for (int i = 0; i < 22; i++)
        bytes[bucket_of[i]] += params[i].count * 4;
    CHECK(bytes[0] == 4012000 && bytes[1] == 28028000 && bytes[2] == 8008000);
    CHECK(bucket_of[18] == 0 && bucket_of[17] == 1 && bucket_of[4] == 1 && bucket_of[3] == 2);
}

static void test_one_bucket_without_cap(void)
{
    cd_reducer_param params[4] = {f32(1), f32(0), f32(1000000), f32(3)};
    int bucket_of[4];
    size_t cap = SIZE_MAX;
    CHECK(cd_bucket_assign(params, 0, 4, &cap, 1, bucket_of) == 1);
    for (int i = 0; i < 4; i++)
        CHECK(bucket_of[i] == 0);
}

static void test_dtypes_and_devices_do_not_mix(void)
{
    cd_reducer_param params[6] = {f32(8), {8, CD_FLOAT64, CD_CPU}, f32(8), {8, CD_FLOAT32, CD_CUDA},
                                  {8, CD_FLOAT64, CD_CPU}, f32(8)};
    int bucket_of[6];
    size_t caps[1] = {64};
    CHECK(cd_bucket_assign(params, 0, 6, caps, 1, bucket_of) == 5);
    const int expected[6] = {0, 1, 0, 2, 3, 4};
    for (int i = 0; i < 6; i++)
        CHECK(bucket_of[i] == expected[i]);
    int order[6] = {0, 1, 2, 3, 4, 5};
    CHECK(cd_bucket_assign(params, order, 6, caps, 1, bucket_of) == 5);
    /* In the order of closing: float64 at once, float32 after its second, float64 again, then the open ones. */
    const int closing[6] = {1, 0, 1, 3, 2, 4};
    for (int i = 0; i < 6; i++)
        CHECK(bucket_of[i] == closing[i]);
}

static void test_nothing(void)
{
    size_t cap = 1;
    CHECK(cd_bucket_assign(0, 0, 0, &cap, 1, 0) == 0);
}

static void test_every_assignment_is_dense_and_in_order(void)
{
    uint32_t seed = 7;
    for (int round = 0; round < 200; round++) {
        enum { N = 40 };
        cd_reducer_param params[N];
        int bucket_of[N], order[N];
        for (int i = 0; i < N; i++) {
            seed = seed * 1664525u + 1013904223u;
            params[i] = (cd_reducer_param){(seed >> 8) % 50, (seed >> 20) % 3 ? CD_FLOAT32 : CD_FLOAT64, CD_CPU};
            order[i] = N - 1 - i;
        }
        size_t caps[3] = {40, 200, 400};
        int buckets = cd_bucket_assign(params, order, N, caps, 3, bucket_of);
        for (int k = 0; k < buckets; k++) {
            int members = 0;
            cd_dtype dtype = CD_BYTES;
            for (int i = 0; i < N; i++) {
                if (bucket_of[i] != k)
                    continue;
                CHECK(members == 0 || params[i].dtype == dtype);
                dtype = params[i].dtype;
                members++;
            }
            CHECK(members > 0);
        }
        for (int i = 0; i < N; i++)
            CHECK(bucket_of[i] >= 0 && bucket_of[i] < buckets);
        for (int i = 0; i < N; i++)
            for (int j = i + 1; j < N; j++)
                CHECK(params[i].dtype != params[j].dtype || bucket_of[i] >= bucket_of[j]);
    }
}

static void test_memory_is_given_back_by_the_last(void)
{
    cd_bucket_memory *memory;
    CHECK_OK(cd_bucket_memory_create(0, 1000, 0, &memory));
    CHECK(((uintptr_t)memory->memory & 63) == 0 && memory->memory[999] == 0);
    cd_bucket_memory_retain(memory);
    cd_bucket_memory_release(memory);
    memset(memory->memory, 1, 1000);
    cd_bucket_memory_release(memory);
    cd_bucket_memory_release(0);
    char own[16];
    CHECK_OK(cd_bucket_memory_create(0, 16, own, &memory));
    CHECK(memory->memory == own);
    cd_bucket_memory_release(memory);
}

int main(void)
{
    test_sizes_known_from_torch();
    test_one_bucket_without_cap();
    test_dtypes_and_devices_do_not_mix();
    test_nothing();
    test_every_assignment_is_dense_and_in_order();
    test_memory_is_given_back_by_the_last();
    printf("ddp bucket: ok\n");
    return 0;
}
