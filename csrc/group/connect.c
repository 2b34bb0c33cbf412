/* The connections of a world besides those to rank 0: shared memory or a socket for the data of each pair of ranks and, where
 * there are several hosts, a second control connection.
 *
 * Rank 0 passes on who was lost and why. When it is the one that is lost or frozen the others would each find only whoever
 * failed next: so the lowest rank of another host, the deputy, has a control connection to every rank as well and passes on
 * the same (monitor.c). */
#include "base/log.h"
#include "group/group_impl.h"
#include "net/link.h"
#include "net/sock.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* How long a rank whose connection to another one failed waits for what rank 0 says of that one, whose end is seen there at
 * once. */
#define VERDICT_NS (1 * CD_NS_PER_S)

void cd_world_find_hosts(cd_world *w)
{
    for (int r = 0; r < w->world; r++) {
        w->host_of[r] = r;
        w->local_of[r] = 0;
        for (int lower = r - 1; lower >= 0; lower--)
            if (w->host_of[lower] == lower && cd_member_shares_host(&w->members[lower], &w->members[r]))
                w->host_of[r] = lower;
        for (int lower = 0; lower < r; lower++)
            w->local_of[r] += w->host_of[lower] == w->host_of[r];
    }
    w->locals = 0;
    for (int r = 0; r < w->world; r++)
        w->locals += w->host_of[r] == w->host_of[w->rank];
    w->local = w->local_of[w->rank];
}

/* ---- who cannot go on ---- */

enum said { NOTHING, GIVES_UP, ENDED, WHY }; /* the later explains more */

static enum said heard_of(const cd_world *w, int from)
{
    cd_control_head head;
    ssize_t got = recv(w->controls[from], &head, sizeof head, MSG_PEEK | MSG_DONTWAIT);
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR))
        return ENDED;
    if (got != (ssize_t)sizeof head || head.magic != CD_CONTROL_MAGIC)
        return NOTHING;
    if (head.kind == CD_CONTROL_REFUSED && head.bytes == sizeof(cd_error))
        return WHY;
    return head.kind == CD_CONTROL_BYE && head.bytes == 0 ? GIVES_UP : NOTHING;
}

static cd_status listen_to_others(const cd_world *w)
{
    int who = -1;
    enum said most = NOTHING;
    for (int r = 0; r < (w->rank == 0 ? w->world : 1); r++) {
        enum said said = w->controls[r] >= 0 ? heard_of(w, r) : NOTHING;
        if (said > most) {
            most = said;
            who = r;
        }
    }
    if (most == WHY) {
        uint8_t none;
        cd_patience brief = cd_patience_until(cd_deadline_after_ns(VERDICT_NS), 1);
        return cd_control_expect(w->controls[who], CD_CONTROL_REFUSED, &none, 1, &brief);
    }
    return most == NOTHING ? CD_OK : cd_fail_rank(CD_PEER_LOST, who, "rank %d was lost while the ranks were connecting", who);
}

static cd_status idle_listening(void *ctx)
{
    const cd_listening *l = ctx;
    if (l->outer->idle)
        CD_TRY(l->outer->idle(l->outer->idle_ctx));
    return listen_to_others(l->world);
}

cd_patience cd_world_listening(cd_world *w, const cd_patience *patience, cd_listening *listening)
{
    *listening = (cd_listening){w, patience};
    cd_patience made = *patience;
    made.idle = idle_listening;
    made.idle_ctx = listening;
    return made;
}

/* A connection to another rank failed, which the loss of that one would explain: what rank 0 says, else the thread's error as it
 * is. */
static cd_status explained(cd_world *w, const cd_patience *patience)
{
    cd_error mine = *cd_last_error();
    if (mine.rank >= 0 || w->rank == 0 || (mine.code != CD_PEER_LOST && mine.code != CD_NETWORK))
        return mine.code;
    cd_patience brief = *patience;
    brief.deadline = cd_deadline_earlier(patience->deadline, cd_deadline_after_ns(VERDICT_NS));
    const _Atomic uint64_t never = 0;
    cd_status status = cd_wait_at_least(&never, 1, -1, &brief);
    if (status != CD_TIMED_OUT)
        return status;
    mine.code = CD_NETWORK; /* to rank 0, which passes it on, this rank's own failure: nobody has lost the other one */
    return cd_fail_with(&mine);
}

/* ---- within a host ---- */

cd_status cd_world_share_host(cd_world *w, const cd_patience *patience, uint8_t *attached_p)
{
    *attached_p = 1;
    if (w->locals == 1)
        return CD_OK;
    cd_handout_key key = {.key = {0, 0}};
    memcpy(key.generation, w->generation, sizeof key.generation);
    int leader = w->host_of[w->rank];
    if (leader == w->rank) {
        cd_world_limit_arena(w);
        cd_status status = cd_segment_create(cd_world_host_bytes(w), &w->segment);
        if (status != CD_OK) {
            /* An address-space limit: go without the arena. */
            w->host.arena_bytes = 0;
            CD_TRY(cd_segment_create(cd_world_host_bytes(w), &w->segment));
        }
        CD_TRY(cd_world_lay_out(w, w->segment.base, w->segment.bytes));
        CD_TRY(cd_handout_offer(w->handout, &key, w->segment.fd));
        cd_monitor_wake(w);
        return CD_OK;
    }
    cd_status status = cd_handout_fetch(w->members[leader].nonce, &key, patience, &w->segment);
    if (status == CD_NOT_FOUND) {
        cd_log(CD_LOG_INFO, "rank %d: %s; using TCP to rank %d", w->rank, cd_last_error()->text, leader);
        *attached_p = 0;
        return CD_OK;
    }
    if (status != CD_OK)
        return explained(w, patience);
    return cd_world_lay_out(w, w->segment.base, w->segment.bytes);
}

/* ---- between hosts ---- */

/* Dials a rank and proves who we are; `kind` says what the connection is to be. */
static cd_status dial(cd_world *w, const cd_member *me, int peer, cd_control_kind kind,
                      const cd_patience *patience, int *socket_p)
{
    const cd_member *member = &w->members[peer];
    int socket;
    cd_status status = cd_sock_connect_once(member->address, member->port, patience, &socket);
    if (status != CD_OK && cd_last_error()->rank < 0) {
        bool is_named = status != CD_NETWORK || strstr(cd_last_error()->text, "ulimit");
        cd_fail_prefix("no connection to rank %d at %s port %u%s: ", peer, member->address, member->port,
                       is_named ? "" : " (does a firewall keep the hosts apart? CDIST_PORT_RANGE and CDIST_SOCKET_IFNAME choose "
                                       "ports and network)");
    }
    if (status != CD_OK)
        return explained(w, patience);
    cd_hello hello = {.me = *me};
    memcpy(hello.target, member->nonce, CD_MEMBER_NONCE_BYTES);
    cd_hello_sign(&hello, cd_world_secret(w));
    uint8_t proof[CD_MEMBER_PROOF_BYTES], expected[CD_MEMBER_PROOF_BYTES];
    status = cd_control_send(socket, kind, &hello, sizeof hello, patience);
    if (status == CD_OK)
        status = cd_control_expect(socket, CD_CONTROL_WELCOME, proof, sizeof proof, patience);
    if (status == CD_OK && w->has_secret) {
        cd_answer_proof(&hello, w->secret, expected);
        if (!cd_proof_equal(proof, expected))
            status = cd_fail_rank(CD_REFUSED, peer, "who answers at the address of rank %d does not know the job secret", peer);
    }
    if (status != CD_OK) {
        close(socket);
        if (cd_last_error()->rank < 0)
            cd_fail_prefix("connection to rank %d: ", peer);
        return explained(w, patience);
    }
    *socket_p = socket;
    return CD_OK;
}

static cd_status dial_link(cd_world *w, const cd_member *me, int peer, const cd_patience *patience)
{
    int socket;
    CD_TRY(dial(w, me, peer, CD_CONTROL_DATA, patience, &socket));
    cd_pipe *pipe;
    cd_status status = cd_link_open(socket, peer, &pipe);
    if (status != CD_OK) {
        close(socket);
        return status;
    }
    cd_mesh_attach(w->mesh, pipe);
    return CD_OK;
}

static int choose_deputy(const cd_world *w)
{
    for (int r = 1; r < w->world; r++)
        if (w->host_of[r] != w->host_of[0] && w->world > 2)
            return r;
    return -1;
}

/* Rank 0 has a control connection to the deputy already. */
static cd_status connect_deputy(cd_world *w, const cd_member *me, const cd_patience *patience, uint64_t *awaited_p)
{
    w->deputy = choose_deputy(w);
    if (w->deputy < 0 || w->rank == 0)
        return CD_OK;
    if (w->deputy == w->rank) {
        *awaited_p += (uint64_t)w->world - 2;
        return CD_OK;
    }
    CD_TRY(dial(w, me, w->deputy, CD_CONTROL_SECOND, patience, &w->controls[w->deputy]));
    cd_sock_set_patience(w->controls[w->deputy], CD_CONTROL_PATIENCE_MS);
    return CD_OK;
}

static cd_status name_unconnected(cd_world *w, const cd_member *me)
{
    char list[256];
    size_t used = 0;
    int first = -1;
    for (int r = 0; r < w->world && used + 16 < sizeof list; r++) {
        pthread_mutex_lock(&w->control_lock);
        bool has_control = w->deputy != w->rank || r == w->rank || w->controls[r] >= 0;
        pthread_mutex_unlock(&w->control_lock);
        if (has_control && (r <= w->rank || cd_mesh_reaches(w->mesh, r)))
            continue;
        used += (size_t)snprintf(list + used, sizeof list - used, "%s%d", first < 0 ? "" : ", ", r);
        first = first < 0 ? r : first;
    }
    return cd_fail_rank(CD_TIMED_OUT, first,
                        "ranks [%s] did not connect to rank %d at %s port %u in time (does a firewall keep the hosts apart? "
                        "CDIST_PORT_RANGE and CDIST_SOCKET_IFNAME choose ports and network)",
                        first < 0 ? "" : list, w->rank, me->address, me->port);
}

/* Higher ranks dial lower ones, and all the deputy; the monitor takes the calls. */
cd_status cd_world_connect(cd_world *w, const cd_member *me, const cd_patience *patience)
{
    uint64_t awaited = 0;
    for (int peer = 0; peer < w->world; peer++) {
        if (peer == w->rank)
            continue;
        if (w->host_of[peer] == w->host_of[w->rank]) {
            cd_pipe *pipe;
            CD_TRY(cd_channel_open(w->host.channels, w->locals, w->local, w->local_of[peer], peer, &pipe));
            cd_mesh_attach(w->mesh, pipe);
        } else if (peer < w->rank) {
            CD_TRY(dial_link(w, me, peer, patience));
        } else {
            awaited++;
        }
    }
    CD_TRY(connect_deputy(w, me, patience, &awaited));
    cd_status status = cd_wait_at_least(&w->links, awaited, -1, patience);
    return status == CD_TIMED_OUT && cd_last_error()->rank < 0 ? name_unconnected(w, me) : status;
}
