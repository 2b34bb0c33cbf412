/* Reading the memory of another process: it is found by what it keeps, and nothing is taken for granted. */
#include "check.h"

#include "shm/reach.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { BYTES = 1 << 20 };

typedef struct {
    cd_reach_card card;
    uint64_t data_at;
    _Atomic int ready;
} meeting;

static void be_read(meeting *m)
{
    static uint64_t token;
    static unsigned char data[BYTES];
    for (int i = 0; i < BYTES; i++)
        data[i] = (unsigned char)(i * 7);
    cd_reach_offer(&m->card, &token);
    m->data_at = (uint64_t)(uintptr_t)data;
    atomic_store(&m->ready, 1);
    for (;;)
        pause();
}

int main(void)
{
    meeting *m = mmap(NULL, sizeof *m, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(m != MAP_FAILED);
    CHECK(cd_reach_probe(&m->card) == ESRCH); /* nobody has left a card */
    pid_t child = fork();
    if (child == 0)
        be_read(m);
    while (!atomic_load(&m->ready))
        usleep(1000);
    int refused = cd_reach_probe(&m->card);
    if (refused) {
        CHECK(refused == EPERM || refused == ENOSYS); /* a container that forbids it */
    } else {
        static unsigned char data[BYTES];
        CHECK(cd_reach_read(&m->card, data, m->data_at, BYTES) == 0);
        for (int i = 0; i < BYTES; i++)
            CHECK(data[i] == (unsigned char)(i * 7));
        CHECK(cd_reach_read(&m->card, data, 16, 8) == EFAULT);
        cd_reach_card other = m->card;
        other.token++;
        CHECK(cd_reach_probe(&other) == ESRCH); /* another process has that id */
        other = m->card;
        other.token_at = 16;
        CHECK(cd_reach_probe(&other) == EFAULT);
    }
    kill(child, SIGKILL);
    CHECK(waitpid(child, NULL, 0) == child);
    CHECK(refused || cd_reach_probe(&m->card) == ESRCH);
    munmap(m, sizeof *m);
    puts("shm reach: ok");
    return 0;
}
