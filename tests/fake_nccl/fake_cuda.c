/* A CUDA driver without a GPU, for tests: device memory is host memory, each stream is a thread that runs its queue in order,
 * events are counters. FAKE_CUDA_DEVICES (4) says how many GPUs there are. No kernels: cuModuleLoadData refuses. */
#include "fake_cuda.h"

#include "cuda/driver_abi.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { MAX_DEVICES = 16, STACK = 32, CAPTURED_EVENT = 907 };

typedef struct task {
    void (*fn)(void *);
    void *arg;
    struct task *next;
} task;

typedef struct stream {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t thread;
    task *first, *last;
    bool busy, stop;
    _Atomic bool capturing;
    int device;
    struct stream *next; /* all streams */
} stream;

typedef struct {
    _Atomic unsigned long long recorded, done;
    _Atomic int refs;
    _Atomic bool captured;
} event;

typedef struct region {
    char *base;
    size_t bytes;
    int device;
    struct region *next;
} region;

static int contexts[MAX_DEVICES];
static stream *default_streams[MAX_DEVICES];
static stream *all_streams;
static region *regions;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic int violations, held;
static _Atomic long left;
static _Thread_local int *stack[STACK];
static _Thread_local int depth;

static int device_count(void)
{
    const char *text = getenv("FAKE_CUDA_DEVICES");
    int count = text ? atoi(text) : 4;
    return count < 0 ? 0 : count > MAX_DEVICES ? MAX_DEVICES : count;
}

static int current_device(void)
{
    return depth ? (int)(stack[depth - 1] - contexts) : 0;
}

static void *stream_main(void *arg)
{
    stream *s = arg;
    pthread_mutex_lock(&s->lock);
    for (;;) {
        while (!s->first && !s->stop)
            pthread_cond_wait(&s->changed, &s->lock);
        if (!s->first)
            break;
        task *t = s->first;
        s->first = t->next;
        s->busy = true;
        pthread_mutex_unlock(&s->lock);
        t->fn(t->arg);
        free(t);
        pthread_mutex_lock(&s->lock);
        s->busy = false;
        pthread_cond_broadcast(&s->changed);
    }
    pthread_mutex_unlock(&s->lock);
    return 0;
}

static stream *make_stream(void)
{
    stream *s = calloc(1, sizeof *s);
    s->device = depth ? current_device() : -1; /* a test's own stream, made without a context, is its own business */
    pthread_mutex_init(&s->lock, 0);
    pthread_cond_init(&s->changed, 0);
    pthread_create(&s->thread, 0, stream_main, s);
    pthread_mutex_lock(&lock);
    s->next = all_streams;
    all_streams = s;
    pthread_mutex_unlock(&lock);
    return s;
}

/* 0 and 1 are the legacy default stream of the current device, 2 the per-thread one, here the same. */
static stream *real_stream(void *handle)
{
    if ((uintptr_t)handle > 2)
        return handle;
    int device = current_device();
    pthread_mutex_lock(&lock);
    stream *s = default_streams[device];
    pthread_mutex_unlock(&lock);
    if (s)
        return s;
    s = make_stream();
    pthread_mutex_lock(&lock);
    if (!default_streams[device])
        default_streams[device] = s;
    s = default_streams[device];
    pthread_mutex_unlock(&lock);
    return s;
}

void fake_stream_push(void *handle, void (*fn)(void *), void *arg)
{
    stream *s = real_stream(handle);
    task *t = malloc(sizeof *t);
    *t = (task){fn, arg, 0};
    pthread_mutex_lock(&s->lock);
    if (s->first)
        s->last->next = t;
    else
        s->first = t;
    s->last = t;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
}

void fake_stream_drain(void *handle)
{
    stream *s = real_stream(handle);
    pthread_mutex_lock(&s->lock);
    while (s->first || s->busy)
        pthread_cond_wait(&s->changed, &s->lock);
    pthread_mutex_unlock(&s->lock);
}

static void stand_still(void *arg)
{
    (void)arg;
    while (atomic_load(&held))
        nanosleep(&(struct timespec){0, 50000}, 0);
}

void fake_stream_hold(void *handle)
{
    atomic_store(&held, 1);
    fake_stream_push(handle, stand_still, 0);
}

void fake_streams_let_go(void)
{
    atomic_store(&held, 0);
}

void fake_capture_begin(void *handle)
{
    atomic_store(&real_stream(handle)->capturing, true);
}

void fake_capture_end(void *handle)
{
    (void)handle;
    pthread_mutex_lock(&lock);
    for (stream *s = all_streams; s; s = s->next)
        atomic_store(&s->capturing, false);
    pthread_mutex_unlock(&lock);
}

int fake_capture_violations(void)
{
    return atomic_load(&violations);
}

long fake_cuda_left(void)
{
    return atomic_load(&left);
}

cd_cu_result cuInit(unsigned flags)
{
    (void)flags;
    return device_count() ? CD_CU_SUCCESS : CD_CU_NO_DEVICE;
}

cd_cu_result cuDriverGetVersion(int *version_p)
{
    *version_p = 13000;
    return 0;
}

cd_cu_result cuGetErrorString(cd_cu_result result, const char **text_p)
{
    *text_p = result == CD_CU_OUT_OF_MEMORY ? "out of memory" : "fake driver's error";
    return 0;
}

cd_cu_result cuDeviceGetCount(int *count_p)
{
    *count_p = device_count();
    return 0;
}

cd_cu_result cuDeviceGet(cd_cu_device *out, int ordinal)
{
    *out = ordinal;
    return ordinal < device_count() ? CD_CU_SUCCESS : CD_CU_INVALID_VALUE;
}

cd_cu_result cuDeviceGetName(char *out, int bytes, cd_cu_device device)
{
    snprintf(out, (size_t)bytes, "fake GPU %d", device);
    return 0;
}

cd_cu_result cuDeviceGetUuid_v2(cd_cu_uuid *out, cd_cu_device device)
{
    memset(out, 0x40 + device, sizeof *out);
    return 0;
}

cd_cu_result cuDeviceGetPCIBusId(char *out, int bytes, cd_cu_device device)
{
    snprintf(out, (size_t)bytes, "0000:%02x:00.0", device + 1);
    return 0;
}

cd_cu_result cuDeviceGetAttribute(int *value_p, int attribute, cd_cu_device device)
{
    (void)device;
    *value_p = attribute == CD_CU_DEVICE_MAJOR ? 9 : attribute == CD_CU_DEVICE_MULTIPROCESSORS ? 4 : attribute == CD_CU_DEVICE_MEMORY_POOLS;
    return 0;
}

cd_cu_result cuDevicePrimaryCtxRetain(cd_cu_context *out, cd_cu_device device)
{
    *out = &contexts[device];
    atomic_fetch_add(&left, 1);
    return 0;
}

cd_cu_result cuDevicePrimaryCtxRelease_v2(cd_cu_device device)
{
    (void)device;
    atomic_fetch_sub(&left, 1);
    return 0;
}

cd_cu_result cuCtxGetCurrent(cd_cu_context *out)
{
    *out = depth ? stack[depth - 1] : 0;
    return 0;
}

cd_cu_result cuCtxGetDevice(cd_cu_device *out)
{
    *out = current_device();
    return 0;
}

cd_cu_result cuCtxPushCurrent_v2(cd_cu_context context)
{
    if (depth == STACK)
        return CD_CU_INVALID_VALUE;
    stack[depth++] = context;
    return 0;
}

cd_cu_result cuCtxPopCurrent_v2(cd_cu_context *out)
{
    if (!depth)
        return CD_CU_INVALID_VALUE;
    *out = stack[--depth];
    return 0;
}

cd_cu_result cuCtxGetStreamPriorityRange(int *least_p, int *greatest_p)
{
    *least_p = 0;
    *greatest_p = -5;
    return 0;
}

cd_cu_result cuStreamCreateWithPriority(cd_cu_stream *out, unsigned flags, int priority)
{
    (void)flags;
    (void)priority;
    atomic_fetch_add(&left, 1);
    *out = make_stream();
    return 0;
}

cd_cu_result cuStreamDestroy_v2(cd_cu_stream handle)
{
    stream *s = handle;
    pthread_mutex_lock(&lock);
    for (stream **at = &all_streams; *at; at = &(*at)->next)
        if (*at == s) {
            *at = s->next;
            break;
        }
    pthread_mutex_unlock(&lock);
    pthread_mutex_lock(&s->lock);
    s->stop = true;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
    pthread_join(s->thread, 0);
    pthread_cond_destroy(&s->changed);
    pthread_mutex_destroy(&s->lock);
    free(s);
    atomic_fetch_sub(&left, 1);
    return 0;
}

cd_cu_result cuStreamQuery(cd_cu_stream handle)
{
    stream *s = real_stream(handle);
    pthread_mutex_lock(&s->lock);
    bool running = s->first || s->busy;
    pthread_mutex_unlock(&s->lock);
    return running ? CD_CU_NOT_READY : CD_CU_SUCCESS;
}

cd_cu_result cuStreamIsCapturing(cd_cu_stream handle, int *status_p)
{
    *status_p = atomic_load(&real_stream(handle)->capturing);
    return 0;
}

cd_cu_result cuThreadExchangeStreamCaptureMode(int *mode_p)
{
    *mode_p = 0;
    return 0;
}

cd_cu_result cuEventCreate(cd_cu_event *out, unsigned flags)
{
    (void)flags;
    event *e = calloc(1, sizeof *e);
    atomic_store(&e->refs, 1);
    atomic_fetch_add(&left, 1);
    *out = e;
    return 0;
}

static void unref_event(event *e)
{
    if (atomic_fetch_sub(&e->refs, 1) == 1)
        free(e);
}

cd_cu_result cuEventDestroy_v2(cd_cu_event handle)
{
    atomic_fetch_sub(&left, 1);
    unref_event(handle);
    return 0;
}

typedef struct {
    event *e;
    unsigned long long version;
} event_task;

static event_task *for_event(event *e, unsigned long long version)
{
    event_task *t = malloc(sizeof *t);
    atomic_fetch_add(&e->refs, 1);
    *t = (event_task){e, version};
    return t;
}

static void reach_event(void *arg)
{
    event_task *t = arg;
    unsigned long long seen = atomic_load(&t->e->done);
    while (seen < t->version && !atomic_compare_exchange_weak(&t->e->done, &seen, t->version)) {
    }
    unref_event(t->e);
    free(t);
}

static void await_event(void *arg)
{
    event_task *t = arg;
    while (atomic_load(&t->e->done) < t->version)
        nanosleep(&(struct timespec){0, 50000}, 0);
    unref_event(t->e);
    free(t);
}

cd_cu_result cuEventRecord(cd_cu_event handle, cd_cu_stream on)
{
    event *e = handle;
    stream *s = real_stream(on);
    atomic_store(&e->captured, atomic_load(&s->capturing));
    unsigned long long version = atomic_fetch_add(&e->recorded, 1) + 1;
    fake_stream_push(s, reach_event, for_event(e, version));
    return 0;
}

cd_cu_result cuEventQuery(cd_cu_event handle)
{
    event *e = handle;
    if (atomic_load(&e->captured)) {
        atomic_fetch_add(&violations, 1);
        return CAPTURED_EVENT;
    }
    return atomic_load(&e->done) >= atomic_load(&e->recorded) ? CD_CU_SUCCESS : CD_CU_NOT_READY;
}

cd_cu_result cuStreamWaitEvent(cd_cu_stream handle, cd_cu_event what, unsigned flags)
{
    (void)flags;
    event *e = what;
    stream *s = real_stream(handle);
    if (atomic_load(&e->captured))
        atomic_store(&s->capturing, true);
    fake_stream_push(s, await_event, for_event(e, atomic_load(&e->recorded)));
    return 0;
}

cd_cu_result cuMemAlloc_v2(cd_cu_address *out, size_t bytes)
{
    region *r = malloc(sizeof *r);
    *r = (region){malloc(bytes), bytes, current_device(), 0};
    pthread_mutex_lock(&lock);
    r->next = regions;
    regions = r;
    pthread_mutex_unlock(&lock);
    atomic_fetch_add(&left, 1);
    *out = (cd_cu_address)(uintptr_t)r->base;
    return 0;
}

static void give_back(void *base)
{
    pthread_mutex_lock(&lock);
    region **at = &regions;
    while (*at && (*at)->base != base)
        at = &(*at)->next;
    region *found = *at;
    if (found)
        *at = found->next;
    pthread_mutex_unlock(&lock);
    if (!found)
        abort();
    free(found->base);
    free(found);
    atomic_fetch_sub(&left, 1);
}

/* As the real one: what runs on the GPU ends first. */
static void drain_device(void)
{
    stream *found[256];
    int count = 0;
    pthread_mutex_lock(&lock);
    for (stream *s = all_streams; s && count < 256; s = s->next)
        if (s->device == current_device())
            found[count++] = s;
    pthread_mutex_unlock(&lock);
    while (count > 0)
        fake_stream_drain(found[--count]);
}

cd_cu_result cuCtxSynchronize(void)
{
    drain_device();
    return 0;
}

/* As NCCL gives memory back: under whatever uses it, which then finds something else there. */
void fake_unmap(void *memory)
{
    pthread_mutex_lock(&lock);
    for (region *r = regions; r; r = r->next)
        if (r->base == memory)
            memset(memory, 0xDD, r->bytes);
    pthread_mutex_unlock(&lock);
    give_back(memory);
}

cd_cu_result cuMemFree_v2(cd_cu_address address)
{
    drain_device();
    give_back((void *)(uintptr_t)address);
    return 0;
}

cd_cu_result cuMemAllocAsync(cd_cu_address *out, size_t bytes, cd_cu_stream stream_handle)
{
    (void)stream_handle;
    return cuMemAlloc_v2(out, bytes);
}

cd_cu_result cuMemFreeAsync(cd_cu_address address, cd_cu_stream handle)
{
    fake_stream_push(handle, give_back, (void *)(uintptr_t)address);
    return 0;
}

static void copy_plane(void *arg)
{
    cd_cu_copy_2d *c = arg;
    for (size_t y = 0; y < c->height; y++)
        memcpy((char *)(uintptr_t)c->to_device + y * c->to_pitch, (char *)(uintptr_t)c->from_device + y * c->from_pitch,
               c->width_bytes);
    free(c);
}

cd_cu_result cuMemcpy2DAsync_v2(const cd_cu_copy_2d *copy, cd_cu_stream handle)
{
    if (copy->height > 1 && (copy->from_pitch < copy->width_bytes || copy->to_pitch < copy->width_bytes))
        return CD_CU_INVALID_VALUE;
    cd_cu_copy_2d *c = malloc(sizeof *c);
    *c = *copy;
    fake_stream_push(handle, copy_plane, c);
    return 0;
}

cd_cu_result cuMemcpyAsync(cd_cu_address to, cd_cu_address from, size_t bytes, cd_cu_stream handle)
{
    cd_cu_copy_2d copy = {.from_device = from, .to_device = to, .width_bytes = bytes, .height = 1};
    return cuMemcpy2DAsync_v2(&copy, handle);
}

cd_cu_result cuMemcpyHtoD_v2(cd_cu_address to, const void *from, size_t bytes)
{
    fake_stream_drain(0);
    memcpy((void *)(uintptr_t)to, from, bytes);
    return 0;
}

cd_cu_result cuMemcpyDtoH_v2(void *to, cd_cu_address from, size_t bytes)
{
    fake_stream_drain(0);
    memcpy(to, (const void *)(uintptr_t)from, bytes);
    return 0;
}

cd_cu_result cuMemsetD8Async(cd_cu_address to, unsigned char value, size_t n, cd_cu_stream handle)
{
    fake_stream_drain(handle);
    memset((void *)(uintptr_t)to, value, n);
    return 0;
}

cd_cu_result cuPointerGetAttribute(void *out, int attribute, cd_cu_address address)
{
    (void)attribute;
    char *at = (char *)(uintptr_t)address;
    cd_cu_result result = CD_CU_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    for (region *r = regions; r; r = r->next)
        if (at >= r->base && at < r->base + (r->bytes ? r->bytes : 1)) {
            *(int *)out = r->device;
            result = CD_CU_SUCCESS;
            break;
        }
    pthread_mutex_unlock(&lock);
    return result;
}

cd_cu_result cuModuleLoadData(cd_cu_module *out, const void *image)
{
    (void)out;
    (void)image;
    return CD_CU_NOT_SUPPORTED;
}

cd_cu_result cuModuleUnload(cd_cu_module module)
{
    (void)module;
    return 0;
}

cd_cu_result cuModuleGetFunction(cd_cu_function *out, cd_cu_module module, const char *name)
{
    (void)out;
    (void)module;
    (void)name;
    return CD_CU_NOT_SUPPORTED;
}

cd_cu_result cuLaunchKernel(cd_cu_function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                            unsigned block_y, unsigned block_z, unsigned shared_bytes, cd_cu_stream handle,
                            void **arguments, void **extra)
{
    (void)function, (void)grid_x, (void)grid_y, (void)grid_z, (void)block_x, (void)block_y, (void)block_z;
    (void)shared_bytes, (void)handle, (void)arguments, (void)extra;
    return CD_CU_NOT_SUPPORTED;
}
