#include "net/mesh_core.h"

#include "base/knob.h"

#include <errno.h>
#include <linux/sockios.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <unistd.h>

/* A sender that never waits looks at what the peer says (SLOW) after this many bytes. */
#define READ_AFTER_BYTES (UINT64_C(256) << 10)

static void init_changed(cd_mesh *mesh)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&mesh->changed, &attributes);
    pthread_condattr_destroy(&attributes);
}

cd_status cd_mesh_create(int rank, int world, cd_mesh **out)
{
    int reach; /* the words of the setting are in the order of cd_mesh_reach */
    if (world < 1 || rank < 0 || rank >= world)
        return cd_fail(CD_BAD_ARGUMENT, "mesh: rank %d is not in a world of %d", rank, world);
    CD_TRY(cd_knob_choice("CDIST_SINGLE_COPY", &reach));
    cd_mesh *mesh = calloc(1, sizeof *mesh);
    if (!mesh)
        return cd_fail(CD_NO_MEMORY, "mesh: no memory for %zu bytes", sizeof *mesh);
    mesh->reach = (cd_mesh_reach)reach;
    mesh->rank = rank;
    mesh->world = world;
    mesh->event = -1;
    mesh->peers = calloc((size_t)world, sizeof *mesh->peers);
    mesh->attached = calloc((size_t)world, sizeof *mesh->attached);
    mesh->polled = calloc((size_t)world + 1, sizeof *mesh->polled);
    pthread_mutex_init(&mesh->lock, NULL);
    init_changed(mesh);
    pthread_cond_init(&mesh->work, NULL);
    cd_status status = CD_OK;
    if (!mesh->peers || !mesh->attached || !mesh->polled)
        status = cd_fail(CD_NO_MEMORY, "mesh: no memory for a world of %d", world);
    else if ((mesh->event = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) < 0)
        status = cd_fail_errno(CD_IO, errno, "mesh: eventfd");
    if (status != CD_OK) {
        cd_mesh_free(mesh);
        return status;
    }
    *out = mesh;
    return CD_OK;
}

void cd_mesh_attach(cd_mesh *mesh, cd_pipe *pipe)
{
    pthread_mutex_lock(&mesh->lock);
    cd_mesh_peer *p = &mesh->peers[pipe->peer];
    p->pipe = pipe;
    mesh->attached[mesh->attached_count++] = pipe->peer;
    *(pipe->fd >= 0 ? &mesh->sockets : &mesh->memories) += 1;
    if (mesh->closed)
        cd_mesh_lose(mesh, pipe->peer, mesh->closed);
    mesh->news = true;
    cd_mesh_unlock(mesh);
}

bool cd_mesh_reaches(cd_mesh *mesh, int peer)
{
    pthread_mutex_lock(&mesh->lock);
    bool reaches = mesh->peers[peer].pipe != 0;
    pthread_mutex_unlock(&mesh->lock);
    return reaches;
}

void cd_mesh_close(cd_mesh *mesh, const cd_error *why)
{
    pthread_mutex_lock(&mesh->lock);
    if (!mesh->closed) {
        mesh->closed = cd_mesh_copy_error(why);
        for (int peer = 0; peer < mesh->world; peer++)
            cd_mesh_lose(mesh, peer, mesh->closed);
        while (mesh->any.first) {
            cd_xfer *x = mesh->any.first;
            cd_xfers_remove(&mesh->any, x);
            cd_mesh_complete(mesh, x, mesh->closed);
        }
    }
    mesh->news = true;
    cd_mesh_unlock(mesh);
}

static void free_error(cd_error *error)
{
    cd_xfer holder = {.error = error};
    cd_xfer_clear(&holder);
}

void cd_mesh_free(cd_mesh *mesh)
{
    if (!mesh)
        return;
    cd_mesh_stop_helper(mesh);
    for (int peer = 0; mesh->peers && peer < mesh->world; peer++) {
        cd_mesh_peer *p = &mesh->peers[peer];
        for (cd_kept *kept = p->kept, *next; kept; kept = next) {
            next = kept->next;
            free(kept);
        }
        if (p->pipe)
            p->pipe->ops->free(p->pipe);
        free(p->control.list);
        free(p->out.copy);
        free_error(p->lost);
        free_error(p->deaf);
    }
    if (mesh->event >= 0)
        close(mesh->event);
    pthread_cond_destroy(&mesh->changed);
    pthread_cond_destroy(&mesh->work);
    pthread_mutex_destroy(&mesh->lock);
    free_error(mesh->closed);
    free(mesh->forgotten);
    free(mesh->polled);
    free(mesh->attached);
    free(mesh->peers);
    free(mesh);
}

/* Why nothing can go to or come from this peer, as the thread's error; CD_OK when it can. */
static cd_status check_peer(cd_mesh *mesh, int peer, bool is_send)
{
    if (peer < 0 || peer >= mesh->world)
        return cd_fail(CD_BAD_ARGUMENT, "rank %d is not in a world of %d", peer, mesh->world);
    cd_mesh_peer *p = &mesh->peers[peer];
    if (p->lost)
        return cd_fail_with(p->lost);
    if (is_send && p->deaf)
        return cd_fail_with(p->deaf);
    if (!p->pipe && peer != mesh->rank)
        return cd_fail_rank(CD_PEER_LOST, peer, "there is no connection to rank %d", peer);
    return CD_OK;
}

static void send_to_self(cd_mesh *mesh, cd_xfer *x)
{
    cd_xfer *receive = cd_mesh_take_posted(mesh, x->peer, x->match);
    bool eager = x->bytes <= CD_MESH_EAGER;
    cd_kept *kept = cd_mesh_keep(mesh, x->peer, x->match, x->signature, 0, x->bytes, eager ? x->bytes : 0);
    if (!kept) {
        if (receive)
            cd_mesh_complete(mesh, receive, cd_last_error());
        cd_mesh_complete(mesh, x, cd_last_error());
        return;
    }
    if (eager) {
        if (x->bytes)
            memcpy(kept->body, x->data, x->bytes);
        kept->is_whole = true;
        cd_mesh_complete(mesh, x, NULL);
    } else {
        kept->self = x;
        x->state = CD_XFER_SELF;
    }
    if (receive)
        cd_mesh_accept(mesh, mesh->rank, kept, receive);
}

/* Common end of both kinds of posting. */
static void finish_posting(cd_mesh *mesh, cd_xfer *x)
{
    bool is_running = x->state != CD_XFER_DONE;
    mesh->visits++;
    if (is_running && x->is_async)
        cd_mesh_start_helper(mesh);
    if (is_running)
        mesh->news = true; /* sleepers must look for room, or the helper must begin */
    cd_mesh_unlock(mesh);
}

void cd_mesh_send(cd_mesh *mesh, cd_xfer *x, int peer, cd_match match, uint32_t signature, const void *data, size_t bytes,
                  bool is_async)
{
    *x = (cd_xfer){.is_send = true, .is_async = is_async, .peer = peer, .match = match, .signature = signature,
                   .data = (char *)(uintptr_t)data, .bytes = bytes, .state = CD_XFER_QUEUED, .source = -1};
    pthread_mutex_lock(&mesh->lock);
    mesh->async_count += is_async;
    if (check_peer(mesh, peer, true) != CD_OK) {
        cd_mesh_complete(mesh, x, cd_last_error());
    } else if (peer == mesh->rank) {
        send_to_self(mesh, x);
    } else {
        cd_mesh_peer *p = &mesh->peers[peer];
        cd_xfers_push(&p->first, x);
        p->unread += bytes < CD_MESH_EAGER ? bytes + sizeof(cd_frame) : CD_MESH_EAGER;
        if (p->unread > READ_AFTER_BYTES)
            cd_mesh_pull(mesh, peer);
        cd_mesh_push(mesh, peer);
    }
    finish_posting(mesh, x);
}

void cd_mesh_recv(cd_mesh *mesh, cd_xfer *x, int peer, cd_match match, uint32_t signature, void *data, size_t bytes,
                  bool may_be_shorter, bool is_async)
{
    *x = (cd_xfer){.is_async = is_async, .may_be_shorter = may_be_shorter, .peer = peer, .match = match,
                   .signature = signature, .data = data, .bytes = bytes, .state = CD_XFER_POSTED, .source = -1};
    int source = -1;
    pthread_mutex_lock(&mesh->lock);
    mesh->async_count += is_async;
    x->stamp = ++mesh->stamp;
    cd_kept *kept = !mesh->closed && peer < mesh->world ? cd_mesh_find_kept(mesh, peer, match, &source) : NULL;
    if (kept) {
        cd_mesh_accept(mesh, source, kept, x);
        if (cd_mesh_has_output(&mesh->peers[source]))
            cd_mesh_push(mesh, source);
    } else if (peer == -1 && mesh->closed) {
        cd_mesh_complete(mesh, x, mesh->closed);
    } else if (peer != -1 && check_peer(mesh, peer, false) != CD_OK) {
        cd_mesh_complete(mesh, x, cd_last_error());
    } else {
        cd_xfers_push(peer == -1 ? &mesh->any : &mesh->peers[peer].posted, x);
    }
    finish_posting(mesh, x);
}

static void cancel_send(cd_mesh *mesh, cd_xfer *x)
{
    cd_mesh_peer *p = &mesh->peers[x->peer];
    switch ((cd_xfer_state)x->state) {
    case CD_XFER_QUEUED: cd_xfers_remove(&p->first, x); break;
    case CD_XFER_SENDING:
        if (!cd_mesh_detach_output(mesh, x->peer, x))
            return; /* the peer was lost, and the transfer with it */
        break;
    case CD_XFER_ASKED:
        cd_xfers_remove(&p->asked, x);
        if (!cd_mesh_withdraw(mesh, x)) {
            cd_mesh_delivered(mesh, x);
            return;
        }
        cd_mesh_control(mesh, x->peer, CD_FRAME_DROP, x->ticket, 0);
        break;
    case CD_XFER_BODY:
        if (!cd_mesh_detach_output(mesh, x->peer, x))
            return;
        cd_xfers_remove(&p->bodies, x);
        cd_mesh_control(mesh, x->peer, CD_FRAME_DROP, x->ticket, 0);
        break;
    case CD_XFER_SELF:
        for (cd_kept *kept = p->kept; kept; kept = kept->next) {
            if (kept->self == x) {
                cd_mesh_drop_kept(mesh, x->peer, kept);
                break;
            }
        }
        break;
    default: break;
    }
    cd_mesh_cancelled(mesh, x);
}

static void cancel_recv(cd_mesh *mesh, cd_xfer *x)
{
    cd_mesh_peer *p = x->source >= 0 ? &mesh->peers[x->source] : NULL;
    switch ((cd_xfer_state)x->state) {
    case CD_XFER_POSTED: cd_xfers_remove(x->peer == -1 ? &mesh->any : &mesh->peers[x->peer].posted, x); break;
    case CD_XFER_CLAIMED:
        for (cd_kept *kept = p->kept; kept; kept = kept->next) {
            if (kept->claimed == x)
                kept->claimed = NULL; /* it waits for another receive, as before */
        }
        break;
    case CD_XFER_DIRECT:
        p->in.xfer = NULL;
        p->in.to = NULL;
        break;
    case CD_XFER_READING:
    case CD_XFER_LATE:
    case CD_XFER_ARRIVING:
        cd_xfers_remove(x->state == CD_XFER_READING ? &p->reading : &p->arriving, x);
        if (p->in.xfer == x) {
            p->in.xfer = NULL;
            p->in.to = NULL;
        }
        cd_mesh_control(mesh, x->source, CD_FRAME_REFUSE, x->their_ticket, CD_ABORTED);
        break;
    default: break;
    }
    cd_mesh_cancelled(mesh, x);
}

/* What must still go out although no transfer of ours waits for it is the helper's. */
static void leave_rest_to_helper(cd_mesh *mesh)
{
    cd_mesh_progress(mesh);
    if (cd_mesh_has_rest(mesh)) {
        mesh->has_rest = true;
        cd_mesh_start_helper(mesh);
    }
}

void cd_mesh_cancel(cd_mesh *mesh, cd_xfer *xfer)
{
    pthread_mutex_lock(&mesh->lock);
    if (xfer->state != CD_XFER_DONE) {
        if (xfer->is_send)
            cancel_send(mesh, xfer);
        else
            cancel_recv(mesh, xfer);
        leave_rest_to_helper(mesh);
    }
    cd_mesh_unlock(mesh);
}

void cd_mesh_fail_peer(cd_mesh *mesh, int peer, const cd_error *why)
{
    pthread_mutex_lock(&mesh->lock);
    if (peer >= 0 && peer < mesh->world)
        cd_mesh_lose(mesh, peer, why);
    cd_mesh_unlock(mesh);
}

static void remember_forgotten(cd_mesh *mesh, uint64_t context)
{
    if (cd_mesh_is_forgotten(mesh, context))
        return;
    if (mesh->forgotten_count == mesh->forgotten_room) {
        size_t room = mesh->forgotten_room ? 2 * mesh->forgotten_room : 16;
        uint64_t *list = realloc(mesh->forgotten, room * sizeof *list);
        if (!list)
            return; /* its late messages are kept, within the bound for each peer */
        mesh->forgotten = list;
        mesh->forgotten_room = room;
    }
    size_t at = mesh->forgotten_count++;
    for (; at > 0 && mesh->forgotten[at - 1] > context; at--)
        mesh->forgotten[at] = mesh->forgotten[at - 1];
    mesh->forgotten[at] = context;
}

void cd_mesh_forget(cd_mesh *mesh, uint64_t context)
{
    pthread_mutex_lock(&mesh->lock);
    remember_forgotten(mesh, context);
    for (int peer = 0; peer < mesh->world; peer++) {
        for (cd_kept *kept = mesh->peers[peer].kept, *next; kept; kept = next) {
            next = kept->next;
            if (kept->match.context != context || kept->claimed || kept->self)
                continue;
            if (kept->is_announced)
                cd_mesh_control(mesh, peer, CD_FRAME_REFUSE, kept->ticket, CD_PEER_LOST);
            cd_mesh_drop_kept(mesh, peer, kept);
        }
    }
    leave_rest_to_helper(mesh);
    cd_mesh_unlock(mesh);
}

/* Bytes that the kernel has not put on the way; closing might lose them. */
static bool kernel_holds(const cd_pipe *pipe)
{
    int unsent = 0;
    return pipe->fd >= 0 && ioctl(pipe->fd, SIOCOUTQNSD, &unsent) == 0 && unsent > 0;
}

bool cd_mesh_owes(cd_mesh *mesh)
{
    pthread_mutex_lock(&mesh->lock);
    cd_mesh_progress(mesh);
    bool owes = false;
    for (int i = 0; i < mesh->attached_count && !owes; i++) {
        const cd_mesh_peer *p = &mesh->peers[mesh->attached[i]];
        owes = !p->lost && (p->asked.first || (!p->deaf && (cd_mesh_has_output(p) || kernel_holds(p->pipe))));
    }
    cd_mesh_unlock(mesh);
    return owes;
}

size_t cd_mesh_outstanding(cd_mesh *mesh)
{
    pthread_mutex_lock(&mesh->lock);
    size_t count = mesh->async_count;
    pthread_mutex_unlock(&mesh->lock);
    return count;
}

uint64_t cd_mesh_bytes_sent(const cd_mesh *mesh)
{
    return atomic_load_explicit(&mesh->bytes_sent, memory_order_relaxed);
}
