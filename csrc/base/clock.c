#include "base/clock.h"

#include <time.h>

uint64_t cd_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * CD_NS_PER_S + (uint64_t)now.tv_nsec;
}

uint64_t cd_now_coarse_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    return (uint64_t)now.tv_sec * CD_NS_PER_S + (uint64_t)now.tv_nsec;
}

cd_deadline cd_deadline_after_ns(uint64_t ns)
{
    uint64_t now = cd_now_ns();
    return (cd_deadline){ns > UINT64_MAX - now ? UINT64_MAX : now + ns};
}

bool cd_deadline_passed(cd_deadline deadline)
{
    return deadline.at_ns != UINT64_MAX && cd_now_ns() >= deadline.at_ns;
}

uint64_t cd_deadline_left_ns(cd_deadline deadline)
{
    if (deadline.at_ns == UINT64_MAX)
        return UINT64_MAX;
    uint64_t now = cd_now_ns();
    return deadline.at_ns > now ? deadline.at_ns - now : 0;
}

int cd_deadline_poll_ms(cd_deadline deadline, int cap_ms)
{
    uint64_t left = cd_deadline_left_ns(deadline);
    uint64_t cap = (uint64_t)cap_ms * CD_NS_PER_MS;
    if (left >= cap)
        return cap_ms;
    return (int)((left + CD_NS_PER_MS - 1) / CD_NS_PER_MS);
}

cd_deadline cd_deadline_earlier(cd_deadline a, cd_deadline b)
{
    return a.at_ns < b.at_ns ? a : b;
}

void cd_sleep_ns(uint64_t ns)
{
    struct timespec pause = {(time_t)(ns / CD_NS_PER_S), (long)(ns % CD_NS_PER_S)};
    nanosleep(&pause, 0);
}
