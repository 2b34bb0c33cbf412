/* Every copy is one between two cursors; packed memory is a cursor of one dimension. From where both stand,
 * the largest plane of equal rows is copied at once: rows × cols, with two strides on each side. */
#include "simd/strided.h"

#include <string.h>

typedef struct {
    char *at; /* the element with this index */
    cd_dims dims;
    size_t index[CD_MAX_DIMS];
} cursor;

typedef struct {
    char *to;
    const char *from;
    ptrdiff_t to_row, to_col, from_row, from_col;
    size_t rows, cols, item_bytes;
} plane;

static bool merge_dims(const cd_dims *in, uint32_t item_bytes, cd_dims *out)
{
    int n = 0;
    for (int d = 0; d < in->ndim; d++) {
        size_t extent = in->shape[d];
        ptrdiff_t stride = in->strides[d];
        if (extent == 0) {
            out->ndim = 1;
            out->shape[0] = 0;
            out->strides[0] = (ptrdiff_t)item_bytes;
            return true;
        }
        if (extent == 1)
            continue;
        if (n > 0 && out->strides[n - 1] == (ptrdiff_t)extent * stride) {
            out->shape[n - 1] *= extent;
            out->strides[n - 1] = stride;
        } else {
            out->shape[n] = extent;
            out->strides[n++] = stride;
        }
    }
    out->ndim = n;
    return n == 0 || (n == 1 && out->strides[0] == (ptrdiff_t)item_bytes);
}

bool cd_dims_normalise(cd_dims *dims, uint32_t item_bytes)
{
    /* In place is safe: dimension n is written when dimension d ≥ n has been read. */
    return merge_dims(dims, item_bytes, dims);
}

static void cursor_open_packed(cursor *c, const void *data, size_t count, size_t item_bytes)
{
    c->at = (char *)data;
    c->dims.ndim = 1;
    c->dims.shape[0] = count;
    c->dims.strides[0] = (ptrdiff_t)item_bytes;
    c->index[0] = 0;
}

static void cursor_open(cursor *c, const cd_span *span, size_t first)
{
    if (!span->dims || merge_dims(span->dims, span->item_bytes, &c->dims)) {
        cursor_open_packed(c, cd_span_at(span, first), span->count - first, span->item_bytes);
        return;
    }
    c->at = span->data;
    for (int d = c->dims.ndim - 1; d >= 0; d--) {
        c->index[d] = first % c->dims.shape[d];
        first /= c->dims.shape[d];
        c->at += (ptrdiff_t)c->index[d] * c->dims.strides[d];
    }
}

/* Elements to the end of the innermost dimension. */
static size_t cursor_run(const cursor *c)
{
    int inner = c->dims.ndim - 1;
    return c->dims.shape[inner] - c->index[inner];
}

/* How many rows of `cols` elements (at most cursor_run) follow one another at one distance, from here on. */
static size_t cursor_rows(const cursor *c, size_t cols, ptrdiff_t *stride_p)
{
    int inner = c->dims.ndim - 1;
    if (cols == c->dims.shape[inner] && inner > 0) {
        *stride_p = c->dims.strides[inner - 1];
        return c->dims.shape[inner - 1] - c->index[inner - 1];
    }
    *stride_p = (ptrdiff_t)cols * c->dims.strides[inner];
    return cursor_run(c) / cols;
}

static void cursor_advance(cursor *c, size_t count)
{
    for (int d = c->dims.ndim - 1; d >= 0 && count > 0; d--) {
        size_t extent = c->dims.shape[d];
        size_t next = c->index[d] + count;
        count = 0;
        if (next >= extent && d > 0) {
            count = next == extent ? 1 : next / extent;
            next -= count * extent;
        }
        c->at += ((ptrdiff_t)next - (ptrdiff_t)c->index[d]) * c->dims.strides[d];
        c->index[d] = next;
    }
}

/* The copy of one item is a constant memcpy, that is one load and one store, for the sizes that occur. */
#define FOR_ITEM_SIZE(bytes, LOOP) \
    switch (bytes) {               \
    case 1: LOOP(1) break;         \
    case 2: LOOP(2) break;         \
    case 4: LOOP(4) break;         \
    case 8: LOOP(8) break;         \
    case 16: LOOP(16) break;       \
    default: LOOP(bytes) break;    \
    }

/* `from` runs along the rows' direction (from_row is an item), `to` along the columns (to_col is an item).
 * Both sides are touched in runs of whole lines; what lies crosswise between them lies in a buffer, since the
 * lines of a power-of-two stride share one set of the L1 and would push each other out. */
enum { FROM_BYTES = 256, TO_BYTES = 64 };

static void copy_tile(const plane *p)
{
    char buffer[FROM_BYTES * TO_BYTES]; /* rows of TO_BYTES, of any item size up to 16 */
#define TURN(size)                                                         \
    for (size_t c = 0; c < p->cols; c++) {                                 \
        const char *from = p->from + (ptrdiff_t)c * p->from_col;           \
        char *to = buffer + c * size;                                      \
        for (size_t r = 0; r < p->rows; r++, from += size, to += TO_BYTES) \
            memcpy(to, from, size);                                        \
    }
    FOR_ITEM_SIZE(p->item_bytes, TURN)
    size_t row_bytes = p->cols * p->item_bytes;
    if (row_bytes == TO_BYTES) {
        for (size_t r = 0; r < p->rows; r++)
            memcpy(p->to + (ptrdiff_t)r * p->to_row, buffer + r * TO_BYTES, TO_BYTES);
        return;
    }
    for (size_t r = 0; r < p->rows; r++)
        memcpy(p->to + (ptrdiff_t)r * p->to_row, buffer + r * TO_BYTES, row_bytes);
}

static void copy_transposed(const plane *p)
{
    size_t rows = FROM_BYTES / p->item_bytes, cols = TO_BYTES / p->item_bytes;
    for (size_t c = 0; c < p->cols; c += cols) {
        for (size_t r = 0; r < p->rows; r += rows) {
            plane tile = *p;
            tile.to += (ptrdiff_t)r * p->to_row + (ptrdiff_t)c * p->to_col;
            tile.from += (ptrdiff_t)r * p->from_row + (ptrdiff_t)c * p->from_col;
            tile.rows = p->rows - r < rows ? p->rows - r : rows;
            tile.cols = p->cols - c < cols ? p->cols - c : cols;
            copy_tile(&tile);
        }
    }
}

static plane plane_turned(const plane *p)
{
    return (plane){
        .to = p->to,
        .from = p->from,
        .to_row = p->to_col,
        .to_col = p->to_row,
        .from_row = p->from_col,
        .from_col = p->from_row,
        .rows = p->cols,
        .cols = p->rows,
        .item_bytes = p->item_bytes,
    };
}

static void copy_items(const plane *p)
{
#define COLS_INSIDE(size)                                                          \
    for (size_t r = 0; r < p->rows; r++) {                                         \
        char *to = p->to + (ptrdiff_t)r * p->to_row;                               \
        const char *from = p->from + (ptrdiff_t)r * p->from_row;                   \
        for (size_t c = 0; c < p->cols; c++, to += p->to_col, from += p->from_col) \
            memcpy(to, from, size);                                                \
    }
    FOR_ITEM_SIZE(p->item_bytes, COLS_INSIDE)
}

static void copy_plane(const plane *p)
{
    ptrdiff_t item = (ptrdiff_t)p->item_bytes;
    /* Below 64 bytes the call costs more than the loop. */
    bool long_rows = p->cols * p->item_bytes >= 64 || p->cols == 1;
    if (p->to_col == item && p->from_col == item && long_rows) {
        for (size_t r = 0; r < p->rows; r++)
            memcpy(p->to + (ptrdiff_t)r * p->to_row, p->from + (ptrdiff_t)r * p->from_row,
                   p->cols * p->item_bytes);
        return;
    }
    bool is_worth_tiles = p->rows >= 4 && p->cols >= 4 && item <= TO_BYTES / 4;
    plane turned = plane_turned(p);
    if (is_worth_tiles && p->from_row == item && p->to_col == item)
        copy_transposed(p);
    else if (is_worth_tiles && p->from_col == item && p->to_row == item)
        copy_transposed(&turned);
    else
        copy_items(p);
}

static void copy_between(cursor *to, cursor *from, size_t count, size_t item_bytes)
{
    while (count > 0) {
        size_t cols = cursor_run(to), other = cursor_run(from);
        if (other < cols)
            cols = other;
        if (count < cols)
            cols = count;
        plane p = {.to = to->at, .from = from->at, .cols = cols, .item_bytes = item_bytes};
        p.to_col = to->dims.strides[to->dims.ndim - 1];
        p.from_col = from->dims.strides[from->dims.ndim - 1];
        p.rows = cursor_rows(to, cols, &p.to_row);
        size_t rows = cursor_rows(from, cols, &p.from_row);
        if (rows < p.rows)
            p.rows = rows;
        if (count / cols < p.rows)
            p.rows = count / cols;
        copy_plane(&p);
        cursor_advance(to, p.rows * cols);
        cursor_advance(from, p.rows * cols);
        count -= p.rows * cols;
    }
}

void cd_span_read(const cd_span *span, size_t first, size_t count, void *out)
{
    if (count == 0 || span->item_bytes == 0)
        return;
    if (!span->dims) {
        memcpy(out, cd_span_at(span, first), count * span->item_bytes);
        return;
    }
    cursor to, from;
    cursor_open_packed(&to, out, count, span->item_bytes);
    cursor_open(&from, span, first);
    copy_between(&to, &from, count, span->item_bytes);
}

void cd_span_write(const cd_span *span, size_t first, size_t count, const void *in)
{
    if (count == 0 || span->item_bytes == 0)
        return;
    if (!span->dims) {
        memcpy(cd_span_at(span, first), in, count * span->item_bytes);
        return;
    }
    cursor to, from;
    cursor_open(&to, span, first);
    cursor_open_packed(&from, in, count, span->item_bytes);
    copy_between(&to, &from, count, span->item_bytes);
}

void cd_span_copy(const cd_span *to, const cd_span *from)
{
    if (to->count == 0 || to->item_bytes == 0)
        return;
    if (!to->dims && !from->dims) {
        memcpy(to->data, from->data, to->count * to->item_bytes);
        return;
    }
    cursor a, b;
    cursor_open(&a, to, 0);
    cursor_open(&b, from, 0);
    copy_between(&a, &b, to->count, to->item_bytes);
}
