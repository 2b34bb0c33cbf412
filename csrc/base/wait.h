/* The one wait loop. Whoever waits for a word in memory, for a socket or for both, does it through here, so
 * that the deadline, the abort word, Ctrl-C and the courtesy to other threads are in one place.
 *
 * Phases: spin with pause → sched_yield → naps of 50 µs, or sleep until a bell rings. Abort and deadline are
 * looked at after the spin, then each turn. */
#ifndef CD_BASE_WAIT_H
#define CD_BASE_WAIT_H

#include "base/attr.h"
#include "base/clock.h"
#include "base/status.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Why a group stopped. Lives in shared memory (one per group and host) or in private memory (groups without shared
 * memory). The first writer wins, nobody clears it. */
typedef struct {
    _Atomic uint32_t state; /* CD_CAUSE_* ; any non-zero value is the abort word of wait loops */
    int32_t code;           /* cd_status */
    int32_t rank;           /* world rank at fault, −1 if none */
    char text[CD_ERROR_TEXT_BYTES];
} cd_cause;

enum { CD_CAUSE_NONE = 0, CD_CAUSE_CLAIMED = 1, CD_CAUSE_PUBLISHED = 2 };

/* Publishes the cause unless there is one already. Any thread, any process that maps it; never blocks. True if first. */
bool cd_cause_publish(cd_cause *cause, const cd_error *error);
/* CD_OK when nothing was published; otherwise the cause becomes the calling thread's error. A claimed, not yet published
 * cause is waited for up to 100 ms, then reported as CD_ABORTED (its writer died in between). */
cd_status cd_cause_check(cd_cause *cause);

/* Called when the spin phase is over, then at least every 50 ms while waiting. The Python layer drops the GIL at the
 * first call and looks at signals at the later ones. A non-OK answer ends the wait with that status. */
typedef cd_status (*cd_idle_func)(void *ctx);

/* For a word whose writer lives in the same process and can wake who sleeps: it posts the word, then rings, once. Zero is a
 * bell that has not rung. */
typedef struct {
    _Atomic uint32_t state; /* CD_BELL_* */
} cd_bell;

enum { CD_BELL_QUIET = 0, CD_BELL_AWAITED = 1, CD_BELL_RUNG = 2 };

/* Any thread, never blocks; a syscall only if somebody sleeps. The bell must outlive the call. */
void cd_bell_ring(cd_bell *bell);

/* How long and how a wait may go on. A value: copy it, set what differs. All pointers may be NULL. */
typedef struct {
    cd_deadline deadline;
    cd_cause *cause;               /* the group's; non-zero state ends the wait with that error */
    const _Atomic uint32_t *gone;  /* gone[peer] non-zero: that peer left in good order; ends a wait for *that* peer */
    const int32_t *world_ranks;    /* world rank of each peer, for texts; NULL: the same number */
    cd_idle_func idle;
    void *idle_ctx;
    cd_bell *bell;                 /* rings after the word was posted: slept on instead of naps, 50 ms at a time */
    uint32_t spin;                 /* pauses before the first yield; 0 where ranks outnumber cores */
    uint32_t yields;               /* sched_yields before the first nap */
} cd_patience;

/* Patience that waits until `deadline` with the default spin for `ranks` ranks on this host's usable cores. */
cd_patience cd_patience_until(cd_deadline deadline, int ranks);

/* Waits until *word >= value (acquire: what its writer released before is visible). `peer` is the one whose word it is
 * (index into gone, named in the error), −1 if nobody's. After an abort or a departure was seen, the word is looked at
 * once more, so that what was posted before counts.
 * Errors: CD_TIMED_OUT ("rank N"), CD_PEER_LOST (left), the cause's, the idle callback's. */
cd_status cd_wait_word(const _Atomic uint64_t *word, uint64_t value, int peer, const cd_patience *patience) CD_MUST_USE;

static inline cd_status cd_wait_at_least(const _Atomic uint64_t *word, uint64_t value, int peer,
                                         const cd_patience *patience)
{
    if (cd_likely(atomic_load_explicit(word, memory_order_acquire) >= value))
        return CD_OK;
    return cd_wait_word(word, value, peer, patience);
}

/* For loops that make progress themselves (sockets, rings): one turn of waiting after a turn without progress.
 *   cd_waiter w = cd_waiter_start(patience);
 *   while (!done()) {
 *       if (progress()) { cd_waiter_reset(&w); continue; }
 *       CD_TRY(cd_waiter_turn(&w));
 *   }
 * A turn spins, yields or naps by phase and checks deadline, cause and idle. Returns CD_TIMED_OUT with a plain text that
 * the caller replaces by one that names the peer. `w.napping` is true when the next turn would nap: a loop that has a file
 * descriptor to wait for polls it for at most cd_waiter_nap_ms() instead and calls cd_waiter_check. */
typedef struct {
    const cd_patience *patience;
    uint64_t next_idle_ns;
    uint32_t turns;
    bool idled;
    bool napping;
} cd_waiter;

cd_waiter cd_waiter_start(const cd_patience *patience);
void cd_waiter_reset(cd_waiter *waiter);
cd_status cd_waiter_turn(cd_waiter *waiter) CD_MUST_USE;
/* The checks alone, without pausing. */
cd_status cd_waiter_check(cd_waiter *waiter) CD_MUST_USE;
/* How long a poll(2) may last: at most 50 ms and not beyond the deadline. */
int cd_waiter_nap_ms(const cd_waiter *waiter);

#endif
