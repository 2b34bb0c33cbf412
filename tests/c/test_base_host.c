/* What /proc says of a process that runs, is stopped, ends; standard descriptors that are closed. */
#include "base/host.h"
#include "check.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
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

static void check_standard(void)
{
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        struct stat before, after, null;
        int kept = fstat(1, &before), bad = kept != 0 || close(0) != 0 || close(2) != 0;
        cd_host_hold_standard();
        cd_host_hold_standard();
        bad |= stat("/dev/null", &null) != 0 || fstat(1, &after) != 0 || before.st_ino != after.st_ino;
        for (int fd = 0; fd <= 2; fd += 2)
            bad |= fstat(fd, &after) != 0 || after.st_rdev != null.st_rdev || fcntl(fd, F_GETFD) != 0;
        int next = open("/dev/null", O_RDONLY);
        _exit(bad | (next < 3));
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(status == 0);
}

int main(void)
{
    check_states();
    check_standard();
    puts("base host: ok");
    return 0;
}
