/* Segments: made, passed to another process by socket, sealed; descriptors travel or fail with a reason. */
#include "check.h"

#include "shm/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static int open_descriptors(void)
{
    int open = 0;
    for (int fd = 0; fd < 256; fd++)
        open += fcntl(fd, F_GETFD) >= 0;
    return open;
}

static void child_writes(int socket)
{
    int fd;
    char word[8] = "";
    size_t got;
    cd_segment segment;
    CHECK_OK(cd_fd_recv(socket, &fd, word, sizeof word, &got));
    CHECK(got == 3 && memcmp(word, "abc", 3) == 0);
    CHECK(fcntl(fd, F_GETFD) & FD_CLOEXEC);
    CHECK_OK(cd_segment_attach(fd, &segment));
    CHECK(segment.bytes == 3 * 4096 + 5);
    CHECK(((char *)segment.base)[0] == 1);
    ((char *)segment.base)[segment.bytes - 1] = 42;
    cd_segment_free(&segment);
    _exit(0);
}

static void test_two_processes_share(void)
{
    int pair[2], state;
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    cd_segment segment;
    CHECK_OK(cd_segment_create(3 * 4096 + 5, &segment));
    for (size_t i = 0; i < segment.bytes; i++)
        CHECK(((char *)segment.base)[i] == 0);
    ((char *)segment.base)[0] = 1;
    pid_t child = fork();
    if (child == 0)
        child_writes(pair[1]);
    CHECK_OK(cd_fd_send(pair[0], segment.fd, "abc", 3));
    CHECK(waitpid(child, &state, 0) == child && state == 0);
    CHECK(((char *)segment.base)[segment.bytes - 1] == 42);
    CHECK(ftruncate(segment.fd, 1) != 0 && ftruncate(segment.fd, 1 << 20) != 0);
    cd_segment_free(&segment);
    close(pair[0]);
    close(pair[1]);
}

static void test_refusals(void)
{
    cd_segment segment;
    CHECK_FAILS(cd_segment_create(0, &segment), CD_BAD_ARGUMENT);
    CHECK_FAILS(cd_segment_create(SIZE_MAX / 2, &segment), CD_NO_MEMORY);
    CHECK(strstr(cd_last_error()->text, "shared memory"));
    int unsealed = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK(ftruncate(unsealed, 4096) == 0);
    CHECK_FAILS(cd_segment_attach(unsealed, &segment), CD_PROTOCOL);
    CHECK(fcntl(unsealed, F_GETFD) < 0);
    int pipes[2];
    CHECK(pipe(pipes) == 0);
    close(pipes[1]);
    CHECK_FAILS(cd_segment_attach(pipes[0], &segment), CD_PROTOCOL);
    CHECK_FAILS(cd_segment_attach(-1, &segment), CD_IO);
    cd_segment zero = {0};
    cd_segment_free(&zero);
    cd_segment_free(&zero);
}

static void test_messages_without_descriptor(void)
{
    int pair[2], fd;
    char byte;
    size_t got;
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    CHECK(write(pair[0], "x", 1) == 1);
    CHECK_FAILS(cd_fd_recv(pair[1], &fd, &byte, 1, &got), CD_IO);
    CHECK_FAILS(cd_fd_send(pair[0], 0, "", 0), CD_BAD_ARGUMENT);
    CHECK_FAILS(cd_fd_send(pair[0], 999, "x", 1), CD_IO);
    CHECK(byte == 'x');
    close(pair[0]);
    CHECK_FAILS(cd_fd_recv(pair[1], &fd, &byte, 1, &got), CD_PEER_LOST);
    CHECK(strstr(cd_last_error()->text, "closed"));
    CHECK_FAILS(cd_fd_send(pair[1], 0, "x", 1), CD_IO);
    close(pair[1]);
}

int main(void)
{
    int before = open_descriptors();
    test_two_processes_share();
    test_refusals();
    test_messages_without_descriptor();
    CHECK(open_descriptors() == before);
    puts("shm segment: ok");
    return 0;
}
