"""One worker process under the launcher's control."""

import contextlib
import ctypes
import os
import signal
import subprocess
import time

# A process in the middle of a device or network file system call may not die at once, or ever.
KILL_SECONDS = 5.0

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent, death_signal=signal.SIGKILL):
    """Have the kernel end this process when the thread that started it ends; `parent`: that one's pid."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(death_signal))
    if os.getppid() != parent:  # it died before the request
        os.kill(os.getpid(), death_signal)


class Worker:
    """A process that leads its own session and process group.

    It is reaped last of all: until then its number, which is also its group's, cannot go to a stranger, and
    signals sent to it reach only what the launcher started.
    """

    def __init__(self, rank, local_rank, argv, env, cores, guard):
        self.rank = rank
        self.local_rank = local_rank
        self.returncode = None
        self.ended_at = None
        self.peak_bytes = 0
        self.was_signalled = False
        self.error_file = env["TORCHELASTIC_ERROR_FILE"]
        self._guard = guard
        parent = os.getpid()

        def prepare():
            die_with_parent(parent)
            if cores:
                os.sched_setaffinity(0, cores)

        self.started_at = time.time()
        (self.stdout, out), (self.stderr, err) = os.pipe(), os.pipe()
        try:
            self._process = subprocess.Popen(
                argv, env=env, stdout=out, stderr=err, start_new_session=True, preexec_fn=prepare
            )
        except BaseException:
            os.close(self.stdout)
            os.close(self.stderr)
            raise
        finally:
            os.close(out)
            os.close(err)
        self.pid = self._process.pid
        guard.add(self.pid)
        self.exit_descriptor = _pidfd(self.pid)

    def is_running(self):
        """Tell whether the leader still runs; notes how it ended, once, without reaping it."""
        if self.returncode is None:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return True
            self.ended_at = time.time()
            self.returncode = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        return False

    def send(self, number):
        """Send a signal to the whole process group."""
        self.was_signalled = self.was_signalled or self.is_running()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def reap(self):
        """Kill what is left of the group and collect the leader; one that the kernel holds fast is left."""
        if self._process is None:
            return
        self.send(signal.SIGKILL)
        end = time.monotonic() + KILL_SECONDS
        while self.is_running() and time.monotonic() < end:
            time.sleep(0.001)
        if self.is_running():
            self.returncode, self.ended_at = -signal.SIGKILL, time.time()
        else:
            self._guard.remove(self.pid)
            _, _, usage = os.wait4(self.pid, 0)
            self.peak_bytes = usage.ru_maxrss * 1024
        self._process.returncode = self.returncode  # else its destructor would wait for the number
        self._process = None
        if self.exit_descriptor is not None:
            os.close(self.exit_descriptor)
            self.exit_descriptor = None


def _pidfd(pid):
    """Return a descriptor that is readable when the process has ended, or None where the kernel has none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None
