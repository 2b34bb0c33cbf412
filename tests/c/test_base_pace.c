/* A choice between ways whose costs are made up: the clock stands where the test puts it. */
#include "base/pace.h"
#include "check.h"

#define BYTES ((size_t)64 << 10)

typedef struct {
    cd_pace pace;
    unsigned ways;
    uint64_t now_ns;
    unsigned pieces[CD_PACE_WAYS];
} work;

/* One piece of work, which takes cost[way] ns a KiB. Returns the way it took. */
static unsigned run(work *w, const uint64_t *cost)
{
    unsigned way = cd_pace_way(&w->pace, w->ways, BYTES, w->now_ns);
    CHECK(way < w->ways);
    uint64_t took_ns = cost[way] * (BYTES >> 10);
    w->now_ns += took_ns;
    cd_pace_note(&w->pace, way, BYTES, took_ns);
    w->pieces[way]++;
    return way;
}

static void run_for(work *w, const uint64_t *cost, uint64_t ns)
{
    memset(w->pieces, 0, sizeof w->pieces);
    for (uint64_t end = w->now_ns + ns; w->now_ns < end;)
        run(w, cost);
}

/* The quicker way is taken but for few tries, also after the two have changed places. */
static void test_follows(void)
{
    static const uint64_t costs[][2] = {{50, 200}, {200, 50}, {100, 90}, {40, 2400}, {2400, 40}};
    work w = {.ways = 2, .now_ns = 12345};
    CHECK(cd_pace_best(&w.pace) == 0);
    for (size_t i = 0; i < sizeof costs / sizeof *costs; i++) {
        unsigned quick = costs[i][1] < costs[i][0];
        run_for(&w, costs[i], UINT64_C(200000000));
        run_for(&w, costs[i], UINT64_C(100000000));
        CHECK(cd_pace_best(&w.pace) == quick);
        CHECK(w.pieces[!quick] >= 1);
        uint64_t lost = w.pieces[!quick] * (costs[i][!quick] - costs[i][quick]) * (BYTES >> 10);
        CHECK(lost < UINT64_C(100000000) / 20);
    }
}

/* The quickest of three is taken but for few tries of both others, also after they have changed places. */
static void test_follows_three(void)
{
    static const uint64_t costs[][3] = {{50, 200, 100}, {200, 50, 60}, {100, 95, 90}, {100, 100, 30}, {40, 2400, 41},
                                        {2400, 600, 40}};
    static const unsigned quick[] = {0, 1, 2, 2, 0, 2};
    work w = {.ways = 3, .now_ns = 12345};
    for (size_t i = 0; i < sizeof costs / sizeof *costs; i++) {
        run_for(&w, costs[i], UINT64_C(200000000));
        run_for(&w, costs[i], UINT64_C(100000000));
        CHECK(cd_pace_best(&w.pace) == quick[i]);
        uint64_t lost = 0;
        for (unsigned way = 0; way < 3; way++) {
            CHECK(w.pieces[way] >= 1);
            lost += w.pieces[way] * (costs[i][way] - costs[i][quick[i]]) * (BYTES >> 10);
        }
        CHECK(lost < UINT64_C(100000000) / 20);
    }
}

/* A third way may be timed later than the first two were, and one that is never timed is none of the best. */
static void test_third_way_is_new(void)
{
    work w = {.ways = 2, .now_ns = 1};
    static const uint64_t cost[3] = {50, 100, 20};
    run_for(&w, cost, UINT64_C(10000000));
    CHECK(cd_pace_best(&w.pace) == 0);
    w.ways = 3;
    run_for(&w, cost, UINT64_C(10000000));
    CHECK(cd_pace_best(&w.pace) == 2 && w.pieces[2] > w.pieces[0]);
}

/* Both are tried before anything is decided, however slow the first use of one is. */
static void test_tries_both_first(void)
{
    work w = {.ways = 2, .now_ns = 1};
    static const uint64_t slow_first[2] = {5000, 5000}, then[2] = {60, 50};
    CHECK(run(&w, slow_first) == 0);
    CHECK(run(&w, slow_first) == 1);
    for (int i = 0; i < 6; i++)
        CHECK(run(&w, then) == (unsigned)i % 2);
    CHECK(cd_pace_best(&w.pace) == 1);
}

/* One measurement in which the thread was off its core turns the choice for a short while only. */
static void test_forgives(void)
{
    work w = {.ways = 2, .now_ns = 1};
    static const uint64_t cost[2] = {50, 100};
    run_for(&w, cost, UINT64_C(10000000));
    cd_pace_note(&w.pace, 0, BYTES, UINT64_C(1000000000));
    CHECK(cd_pace_best(&w.pace) == 1);
    run_for(&w, cost, UINT64_C(20000000));
    CHECK(cd_pace_best(&w.pace) == 0);
}

/* A way whose work never ends well is never noted: it is tried in turn, and the other one counts as the best. */
static void test_one_way_fails(void)
{
    cd_pace pace = {0};
    unsigned tried = 0;
    for (uint64_t i = 0; i < 100; i++) {
        unsigned way = cd_pace_way(&pace, 2, BYTES, i * 1000);
        tried += way == 1;
        if (way == 0)
            cd_pace_note(&pace, way, BYTES, 1000);
    }
    CHECK(tried == 50 && cd_pace_best(&pace) == 0);
    cd_pace_note(&pace, 1, 0, 1); /* less than a KiB counts as one */
    CHECK(cd_pace_best(&pace) == 1);
}

int main(void)
{
    test_follows();
    test_follows_three();
    test_third_way_is_new();
    test_tries_both_first();
    test_forgives();
    test_one_way_fails();
    puts("base pace: ok");
    return 0;
}
