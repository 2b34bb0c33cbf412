/* How the ranks of a world meet.
 *
 *   rank 0 publishes its address in the store; everyone else reads it, dials and says hello     (1 store call a rank)
 *   rank 0, when all are there:                 TABLE of all members →
 *   ranks of one host share memory:             ← ATTACHED
 *   rank 0 now knows who shares a host:         HOSTS →
 *   pairs on different hosts connect, and each rank with the deputy (connect.c):    ← READY
 *   rank 0, when all are ready:                 GO →
 *
 * An address in the store may be of an earlier process: a nonce in every hello tells, and the reader tries again until the
 * deadline. If anything fails on one rank, rank 0 tells all others why, so that init fails on all of them. Whatever a rank waits
 * for once all have come, it also hears that (cd_world_listening). */
#include "base/host.h"
#include "base/knob.h"
#include "base/log.h"
#include "group/greeter.h"
#include "group/group_impl.h"
#include "net/addr.h"
#include "net/sock.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Between two looks at an address that turned out to be old. */
#define RETRY_LEAST_NS (1 * CD_NS_PER_MS)
#define RETRY_MOST_NS (20 * CD_NS_PER_MS)
/* How often rank 0 looks whether another process claims its place. */
#define CLAIM_CHECK_NS (200 * CD_NS_PER_MS)
/* In the place of a process' descriptor. */
#define ENDED (-2)

/* A rank has at most a connection and a process descriptor, or two connections, for each other one, and some of its own; the
 * rest is for what the program has open. */
#define FILES_BESIDE 256

typedef struct {
    cd_world *world;
    const cd_world_config *config;
    cd_store *store;
    const cd_patience *patience;
    cd_patience attentive; /* `patience` once all have come: it also hears who cannot go on */
    cd_listening listening;
    char key[300];
    cd_member me;
    uint8_t nonce_0[CD_MEMBER_NONCE_BYTES]; /* of rank 0's process */
    int joined;
    int *processes;                  /* rank 0: descriptors of the processes of ranks that left again, ENDED, −1: none */
    bool knows_all;                  /* the table has come: rank 0 waits for what this rank says */
    cd_error refusal;                /* rank 0: why nobody can join any more; code CD_OK: none */
} meeting;

/* `towards`: the host that others reach us through; the route to it decides our address unless a setting names one. */
static cd_status open_listener(meeting *m, const char *towards, uint16_t port)
{
    cd_world *w = m->world;
    if (w->data_listener >= 0)
        return CD_OK;
    if (!m->me.address[0])
        CD_TRY(cd_addr_local_for(towards, port, m->me.address, sizeof m->me.address));
    CD_TRY(cd_sock_listen_range(m->me.address, &w->data_listener, &m->me.port));
    if (cd_log_wants(CD_LOG_INFO)) {
        char interface[64];
        cd_log(CD_LOG_INFO, "rank %d listens on %s port %u (%s)", w->rank, m->me.address, m->me.port,
               cd_addr_interface(m->me.address, interface, sizeof interface));
    }
    return CD_OK;
}

static cd_patience within(const cd_patience *patience, uint64_t ns)
{
    cd_patience shorter = *patience;
    shorter.deadline = cd_deadline_earlier(patience->deadline, cd_deadline_after_ns(ns));
    return shorter;
}

/* ---- rank 0 ---- */

static void refuse(int socket, const cd_error *why, const cd_patience *patience)
{
    cd_error told = *why;
    if (told.code == CD_NO_MEMORY)
        told.code = CD_NETWORK; /* the memory that this process lacks is none of the others' */
    cd_patience brief = within(patience, 100 * CD_NS_PER_MS);
    brief.idle = 0; /* an interrupt may be why */
    (void)cd_control_send(socket, CD_CONTROL_REFUSED, &told, sizeof told, &brief);
}

static void refuse_all(meeting *m, const cd_error *why)
{
    for (int r = 1; r < m->world->world; r++)
        if (m->world->controls[r] >= 0)
            refuse(m->world->controls[r], why, m->patience);
}

static void check_hello(meeting *m, const cd_member *guest, cd_error *why)
{
    cd_world *w = m->world;
    if (guest->world != w->world) {
        cd_fail_rank(CD_REFUSED, guest->rank,
                     "world sizes differ: rank %d (pid %u on %s) has world_size %d, rank 0 (pid %u on %s) has %d", guest->rank,
                     guest->process, guest->host_name, guest->world, m->me.process, m->me.host_name, w->world);
        *why = *cd_last_error();
    } else if (guest->rank <= 0 || guest->rank >= w->world || w->controls[guest->rank] >= 0) {
        const cd_member *other = guest->rank > 0 && guest->rank < w->world ? &w->members[guest->rank] : &m->me;
        cd_fail_rank(CD_REFUSED, guest->rank,
                     "two processes claim rank %d: pid %u on %s and pid %u on %s; each needs a rank of its own", guest->rank,
                     other->process, other->host_name, guest->process, guest->host_name);
        *why = *cd_last_error();
    }
}

static bool has_ended(const meeting *m, int rank)
{
    struct pollfd process = {.fd = m->processes[rank], .events = POLLIN};
    return process.fd == ENDED || (process.fd >= 0 && poll(&process, 1, 0) > 0);
}

/* Of a rank that gave up: how to see that its process ends. Of other hosts that is not known. */
static int watch_process(const cd_world *w, int rank)
{
    int process = cd_world_sees_process(w, rank) ? (int)syscall(SYS_pidfd_open, (pid_t)w->members[rank].process, 0) : -1;
    return process < 0 && cd_world_sees_process(w, rank) && errno == ESRCH ? ENDED : process;
}

/* Forgets ranks that left: those that gave up said so and may come again. Returns a rank whose process ended, −1: none. */
static int drop_departed(meeting *m)
{
    cd_world *w = m->world;
    int ended = -1;
    for (int r = w->world - 1; r > 0; r--) {
        char probe;
        ssize_t got = w->controls[r] < 0 ? -1 : recv(w->controls[r], &probe, 1, MSG_PEEK | MSG_DONTWAIT);
        if (w->controls[r] >= 0 && (got >= 0 || (errno != EAGAIN && errno != EINTR))) {
            close(w->controls[r]);
            w->controls[r] = -1;
            m->joined--;
            m->processes[r] = got > 0 ? watch_process(w, r) : ENDED;
        }
        if (w->controls[r] < 0 && has_ended(m, r))
            ended = r;
    }
    return ended;
}

static void forget_process(meeting *m, int rank)
{
    if (m->processes[rank] >= 0)
        close(m->processes[rank]);
    m->processes[rank] = -1;
}

static void admit(void *ctx, int socket, cd_control_kind kind, const cd_hello *hello)
{
    meeting *m = ctx;
    cd_world *w = m->world;
    cd_patience brief = within(m->patience, 100 * CD_NS_PER_MS);
    if (kind != CD_CONTROL_HELLO || memcmp(hello->target, m->me.nonce, CD_MEMBER_NONCE_BYTES) != 0) {
        (void)cd_control_send(socket, CD_CONTROL_STALE, 0, 0, &brief);
        close(socket);
        return;
    }
    (void)drop_departed(m); /* who comes in place of a dead process may be it */
    cd_error why = {.code = CD_OK};
    check_hello(m, &hello->me, &why);
    if (why.code != CD_OK) {
        refuse(socket, &why, m->patience);
        close(socket);
        m->refusal = why;
        return;
    }
    uint8_t proof[CD_MEMBER_PROOF_BYTES];
    cd_answer_proof(hello, cd_world_secret(w), proof);
    if (cd_control_send(socket, CD_CONTROL_WELCOME, proof, sizeof proof, &brief) != CD_OK) {
        close(socket);
        return;
    }
    cd_sock_set_patience(socket, CD_CONTROL_PATIENCE_MS);
    forget_process(m, hello->me.rank);
    w->controls[hello->me.rank] = socket;
    w->members[hello->me.rank] = hello->me;
    m->joined++;
}

/* Another rank 0 would have written its own record over ours: tell it by the key, and give up here. */
static cd_status check_claim(meeting *m)
{
    cd_patience brief = within(m->patience, CD_NS_PER_S);
    cd_bytes key = cd_bytes_of(m->key);
    cd_buffer value = {0};
    cd_status status = m->store->ops->get(m->store, key, &value, &brief);
    if (status != CD_OK)
        return status == CD_STORE_TIMEOUT ? CD_OK : status;
    bool mine = value.bytes == sizeof m->me && memcmp(value.data, &m->me, sizeof m->me) == 0;
    cd_member other = {0};
    bool is_told = !mine && value.bytes != sizeof other; /* the other one was first to see it */
    if (is_told)
        cd_fail_rank(CD_REFUSED, 0, "%.*s", (int)(value.bytes < 900 ? value.bytes : 900), (const char *)value.data);
    else if (!mine)
        memcpy(&other, value.data, sizeof other);
    cd_buffer_free(&value);
    if (mine)
        return CD_OK;
    m->world->published = false; /* what stands there now is for the other one to read */
    if (is_told)
        return CD_REFUSED;
    other.host_name[sizeof other.host_name - 1] = 0;
    cd_fail_rank(CD_REFUSED, 0, "two processes claim rank 0: pid %u on %s and pid %u on %s; each needs a rank of its own",
                 m->me.process, m->me.host_name, other.process, other.host_name);
    cd_error why = *cd_last_error();
    (void)m->store->ops->set(m->store, key, cd_bytes_of(why.text), &brief);
    return cd_fail_with(&why);
}

static cd_status name_missing(meeting *m)
{
    cd_world *w = m->world;
    char list[256];
    size_t used = 0;
    int missing = 0, first = -1;
    for (int r = 1; r < w->world; r++) {
        if (w->controls[r] >= 0)
            continue;
        first = first < 0 ? r : first;
        if (missing++ < 16)
            used += (size_t)snprintf(list + used, sizeof list - used, "%s%d", missing > 1 ? ", " : "", r);
    }
    return cd_fail_rank(CD_TIMED_OUT, first,
                        "%d of %d ranks did not come in time: missing ranks [%s%s]; rank 0 waited for them on %s port %u%s",
                        missing, w->world, list, missing > 16 ? ", …" : "", m->me.address, m->me.port,
                        cd_addr_is_loopback(m->me.address) ? ", which no other host reaches (see CDIST_SOCKET_IFNAME)" : "");
}

static cd_status name_dead(meeting *m, int rank)
{
    const cd_member *member = &m->world->members[rank];
    return cd_fail_rank(CD_PEER_LOST, rank, "rank %d was lost before all ranks had come: its process (pid %u on %s) ended", rank,
                        member->process, member->host_name);
}

static cd_status gather_members(meeting *m, cd_greeter *greeter)
{
    cd_world *w = m->world;
    cd_waiter waiter = cd_waiter_start(m->patience);
    uint64_t next_check = cd_now_ns() + CLAIM_CHECK_NS;
    while (m->joined < w->world - 1) {
        int before = m->joined;
        cd_status full = cd_greeter_serve(greeter, admit, m);
        if (m->refusal.code != CD_OK)
            return cd_fail_with(&m->refusal);
        CD_TRY(full);
        if (m->joined != before) {
            cd_waiter_reset(&waiter);
            continue;
        }
        if (cd_now_ns() >= next_check) {
            int died = drop_departed(m);
            if (died >= 0)
                return name_dead(m, died);
            CD_TRY(check_claim(m));
            next_check = cd_now_ns() + CLAIM_CHECK_NS;
        }
        cd_status status;
        if (waiter.napping) {
            struct pollfd entries[64];
            int count = cd_greeter_poll_set(greeter, entries, 64);
            poll(entries, (nfds_t)count, cd_waiter_nap_ms(&waiter));
            status = cd_waiter_check(&waiter);
        } else {
            status = cd_waiter_turn(&waiter);
        }
        if (status != CD_OK)
            return status == CD_TIMED_OUT ? name_missing(m) : status;
    }
    return CD_OK;
}

static cd_status tell_all(meeting *m, cd_control_kind kind, const void *body, size_t bytes)
{
    for (int r = 1; r < m->world->world; r++)
        if (cd_control_send(m->world->controls[r], kind, body, bytes, m->patience) != CD_OK)
            return cd_fail_rank(cd_last_error()->code, r, "rank %d was lost while the ranks were connecting", r);
    return CD_OK;
}

static cd_status hear_all(meeting *m, cd_control_kind kind, uint8_t *answers)
{
    for (int r = 1; r < m->world->world; r++) {
        cd_status status = cd_control_expect(m->world->controls[r], kind, &answers[r], 1, m->patience);
        if ((status == CD_PEER_LOST || status == CD_TIMED_OUT) && cd_last_error()->rank < 0)
            return cd_fail_rank(status, r, "rank %d %s while the ranks were connecting", r,
                                status == CD_PEER_LOST ? "was lost" : "did not go on");
        CD_TRY(status);
    }
    return CD_OK;
}

/* ---- the others ---- */

static cd_status read_address_of_0(meeting *m, cd_member *out)
{
    cd_buffer value = {0};
    cd_status status = m->store->ops->get(m->store, cd_bytes_of(m->key), &value, m->patience);
    if (status == CD_STORE_TIMEOUT || status == CD_TIMED_OUT)
        return cd_fail_rank(CD_TIMED_OUT, 0, "rank 0 did not publish its address in the store in time (key '%s')", m->key);
    CD_TRY(status);
    bool whole = value.bytes == sizeof *out;
    if (whole)
        memcpy(out, value.data, sizeof *out);
    cd_buffer_free(&value);
    out->address[sizeof out->address - 1] = 0;
    return whole ? CD_OK : cd_fail(CD_NOT_FOUND, "no address");
}

/* One try; CD_NOT_FOUND: the address is of an earlier process or nobody is there, try again. */
static cd_status dial_rank_0(meeting *m, const cd_member *zero)
{
    cd_world *w = m->world;
    CD_TRY(open_listener(m, zero->address, zero->port));
    int socket;
    cd_status status = cd_sock_connect_once(zero->address, zero->port, m->patience, &socket);
    if (status == CD_NETWORK)
        return cd_fail(CD_NOT_FOUND, "rank 0 does not answer on %s port %u", zero->address, zero->port);
    CD_TRY(status);
    cd_hello hello = {.me = m->me};
    memcpy(hello.target, zero->nonce, CD_MEMBER_NONCE_BYTES);
    cd_hello_sign(&hello, cd_world_secret(w));
    cd_control_head head;
    cd_patience brief = within(m->patience, 5 * CD_NS_PER_S);
    status = cd_control_send(socket, CD_CONTROL_HELLO, &hello, sizeof hello, &brief);
    if (status == CD_OK)
        status = cd_control_recv_head(socket, &head, &brief);
    uint8_t proof[CD_MEMBER_PROOF_BYTES], expected[CD_MEMBER_PROOF_BYTES];
    if (status == CD_OK && head.kind == CD_CONTROL_WELCOME && head.bytes == sizeof proof)
        status = cd_control_recv_body(socket, proof, sizeof proof, &brief);
    else if (status == CD_OK && head.kind == CD_CONTROL_REFUSED && head.bytes == sizeof(cd_error))
        status = cd_control_recv_refusal(socket, &brief);
    else
        status = CD_PEER_LOST;
    if (status == CD_OK && w->has_secret) {
        cd_answer_proof(&hello, w->secret, expected);
        if (!cd_proof_equal(proof, expected))
            status = cd_fail_rank(CD_REFUSED, 0, "who answers at rank 0's address does not know the job secret");
    }
    if (status == CD_OK) {
        cd_sock_set_patience(socket, CD_CONTROL_PATIENCE_MS);
        w->controls[0] = socket;
        memcpy(m->nonce_0, zero->nonce, CD_MEMBER_NONCE_BYTES);
        return CD_OK;
    }
    close(socket);
    if (status == CD_PEER_LOST || status == CD_PROTOCOL || status == CD_TIMED_OUT || status == CD_IO)
        return cd_fail_rank(CD_NOT_FOUND, 0, "rank 0 at %s port %u did not take us in (it may be an earlier process, or the job "
                            "secrets differ)", zero->address, zero->port);
    return status;
}

static cd_status join_rank_0(meeting *m)
{
    cd_waiter waiter = cd_waiter_start(m->patience);
    uint64_t pause = RETRY_LEAST_NS;
    cd_error why = {.code = CD_OK, .rank = -1}; /* of the last try; better of the last that met somebody */
    for (;;) {
        cd_member zero = {0};
        cd_status status = read_address_of_0(m, &zero);
        if (status == CD_OK)
            status = dial_rank_0(m, &zero);
        if (status == CD_NOT_FOUND) {
            if (why.rank < 0 || cd_last_error()->rank >= 0)
                why = *cd_last_error();
            status = cd_waiter_check(&waiter);
        } else if (status != CD_TIMED_OUT || why.code == CD_OK)
            return status;
        if (status == CD_TIMED_OUT)
            return cd_fail_rank(CD_TIMED_OUT, 0, "%s", why.text);
        CD_TRY(status);
        cd_sleep_ns(pause);
        pause = pause * 2 < RETRY_MOST_NS ? pause * 2 : RETRY_MOST_NS;
    }
}

/* What rank 0 says next, under the deadline. */
static cd_status hear_rank_0(meeting *m, cd_control_kind kind, void *body, size_t bytes)
{
    cd_status status = cd_control_expect(m->world->controls[0], kind, body, bytes, m->patience);
    if (status == CD_PEER_LOST)
        return cd_last_error()->rank >= 0 ? status
                                          : cd_fail_rank(CD_PEER_LOST, 0, "rank 0 was lost while the ranks were connecting");
    if (status == CD_TIMED_OUT && cd_last_error()->rank < 0)
        return cd_fail_rank(CD_TIMED_OUT, 0, "rank 0 did not go on in time: it may still wait for other ranks");
    return status;
}

/* ---- all ---- */

static void settle_hosts(cd_world *w, const uint8_t *attached)
{
    for (int r = 0; r < w->world; r++)
        if (!attached[r])
            w->host_of[r] = r;
}

static cd_status agree_on_hosts(meeting *m)
{
    cd_world *w = m->world;
    uint8_t mine;
    CD_TRY(cd_world_share_host(w, m->patience, &mine));
    size_t bytes = (size_t)w->world * sizeof *w->host_of;
    if (w->rank == 0) {
        uint8_t *attached = calloc((size_t)w->world, 1);
        if (!attached)
            return cd_fail(CD_NO_MEMORY, "no memory for the table of hosts");
        attached[0] = mine;
        cd_status status = hear_all(m, CD_CONTROL_ATTACHED, attached);
        if (status == CD_OK) {
            settle_hosts(w, attached);
            status = tell_all(m, CD_CONTROL_HOSTS, w->host_of, bytes);
        }
        free(attached);
        CD_TRY(status);
    } else {
        CD_TRY(cd_control_send(w->controls[0], CD_CONTROL_ATTACHED, &mine, 1, m->patience));
        int32_t *told = malloc(bytes);
        cd_status status = told ? hear_rank_0(m, CD_CONTROL_HOSTS, told, bytes) : cd_fail(CD_NO_MEMORY, "no memory for hosts");
        if (status == CD_OK)
            status = cd_hosts_take(w->host_of, told, w->world);
        free(told);
        CD_TRY(status);
    }
    return CD_OK;
}

static cd_status exchange_table(meeting *m)
{
    cd_world *w = m->world;
    size_t members_bytes = (size_t)w->world * sizeof *w->members;
    size_t bytes = CD_MEMBER_NONCE_BYTES + members_bytes;
    uint8_t *table = malloc(bytes);
    if (!table)
        return cd_fail(CD_NO_MEMORY, "no memory for the table of %d members", w->world);
    cd_status status;
    if (w->rank == 0) {
        status = cd_host_random(w->generation, sizeof w->generation);
        memcpy(table, w->generation, CD_MEMBER_NONCE_BYTES);
        memcpy(table + CD_MEMBER_NONCE_BYTES, w->members, members_bytes);
        if (status == CD_OK)
            status = tell_all(m, CD_CONTROL_TABLE, table, bytes);
    } else {
        status = hear_rank_0(m, CD_CONTROL_TABLE, table, bytes);
        if (status == CD_OK)
            status = cd_members_take(w->members, table + CD_MEMBER_NONCE_BYTES, w->world);
        memcpy(w->generation, table, CD_MEMBER_NONCE_BYTES);
    }
    free(table);
    return status;
}

static cd_status meet(meeting *m)
{
    cd_world *w = m->world;
    CD_TRY(cd_handout_open(m->me.nonce, &w->handout));
    if (w->rank != 0) {
        CD_TRY(join_rank_0(m));
        return cd_greeter_open(w->rank, w->data_listener, cd_world_secret(w), &w->greeter);
    }
    char address[sizeof m->me.address];
    if (!cd_store_local_address(m->store, address, sizeof address))
        snprintf(address, sizeof address, "127.0.0.1");
    CD_TRY(open_listener(m, address, 1));
    CD_TRY(cd_greeter_open(0, w->data_listener, cd_world_secret(w), &w->greeter));
    w->members[0] = m->me;
    CD_TRY(m->store->ops->set(m->store, cd_bytes_of(m->key), (cd_bytes){&m->me, sizeof m->me}, m->patience));
    w->published = true;
    m->processes = malloc((size_t)w->world * sizeof *m->processes);
    if (!m->processes)
        return cd_fail(CD_NO_MEMORY, "no memory to wait for %d ranks", w->world);
    for (int r = 0; r < w->world; r++)
        m->processes[r] = -1;
    cd_status status = gather_members(m, w->greeter);
    for (int r = 0; r < w->world; r++)
        forget_process(m, r);
    free(m->processes);
    return status;
}

static cd_status connect_all(meeting *m)
{
    cd_world *w = m->world;
    CD_TRY(exchange_table(m));
    m->knows_all = true;
    cd_world_find_hosts(w);
    CD_TRY(cd_mesh_create(w->rank, w->world, &w->mesh));
    CD_TRY(cd_monitor_start(w));
    m->attentive = cd_world_listening(w, m->patience, &m->listening);
    m->patience = &m->attentive;
    CD_TRY(agree_on_hosts(m));
    CD_TRY(cd_world_connect(w, &m->me, m->patience));
    uint8_t ready = 1;
    if (w->rank == 0) {
        uint8_t *answers = calloc((size_t)w->world, 1);
        if (!answers)
            return cd_fail(CD_NO_MEMORY, "no memory to connect");
        cd_status status = hear_all(m, CD_CONTROL_READY, answers);
        free(answers);
        CD_TRY(status);
        return tell_all(m, CD_CONTROL_GO, &ready, 1);
    }
    CD_TRY(cd_control_send(w->controls[0], CD_CONTROL_READY, &ready, 1, m->patience));
    return hear_rank_0(m, CD_CONTROL_GO, &ready, 1);
}

/* What this process has no means for is its own failure: the others learn whose. */
static bool name_own_failure(const meeting *m)
{
    cd_error why = *cd_last_error();
    if (why.code != CD_NO_MEMORY && why.code != CD_NETWORK && why.code != CD_IO)
        return false;
    if (why.rank >= 0) /* another one's, who told only us: it turned us away */
        return why.code == CD_NETWORK;
    cd_fail_prefix("rank %d (pid %u on %s): ", m->world->rank, m->me.process, m->me.host_name);
    return cd_fail_rank(why.code, m->world->rank, "%s", cd_last_error()->text) != CD_OK;
}

/* A rank that cannot go on tells rank 0, and so all, why; one whose time is up, or that was interrupted, that it goes. What came
 * from rank 0 is known there. */
static void give_up(const meeting *m)
{
    int zero = m->world->controls[0];
    cd_patience brief = cd_patience_until(cd_deadline_after_ns(20 * CD_NS_PER_MS), 1);
    bool mine = name_own_failure(m);
    cd_error why = *cd_last_error();
    if (zero >= 0 && mine && m->knows_all)
        refuse(zero, &why, &brief);
    else if (zero >= 0)
        (void)cd_control_send(zero, CD_CONTROL_BYE, 0, 0, &brief);
    cd_fail_with(&why);
}

cd_status cd_world_bootstrap(cd_world *w, const cd_world_config *config, const cd_patience *patience)
{
    meeting *m = calloc(1, sizeof *m);
    if (!m)
        return cd_fail(CD_NO_MEMORY, "no memory to connect");
    m->world = w;
    m->config = config;
    m->store = w->store;
    m->patience = patience;
    snprintf(m->key, sizeof m->key, "%s/cdist/rank0", w->prefix);
    cd_host_want_files(2 * (uint64_t)w->world + FILES_BESIDE);
    cd_status status = cd_member_fill(&m->me, w->rank, w->world, !w->force_tcp, config->bind_address);
    if (status == CD_OK)
        status = meet(m);
    if (status == CD_OK)
        status = connect_all(m);
    if (status != CD_OK && w->rank == 0) {
        (void)name_own_failure(m);
        cd_error why = *cd_last_error();
        if (why.code == CD_INTERRUPTED)
            cd_fail_rank(CD_PEER_LOST, 0, "rank 0 was interrupted while the ranks were connecting");
        cd_error told = *cd_last_error();
        refuse_all(m, &told);
        cd_fail_with(&why);
    }
    if (status != CD_OK && w->rank != 0)
        give_up(m);
    free(m);
    return status;
}
