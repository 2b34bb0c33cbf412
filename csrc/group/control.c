#include "group/control.h"

#include "net/sock.h"

#include <string.h>

/* Small frames go out in one piece. */
#define WHOLE_BYTES 2048

static cd_status closed(cd_status status)
{
    return status == CD_PEER_LOST ? cd_fail(CD_PEER_LOST, "the control connection was closed") : status;
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

cd_status cd_control_expect(int socket, cd_control_kind kind, void *body, size_t bytes, const cd_patience *patience)
{
    cd_control_head head;
    CD_TRY(cd_control_recv_head(socket, &head, patience));
    if (head.kind == CD_CONTROL_REFUSED && head.bytes == sizeof(cd_error)) {
        cd_error error;
        CD_TRY(cd_control_recv_body(socket, &error, sizeof error, patience));
        error.text[sizeof error.text - 1] = 0;
        return cd_fail_with(&error);
    }
    if (head.kind != kind || head.bytes != bytes)
        return cd_fail(CD_PROTOCOL, "control connection: frame %d of %llu bytes instead of %d of %zu", head.kind,
                       (unsigned long long)head.bytes, (int)kind, bytes);
    return cd_control_recv_body(socket, body, bytes, patience);
}
