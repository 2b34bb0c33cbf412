/* The connections of a world besides those to rank 0: shared memory or a socket for the data of each pair of ranks and, where
 * there are several hosts, a second control connection.
 *
 * Rank 0 passes on who was lost and why. When it is the one that is lost or frozen the others would each find only whoever
 * failed next: so the lowest rank of another host, the deputy, has a control connection to every rank as well and passes on
 * the same (monitor.c). */
#include "group/group_impl.h"
#include "net/link.h"
#include "net/sock.h"

#include <string.h>
#include <unistd.h>

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

/* Dials a rank and proves who we are; `kind` says what the connection is to be. */
static cd_status dial(cd_world *w, const cd_member *me, int peer, cd_control_kind kind,
                      const cd_patience *patience, int *socket_p)
{
    const cd_member *member = &w->members[peer];
    int socket;
    cd_status status = cd_sock_connect_once(member->address, member->port, patience, &socket);
    if (status != CD_OK)
        return cd_fail_prefix("no connection to rank %d at %s port %u: ", peer, member->address, member->port);
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
        return cd_fail_prefix("connection to rank %d: ", peer);
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
    if (status == CD_TIMED_OUT)
        return cd_fail(CD_TIMED_OUT, "only %llu of %llu connections came in time",
                       (unsigned long long)atomic_load_explicit(&w->links, memory_order_relaxed), (unsigned long long)awaited);
    return status;
}
