/* The hook of the jitter build: before a word is posted, or bytes are sent or received, the thread sometimes yields or naps, so
 * that ranks meet in orders that a quiet machine never shows. */
#include "base/attr.h"
#include "base/clock.h"

#include <sched.h>

void cd_jitter(void)
{
    static _Thread_local uint32_t state;
    if (!state)
        state = (uint32_t)(uintptr_t)&state | 1;
    state = state * 1664525 + 1013904223;
    uint32_t dice = state >> 20;
    if (dice < 16)
        cd_sleep_ns(dice * 4000);
    else if (dice < 400)
        sched_yield();
}
