/* The Unix socket that hands out shared memory: only the exact key gets the descriptor, whoever else asks, waits and goes
 * meanwhile. And what a fetch may be handed instead of sealed memory: nothing else is mapped. */
#include "fuzz.h"
#include "group/handout.h"

#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
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

static const uint8_t *own_nonce(void)
{
    static uint8_t nonce[16];
    if (!nonce[0])
        snprintf((char *)nonce, sizeof nonce, "fuzz%d", (int)getpid());
    return nonce;
}

/* The request comes in two pieces, the second perhaps after others were served. */
static void request(const uint8_t *data, size_t bytes, size_t first)
{
    const uint8_t *nonce = own_nonce();
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

/* ---- several guests and several pieces of memory ---- */

#define GUESTS 4
#define PIECES 3
#define OFFERS 6

typedef struct {
    int fd; /* −1: not here */
    cd_handout_key sent;
    size_t bytes;
    bool has_ended, has_got;
} guest;

typedef struct {
    cd_handout *handout;
    guest guests[GUESTS];
    cd_segment made[PIECES];
    int offers[OFFERS], count; /* pieces on offer, the newest last */
} party;

/* All keys are of one generation; the last two differ in their last byte alone. */
static cd_handout_key key_of(int piece)
{
    cd_handout_key it = key;
    it.key[1] += piece == 2 ? UINT64_C(1) << 56 : (uint64_t)piece;
    return it;
}

static int find_offer(const party *p, const cd_handout_key *asked)
{
    for (int i = p->count - 1; i >= 0; i--) {
        cd_handout_key offered = key_of(p->offers[i]);
        if (memcmp(&offered, asked, sizeof offered) == 0)
            return i;
    }
    return -1;
}

/* A whole key came. Who has closed its side then is taken for gone, unless more bytes came: nobody looks behind those. */
static bool has_asked(const guest *g)
{
    return g->bytes >= sizeof key && !(g->has_ended && g->bytes == sizeof key);
}

/* Whoever has asked for what is on offer now gets exactly that. */
static void expect_answers(party *p)
{
    for (guest *g = p->guests; g < p->guests + GUESTS; g++) {
        if (g->fd < 0 || g->has_got)
            continue;
        int at = has_asked(g) ? find_offer(p, &g->sent) : -1;
        int fd = -1;
        char mark;
        size_t got = 0;
        cd_status status = cd_fd_recv(g->fd, &fd, &mark, 1, &got);
        FUZZ_CHECK((status == CD_OK && fd >= 0) == (at >= 0));
        if (at < 0)
            continue;
        struct stat mine, theirs;
        FUZZ_CHECK(fstat(fd, &theirs) == 0 && fstat(p->made[p->offers[at]].fd, &mine) == 0 && mine.st_ino == theirs.st_ino);
        close(fd);
        g->has_got = true;
    }
}

static void say(guest *g, const uint8_t *data, size_t bytes)
{
    if (g->fd < 0 || g->has_ended || g->has_got || send(g->fd, data, bytes, MSG_NOSIGNAL) != (ssize_t)bytes)
        return;
    size_t room = sizeof g->sent > g->bytes ? sizeof g->sent - g->bytes : 0;
    memcpy((char *)&g->sent + (room ? g->bytes : 0), data, bytes < room ? bytes : room);
    g->bytes += bytes;
}

static void leave(guest *g)
{
    if (g->fd >= 0)
        close(g->fd);
    *g = (guest){.fd = -1};
}

/* One step: who, what, and with how much of which key. */
static void step(party *p, const uint8_t *data)
{
    guest *g = &p->guests[data[0] % GUESTS];
    int piece = data[1] % PIECES;
    cd_handout_key asked = key_of(piece);
    size_t from = g->bytes < sizeof asked ? g->bytes : 0, most = sizeof asked - from;
    switch (data[0] >> 2 & 7) {
    case 0:
        leave(g);
        g->fd = dial(own_nonce());
        break;
    case 1: say(g, (const uint8_t *)&asked + from, (data[1] >> 2) % (most + 1)); break; /* goes on with it */
    case 2: say(g, (const uint8_t *)&asked + from, most); break;
    case 3: say(g, data, 2); break;
    case 4:
        if (g->fd >= 0 && !g->has_ended) {
            shutdown(g->fd, SHUT_WR);
            g->has_ended = true;
        }
        break;
    case 5: leave(g); break;
    case 6:
        if (p->count < OFFERS) {
            FUZZ_CHECK(cd_handout_offer(p->handout, &asked, p->made[piece].fd) == CD_OK);
            p->offers[p->count++] = piece;
        }
        break;
    default: {
        int at = find_offer(p, &asked);
        cd_handout_withdraw(p->handout, &asked);
        if (at >= 0)
            memmove(&p->offers[at], &p->offers[at + 1], (size_t)(--p->count - at) * sizeof *p->offers);
    }
    }
}

static void crowd(const uint8_t *data, size_t bytes)
{
    party p = {0};
    FUZZ_CHECK(cd_handout_open(own_nonce(), &p.handout) == CD_OK);
    for (int i = 0; i < GUESTS; i++)
        p.guests[i].fd = -1;
    for (int i = 0; i < PIECES; i++)
        FUZZ_CHECK(cd_segment_create(4096, &p.made[i]) == CD_OK);
    for (; bytes >= 2; data += 2, bytes -= 2) {
        step(&p, data);
        if (data[1] & 128) /* otherwise more happens before the monitor comes round */
            continue;
        cd_handout_serve(p.handout);
        expect_answers(&p);
    }
    for (int i = 0; i < GUESTS; i++)
        leave(&p.guests[i]);
    cd_handout_free(p.handout);
    for (int i = 0; i < PIECES; i++)
        cd_segment_free(&p.made[i]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    if (bytes < 2 || bytes > 4096)
        return 0;
    if (data[0] & 2)
        crowd(data + 1, bytes - 1 < 256 ? bytes - 1 : 256);
    else if (data[0] & 1)
        request(data + 2, bytes - 2, data[1] % 34u);
    else
        handed(data + 1, bytes - 1);
    return 0;
}
