#include "base/knob.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

static const cd_knob_row rows[] = {
    {"CDIST_LOG", "warn",
     "what is said on stderr: a level (error, warn, info, debug) and topics (plan, stall, store, net, ddp, "
     "gpu)"},
    {"CDIST_TRANSPORT", "auto", "auto: shared memory within a host, TCP between hosts; tcp: TCP everywhere"},
    {"CDIST_PLAN", "",
     "overrides the choice of algorithms: \"all_reduce:0-64K:shm_small;all_reduce:64K-:shm_stage\""},
    {"CDIST_SIMD", "auto", "instruction set of the kernels: auto, scalar, avx2, avx512, neon"},
    {"CDIST_SINGLE_COPY", "auto",
     "large messages within a host are read in the sender's memory (process_vm_readv): auto (where the kernel allows it "
     "and it is faster), always (where allowed), never"},
    {"CDIST_ARENA_BYTES", "auto",
     "shared arena per rank: auto (as much as the host has memory, at most 64G) or bytes (K, M, G); 0: none"},
    {"CDIST_REDUCER", "auto",
     "who reduces gradients in shared memory: inline: the threads that compute them; worker: a thread of the group; auto: inline "
     "unless each rank of the host has a second core"},
    {"CDIST_SOCKET_IFNAME", "",
     "interface for data connections: name, prefix or CIDR, by comma; default: the route to the master"},
    {"CDIST_PORT_RANGE", "", "ports for data connections (\"20000-20100\"); default: free ports"},
    {"GLOO_SOCKET_IFNAME", "", "as CDIST_SOCKET_IFNAME, which goes first"},
    {"CDIST_STORE_BIND", "",
     "address on which the store of rank 0 listens; default: those of MASTER_ADDR, where that means loopback "
     "on rank 0's host alone also the one of the route outward; never a wildcard unless given here"},
    {"CDIST_JOB_SECRET", "",
     "64 hex digits: connections must prove that they know it; made by cdistrun for each job"},
    {"CDIST_STALL_SECONDS", "60", "after how long a waiting operation is reported as stalled; 0: never"},
    {"CDIST_DUMP_DIR", "", "folder for the recorder's JSON files; default: the temporary folder"},
    {"CDIST_DEBUG", "OFF", "OFF, INFO or DETAIL: extra checks (TORCH_DISTRIBUTED_DEBUG is honoured too)"},
    {"CDIST_NCCL_LIB", "", "path of libnccl.so.2; default: the loaded one, wheels' folders, the system"},
    {"CDIST_CUDA_LIB", "", "path of libcuda.so.1; default: the system's"},
    {"CDIST_NVRTC_LIB", "",
     "path of libnvrtc (compiles our kernels where the build had no nvcc); default: as for NCCL"},
};

const cd_knob_row *cd_knob_rows(size_t *count_p)
{
    *count_p = sizeof rows / sizeof rows[0];
    return rows;
}

static const cd_knob_row *find(const char *name)
{
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        if (strcmp(rows[i].name, name) == 0)
            return &rows[i];
    return 0;
}

const char *cd_knob(const char *name)
{
    const char *value = getenv(name);
    if (value && *value)
        return value;
    const cd_knob_row *row = find(name);
    return row ? row->fallback : "";
}

cd_status cd_knob_number(const char *name, uint64_t least, uint64_t most, uint64_t *value_p)
{
    const char *text = cd_knob(name);
    char *end;
    unsigned long long number = strtoull(text, &end, 10);
    unsigned shift = 0;
    if (*end == 'K' || *end == 'k')
        shift = 10;
    else if (*end == 'M' || *end == 'm')
        shift = 20;
    else if (*end == 'G' || *end == 'g')
        shift = 30;
    if (shift)
        end++;
    bool fits = end != text && *end == 0 && *text != '-' && number <= (UINT64_MAX >> shift);
    uint64_t value = fits ? (uint64_t)number << shift : 0;
    if (!fits || value < least || value > most)
        return cd_fail(CD_BAD_ARGUMENT, "%s='%s' is not a number from %llu to %llu", name, text, (unsigned long long)least,
                       (unsigned long long)most);
    *value_p = value;
    return CD_OK;
}

bool cd_knob_flag(const char *name)
{
    const char *text = cd_knob(name);
    return strcmp(text, "1") == 0 || strcasecmp(text, "true") == 0 || strcasecmp(text, "yes") == 0 ||
           strcasecmp(text, "on") == 0;
}
