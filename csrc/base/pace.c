#include "base/pace.h"

/* Both ways are tried in turn at first, since the first use of memory is slow whichever way it is. */
#define TRIALS 8
/* A try of the slower way comes when this many times its loss has gone by, but at least LEAST_NS, since the last one. */
#define LOSSES 64
#define LEAST_NS UINT64_C(100000)
/* A thread that was off its core while it was timed shows nothing: no way counts as slower than so many times the other. */
#define WORST 64

unsigned cd_pace_way(cd_pace *pace, size_t bytes, uint64_t now_ns)
{
    unsigned way = cd_pace_best(pace);
    if (pace->turns < TRIALS || !pace->ns[0] || !pace->ns[1]) {
        way = pace->turns++ % 2;
    } else {
        uint64_t loss = (pace->ns[!way] - pace->ns[way]) * (bytes >> 10);
        if (now_ns - pace->chosen_at[!way] > LOSSES * loss + LEAST_NS)
            way = !way;
    }
    pace->chosen_at[way] = now_ns;
    return way;
}

void cd_pace_note(cd_pace *pace, unsigned way, size_t bytes, uint64_t took_ns)
{
    uint64_t each = took_ns / (bytes >> 10 ? bytes >> 10 : 1) + 1, *mine = &pace->ns[way], other = pace->ns[!way];
    if (other && each > WORST * other)
        each = WORST * other;
    /* A quick one is believed at once, a slow one by half: what disturbs a measurement only makes it slower. */
    *mine = *mine == 0 || each < *mine ? each : (*mine + each) / 2;
}
