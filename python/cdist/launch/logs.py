"""Output of the workers: whole lines to the console, all bytes to the log files, the end kept for reports."""

import collections
import errno
import os
import select
import stat
import time

from cdist.launch.interrupts import without_tracebacks

# A line that has no end yet is shown after this many seconds (a progress bar, a prompt).
PARTIAL_AFTER = 0.03
# A piece of this many bytes ends where the worker's buffer was full, which says nothing of its line. For so
# many seconds after it the end of a line is waited for: a worker that has no core just then may well be away
# for longer than the above.
BUFFER_BYTES = 4096
CUT_AFTER = 1.0
# A line longer than this is passed on in pieces.
LONGEST_LINE = 1 << 20
# What a report may quote of a worker's stderr.
TAIL_BYTES = 16384
# Held back for a console that does not take it; beyond it the workers wait.
BACKLOG_BYTES = 1 << 20


class Console:
    """One of the launcher's own streams. Writes never block: the console may be stopped."""

    def __init__(self, descriptor, say=None):
        """`say`: called once with a line, when something other than the reader's end loses output."""
        self.descriptor = descriptor
        self._say = say
        self._backlog = collections.deque()
        self.backlog_bytes = 0
        self.has_failed = False  # other than by its reader's end, who wants no more
        self._partial_of = None  # the stream whose unfinished line stands at the console's end
        self._is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)

    def write(self, data, stream=None, finished=True):
        """Append whole lines, or with finished=False a part of one that `stream` will go on with."""
        if not data:
            return
        if self._partial_of is not None and self._partial_of is not stream and not data.startswith(b"\r"):
            data = b"\n" + data
        self._partial_of = None if finished else stream
        self._backlog.append(data)
        self.backlog_bytes += len(data)
        self.flush()

    def is_full(self):
        """Tell whether more is waiting than should."""
        return self.backlog_bytes > BACKLOG_BYTES

    def flush(self):
        """Write what the console takes now; one that is gone (closed pipe) takes and loses everything."""
        while self._backlog and (self._is_file or self._is_ready()):
            data = self._backlog.popleft()
            # A pipe or terminal that polls as writable takes this much without blocking.
            piece = data if self._is_file else data[: select.PIPE_BUF]
            try:
                written = os.write(self.descriptor, piece)
            except OSError as error:
                written = len(data)
                self.has_failed |= error.errno != errno.EPIPE
                if self._say and error.errno != errno.EPIPE:
                    say, self._say = self._say, None
                    say(f"cdistrun: {self._name()}: {error.strerror}: output of the workers is lost\n")
            self.backlog_bytes -= written
            if written < len(data):
                self._backlog.appendleft(data[written:])

    def drain(self, seconds):
        """Give a slow console this long to take the rest."""
        end = time.monotonic() + seconds
        while self._backlog and time.monotonic() < end:
            self.flush()
            if self._backlog:
                time.sleep(0.005)

    def _name(self):
        return {1: "stdout", 2: "stderr"}.get(self.descriptor, f"descriptor {self.descriptor}")

    def _is_ready(self):
        poll = select.poll()
        poll.register(self.descriptor, select.POLLOUT)
        return bool(poll.poll(0))


class Stream:
    """stdout or stderr of one worker: reads its pipe and spreads what comes."""

    def __init__(self, rank, name, descriptor, console, prefix=b"", log_path=None, say=None):
        """`console` None: not shown. `log_path` None: no file. `say`: told in a line that the file failed."""
        self.rank = rank
        self.name = name
        self.descriptor = descriptor
        os.set_blocking(descriptor, False)
        self.console = console
        self._prefix = prefix
        self._log = open(log_path, "ab", buffering=0) if log_path else None  # noqa: SIM115
        self._say = say
        self.has_failed = False  # its file
        self._rest = b""
        self._rest_shown = 0  # bytes of the rest that the console has already
        self._cut_until = 0.0
        self.show_at = None  # when the rest is to be shown if its end has not come
        self.tail = b""
        self._held = None  # what is shown only at the end, since Ctrl-C
        self.place = None  # where Ctrl-C found the worker, once its tracebacks were taken out

    def hold(self):
        """From now on show at the end what comes, without the tracebacks of an interruption."""
        if self.console:
            self._held = b""

    def read(self, now):
        """Take what the pipe has: how many bytes (0: none now), or None at its end. Never blocks."""
        try:
            data = os.read(self.descriptor, 1 << 16)
        except BlockingIOError:
            return 0
        if not data:
            self.close()
            return None
        if self._log:
            self._keep(data)
        self.tail = (self.tail + data)[-TAIL_BYTES:]
        if self._held is not None:
            self._held += data
            if len(self._held) > LONGEST_LINE:
                self._let_go(now)
        elif self.console:
            self._show(data, now)
        return len(data)

    def _let_go(self, now):
        held, self._held = self._held, None
        text, self.place = without_tracebacks(held)
        if text:
            self._show(text, now)

    def _keep(self, data):
        """Append to the file; one that cannot be written to (a full disk) is given up; the job goes on."""
        try:
            while data:
                data = data[self._log.write(data) :]
        except OSError as error:
            path, log, self._log = self._log.name, self._log, None
            log.close()
            self.has_failed = True
            if self._say:
                self._say(f"cdistrun: {path}: {error.strerror}: the rest of this output is not kept\n")

    def _show(self, data, now):
        whole, end, rest = (self._rest + data).rpartition(b"\n")
        if end:
            self.console.write(self._prefixed(whole + end, self._rest_shown), self)
            self._rest_shown = 0
        self._rest = rest
        if len(rest) > LONGEST_LINE:
            self.show_rest()
        if len(data) >= BUFFER_BYTES:
            self._cut_until = now + CUT_AFTER
        is_open = len(self._rest) > self._rest_shown
        self.show_at = max(now + PARTIAL_AFTER, self._cut_until) if is_open else None

    def show_rest(self):
        """Show the beginning of a line whose end has not come."""
        text = self._rest[self._rest_shown :]
        if text:
            if self._rest_shown == 0:
                text = self._prefix + text
            self.console.write(text, self, finished=False)
        self._rest_shown = len(self._rest)
        if self._rest_shown > LONGEST_LINE:
            self._rest, self._rest_shown = self._rest[-1:], 1
        self.show_at = None

    def _prefixed(self, lines, shown):
        """Put the prefix before each line, but for the part of the first one that is shown already."""
        if shown:
            first, end, lines = lines[shown:].partition(b"\n")
            first += end
        else:
            first = b""
        if self._prefix and lines:
            lines = self._prefix + lines[:-1].replace(b"\n", b"\n" + self._prefix) + lines[-1:]
        return first + lines

    def close(self):
        """Close pipe and file; a line without an end is shown with one."""
        if self.descriptor is None:
            return
        if self._held is not None:
            self._let_go(0.0)
        if self.console and self._rest:
            self.show_rest()
            self.console.write(b"\n", self)
            self._rest, self._rest_shown = b"", 0
        os.close(self.descriptor)
        self.descriptor = None
        if self._log:
            self._log.close()


def fill_template(template, rank, local_rank, role, hostname):
    """Fill ${rank}, ${local_rank}, ${role_name} and ${hostname}."""
    values = {"role_name": role, "local_rank": local_rank, "rank": rank, "hostname": hostname}
    for name, value in values.items():
        template = template.replace("${" + name + "}", str(value))
    return template
