"""A small process that outlives the launcher just long enough to kill what the launcher left.

The launcher holds the write end of a pipe; whatever ends it, even SIGKILL, closes the pipe. The guard then
kills the process groups that it was told of (so grandchildren go too), and removes the job's temporary
folder.
"""

import contextlib
import os
import signal


class Guard:
    """Started once, before the launcher has threads or children."""

    def __init__(self, folder):
        read_end, self._pipe = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(self._pipe)
                _watch(read_end, folder)
            finally:
                os._exit(0)
        os.close(read_end)

    def add(self, group):
        """Watch a process group: it has this number as long as its leader is not reaped."""
        os.write(self._pipe, b"+%d\n" % group)

    def remove(self, group):
        """Forget a group; call it before its leader is reaped, since the number is free after that."""
        os.write(self._pipe, b"-%d\n" % group)

    def close(self):
        """End the guard; it kills the groups that were not removed."""
        os.close(self._pipe)
        os.waitpid(self.pid, 0)


def _watch(pipe, folder):
    os.setsid()
    for number in signal.Signals:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN)
    # Nobody who reads our output is to wait for the guard's end.
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.closerange(3, pipe)
    os.closerange(pipe + 1, 4096)
    groups = set()
    rest = b""
    while data := os.read(pipe, 65536):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            (groups.add if line[:1] == b"+" else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
    if folder:
        import shutil

        shutil.rmtree(folder, ignore_errors=True)
