#include "base/knob.h"

#include "base/log.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define LOG_WORDS "error, warn, info, debug, plan, stall, store, net, ddp, gpu"

static const cd_knob_row rows[] = {
    {"CDIST_LOG", "warn", CD_KNOB_LIST, LOG_WORDS, 0,
     "what is said on stderr: a level (error, warn, info, debug) and topics (plan, stall, store, net, ddp, "
     "gpu)"},
    {"CDIST_TRANSPORT", "auto", CD_KNOB_WORD, "auto, tcp", 0,
     "auto: shared memory within a host, TCP between hosts; tcp: TCP everywhere"},
    {"CDIST_PLAN", "", CD_KNOB_TEXT, 0, 0,
     "overrides the choice of algorithms: \"all_reduce:0-64K:shm_small;all_reduce:64K-:shm_stage\""},
    {"CDIST_SIMD", "auto", CD_KNOB_WORD, "auto, scalar, avx2, avx512, neon", 0,
     "instruction set of the kernels: auto, scalar, avx2, avx512, neon"},
    {"CDIST_SINGLE_COPY", "auto", CD_KNOB_WORD, "auto, always, never", 0,
     "large messages and collectives within a host are read in the memory of the rank that gives them "
     "(process_vm_readv): auto (where the kernel allows it and it is faster), always (where allowed), never"},
    {"CDIST_ARENA_BYTES", "auto", CD_KNOB_NUMBER, "auto", UINT64_C(1) << 40,
     "shared arena per rank: auto (as much as the host has memory, at most 64G, all ranks together a quarter of what ulimit -v "
     "leaves) or bytes (K, M, G); 0: none; the first rank of a host says for all of it"},
    {"CDIST_REDUCER", "auto", CD_KNOB_WORD, "auto, inline, worker", 0,
     "who reduces gradients in shared memory: inline: the threads that compute them; worker: a thread of the "
     "group; auto: inline "
     "unless each rank of the host has a second core"},
    {"CDIST_SOCKET_IFNAME", "", CD_KNOB_TEXT, 0, 0,
     "interface for data connections: name, prefix or CIDR, by comma; default: the route to the master"},
    {"CDIST_PORT_RANGE", "", CD_KNOB_TEXT, 0, 0,
     "ports for data connections (\"20000-20100\"); default: free ports"},
    {"GLOO_SOCKET_IFNAME", "", CD_KNOB_TEXT, 0, 0, "as CDIST_SOCKET_IFNAME, which goes first"},
    {"CDIST_STORE_BIND", "", CD_KNOB_TEXT, 0, 0,
     "address on which the store of rank 0 listens; default: those of MASTER_ADDR, where that means loopback "
     "on rank 0's host alone also the one of the route outward; never a wildcard unless given here"},
    {"CDIST_JOB_SECRET", "", CD_KNOB_TEXT, 0, 0,
     "64 hex digits: connections must prove that they know it; made by cdistrun for each job"},
    {"CDIST_AGENT", "", CD_KNOB_TEXT, 0, 0,
     "port of the launcher's store and the worker's error file, set by cdistrun: a script that sets another "
     "MASTER_PORT has a store of its own"},
    {"CDIST_STALL_SECONDS", "60", CD_KNOB_NUMBER, 0, UINT32_MAX,
     "after how long a waiting operation is reported as stalled; 0: never"},
    {"CDIST_DUMP_DIR", "", CD_KNOB_TEXT, 0, 0,
     "folder for the recorder's JSON files; default: the temporary folder"},
    {"CDIST_DEBUG", "OFF", CD_KNOB_WORD, "OFF, INFO, DETAIL", 0,
     "OFF, INFO or DETAIL: extra checks (TORCH_DISTRIBUTED_DEBUG is honoured too)"},
    {"CDIST_NCCL_LIB", "", CD_KNOB_TEXT, 0, 0,
     "path of libnccl.so.2; default: the loaded one, wheels' folders, the system"},
    {"CDIST_CUDA_LIB", "", CD_KNOB_TEXT, 0, 0, "path of libcuda.so.1; default: the system's"},
    {"CDIST_NVRTC_LIB", "", CD_KNOB_TEXT, 0, 0,
     "path of libnvrtc (compiles our kernels where the build had no nvcc); default: as for NCCL"},
};
enum { ROWS = sizeof rows / sizeof rows[0] };

const cd_knob_row *cd_knob_rows(size_t *count_p)
{
    *count_p = ROWS;
    return rows;
}

static const cd_knob_row *find(const char *name)
{
    for (size_t i = 0; i < ROWS; i++)
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

/* Which word of the list it is, from 0; −1: none. */
static int index_in(const char *list, const char *word, size_t word_bytes)
{
    for (int index = 0; *list; index++) {
        size_t run = strcspn(list, ", ");
        if (run == word_bytes && strncasecmp(list, word, run) == 0)
            return index;
        list += run;
        list += strspn(list, ", ");
    }
    return -1;
}

bool cd_knob_list_has(const char *list, const char *word, size_t word_bytes)
{
    return index_in(list, word, word_bytes) >= 0;
}

bool cd_knob_is(const char *name, const char *word)
{
    return strcasecmp(cd_knob(name), word) == 0;
}

cd_status cd_knob_choice(const char *name, int *index_p)
{
    const char *words = find(name)->words, *text = cd_knob(name);
    int index = index_in(words, text, strlen(text));
    if (index < 0)
        return cd_fail(CD_BAD_ARGUMENT, "%s='%.100s' is none of %s", name, text, words);
    *index_p = index;
    return CD_OK;
}

cd_status cd_knob_number(const char *name, uint64_t *value_p)
{
    const cd_knob_row *row = find(name);
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
    if (!fits || value > row->most)
        return cd_fail(CD_BAD_ARGUMENT, "%s='%.100s' is not %s%sa whole number from 0 to %llu", name, text,
                       row->words ? row->words : "", row->words ? " or " : "", (unsigned long long)row->most);
    *value_p = value;
    return CD_OK;
}

static cd_status check_list(const cd_knob_row *row)
{
    const char *text = cd_knob(row->name);
    for (const char *word = text + strspn(text, ", "); *word; word += strspn(word, ", ")) {
        size_t run = strcspn(word, ", ");
        if (!cd_knob_list_has(row->words, word, run))
            return cd_fail(CD_BAD_ARGUMENT, "%s='%.100s': '%.*s' is none of %s", row->name, text,
                           (int)(run < 40 ? run : 40), word, row->words);
        word += run;
    }
    return CD_OK;
}

static cd_status check_row(const cd_knob_row *row)
{
    uint64_t number;
    int index;
    switch (row->kind) {
    case CD_KNOB_WORD: return cd_knob_choice(row->name, &index);
    case CD_KNOB_LIST: return check_list(row);
    case CD_KNOB_NUMBER:
        return row->words && cd_knob_is(row->name, row->words) ? CD_OK : cd_knob_number(row->name, &number);
    case CD_KNOB_TEXT: break;
    }
    return CD_OK;
}

cd_status cd_knob_check(void)
{
    for (size_t i = 0; i < ROWS; i++)
        CD_TRY(check_row(&rows[i]));
    return CD_OK;
}

/* What setup.py reads, and the marks of our tests. */
static bool is_of_build(const char *name, size_t bytes)
{
    return cd_knob_list_has("CDIST_WERROR, CDIST_SANITIZE, CDIST_COVERAGE, CDIST_NVCC", name, bytes) ||
           strncmp(name, "CDIST_TEST_", 11) == 0;
}

void cd_knob_report_unknown(void)
{
    extern char **environ;
    static _Atomic bool told;
    /* Relaxed: nothing else is handed over by it; who is first tells. */
    if (atomic_exchange_explicit(&told, true, memory_order_relaxed))
        return;
    char names[256] = "";
    size_t used = 0;
    for (char **entry = environ; entry && *entry; entry++) {
        size_t bytes = strcspn(*entry, "=");
        char name[64];
        if (strncmp(*entry, "CDIST_", 6) != 0 || bytes >= sizeof name || is_of_build(*entry, bytes))
            continue;
        memcpy(name, *entry, bytes);
        name[bytes] = 0;
        if (!find(name) && used + bytes + 3 < sizeof names)
            used += (size_t)snprintf(names + used, sizeof names - used, "%s%s", used ? ", " : "", name);
    }
    if (used)
        cd_log(CD_LOG_WARN, "no setting of cdist, without effect: %s (python -m cdist.settings lists them)", names);
}
