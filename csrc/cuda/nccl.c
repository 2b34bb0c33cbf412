#include "cuda/nccl.h"

#include <string.h>

typedef struct {
    const char *symbol;
    size_t offset;
    bool optional;
} function_row;

static const function_row rows[] = {
#define ROW(field, symbol, parameters) {#symbol, offsetof(cd_nccl, field), false},
    CD_NCCL_FUNCTIONS(ROW) CD_NCCL_TEXTS(ROW)
#undef ROW
#define ROW(field, symbol, parameters) {#symbol, offsetof(cd_nccl, field), true},
        CD_NCCL_OPTIONAL(ROW)
#undef ROW
};

static cd_status find_functions(cd_nccl *nccl)
{
    const char *missing = 0;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        void *address = cd_library_find(&nccl->library, rows[i].symbol);
        if (!address && !rows[i].optional && !missing)
            missing = rows[i].symbol;
        memcpy((char *)nccl + rows[i].offset, &address, sizeof address);
    }
    const cd_library *library = &nccl->library;
    if (!nccl->get_version)
        return cd_fail(CD_UNSUPPORTED, "%s is not NCCL: it has no %s (CDIST_NCCL_LIB can name another)",
                       cd_library_path(library), missing);
    /* The version explains more than the name of a function that it lacks. */
    if (nccl->get_version(&nccl->version) != CD_NCCL_SUCCESS)
        return cd_fail(CD_UNSUPPORTED, "NCCL does not tell its version (%s)", cd_library_path(library));
    if (nccl->version < CD_NCCL_LEAST)
        return cd_fail(CD_UNSUPPORTED, "NCCL %d.%d (%s) is too old: 2.18 or later is needed (CDIST_NCCL_LIB can name "
                                       "another)",
                       nccl->version / (nccl->version < 10000 ? 1000 : 10000),
                       nccl->version < 10000 ? nccl->version / 100 % 10 : nccl->version / 100 % 100,
                       cd_library_path(library));
    if (missing)
        return cd_fail(CD_UNSUPPORTED, "NCCL (%s) has no %s (CDIST_NCCL_LIB can name another)",
                       cd_library_path(library), missing);
    return CD_OK;
}

cd_status cd_nccl_open(cd_nccl *nccl)
{
    static const char *const names[] = {"libnccl.so.2"};
    static const cd_library_wish wish = {"NCCL", "CDIST_NCCL_LIB", names, 1, "nvidia/nccl/lib"};
    CD_TRY(cd_library_open(&nccl->library, &wish));
    cd_status status = find_functions(nccl);
    if (status != CD_OK)
        cd_nccl_close(nccl);
    return status;
}

void cd_nccl_close(cd_nccl *nccl)
{
    cd_library_close(&nccl->library);
}

cd_nccl_config cd_nccl_config_make(const cd_nccl *nccl)
{
    return (cd_nccl_config){
        .size = sizeof(cd_nccl_config),
        .magic = CD_NCCL_MAGIC,
        .version = CD_NCCL_LEAST,
        .blocking = nccl->version >= CD_NCCL_GROUP_ABORT_SINCE,
        .cga_cluster = CD_NCCL_UNSET,
        .ctas_least = CD_NCCL_UNSET,
        .ctas_most = CD_NCCL_UNSET,
        .net_name = 0,
        .split_share = CD_NCCL_UNSET,
        .traffic_class = CD_NCCL_UNSET,
    };
}

cd_status cd_nccl_fail(const cd_nccl *nccl, cd_nccl_comm comm, cd_nccl_result result, const char *what)
{
    const char *detail = nccl->last_error(comm);
    return cd_fail(result == CD_NCCL_REMOTE_ERROR ? CD_PEER_LOST : CD_GPU, "%s: %s%s%s", what, nccl->error_text(result),
                   detail && *detail ? ": " : "", detail ? detail : "");
}
