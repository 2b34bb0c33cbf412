/* The wait loop: order of what it looks at. */
#include "check.h"

#include "base/wait.h"

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

int main(void)
{
    test_value_beats_abort();
    test_deadline_names_peer();
    test_departure_ends_wait_for_that_peer_only();
    test_idle_is_called_and_can_end_the_wait();
    puts("base wait: ok");
    return 0;
}
