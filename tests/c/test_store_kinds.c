/* One body over the kinds of store, alone and under prefixes; the server against fragments, junk and slow readers. */
#include "check.h"

#include "net/sock.h"
#include "store/kinds.h"
#include "store/proto.h"
#include "store/server.h"

#include <sys/socket.h>
#include <unistd.h>

static cd_patience within_ms(uint64_t ms)
{
    return (cd_patience){.deadline = ms ? cd_deadline_after_ns(ms * CD_NS_PER_MS) : (cd_deadline){0}};
}

static bool buffer_is(cd_buffer *buffer, const char *text)
{
    bool same = buffer->bytes == strlen(text) && memcmp(buffer->data, text, buffer->bytes) == 0;
    cd_buffer_free(buffer);
    return same;
}

#define KEY(text) cd_bytes_of(text)

static void check_values(cd_store *s, const cd_patience *p)
{
    cd_buffer out = {0};
    bool yes;
    int64_t number;
    CHECK_OK(s->ops->set(s, KEY("a"), KEY("one"), p));
    CHECK_OK(s->ops->get(s, KEY("a"), &out, p));
    CHECK(buffer_is(&out, "one"));
    CHECK_OK(s->ops->set(s, KEY("a"), KEY(""), p));
    CHECK_OK(s->ops->get(s, KEY("a"), &out, p));
    CHECK(buffer_is(&out, ""));
    CHECK_OK(s->ops->add(s, KEY("n"), 5, &number, p));
    CHECK_OK(s->ops->add(s, KEY("n"), -7, &number, p));
    CHECK(number == -2);
    CHECK_OK(s->ops->get(s, KEY("n"), &out, p));
    CHECK(buffer_is(&out, "-2"));
    CHECK_OK(s->ops->compare_set(s, KEY("c"), KEY("x"), KEY("y"), &out, p));
    CHECK(buffer_is(&out, "x"));
    CHECK_OK(s->ops->compare_set(s, KEY("c"), KEY(""), KEY("y"), &out, p));
    CHECK(buffer_is(&out, "y"));
    CHECK_OK(s->ops->compare_set(s, KEY("c"), KEY("y"), KEY("z"), &out, p));
    CHECK(buffer_is(&out, "z"));
    CHECK_OK(s->ops->compare_set(s, KEY("c"), KEY("y"), KEY("w"), &out, p));
    CHECK(buffer_is(&out, "z"));
    cd_bytes keys[2] = {KEY("a"), KEY("none")};
    CHECK_OK(s->ops->check(s, keys, 2, &yes, p));
    CHECK(!yes);
    CHECK_OK(s->ops->check(s, keys, 1, &yes, p));
    CHECK(yes);
    CHECK_OK(s->ops->check(s, keys, 0, &yes, p));
    CHECK(yes);
    CHECK_OK(s->ops->wait(s, keys, 0, p));
    CHECK_OK(s->ops->append(s, KEY("l"), KEY("ab"), p));
    CHECK_OK(s->ops->append(s, KEY("l"), KEY("cd"), p));
    cd_bytes more[2] = {KEY("l"), KEY("n")};
    cd_buffer both[2];
    CHECK_OK(s->ops->multi_get(s, more, 2, both, p));
    CHECK(buffer_is(&both[0], "abcd") && buffer_is(&both[1], "-2"));
    cd_bytes values[2] = {KEY("1"), KEY("2")};
    CHECK_OK(s->ops->multi_set(s, more, values, 2, p));
    CHECK_OK(s->ops->multi_get(s, more, 2, both, p));
    CHECK(buffer_is(&both[0], "1") && buffer_is(&both[1], "2"));
    CHECK_OK(s->ops->delete_key(s, KEY("l"), &yes, p));
    CHECK(yes);
    CHECK_OK(s->ops->check(s, more, 1, &yes, p));
    CHECK(!yes);
}

static void check_lists(cd_store *s, const cd_patience *p)
{
    cd_buffer *keys, out = {0};
    size_t count;
    int64_t number;
    CHECK_OK(s->ops->list_keys(s, &keys, &count, p));
    CHECK(count == 3); /* a, n, c */
    for (size_t i = 0; i < count; i++)
        CHECK(keys[i].bytes == 1 && strchr("anc", *(char *)keys[i].data));
    cd_buffers_free(keys, count);
    CHECK_OK(s->ops->num_keys(s, &number, p));
    CHECK(number >= 3);
    if (!s->ops->queue_push)
        return;
    CHECK_FAILS(s->ops->queue_pop(s, KEY("q"), false, &out, p), CD_NOT_FOUND);
    CHECK_OK(s->ops->queue_push(s, KEY("q"), KEY("first"), p));
    CHECK_OK(s->ops->queue_push(s, KEY("q"), KEY(""), p));
    CHECK_OK(s->ops->queue_len(s, KEY("q"), &number, p));
    CHECK(number == 2);
    CHECK_OK(s->ops->queue_pop(s, KEY("q"), true, &out, p));
    CHECK(buffer_is(&out, "first"));
    CHECK_OK(s->ops->queue_pop(s, KEY("q"), false, &out, p));
    CHECK(buffer_is(&out, ""));
    cd_patience soon = within_ms(60);
    CHECK_FAILS(s->ops->queue_pop(s, KEY("q"), true, &out, &soon), CD_STORE_TIMEOUT);
}

static void check_timeouts(cd_store *s, const cd_patience *p)
{
    cd_bytes keys[2] = {KEY("a"), KEY("zz")};
    cd_buffer out = {0};
    uint64_t began = cd_now_ns();
    cd_patience soon = within_ms(120);
    CHECK_FAILS(s->ops->wait(s, keys, 2, &soon), CD_STORE_TIMEOUT);
    CHECK(cd_now_ns() - began >= 100 * CD_NS_PER_MS);
    CHECK(strstr(cd_last_error()->text, "imeout") && strstr(cd_last_error()->text, "zz"));
    soon = within_ms(0);
    CHECK_FAILS(s->ops->get(s, KEY("zz"), &out, &soon), CD_STORE_TIMEOUT);
    CHECK_OK(s->ops->get(s, KEY("a"), &out, &soon));
    cd_buffer_free(&out);
    CHECK_OK(s->ops->set(s, KEY("zz"), KEY("late"), p));
    CHECK_OK(s->ops->wait(s, keys, 2, p));
    bool existed;
    CHECK_OK(s->ops->delete_key(s, KEY("zz"), &existed, p));
}

typedef struct {
    cd_store *store;
    int ranks;
} party;

/* Rank 0 waits in a get while the others count on the same object; the last one sets what is waited for. */
static void share(int rank, void *ctx)
{
    party *c = ctx;
    cd_store *s = c->store;
    cd_patience p = within_ms(30000);
    if (rank == 0) {
        cd_buffer out = {0};
        CHECK_OK(s->ops->get(s, KEY("go"), &out, &p));
        CHECK(buffer_is(&out, "now"));
        return;
    }
    int64_t sum = 0;
    for (int i = 0; i < 300; i++)
        CHECK_OK(s->ops->add(s, KEY("count"), 1, &sum, &p));
    CHECK_OK(s->ops->add(s, KEY("done"), 1, &sum, &p));
    if (sum == c->ranks - 1)
        CHECK_OK(s->ops->set(s, KEY("go"), KEY("now"), &p));
}

static void check_threads(cd_store *s)
{
    party c = {s, 8};
    check_on_ranks(c.ranks, share, &c);
    cd_patience p = within_ms(5000);
    int64_t sum;
    CHECK_OK(s->ops->add(s, KEY("count"), 0, &sum, &p));
    CHECK(sum == 7 * 300);
    bool existed;
    CHECK_OK(s->ops->delete_key(s, KEY("count"), &existed, &p));
    CHECK_OK(s->ops->delete_key(s, KEY("done"), &existed, &p));
    CHECK_OK(s->ops->delete_key(s, KEY("go"), &existed, &p));
}

static void meet(int rank, void *ctx)
{
    (void)rank;
    party *c = ctx;
    cd_patience p = within_ms(10000);
    for (int i = 0; i < 3; i++)
        CHECK_OK(cd_store_barrier(c->store, KEY("meet"), c->ranks, &p));
}

static void check_store(cd_store *s)
{
    cd_patience p = within_ms(10000);
    check_values(s, &p);
    check_lists(s, &p);
    check_timeouts(s, &p);
    check_threads(s);
    party c = {s, 5};
    check_on_ranks(c.ranks, meet, &c);
}

static void check_with_prefix(cd_store *s)
{
    cd_store *outer, *inner;
    check_store(s);
    CHECK_OK(cd_prefix_store_create(KEY("p"), s, &outer));
    CHECK_OK(cd_prefix_store_create(KEY("q"), outer, &inner));
    check_store(inner);
    CHECK(cd_prefix_store_under(inner) == outer && cd_prefix_store_under(s) == NULL);
    cd_store_release(outer);
    cd_store_release(inner);
    cd_store_release(s);
}

static cd_server *serve(const cd_secret *secret)
{
    cd_server *server;
    cd_server_options options = {.host = "127.0.0.1", .listen_fd = -1};
    if (secret)
        options.secret = *secret;
    CHECK_OK(cd_server_start(&options, &server));
    return server;
}

static cd_store *connect_to(const cd_server *server, const cd_secret *secret)
{
    cd_store *s;
    cd_secret none = {.is_set = false};
    cd_patience p = within_ms(5000);
    CHECK_OK(cd_tcp_store_open("127.0.0.1", cd_server_port(server), secret ? secret : &none, &p, &s));
    return s;
}

static void test_kinds(void)
{
    cd_store *s;
    CHECK_OK(cd_hash_store_create(&s));
    check_with_prefix(s);
    char path[] = "/tmp/cdist_test_XXXXXX";
    int fd = mkstemp(path);
    CHECK(fd >= 0);
    close(fd);
    cd_patience p = within_ms(1000);
    CHECK_OK(cd_file_store_open(path, 1, &p, &s));
    check_with_prefix(s);
    CHECK(access(path, F_OK) != 0);
    cd_server *server = serve(NULL);
    check_with_prefix(connect_to(server, NULL));
    cd_server_stop(server);
    cd_secret secret = {.key = {1}, .is_set = true};
    server = serve(&secret);
    check_with_prefix(connect_to(server, &secret));
    cd_server_stop(server);
}

static void *close_soon(void *store)
{
    cd_store *s = store;
    cd_sleep_ns(30 * CD_NS_PER_MS);
    s->ops->close(s);
    return NULL;
}

static void test_close_ends_waits(void)
{
    cd_server *server = serve(NULL);
    cd_store *stores[2] = {connect_to(server, NULL), NULL};
    CHECK_OK(cd_hash_store_create(&stores[1]));
    for (int i = 0; i < 2; i++) {
        pthread_t closer;
        cd_buffer out;
        cd_patience p = within_ms(10000);
        CHECK(pthread_create(&closer, NULL, close_soon, stores[i]) == 0);
        CHECK_FAILS(stores[i]->ops->get(stores[i], KEY("never"), &out, &p), CD_STORE);
        pthread_join(closer, NULL);
        CHECK_FAILS(stores[i]->ops->set(stores[i], KEY("a"), KEY("b"), &p), CD_STORE);
        cd_store_release(stores[i]);
    }
    cd_server_stop(server);
}

static void test_limits_and_loss(void)
{
    cd_server *server = serve(NULL);
    cd_store *s = connect_to(server, NULL);
    cd_patience p = within_ms(10000);
    size_t most = CD_STORE_VALUE_MOST;
    char *large = calloc(1, most + 1);
    cd_buffer out;
    CHECK_OK(s->ops->set(s, KEY("large"), (cd_bytes){large, most}, &p));
    CHECK_OK(s->ops->get(s, KEY("large"), &out, &p));
    CHECK(out.bytes == most && memcmp(out.data, large, most) == 0);
    cd_buffer_free(&out);
    CHECK_FAILS(s->ops->set(s, KEY("large"), (cd_bytes){large, most + 1}, &p), CD_BAD_ARGUMENT);
    CHECK_FAILS(s->ops->set(s, (cd_bytes){large, CD_STORE_KEY_MOST}, KEY("v"), &p), CD_BAD_ARGUMENT);
    free(large);
    cd_server_stop(server);
    CHECK_FAILS(s->ops->get(s, KEY("a"), &out, &p), CD_STORE);
    CHECK(strstr(cd_last_error()->text, "lost"));
    CHECK_FAILS(s->ops->get(s, KEY("a"), &out, &p), CD_STORE);
    cd_store_release(s);
}

static void test_wrong_secret_is_refused(void)
{
    cd_secret one = {.key = {1}, .is_set = true}, other = {.key = {2}, .is_set = true}, none = {.is_set = false};
    cd_server *server = serve(&one);
    cd_store *s;
    cd_patience p = within_ms(10000);
    CHECK_FAILS(cd_tcp_store_open("127.0.0.1", cd_server_port(server), &other, &p, &s), CD_REFUSED);
    CHECK_FAILS(cd_tcp_store_open("127.0.0.1", cd_server_port(server), &none, &p, &s), CD_REFUSED);
    CHECK(strstr(cd_last_error()->text, "CDIST_JOB_SECRET"));
    cd_server_stop(server);
}

static int raw_connect(const cd_server *server)
{
    int fd;
    cd_patience p = within_ms(5000);
    CHECK_OK(cd_sock_connect("127.0.0.1", cd_server_port(server), &p, &fd));
    return fd;
}

/* validate, ping, set "/k" to "v", wait for it, get it */
static const uint8_t dialogue[] = "\x00\xce\xf7\x85\x3c\x0d\x01\x02\x03\x04"
                                  "\x01\x02\0\0\0\0\0\0\0/k\x01\0\0\0\0\0\0\0v"
                                  "\x06\x01\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0/k"
                                  "\x03\x02\0\0\0\0\0\0\0/k";
static const uint8_t answers[] = "\x01\x02\x03\x04\x00\x01\0\0\0\0\0\0\0v";

static void test_any_fragmentation(void)
{
    cd_server *server = serve(NULL);
    for (size_t piece = 1; piece < sizeof dialogue; piece += 3) {
        int fd = raw_connect(server);
        cd_patience p = within_ms(5000);
        for (size_t at = 0; at < sizeof dialogue - 1; at += piece) {
            size_t left = sizeof dialogue - 1 - at;
            CHECK_OK(cd_sock_send_all(fd, dialogue + at, left < piece ? left : piece, &p));
            if (piece < 4)
                cd_sleep_ns(200000); /* so that each piece is a read of its own */
        }
        uint8_t got[sizeof answers - 1];
        CHECK_OK(cd_sock_recv_all(fd, got, sizeof got, &p));
        CHECK(memcmp(got, answers, sizeof got) == 0);
        close(fd);
    }
    cd_server_stop(server);
}

static void test_junk_is_dropped(void)
{
    cd_server *server = serve(NULL);
    cd_store *s = connect_to(server, NULL);
    int idle = raw_connect(server);
    uint64_t random = 88172645463325252u;
    for (int i = 0; i < 300; i++) {
        int fd = raw_connect(server);
        uint8_t junk[5 + 4096] = "\x00\xce\xf7\x85\x3c";
        for (size_t j = 5; j < sizeof junk; j++) {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            junk[j] = (uint8_t)(j % 3 ? random % 20 : random); /* opcodes and small lengths are worth trying */
        }
        size_t moved;
        const uint8_t *from = i % 2 ? junk : junk + 5;
        cd_status sent = cd_sock_send_some(fd, i % 7 ? (const void *)from : "GET / HTTP/1.0\r\n\r\n", i % 7 ? 4000 : 18, &moved);
        CHECK(sent == CD_OK);
        close(fd);
    }
    cd_patience p = within_ms(5000);
    CHECK_OK(s->ops->set(s, KEY("a"), KEY("alive"), &p));
    cd_buffer out;
    CHECK_OK(s->ops->get(s, KEY("a"), &out, &p));
    CHECK(buffer_is(&out, "alive"));
    for (int i = 0; i < 200 && cd_server_connections(server) > 2; i++)
        cd_sleep_ns(10 * CD_NS_PER_MS);
    CHECK(cd_server_connections(server) == 2);
    close(idle);
    cd_store_release(s);
    cd_server_stop(server);
}

static void test_slow_reader_blocks_nobody(void)
{
    cd_server *server = serve(NULL);
    cd_store *s = connect_to(server, NULL);
    cd_patience p = within_ms(60000); /* of all of it, also under a sanitizer */
    size_t bytes = 1 << 20;
    char *value = calloc(1, bytes);
    CHECK_OK(s->ops->set(s, KEY("k"), (cd_bytes){value, bytes}, &p));
    free(value);
    bool there; /* set has no answer: the next request on the same connection has one, and comes after it */
    cd_bytes key = KEY("k");
    CHECK_OK(s->ops->check(s, &key, 1, &there, &p));
    CHECK(there);
    int fd = raw_connect(server);
    CHECK_OK(cd_sock_send_all(fd, dialogue, 10, &p));
    for (int i = 0; i < 64; i++) /* asks for 64 MiB and reads nothing yet */
        CHECK_OK(cd_sock_send_all(fd, dialogue + 49, 11, &p));
    for (int i = 0; i < 50; i++) {
        int64_t n;
        CHECK_OK(s->ops->add(s, KEY("n"), 1, &n, &p));
    }
    uint8_t *got = malloc(bytes + 8);
    CHECK_OK(cd_sock_recv_all(fd, got, 4, &p));
    for (int i = 0; i < 64; i++) {
        CHECK_OK(cd_sock_recv_all(fd, got, bytes + 8, &p));
        CHECK(got[2] == 0x10 && got[8] == 0 && got[bytes + 7] == 0);
    }
    free(got);
    close(fd);
    cd_store_release(s);
    cd_server_stop(server);
}

static void test_scanner_never_reads_beyond(void)
{
    for (size_t bytes = 0; bytes < sizeof dialogue - 1; bytes++) {
        uint8_t *exact = malloc(bytes ? bytes : 1); /* the sanitizer sees a read beyond */
        memcpy(exact, dialogue, bytes);
        cd_scan scan = {0};
        size_t at = 0;
        cd_scan_result result;
        while ((result = cd_proto_scan(&scan, exact + at, bytes - at)) == CD_SCAN_DONE) {
            at += scan.at;
            scan = (cd_scan){0};
        }
        CHECK(result == CD_SCAN_MORE);
        free(exact);
    }
    uint8_t bad[9] = {CD_REQ_GET, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff};
    cd_scan scan = {0};
    CHECK(cd_proto_scan(&scan, bad, sizeof bad) == CD_SCAN_BAD);
    bad[0] = CD_REQ_WAIT;
    scan = (cd_scan){0};
    CHECK(cd_proto_scan(&scan, bad, sizeof bad) == CD_SCAN_BAD);
}

int main(void)
{
    test_scanner_never_reads_beyond();
    test_kinds();
    test_close_ends_waits();
    test_limits_and_loss();
    test_wrong_secret_is_refused();
    test_any_fragmentation();
    test_junk_is_dropped();
    test_slow_reader_blocks_nobody();
    puts("store/kinds: ok");
    return 0;
}
