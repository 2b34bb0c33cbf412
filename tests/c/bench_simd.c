/* GB/s of each kernel (bytes of all inputs and of the output), beside memcpy (bytes read and written).
 *   bench_simd [float32|…] [SUM|…]      CDIST_SIMD=… for another variant; default: float32 in all sizes, then
 * all at 256 KiB */
#include "base/clock.h"
#include "simd/reduce.h"
#include "simd/strided.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_INPUTS = 8 };

static unsigned char *arrays[MAX_INPUTS + 1];

/* Best of several runs: the machine is shared. */
static double measure(cd_reduce_func func, int inputs, size_t bytes, size_t item)
{
    uint64_t best = UINT64_MAX;
    const void *in[MAX_INPUTS];
    for (int k = 0; k < inputs; k++)
        in[k] = arrays[k + 1];
    int repeats = (int)((8u << 20) / bytes) + 1;
    for (int round = 0; round < 5; round++) {
        uint64_t start = cd_now_ns();
        for (int i = 0; i < repeats; i++) {
            if (func)
                func(arrays[0], in, inputs, bytes / item, 0.5);
            else
                memcpy(arrays[0], arrays[1], bytes);
            __asm__ __volatile__("" ::: "memory");
        }
        uint64_t took = (cd_now_ns() - start) / (uint64_t)repeats;
        best = took < best ? took : best;
    }
    return (double)bytes * (inputs + 1) / (double)(best ? best : 1);
}

static void print_sizes(cd_redop redop, cd_dtype dtype)
{
    static const size_t sizes[] = {256, 4096, 16 << 10, 128 << 10, 256 << 10, 1 << 20, 4 << 20, 64 << 20};
    cd_reduce_func func = cd_reduce_find(redop, dtype);
    printf("%s of %s (%s)\n%10s %8s %8s %8s %8s %8s  GB/s\n", cd_redop_name(redop), cd_dtype_name(dtype),
           cd_simd_name(), "bytes", "memcpy", "2 in", "3 in", "4 in", "8 in");
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        printf("%10zu %8.1f", sizes[s], measure(NULL, 1, sizes[s], 1));
        for (int inputs = 2; inputs <= 8; inputs = inputs < 4 ? inputs + 1 : inputs * 2)
            printf(" %8.1f", measure(func, inputs, sizes[s], cd_dtype_bytes(dtype)));
        printf("\n");
    }
}

static void print_all(size_t bytes)
{
    printf("\n2 and 4 inputs of %zu KiB, GB/s\n%14s", bytes >> 10, "");
    for (int redop = 0; redop < CD_REDOPS; redop++)
        printf(" %11s", cd_redop_name((cd_redop)redop));
    for (int dtype = CD_BOOL; dtype < CD_DTYPES; dtype++) {
        printf("\n%14s", cd_dtype_name((cd_dtype)dtype));
        for (int redop = 0; redop < CD_REDOPS; redop++) {
            cd_reduce_func func = cd_reduce_find((cd_redop)redop, (cd_dtype)dtype);
            size_t item = cd_dtype_bytes((cd_dtype)dtype);
            if (func)
                printf(" %5.1f %5.1f", measure(func, 2, bytes, item), measure(func, 4, bytes, item));
            else
                printf(" %11s", "-");
        }
    }
    printf("\n");
}

/* The transpose of an n × n matrix into packed memory. */
static void print_transposed(void)
{
    printf("\ntransposed n × n → packed, GB/s read and written\n%8s %8s %8s\n", "item", "n=256", "n=2048");
    for (uint32_t item = 1; item <= 16; item *= 2) {
        printf("%8u", item);
        for (size_t n = 256; n <= 2048; n *= 8) {
            cd_dims dims = {.ndim = 2, .shape = {n, n}, .strides = {(ptrdiff_t)item, (ptrdiff_t)(n * item)}};
            cd_span span = {.data = arrays[1], .count = n * n, .dims = &dims, .item_bytes = item};
            uint64_t best = UINT64_MAX;
            for (int round = 0; round < 5; round++) {
                uint64_t start = cd_now_ns();
                cd_span_read(&span, 0, n * n, arrays[0]);
                uint64_t took = cd_now_ns() - start;
                best = took < best ? took : best;
            }
            printf(" %8.1f", 2.0 * (double)(n * n * item) / (double)best);
        }
        printf("\n");
    }
}

int main(int argc, char **argv)
{
    cd_dtype dtype = CD_FLOAT32;
    cd_redop redop = CD_SUM;
    for (int d = 0; d < CD_DTYPES && argc > 1; d++)
        if (strcmp(argv[1], cd_dtype_name((cd_dtype)d)) == 0)
            dtype = (cd_dtype)d;
    for (int r = 0; r < CD_REDOPS && argc > 2; r++)
        if (strcmp(argv[2], cd_redop_name((cd_redop)r)) == 0)
            redop = (cd_redop)r;
    if (!cd_redop_supports(redop, dtype)) {
        fprintf(stderr, "no such kernel\n");
        return 1;
    }
    for (int k = 0; k <= MAX_INPUTS; k++) {
        arrays[k] = aligned_alloc(4096, 64 << 20);
        if (!arrays[k])
            return 1;
        memset(arrays[k], 0x3f,
               64 << 20); /* near 1 in every type but long double, for which it is slow rubbish */
    }
    if (argc > 1 && strcmp(argv[1], "transposed") == 0) {
        print_transposed();
        return 0;
    }
    print_sizes(redop, dtype);
    if (argc == 1) {
        print_all(256 << 10);
        print_transposed();
    }
    for (int k = 0; k <= MAX_INPUTS; k++)
        free(arrays[k]);
    return 0;
}
