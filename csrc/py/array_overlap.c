/* Do two arrays share memory? Views of one array, such as its columns, can lie between each other and share nothing. */
#include "py/array.h"

#include <stdlib.h>

/* A distance between an element of one array and one of the other is a sum of at most `most` steps of each kind. */
typedef struct {
    ptrdiff_t bytes;
    ptrdiff_t most;
    ptrdiff_t rest; /* the longest sum of all shorter steps */
} step;

#define MOST_STEPS (2 * CD_MAX_DIMS)
/* Sums that are looked at before the answer is "perhaps". Views of arrays need a handful. */
#define MOST_TRIES 4096

static void find_ends(const cd_py_array *array, uintptr_t *first_p, uintptr_t *last_p)
{
    uintptr_t first = (uintptr_t)array->span.data, last = first;
    if (!array->span.dims)
        last += (array->span.count - 1) * array->span.item_bytes;
    for (int i = 0; array->span.dims && i < array->dims.ndim; i++) {
        ptrdiff_t reach = (ptrdiff_t)(array->dims.shape[i] - 1) * array->dims.strides[i];
        if (reach < 0)
            first -= (uintptr_t)-reach;
        else
            last += (uintptr_t)reach;
    }
    *first_p = first;
    *last_p = last;
}

static int add_step(step *steps, int count, ptrdiff_t bytes, size_t extent)
{
    if (extent < 2 || bytes == 0)
        return count;
    steps[count] = (step){.bytes = bytes < 0 ? -bytes : bytes, .most = (ptrdiff_t)extent - 1};
    return count + 1;
}

static int add_steps(step *steps, int count, const cd_py_array *array)
{
    if (!array->span.dims)
        return add_step(steps, count, (ptrdiff_t)array->span.item_bytes, array->span.count);
    for (int i = 0; i < array->dims.ndim; i++)
        count = add_step(steps, count, array->dims.strides[i], array->dims.shape[i]);
    return count;
}

static int longer_first(const void *a, const void *b)
{
    ptrdiff_t left = ((const step *)a)->bytes, right = ((const step *)b)->bytes;
    return (left < right) - (left > right);
}

/* Whether some sum lies in low … high. */
static bool reaches(const step *steps, int count, ptrdiff_t low, ptrdiff_t high, int *tries_p)
{
    if (high < 0)
        return false;
    if (count == 0)
        return low <= 0;
    if (--*tries_p < 0)
        return true;
    ptrdiff_t missing = low - steps->rest;
    ptrdiff_t from = missing > 0 ? (missing + steps->bytes - 1) / steps->bytes : 0;
    ptrdiff_t to = high / steps->bytes < steps->most ? high / steps->bytes : steps->most;
    for (ptrdiff_t k = to; k >= from; k--)
        if (reaches(steps + 1, count - 1, low - k * steps->bytes, high - k * steps->bytes, tries_p))
            return true;
    return false;
}

bool cd_py_array_overlaps(const cd_py_array *a, const cd_py_array *b)
{
    if (a->span.count == 0 || b->span.count == 0 || a->device != b->device)
        return false;
    uintptr_t a_first, a_last, b_first, b_last;
    find_ends(a, &a_first, &a_last);
    find_ends(b, &b_first, &b_last);
    if (a_first >= b_last + b->span.item_bytes || b_first >= a_last + a->span.item_bytes)
        return false;
    if (!a->span.dims && !b->span.dims)
        return true;
    step steps[MOST_STEPS];
    int count = add_steps(steps, add_steps(steps, 0, a), b);
    qsort(steps, (size_t)count, sizeof *steps, longer_first);
    ptrdiff_t sum = 0;
    for (int i = count - 1; i >= 0; i--) {
        steps[i].rest = sum;
        sum += steps[i].most * steps[i].bytes;
    }
    /* Counted from the first element of a upwards and from the last one of b downwards, all steps go one way. */
    ptrdiff_t apart = (ptrdiff_t)(b_last - a_first);
    int tries = MOST_TRIES;
    return reaches(steps, count, apart - (ptrdiff_t)a->span.item_bytes + 1, apart + (ptrdiff_t)b->span.item_bytes - 1,
                   &tries);
}
