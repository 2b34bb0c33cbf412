#include "net/mesh_core.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const cd_error cancelled_error = {.code = CD_ABORTED, .rank = -1, .text = "the transfer was cancelled"};
static const cd_error memory_error = {.code = CD_NO_MEMORY, .rank = -1, .text = "no memory to describe a failed transfer"};

void cd_xfers_push(cd_xfers *list, cd_xfer *xfer)
{
    xfer->next = NULL;
    if (list->first)
        list->last->next = xfer;
    else
        list->first = xfer;
    list->last = xfer;
}

void cd_xfers_remove(cd_xfers *list, cd_xfer *xfer)
{
    cd_xfer *before = NULL;
    for (cd_xfer *x = list->first; x != xfer; x = x->next)
        before = x;
    if (before)
        before->next = xfer->next;
    else
        list->first = xfer->next;
    if (list->last == xfer)
        list->last = before;
    xfer->next = NULL;
}

cd_xfer *cd_xfers_find(const cd_xfers *list, uint32_t ticket)
{
    cd_xfer *x = list->first;
    while (x && x->ticket != ticket)
        x = x->next;
    return x;
}

cd_error *cd_mesh_copy_error(const cd_error *error)
{
    cd_error *copy = malloc(sizeof *copy);
    if (!copy)
        return (cd_error *)(uintptr_t)&memory_error;
    *copy = *error;
    return copy;
}

static void finish(cd_mesh *mesh, cd_xfer *x, cd_error *error)
{
    x->error = error;
    x->state = CD_XFER_DONE;
    if (x->is_async)
        mesh->async_count--;
    mesh->news = true;
    /* Release: data and fields above are visible to who sees it. The owner may free the transfer from here on. */
    atomic_store_explicit(&x->done, 1, memory_order_release);
}

/* The rank whose loss the error is, −1 if it is anything else. */
static int lost_by(const cd_mesh *mesh, const cd_error *error)
{
    return error->code == CD_PEER_LOST && error->rank >= 0 && error->rank < mesh->world ? error->rank : -1;
}

static void note_untold(cd_mesh *mesh, cd_xfer *x, const cd_error *error)
{
    int lost = lost_by(mesh, error);
    if (lost >= 0 && mesh->peers[lost].loss_is_known)
        return;
    x->failure = ++mesh->failures;
    x->lost = lost;
    mesh->untold_count++;
    if (lost >= 0)
        mesh->peers[lost].untold++;
    if (mesh->remembered == CD_MESH_UNTOLD)
        return;
    cd_mesh_untold_send *entry = &mesh->untold[mesh->remembered++];
    entry->failure = x->failure;
    entry->lost = lost;
    snprintf(entry->text, sizeof entry->text, "to rank %d (tag %lld, %zu bytes): %.170s", x->peer, (long long)x->match.tag,
             x->bytes, error->text);
}

/* Forgets the texts of this failure, or of all by the loss of this rank. */
static void forget_untold(cd_mesh *mesh, uint64_t failure, int lost)
{
    size_t kept = 0;
    for (size_t i = 0; i < mesh->remembered; i++)
        if (mesh->untold[i].failure != failure && (lost < 0 || mesh->untold[i].lost != lost))
            mesh->untold[kept++] = mesh->untold[i];
    mesh->remembered = kept;
}

void cd_mesh_tell(cd_mesh *mesh, cd_xfer *x)
{
    pthread_mutex_lock(&mesh->lock);
    if (x->failure && !(x->lost >= 0 && mesh->peers[x->lost].loss_is_known)) {
        forget_untold(mesh, x->failure, -1);
        mesh->untold_count--;
        if (x->lost >= 0)
            mesh->peers[x->lost].untold--;
    }
    x->failure = 0;
    cd_mesh_unlock(mesh);
}

void cd_mesh_tell_loss(cd_mesh *mesh, int rank)
{
    if (rank < 0 || rank >= mesh->world)
        return;
    pthread_mutex_lock(&mesh->lock);
    cd_mesh_peer *peer = &mesh->peers[rank];
    forget_untold(mesh, 0, rank);
    mesh->untold_count -= peer->untold;
    peer->untold = 0;
    peer->loss_is_known = true;
    cd_mesh_unlock(mesh);
}

size_t cd_mesh_untold(cd_mesh *mesh, char *out, size_t bytes)
{
    pthread_mutex_lock(&mesh->lock);
    size_t count = mesh->untold_count;
    snprintf(out, bytes, "%s", mesh->remembered ? mesh->untold[0].text : "");
    cd_mesh_unlock(mesh);
    return count;
}

void cd_mesh_complete(cd_mesh *mesh, cd_xfer *xfer, const cd_error *error)
{
    if (error && xfer->is_send && xfer->is_async && !mesh->closed)
        note_untold(mesh, xfer, error);
    finish(mesh, xfer, error ? cd_mesh_copy_error(error) : NULL);
}

void cd_mesh_cancelled(cd_mesh *mesh, cd_xfer *xfer)
{
    finish(mesh, xfer, (cd_error *)(uintptr_t)&cancelled_error);
}

void cd_xfer_clear(cd_xfer *xfer)
{
    if (xfer->error != &cancelled_error && xfer->error != &memory_error)
        free(xfer->error);
    xfer->error = NULL;
}

static bool match_equals(cd_match a, cd_match b)
{
    return a.context == b.context && a.tag == b.tag;
}

static cd_xfer *find_posted(const cd_xfers *list, cd_match match)
{
    cd_xfer *x = list->first;
    while (x && !match_equals(x->match, match))
        x = x->next;
    return x;
}

cd_xfer *cd_mesh_take_posted(cd_mesh *mesh, int peer, cd_match match)
{
    cd_xfers *list = &mesh->peers[peer].posted;
    cd_xfer *x = find_posted(list, match);
    cd_xfer *open = find_posted(&mesh->any, match);
    if (open && (!x || open->stamp < x->stamp)) {
        x = open;
        list = &mesh->any;
    }
    if (x)
        cd_xfers_remove(list, x);
    return x;
}

static cd_kept *find_kept_of(const cd_mesh_peer *peer, cd_match match)
{
    cd_kept *kept = peer->kept;
    while (kept && (kept->claimed || !match_equals(kept->match, match)))
        kept = kept->next;
    return kept;
}

cd_kept *cd_mesh_find_kept(cd_mesh *mesh, int peer, cd_match match, int *source_p)
{
    *source_p = peer;
    if (peer >= 0)
        return find_kept_of(&mesh->peers[peer], match);
    cd_kept *oldest = NULL;
    for (int p = 0; p < mesh->world; p++) {
        cd_kept *kept = find_kept_of(&mesh->peers[p], match);
        if (kept && (!oldest || kept->stamp < oldest->stamp)) {
            oldest = kept;
            *source_p = p;
        }
    }
    return oldest;
}

cd_kept *cd_mesh_keep(cd_mesh *mesh, int peer, cd_match match, uint32_t signature, uint32_t ticket, size_t bytes,
                      size_t body_room)
{
    cd_mesh_peer *p = &mesh->peers[peer];
    size_t cost = sizeof(cd_kept) + body_room;
    if (p->kept_bytes + cost > CD_MESH_KEPT_HARD) {
        cd_fail_rank(CD_IO, peer, "rank %d has sent %zu bytes of messages that nobody here receives; the limit is %zu", peer,
                     p->kept_bytes + cost, (size_t)CD_MESH_KEPT_HARD);
        return NULL;
    }
    cd_kept *kept = malloc(cost);
    if (!kept) {
        cd_fail_rank(CD_NO_MEMORY, peer, "no memory to keep a message of %zu bytes from rank %d", body_room, peer);
        return NULL;
    }
    *kept = (cd_kept){.stamp = ++mesh->stamp, .match = match, .signature = signature, .ticket = ticket, .bytes = bytes};
    if (!p->kept_last)
        p->kept_last = &p->kept;
    *p->kept_last = kept;
    p->kept_last = &kept->next;
    p->kept_bytes += cost;
    mesh->news = true; /* for those who probe */
    if (p->kept_bytes > CD_MESH_KEPT_SOFT && !p->told_slow && peer != mesh->rank) {
        p->told_slow = true;
        cd_mesh_control(mesh, peer, CD_FRAME_SLOW, 0, 0);
    }
    return kept;
}

void cd_mesh_drop_kept(cd_mesh *mesh, int peer, cd_kept *kept)
{
    cd_mesh_peer *p = &mesh->peers[peer];
    cd_kept **at = &p->kept;
    while (*at != kept)
        at = &(*at)->next;
    *at = kept->next;
    if (p->kept_last == &kept->next)
        p->kept_last = at;
    bool has_body = !kept->is_announced && !kept->self;
    p->kept_bytes -= sizeof(cd_kept) + (has_body ? kept->bytes : 0);
    if (p->in.kept == kept) {
        p->in.kept = NULL;
        p->in.to = NULL;
    }
    free(kept);
    if (p->told_slow && p->kept_bytes < CD_MESH_KEPT_SOFT / 2) {
        p->told_slow = false;
        cd_mesh_control(mesh, peer, CD_FRAME_FAST, 0, 0);
    }
}

bool cd_mesh_admits(cd_mesh *mesh, int source, cd_xfer *x, size_t bytes, uint32_t signature, int64_t ticket)
{
    bool differs = signature && x->signature && signature != x->signature;
    if (cd_likely(!differs && (bytes == x->bytes || (bytes < x->bytes && x->may_be_shorter))))
        return true;
    x->their_signature = signature;
    x->their_bytes = bytes;
    if (differs && bytes == x->bytes)
        cd_fail_rank(CD_MISMATCH, source, "message from rank %d with tag %lld has another dtype or shape than its receive",
                     source, (long long)x->match.tag);
    else
        cd_fail_rank(CD_MISMATCH, source, "message from rank %d with tag %lld has %zu bytes, its receive has %s%zu", source,
                     (long long)x->match.tag, bytes, x->may_be_shorter ? "at most " : "", x->bytes);
    if (ticket >= 0)
        cd_mesh_refuse(mesh, source, (uint32_t)ticket, x);
    x->source = source;
    cd_mesh_complete(mesh, x, cd_last_error());
    return false;
}

void cd_mesh_invite_body(cd_mesh *mesh, int source, cd_xfer *x)
{
    x->moved = 0;
    x->took_ns = x->bytes ? cd_now_ns() : 0;
    x->state = CD_XFER_ARRIVING;
    cd_xfers_push(&mesh->peers[source].arriving, x);
    cd_mesh_control(mesh, source, CD_FRAME_READY, x->their_ticket, x->ticket);
}

void cd_mesh_invite(cd_mesh *mesh, int source, uint32_t their_ticket, cd_offer offer, size_t bytes, cd_xfer *x)
{
    cd_mesh_peer *p = &mesh->peers[source];
    x->source = source;
    x->bytes = bytes;
    x->ticket = ++mesh->ticket;
    x->their_ticket = their_ticket;
    if (!cd_mesh_reads(mesh, p, offer, bytes)) {
        cd_mesh_invite_body(mesh, source, x);
        return;
    }
    x->moved = 0;
    x->offer = offer;
    x->state = CD_XFER_READING;
    cd_xfers_push(&p->reading, x);
}

static void accept_own(cd_mesh *mesh, cd_kept *kept, cd_xfer *x)
{
    cd_xfer *send = kept->self;
    send->their_signature = x->signature;
    send->their_bytes = x->bytes;
    if (cd_mesh_admits(mesh, mesh->rank, x, kept->bytes, kept->signature, -1)) {
        if (kept->bytes)
            memcpy(x->data, send->data, kept->bytes);
        x->source = mesh->rank;
        x->bytes = kept->bytes;
        cd_mesh_complete(mesh, x, NULL);
        cd_mesh_complete(mesh, send, NULL);
    } else {
        cd_mesh_complete(mesh, send, cd_last_error());
    }
    cd_mesh_drop_kept(mesh, mesh->rank, kept);
}

void cd_mesh_accept(cd_mesh *mesh, int source, cd_kept *kept, cd_xfer *x)
{
    if (kept->self) {
        accept_own(mesh, kept, x);
        return;
    }
    if (!cd_mesh_admits(mesh, source, x, kept->bytes, kept->signature, kept->is_announced ? (int64_t)kept->ticket : -1)) {
        cd_mesh_drop_kept(mesh, source, kept);
        return;
    }
    if (kept->is_announced) {
        cd_mesh_invite(mesh, source, kept->ticket, kept->offer, kept->bytes, x);
        cd_mesh_drop_kept(mesh, source, kept);
        return;
    }
    x->source = source;
    if (!kept->is_whole) {
        x->state = CD_XFER_CLAIMED;
        kept->claimed = x;
        return;
    }
    x->bytes = kept->bytes;
    if (kept->bytes)
        memcpy(x->data, kept->body, kept->bytes);
    cd_mesh_complete(mesh, x, NULL);
    cd_mesh_drop_kept(mesh, source, kept);
}

bool cd_mesh_is_forgotten(const cd_mesh *mesh, uint64_t context)
{
    size_t low = 0, high = mesh->forgotten_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (mesh->forgotten[middle] < context)
            low = middle + 1;
        else
            high = middle;
    }
    return low < mesh->forgotten_count && mesh->forgotten[low] == context;
}

static void fail_all(cd_mesh *mesh, cd_xfers *list, const cd_error *why)
{
    while (list->first) {
        cd_xfer *x = list->first;
        bool is_taken = x->state == CD_XFER_ASKED && !cd_mesh_withdraw(mesh, x);
        cd_xfers_remove(list, x);
        if (is_taken)
            cd_mesh_delivered(mesh, x);
        else
            cd_mesh_complete(mesh, x, why);
    }
}

void cd_mesh_deafen(cd_mesh *mesh, int peer, const cd_error *why)
{
    cd_mesh_peer *p = &mesh->peers[peer];
    if (p->deaf)
        return;
    p->deaf = cd_mesh_copy_error(why);
    if (p->out.xfer && p->out.xfer->state == CD_XFER_SENDING)
        cd_mesh_complete(mesh, p->out.xfer, p->deaf);
    free(p->out.copy);
    p->out.copy = NULL;
    p->out.xfer = NULL;
    p->out.active = false;
    p->control.count = 0;
    fail_all(mesh, &p->first, p->deaf);
    fail_all(mesh, &p->asked, p->deaf);
    fail_all(mesh, &p->bodies, p->deaf);
}

void cd_mesh_lose(cd_mesh *mesh, int peer, const cd_error *why)
{
    cd_mesh_peer *p = &mesh->peers[peer];
    if (p->lost)
        return;
    p->lost = cd_mesh_copy_error(why);
    cd_mesh_deafen(mesh, peer, p->lost);
    if (p->in.xfer && p->in.xfer->state == CD_XFER_DIRECT)
        cd_mesh_complete(mesh, p->in.xfer, p->lost);
    p->in.xfer = NULL;
    fail_all(mesh, &p->posted, p->lost);
    fail_all(mesh, &p->arriving, p->lost);
    fail_all(mesh, &p->reading, p->lost);
    /* Whole messages can still be received; the others never will be. */
    for (cd_kept *kept = p->kept, *next; kept; kept = next) {
        next = kept->next;
        if (kept->is_whole)
            continue;
        if (kept->claimed)
            cd_mesh_complete(mesh, kept->claimed, p->lost);
        if (kept->self)
            cd_mesh_complete(mesh, kept->self, p->lost);
        cd_mesh_drop_kept(mesh, peer, kept);
    }
    if (p->pipe) {
        p->pipe->ops->close(p->pipe);
        *(p->pipe->fd >= 0 ? &mesh->sockets : &mesh->memories) -= 1;
    }
    mesh->news = true;
}
