/* Which of a few ways of doing the same is quickest here and now, found out by timing all of them as the work goes on. For
 * choices that a machine does not tell and that change under way: what a virtual machine's cores share changes several times a
 * second. One per kind of work whose costs a KiB are alike; used by one thread at a time. */
#ifndef CD_BASE_PACE_H
#define CD_BASE_PACE_H

#include <stddef.h>
#include <stdint.h>

#define CD_PACE_WAYS 3

/* Zeroed: nothing is known. */
typedef struct {
    uint32_t turns;
    uint64_t ns[CD_PACE_WAYS]; /* of a KiB, each way; 0: not timed yet */
    uint64_t chosen_at[CD_PACE_WAYS];
} cd_pace;

/* The way that was quickest so far, 0 if none was timed. */
static inline unsigned cd_pace_best(const cd_pace *pace)
{
    unsigned best = 0;
    for (unsigned way = 1; way < CD_PACE_WAYS; way++)
        if (pace->ns[way] && (!pace->ns[best] || pace->ns[way] < pace->ns[best]))
            best = way;
    return best;
}

/* The way, below `ways` (2 or 3, always the same), that the next piece of work, which will be timed, is to take: the quickest;
 * all in turn at first, and later another one so seldom that trying it costs at most a few hundredths of the time. */
unsigned cd_pace_way(cd_pace *pace, unsigned ways, size_t bytes, uint64_t now_ns);
/* What it took. */
void cd_pace_note(cd_pace *pace, unsigned way, size_t bytes, uint64_t took_ns);

#endif
