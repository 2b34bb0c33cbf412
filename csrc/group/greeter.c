#include "group/greeter.h"

#include "base/clock.h"
#include "base/host.h"
#include "base/log.h"
#include "net/sock.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define SILENCE_NS (10 * CD_NS_PER_S)
/* Between two lines about strangers: a rank with the wrong secret knocks many times a second. */
#define WARN_NS (5 * CD_NS_PER_S)
/* More than ranks dial at once; beyond it, the kernel's backlog queues. */
#define GUESTS_MAX 1024

typedef struct {
    int socket;
    size_t got;
    uint64_t since_ns;
    struct {
        cd_control_head head;
        cd_hello hello;
    } frame;
} guest;

struct cd_greeter {
    int rank, listener;
    int spare; /* to tell who dials when there is no descriptor left */
    bool has_secret;
    uint8_t secret[32];
    uint64_t next_warning_ns;
    int count;
    guest guests[GUESTS_MAX];
};

cd_status cd_greeter_open(int rank, int listener, const uint8_t *secret, cd_greeter **out)
{
    cd_greeter *greeter = calloc(1, sizeof *greeter);
    if (!greeter)
        return cd_fail(CD_NO_MEMORY, "no memory to accept connections");
    greeter->rank = rank;
    greeter->listener = listener;
    greeter->spare = cd_host_spare_file();
    greeter->has_secret = secret != 0;
    if (secret)
        memcpy(greeter->secret, secret, sizeof greeter->secret);
    *out = greeter;
    return CD_OK;
}

void cd_greeter_free(cd_greeter *greeter)
{
    if (!greeter)
        return;
    for (int i = 0; i < greeter->count; i++)
        close(greeter->guests[i].socket);
    if (greeter->spare >= 0)
        close(greeter->spare);
    free(greeter);
}

int cd_greeter_poll_set(cd_greeter *greeter, struct pollfd *entries, int room)
{
    int count = 0;
    if (count < room && greeter->count < GUESTS_MAX)
        entries[count++] = (struct pollfd){.fd = greeter->listener, .events = POLLIN};
    for (int i = 0; i < greeter->count && count < room; i++)
        entries[count++] = (struct pollfd){.fd = greeter->guests[i].socket, .events = POLLIN};
    return count;
}

static void tell_full(void *ctx, int socket)
{
    /* The socket is new, its buffer empty: this does not block. What came on it is read: else closing it would take the answer
     * back. */
    char hello[sizeof ((guest *)0)->frame];
    cd_patience brief = cd_patience_until(cd_deadline_after_ns(10 * CD_NS_PER_MS), 1);
    (void)cd_control_send(socket, CD_CONTROL_REFUSED, ctx, sizeof(cd_error), &brief);
    (void)cd_sock_recv_all(socket, hello, sizeof hello, &brief);
}

/* Tells all that wait to be accepted why they are not; CD_OK: nobody does. The kernel looks for a descriptor before it looks for
 * a connection. */
static cd_status turn_away(cd_greeter *greeter)
{
    cd_fail_prefix("rank %d takes no further connection: ", greeter->rank);
    cd_error why = *cd_last_error();
    why.rank = greeter->rank;
    why.code = CD_NETWORK;
    return cd_sock_turn_away(greeter->listener, &greeter->spare, tell_full, &why) ? cd_fail_with(&why) : CD_OK;
}

static cd_status accept_guests(cd_greeter *greeter)
{
    while (greeter->count < GUESTS_MAX) {
        int socket;
        cd_status status = cd_sock_accept(greeter->listener, &socket);
        /* Strangers that are silent are dropped in time, and leave room. */
        if (status == CD_NO_MEMORY && greeter->count == 0)
            return turn_away(greeter);
        if (status != CD_OK || socket < 0)
            break;
        greeter->guests[greeter->count++] = (guest){.socket = socket, .since_ns = cd_now_ns()};
    }
    return CD_OK;
}

enum verdict { WAITING, COMPLETE, DROP };

static void warn_of(cd_greeter *greeter, const guest *g)
{
    uint64_t now = cd_now_ns();
    if (now < greeter->next_warning_ns)
        return;
    greeter->next_warning_ns = now + WARN_NS;
    cd_log(CD_LOG_WARN, "refused a connection that does not know the job secret (claims to be rank %d)", g->frame.hello.me.rank);
}

static enum verdict read_guest(cd_greeter *greeter, guest *g)
{
    while (g->got < sizeof g->frame) {
        ssize_t got = recv(g->socket, (char *)&g->frame + g->got, sizeof g->frame - g->got, 0);
        if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR))
            return DROP;
        if (got < 0)
            return cd_now_ns() - g->since_ns > SILENCE_NS ? DROP : WAITING;
        g->got += (size_t)got;
        if (g->got >= sizeof g->frame.head && (g->frame.head.magic != CD_CONTROL_MAGIC ||
                                               g->frame.head.bytes != sizeof g->frame.hello))
            return DROP;
    }
    if (!cd_hello_is_genuine(&g->frame.hello, greeter->has_secret ? greeter->secret : 0)) {
        warn_of(greeter, g);
        return DROP;
    }
    return COMPLETE;
}

cd_status cd_greeter_serve(cd_greeter *greeter, cd_greeted_func greeted, void *ctx)
{
    cd_status accepted = accept_guests(greeter);
    cd_error why = *cd_last_error();
    for (int i = 0; i < greeter->count;) {
        guest *g = &greeter->guests[i];
        enum verdict verdict = read_guest(greeter, g);
        if (verdict == WAITING) {
            i++;
            continue;
        }
        guest done = *g;
        *g = greeter->guests[--greeter->count];
        if (verdict == DROP) {
            close(done.socket);
            continue;
        }
        /* Texts from the network end where we say. */
        cd_member *member = &done.frame.hello.me;
        member->boot_id[sizeof member->boot_id - 1] = 0;
        member->address[sizeof member->address - 1] = 0;
        member->host_name[sizeof member->host_name - 1] = 0;
        greeted(ctx, done.socket, (cd_control_kind)done.frame.head.kind, &done.frame.hello);
    }
    return accepted == CD_OK ? CD_OK : cd_fail_with(&why);
}
