#include "cuda/nvrtc.h"

#include "cuda/library.h"

#include <stdio.h>
#include <stdlib.h>

typedef struct {
    int (*create)(void **out, const char *source, const char *name, int headers, const char *const *texts,
                  const char *const *names);
    int (*compile)(void *program, int count, const char *const *options);
    int (*binary_bytes)(void *program, size_t *bytes_p);
    int (*binary)(void *program, char *out);
    int (*destroy)(void **program);
} nvrtc_functions;

static cd_status open_either(cd_library *library)
{
    static const char *const names[] = {"libnvrtc.so.13", "libnvrtc.so.12"};
    static const cd_library_wish of_13 = {"NVRTC", "CDIST_NVRTC_LIB", names, 2, "nvidia/cu13/lib"};
    static const cd_library_wish of_12 = {"NVRTC", "CDIST_NVRTC_LIB", names, 2, "nvidia/cuda_nvrtc/lib"};
    if (cd_library_open(library, &of_13) == CD_OK)
        return CD_OK;
    return cd_library_open(library, &of_12);
}

static bool find_all(const cd_library *library, nvrtc_functions *f)
{
    *(void **)&f->create = cd_library_find(library, "nvrtcCreateProgram");
    *(void **)&f->compile = cd_library_find(library, "nvrtcCompileProgram");
    *(void **)&f->binary_bytes = cd_library_find(library, "nvrtcGetCUBINSize");
    *(void **)&f->binary = cd_library_find(library, "nvrtcGetCUBIN");
    *(void **)&f->destroy = cd_library_find(library, "nvrtcDestroyProgram");
    return f->create && f->compile && f->binary_bytes && f->binary && f->destroy;
}

static char *build(const nvrtc_functions *f, const char *source, const char *target)
{
    const char *options[] = {target, "--std=c++17"};
    void *program = 0;
    char *binary = 0;
    size_t bytes = 0;
    if (f->create(&program, source, "kernels.cu", 0, 0, 0) != 0)
        return 0;
    if (f->compile(program, 2, options) == 0 && f->binary_bytes(program, &bytes) == 0 && (binary = malloc(bytes))) {
        if (f->binary(program, binary) != 0) {
            free(binary);
            binary = 0;
        }
    }
    f->destroy(&program);
    return binary;
}

cd_status cd_nvrtc_compile(const char *source, int major, int minor, char **out)
{
    cd_library library;
    nvrtc_functions functions;
    char target[48];
    CD_TRY(open_either(&library));
    snprintf(target, sizeof target, "--gpu-architecture=sm_%d%d", major, minor);
    char *binary = find_all(&library, &functions) ? build(&functions, source, target) : 0;
    cd_library_close(&library);
    if (!binary)
        return cd_fail(CD_UNSUPPORTED, "NVRTC does not compile our kernels for %s", target + 2);
    *out = binary;
    return CD_OK;
}
