/* Monotonic time and absolute deadlines: every wait in the library takes one. */
#ifndef CD_BASE_CLOCK_H
#define CD_BASE_CLOCK_H

#include <stdbool.h>
#include <stdint.h>

#define CD_NS_PER_MS UINT64_C(1000000)
#define CD_NS_PER_S UINT64_C(1000000000)

/* Absolute, on CLOCK_MONOTONIC. UINT64_MAX = never; 0 = already passed (poll once). */
typedef struct {
    uint64_t at_ns;
} cd_deadline;

#define CD_NEVER ((cd_deadline){UINT64_MAX})

uint64_t cd_now_ns(void);
/* The same clock as of the last tick (4 ms here): a fifth of the cost. */
uint64_t cd_now_coarse_ns(void);
/* Now + ns, saturating: a huge ns is "never". From a minute on about 10 ms later. */
cd_deadline cd_deadline_after_ns(uint64_t ns);
bool cd_deadline_passed(cd_deadline deadline);
/* Time left, 0 when passed, UINT64_MAX when never. */
uint64_t cd_deadline_left_ns(cd_deadline deadline);
/* The argument for poll(2): rounded up, at most `cap_ms`, so that a wait can be cut in slices. */
int cd_deadline_poll_ms(cd_deadline deadline, int cap_ms);
cd_deadline cd_deadline_earlier(cd_deadline a, cd_deadline b);
/* Sleeps without a way to be woken; only for back-off pauses of a few ms and naps of wait loops. */
void cd_sleep_ns(uint64_t ns);

#endif
