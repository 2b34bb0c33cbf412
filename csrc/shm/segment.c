#include "shm/segment.h"

#include "base/attr.h"
#include "base/host.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

/* Nobody may shrink what others have mapped (SIGBUS), nor lift that promise. */
#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)

/* Addresses for a large segment such that a huge page of the file can be mapped as one; NULL: any will do. The kernel looks after
 * that by itself only where it gives out huge pages of shared memory by itself. */
static void *huge_addresses(size_t bytes)
{
    size_t huge = CD_SEGMENT_HUGE_BYTES;
    if (bytes < huge || bytes > SIZE_MAX - huge)
        return NULL;
    char *room = mmap(NULL, bytes + huge, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if ((void *)room == MAP_FAILED)
        return NULL;
    size_t page = cd_host_page_bytes(), before = (huge - (uintptr_t)room % huge) % huge, kept = cd_round_up(bytes, page);
    if (before)
        munmap(room, before);
    if (huge - before > kept - bytes)
        munmap(room + before + kept, huge - before - (kept - bytes));
    return room + before;
}

static cd_status map(cd_segment *segment)
{
    void *room = huge_addresses(segment->bytes);
    void *base = mmap(room, segment->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | (room ? MAP_FIXED : 0), segment->fd, 0);
    /* The addresses are left then: whether they are still ours nobody can say. */
    if (base == MAP_FAILED)
        return cd_fail_errno(errno == ENOMEM ? CD_NO_MEMORY : CD_IO, errno,
                             "shared memory: mapping %zu bytes", segment->bytes);
    segment->base = base;
    return CD_OK;
}

cd_status cd_segment_create(size_t bytes, cd_segment *out)
{
    cd_segment made = {.bytes = bytes, .fd = -1};
    if (bytes == 0)
        return cd_fail(CD_BAD_ARGUMENT, "shared memory: a segment of 0 bytes");
    made.fd = memfd_create("cdist", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (made.fd < 0)
        return cd_fail_errno(CD_IO, errno, "shared memory: memfd_create%s",
                             errno == EMFILE || errno == ENFILE ? "" : " (CDIST_TRANSPORT=tcp does without)");
    cd_status status;
    if (ftruncate(made.fd, (off_t)bytes) != 0)
        status = cd_fail_errno(CD_NO_MEMORY, errno, "shared memory: making %zu bytes%s", bytes,
                               errno != EFBIG ? "" : " (the limit of file sizes counts here too: ulimit -f unlimited lifts it, "
                                                     "CDIST_TRANSPORT=tcp does without)");
    else if (fcntl(made.fd, F_ADD_SEALS, SEALS) != 0)
        status = cd_fail_errno(CD_IO, errno, "shared memory: sealing");
    else
        status = map(&made);
    if (status != CD_OK) {
        cd_segment_free(&made);
        return status;
    }
    *out = made;
    return CD_OK;
}

static cd_status check_attached(cd_segment *segment)
{
    struct stat facts;
    if (fstat(segment->fd, &facts) != 0)
        return cd_fail_errno(CD_IO, errno, "shared memory: the descriptor received");
    int seals = fcntl(segment->fd, F_GET_SEALS);
    if (seals < 0 || (seals & SEALS) != SEALS)
        return cd_fail(CD_PROTOCOL, "shared memory: the descriptor received is no sealed memfd");
    if (facts.st_size <= 0)
        return cd_fail(CD_PROTOCOL, "shared memory: the segment received is empty");
    segment->bytes = (size_t)facts.st_size;
    return CD_OK;
}

cd_status cd_segment_attach(int fd, cd_segment *out)
{
    cd_segment found = {.fd = fd};
    cd_status status = check_attached(&found);
    if (status == CD_OK)
        status = map(&found);
    if (status != CD_OK) {
        cd_segment_free(&found);
        return status;
    }
    *out = found;
    return CD_OK;
}

void cd_segment_free(cd_segment *segment)
{
    /* fd 0 is taken for the zero object; a process whose standard input is closed leaks at most that descriptor. */
    if (segment->base)
        munmap(segment->base, segment->bytes);
    if (segment->fd > 0)
        close(segment->fd);
    *segment = (cd_segment){.fd = -1};
}

cd_status cd_fd_send(int socket, int fd, const void *bytes, size_t count)
{
    union {
        struct cmsghdr header;
        char room[CMSG_SPACE(sizeof(int))];
    } control;
    memset(&control, 0, sizeof control);
    struct iovec piece = {.iov_base = (void *)(uintptr_t)bytes, .iov_len = count};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1, .msg_control = &control,
                             .msg_controllen = sizeof control};
    struct cmsghdr *entry = CMSG_FIRSTHDR(&message);
    entry->cmsg_level = SOL_SOCKET;
    entry->cmsg_type = SCM_RIGHTS;
    entry->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(entry), &fd, sizeof fd);
    if (count == 0)
        return cd_fail(CD_BAD_ARGUMENT, "a descriptor travels with at least one byte");
    ssize_t sent;
    do
        sent = sendmsg(socket, &message, MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    if (sent < 0)
        return cd_fail_errno(CD_IO, errno, "passing a descriptor to a local rank");
    if ((size_t)sent != count)
        return cd_fail(CD_IO, "passing a descriptor to a local rank: %zd of %zu bytes were sent", sent, count);
    return CD_OK;
}

/* The first descriptor of a message; further ones, which nobody asked for, are closed. */
static int take_descriptors(struct msghdr *message)
{
    int first = -1;
    for (struct cmsghdr *entry = CMSG_FIRSTHDR(message); entry; entry = CMSG_NXTHDR(message, entry)) {
        if (entry->cmsg_level != SOL_SOCKET || entry->cmsg_type != SCM_RIGHTS)
            continue;
        size_t count = (entry->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < count; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(entry) + i * sizeof fd, sizeof fd);
            if (first < 0)
                first = fd;
            else
                close(fd);
        }
    }
    return first;
}

cd_status cd_fd_recv(int socket, int *fd_p, void *bytes, size_t count, size_t *got_p)
{
    union {
        struct cmsghdr header;
        char room[CMSG_SPACE(4 * sizeof(int))];
    } control;
    struct iovec piece = {.iov_base = bytes, .iov_len = count};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1, .msg_control = &control,
                             .msg_controllen = sizeof control};
    ssize_t got;
    do
        got = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
    while (got < 0 && errno == EINTR);
    if (got < 0)
        return cd_fail_errno(errno == ECONNRESET ? CD_PEER_LOST : CD_IO, errno, "receiving a descriptor from a local rank");
    int fd = take_descriptors(&message);
    if (got == 0 || fd < 0 || (message.msg_flags & MSG_CTRUNC)) {
        if (fd >= 0)
            close(fd);
        if (got > 0 && (message.msg_flags & MSG_CTRUNC)) /* the kernel had no number to put it under */
            return cd_fail_errno(CD_NO_MEMORY, EMFILE, "receiving a descriptor from a local rank");
        return got == 0 ? cd_fail(CD_PEER_LOST, "receiving a descriptor: the local rank closed the socket")
                        : cd_fail(CD_IO, "receiving a descriptor: the message carried none");
    }
    *fd_p = fd;
    *got_p = (size_t)got;
    return CD_OK;
}
