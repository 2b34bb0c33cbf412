/* Spans against a walk of the index, element by element. */
#include "check.h"

#include "simd/strided.h"

enum { MAX_DIMS = 5, MEMORY = 1 << 16 };

static uint64_t random_state = 88172645463325252u;

static size_t random_below(size_t limit)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (size_t)(random_state >> 11) % limit;
}

/* A view that starts somewhere in the memory at `base`: a permuted C order with steps, gaps and signs; zero
 * strides if `may_repeat`. */
static cd_span random_span(char *base, cd_dims *dims, uint32_t item, const size_t *shape, int ndim,
                           bool may_repeat)
{
    int order[MAX_DIMS];
    for (int d = 0; d < ndim; d++)
        order[d] = d;
    if (random_below(3)) {
        for (int d = ndim - 1; d > 0; d--) {
            int other = (int)random_below((size_t)d + 1), kept = order[d];
            order[d] = order[other];
            order[other] = kept;
        }
    }
    size_t count = 1, stride = item, low = 0, high = 0;
    *dims = (cd_dims){.ndim = ndim};
    bool plain = random_below(3) == 0;
    for (int i = ndim - 1; i >= 0; i--) {
        int d = order[i];
        dims->shape[d] = shape[d];
        count *= shape[d];
        size_t step = plain ? 1 : 1 + random_below(2);
        stride *= step;
        dims->strides[d] = (ptrdiff_t)stride;
        size_t reach = (shape[d] ? shape[d] - 1 : 0) * stride;
        stride = stride * shape[d] + (plain ? 0 : item * random_below(2));
        if (may_repeat && random_below(6) == 0)
            dims->strides[d] = 0;
        else if (random_below(4) == 0 && !plain) {
            dims->strides[d] = -dims->strides[d];
            low += reach;
        } else
            high += reach;
    }
    if (low + high + item >= MEMORY)
        return random_span(base, dims, item, shape, ndim, may_repeat);
    return (cd_span){.data = base + low, .count = count, .dims = dims, .item_bytes = item};
}

static char *address(const cd_span *span, size_t logical)
{
    char *at = span->data;
    for (int d = span->dims->ndim - 1; d >= 0; d--) {
        at += (ptrdiff_t)(logical % span->dims->shape[d]) * span->dims->strides[d];
        logical /= span->dims->shape[d];
    }
    return at;
}

static void random_fill(char *bytes, size_t count)
{
    size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        random_below(1);
        memcpy(bytes + i, &random_state, 8);
    }
    for (; i < count; i++)
        bytes[i] = (char)random_below(256);
}

static size_t random_shape(size_t *shape, int *ndim_p)
{
    static const size_t extents[] = {0, 1, 1, 2, 3, 4, 5, 7, 20};
    size_t count = 1;
    int ndim = (int)random_below(MAX_DIMS + 1);
    for (int d = 0; d < ndim; d++) {
        size_t extent = extents[random_below(9)];
        if (count * extent > 500 || (extent == 0 && random_below(3)))
            extent = 2;
        shape[d] = extent;
        count *= extent;
    }
    *ndim_p = ndim;
    return count;
}

static const uint32_t items[] = {1, 2, 3, 4, 8, 16, 24};

static char memory[MEMORY], other_memory[MEMORY], expected[MEMORY], packed[MEMORY];

static void test_read_and_write(void)
{
    for (int round = 0; round < 6000; round++) {
        size_t shape[MAX_DIMS];
        int ndim;
        size_t count = random_shape(shape, &ndim);
        uint32_t item = items[random_below(7)];
        if (count * item > 2000)
            item = 1;
        cd_dims dims;
        random_fill(memory, MEMORY);
        cd_span span = random_span(memory, &dims, item, shape, ndim, true);
        size_t first = count ? random_below(count) : 0;
        size_t taken = count ? random_below(count - first + 1) : 0;
        if (random_below(2))
            first = 0, taken = count;
        char *exact = malloc(taken * item + 1); /* of the exact size, for AddressSanitizer */
        exact[taken * item] = 77;
        cd_span_read(&span, first, taken, exact);
        CHECK(exact[taken * item] == 77);
        for (size_t i = 0; i < taken; i++)
            CHECK(memcmp(exact + i * item, address(&span, first + i), item) == 0);
        free(exact);

        span = random_span(memory, &dims, item, shape, ndim, false);
        random_fill(packed, taken * item + 1);
        memcpy(expected, memory, MEMORY);
        cd_span_write(&span, first, taken, packed);
        for (size_t i = 0; i < taken; i++) {
            char *at = address(&span, first + i);
            memcpy(expected + (at - memory), packed + i * item, item);
        }
        CHECK(memcmp(expected, memory, MEMORY) == 0); /* the gaps too */
    }
}

static void test_copy(void)
{
    for (int round = 0; round < 6000; round++) {
        size_t shape[MAX_DIMS], other_shape[MAX_DIMS];
        int ndim, other_ndim;
        size_t count = random_shape(shape, &ndim);
        uint32_t item = items[random_below(7)];
        if (count * item > 2000)
            item = 2;
        cd_dims dims, other_dims;
        random_fill(memory, MEMORY);
        random_fill(other_memory, MEMORY);
        other_ndim = ndim;
        memcpy(other_shape, shape, sizeof shape);
        if (random_below(2)) { /* the same number of elements in another shape */
            other_ndim = 1;
            other_shape[0] = count;
            if (count % 6 == 0 && count > 0) {
                other_ndim = 3;
                other_shape[0] = 2;
                other_shape[1] = count / 6;
                other_shape[2] = 3;
            }
        }
        cd_span from = random_span(other_memory, &other_dims, item, other_shape, other_ndim, true);
        cd_span to = random_span(memory, &dims, item, shape, ndim, false);
        memcpy(expected, memory, MEMORY);
        for (size_t i = 0; i < count; i++)
            memcpy(expected + (address(&to, i) - memory), address(&from, i), item);
        cd_span_copy(&to, &from);
        CHECK(memcmp(expected, memory, MEMORY) == 0);
    }
}

static void test_contiguous(void)
{
    int numbers[6] = {1, 2, 3, 4, 5, 6}, out[6] = {0};
    cd_span span = {.data = numbers, .count = 6, .item_bytes = sizeof(int)};
    cd_span_read(&span, 2, 3, out);
    CHECK(out[0] == 3 && out[1] == 4 && out[2] == 5 && out[3] == 0);
    cd_span_write(&span, 5, 1, out);
    CHECK(numbers[5] == 3 && numbers[4] == 5);
    CHECK(cd_span_at(&span, 4) == &numbers[4]);
    cd_span to = {.data = out, .count = 6, .item_bytes = sizeof(int)};
    cd_span_copy(&to, &span);
    CHECK(memcmp(out, numbers, sizeof out) == 0);
    cd_span nothing = {.data = NULL, .count = 0, .item_bytes = 4};
    cd_span_read(&nothing, 0, 0, NULL);
    cd_span_write(&nothing, 0, 0, NULL);
    cd_span_copy(&nothing, &nothing);
}

/* Big enough for whole tiles and ragged ones, in both directions. */
static void test_transposed(void)
{
    enum { ROWS = 133, COLS = 150 };
    for (size_t i = 0; i < sizeof items / sizeof *items; i++) {
        size_t item = items[i], bytes = ROWS * COLS * item;
        char *from = malloc(bytes), *to = malloc(bytes), *back = malloc(bytes);
        random_fill(from, bytes);
        cd_dims dims = {
            .ndim = 2, .shape = {COLS, ROWS}, .strides = {(ptrdiff_t)item, (ptrdiff_t)(COLS * item)}};
        cd_span span = {.data = from, .count = ROWS * COLS, .dims = &dims, .item_bytes = (uint32_t)item};
        cd_span_read(&span, 0, ROWS * COLS, to);
        for (size_t k = 0; k < ROWS * COLS; k++)
            CHECK(memcmp(to + k * item, address(&span, k), item) == 0);
        span.data = back;
        for (size_t first = 0; first < ROWS * COLS; first += 1717) {
            size_t taken = ROWS * COLS - first < 1717 ? ROWS * COLS - first : 1717;
            cd_span_write(&span, first, taken, to + first * item);
        }
        CHECK(memcmp(back, from, bytes) == 0);
        free(from);
        free(to);
        free(back);
    }
}

static void test_normalise(void)
{
    cd_dims packed_dims = {.ndim = 4, .shape = {2, 1, 3, 4}, .strides = {48, 999, 16, 4}};
    CHECK(cd_dims_normalise(&packed_dims, 4));
    cd_dims sliced = {.ndim = 3, .shape = {2, 3, 4}, .strides = {96, 32, 4}};
    CHECK(!cd_dims_normalise(&sliced, 4));
    CHECK(sliced.ndim == 2 && sliced.shape[0] == 6 && sliced.shape[1] == 4);
    CHECK(sliced.strides[0] == 32 && sliced.strides[1] == 4);
    cd_dims reversed = {.ndim = 2, .shape = {2, 3}, .strides = {-12, -4}};
    CHECK(!cd_dims_normalise(&reversed, 4));
    CHECK(reversed.ndim == 1 && reversed.shape[0] == 6 && reversed.strides[0] == -4);
    cd_dims repeated = {.ndim = 2, .shape = {2, 3}, .strides = {0, 0}};
    CHECK(!cd_dims_normalise(&repeated, 4));
    CHECK(repeated.ndim == 1 && repeated.shape[0] == 6 && repeated.strides[0] == 0);
    cd_dims empty = {.ndim = 3, .shape = {2, 0, 3}, .strides = {-7, 5, 900}};
    CHECK(cd_dims_normalise(&empty, 4));
    CHECK(empty.ndim == 1 && empty.shape[0] == 0);
    cd_dims scalar = {.ndim = 0};
    CHECK(cd_dims_normalise(&scalar, 4));
    cd_dims ones = {.ndim = 2, .shape = {1, 1}, .strides = {-3, 0}};
    CHECK(cd_dims_normalise(&ones, 4) && ones.ndim == 0);
}

int main(void)
{
    test_contiguous();
    test_normalise();
    test_transposed();
    test_read_and_write();
    test_copy();
    puts("test_simd_strided: ok");
    return 0;
}
