/* Answers of a store that sends anything: the client takes or refuses them, and never believes a length that has not come. */
#include "fuzz.h"
#include "store/client_impl.h"

#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* A connection on which all of `data` has come already, and nothing more will. */
static int answered(const uint8_t *data, size_t bytes, int *other_p)
{
    int pair[2], room = 1 << 20;
    FUZZ_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair) == 0);
    setsockopt(pair[1], SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
    ssize_t sent = bytes ? send(pair[1], data, bytes < 65536 ? bytes : 65536, MSG_NOSIGNAL) : 0;
    (void)sent;
    shutdown(pair[1], SHUT_WR);
    *other_p = pair[1];
    return pair[0];
}

/* As cd_tcp_store_open leaves it, with the connection for waits opened too. */
static tcp_store *make_client(int quick, int waiting)
{
    static const char host[] = "127.0.0.1";
    tcp_store *s = calloc(1, sizeof *s + sizeof host);
    tcp_line *line = calloc(1, sizeof *line);
    if (!s || !line)
        __builtin_trap();
    cd_store_init(&s->base, &tcp_ops);
    memcpy(s->host, host, sizeof host);
    s->pid = getpid();
    s->quick.fd = quick;
    line->fd = waiting;
    s->idle = line;
    s->idle_count = 1;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->quick_free, NULL);
    return s;
}

static void look_at(cd_buffer *buffers, size_t count)
{
    static volatile uint8_t sum;
    for (size_t i = 0; i < count; i++) {
        FUZZ_CHECK(buffers[i].data || !buffers[i].bytes);
        for (size_t j = 0; j < buffers[i].bytes; j++)
            sum = (uint8_t)(sum + ((uint8_t *)buffers[i].data)[j]);
        free(buffers[i].data);
    }
}

static void ask(cd_store *s, int which, const cd_patience *patience)
{
    cd_bytes keys[2] = {cd_bytes_of("a"), cd_bytes_of("bc")};
    cd_buffer got[2] = {{0}}, *list = NULL;
    size_t count = 0;
    int64_t number;
    bool flag;
    switch (which % 8) {
    case 0: look_at(got, s->ops->get(s, keys[0], got, patience) == CD_OK); break;
    case 1: look_at(got, s->ops->multi_get(s, keys, 2, got, patience) == CD_OK ? 2 : 0); break;
    case 2:
        if (s->ops->list_keys(s, &list, &count, patience) == CD_OK) {
            look_at(list, count);
            free(list);
        }
        break;
    case 3: look_at(got, s->ops->queue_pop(s, keys[0], false, got, patience) == CD_OK); break;
    case 4: look_at(got, s->ops->compare_set(s, keys[0], keys[1], keys[1], got, patience) == CD_OK); break;
    case 5: s->ops->wait(s, keys, 2, patience); break;
    case 6: s->ops->add(s, keys[0], 1, &number, patience); break;
    default: s->ops->delete_key(s, keys[0], &flag, patience);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    if (bytes < 2)
        return 0;
    int which = data[0], others[2];
    size_t for_wait = data[1] % 4;
    data += 2;
    bytes -= 2;
    for_wait = for_wait < bytes ? for_wait : bytes;
    int waiting = answered(data, for_wait, &others[1]);
    int quick = answered(data + for_wait, bytes - for_wait, &others[0]);
    cd_patience patience = cd_patience_until(cd_deadline_after_ns(CD_NS_PER_S), 1);
    tcp_store *s = make_client(quick, waiting);
    ask(&s->base, which, &patience);
    FUZZ_CHECK(!s->quick_busy);
    tcp_free(&s->base);
    close(others[0]);
    close(others[1]);
    return 0;
}
