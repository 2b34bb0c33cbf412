/* Control frames and hellos from anyone who reaches the port: read by the greeter, and as the answers of rank 0; and what the
 * bodies of frames may make us believe. */
#include "fuzz.h"
#include "group/greeter.h"
#include "net/sock.h"

#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

static void greeted(void *ctx, int socket, cd_control_kind kind, const cd_hello *hello)
{
    (void)kind;
    FUZZ_CHECK(memchr(hello->me.address, 0, sizeof hello->me.address) && memchr(hello->me.host_name, 0, sizeof hello->me.host_name));
    ++*(int *)ctx;
    close(socket);
}

static void greet(const uint8_t *data, size_t bytes, const uint8_t *secret)
{
    static int listener = -1;
    static uint16_t port;
    if (listener < 0 && cd_sock_listen_range("127.0.0.1", &listener, &port) != CD_OK)
        __builtin_trap();
    cd_greeter *greeter;
    cd_patience patience = cd_patience_until(cd_deadline_after_ns(CD_NS_PER_S), 1);
    int guest, met = 0;
    if (cd_greeter_open(0, listener, secret, &greeter) != CD_OK || cd_sock_connect_once("127.0.0.1", port, &patience, &guest) != CD_OK)
        __builtin_trap();
    ssize_t sent = send(guest, data, bytes < 65536 ? bytes : 65536, MSG_NOSIGNAL | MSG_DONTWAIT);
    (void)sent;
    struct linger hard = {1, 0}; /* no TIME_WAIT for each input */
    (void)cd_greeter_serve(greeter, greeted, &met);
    setsockopt(guest, SOL_SOCKET, SO_LINGER, &hard, sizeof hard);
    close(guest);
    (void)cd_greeter_serve(greeter, greeted, &met);
    FUZZ_CHECK(!secret || met == 0); /* nobody guesses an HMAC */
    cd_greeter_free(greeter);
}

static void expect(const uint8_t *data, size_t bytes)
{
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair) != 0)
        __builtin_trap();
    ssize_t sent = send(pair[0], data, bytes < 65536 ? bytes : 65536, MSG_NOSIGNAL | MSG_DONTWAIT);
    (void)sent;
    close(pair[0]);
    cd_patience patience = cd_patience_until(cd_deadline_after_ns(CD_NS_PER_S), 1);
    uint8_t body[32];
    if (cd_control_expect(pair[1], CD_CONTROL_WELCOME, body, sizeof body, &patience) != CD_OK)
        FUZZ_CHECK(memchr(cd_last_error()->text, 0, sizeof cd_last_error()->text));
    else /* nothing but a whole answer is one */
        FUZZ_CHECK(bytes >= 48 && data[4] == CD_CONTROL_WELCOME && memcmp(body, data + 16, sizeof body) == 0);
    close(pair[1]);
}

/* Copies of what has come, zeroes behind it. */
static void fill(void *out, size_t room, const uint8_t *data, size_t bytes)
{
    memset(out, 0, room);
    memcpy(out, data, bytes < room ? bytes : room);
}

static void believe(const uint8_t *data, size_t bytes)
{
    cd_error error;
    fill(&error, sizeof error, data, bytes);
    cd_error_settle(&error);
    FUZZ_CHECK(memchr(error.text, 0, sizeof error.text) && error.code != CD_OK && error.code != CD_INTERRUPTED);
    FUZZ_CHECK(strcmp(cd_status_name(error.code), "unknown") != 0);
    enum { WORLD = 3 };
    cd_member table[WORLD], members[WORLD];
    fill(table, sizeof table, data, bytes);
    if (cd_members_take(members, table, WORLD) == CD_OK)
        for (int r = 0; r < WORLD; r++)
            FUZZ_CHECK(members[r].rank == r && memchr(members[r].address, 0, sizeof members[r].address) &&
                       memchr(members[r].host_name, 0, sizeof members[r].host_name));
    int32_t told[WORLD], host_of[WORLD] = {0, 0, 2};
    fill(told, sizeof told, data, bytes);
    if (cd_hosts_take(host_of, told, WORLD) == CD_OK)
        FUZZ_CHECK(host_of[0] == 0 && (host_of[1] == 0 || host_of[1] == 1) && host_of[2] == 2);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    static const uint8_t secret[32] = "a secret that no input can know";
    if (bytes < 1)
        return 0;
    if (data[0] & 4)
        believe(data + 1, bytes - 1);
    else if (data[0] & 1)
        greet(data + 1, bytes - 1, data[0] & 2 ? secret : NULL);
    else
        expect(data + 1, bytes - 1);
    return 0;
}
