#include "group/recorder.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* From here on the exact clock costs nothing against the operation. */
#define EXACT_BYTES (256u << 10)

size_t cd_record_pages_bytes(int ranks)
{
    return (size_t)ranks * sizeof(cd_record_page);
}

static inline void put(_Atomic uint64_t *word, uint64_t value)
{
    atomic_store_explicit(word, value, memory_order_relaxed);
}

static inline uint64_t look(const _Atomic uint64_t *word)
{
    return atomic_load_explicit(word, memory_order_relaxed);
}

void cd_record_page_open(cd_record_page *page)
{
    put(&page->process, (uint64_t)getpid());
}

size_t cd_record_op_bytes(const cd_op *op)
{
    if (op->kind != CD_SEND && op->kind != CD_RECV)
        return op->count * op->item_bytes;
    const cd_blocks *blocks = op->kind == CD_SEND ? &op->in : &op->out;
    return blocks->spans ? blocks->list[0].count * blocks->list[0].item_bytes : 0;
}

static inline uint64_t what_of(const cd_op *op, int peer, cd_record_state state)
{
    return (uint64_t)op->kind | (uint64_t)op->dtype << 8 | (uint64_t)op->redop << 16 | (uint64_t)state << 24 |
           (uint64_t)(uint32_t)peer << 32;
}

static inline void set_state(cd_record *record, cd_record_state state)
{
    put(&record->what, (look(&record->what) & ~(UINT64_C(0xff) << 24)) | (uint64_t)state << 24);
}

cd_record *cd_record_begin(cd_record_page *page, const cd_op *op, uint64_t group, int peer, cd_record_state state)
{
    /* Relaxed: the ticket alone is handed out. */
    uint64_t ticket = atomic_fetch_add_explicit(&page->last, 1, memory_order_relaxed) + 1;
    cd_record *record = &page->ring[ticket % CD_RECORD_RING];
    size_t bytes = cd_record_op_bytes(op);
    uint64_t now = bytes >= EXACT_BYTES || state == CD_RECORD_QUEUED ? cd_now_ns() : cd_now_coarse_ns();
    put(&record->ticket, 0);
    /* Release fence: who reads one of the words below sees the 0 (or a later ticket) when it looks again. */
    atomic_thread_fence(memory_order_release);
    put(&record->sequence, state == CD_RECORD_QUEUED ? 0 : op->sequence);
    put(&record->bytes, bytes);
    put(&record->what, what_of(op, peer, state));
    put(&record->group, group);
    put(&record->queued_ns, now);
    put(&record->started_ns, state == CD_RECORD_QUEUED ? 0 : now);
    put(&record->done_ns, 0);
    atomic_store_explicit(&record->ticket, ticket, memory_order_release);
    return record;
}

void cd_record_start(cd_record *record, uint64_t ticket, uint64_t sequence)
{
    if (look(&record->ticket) != ticket)
        return;
    put(&record->sequence, sequence);
    put(&record->started_ns, cd_now_coarse_ns());
    set_state(record, CD_RECORD_RUNNING);
}

void cd_record_end(cd_record *record, uint64_t ticket, bool fine, bool waited)
{
    /* Tickets are handed out in order, so only an operation that outlived 256 later ones finds its place taken. */
    if (cd_unlikely(look(&record->ticket) != ticket))
        return;
    if (waited || !fine)
        put(&record->done_ns, cd_now_coarse_ns());
    else if (look(&record->bytes) >= EXACT_BYTES)
        put(&record->done_ns, cd_now_ns());
    set_state(record, fine ? CD_RECORD_DONE : CD_RECORD_FAILED);
}

void cd_record_set_site(cd_record_page *page, const char *text)
{
    uint64_t words[CD_RECORD_SITE_WORDS] = {0};
    snprintf((char *)words, sizeof words, "%s", text);
    for (int i = 0; i < CD_RECORD_SITE_WORDS; i++)
        put(&page->site[i], words[i]);
    atomic_store_explicit(&page->site_ticket, look(&page->last), memory_order_release);
}

const char *cd_record_site(const cd_record_page *page, char *out)
{
    uint64_t words[CD_RECORD_SITE_WORDS];
    bool current = atomic_load_explicit(&page->site_ticket, memory_order_acquire) == look(&page->last);
    for (int i = 0; i < CD_RECORD_SITE_WORDS; i++)
        words[i] = look(&page->site[i]);
    memcpy(out, words, sizeof words);
    out[sizeof words - 1] = 0;
    if (!current)
        out[0] = 0;
    return out;
}

static bool read_one(const cd_record *record, uint64_t ticket, cd_record_view *out)
{
    if (atomic_load_explicit(&record->ticket, memory_order_acquire) != ticket)
        return false;
    uint64_t what = look(&record->what);
    *out = (cd_record_view){.ticket = ticket,
                            .sequence = look(&record->sequence),
                            .bytes = look(&record->bytes),
                            .group = look(&record->group),
                            .kind = (cd_kind)(what & 0xff),
                            .dtype = (cd_dtype)(what >> 8 & 0xff),
                            .redop = (cd_redop)(what >> 16 & 0xff),
                            .state = (cd_record_state)(what >> 24 & 0xff),
                            .peer = (int)(int32_t)(what >> 32),
                            .queued_ns = look(&record->queued_ns),
                            .started_ns = look(&record->started_ns),
                            .done_ns = look(&record->done_ns)};
    /* Acquire fence: pairs with the release fence of begin; a word of a later operation comes with its ticket (or the 0). */
    atomic_thread_fence(memory_order_acquire);
    return look(&record->ticket) == ticket;
}

int cd_record_read(const cd_record_page *page, cd_record_view *out, int room)
{
    uint64_t last = look(&page->last);
    int count = 0;
    for (uint64_t ticket = last; ticket > 0 && last - ticket < CD_RECORD_RING && count < room; ticket--)
        if (read_one(&page->ring[ticket % CD_RECORD_RING], ticket, &out[count]))
            count++;
    return count;
}

bool cd_record_find(const cd_record_page *page, uint64_t group, cd_record_view *out)
{
    uint64_t last = look(&page->last);
    for (uint64_t ticket = last; ticket > 0 && last - ticket < CD_RECORD_RING; ticket--)
        if (read_one(&page->ring[ticket % CD_RECORD_RING], ticket, out) && out->group == group && out->sequence)
            return true;
    return false;
}

const char *cd_record_name(const cd_record_view *view, char *out, size_t bytes)
{
    if (view->kind == CD_SEND || view->kind == CD_RECV) {
        const char *way = view->kind == CD_SEND ? "to" : "from";
        if (view->peer < 0)
            snprintf(out, bytes, "%s from any rank", cd_kind_name(view->kind));
        else
            snprintf(out, bytes, "%s %s rank %d", cd_kind_name(view->kind), way, view->peer);
    } else {
        snprintf(out, bytes, "%s %llu", cd_kind_name(view->kind), (unsigned long long)view->sequence);
    }
    return out;
}

static double seconds_since(uint64_t ns)
{
    uint64_t now = cd_now_ns();
    return now > ns ? (double)(now - ns) / 1e9 : 0;
}

const char *cd_record_describe(const cd_record_page *page, char *out, size_t bytes)
{
    cd_record_view newest;
    char name[64], site[8 * CD_RECORD_SITE_WORDS];
    if (cd_record_read(page, &newest, 1) == 0) {
        snprintf(out, bytes, "has called nothing yet");
        return out;
    }
    cd_record_name(&newest, name, sizeof name);
    cd_record_site(page, site);
    if (newest.state == CD_RECORD_RUNNING || newest.state == CD_RECORD_QUEUED)
        snprintf(out, bytes, "is in %s since %.1f s%s%s", name,
                 seconds_since(newest.started_ns ? newest.started_ns : newest.queued_ns), site[0] ? ", at " : "", site);
    else
        snprintf(out, bytes, "last %s %s %.1f s ago", newest.state == CD_RECORD_DONE ? "finished" : "failed in", name,
                 seconds_since(newest.done_ns ? newest.done_ns : newest.started_ns));
    return out;
}

const char *cd_record_state_name(cd_record_state state)
{
    static const char *const names[] = {"none", "queued", "running", "done", "failed"};
    return (unsigned)state <= CD_RECORD_FAILED ? names[state] : "unknown";
}
