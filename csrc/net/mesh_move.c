#include "net/mesh_core.h"

#include <stdlib.h>
#include <string.h>

/* What one turn moves through one pipe at most, so that no thread holds the lock for long. */
#define TURN_BYTES (UINT64_C(1) << 20)
#define TURN_FRAMES 256
/* Control frames that wait for a peer that does not read; a live one never has that many. */
#define CONTROL_MOST (UINT64_C(1) << 18)

static const char filler[64];

void cd_mesh_control(cd_mesh *mesh, int peer, cd_frame_kind kind, uint32_t ticket, uint64_t offset)
{
    cd_mesh_peer *p = &mesh->peers[peer];
    if (p->deaf || p->lost || !p->pipe)
        return;
    if (p->control.first + p->control.count == p->control.room) {
        if (p->control.first) {
            memmove(p->control.list, p->control.list + p->control.first, p->control.count * sizeof(cd_frame));
            p->control.first = 0;
        } else {
            size_t room = p->control.room ? 2 * p->control.room : 16;
            cd_frame *list = room <= CONTROL_MOST ? realloc(p->control.list, room * sizeof *list) : NULL;
            if (!list) {
                cd_fail_rank(CD_IO, peer, "rank %d does not read: %zu control messages wait", peer, p->control.count);
                cd_mesh_deafen(mesh, peer, cd_last_error());
                return;
            }
            p->control.list = list;
            p->control.room = room;
        }
    }
    p->control.list[p->control.first + p->control.count++] =
        (cd_frame){.magic = CD_FRAME_MAGIC, .kind = (uint8_t)kind, .ticket = ticket, .offset = offset};
    mesh->news = true; /* a sleeper must wait for room in the pipe, too */
}

void cd_mesh_refuse(cd_mesh *mesh, int peer, uint32_t ticket, const cd_xfer *xfer)
{
    cd_mesh_peer *p = &mesh->peers[peer];
    size_t before = p->control.count;
    cd_mesh_control(mesh, peer, CD_FRAME_REFUSE, ticket, CD_MISMATCH);
    if (p->control.count == before)
        return; /* it cannot be told any more */
    cd_frame *frame = &p->control.list[p->control.first + before];
    frame->bytes = xfer->bytes;
    frame->signature = xfer->signature;
}

bool cd_mesh_has_output(const cd_mesh_peer *p)
{
    return p->out.active || p->control.count || p->first.first || p->bodies.first;
}

bool cd_mesh_has_rest(const cd_mesh *mesh)
{
    for (int i = 0; i < mesh->attached_count; i++) {
        const cd_mesh_peer *p = &mesh->peers[mesh->attached[i]];
        if (p->control.count || (p->out.active && !p->out.xfer))
            return true;
    }
    return false;
}

/* Out: control frames, then messages in order, then segments of large bodies. */

static void start_message(cd_mesh *mesh, cd_mesh_peer *p, cd_xfer *x)
{
    bool eager = x->bytes <= CD_MESH_EAGER && !p->is_slow;
    cd_xfers_remove(&p->first, x);
    p->out.frame = (cd_frame){.magic = CD_FRAME_MAGIC,
                              .kind = eager ? CD_FRAME_EAGER : CD_FRAME_ASK,
                              .context = x->match.context,
                              .tag = x->match.tag,
                              .bytes = x->bytes,
                              .signature = x->signature};
    if (!eager) {
        x->ticket = p->out.frame.ticket = ++mesh->ticket;
        cd_mesh_offer(mesh, p, x);
        p->out.frame.offer = x->offer;
        x->state = CD_XFER_ASKED;
        cd_xfers_push(&p->asked, x);
        return;
    }
    x->state = CD_XFER_SENDING;
    p->out.xfer = x;
    if (x->bytes > CD_FRAME_INLINE) {
        p->out.body = x->data;
        p->out.body_left = x->bytes;
    } else if (x->bytes) {
        memcpy(p->out.frame.inline_body, x->data, x->bytes);
    }
}

static void start_segment(cd_mesh_peer *p, cd_xfer *x)
{
    size_t left = x->bytes - x->moved;
    size_t n = left < CD_FRAME_SEGMENT ? left : (size_t)CD_FRAME_SEGMENT;
    p->out.frame = (cd_frame){.magic = CD_FRAME_MAGIC,
                              .kind = CD_FRAME_BODY,
                              .offset = x->moved,
                              .bytes = n,
                              .ticket = x->their_ticket};
    p->out.xfer = x;
    p->out.body = n ? x->data + x->moved : NULL;
    p->out.body_left = n;
}

static bool start_frame(cd_mesh *mesh, cd_mesh_peer *p)
{
    p->out.xfer = NULL;
    p->out.body = NULL;
    p->out.body_left = 0;
    if (p->control.count) {
        p->out.frame = p->control.list[p->control.first];
        p->control.first++;
        if (--p->control.count == 0)
            p->control.first = 0;
    } else if (p->first.first) {
        start_message(mesh, p, p->first.first);
    } else if (p->bodies.first) {
        start_segment(p, p->bodies.first);
    } else {
        return false;
    }
    p->out.header_left = sizeof(cd_frame);
    p->out.filler_left = cd_frame_filler_bytes(p->out.body_left);
    p->out.active = true;
    return true;
}

void cd_mesh_count_sent(cd_mesh *mesh, uint64_t bytes)
{
    uint64_t sent = atomic_load_explicit(&mesh->bytes_sent, memory_order_relaxed) + bytes;
    atomic_store_explicit(&mesh->bytes_sent, sent, memory_order_relaxed);
}

static void finish_frame(cd_mesh *mesh, cd_mesh_peer *p)
{
    cd_xfer *x = p->out.xfer;
    free(p->out.copy);
    p->out.copy = NULL;
    p->out.active = false;
    p->out.xfer = NULL;
    uint8_t kind = p->out.frame.kind;
    if (kind != CD_FRAME_EAGER && kind != CD_FRAME_BODY)
        return;
    cd_mesh_count_sent(mesh, p->out.frame.bytes);
    if (!x)
        return;
    if (kind == CD_FRAME_BODY) {
        x->moved += (size_t)p->out.frame.bytes;
        if (x->moved < x->bytes)
            return;
        cd_xfers_remove(&p->bodies, x);
    }
    cd_mesh_complete(mesh, x, NULL);
}

static void count_sent(cd_mesh_peer *p, size_t moved)
{
    size_t n = moved < p->out.header_left ? moved : p->out.header_left;
    p->out.header_left -= n;
    moved -= n;
    n = moved < p->out.body_left ? moved : p->out.body_left;
    if (n)
        p->out.body += n;
    p->out.body_left -= n;
    p->out.filler_left -= moved - n;
}

bool cd_mesh_push(cd_mesh *mesh, int peer)
{
    cd_mesh_peer *p = &mesh->peers[peer];
    size_t total = 0;
    if (p->deaf)
        return false;
    for (int frames = 0; frames < TURN_FRAMES && total < TURN_BYTES;) {
        if (!p->out.active && !start_frame(mesh, p))
            break;
        const char *header = (const char *)&p->out.frame + sizeof(cd_frame) - p->out.header_left;
        cd_piece pieces[3] = {{header, p->out.header_left}, {p->out.body, p->out.body_left}, {filler, p->out.filler_left}};
        size_t moved;
        if (p->pipe->ops->send(p->pipe, pieces, p->out.body_left ? 3 : p->out.filler_left ? 3 : 1, &moved) != CD_OK) {
            cd_mesh_deafen(mesh, peer, cd_last_error());
            return true;
        }
        if (moved == 0)
            break;
        total += moved;
        count_sent(p, moved);
        if (p->out.header_left + p->out.body_left + p->out.filler_left == 0) {
            finish_frame(mesh, p);
            frames++;
        }
    }
    return total > 0;
}

bool cd_mesh_detach_output(cd_mesh *mesh, int peer, cd_xfer *x)
{
    cd_mesh_peer *p = &mesh->peers[peer];
    if (!p->out.active || p->out.xfer != x)
        return true;
    p->out.xfer = NULL;
    if (p->out.body_left == 0)
        return true;
    p->out.copy = malloc(p->out.body_left);
    if (!p->out.copy) {
        cd_fail_rank(CD_NO_MEMORY, peer, "no memory to finish a cancelled message to rank %d", peer);
        p->out.xfer = x;
        cd_mesh_lose(mesh, peer, cd_last_error());
        return false;
    }
    memcpy(p->out.copy, p->out.body, p->out.body_left);
    p->out.body = p->out.copy;
    return true;
}

/* In. */

static cd_status take_eager(cd_mesh *mesh, int peer, const cd_frame *f)
{
    cd_mesh_peer *p = &mesh->peers[peer];
    cd_match match = {f->context, f->tag};
    size_t bytes = (size_t)f->bytes;
    cd_xfer *x = cd_mesh_take_posted(mesh, peer, match);
    if (x) {
        if (cd_mesh_admits(mesh, peer, x, bytes, f->signature, -1)) {
            x->source = peer;
            x->bytes = bytes;
            x->state = CD_XFER_DIRECT;
            p->in.xfer = x;
            p->in.to = x->data;
        }
    } else if (!cd_mesh_is_forgotten(mesh, match.context)) {
        cd_kept *kept = cd_mesh_keep(mesh, peer, match, f->signature, 0, bytes, bytes);
        if (!kept)
            return cd_last_error()->code;
        p->in.kept = kept;
        p->in.to = kept->body;
    }
    if (bytes && bytes <= CD_FRAME_INLINE && p->in.to)
        memcpy(p->in.to, f->inline_body, bytes);
    return CD_OK;
}

static cd_status take_ask(cd_mesh *mesh, int peer, const cd_frame *f)
{
    cd_match match = {f->context, f->tag};
    cd_xfer *x = cd_mesh_take_posted(mesh, peer, match);
    if (x) {
        if (cd_mesh_admits(mesh, peer, x, (size_t)f->bytes, f->signature, f->ticket))
            cd_mesh_invite(mesh, peer, f->ticket, f->offer, (size_t)f->bytes, x);
    } else if (cd_mesh_is_forgotten(mesh, match.context)) {
        cd_mesh_control(mesh, peer, CD_FRAME_REFUSE, f->ticket, CD_PEER_LOST);
    } else {
        cd_kept *kept = cd_mesh_keep(mesh, peer, match, f->signature, f->ticket, (size_t)f->bytes, 0);
        if (!kept)
            return cd_last_error()->code;
        kept->is_announced = true;
        kept->offer = f->offer;
    }
    return CD_OK;
}

static void take_ready(cd_mesh *mesh, int peer, const cd_frame *f)
{
    cd_mesh_peer *p = &mesh->peers[peer];
    cd_xfer *x = cd_xfers_find(&p->asked, f->ticket);
    if (!x)
        return; /* cancelled in the meantime; DROP is on its way */
    cd_xfers_remove(&p->asked, x);
    (void)cd_mesh_withdraw(mesh, x); /* who wants it in pieces does not take it otherwise */
    x->their_ticket = (uint32_t)f->offset;
    x->moved = 0;
    x->state = CD_XFER_BODY;
    cd_xfers_push(&p->bodies, x);
}

static cd_status take_segment(cd_mesh *mesh, int peer, const cd_frame *f)
{
    cd_mesh_peer *p = &mesh->peers[peer];
    cd_xfer *x = cd_xfers_find(&p->arriving, f->ticket);
    if (!x || x->state != CD_XFER_ARRIVING)
        return CD_OK; /* cancelled in the meantime: the body is read and dropped */
    if (f->offset != x->moved || f->bytes > x->bytes - x->moved || (f->bytes == 0 && x->bytes != 0))
        return cd_fail_rank(CD_PROTOCOL, peer, "rank %d sends %llu bytes at %llu of a message of %zu, of which %zu are here",
                            peer, (unsigned long long)f->bytes, (unsigned long long)f->offset, x->bytes, x->moved);
    p->in.xfer = x;
    p->in.to = f->bytes ? x->data + x->moved : NULL;
    return CD_OK;
}

static void take_drop(cd_mesh *mesh, int peer, const cd_frame *f)
{
    cd_mesh_peer *p = &mesh->peers[peer];
    for (cd_kept *kept = p->kept; kept; kept = kept->next) {
        if (kept->is_announced && kept->ticket == f->ticket) {
            cd_mesh_drop_kept(mesh, peer, kept);
            return;
        }
    }
    cd_xfers *lists[] = {&p->arriving, &p->reading};
    for (int i = 0; i < 2; i++) {
        for (cd_xfer *x = lists[i]->first; x; x = x->next) {
            if (x->their_ticket != f->ticket)
                continue;
            cd_xfers_remove(lists[i], x);
            cd_fail_rank(CD_ABORTED, peer, "rank %d cancelled its message with tag %lld", peer, (long long)x->match.tag);
            cd_mesh_complete(mesh, x, cd_last_error());
            return;
        }
    }
}

static void take_refusal(cd_mesh *mesh, int peer, const cd_frame *f)
{
    cd_mesh_peer *p = &mesh->peers[peer];
    cd_xfers *list = &p->asked;
    cd_xfer *x = cd_xfers_find(list, f->ticket);
    if (!x) {
        list = &p->bodies;
        x = cd_xfers_find(list, f->ticket);
    }
    if (!x || !cd_mesh_detach_output(mesh, peer, x))
        return;
    if (list == &p->asked)
        (void)cd_mesh_withdraw(mesh, x); /* who refuses it has not taken it */
    cd_xfers_remove(list, x);
    x->their_signature = f->signature;
    x->their_bytes = (size_t)f->bytes;
    if (f->offset == CD_MISMATCH)
        cd_fail_rank(CD_MISMATCH, peer, "rank %d posted a receive of another size, dtype or shape than the message of %zu bytes "
                     "with tag %lld", peer, x->bytes, (long long)x->match.tag);
    else if (f->offset == CD_PEER_LOST)
        cd_fail_rank(CD_PEER_LOST, peer, "rank %d left the group and will not receive the message of %zu bytes with tag %lld",
                     peer, x->bytes, (long long)x->match.tag);
    else
        cd_fail_rank(CD_ABORTED, peer, "rank %d will not receive the message of %zu bytes with tag %lld: it cancelled the "
                     "receive", peer, x->bytes, (long long)x->match.tag);
    cd_mesh_complete(mesh, x, cd_last_error());
}

static cd_status take_header(cd_mesh *mesh, int peer)
{
    cd_mesh_peer *p = &mesh->peers[peer];
    const cd_frame *f = &p->in.frame;
    if (!cd_frame_is_legal(f))
        return cd_fail_rank(CD_PROTOCOL, peer, "rank %d sends what is not a message of this protocol (first word %08x, kind %u, "
                            "%llu bytes)", peer, f->magic, f->kind, (unsigned long long)f->bytes);
    p->in.to = NULL;
    p->in.xfer = NULL;
    p->in.kept = NULL;
    p->in.body_left = cd_frame_body_bytes(f);
    p->in.filler_left = cd_frame_filler_bytes(p->in.body_left);
    switch ((cd_frame_kind)f->kind) {
    case CD_FRAME_EAGER: return take_eager(mesh, peer, f);
    case CD_FRAME_ASK: return take_ask(mesh, peer, f);
    case CD_FRAME_BODY: return take_segment(mesh, peer, f);
    case CD_FRAME_READY: take_ready(mesh, peer, f); break;
    case CD_FRAME_DROP: take_drop(mesh, peer, f); break;
    case CD_FRAME_REFUSE: take_refusal(mesh, peer, f); break;
    case CD_FRAME_SLOW: p->is_slow = true; break;
    case CD_FRAME_FAST: p->is_slow = false; break;
    case CD_FRAME_TOOK: cd_mesh_take_took(mesh, peer, f); break;
    case CD_FRAME_KINDS: break;
    }
    return CD_OK;
}

static void finish_input(cd_mesh *mesh, int peer)
{
    cd_mesh_peer *p = &mesh->peers[peer];
    cd_xfer *x = p->in.xfer;
    cd_kept *kept = p->in.kept;
    p->in.header_got = 0;
    p->in.xfer = NULL;
    p->in.kept = NULL;
    if (x && p->in.frame.kind == CD_FRAME_BODY) {
        x->moved += (size_t)p->in.frame.bytes;
        if (x->moved < x->bytes)
            return;
        cd_xfers_remove(&p->arriving, x);
        cd_mesh_note_pieces(p, x);
    }
    if (x)
        cd_mesh_complete(mesh, x, NULL);
    if (!kept)
        return;
    kept->is_whole = true;
    if (kept->claimed) {
        cd_xfer *claimed = kept->claimed;
        kept->claimed = NULL;
        cd_mesh_accept(mesh, peer, kept, claimed);
    }
}

/* One read of the pipe. *went_p: bytes moved; *dry_p: the pipe had less than was asked for. */
static cd_status pull_some(cd_mesh *mesh, int peer, size_t *went_p, bool *dry_p)
{
    cd_mesh_peer *p = &mesh->peers[peer];
    size_t asked, moved;
    if (p->in.header_got < sizeof(cd_frame)) {
        asked = sizeof(cd_frame) - p->in.header_got;
        CD_TRY(p->pipe->ops->recv(p->pipe, (char *)&p->in.frame + p->in.header_got, asked, &moved));
        p->in.header_got += moved;
        if (moved == asked)
            CD_TRY(take_header(mesh, peer));
    } else if (p->in.body_left) {
        asked = p->in.body_left;
        if (!p->in.to && asked > sizeof mesh->scratch)
            asked = sizeof mesh->scratch;
        CD_TRY(p->pipe->ops->recv(p->pipe, p->in.to ? p->in.to : mesh->scratch, asked, &moved));
        p->in.body_left -= moved;
        if (p->in.to)
            p->in.to += moved;
    } else {
        asked = p->in.filler_left;
        CD_TRY(p->pipe->ops->recv(p->pipe, mesh->scratch, asked, &moved));
        p->in.filler_left -= moved;
    }
    *went_p = moved;
    *dry_p = moved < asked;
    return CD_OK;
}

bool cd_mesh_pull(cd_mesh *mesh, int peer)
{
    cd_mesh_peer *p = &mesh->peers[peer];
    size_t total = 0;
    p->unread = 0;
    for (int frames = 0; frames < TURN_FRAMES && total < TURN_BYTES && !p->lost;) {
        size_t moved;
        bool dry;
        if (pull_some(mesh, peer, &moved, &dry) != CD_OK) {
            cd_mesh_lose(mesh, peer, cd_last_error());
            return true;
        }
        total += moved;
        if (p->in.header_got == sizeof(cd_frame) && p->in.body_left + p->in.filler_left == 0) {
            finish_input(mesh, peer);
            frames++;
        } else if (dry) {
            break;
        }
    }
    return total > 0;
}

bool cd_mesh_progress(cd_mesh *mesh)
{
    bool moved = false;
    for (int i = 0; i < mesh->attached_count; i++) {
        int peer = mesh->attached[i];
        cd_mesh_peer *p = &mesh->peers[peer];
        if (p->lost)
            continue;
        if (cd_mesh_pull(mesh, peer))
            moved = true;
        if (p->reading.first && !p->lost) {
            cd_mesh_read_some(mesh, peer);
            moved = true;
        }
        if (cd_mesh_has_output(p) && cd_mesh_push(mesh, peer))
            moved = true;
    }
    return moved;
}
