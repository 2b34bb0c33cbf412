#include "cuda/driver.h"

#include <string.h>

static cd_status find_functions(cd_driver *driver)
{
    static const struct {
        const char *symbol;
        size_t offset;
    } rows[] = {
#define ROW(field, symbol, parameters) {#symbol, offsetof(cd_driver, field)},
        CD_DRIVER_FUNCTIONS(ROW)
#undef ROW
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        void *address = cd_library_find(&driver->library, rows[i].symbol);
        if (!address)
            return cd_fail(CD_UNSUPPORTED, "the CUDA driver (%s) has no %s: CUDA 11.4 or later is needed (CDIST_CUDA_LIB can "
                                           "name another)", cd_library_path(&driver->library), rows[i].symbol);
        memcpy((char *)driver + rows[i].offset, &address, sizeof address);
    }
    return CD_OK;
}

static const char *words_of(const cd_driver *driver, cd_cu_result result)
{
    const char *text = 0;
    return driver->get_error_string(result, &text) == CD_CU_SUCCESS && text ? text : "unknown error";
}

cd_status cd_driver_open(cd_driver *driver)
{
    static const char *const names[] = {"libcuda.so.1"};
    static const cd_library_wish wish = {"the CUDA driver", "CDIST_CUDA_LIB", names, 1, 0};
    CD_TRY(cd_library_open(&driver->library, &wish));
    cd_status status = find_functions(driver);
    if (status == CD_OK) {
        cd_cu_result result = driver->init(0);
        if (result == CD_CU_NO_DEVICE)
            status = cd_fail(CD_UNSUPPORTED, "the CUDA driver sees no GPU (CUDA_VISIBLE_DEVICES hides them, or there is none)");
        else if (result != CD_CU_SUCCESS)
            status = cd_fail(CD_UNSUPPORTED, "the CUDA driver (%s) does not start: cuInit: %s (CUDA error %d)",
                             cd_library_path(&driver->library), words_of(driver, result), result);
    }
    if (status != CD_OK)
        cd_driver_close(driver);
    return status;
}

void cd_driver_close(cd_driver *driver)
{
    cd_library_close(&driver->library);
}

cd_status cd_driver_check(const cd_driver *driver, cd_cu_result result, const char *what)
{
    if (cd_likely(result == CD_CU_SUCCESS))
        return CD_OK;
    return cd_fail(result == CD_CU_OUT_OF_MEMORY ? CD_NO_MEMORY : CD_GPU, "%s: %s (CUDA error %d)", what,
                   words_of(driver, result), result);
}

static cd_status choose(cd_gpu *gpu, int index, int fallback)
{
    const cd_driver *d = gpu->driver;
    int count = 0;
    CD_TRY(cd_driver_check(d, d->device_count(&count), "cuDeviceGetCount"));
    if (count == 0)
        return cd_fail(CD_UNSUPPORTED, "this process sees no GPU");
    cd_cu_context current = 0;
    if (index < 0 && d->ctx_get_current(&current) == CD_CU_SUCCESS && current)
        CD_TRY(cd_driver_check(d, d->ctx_get_device(&index), "cuCtxGetDevice"));
    if (index < 0)
        index = fallback % count;
    if (index >= count)
        return cd_fail(CD_BAD_ARGUMENT, "there is no GPU %d: this process sees %d", index, count);
    gpu->index = index;
    return cd_driver_check(d, d->device_get(&gpu->device, index), "cuDeviceGet");
}

cd_status cd_gpu_open(cd_gpu *gpu, const cd_driver *driver, int index, int fallback)
{
    const cd_driver *d = driver;
    *gpu = (cd_gpu){.driver = driver};
    CD_TRY(choose(gpu, index, fallback));
    int pools = 0;
    CD_TRY(cd_driver_check(d, d->device_uuid(&gpu->uuid, gpu->device), "cuDeviceGetUuid"));
    CD_TRY(cd_driver_check(d, d->device_pci(gpu->pci, sizeof gpu->pci, gpu->device), "cuDeviceGetPCIBusId"));
    CD_TRY(cd_driver_check(d, d->device_name(gpu->name, sizeof gpu->name, gpu->device), "cuDeviceGetName"));
    d->device_attribute(&gpu->major, CD_CU_DEVICE_MAJOR, gpu->device);
    d->device_attribute(&gpu->minor, CD_CU_DEVICE_MINOR, gpu->device);
    d->device_attribute(&gpu->multiprocessors, CD_CU_DEVICE_MULTIPROCESSORS, gpu->device);
    d->device_attribute(&pools, CD_CU_DEVICE_MEMORY_POOLS, gpu->device);
    gpu->pools = pools != 0;
    return cd_driver_check(d, d->primary_retain(&gpu->context, gpu->device), "cuDevicePrimaryCtxRetain");
}

void cd_gpu_close(cd_gpu *gpu)
{
    if (gpu->context)
        gpu->driver->primary_release(gpu->device);
    gpu->context = 0;
}
