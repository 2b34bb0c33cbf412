/* Sockets: listening, connecting, moving bytes; the preamble; SHA-256 and HMAC against published vectors. */
#include "check.h"

#include "base/hmac.h"
#include "base/wire.h"
#include "net/addr.h"
#include "net/auth.h"
#include "net/sock.h"

#include <errno.h>
#include <sys/socket.h>
#include <unistd.h>

static cd_patience within_ms(uint64_t ms)
{
    return cd_patience_until(cd_deadline_after_ns(ms * CD_NS_PER_MS), 1);
}

static void check_hex(const uint8_t *have, const char *want)
{
    char text[65] = "";
    for (int i = 0; i < 32; i++)
        sprintf(text + 2 * i, "%02x", have[i]);
    CHECK(strcmp(text, want) == 0);
}

static void test_hashes_match_published_vectors(void)
{
    uint8_t out[32];
    cd_sha256 hash;
    cd_sha256_start(&hash);
    cd_sha256_add(&hash, "abc", 3);
    cd_sha256_finish(&hash, out);
    check_hex(out, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    cd_sha256_start(&hash);
    for (int i = 0; i < 1000000; i++)
        cd_sha256_add(&hash, "a", 1);
    cd_sha256_finish(&hash, out);
    check_hex(out, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
    /* RFC 4231, cases 2 and 6 */
    cd_hmac_sha256("Jefe", 4, "what do ya want for nothing?", 28, out);
    check_hex(out, "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    uint8_t key[131];
    memset(key, 0xaa, sizeof key);
    const char *text = "Test Using Larger Than Block-Size Key - Hash Key First";
    cd_hmac_sha256(key, sizeof key, text, strlen(text), out);
    check_hex(out, "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
    CHECK(cd_hmac_equal("abc", "abc", 3) && !cd_hmac_equal("abc", "abd", 3));
}

static void test_cursors_cannot_overrun(void)
{
    uint8_t room[24];
    cd_writer writer = cd_writer_of(room, sizeof room);
    cd_put_u32(&writer, 0x01020304);
    cd_put_string(&writer, "key", 3);
    CHECK(!writer.broken && writer.next - room == 15 && room[0] == 4);
    cd_put_string(&writer, "too long", 8);
    CHECK(writer.broken);
    cd_reader reader = cd_reader_of(room, 15);
    size_t bytes;
    CHECK(cd_take_u32(&reader) == 0x01020304);
    CHECK(memcmp(cd_take_string(&reader, 8, &bytes), "key", 3) == 0 && bytes == 3);
    CHECK(cd_take_u8(&reader) == 0 && reader.broken && cd_take_u64(&reader) == 0);
    memset(room, 0xff, sizeof room);
    reader = cd_reader_of(room, sizeof room);
    CHECK(!cd_take_string(&reader, UINT64_MAX, &bytes) && reader.broken && bytes == 0);
}

/* A connected pair; the listener is closed. */
static void connect_pair(const char *host, int *client_p, int *server_p)
{
    cd_patience patience = within_ms(5000);
    int listener;
    uint16_t port;
    CHECK_OK(cd_sock_listen(host, 0, &listener, &port));
    CHECK(port != 0);
    CHECK_OK(cd_sock_connect(host, port, &patience, client_p));
    *server_p = -1;
    while (*server_p < 0)
        CHECK_OK(cd_sock_accept(listener, server_p));
    char a[CD_SOCK_TEXT_BYTES], b[CD_SOCK_TEXT_BYTES];
    CHECK(strcmp(cd_sock_peer_text(*client_p, a), cd_sock_local_text(*server_p, b)) == 0);
    close(listener);
}

static void test_loopback_of_both_families(void)
{
    const char *hosts[] = {"127.0.0.1", "localhost", "::1"};
    for (int i = 0; i < 3; i++) {
        int client, server;
        connect_pair(hosts[i], &client, &server);
        cd_patience patience = within_ms(5000);
        char got[3] = "";
        CHECK_OK(cd_sock_send_all(client, "hi", 3, &patience));
        CHECK_OK(cd_sock_recv_all(server, got, 3, &patience));
        CHECK(strcmp(got, "hi") == 0);
        patience = within_ms(30);
        CHECK_FAILS(cd_sock_recv_all(server, got, 1, &patience), CD_TIMED_OUT);
        close(client);
        patience = within_ms(1000);
        CHECK_FAILS(cd_sock_recv_all(server, got, 1, &patience), CD_PEER_LOST);
        close(server);
    }
}

static void test_listening_and_connecting_fail_with_a_reason(void)
{
    int listener, fd;
    uint16_t port, again;
    CHECK_OK(cd_sock_listen("127.0.0.1", 0, &listener, &port));
    CHECK_FAILS(cd_sock_listen("127.0.0.1", port, &fd, &again), CD_NETWORK);
    CHECK(strstr(cd_last_error()->text, "in use"));
    CHECK_FAILS(cd_sock_listen("192.0.2.1", 0, &fd, &again), CD_NETWORK);
    CHECK(strstr(cd_last_error()->text, "not an address of this host"));
    CHECK_OK(cd_sock_adopt_listener(listener, &again));
    CHECK(again == port);
    close(listener);
    cd_patience patience = within_ms(100);
    CHECK_FAILS(cd_sock_connect("127.0.0.1", port, &patience, &fd), CD_NETWORK);
    CHECK_FAILS(cd_sock_adopt_listener(0, &port), CD_BAD_ARGUMENT);
    char out[64];
    setenv("CDIST_SOCKET_IFNAME", "nope0", 1);
    CHECK_FAILS(cd_addr_local_for("127.0.0.1", 1, out, sizeof out), CD_BAD_ARGUMENT);
    CHECK(strstr(cd_last_error()->text, "nope0") && strstr(cd_last_error()->text, "lo (127.0.0.1)"));
    setenv("CDIST_SOCKET_IFNAME", "127.0.0.0/8", 1);
    CHECK_OK(cd_addr_local_for("127.0.0.1", 1, out, sizeof out));
    CHECK(strcmp(out, "127.0.0.1") == 0);
    unsetenv("CDIST_SOCKET_IFNAME");
    CHECK_OK(cd_addr_local_for("127.0.0.1", 1, out, sizeof out));
    CHECK(strcmp(out, "127.0.0.1") == 0);
}

typedef struct {
    int fds[2];
    cd_secret secrets[2];
    cd_status results[2];
} auth_case;

static void run_auth(int rank, void *ctx)
{
    auth_case *c = ctx;
    cd_patience patience = within_ms(2000);
    c->results[rank] = (rank ? cd_auth_accept : cd_auth_connect)(c->fds[rank], &c->secrets[rank], &patience);
    if (c->results[rank] != CD_OK)
        shutdown(c->fds[rank], SHUT_RDWR);
}

static void test_preamble(void)
{
    for (int wrong = 0; wrong < 2; wrong++) {
        auth_case c = {.secrets = {{.key = {1, 2, 3}, .is_set = true}, {.key = {1, 2, 3}, .is_set = true}}};
        c.secrets[1].key[31] = (uint8_t)wrong;
        connect_pair("127.0.0.1", &c.fds[0], &c.fds[1]);
        check_on_ranks(2, run_auth, &c);
        CHECK(c.results[0] == (wrong ? CD_REFUSED : CD_OK));
        CHECK(c.results[1] == (wrong ? CD_PEER_LOST : CD_OK));
        close(c.fds[0]);
        close(c.fds[1]);
    }
    cd_secret secret;
    setenv("CDIST_JOB_SECRET", "zz", 1);
    CHECK_FAILS(cd_secret_read(&secret), CD_BAD_ARGUMENT);
    CHECK(!strstr(cd_last_error()->text, "zz"));
    setenv("CDIST_JOB_SECRET", "000102030405060708090a0b0c0d0e0f101112131415161718191A1B1C1D1E1F", 1);
    CHECK_OK(cd_secret_read(&secret));
    CHECK(secret.is_set && secret.key[1] == 1 && secret.key[31] == 31);
    unsetenv("CDIST_JOB_SECRET");
    CHECK_OK(cd_secret_read(&secret));
    CHECK(!secret.is_set);
}

static void test_replayed_proof_is_refused(void)
{
    cd_secret secret = {.key = {7}, .is_set = true};
    cd_auth client, server, other;
    uint8_t hello[CD_AUTH_HELLO_BYTES], reply[CD_AUTH_REPLY_BYTES], proof[CD_AUTH_PROOF_BYTES];
    CHECK_OK(cd_auth_hello(&client, hello));
    CHECK_OK(cd_auth_reply(&server, &secret, hello, reply));
    CHECK_OK(cd_auth_prove(&client, &secret, reply, proof));
    CHECK_OK(cd_auth_verify(&server, &secret, proof));
    CHECK_OK(cd_auth_reply(&other, &secret, hello, reply));
    CHECK_FAILS(cd_auth_verify(&other, &secret, proof), CD_REFUSED);
    /* The server's own proof sent back is not the client's. */
    CHECK_FAILS(cd_auth_verify(&other, &secret, reply + CD_NONCE_BYTES), CD_REFUSED);
}

/* Who ended a connection: before and after the other side has closed too. */
static void test_whose_end_was_shut(void)
{
    for (int i = 0; i < 4; i++) {
        int client, server, *here = i % 2 ? &client : &server, *there = i % 2 ? &server : &client;
        cd_patience patience = within_ms(5000);
        char byte;
        connect_pair("127.0.0.1", &client, &server);
        CHECK(!cd_sock_was_shut_here(client, 0) && !cd_sock_was_shut_here(server, 0));
        shutdown(*here, SHUT_RDWR);
        CHECK(cd_sock_recv_all(*there, &byte, 1, &patience) == CD_PEER_LOST);
        CHECK(!cd_sock_was_shut_here(*there, 0));
        if (i > 1) {
            close(*there);
            *there = -1;
        }
        CHECK(cd_sock_was_shut_here(*here, 0) && !cd_sock_was_shut_here(*here, ECONNRESET));
        close(*here);
        if (*there >= 0)
            close(*there);
    }
}

int main(void)
{
    test_whose_end_was_shut();
    test_hashes_match_published_vectors();
    test_cursors_cannot_overrun();
    test_loopback_of_both_families();
    test_listening_and_connecting_fail_with_a_reason();
    test_preamble();
    test_replayed_proof_is_refused();
    puts("net/sock: ok");
    return 0;
}
