#include "cuda/kernels.h"

#include "base/log.h"
#include "cuda/nvrtc.h"

#include <stdio.h>
#include <stdlib.h>

_Static_assert(sizeof(cd_kernel_list) < 4096, "a launch carries at most 4 KiB of arguments");

enum { THREADS = 256, BLOCKS_PER_SM = 8 };

static bool find_functions(cd_kernels *k)
{
    const cd_driver *d = k->gpu->driver;
    char name[64];
    bool all = d->module_function(&k->copy_pieces, k->module, "cd_copy_pieces") == CD_CU_SUCCESS;
    for (int w = 0; w < CD_KERNEL_WIDTHS; w++) {
        snprintf(name, sizeof name, "cd_pack_%d", 1 << w);
        all &= d->module_function(&k->pack[w], k->module, name) == CD_CU_SUCCESS;
        snprintf(name, sizeof name, "cd_unpack_%d", 1 << w);
        all &= d->module_function(&k->unpack[w], k->module, name) == CD_CU_SUCCESS;
    }
    return all;
}

static bool load(cd_kernels *k, const void *image, const char *origin)
{
    const cd_driver *d = k->gpu->driver;
    if (d->module_load(&k->module, image) != CD_CU_SUCCESS) {
        k->module = 0;
        return false;
    }
    if (!find_functions(k)) {
        cd_kernels_close(k);
        return false;
    }
    k->origin = origin;
    return true;
}

void cd_kernels_open(cd_kernels *kernels, const cd_gpu *gpu)
{
    *kernels = (cd_kernels){.gpu = gpu, .origin = "driver copies"};
    if (cd_kernels_image && cd_kernels_image[0] && load(kernels, cd_kernels_image, "nvcc"))
        return;
    char *binary = 0;
    if (!cd_kernels_source || cd_nvrtc_compile(cd_kernels_source, gpu->major, gpu->minor, &binary) != CD_OK) {
        cd_log_about("gpu", "no kernels, strided arrays are copied by the driver: %s",
                     cd_kernels_source ? cd_last_error()->text : "the build has none");
        return;
    }
    load(kernels, binary, "nvrtc");
    free(binary);
}

void cd_kernels_close(cd_kernels *kernels)
{
    if (kernels->module)
        kernels->gpu->driver->module_unload(kernels->module);
    kernels->module = 0;
    kernels->origin = "driver copies";
}

/* Blocks for `units` of work, enough to fill the GPU and no more. */
static unsigned blocks_for(const cd_kernels *k, uint64_t units)
{
    uint64_t wanted = (units + THREADS - 1) / THREADS, most = (uint64_t)k->gpu->multiprocessors * BLOCKS_PER_SM;
    if (wanted > most)
        wanted = most;
    return wanted ? (unsigned)wanted : 1;
}

/* The widest unit that rows, strides, the base and the packed side all allow; 2^(result) bytes. */
static int widest_unit(const cd_dims *dims, uint32_t item_bytes, const void *data, const void *packed)
{
    int last = dims->ndim - 1;
    bool rows = last >= 0 && dims->strides[last] == (ptrdiff_t)item_bytes;
    uint64_t bits = (uint64_t)(uintptr_t)data | (uint64_t)(uintptr_t)packed | 16;
    bits |= rows ? dims->shape[last] * item_bytes : item_bytes;
    for (int d = 0; d < dims->ndim - (rows ? 1 : 0); d++)
        bits |= (uint64_t)dims->strides[d];
    return __builtin_ctzll(bits);
}

/* Re-states the array in units of 2^width bytes: a row, or an element, becomes the last dimension. */
static cd_status to_units(const cd_dims *dims, uint32_t item_bytes, int width, cd_kernel_dims *out)
{
    uint64_t unit = UINT64_C(1) << width;
    int last = dims->ndim - 1, n = 0;
    bool rows = last >= 0 && dims->strides[last] == (ptrdiff_t)item_bytes;
    uint64_t row_bytes = rows ? dims->shape[last] * item_bytes : item_bytes;
    int outer = rows ? last : dims->ndim;
    if (outer + (row_bytes > unit ? 1 : 0) > CD_KERNEL_DIMS)
        return cd_fail(CD_UNSUPPORTED, "an array with %d separate dimensions: at most %d can be packed, copy it first",
                       outer + 1, CD_KERNEL_DIMS);
    out->count = row_bytes / unit;
    for (; n < outer; n++) {
        out->shape[n] = dims->shape[n];
        out->strides[n] = dims->strides[n];
        out->count *= dims->shape[n];
    }
    if (row_bytes > unit) {
        out->shape[n] = row_bytes / unit;
        out->strides[n++] = (long long)unit;
    }
    out->ndim = n;
    return CD_OK;
}

static cd_status launch_strided(const cd_kernels *k, const cd_cu_function *functions, void *data, const cd_dims *dims,
                                uint32_t item_bytes, void *packed, cd_cu_stream stream)
{
    const cd_driver *d = k->gpu->driver;
    cd_kernel_dims units = {0};
    int width = widest_unit(dims, item_bytes, data, packed);
    CD_TRY(to_units(dims, item_bytes, width, &units));
    void *arguments[] = {&data, &packed, &units};
    return cd_driver_check(d,
                           d->launch(functions[width], blocks_for(k, units.count), 1, 1, THREADS, 1, 1, 0, stream,
                                     arguments, 0),
                           "launch of the pack kernel");
}

/* One run of `height` rows of `width` bytes; strided side first. */
static cd_cu_result copy_plane(const cd_driver *d, char *strided, ptrdiff_t pitch, char *packed, size_t width, size_t height,
                               bool pack, cd_cu_stream stream)
{
    /* The driver's pitch is unsigned, at least the width, and below 2 GiB on every GPU. */
    if (height > 1 && (pitch < (ptrdiff_t)width || pitch > INT32_MAX)) {
        for (size_t i = 0; i < height; i++) {
            char *row = strided + (ptrdiff_t)i * pitch, *flat = packed + i * width;
            cd_cu_result result = d->copy_async((cd_cu_address)(uintptr_t)(pack ? flat : row),
                                                (cd_cu_address)(uintptr_t)(pack ? row : flat), width, stream);
            if (result != CD_CU_SUCCESS)
                return result;
        }
        return CD_CU_SUCCESS;
    }
    size_t strided_pitch = height > 1 ? (size_t)pitch : width;
    cd_cu_copy_2d copy = {
        .from_type = CD_CU_MEMORY_DEVICE,
        .from_device = (cd_cu_address)(uintptr_t)(pack ? strided : packed),
        .from_pitch = pack ? strided_pitch : width,
        .to_type = CD_CU_MEMORY_DEVICE,
        .to_device = (cd_cu_address)(uintptr_t)(pack ? packed : strided),
        .to_pitch = pack ? width : strided_pitch,
        .width_bytes = width,
        .height = height,
    };
    return d->copy_2d_async(&copy, stream);
}

/* Without kernels: plane by plane through the driver. */
static cd_status copy_by_driver(const cd_kernels *k, char *data, const cd_dims *dims, uint32_t item_bytes, char *packed,
                                bool pack, cd_cu_stream stream)
{
    const cd_driver *d = k->gpu->driver;
    int last = dims->ndim - 1;
    bool rows = last >= 0 && dims->strides[last] == (ptrdiff_t)item_bytes;
    size_t width = rows ? dims->shape[last] * item_bytes : item_bytes;
    int plane = rows ? last - 1 : last;
    size_t height = plane >= 0 ? dims->shape[plane] : 1, index[CD_MAX_DIMS] = {0};
    ptrdiff_t pitch = plane >= 0 ? dims->strides[plane] : 0;
    for (;;) {
        char *at = data;
        for (int i = 0; i < plane; i++)
            at += (ptrdiff_t)index[i] * dims->strides[i];
        CD_TRY(cd_driver_check(d, copy_plane(d, at, pitch, packed, width, height, pack, stream), "cuMemcpy2DAsync"));
        packed += width * height;
        int i = plane - 1;
        while (i >= 0 && ++index[i] == dims->shape[i])
            index[i--] = 0;
        if (i < 0)
            return CD_OK;
    }
}

cd_status cd_kernels_pack(const cd_kernels *kernels, const void *data, const cd_dims *dims, uint32_t item_bytes,
                          void *packed, cd_cu_stream stream)
{
    if (!kernels->module)
        return copy_by_driver(kernels, (char *)data, dims, item_bytes, packed, true, stream);
    return launch_strided(kernels, kernels->pack, (void *)data, dims, item_bytes, packed, stream);
}

cd_status cd_kernels_unpack(const cd_kernels *kernels, void *data, const cd_dims *dims, uint32_t item_bytes,
                            const void *packed, cd_cu_stream stream)
{
    if (!kernels->module)
        return copy_by_driver(kernels, data, dims, item_bytes, (char *)packed, false, stream);
    return launch_strided(kernels, kernels->unpack, data, dims, item_bytes, (void *)packed, stream);
}

/* One launch for each table of pieces. */
static cd_status copy_by_kernel(const cd_kernels *k, const cd_kernel_piece *pieces, size_t count, cd_cu_stream stream)
{
    const cd_driver *d = k->gpu->driver;
    cd_kernel_list list = {0};
    for (size_t done = 0; done < count; done += (size_t)list.count) {
        uint64_t largest = 0;
        list.count = (int)(count - done < CD_KERNEL_PIECES ? count - done : CD_KERNEL_PIECES);
        for (int i = 0; i < list.count; i++) {
            list.pieces[i] = pieces[done + (size_t)i];
            if (list.pieces[i].bytes > largest)
                largest = list.pieces[i].bytes;
        }
        void *arguments[] = {&list};
        CD_TRY(cd_driver_check(d,
                               d->launch(k->copy_pieces, blocks_for(k, largest / 16), (unsigned)list.count, 1, THREADS, 1, 1,
                                         0, stream, arguments, 0),
                               "launch of the pieces kernel"));
    }
    return CD_OK;
}

cd_status cd_kernels_copy(const cd_kernels *kernels, const cd_kernel_piece *pieces, size_t count, cd_cu_stream stream)
{
    const cd_driver *d = kernels->gpu->driver;
    /* One piece is what the driver's own copy does best. */
    if (kernels->module && count > 1)
        return copy_by_kernel(kernels, pieces, count, stream);
    for (size_t i = 0; i < count; i++) {
        if (pieces[i].bytes == 0)
            continue;
        CD_TRY(cd_driver_check(d,
                               d->copy_async((cd_cu_address)(uintptr_t)pieces[i].to,
                                             (cd_cu_address)(uintptr_t)pieces[i].from, pieces[i].bytes, stream),
                               "cuMemcpyAsync"));
    }
    return CD_OK;
}
