/* Preloaded into the Python tests (make test-delayed): before a system call that moves bytes or waits for them a thread sometimes
 * naps, so that processes meet in orders that a quiet machine never shows. DELAYS="permille most_ms" sets how often and how
 * long at most. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static int permille = 5, most_ms = 40;

__attribute__((constructor)) static void read_setting(void)
{
    const char *text = getenv("DELAYS");
    if (text)
        sscanf(text, "%d %d", &permille, &most_ms);
}

static void nap(void)
{
    static _Thread_local uint64_t state;
    struct timespec now;
    int saved = errno;
    if (!state) {
        /* The clock too: a forked child starts with its parent's state and address. */
        clock_gettime(CLOCK_MONOTONIC, &now);
        state = ((uint64_t)(uintptr_t)&state ^ (uint64_t)now.tv_nsec ^ (uint64_t)getpid() << 32) | 1;
    }
    state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    if ((int)((state >> 33) % 1000) < permille) {
        long us = (long)((state >> 40) % (uint64_t)(most_ms * 1000 + 1));
        nanosleep(&(struct timespec){us / 1000000, us % 1000000 * 1000}, NULL); /* a signal may cut it short */
    }
    errno = saved;
}

#define DELAYED(type, name, parameters, ...)                   \
    type name parameters                                       \
    {                                                          \
        static type(*next) parameters;                         \
        if (!next)                                             \
            next = (type(*) parameters)dlsym(RTLD_NEXT, #name); \
        nap();                                                 \
        return next(__VA_ARGS__);                              \
    }

DELAYED(ssize_t, read, (int fd, void *to, size_t n), fd, to, n)
DELAYED(ssize_t, write, (int fd, const void *from, size_t n), fd, from, n)
DELAYED(ssize_t, recv, (int fd, void *to, size_t n, int flags), fd, to, n, flags)
DELAYED(ssize_t, send, (int fd, const void *from, size_t n, int flags), fd, from, n, flags)
DELAYED(ssize_t, recvmsg, (int fd, struct msghdr *m, int flags), fd, m, flags)
DELAYED(ssize_t, sendmsg, (int fd, const struct msghdr *m, int flags), fd, m, flags)
DELAYED(int, connect, (int fd, const struct sockaddr *to, socklen_t n), fd, to, n)
DELAYED(int, accept4, (int fd, struct sockaddr *from, socklen_t *n, int flags), fd, from, n, flags)
DELAYED(int, poll, (struct pollfd *fds, nfds_t n, int ms), fds, n, ms)
DELAYED(int, epoll_wait, (int fd, struct epoll_event *events, int n, int ms), fd, events, n, ms)
DELAYED(pid_t, waitpid, (pid_t pid, int *status, int options), pid, status, options)
