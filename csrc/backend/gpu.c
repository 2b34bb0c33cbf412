/* GPU operations: not part of this build yet; every use says so. */
#include "backend/backend.h"

cd_status cd_backend_open_gpu(const cd_backend_env *env, cd_backend **out)
{
    (void)env;
    (void)out;
    return cd_fail(CD_UNSUPPORTED, "GPU arrays: this build of cdist has no GPU backend; move the data to the host first");
}
