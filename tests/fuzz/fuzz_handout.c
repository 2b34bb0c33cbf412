/* The Unix socket that hands out shared memory: only the exact key gets the descriptor. And what a fetch may be handed instead of
 * sealed memory: nothing else is mapped. */
#include "fuzz.h"
#include "group/handout.h"

#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

static const cd_handout_key key = {{1, 2, 3}, {4, 5}};

static int dial(const uint8_t nonce[16])
{
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    int used = snprintf(at.sun_path + 1, sizeof at.sun_path - 1, "cdist-");
    for (int i = 0; i < 16; i++)
        used += snprintf(at.sun_path + 1 + used, sizeof at.sun_path - 1 - (size_t)used, "%02x", nonce[i]);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0);
    FUZZ_CHECK(fd >= 0);
    FUZZ_CHECK(connect(fd, (struct sockaddr *)&at, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)used)) == 0);
    return fd;
}

/* The request comes in two pieces, the second perhaps after others were served. */
static void request(const uint8_t *data, size_t bytes, size_t first)
{
    static uint8_t nonce[16];
    if (!nonce[0])
        snprintf((char *)nonce, sizeof nonce, "fuzz%d", (int)getpid());
    cd_handout *handout;
    cd_segment made;
    FUZZ_CHECK(cd_handout_open(nonce, &handout) == CD_OK && cd_segment_create(4096, &made) == CD_OK);
    FUZZ_CHECK(cd_handout_offer(handout, &key, made.fd) == CD_OK);
    int guest = dial(nonce);
    first = first < bytes ? first : bytes;
    send(guest, data, first, MSG_NOSIGNAL);
    cd_handout_serve(handout);
    send(guest, data + first, bytes - first, MSG_NOSIGNAL); /* fails when the first piece was served already */
    cd_handout_serve(handout);
    bool right = bytes >= sizeof key && memcmp(data, &key, sizeof key) == 0;
    int fd = -1;
    char mark;
    size_t got;
    bool served = cd_fd_recv(guest, &fd, &mark, 1, &got) == CD_OK;
    FUZZ_CHECK(served == right);
    if (served)
        close(fd);
    close(guest);
    cd_handout_serve(handout);
    cd_handout_withdraw(handout, &key);
    cd_handout_free(handout);
    cd_segment_free(&made);
}

/* A descriptor of one kind or another. */
static int made_up(uint8_t kind, uint8_t seals, size_t bytes)
{
    if (kind % 4 == 0)
        return open("/dev/zero", O_RDWR);
    if (kind % 4 == 1)
        return socket(AF_UNIX, SOCK_STREAM, 0);
    int fd = memfd_create("fuzz", kind % 4 == 2 ? MFD_ALLOW_SEALING : 0);
    FUZZ_CHECK(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0);
    (void)fcntl(fd, F_ADD_SEALS, seals & 15);
    return fd;
}

static void handed(const uint8_t *data, size_t bytes)
{
    int pair[2];
    FUZZ_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair) == 0);
    for (; bytes >= 4; data += 4, bytes -= 4) {
        size_t size = (size_t)data[2] * 256;
        int fd = made_up(data[0], data[1], size), come = -1;
        if (data[3] & 1)
            FUZZ_CHECK(cd_fd_send(pair[1], fd, data, 1) == CD_OK);
        else
            FUZZ_CHECK(send(pair[1], data, 1, MSG_NOSIGNAL) == 1);
        close(fd);
        char mark;
        size_t got;
        cd_segment segment;
        if (cd_fd_recv(pair[0], &come, &mark, 1, &got) != CD_OK)
            continue;
        FUZZ_CHECK(data[3] & 1);
        if (cd_segment_attach(come, &segment) != CD_OK)
            continue;
        FUZZ_CHECK(data[0] % 4 == 2 && (data[1] & 7) == 7 && segment.bytes == size);
        *((volatile char *)segment.base + size - 1) = 1; /* a write seal would have been refused, or faults here */
        cd_segment_free(&segment);
    }
    close(pair[0]);
    close(pair[1]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    if (bytes < 2 || bytes > 4096)
        return 0;
    if (data[0] & 1)
        request(data + 2, bytes - 2, data[1] % 34u);
    else
        handed(data + 1, bytes - 1);
    return 0;
}
