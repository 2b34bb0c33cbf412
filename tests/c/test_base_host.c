/* What /proc says of a process that runs, is stopped, ends. */
#include "base/host.h"
#include "check.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static void check_states(void)
{
    CHECK(cd_host_process_state((uint32_t)getpid()) == 'R');
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0)
        for (;;)
            pause();
    CHECK(kill(child, SIGSTOP) == 0);
    CHECK(waitpid(child, NULL, WUNTRACED) == child);
    CHECK(cd_host_process_state((uint32_t)child) == 'T');
    CHECK(kill(child, SIGKILL) == 0);
    siginfo_t about;
    CHECK(waitid(P_PID, (id_t)child, &about, WEXITED | WNOWAIT) == 0);
    CHECK(cd_host_process_state((uint32_t)child) == 'X');
    CHECK(waitpid(child, NULL, 0) == child);
    CHECK(cd_host_process_state((uint32_t)child) == 0);
}

int main(void)
{
    check_states();
    puts("base host: ok");
    return 0;
}
