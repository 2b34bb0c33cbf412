"""How a process ended, in words: exit code, signal, memory."""

import signal

# What Ctrl-C leaves the processes of a job before it is enforced, seconds.
INTERRUPT_GRACE = 0.4


def signal_name(number):
    """Return "SIGKILL" for 9; "signal 99" for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def shell_code(returncode):
    """Return the exit code that a shell shows: 128 + n for signal n (given as −n)."""
    return 128 - returncode if returncode < 0 else returncode


def ending(returncode):
    """Return "exit code 7" or "signal SIGKILL" for a return code (−n for signal n)."""
    return f"signal {signal_name(-returncode)}" if returncode < 0 else f"exit code {returncode}"


def mebibytes(byte_count):
    """Return "12 MiB"."""
    return f"{byte_count / 2**20:.0f} MiB"


class MemoryWatch:
    """Whether the out-of-memory killer struck in this process' cgroup (v1 or v2) since the watch began."""

    def __init__(self):
        self._folder = _memory_cgroup()
        self._kills = self._count_kills()

    def hint(self):
        """Return what can be said about a SIGKILL that nobody here sent."""
        limit = self._read("memory.max", "memory.limit_in_bytes")
        limited = ""
        if limit.isdigit() and int(limit) < 2**60:
            limited = f" (memory limit of the cgroup: {mebibytes(int(limit))})"
        if self._count_kills() > self._kills:
            return f"out of memory: the kernel's out-of-memory killer struck in this cgroup{limited}"
        return f"SIGKILL often means out of memory{limited}: the kernel's log (dmesg) tells"

    def _read(self, *names):
        for name in names if self._folder else ():
            try:
                with open(f"{self._folder}/{name}") as file:
                    return file.read().strip()
            except OSError:
                continue
        return ""

    def _count_kills(self):
        words = self._read("memory.events", "memory.oom_control").split()
        return int(words[words.index("oom_kill") + 1]) if "oom_kill" in words else 0


def _memory_cgroup():
    """Return the folder of this process' memory cgroup, or None."""
    try:
        with open("/proc/self/cgroup") as file:
            rows = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return None
    for number, controllers, path in rows:
        if "memory" in controllers.split(","):
            return f"/sys/fs/cgroup/memory{path}"
        if number == "0" and not controllers and len(rows) == 1:
            return f"/sys/fs/cgroup{path}"
    return None
