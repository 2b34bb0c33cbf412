/* The run-time compiler of CUDA, opened at run time. */
#ifndef CD_CUDA_NVRTC_H
#define CD_CUDA_NVRTC_H

#include "base/status.h"

/* Compiles `source` for compute capability major.minor; *out is a binary for cuModuleLoadData, freed by the caller.
 * CD_UNSUPPORTED when NVRTC is not found or does not compile it. Takes some 0.3 s. */
cd_status cd_nvrtc_compile(const char *source, int major, int minor, char **out);

#endif
