#include "base/wait.h"

#include "base/host.h"

#include <linux/futex.h>
#include <sched.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* A nap is short enough not to be felt in a collective of a millisecond, long enough to leave the core to a peer. */
#define NAP_NS UINT64_C(50000)
/* After about 20 ms of short naps the peer is busy with something else: sleep so long that waiting costs under 2% of a core. */
#define SHORT_NAPS 200
#define LONG_NAP_NS UINT64_C(400000)
/* Ctrl-C and aborts of other threads are seen at least this often. */
#define IDLE_NS (50 * CD_NS_PER_MS)
#define CLAIM_GRACE_NS (100 * CD_NS_PER_MS)
/* A few µs: past it a peer that is a whole time slice away, or that shares this core, is let run. sched_yield costs 0.3 µs when
 * nobody else wants the core, so yielding goes on looking almost as often. On a 2-core EPYC two ranks that shared a core took
 * 28 µs for an operation of 4 B with 1000 pauses, 1.6 µs without any. */
#define SPIN_DEFAULT 100
#define YIELDS_DEFAULT 500
/* Where the cores suffice yielding goes on for about 1.5 ms, longer than a few megabytes take to be read in the waiting rank's
 * memory: a nap lasts 0.1 ms and more, and a peer that is late by one naps in its turn. Messages of 1 MiB one way between 2 ranks
 * on a 2-core Xeon: 120 to 240 µs with 500, 112 to 145 with 5000. */
#define YIELDS_ROOMY 5000

bool cd_cause_publish(cd_cause *cause, const cd_error *error)
{
    uint32_t none = CD_CAUSE_NONE;
    if (!atomic_compare_exchange_strong_explicit(&cause->state, &none, CD_CAUSE_CLAIMED, memory_order_relaxed,
                                                 memory_order_relaxed))
        return false;
    cause->code = (int32_t)error->code;
    cause->rank = error->rank;
    memcpy(cause->text, error->text, sizeof cause->text);
    /* Release: a reader that sees PUBLISHED sees the fields above. */
    atomic_store_explicit(&cause->state, CD_CAUSE_PUBLISHED, memory_order_release);
    return true;
}

cd_status cd_cause_check(cd_cause *cause)
{
    uint32_t state = atomic_load_explicit(&cause->state, memory_order_acquire);
    if (cd_likely(state == CD_CAUSE_NONE))
        return CD_OK;
    cd_deadline grace = cd_deadline_after_ns(CLAIM_GRACE_NS);
    while (state != CD_CAUSE_PUBLISHED) {
        if (cd_deadline_passed(grace))
            return cd_fail(CD_ABORTED, "the group was aborted by a rank that died while it wrote down why");
        cd_sleep_ns(NAP_NS);
        state = atomic_load_explicit(&cause->state, memory_order_acquire);
    }
    cd_error error = {.code = (cd_status)cause->code, .rank = cause->rank};
    memcpy(error.text, cause->text, sizeof error.text);
    error.text[sizeof error.text - 1] = 0;
    return cd_fail_with(&error);
}

cd_patience cd_patience_until(cd_deadline deadline, int ranks)
{
    bool crowded = ranks > cd_host_cores();
    return (cd_patience){.deadline = deadline,
                         .spin = crowded ? 0 : SPIN_DEFAULT,
                         .yields = crowded ? YIELDS_DEFAULT : YIELDS_ROOMY};
}

void cd_bell_ring(cd_bell *bell)
{
    /* Release and acquire in one order with the sleeper's exchange below: either it sees RUNG, or we see AWAITED. What the
     * sleeper looks for was posted before with its own release. */
    if (atomic_exchange_explicit(&bell->state, CD_BELL_RUNG, memory_order_acq_rel) == CD_BELL_AWAITED)
        syscall(SYS_futex, &bell->state, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

/* Sleeps until the bell rings, a signal comes or `ms` are over. False if it had rung before: then there is
 * nothing to wait for. */
static bool sleep_on(cd_bell *bell, int ms)
{
    uint32_t quiet = CD_BELL_QUIET;
    if (!atomic_compare_exchange_strong_explicit(&bell->state, &quiet, CD_BELL_AWAITED, memory_order_acq_rel,
                                                 memory_order_acquire) &&
        quiet == CD_BELL_RUNG)
        return false;
    struct timespec most = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000L};
    syscall(SYS_futex, &bell->state, FUTEX_WAIT_PRIVATE, CD_BELL_AWAITED, &most, NULL, 0);
    return true;
}

cd_waiter cd_waiter_start(const cd_patience *patience)
{
    return (cd_waiter){.patience = patience};
}

void cd_waiter_reset(cd_waiter *waiter)
{
    waiter->turns = 0;
    waiter->napping = false;
}

cd_status cd_waiter_check(cd_waiter *waiter)
{
    const cd_patience *p = waiter->patience;
    if (p->cause && atomic_load_explicit(&p->cause->state, memory_order_acquire) != CD_CAUSE_NONE)
        return cd_cause_check(p->cause);
    if (p->deadline.at_ns == UINT64_MAX && !p->idle)
        return CD_OK;
    uint64_t now = cd_now_ns();
    if (p->idle && (!waiter->idled || now >= waiter->next_idle_ns)) {
        waiter->idled = true;
        waiter->next_idle_ns = now + IDLE_NS;
        CD_TRY(p->idle(p->idle_ctx));
    }
    if (now >= p->deadline.at_ns)
        return cd_fail(CD_TIMED_OUT, "the deadline passed");
    return CD_OK;
}

cd_status cd_waiter_turn(cd_waiter *waiter)
{
    const cd_patience *p = waiter->patience;
    uint32_t turn = waiter->turns;
    if (turn < p->spin) {
        waiter->turns++;
        cd_cpu_relax();
        return CD_OK;
    }
    CD_TRY(cd_waiter_check(waiter));
    if (turn - p->spin < p->yields) {
        waiter->turns++;
        waiter->napping = turn - p->spin + 1 >= p->yields;
        sched_yield();
        return CD_OK;
    }
    waiter->napping = true;
    waiter->turns++;
    if (p->bell && sleep_on(p->bell, cd_waiter_nap_ms(waiter)))
        return CD_OK;
    cd_sleep_ns(turn - p->spin - p->yields < SHORT_NAPS ? NAP_NS : LONG_NAP_NS);
    return CD_OK;
}

int cd_waiter_nap_ms(const cd_waiter *waiter)
{
    return cd_deadline_poll_ms(waiter->patience->deadline, (int)(IDLE_NS / CD_NS_PER_MS));
}

cd_status cd_wait_word(const _Atomic uint64_t *word, uint64_t value, int peer, const cd_patience *patience)
{
    cd_waiter waiter = cd_waiter_start(patience);
    for (;;) {
        if (atomic_load_explicit(word, memory_order_acquire) >= value)
            return CD_OK;
        cd_status status = cd_waiter_turn(&waiter);
        bool left = status == CD_OK && waiter.turns >= patience->spin && patience->gone && peer >= 0 &&
                    atomic_load_explicit(&patience->gone[peer], memory_order_acquire) != 0;
        if (cd_likely(status == CD_OK && !left))
            continue;
        /* Acquire on cause or gone came after the peer's last post: if it posted, it is visible now. */
        if (status != CD_INTERRUPTED && atomic_load_explicit(word, memory_order_acquire) >= value)
            return CD_OK;
        int rank = peer >= 0 && patience->world_ranks ? patience->world_ranks[peer] : peer;
        if (left)
            return cd_fail_rank(CD_PEER_LOST, rank, "rank %d left the group before it took part", rank);
        if (status == CD_TIMED_OUT && peer >= 0)
            return cd_fail_rank(CD_TIMED_OUT, rank, "rank %d did not arrive before the deadline", rank);
        return status;
    }
}
