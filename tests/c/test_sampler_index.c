/* The shuffle against plain loops of the published algorithm, and the shards against a walk over the padded
 * stream. */
#include "sampler/index.h"

#include "check.h"

/* Included for its static functions: the shuffles of 214748364 samples and more are tested with small lengths
 * too. */
#include "../../csrc/sampler/index.c"

/* MT19937 word by word, as the reference states it. */
typedef struct {
    uint32_t state[624];
    int next;
} plain_twister;

static void plain_seed(plain_twister *t, uint32_t seed)
{
    t->state[0] = seed;
    for (uint32_t j = 1; j < 624; j++)
        t->state[j] = 1812433253u * (t->state[j - 1] ^ (t->state[j - 1] >> 30)) + j;
    t->next = 624;
}

static uint32_t plain_draw(plain_twister *t)
{
    if (t->next == 624) {
        for (int j = 0; j < 624; j++) {
            uint32_t y = (t->state[j] & 0x80000000u) | (t->state[(j + 1) % 624] & 0x7fffffffu);
            t->state[j] = t->state[(j + 397) % 624] ^ (y >> 1) ^ (y & 1u ? 0x9908b0dfu : 0u);
        }
        t->next = 0;
    }
    uint32_t y = t->state[t->next++];
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    return y ^ (y >> 18);
}

static void plain_forward(int64_t *a, uint64_t n, uint32_t seed)
{
    plain_twister t;
    plain_seed(&t, seed);
    for (uint64_t i = 0; i < n; i++)
        a[i] = (int64_t)i;
    for (uint64_t i = 0; i + 1 < n; i++) {
        uint64_t z = plain_draw(&t) % (n - i);
        int64_t value = a[i];
        a[i] = a[i + z];
        a[i + z] = value;
    }
}

static void plain_inside_out(int64_t *a, uint64_t n, uint32_t seed)
{
    plain_twister t;
    plain_seed(&t, seed);
    for (uint64_t i = 0; i < n; i++) {
        uint64_t high = plain_draw(&t);
        uint64_t z = (high << 32 | plain_draw(&t)) % (i + 1);
        a[i] = (int64_t)i;
        a[i] = a[z];
        a[z] = (int64_t)i;
    }
}

static int64_t *new_indices(uint64_t n)
{
    int64_t *a = malloc((n + 1) * sizeof *a);
    CHECK(a);
    return a;
}

static cd_index_spec whole(uint64_t length, uint64_t seed)
{
    return (cd_index_spec){.length = length, .seed = seed, .world = 1, .shuffle = true};
}

static void check_permutation(uint64_t n, uint64_t seed)
{
    int64_t *expected = new_indices(n), *got = new_indices(n);
    plain_forward(expected, n, (uint32_t)seed);
    cd_index_spec spec = whole(n, seed);
    CHECK(cd_index_count(&spec) == n);
    CHECK_OK(cd_index_fill(&spec, 0, got, n));
    CHECK(memcmp(expected, got, n * sizeof *got) == 0);
    free(expected);
    free(got);
}

static void test_permutations(void)
{
    for (uint64_t n = 0; n < 60; n++)
        for (uint64_t seed = 0; seed < 5; seed++)
            check_permutation(n, seed);
    /* Around the blocks of the twister. */
    for (uint64_t n = 622; n < 630; n++)
        check_permutation(n, n);
    for (uint64_t n = 1245; n < 1254; n++)
        check_permutation(n, UINT64_MAX - n);
    check_permutation(100003, 7);
    check_permutation(1000000, UINT64_C(4294967301));
}

/* First entries that torch 2.14 gives. */
static void test_vectors(void)
{
    static const struct {
        uint64_t n, seed;
        int64_t first[10];
    } vectors[] = {
        {10, 0, {4, 1, 7, 5, 3, 9, 0, 8, 6, 2}},
        {10, 42, {2, 6, 1, 8, 4, 5, 0, 9, 3, 7}},
        {1000, 0, {44, 37, 675, 775, 947, 209, 719, 500, 561, 264}},
        {50000, 4294967301, {3411, 1555, 16365, 40130, 23042, 44310, 27300, 23255, 45776, 47857}},
        {100003, 7, {31784, 94367, 92227, 75289, 72116, 19382, 52512, 558, 43026, 84144}},
        {1048576,
         123456789,
         {507576, 736886, 867914, 923771, 143866, 1015046, 812654, 447021, 708578, 854257}},
        {1281167, 90, {124108, 581490, 799652, 722866, 970714, 955168, 308018, 1225945, 1037988, 644457}},
    };
    for (size_t v = 0; v < sizeof vectors / sizeof *vectors; v++) {
        int64_t first[10];
        cd_index_spec spec = whole(vectors[v].n, vectors[v].seed);
        CHECK_OK(cd_index_fill(&spec, 0, first, 10));
        CHECK(memcmp(first, vectors[v].first, sizeof first) == 0);
    }
}

static void test_long_draws(void)
{
    static const uint64_t lengths[] = {1, 2, 3, AHEAD - 1, AHEAD, AHEAD + 1, 311, 312, 313, 5000};
    for (size_t l = 0; l < sizeof lengths / sizeof *lengths; l++) {
        uint64_t n = lengths[l];
        int64_t *expected = new_indices(n);
        uint32_t *narrow = malloc(n * sizeof *narrow);
        uint64_t *wide = malloc(n * sizeof *wide);
        plain_inside_out(expected, n, 3);
        shuffle_inside_out(narrow, false, n, 3);
        shuffle_inside_out(wide, true, n, 3);
        for (uint64_t i = 0; i < n; i++) {
            CHECK(narrow[i] == (uint64_t)expected[i]);
            CHECK(wide[i] == (uint64_t)expected[i]);
        }
        free(expected);
        free(narrow);
        free(wide);
    }
    CHECK(!is_wide(UINT64_C(1) << 32) && is_wide((UINT64_C(1) << 32) + 1));
}

/* This rank's entries, in one call and in small pieces, against a walk over the stream with its padding. */
static void check_shard(const cd_index_spec *spec, const int64_t *stream)
{
    uint64_t rest = spec->length > spec->first ? spec->length - spec->first : 0;
    uint64_t world = (uint64_t)spec->world, each = rest / world, limit = spec->length;
    if (spec->pad == CD_PAD_REPEAT)
        limit = spec->first + (each + (rest % world > 0)) * world;
    else if (spec->pad == CD_PAD_DROP)
        limit = spec->first + each * world;
    int64_t *expected = new_indices(limit), *got = new_indices(limit);
    uint64_t count = 0, padding = 0;
    for (uint64_t p = spec->first + (uint64_t)spec->rank; rest > 0 && p < limit; p += world) {
        expected[count++] = stream[p % spec->length];
        padding += p >= spec->length;
    }
    CHECK(cd_index_count(spec) == count);
    CHECK(cd_index_padding(spec) == padding);
    CHECK_OK(cd_index_fill(spec, 0, got, count));
    CHECK(memcmp(expected, got, count * sizeof *got) == 0);
    memset(got, 0xff, count * sizeof *got);
    for (uint64_t at = 0; at < count; at += 3)
        CHECK_OK(cd_index_fill(spec, at, got + at, count - at < 3 ? count - at : 3));
    CHECK(memcmp(expected, got, count * sizeof *got) == 0);
    free(expected);
    free(got);
}

static void test_shards(void)
{
    static const uint64_t lengths[] = {0, 1, 2, 3, 5, 8, 9, 21, 640, 1300};
    static const int64_t worlds[] = {1, 2, 3, 4, 7, 9, 30};
    static const uint64_t firsts[] = {0, 1, 4, 8, 20, 700};
    int64_t *stream = new_indices(1300);
    cd_index_spec spec = {.seed = 11};
    for (size_t l = 0; l < sizeof lengths / sizeof *lengths; l++)
        for (int shuffle = 0; shuffle < 2; shuffle++) {
            spec.length = lengths[l];
            spec.shuffle = shuffle;
            plain_forward(stream, spec.length, (uint32_t)spec.seed);
            for (uint64_t i = 0; !shuffle && i < spec.length; i++)
                stream[i] = (int64_t)i;
            for (size_t w = 0; w < sizeof worlds / sizeof *worlds; w++)
                for (size_t f = 0; f < sizeof firsts / sizeof *firsts; f++)
                    for (int pad = CD_PAD_REPEAT; pad <= CD_PAD_NONE; pad++)
                        for (int64_t rank = 0; rank < worlds[w]; rank++) {
                            spec.rank = rank;
                            spec.world = worlds[w];
                            spec.first = firsts[f];
                            spec.pad = (cd_pad)pad;
                            check_shard(&spec, stream);
                        }
        }
    free(stream);
}

static void test_bad_arguments(void)
{
    cd_index_spec spec = {.length = 10, .rank = 3, .world = 3};
    CHECK_FAILS(cd_index_check(&spec), CD_BAD_ARGUMENT);
    CHECK(strcmp(cd_last_error()->text, "Invalid rank 3, rank should be in the interval [0, 2]") == 0);
    spec.rank = -1;
    CHECK_FAILS(cd_index_check(&spec), CD_BAD_ARGUMENT);
    spec.rank = 0;
    CHECK_OK(cd_index_check(&spec));
    spec.world = 0;
    CHECK_FAILS(cd_index_check(&spec), CD_BAD_ARGUMENT);
    spec.world = 1;
    spec.length = LENGTH_LIMIT;
    CHECK_FAILS(cd_index_check(&spec), CD_BAD_ARGUMENT);
    /* Far more than any machine maps. */
    spec.length = LENGTH_LIMIT - 1;
    spec.shuffle = true;
    int64_t one;
    CHECK_FAILS(cd_index_fill(&spec, 0, &one, 1), CD_NO_MEMORY);
}

int main(void)
{
    test_vectors();
    test_permutations();
    test_long_draws();
    test_shards();
    test_bad_arguments();
    printf("test_sampler_index: ok\n");
    return 0;
}
