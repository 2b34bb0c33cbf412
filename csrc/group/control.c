#include "group/control.h"

#include "net/sock.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>

/* Small frames go out in one piece. */
#define WHOLE_BYTES 2048

/* Not where the wait heard of another rank's end (cd_world_listening). */
static cd_status closed(cd_status status)
{
    return status == CD_PEER_LOST && cd_last_error()->rank < 0 ? cd_fail(CD_PEER_LOST, "the control connection was closed")
                                                                : status;
}

cd_status cd_control_send(int socket, cd_control_kind kind, const void *body, size_t bytes, const cd_patience *patience)
{
    cd_control_head head = {CD_CONTROL_MAGIC, (uint16_t)kind, 0, bytes};
    if (bytes <= WHOLE_BYTES) {
        char frame[sizeof head + WHOLE_BYTES];
        memcpy(frame, &head, sizeof head);
        if (bytes)
            memcpy(frame + sizeof head, body, bytes);
        return closed(cd_sock_send_all(socket, frame, sizeof head + bytes, patience));
    }
    CD_TRY(closed(cd_sock_send_all(socket, &head, sizeof head, patience)));
    return closed(cd_sock_send_all(socket, body, bytes, patience));
}

cd_status cd_control_recv_body(int socket, void *body, size_t bytes, const cd_patience *patience)
{
    return closed(cd_sock_recv_all(socket, body, bytes, patience));
}

cd_status cd_control_recv_head(int socket, cd_control_head *head, const cd_patience *patience)
{
    CD_TRY(cd_control_recv_body(socket, head, sizeof *head, patience));
    if (head->magic != CD_CONTROL_MAGIC || head->bytes > CD_CONTROL_MAX_BYTES)
        return cd_fail(CD_PROTOCOL, "control connection: the other end does not speak this protocol");
    return CD_OK;
}

void cd_error_settle(cd_error *error)
{
    error->text[sizeof error->text - 1] = 0;
    /* Ctrl-C is this process's own; it would promise an exception that nobody has set. */
    bool known = error->code >= CD_BAD_ARGUMENT && error->code <= CD_NETWORK && error->code != CD_INTERRUPTED &&
                 strcmp(cd_status_name(error->code), "unknown") != 0;
    if (!known)
        error->code = CD_PROTOCOL;
}

cd_status cd_control_recv_refusal(int socket, const cd_patience *patience)
{
    cd_error why;
    CD_TRY(cd_control_recv_body(socket, &why, sizeof why, patience));
    cd_error_settle(&why);
    return cd_fail_with(&why);
}

cd_status cd_control_expect(int socket, cd_control_kind kind, void *body, size_t bytes, const cd_patience *patience)
{
    cd_control_head head;
    CD_TRY(cd_control_recv_head(socket, &head, patience));
    if (head.kind == CD_CONTROL_REFUSED && head.bytes == sizeof(cd_error))
        return cd_control_recv_refusal(socket, patience);
    if (head.kind == CD_CONTROL_BYE && head.bytes == 0)
        return cd_fail(CD_PEER_LOST, "the other end gave up");
    if (head.kind != kind || head.bytes != bytes)
        return cd_fail(CD_PROTOCOL, "control connection: frame %d of %llu bytes instead of %d of %zu", head.kind,
                       (unsigned long long)head.bytes, (int)kind, bytes);
    return cd_control_recv_body(socket, body, bytes, patience);
}

bool cd_control_is_closed(int socket)
{
    char probe;
    ssize_t got = recv(socket, &probe, 1, MSG_PEEK | MSG_DONTWAIT);
    return got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR);
}
