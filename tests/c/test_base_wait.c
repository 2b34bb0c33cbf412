/* The wait loop: order of what it looks at. */
#include "check.h"

#include "base/wait.h"

#include <pthread.h>

static void test_value_beats_abort(void)
{
    _Atomic uint64_t word = 3;
    cd_cause cause = {0};
    cd_error error = {.code = CD_PEER_LOST, .rank = 1, .text = "rank 1 was killed by SIGKILL"};
    CHECK(cd_cause_publish(&cause, &error));
    CHECK(!cd_cause_publish(&cause, &error));
    cd_patience patience = cd_patience_until(CD_NEVER, 1);
    patience.cause = &cause;
    CHECK_OK(cd_wait_at_least(&word, 3, 1, &patience));
    CHECK_FAILS(cd_wait_at_least(&word, 4, 1, &patience), CD_PEER_LOST);
    CHECK(cd_last_error()->rank == 1 && strstr(cd_last_error()->text, "SIGKILL"));
}

static void test_deadline_names_peer(void)
{
    _Atomic uint64_t word = 0;
    cd_patience patience = cd_patience_until(cd_deadline_after_ns(2 * CD_NS_PER_MS), 1);
    CHECK_FAILS(cd_wait_at_least(&word, 1, 5, &patience), CD_TIMED_OUT);
    CHECK(cd_last_error()->rank == 5);
    patience.deadline = (cd_deadline){0};
    CHECK_FAILS(cd_wait_at_least(&word, 1, 5, &patience), CD_TIMED_OUT);
}

static void test_far_deadlines(void)
{
    CHECK(cd_deadline_after_ns(UINT64_MAX).at_ns == CD_NEVER.at_ns);
    CHECK(cd_deadline_after_ns(UINT64_MAX - 1).at_ns == CD_NEVER.at_ns);
    uint64_t before = cd_now_ns(), at = cd_deadline_after_ns(3600 * CD_NS_PER_S).at_ns;
    CHECK(at > before + 3590 * CD_NS_PER_S && at < before + 4000 * CD_NS_PER_S);
}

static void test_departure_ends_wait_for_that_peer_only(void)
{
    _Atomic uint64_t word = 0;
    _Atomic uint32_t gone[2] = {1, 0};
    int32_t world_ranks[2] = {7, 9};
    cd_patience patience = cd_patience_until(cd_deadline_after_ns(20 * CD_NS_PER_MS), 1);
    patience.gone = gone;
    patience.world_ranks = world_ranks;
    CHECK_FAILS(cd_wait_at_least(&word, 1, 0, &patience), CD_PEER_LOST);
    CHECK(cd_last_error()->rank == 7);
    CHECK_FAILS(cd_wait_at_least(&word, 1, 1, &patience), CD_TIMED_OUT);
}

static cd_status count_idle(void *ctx)
{
    int *calls = ctx;
    return ++*calls >= 2 ? cd_fail(CD_INTERRUPTED, "interrupted") : CD_OK;
}

static void test_idle_is_called_and_can_end_the_wait(void)
{
    _Atomic uint64_t word = 0;
    int calls = 0;
    cd_patience patience = cd_patience_until(CD_NEVER, 1);
    patience.idle = count_idle;
    patience.idle_ctx = &calls;
    CHECK_FAILS(cd_wait_at_least(&word, 1, 0, &patience), CD_INTERRUPTED);
    CHECK(calls == 2);
}

/* Posts the word, then rings; the bell may ring before, while or after the other side lies down. */
typedef struct {
    _Atomic uint64_t word;
    cd_bell bell;
} bell_case;

static void *ring(void *arg)
{
    bell_case *c = arg;
    atomic_store_explicit(&c->word, 1, memory_order_release);
    cd_bell_ring(&c->bell);
    return NULL;
}

static void test_bell_wakes_who_sleeps_on_it(void)
{
    for (int i = 0; i < 200; i++) {
        bell_case c = {0};
        cd_patience patience = cd_patience_until(CD_NEVER, 1);
        patience.bell = &c.bell;
        patience.spin = patience.yields = 0;
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, ring, &c) == 0);
        CHECK_OK(cd_wait_at_least(&c.word, 1, -1, &patience));
        pthread_join(thread, NULL);
        CHECK(atomic_load(&c.bell.state) == CD_BELL_RUNG);
    }
}

static void test_bell_that_never_rings_keeps_the_deadline(void)
{
    bell_case c = {0};
    cd_patience patience = cd_patience_until(cd_deadline_after_ns(5 * CD_NS_PER_MS), 1);
    patience.bell = &c.bell;
    patience.spin = patience.yields = 0;
    CHECK_FAILS(cd_wait_at_least(&c.word, 1, -1, &patience), CD_TIMED_OUT);
}

int main(void)
{
    test_value_beats_abort();
    test_deadline_names_peer();
    test_far_deadlines();
    test_departure_ends_wait_for_that_peer_only();
    test_idle_is_called_and_can_end_the_wait();
    test_bell_wakes_who_sleeps_on_it();
    test_bell_that_never_rings_keeps_the_deadline();
    puts("base wait: ok");
    return 0;
}
