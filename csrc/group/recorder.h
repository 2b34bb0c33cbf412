/* The recorder: what each rank did last, always on. A ring of 64-byte entries a rank in the host's shared memory, so that a
 * survivor can tell what a dead or frozen rank was at.
 *
 * One writer process a page (several threads of it), readers everywhere at any time. An entry's `ticket` is 0 while its owner
 * fills it: who read the same non-zero ticket before and after has read one whole entry (mixed only if a thread is held up
 * between two of its stores while others begin 256 operations). Costs 11–15 ns an operation: one look at the coarse clock
 * (7 ns, measured on an EPYC; the exact one takes 36), one uncontended fetch-and-add, stores to one line. */
#ifndef CD_GROUP_RECORDER_H
#define CD_GROUP_RECORDER_H

#include "base/clock.h"
#include "base/op.h"

#include <stdatomic.h>

#define CD_RECORD_RING 256u
#define CD_RECORD_SITE_WORDS 32

/* The values cross processes: append only. */
typedef enum { CD_RECORD_NONE = 0, CD_RECORD_QUEUED, CD_RECORD_RUNNING, CD_RECORD_DONE, CD_RECORD_FAILED } cd_record_state;

/* All words are atomic because another process may read at any time; relaxed but for the ticket. */
typedef struct {
    _Atomic uint64_t ticket;   /* place in the order of this rank's operations, from 1 */
    _Atomic uint64_t sequence; /* among the group's collectives; 0: none yet, or point-to-point */
    _Atomic uint64_t bytes;
    _Atomic uint64_t what;     /* kind | dtype << 8 | redop << 16 | state << 24 | (uint32) root or peer (world rank) << 32 */
    _Atomic uint64_t group;    /* its context: the same on all members */
    _Atomic uint64_t queued_ns, started_ns, done_ns; /* monotonic, to about 4 ms; done 0: at most a moment later */
} cd_record;
_Static_assert(sizeof(cd_record) == 64, "one line, crosses processes");

typedef struct {
    _Atomic uint64_t last; /* ticket of the newest entry */
    _Atomic uint64_t process;
    /* "train.py:33": where the rank waits, written when it has waited for long; whole words, NUL-terminated. */
    _Atomic uint64_t site[CD_RECORD_SITE_WORDS];
    _Atomic uint64_t site_ticket; /* `last` when it was written: an older site says nothing about now */
    CD_ALIGNED(CD_LINE) cd_record ring[CD_RECORD_RING];
} cd_record_page;

/* An entry as a value. */
typedef struct {
    uint64_t ticket, sequence, bytes, group;
    cd_kind kind;
    cd_dtype dtype;
    cd_redop redop;
    cd_record_state state;
    int peer; /* root of a collective or other side of a message; −1: none */
    uint64_t queued_ns, started_ns, done_ns;
} cd_record_view;

size_t cd_record_pages_bytes(int ranks);
/* Takes the page into use for this process. */
void cd_record_page_open(cd_record_page *page);

/* Bytes of the buffer that the operation is about. */
size_t cd_record_op_bytes(const cd_op *op);
/* A new entry for op; queued_ns 0: it starts now. Any thread of the page's process. */
cd_record *cd_record_begin(cd_record_page *page, const cd_op *op, uint64_t group, int peer, cd_record_state state);
/* An entry that was queued starts now, under this sequence number. A ring of later operations may have taken its place: then
 * nothing happens (`ticket` is what begin left in it). */
void cd_record_start(cd_record *record, uint64_t ticket, uint64_t sequence);
/* `waited`: took so long that the time matters. */
void cd_record_end(cd_record *record, uint64_t ticket, bool fine, bool waited);

/* Where this rank waits. Any thread of the page's process; the text is cut to 255 bytes. */
void cd_record_set_site(cd_record_page *page, const char *text);
/* "" unless written since the newest entry began. Returns out (at least 8 × CD_RECORD_SITE_WORDS bytes). */
const char *cd_record_site(const cd_record_page *page, char *out);

/* Copies the newest entries, newest first, at most `room`; returns how many. Any process. */
int cd_record_read(const cd_record_page *page, cd_record_view *out, int room);
/* The newest collective of this group that the rank has begun, in *out; false: none in the ring. */
bool cd_record_find(const cd_record_page *page, uint64_t group, cd_record_view *out);
/* "all_reduce 6" or "send to rank 3"; returns out. */
const char *cd_record_name(const cd_record_view *view, char *out, size_t bytes);
/* "is at all_reduce 6 since 2.1 s, at train.py:33" / "last finished barrier 5 0.8 s ago"; returns out. */
const char *cd_record_describe(const cd_record_page *page, char *out, size_t bytes);
const char *cd_record_state_name(cd_record_state state);

/* ---- of a world; any thread ---- */

typedef struct cd_world cd_world;
/* The newest entries of a rank of this host (its own included), newest first; −1: that rank is elsewhere. `process_p`: its
 * process id. */
int cd_world_records(const cd_world *world, int rank, cd_record_view *out, int room, uint32_t *process_p);
/* "rank 2 is in all_reduce 6 since 3.0 s, at train.py:33 (its process is stopped)"; "" when nothing is known. Returns out. */
const char *cd_world_describe(const cd_world *world, int rank, char *out, size_t bytes);
/* Where this rank waits, for the others of its host; and where that one does ("" if it has not said). */
void cd_world_set_site(cd_world *world, const char *text);
const char *cd_world_site(const cd_world *world, int rank, char out[8 * CD_RECORD_SITE_WORDS]);
/* Hex digits of the random number that tells this world from all others: the same on all its members. */
void cd_world_generation(const cd_world *world, char out[33]);
/* 0 at work, 1 left or lost. */
int cd_world_is_gone(const cd_world *world, int rank);
/* Its process was stopped by a signal; false where process ids do not mean the same. */
bool cd_world_is_stopped(const cd_world *world, int rank);
/* The rank that left or was lost first, −1: none yet. */
int cd_world_first_gone(const cd_world *world);

#endif
