#include "group/handout.h"

#include "base/host.h"
#include "net/sock.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

typedef struct offer {
    struct offer *next;
    cd_handout_key key;
    int fd;
} offer;

typedef struct request {
    struct request *next;
    int socket;
    size_t got;
    cd_handout_key key;
} request;

struct cd_handout {
    int listener;
    int spare; /* to tell who asks when there is no descriptor left */
    pthread_mutex_t lock; /* offers; requests are the monitor's alone */
    offer *offers;
    request *requests;
};

static socklen_t name_of(const uint8_t nonce[16], struct sockaddr_un *address)
{
    *address = (struct sockaddr_un){.sun_family = AF_UNIX};
    char *text = address->sun_path + 1; /* a leading NUL: the abstract name space */
    int used = snprintf(text, sizeof address->sun_path - 1, "cdist-");
    for (int i = 0; i < 16; i++)
        used += snprintf(text + used, sizeof address->sun_path - 1 - (size_t)used, "%02x", nonce[i]);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)used);
}

cd_status cd_handout_open(const uint8_t nonce[16], cd_handout **out)
{
    cd_handout *handout = calloc(1, sizeof *handout);
    if (!handout)
        return cd_fail(CD_NO_MEMORY, "no memory for the descriptor service");
    struct sockaddr_un address;
    socklen_t bytes = name_of(nonce, &address);
    handout->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (handout->listener < 0 || bind(handout->listener, (struct sockaddr *)&address, bytes) != 0 ||
        listen(handout->listener, SOMAXCONN) != 0) {
        cd_status status = cd_fail_errno(CD_NETWORK, errno, "cannot listen on a Unix socket");
        if (handout->listener >= 0)
            close(handout->listener);
        free(handout);
        return status;
    }
    handout->spare = cd_host_spare_file();
    pthread_mutex_init(&handout->lock, 0);
    *out = handout;
    return CD_OK;
}

void cd_handout_free(cd_handout *handout)
{
    if (!handout)
        return;
    close(handout->listener);
    if (handout->spare >= 0)
        close(handout->spare);
    while (handout->offers) {
        offer *next = handout->offers->next;
        free(handout->offers);
        handout->offers = next;
    }
    while (handout->requests) {
        request *next = handout->requests->next;
        close(handout->requests->socket);
        free(handout->requests);
        handout->requests = next;
    }
    pthread_mutex_destroy(&handout->lock);
    free(handout);
}

cd_status cd_handout_offer(cd_handout *handout, const cd_handout_key *key, int fd)
{
    offer *made = malloc(sizeof *made);
    if (!made)
        return cd_fail(CD_NO_MEMORY, "no memory to offer shared memory");
    *made = (offer){.key = *key, .fd = fd};
    pthread_mutex_lock(&handout->lock);
    made->next = handout->offers;
    handout->offers = made;
    pthread_mutex_unlock(&handout->lock);
    return CD_OK;
}

void cd_handout_withdraw(cd_handout *handout, const cd_handout_key *key)
{
    pthread_mutex_lock(&handout->lock);
    for (offer **link = &handout->offers; *link; link = &(*link)->next)
        if (memcmp(&(*link)->key, key, sizeof *key) == 0) {
            offer *gone = *link;
            *link = gone->next;
            free(gone);
            break;
        }
    pthread_mutex_unlock(&handout->lock);
}

int cd_handout_poll_set(cd_handout *handout, struct pollfd *entries, int room)
{
    int count = 0;
    if (count < room)
        entries[count++] = (struct pollfd){.fd = handout->listener, .events = POLLIN};
    for (request *r = handout->requests; r && count < room; r = r->next)
        entries[count++] = (struct pollfd){.fd = r->socket, .events = r->got < sizeof r->key ? POLLIN : 0};
    return count;
}

static bool same_user(int socket)
{
    struct ucred peer;
    socklen_t bytes = sizeof peer;
    return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 && peer.uid == geteuid();
}

/* What is sent in place of a descriptor: there is none left to accept connections with. */
#define NO_DESCRIPTOR 'n'

static void tell_full(void *ctx, int socket)
{
    (void)ctx;
    char answer = NO_DESCRIPTOR; /* into an empty buffer */
    (void)send(socket, &answer, 1, MSG_NOSIGNAL);
}

static void accept_requests(cd_handout *handout)
{
    for (;;) {
        int socket = accept4(handout->listener, 0, 0, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (socket < 0 && (errno == EMFILE || errno == ENFILE))
            cd_sock_turn_away(handout->listener, &handout->spare, tell_full, 0);
        if (socket < 0)
            return;
        request *made = same_user(socket) ? calloc(1, sizeof *made) : 0;
        if (!made) {
            close(socket);
            continue;
        }
        made->socket = socket;
        made->next = handout->requests;
        handout->requests = made;
    }
}

/* True when the request is over: answered, or its sender is gone. */
static bool serve_one(cd_handout *handout, request *r)
{
    if (r->got < sizeof r->key) {
        ssize_t got = recv(r->socket, (char *)&r->key + r->got, sizeof r->key - r->got, 0);
        if (got <= 0)
            return got == 0 || (errno != EAGAIN && errno != EINTR);
        r->got += (size_t)got;
        if (r->got < sizeof r->key)
            return false;
    }
    char probe;
    if (recv(r->socket, &probe, 1, MSG_PEEK) == 0)
        return true;
    bool served = false;
    pthread_mutex_lock(&handout->lock);
    for (offer *o = handout->offers; o && !served; o = o->next)
        if (memcmp(&o->key, &r->key, sizeof o->key) == 0) {
            /* A fresh socket's buffer has room for one byte and a descriptor: this cannot block. */
            (void)cd_fd_send(r->socket, o->fd, "m", 1);
            served = true;
        }
    pthread_mutex_unlock(&handout->lock);
    return served;
}

void cd_handout_serve(cd_handout *handout)
{
    accept_requests(handout);
    request **link = &handout->requests;
    while (*link) {
        request *r = *link;
        if (!serve_one(handout, r)) {
            link = &r->next;
            continue;
        }
        *link = r->next;
        close(r->socket);
        free(r);
    }
}

static cd_status receive_segment(int socket, const cd_patience *patience, cd_segment *out)
{
    cd_waiter waiter = cd_waiter_start(patience);
    for (;;) {
        struct pollfd entry = {.fd = socket, .events = POLLIN};
        if (poll(&entry, 1, waiter.napping ? cd_waiter_nap_ms(&waiter) : 0) > 0)
            break;
        CD_TRY(waiter.napping ? cd_waiter_check(&waiter) : cd_waiter_turn(&waiter));
    }
    int fd;
    char mark = 0;
    size_t got;
    cd_status status = cd_fd_recv(socket, &fd, &mark, 1, &got);
    if (status == CD_OK)
        return cd_segment_attach(fd, out);
    if (mark == NO_DESCRIPTOR)
        return cd_fail(CD_NETWORK, "the rank that makes the host's shared memory may open no further file: ulimit -n raises it");
    return status;
}

cd_status cd_handout_fetch(const uint8_t nonce[16], const cd_handout_key *key, const cd_patience *patience, cd_segment *out)
{
    struct sockaddr_un address;
    socklen_t bytes = name_of(nonce, &address);
    int socket_fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (socket_fd < 0)
        return cd_fail_errno(CD_NETWORK, errno, "cannot make a Unix socket");
    cd_waiter waiter = cd_waiter_start(patience);
    cd_status status = CD_OK;
    /* A Unix connect ends at once: queued in the backlog, refused, or EAGAIN while the backlog is full. */
    while (status == CD_OK && connect(socket_fd, (struct sockaddr *)&address, bytes) != 0)
        status = errno == EAGAIN
                     ? cd_waiter_turn(&waiter)
                     : cd_fail_errno(CD_NOT_FOUND, errno, "shared memory: nobody hands it out in this network namespace");
    if (status == CD_OK && send(socket_fd, key, sizeof *key, MSG_NOSIGNAL) != (ssize_t)sizeof *key)
        status = cd_fail_errno(CD_PEER_LOST, errno, "shared memory: the rank that made it closed the connection");
    if (status == CD_OK)
        status = receive_segment(socket_fd, patience, out);
    close(socket_fd);
    return status;
}
