#include "base/host.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <unistd.h>

int cd_host_cores(void)
{
    /* A cache of a fact; every thread computes the same value, so a race is a repeat. */
    static _Atomic int cached;
    int cores = atomic_load_explicit(&cached, memory_order_relaxed);
    if (cores)
        return cores;
    cpu_set_t set;
    cores = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : (int)sysconf(_SC_NPROCESSORS_ONLN);
    if (cores < 1)
        cores = 1;
    atomic_store_explicit(&cached, cores, memory_order_relaxed);
    return cores;
}

void cd_host_boot_id(char out[40])
{
    memset(out, 0, 40);
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    ssize_t got = read(fd, out, 36);
    close(fd);
    if (got != 36)
        memset(out, 0, 40);
}

cd_status cd_host_random(void *out, size_t bytes)
{
    uint8_t *next = out;
    while (bytes) {
        ssize_t got = getrandom(next, bytes, 0);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return cd_fail_errno(CD_IO, errno, "getrandom");
        next += got;
        bytes -= (size_t)got;
    }
    return CD_OK;
}

void cd_host_name(char *out, size_t bytes)
{
    if (gethostname(out, bytes) != 0)
        strncpy(out, "?", bytes);
    out[bytes - 1] = 0;
}

size_t cd_host_page_bytes(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

uint64_t cd_host_address_room(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY)
        return UINT64_MAX;
    char text[32] = "";
    int fd = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
    ssize_t got = fd >= 0 ? read(fd, text, sizeof text - 1) : 0;
    if (fd >= 0)
        close(fd);
    /* Its first number: pages that are mapped. */
    uint64_t used = got > 0 ? strtoull(text, NULL, 10) * cd_host_page_bytes() : 0;
    return used < limit.rlim_cur ? limit.rlim_cur - used : 0;
}

void cd_host_want_files(uint64_t count)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= count || limit.rlim_cur >= limit.rlim_max)
        return;
    limit.rlim_cur = limit.rlim_max < count ? limit.rlim_max : (rlim_t)count;
    (void)setrlimit(RLIMIT_NOFILE, &limit); /* what is missing is said where it is missing */
}

int cd_host_spare_file(void)
{
    return open("/dev/null", O_RDONLY | O_CLOEXEC);
}

void cd_host_hold_standard(void)
{
    for (int fd = 0; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) < 0)
            return;
}

/* The kernel's flag of a thread that ends (PF_EXITING). */
#define ENDS 0x4u

char cd_host_process_state(uint32_t process)
{
    char path[48], text[512], state;
    unsigned flags;
    snprintf(path, sizeof path, "/proc/%u/stat", process);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    ssize_t got = read(fd, text, sizeof text - 1);
    close(fd);
    text[got > 0 ? got : 0] = 0;
    /* The name before the state may hold anything, also brackets. */
    const char *end = strrchr(text, ')');
    if (!end || sscanf(end, ") %c %*d %*d %*d %*d %*d %u", &state, &flags) != 2)
        return 0;
    return flags & ENDS ? 'X' : state;
}
