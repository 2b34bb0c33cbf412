#include "base/pace.h"

#include <stdbool.h>

/* All ways are tried in turn so often at first, since the first use of memory is slow whichever way it is. */
#define TRIALS 4
/* A try of a slower way comes when this many times its loss has gone by, but at least LEAST_NS, since the last one. */
#define LOSSES 64
#define LEAST_NS UINT64_C(100000)
/* A thread that was off its core while it was timed shows nothing: no way counts as slower than so many times the quickest. */
#define WORST 64

static bool is_known(const cd_pace *pace, unsigned ways)
{
    bool known = pace->turns >= TRIALS * ways;
    for (unsigned way = 0; way < ways; way++)
        known = known && pace->ns[way];
    return known;
}

unsigned cd_pace_way(cd_pace *pace, unsigned ways, size_t bytes, uint64_t now_ns)
{
    unsigned best = cd_pace_best(pace), way = best;
    if (!is_known(pace, ways)) {
        way = pace->turns++ % ways;
    } else {
        for (unsigned other = 0; other < ways; other++) {
            uint64_t loss = (pace->ns[other] - pace->ns[best]) * (bytes >> 10);
            if (other != best && now_ns - pace->chosen_at[other] > LOSSES * loss + LEAST_NS)
                way = other;
        }
    }
    pace->chosen_at[way] = now_ns;
    return way;
}

void cd_pace_note(cd_pace *pace, unsigned way, size_t bytes, uint64_t took_ns)
{
    uint64_t each = took_ns / (bytes >> 10 ? bytes >> 10 : 1) + 1, *mine = &pace->ns[way], quickest = 0;
    for (unsigned other = 0; other < CD_PACE_WAYS; other++)
        if (other != way && pace->ns[other] && (!quickest || pace->ns[other] < quickest))
            quickest = pace->ns[other];
    if (quickest && each > WORST * quickest)
        each = WORST * quickest;
    /* A quick one is believed at once, a slow one by half: what disturbs a measurement only makes it slower. */
    *mine = *mine == 0 || each < *mine ? each : (*mine + each) / 2;
}
