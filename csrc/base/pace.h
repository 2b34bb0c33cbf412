/* Which of two ways of doing the same is quicker here and now, found out by timing both as the work goes on. For choices that a
 * machine does not tell and that change under way: what a virtual machine's cores share changes several times a second. One per
 * kind of work whose costs a KiB are alike; used by one thread at a time. */
#ifndef CD_BASE_PACE_H
#define CD_BASE_PACE_H

#include <stddef.h>
#include <stdint.h>

/* Zeroed: nothing is known. */
typedef struct {
    uint32_t turns;
    uint64_t ns[2];      /* of a KiB, either way; 0: not timed yet */
    uint64_t chosen_at[2];
} cd_pace;

/* The way (0 or 1) that was quicker so far. */
static inline unsigned cd_pace_best(const cd_pace *pace)
{
    return pace->ns[1] && pace->ns[1] < pace->ns[0];
}

/* The way that the next piece of work, which will be timed, is to take: the quicker one; the other one in turn at first, and
 * later so seldom that trying it costs at most a few hundredths of the time. */
unsigned cd_pace_way(cd_pace *pace, size_t bytes, uint64_t now_ns);
/* What it took. */
void cd_pace_note(cd_pace *pace, unsigned way, size_t bytes, uint64_t took_ns);

#endif
