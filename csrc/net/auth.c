#include "net/auth.h"

#include "base/host.h"
#include "base/knob.h"
#include "net/sock.h"

#include <string.h>

static const char magic[4] = {'C', 'D', 'A', '1'};

static int digit_of(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

cd_status cd_secret_read(cd_secret *out)
{
    const char *text = cd_knob("CDIST_JOB_SECRET");
    *out = (cd_secret){.is_set = false};
    if (!*text)
        return CD_OK;
    bool fits = strlen(text) == 2 * sizeof out->key;
    for (size_t i = 0; fits && i < sizeof out->key; i++) {
        int high = digit_of(text[2 * i]), low = digit_of(text[2 * i + 1]);
        fits = high >= 0 && low >= 0;
        out->key[i] = (uint8_t)(fits ? high << 4 | low : 0);
    }
    if (!fits)
        return cd_fail(CD_BAD_ARGUMENT, "CDIST_JOB_SECRET must be 64 hexadecimal digits");
    out->is_set = true;
    return CD_OK;
}

static void prove(const cd_auth *auth, const cd_secret *secret, const char role[6], uint8_t out[CD_SHA256_BYTES])
{
    uint8_t text[6 + 2 * CD_NONCE_BYTES];
    memcpy(text, role, 6);
    memcpy(text + 6, auth->client, CD_NONCE_BYTES);
    memcpy(text + 6 + CD_NONCE_BYTES, auth->server, CD_NONCE_BYTES);
    cd_hmac_sha256(secret->key, sizeof secret->key, text, sizeof text, out);
}

cd_status cd_auth_hello(cd_auth *auth, uint8_t hello[CD_AUTH_HELLO_BYTES])
{
    CD_TRY(cd_host_random(auth->client, sizeof auth->client));
    memcpy(hello, magic, sizeof magic);
    memcpy(hello + sizeof magic, auth->client, sizeof auth->client);
    return CD_OK;
}

cd_status cd_auth_reply(cd_auth *auth, const cd_secret *secret, const uint8_t hello[CD_AUTH_HELLO_BYTES],
                        uint8_t reply[CD_AUTH_REPLY_BYTES])
{
    if (memcmp(hello, magic, sizeof magic) != 0)
        return cd_fail(CD_REFUSED, "the connection did not begin with the proof of the job secret");
    memcpy(auth->client, hello + sizeof magic, sizeof auth->client);
    CD_TRY(cd_host_random(auth->server, sizeof auth->server));
    memcpy(reply, auth->server, sizeof auth->server);
    prove(auth, secret, "server", reply + CD_NONCE_BYTES);
    return CD_OK;
}

cd_status cd_auth_prove(cd_auth *auth, const cd_secret *secret, const uint8_t reply[CD_AUTH_REPLY_BYTES],
                        uint8_t proof[CD_AUTH_PROOF_BYTES])
{
    uint8_t want[CD_SHA256_BYTES];
    memcpy(auth->server, reply, sizeof auth->server);
    prove(auth, secret, "server", want);
    if (!cd_hmac_equal(want, reply + CD_NONCE_BYTES, sizeof want))
        return cd_fail(CD_REFUSED, "the other end does not know this job's secret (CDIST_JOB_SECRET)");
    prove(auth, secret, "client", proof);
    return CD_OK;
}

cd_status cd_auth_verify(const cd_auth *auth, const cd_secret *secret, const uint8_t proof[CD_AUTH_PROOF_BYTES])
{
    uint8_t want[CD_SHA256_BYTES];
    prove(auth, secret, "client", want);
    if (!cd_hmac_equal(want, proof, sizeof want))
        return cd_fail(CD_REFUSED, "the other end does not know this job's secret (CDIST_JOB_SECRET)");
    return CD_OK;
}

/* Within the handshake's own deadline; when that one passed, and not the caller's, the peer is refused. */
static cd_patience shorten(const cd_patience *patience)
{
    cd_patience shorter = *patience;
    shorter.deadline = cd_deadline_earlier(patience->deadline, cd_deadline_after_ns(CD_AUTH_DEADLINE_NS));
    return shorter;
}

static cd_status explain(cd_status status, const cd_patience *patience)
{
    if (status == CD_TIMED_OUT && !cd_deadline_passed(patience->deadline))
        return cd_fail(CD_REFUSED, "the other end did not finish the proof of the job secret in %d s",
                       (int)(CD_AUTH_DEADLINE_NS / CD_NS_PER_S));
    return status;
}

static cd_status run_client(int fd, const cd_secret *secret, const cd_patience *patience)
{
    cd_auth auth;
    uint8_t hello[CD_AUTH_HELLO_BYTES], reply[CD_AUTH_REPLY_BYTES], proof[CD_AUTH_PROOF_BYTES];
    CD_TRY(cd_auth_hello(&auth, hello));
    CD_TRY(cd_sock_send_all(fd, hello, sizeof hello, patience));
    CD_TRY(cd_sock_recv_all(fd, reply, sizeof reply, patience));
    CD_TRY(cd_auth_prove(&auth, secret, reply, proof));
    return cd_sock_send_all(fd, proof, sizeof proof, patience);
}

static cd_status run_server(int fd, const cd_secret *secret, const cd_patience *patience)
{
    cd_auth auth;
    uint8_t hello[CD_AUTH_HELLO_BYTES], reply[CD_AUTH_REPLY_BYTES], proof[CD_AUTH_PROOF_BYTES];
    CD_TRY(cd_sock_recv_all(fd, hello, sizeof hello, patience));
    CD_TRY(cd_auth_reply(&auth, secret, hello, reply));
    CD_TRY(cd_sock_send_all(fd, reply, sizeof reply, patience));
    CD_TRY(cd_sock_recv_all(fd, proof, sizeof proof, patience));
    return cd_auth_verify(&auth, secret, proof);
}

cd_status cd_auth_connect(int fd, const cd_secret *secret, const cd_patience *patience)
{
    if (!secret->is_set)
        return CD_OK;
    cd_patience shorter = shorten(patience);
    return explain(run_client(fd, secret, &shorter), patience);
}

cd_status cd_auth_accept(int fd, const cd_secret *secret, const cd_patience *patience)
{
    if (!secret->is_set)
        return CD_OK;
    cd_patience shorter = shorten(patience);
    return explain(run_server(fd, secret, &shorter), patience);
}
