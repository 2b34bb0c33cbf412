/* NCCL without GPUs, for tests: communicators over a file mapped by all ranks (threads or processes), operations run in the stream
 * threads of the fake driver, in the order of their issue. As strict as the real one: non-blocking communicators answer "in
 * progress" and refuse calls until ncclCommGetAsyncError was asked; blocking ones wait within their creation and within the
 * first collective of each kind until all ranks have come, or until the abort flag is raised; kernels wait for their peers
 * until then too; ncclCommAbort raises the flag at once and frees when the group that it stands in ends.
 *   FAKE_NCCL_INIT_MS   how long the creation of a communicator takes at least */
#include "fake_nccl.h"

#include "cuda/nccl_abi.h"
#include "fake_cuda.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { RANKS = 8, SLOT = 65536, MAIL = 16384, GROUP_OPS = 512, PREMULS = 64, FIRST_PREMUL = 5 };

typedef struct {
    _Atomic uint64_t put, got; /* pieces */
    _Atomic uint32_t bytes;
    char data[MAIL];
} mailbox;

typedef struct {
    _Atomic int attached;
    _Atomic uint64_t arrived[RANKS];
    _Atomic uint32_t connected[RANKS]; /* bits of kinds */
    _Atomic uint64_t split_arrived[RANKS];
    struct {
        int color, key;
    } split[2][RANKS];
    char slot[RANKS][SLOT];
    mailbox mail[RANKS][RANKS]; /* from, to */
} segment;

typedef struct comm {
    char path[160];
    int rank, world;
    segment *seg;
    _Atomic bool abort, ready;
    bool blocking;
    _Atomic int inside; /* calls that use it */
    uint32_t connected;
    _Atomic int refs, early; /* early: answers "in progress" still due */
    _Atomic bool asked;      /* ncclCommGetAsyncError has said success since the last "in progress" */
    _Atomic int busy;        /* splits under way */
    _Atomic uint64_t next_ticket, turn;
    uint64_t barriers, split_barriers;
    uint32_t shrinks[1 << RANKS]; /* by the set of members */
    _Atomic(struct comm *) child; /* in the making by a shrink */
    bool launched;
    double premul[PREMULS];
    int premul_count;
    cd_cu_address memory; /* on the GPU: giving it back waits for what runs there */
} comm;

typedef enum { ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, SEND, RECV } kind;

typedef struct {
    kind kind;
    const char *in;
    char *out;
    size_t count;
    int type, redop, root;
    comm *comm;
    void *stream;
    double factor;
    size_t moved; /* bytes of a send or receive that are through */
} operation;

typedef struct {
    comm *comm;
    uint64_t ticket;
    int count;
    operation ops[];
} job;

static _Thread_local int group_depth;
static _Thread_local operation *grouped;
static _Thread_local int grouped_count;
static _Thread_local cd_nccl_result group_error;
static _Atomic int failing[RANKS];
static _Atomic int left, aborts, splits, shrinks, groups, early_calls, pulled, waiting, ids, broken;
static _Atomic int finalize_hangs, factors, registered;
enum { DOOMED = 16, INTERNAL_ERROR = 3 };
static _Thread_local comm *doomed[DOOMED]; /* freed at the end of the group */
static _Thread_local int doomed_count;

cd_cu_result cuMemAlloc_v2(cd_cu_address *out, size_t bytes);
cd_cu_result cuMemFree_v2(cd_cu_address address);

static void nap(void)
{
    nanosleep(&(struct timespec){0, 20000}, 0);
}

static size_t type_bytes(int type)
{
    static const size_t bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return bytes[type];
}

/* ------------------------------------------------------------------ life */

static void unref(comm *c)
{
    if (atomic_fetch_sub(&c->refs, 1) != 1)
        return;
    if (c->seg)
        munmap(c->seg, sizeof *c->seg);
    free(c);
}

static comm *make_comm(int world, int rank)
{
    comm *c = calloc(1, sizeof *c);
    c->world = world;
    c->rank = rank;
    atomic_store(&c->refs, 1);
    atomic_store(&c->early, 3);
    atomic_fetch_add(&left, 1);
    cuMemAlloc_v2(&c->memory, 16);
    return c;
}

static void give_back(comm *c)
{
    cuMemFree_v2(c->memory);
    atomic_fetch_sub(&left, 1);
    unref(c);
}

static bool attach(comm *c)
{
    const char *ms = getenv("FAKE_NCCL_INIT_MS");
    for (int i = ms ? atoi(ms) : 0; i > 0 && !atomic_load(&c->abort); i--)
        nanosleep(&(struct timespec){0, 1000000}, 0);
    int fd = open(c->path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, sizeof *c->seg) != 0)
        return false;
    c->seg = mmap(0, sizeof *c->seg, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (c->seg == MAP_FAILED) {
        c->seg = 0;
        return false;
    }
    if (atomic_fetch_add(&c->seg->attached, 1) + 1 == c->world)
        unlink(c->path);
    while (atomic_load(&c->seg->attached) < c->world && !atomic_load(&c->abort))
        nap();
    if (atomic_load(&c->abort))
        unlink(c->path);
    return true;
}

static void *init_main(void *arg)
{
    comm *c = arg;
    attach(c);
    atomic_store(&c->ready, true);
    unref(c);
    return 0;
}

static void run_detached(void *(*main)(void *), void *arg)
{
    pthread_t thread;
    pthread_create(&thread, 0, main, arg);
    pthread_detach(thread);
}

cd_nccl_result ncclGetVersion(int *version_p)
{
    const char *text = getenv("FAKE_NCCL_VERSION");
    *version_p = text ? atoi(text) : 22807;
    return 0;
}

cd_nccl_result ncclGetUniqueId(cd_nccl_id *out)
{
    const char *folder = getenv("FAKE_NCCL_DIR");
    memset(out, 0, sizeof *out);
    snprintf(out->internal, sizeof out->internal, "%.90s/fake_nccl.%d.%d", folder ? folder : "/tmp", (int)getpid(),
             atomic_fetch_add(&ids, 1));
    return 0;
}

static cd_nccl_result finish_init(comm *c)
{
    atomic_fetch_add(&c->inside, 1);
    bool good = attach(c) && !atomic_load(&c->abort);
    atomic_store(&c->early, 0);
    atomic_store(&c->asked, true);
    atomic_store(&c->ready, true);
    atomic_fetch_sub(&c->inside, 1);
    return good ? CD_NCCL_SUCCESS : INTERNAL_ERROR;
}

cd_nccl_result ncclCommInitRankConfig(cd_nccl_comm *out, int world, cd_nccl_id id, int rank, cd_nccl_config *config)
{
    if (world > RANKS || config->magic != CD_NCCL_MAGIC)
        return CD_NCCL_INVALID_ARGUMENT;
    comm *c = make_comm(world, rank);
    memcpy(c->path, id.internal, sizeof id.internal);
    c->blocking = config->blocking != 0;
    if (c->blocking) {
        atomic_store((_Atomic(cd_nccl_comm) *)out, c); /* so early, as the real one does */
        return finish_init(c);
    }
    atomic_fetch_add(&c->refs, 1);
    run_detached(init_main, c);
    *out = c;
    return CD_NCCL_IN_PROGRESS;
}

typedef struct {
    comm *parent, *child;
    int color, key;
} split_job;

static void *split_main(void *arg)
{
    split_job *j = arg;
    comm *p = j->parent, *c = j->child;
    uint64_t round = ++p->split_barriers;
    int side = (int)(round & 1), world = 0, rank = 0;
    p->seg->split[side][p->rank].color = j->color;
    p->seg->split[side][p->rank].key = j->key;
    atomic_store(&p->seg->split_arrived[p->rank], round);
    for (int i = 0; i < p->world; i++)
        while (atomic_load(&p->seg->split_arrived[i]) < round && !atomic_load(&p->abort))
            nap();
    if (!atomic_load(&p->abort)) {
        for (int i = 0; i < p->world; i++)
            if (p->seg->split[side][i].color == j->color) {
                world++;
                rank += p->seg->split[side][i].key < j->key || (p->seg->split[side][i].key == j->key && i < p->rank);
            }
        c->world = world;
        c->rank = rank;
        snprintf(c->path, sizeof c->path, "%.120s.s%d.%d", p->path, (int)round, j->color);
        attach(c);
    }
    atomic_store(&c->ready, true);
    unref(c);
    atomic_fetch_sub(&p->busy, 1);
    unref(p);
    free(j);
    return 0;
}

static void free_aborted(comm *c)
{
    /* The real one frees memory that a call still uses. */
    if (atomic_load(&c->inside) > 0)
        atomic_fetch_add(&pulled, 1);
    unlink(c->path);
    give_back(c);
}

static bool too_early(comm *c)
{
    if (atomic_load(&c->ready) && atomic_load(&c->early) == 0 && atomic_load(&c->asked))
        return false;
    atomic_fetch_add(&early_calls, 1);
    return true;
}

cd_nccl_result ncclCommSplit(cd_nccl_comm handle, int color, int key, cd_nccl_comm *out, cd_nccl_config *config)
{
    comm *c = handle;
    if ((config->blocking != 0) != c->blocking || too_early(c))
        return CD_NCCL_INVALID_ARGUMENT;
    split_job *j = malloc(sizeof *j);
    *j = (split_job){c, make_comm(0, 0), color, key};
    atomic_fetch_add(&j->child->refs, 1);
    comm *child = j->child;
    atomic_store((_Atomic(cd_nccl_comm) *)out, child);
    atomic_fetch_add(&c->refs, 1);
    atomic_fetch_add(&c->busy, 1);
    atomic_fetch_add(&splits, 1);
    if (c->blocking) {
        atomic_fetch_add(&c->inside, 1);
        atomic_store(&c->child, child);
        split_main(j);
        atomic_fetch_sub(&c->inside, 1);
        child->blocking = true;
        atomic_store(&child->early, 0);
        atomic_store(&child->asked, true);
        /* As the real one: what failed is handed out too, and the parent goes on pointing to its abort flag. */
        if (atomic_load(&c->abort) || atomic_load(&broken))
            return INTERNAL_ERROR;
        atomic_store(&c->child, 0);
        return CD_NCCL_SUCCESS;
    }
    atomic_store(&c->asked, false);
    run_detached(split_main, j);
    return CD_NCCL_IN_PROGRESS;
}

/* By its members alone. */
cd_nccl_result ncclCommShrink(cd_nccl_comm handle, int *left_out, int count, cd_nccl_comm *out, cd_nccl_config *config, int flags)
{
    comm *c = handle;
    unsigned members = (1u << c->world) - 1;
    for (int i = 0; i < count; i++)
        members &= ~(1u << left_out[i]);
    if (count < 1 || flags != 0 || (config->blocking != 0) != c->blocking || !(members >> c->rank & 1) || too_early(c))
        return CD_NCCL_INVALID_ARGUMENT;
    comm *child = make_comm(__builtin_popcount(members), __builtin_popcount(members & ((1u << c->rank) - 1)));
    child->blocking = c->blocking;
    snprintf(child->path, sizeof child->path, "%.120s.m%x.%u", c->path, members, c->shrinks[members]++);
    atomic_fetch_add(&shrinks, 1);
    atomic_store((_Atomic(cd_nccl_comm) *)out, child);
    if (!c->blocking) {
        atomic_store(&c->asked, false);
        atomic_fetch_add(&child->refs, 1);
        run_detached(init_main, child);
        return CD_NCCL_IN_PROGRESS;
    }
    atomic_fetch_add(&c->inside, 1);
    atomic_store(&c->child, child);
    if (atomic_load(&c->abort))
        atomic_store(&child->abort, true);
    cd_nccl_result result = finish_init(child);
    atomic_fetch_sub(&c->inside, 1);
    if (result != CD_NCCL_SUCCESS || atomic_load(&broken))
        return INTERNAL_ERROR;
    atomic_store(&c->child, 0);
    return CD_NCCL_SUCCESS;
}

cd_nccl_result ncclCommGetAsyncError(cd_nccl_comm handle, cd_nccl_result *out)
{
    comm *c = handle;
    int fail = c->rank < RANKS ? atomic_load(&failing[c->rank]) : 0;
    *out = CD_NCCL_SUCCESS;
    if (fail)
        *out = fail;
    else if (!atomic_load(&c->ready) || atomic_load(&c->busy) > 0)
        *out = CD_NCCL_IN_PROGRESS;
    else if (atomic_load(&c->early) > 0 && atomic_fetch_sub(&c->early, 1) > 0)
        *out = CD_NCCL_IN_PROGRESS;
    if (*out == CD_NCCL_SUCCESS)
        atomic_store(&c->asked, true);
    return 0;
}

cd_nccl_result ncclCommFinalize(cd_nccl_comm handle)
{
    comm *c = handle;
    if (c->blocking) {
        atomic_fetch_add(&c->inside, 1);
        while (atomic_load(&finalize_hangs) && !atomic_load(&c->abort))
            nap();
        atomic_fetch_sub(&c->inside, 1);
        return atomic_load(&c->abort) ? INTERNAL_ERROR : CD_NCCL_SUCCESS;
    }
    atomic_store(&c->early, 2);
    return CD_NCCL_IN_PROGRESS;
}

cd_nccl_result ncclCommDestroy(cd_nccl_comm handle)
{
    give_back(handle);
    return 0;
}

cd_nccl_result ncclCommAbort(cd_nccl_comm handle)
{
    comm *c = handle;
    atomic_store(&c->abort, true);
    comm *child = atomic_load(&c->child);
    if (child)
        atomic_store(&child->abort, true);
    atomic_fetch_add(&aborts, 1);
    if (group_depth > 0 && doomed_count < DOOMED)
        doomed[doomed_count++] = c;
    else
        free_aborted(c);
    return 0;
}

const char *ncclGetErrorString(cd_nccl_result result)
{
    return result == CD_NCCL_REMOTE_ERROR ? "remote process exited or there was a network error" : "fake error";
}

const char *ncclGetLastError(cd_nccl_comm handle)
{
    (void)handle;
    return "";
}

/* ------------------------------------------------------------------ arithmetic */

static float from_half(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 1023, bits;
    if (exponent == 0) {
        float x = (float)fraction / 16777216.0f;
        return sign ? -x : x;
    }
    bits = sign | (exponent == 31 ? 0x7f800000 : (exponent + 112) << 23) | fraction << 13;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint16_t to_half(float x)
{
    _Float16 h = (_Float16)x;
    uint16_t bits;
    memcpy(&bits, &h, sizeof bits);
    return bits;
}

static float from_bf16(uint16_t h)
{
    uint32_t bits = (uint32_t)h << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint16_t to_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#define SAME(x) (x)
#define REDUCE_AS(T, Wide, LOAD, STORE)                                                              \
    for (size_t i = 0; i < count; i++) {                                                             \
        Wide sum = LOAD(((const T *)parts[0])[i]);                                                   \
        for (int r = 1; r < world; r++) {                                                            \
            Wide x = LOAD(((const T *)parts[r])[i]);                                                 \
            sum = redop == CD_NCCL_PROD ? (Wide)(sum * x)                                            \
                  : redop == CD_NCCL_MAX ? (x > sum ? x : sum)                                       \
                  : redop == CD_NCCL_MIN ? (x < sum ? x : sum)                                       \
                                         : (Wide)(sum + x);                                          \
        }                                                                                            \
        ((T *)out)[i] = (T)STORE(redop == CD_NCCL_AVG ? (Wide)(sum / (Wide)world) : sum);            \
    }                                                                                                \
    break

static void reduce_parts(const char *const *parts, int world, char *out, size_t count, int type, int redop)
{
    switch (type) {
    case CD_NCCL_INT8: REDUCE_AS(int8_t, int8_t, SAME, SAME);
    case CD_NCCL_UINT8: REDUCE_AS(uint8_t, uint8_t, SAME, SAME);
    case CD_NCCL_INT32: REDUCE_AS(int32_t, int32_t, SAME, SAME);
    case CD_NCCL_UINT32: REDUCE_AS(uint32_t, uint32_t, SAME, SAME);
    case CD_NCCL_INT64: REDUCE_AS(int64_t, int64_t, SAME, SAME);
    case CD_NCCL_UINT64: REDUCE_AS(uint64_t, uint64_t, SAME, SAME);
    case CD_NCCL_FLOAT32: REDUCE_AS(float, float, SAME, SAME);
    case CD_NCCL_FLOAT64: REDUCE_AS(double, double, SAME, SAME);
    case CD_NCCL_FLOAT16: REDUCE_AS(uint16_t, float, from_half, to_half);
    case CD_NCCL_BFLOAT16: REDUCE_AS(uint16_t, float, from_bf16, to_bf16);
    }
}

static void multiply(char *data, size_t count, int type, double factor)
{
    for (size_t i = 0; i < count; i++) {
        if (type == CD_NCCL_FLOAT32)
            ((float *)data)[i] *= (float)factor;
        else if (type == CD_NCCL_FLOAT64)
            ((double *)data)[i] *= factor;
        else if (type == CD_NCCL_FLOAT16)
            ((uint16_t *)data)[i] = to_half(from_half(((uint16_t *)data)[i]) * (float)factor);
        else
            ((uint16_t *)data)[i] = to_bf16(from_bf16(((uint16_t *)data)[i]) * (float)factor);
    }
}

/* ------------------------------------------------------------------ running, in a stream's thread */

static bool meet(comm *c)
{
    uint64_t round = ++c->barriers;
    atomic_store(&c->seg->arrived[c->rank], round);
    for (int i = 0; i < c->world; i++)
        while (atomic_load(&c->seg->arrived[i]) < round) {
            if (atomic_load(&c->abort))
                return false;
            nap();
        }
    return true;
}

static void take_part(const operation *op, const char *const *parts, size_t first, size_t count, int owner)
{
    comm *c = op->comm;
    size_t item = type_bytes(op->type);
    bool sums = op->kind == ALL_REDUCE || op->kind == REDUCE_SCATTER || op->kind == REDUCE;
    if (sums && (op->kind == ALL_REDUCE || owner == c->rank))
        reduce_parts(parts, c->world, op->out + first * item, count, op->type, op->redop);
    else if (op->kind == BROADCAST)
        memmove(op->out + first * item, parts[op->root], count * item);
    else if (op->kind == ALL_GATHER)
        for (int r = 0; r < c->world; r++)
            memcpy(op->out + ((size_t)r * op->count + first) * item, parts[r], count * item);
}

/* Chunks through the slots; a reduce_scatter makes a pass for each owner. */
static bool run_collective(const operation *op)
{
    comm *c = op->comm;
    size_t item = type_bytes(op->type), chunk = SLOT / item;
    const char *parts[RANKS];
    for (int r = 0; r < c->world; r++)
        parts[r] = c->seg->slot[r];
    int passes = op->kind == REDUCE_SCATTER ? c->world : 1;
    /* All must meet even for nothing, as kernels of NCCL do not: count 0 is dropped before. */
    for (int pass = 0; pass < passes; pass++) {
        int owner = op->kind == REDUCE_SCATTER ? pass : op->root;
        for (size_t first = 0; first < op->count; first += chunk) {
            size_t count = op->count - first < chunk ? op->count - first : chunk;
            const char *from = op->in + ((size_t)pass * op->count + first) * item;
            memcpy(c->seg->slot[c->rank], from, count * item);
            if (op->factor != 1.0)
                multiply(c->seg->slot[c->rank], count, op->type, op->factor);
            if (!meet(c))
                return false;
            take_part(op, parts, first, count, owner);
            if (!meet(c))
                return false;
        }
    }
    return true;
}

/* Moves one piece if it can. */
static bool step(operation *op)
{
    comm *c = op->comm;
    size_t bytes = op->count * type_bytes(op->type), left_bytes = bytes - op->moved;
    mailbox *m = op->kind == SEND ? &c->seg->mail[c->rank][op->root] : &c->seg->mail[op->root][c->rank];
    uint64_t put = atomic_load(&m->put), got = atomic_load(&m->got);
    if (op->kind == SEND && put == got) {
        size_t piece = left_bytes < MAIL ? left_bytes : MAIL;
        memcpy(m->data, op->in + op->moved, piece);
        atomic_store(&m->bytes, (uint32_t)piece);
        op->moved += piece;
        atomic_store(&m->put, put + 1);
        return true;
    }
    if (op->kind == RECV && put > got) {
        size_t piece = atomic_load(&m->bytes);
        memcpy(op->out + op->moved, m->data, piece < left_bytes ? piece : left_bytes);
        op->moved += piece;
        atomic_store(&m->got, got + 1);
        return true;
    }
    return false;
}

/* Sends and receives of a group progress together, those of one pair and direction in order. */
static bool run_moves(operation *ops, int count)
{
    for (;;) {
        bool all = true, moved = false;
        for (int i = 0; i < count; i++) {
            if (ops[i].kind < SEND || ops[i].moved >= ops[i].count * type_bytes(ops[i].type))
                continue;
            all = false;
            bool first = true;
            for (int j = 0; j < i; j++)
                first &= ops[j].kind != ops[i].kind || ops[j].root != ops[i].root ||
                         ops[j].moved >= ops[j].count * type_bytes(ops[j].type);
            moved |= first && step(&ops[i]);
        }
        if (all)
            return true;
        if (atomic_load(&ops[0].comm->abort))
            return false;
        if (!moved)
            nap();
    }
}

static void run_job(void *arg)
{
    job *j = arg;
    comm *c = j->comm;
    while (atomic_load(&c->turn) != j->ticket && !atomic_load(&c->abort))
        nap();
    bool good = !atomic_load(&c->abort);
    for (int i = 0; i < j->count && good; i++)
        if (j->ops[i].kind < SEND)
            good = run_collective(&j->ops[i]);
    if (good)
        run_moves(j->ops, j->count);
    atomic_fetch_add(&c->turn, 1);
    unref(c);
    free(j);
}

/* ------------------------------------------------------------------ issue */

/* The first collective of a kind waits here until all ranks have come to theirs. */
static cd_nccl_result connect_kinds(comm *c, const operation *ops, int count)
{
    uint32_t kinds = 0;
    for (int i = 0; i < count; i++)
        kinds |= ops[i].kind < SEND ? 1u << ops[i].kind : 0;
    if (!(kinds & ~c->connected))
        return atomic_load(&c->abort) ? INTERNAL_ERROR : CD_NCCL_SUCCESS;
    c->connected |= kinds;
    atomic_fetch_or(&c->seg->connected[c->rank], kinds);
    atomic_fetch_add(&waiting, 1);
    for (int r = 0; r < c->world; r++)
        while ((atomic_load(&c->seg->connected[r]) & kinds) != kinds && !atomic_load(&c->abort))
            nap();
    atomic_fetch_sub(&waiting, 1);
    return atomic_load(&c->abort) ? INTERNAL_ERROR : CD_NCCL_SUCCESS;
}

static cd_nccl_result push(const operation *ops, int count)
{
    comm *c = ops[0].comm;
    if (c->blocking) {
        atomic_fetch_add(&c->inside, 1);
        cd_nccl_result result = connect_kinds(c, ops, count);
        atomic_fetch_sub(&c->inside, 1);
        if (result != CD_NCCL_SUCCESS)
            return result;
        c->launched = true;
    }
    job *j = malloc(sizeof *j + (size_t)count * sizeof *ops);
    j->comm = c;
    j->count = count;
    j->ticket = atomic_fetch_add(&c->next_ticket, 1);
    memcpy(j->ops, ops, (size_t)count * sizeof *ops);
    atomic_fetch_add(&c->refs, 1);
    fake_stream_push(ops[0].stream, run_job, j);
    /* The first launch connects in the background. */
    if (c->launched)
        return CD_NCCL_SUCCESS;
    c->launched = true;
    atomic_store(&c->asked, false);
    atomic_store(&c->early, 2);
    return CD_NCCL_IN_PROGRESS;
}

static cd_nccl_result issue(operation op)
{
    comm *c = op.comm;
    if (too_early(c) || (op.kind < SEND && (op.type > CD_NCCL_BFLOAT16)))
        return group_error = CD_NCCL_INVALID_ARGUMENT;
    op.factor = 1.0;
    if (op.redop >= FIRST_PREMUL) {
        op.factor = c->premul[op.redop - FIRST_PREMUL];
        op.redop = CD_NCCL_SUM;
    }
    if (op.count == 0)
        return CD_NCCL_SUCCESS;
    if (!group_depth)
        return push(&op, 1);
    if (!grouped)
        grouped = malloc(GROUP_OPS * sizeof *grouped);
    if (grouped_count == GROUP_OPS)
        return CD_NCCL_INVALID_ARGUMENT;
    grouped[grouped_count++] = op;
    return CD_NCCL_SUCCESS;
}

cd_nccl_result ncclGroupStart(void)
{
    if (group_depth++ == 0)
        group_error = CD_NCCL_SUCCESS;
    return 0;
}

cd_nccl_result ncclGroupEnd(void)
{
    if (group_depth == 0)
        return CD_NCCL_INVALID_ARGUMENT;
    if (--group_depth > 0)
        return 0;
    while (doomed_count > 0)
        free_aborted(doomed[--doomed_count]);
    cd_nccl_result result = group_error;
    if (grouped_count && result == CD_NCCL_SUCCESS) {
        atomic_fetch_add(&groups, 1);
        result = push(grouped, grouped_count);
    }
    grouped_count = 0;
    free(grouped);
    grouped = 0;
    return result;
}

cd_nccl_result ncclAllReduce(const void *in, void *out, size_t count, cd_nccl_type type, cd_nccl_redop redop,
                             cd_nccl_comm handle, cd_cu_stream stream)
{
    return issue((operation){ALL_REDUCE, in, out, count, type, redop, 0, handle, stream, 1.0, 0});
}

cd_nccl_result ncclReduce(const void *in, void *out, size_t count, cd_nccl_type type, cd_nccl_redop redop, int root,
                          cd_nccl_comm handle, cd_cu_stream stream)
{
    return issue((operation){REDUCE, in, out, count, type, redop, root, handle, stream, 1.0, 0});
}

cd_nccl_result ncclBroadcast(const void *in, void *out, size_t count, cd_nccl_type type, int root, cd_nccl_comm handle,
                             cd_cu_stream stream)
{
    return issue((operation){BROADCAST, in, out, count, type, 0, root, handle, stream, 1.0, 0});
}

cd_nccl_result ncclAllGather(const void *in, void *out, size_t count, cd_nccl_type type, cd_nccl_comm handle,
                             cd_cu_stream stream)
{
    return issue((operation){ALL_GATHER, in, out, count, type, 0, 0, handle, stream, 1.0, 0});
}

cd_nccl_result ncclReduceScatter(const void *in, void *out, size_t count, cd_nccl_type type, cd_nccl_redop redop,
                                 cd_nccl_comm handle, cd_cu_stream stream)
{
    return issue((operation){REDUCE_SCATTER, in, out, count, type, redop, 0, handle, stream, 1.0, 0});
}

cd_nccl_result ncclSend(const void *in, size_t count, cd_nccl_type type, int peer, cd_nccl_comm handle, cd_cu_stream stream)
{
    return issue((operation){SEND, in, 0, count, type, 0, peer, handle, stream, 1.0, 0});
}

cd_nccl_result ncclRecv(void *out, size_t count, cd_nccl_type type, int peer, cd_nccl_comm handle, cd_cu_stream stream)
{
    return issue((operation){RECV, 0, out, count, type, 0, peer, handle, stream, 1.0, 0});
}

cd_nccl_result ncclRedOpCreatePreMulSum(cd_nccl_redop *out, void *scalar, cd_nccl_type type, int residence,
                                        cd_nccl_comm handle)
{
    comm *c = handle;
    if (residence != CD_NCCL_SCALAR_HOST)
        return CD_NCCL_INVALID_ARGUMENT;
    int at = c->premul_count++ % PREMULS;
    uint16_t half;
    memcpy(&half, scalar, sizeof half);
    c->premul[at] = type == CD_NCCL_FLOAT64   ? *(double *)scalar
                    : type == CD_NCCL_FLOAT32 ? *(float *)scalar
                    : type == CD_NCCL_FLOAT16 ? from_half(half)
                                              : from_bf16(half);
    *out = FIRST_PREMUL + at;
    atomic_fetch_add(&factors, 1);
    return 0;
}

cd_nccl_result ncclRedOpDestroy(cd_nccl_redop redop, cd_nccl_comm handle)
{
    (void)handle;
    atomic_fetch_sub(&factors, 1);
    return redop >= FIRST_PREMUL ? CD_NCCL_SUCCESS : CD_NCCL_INVALID_ARGUMENT;
}

cd_nccl_result ncclMemAlloc(void **out, size_t bytes)
{
    cd_cu_address address;
    cuMemAlloc_v2(&address, bytes);
    *out = (void *)(uintptr_t)address;
    return 0;
}

cd_nccl_result ncclMemFree(void *memory)
{
    extern void fake_unmap(void *);
    fake_unmap(memory);
    return 0;
}

cd_nccl_result ncclCommRegister(cd_nccl_comm comm_handle, void *memory, size_t bytes, void **out)
{
    (void)comm_handle;
    (void)bytes;
    *out = memory;
    atomic_fetch_add(&registered, 1);
    return 0;
}

cd_nccl_result ncclCommDeregister(cd_nccl_comm comm_handle, void *handle)
{
    (void)comm_handle;
    (void)handle;
    atomic_fetch_sub(&registered, 1);
    return 0;
}

/* ------------------------------------------------------------------ for tests */

void fake_nccl_fail(int rank, int result)
{
    atomic_store(&failing[rank], result);
}

void fake_nccl_hang_finalize(int on)
{
    atomic_store(&finalize_hangs, on);
}

void fake_nccl_break(int on)
{
    atomic_store(&broken, on);
}

int fake_nccl_factors(void)
{
    return atomic_load(&factors);
}

int fake_nccl_registered(void)
{
    return atomic_load(&registered);
}

int fake_nccl_left(void)
{
    return atomic_load(&left);
}

int fake_nccl_aborts(void)
{
    return atomic_load(&aborts);
}

int fake_nccl_splits(void)
{
    return atomic_load(&splits);
}

int fake_nccl_shrinks(void)
{
    return atomic_load(&shrinks);
}

int fake_nccl_groups(void)
{
    return atomic_load(&groups);
}

int fake_nccl_early_calls(void)
{
    return atomic_load(&early_calls);
}

int fake_nccl_pulled(void)
{
    return atomic_load(&pulled);
}

int fake_nccl_waiting(void)
{
    return atomic_load(&waiting);
}
