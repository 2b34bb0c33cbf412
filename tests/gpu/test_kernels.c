/* The kernels on a real GPU against plain loops; made to be run under compute-sanitizer. */
#include "cuda/kernels.h"

#include "../c/check.h"

static cd_driver driver;
static cd_gpu gpu;
static cd_kernels kernels;

static void *device_alloc(size_t bytes)
{
    cd_cu_address address = 0;
    CHECK(driver.mem_alloc(&address, bytes) == CD_CU_SUCCESS);
    return (void *)(uintptr_t)address;
}

static void copy_in(void *to, const void *from, size_t bytes)
{
    CHECK(driver.copy_to_device((cd_cu_address)(uintptr_t)to, from, bytes) == CD_CU_SUCCESS);
}

static void copy_out(void *to, const void *from, size_t bytes)
{
    CHECK(driver.copy_to_host(to, (cd_cu_address)(uintptr_t)from, bytes) == CD_CU_SUCCESS);
}

static void check_strided(const cd_dims *dims, uint32_t item, size_t first, size_t bytes)
{
    unsigned char *host = malloc(bytes), *packed = malloc(bytes), *wanted = malloc(bytes), *back = malloc(bytes);
    size_t count = 1, index[CD_MAX_DIMS] = {0}, n = 0;
    for (size_t i = 0; i < bytes; i++)
        host[i] = (unsigned char)(i * 131 + 7);
    for (int d = 0; d < dims->ndim; d++)
        count *= dims->shape[d];
    unsigned char *data = device_alloc(bytes), *flat = device_alloc(count * item);
    memcpy(back, host, bytes);
    for (; n < count; n++) {
        ptrdiff_t at = (ptrdiff_t)first;
        for (int d = 0; d < dims->ndim; d++)
            at += (ptrdiff_t)index[d] * dims->strides[d];
        memcpy(wanted + n * item, host + at, item);
        for (uint32_t b = 0; b < item; b++)
            back[at + b] = (unsigned char)~host[at + b];
        for (int d = dims->ndim - 1; d >= 0 && ++index[d] == dims->shape[d]; d--)
            index[d] = 0;
    }
    copy_in(data, host, bytes);
    CHECK_OK(cd_kernels_pack(&kernels, data + first, dims, item, flat, 0));
    copy_out(packed, flat, count * item);
    CHECK(memcmp(packed, wanted, count * item) == 0);
    for (size_t i = 0; i < count * item; i++)
        packed[i] = (unsigned char)~packed[i];
    copy_in(flat, packed, count * item);
    CHECK_OK(cd_kernels_unpack(&kernels, data + first, dims, item, flat, 0));
    copy_out(host, data, bytes);
    CHECK(memcmp(host, back, bytes) == 0);
    driver.mem_free((cd_cu_address)(uintptr_t)data);
    driver.mem_free((cd_cu_address)(uintptr_t)flat);
    free(host), free(packed), free(wanted), free(back);
}

static void check_pieces(void)
{
    enum { PIECES = 200, BYTES = 3001 };
    static unsigned char host[PIECES * BYTES], got[PIECES * BYTES];
    static cd_kernel_piece pieces[PIECES];
    unsigned char *from = device_alloc(sizeof host), *to = device_alloc(sizeof host);
    for (size_t i = 0; i < sizeof host; i++)
        host[i] = (unsigned char)(i * 17 + i / 251);
    for (size_t p = 0; p < PIECES; p++)
        pieces[p] = (cd_kernel_piece){to + (PIECES - 1 - p) * BYTES, from + p * BYTES, BYTES};
    copy_in(from, host, sizeof host);
    CHECK_OK(cd_kernels_copy(&kernels, pieces, PIECES, 0));
    copy_out(got, to, sizeof got);
    for (size_t p = 0; p < PIECES; p++)
        CHECK(memcmp(got + (PIECES - 1 - p) * BYTES, host + p * BYTES, BYTES) == 0);
    driver.mem_free((cd_cu_address)(uintptr_t)from);
    driver.mem_free((cd_cu_address)(uintptr_t)to);
}

int main(void)
{
    bool pushed;
    CHECK_OK(cd_driver_open(&driver));
    CHECK_OK(cd_gpu_open(&gpu, &driver, 0, 0));
    CHECK_OK(cd_gpu_enter(&gpu, &pushed));
    cd_kernels_open(&kernels, &gpu);
    printf("kernels by %s on %s\n", kernels.origin, gpu.name);
    CHECK(kernels.module);
    const uint32_t items[] = {1, 2, 4, 8, 16, 3, 12};
    for (size_t i = 0; i < sizeof items / sizeof *items; i++) {
        ptrdiff_t s = (ptrdiff_t)items[i];
        cd_dims columns = {.ndim = 2, .shape = {37, 5}, .strides = {11 * s, 2 * s}};
        cd_dims rows = {.ndim = 2, .shape = {37, 8}, .strides = {16 * s, s}};
        cd_dims back = {.ndim = 1, .shape = {100}, .strides = {-2 * s}};
        cd_dims cube = {.ndim = 3, .shape = {5, 7, 3}, .strides = {s, 40 * s, 10 * s}};
        check_strided(&columns, items[i], (size_t)s, 1000 * items[i]);
        check_strided(&rows, items[i], 0, 1000 * items[i]);
        check_strided(&back, items[i], 300 * items[i], 1000 * items[i]);
        check_strided(&cube, items[i], (size_t)(2 * s), 1000 * items[i]);
    }
    check_pieces();
    cd_kernels_close(&kernels);
    cd_gpu_leave(&gpu, pushed);
    cd_gpu_close(&gpu);
    puts("test_kernels: ok");
    return 0;
}
