"""spawn: run a function in several processes, end them together, and say why one failed.

Works as torch.multiprocessing's spawn. The start methods are those of the standard library.
"""

import contextlib
import json
import multiprocessing as mp
import multiprocessing.connection
import multiprocessing.process
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import pickle
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from numbers import Integral
from typing import Any

from cdist.errors import AbortedError, DistError, PeerLostError
from cdist.groups import note_uncaught
from cdist.launch.exits import INTERRUPT_GRACE, MemoryWatch, mebibytes, signal_name

__all__ = [
    "ProcessContext",
    "ProcessException",
    "ProcessExitedException",
    "ProcessRaisedException",
    "SpawnContext",
    "spawn",
    "start_processes",
]

# From SIGTERM to SIGKILL, seconds.
GRACE = 30.0
# A rank that failed because another one did is given this long before it is taken for the cause.
AFTERMATH = 1.0
# A traceback has to fit into a pipe that nobody reads yet.
_TEXT_BYTES = 8192


class ProcessException(DistError):
    """A process failed: ``msg``, ``error_index`` (also ``rank``), ``error_pid`` (also ``pid``)."""

    def __init__(self, msg, error_index, error_pid):
        super().__init__(msg, rank=error_index)
        self.msg = msg
        self.error_index = error_index
        self.error_pid = self.pid = error_pid

    def __reduce__(self):
        return type(self), (self.msg, self.error_index, self.error_pid)


class ProcessRaisedException(ProcessException):
    """A process' function raised; the text ends with its traceback."""


class ProcessExitedException(ProcessException):
    """A process ended by a signal or an exit code: also ``exit_code``, and ``signal_name`` or None."""

    def __init__(self, msg, error_index, error_pid, exit_code, signal_name=None):
        super().__init__(msg, error_index, error_pid)
        self.exit_code = exit_code
        self.signal_name = signal_name

    def __reduce__(self):
        return type(self), (self.msg, self.error_index, self.error_pid, self.exit_code, self.signal_name)


def _end_with_parent(by_kernel):
    """Let this process end when its parent does, whatever ends that."""
    if by_kernel:
        from cdist.launch.worker import die_with_parent

        die_with_parent(mp.parent_process().pid)
        return

    # Started by a fork server, or by a thread that may end first: watch the pipe that the standard library
    # keeps.
    def watch():
        mp.connection.wait([mp.parent_process().sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="cdist-parent-watch", daemon=True).start()


@contextlib.contextmanager
def _without_interrupts(start_method):
    """Block SIGINT in what is started, which inherits that; _run lets it in. Yields whether it did.

    Else each process that Ctrl-C finds while it imports tells so in a traceback. The tracker is started
    before, since that would let SIGINT in again.
    """
    if start_method != "spawn":  # fork: nothing is imported; a fork server would keep it for all its children
        yield False
        return
    mp.resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield signal.SIGINT not in before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(fn, index, args, pipe, by_kernel, is_blocked):
    """Run in the child; sends b"" when fn begins, and (time, is a consequence, traceback) if it raises."""
    _end_with_parent(by_kernel)
    pipe.send_bytes(b"")
    try:
        if is_blocked:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        fn(index, *args)
    except KeyboardInterrupt as error:
        _end_interrupted(error)
    except Exception as error:
        note_uncaught(error, error.__traceback__)
        text = traceback.format_exc()
        is_consequence = isinstance(error, (PeerLostError, AbortedError))
        pipe.send_bytes(json.dumps((time.time(), is_consequence, text[-_TEXT_BYTES:])).encode())
        sys.exit(1)


def _end_interrupted(error):
    """End by SIGINT itself: quietly, but not as a success.

    Before that as much as a process does at its end that others would miss: the children that multiprocessing
    made (a DataLoader's workers), their semaphores and folders would stay.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # pressed twice
    note_uncaught(error, error.__traceback__)
    with contextlib.suppress(Exception):
        mp.util._exit_function()
        sys.stdout.flush()
        sys.stderr.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


class _Failure:
    """How one process failed, read from its exit code and what it sent."""

    def __init__(self, index, process, began, sent):
        self.index = index
        self.process = process
        self.began = began
        self.time, self.is_consequence, self.text = sent or (time.time(), False, None)

    def exception(self, memory):
        index, pid, code = self.index, self.process.pid, self.process.exitcode
        if self.text is not None:
            text = f"\n\n-- Process {index} terminated with the following error:\n{self.text}"
            return ProcessRaisedException(text, index, pid)
        if code < 0:
            name = signal_name(-code)
            peak = mebibytes(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
            text = (
                f"process {index} terminated with signal {name} (pid {pid}; "
                f"peak memory of the largest process {peak})"
            )
            if code == -signal.SIGKILL:
                text += f"; {memory.hint()}"
            return ProcessExitedException(text, index, pid, code, name)
        text = f"process {index} terminated with exit code {code} (pid {pid})"
        if not self.began:
            text += (
                "; its function had not begun: is the call of spawn under "
                '`if __name__ == "__main__":`, and can the function\'s module be imported? '
                "Its own message is above, on stderr"
            )
        return ProcessExitedException(text, index, pid, code)


class ProcessContext:
    """Processes that were started together: ``processes``, in order of index."""

    def __init__(self, processes, pipes, memory):
        self.processes = processes
        self._pipes = pipes
        self._memory = memory
        self._failures = {}
        self._running = dict(enumerate(processes))

    def pids(self):
        """Return the process ids, in order of index."""
        return [process.pid for process in self.processes]

    def join(self, timeout=None, grace_period=None):
        """Wait until all have ended well (True) or `timeout` seconds are over (False).

        When one fails, the others get SIGTERM and `grace_period` seconds later (default 30) SIGKILL; then
        its exception is raised, of several failures the first one that is not the consequence of another.

        Raises:
            ProcessRaisedException: a function raised.
            ProcessExitedException: a process ended by a signal or with an exit code other than 0.

        """
        end = None if timeout is None else time.monotonic() + timeout
        while self._running and not self._failures:
            left = None if end is None else max(0.0, end - time.monotonic())
            self._collect(left)
            if self._running and not self._failures and left == 0.0:
                return False
        if not self._failures:
            return True
        self._await_cause()
        self._end_all(GRACE if grace_period is None else grace_period)
        raise min(self._failures.values(), key=lambda f: (f.is_consequence, f.time)).exception(self._memory)

    def _collect(self, timeout):
        """Wait for the end of any process and note how those ended."""
        sentinels = {process.sentinel: index for index, process in self._running.items()}
        for sentinel in mp.connection.wait(list(sentinels), timeout):
            index = sentinels[sentinel]
            process = self._running.pop(index)
            process.join()
            if process.exitcode != 0:
                self._failures[index] = _Failure(index, process, *self._read_pipe(index))
            self._pipes[index].close()

    def _read_pipe(self, index):
        """Return (whether the function began, what it sent or None)."""
        pipe = self._pipes[index]
        messages = []
        with contextlib.suppress(EOFError, OSError):
            while pipe.poll():
                messages.append(pipe.recv_bytes())
        return bool(messages), json.loads(messages[1]) if len(messages) > 1 else None

    def _await_cause(self):
        end = time.monotonic() + AFTERMATH
        while self._running and all(failure.is_consequence for failure in self._failures.values()):
            left = end - time.monotonic()
            if left <= 0:
                return
            self._collect(left)

    def _end_interrupted(self):
        """Stop what still runs as Ctrl-C does: on a terminal it has reached all, else this process alone."""
        self._await_end(INTERRUPT_GRACE)
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGINT)
        self._await_end(INTERRUPT_GRACE)

    def _await_end(self, seconds):
        end = time.monotonic() + seconds
        while self._running and time.monotonic() < end:
            self._collect(max(0.0, end - time.monotonic()))

    def _end_all(self, grace):
        """Stop what still runs. What ends by it is no failure."""
        noted = dict(self._failures)
        for process in self._running.values():
            process.terminate()
        self._await_end(grace)
        for process in self._running.values():
            process.kill()
        while self._running:
            self._collect(None)
        self._failures = noted


SpawnContext = ProcessContext


def _check_can_start(fn, start_method):
    """Raise where the child could not import what it is to run: better than a storm of processes."""
    if getattr(mp.process.current_process(), "_inheriting", False):
        raise RuntimeError(
            "spawn was called while this very process is being started by spawn: the main "
            'script ran again on import. Put the call under `if __name__ == "__main__":`'
        )
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    has_file = getattr(main, "__spec__", None) is not None or (path is not None and os.path.exists(path))
    if start_method != "fork" and getattr(fn, "__module__", None) == "__main__" and not has_file:
        raise RuntimeError(
            f"spawn: the function {getattr(fn, '__name__', fn)!r} is defined in a session "
            "without a file (notebook, python -, python -c), which a new process cannot "
            'import: put it into a module, or use start_processes(…, start_method="fork")'
        )


def _start(process):
    try:
        process.start()
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        if "pickle" in str(error):
            error.add_note(
                "spawn passes the function and its arguments to new processes by pickle: the function has to "
                "be defined at the top of a module (no lambda, no function inside another one)"
            )
        raise


def start_processes(
    fn: Callable[..., Any],
    args: Iterable[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> ProcessContext | None:
    """Run ``fn(i, *args)`` in ``nprocs`` processes, i = 0 … nprocs − 1.

    Args:
        fn: a function that the child can import (for ``fork``: any).
        args: further arguments; for ``spawn`` and ``forkserver`` they are pickled.
        nprocs: number of processes.
        join: wait for all (default), or return a ProcessContext at once.
        daemon: the processes are daemons: they may not have children of their own.
        start_method: "spawn", "fork" or "forkserver".

    Returns:
        None, or with ``join=False`` a ProcessContext.

    Raises:
        ProcessRaisedException, ProcessExitedException: see ProcessContext.join.
        RuntimeError: the child could not import ``fn``.
        TypeError, pickle.PicklingError: arguments of another kind, or that do not go through pickle.
        ValueError: unknown start method, or fewer than one process.

    The processes end when this one does, even by SIGKILL; Ctrl-C ends them all, with what they started by
    multiprocessing, and is raised as KeyboardInterrupt.

    """
    if start_method not in ("spawn", "fork", "forkserver"):
        raise ValueError(f"start_method should be 'spawn', 'fork' or 'forkserver', not {start_method!r}")
    if not callable(fn):
        raise TypeError(
            f"fn should be a function, not {fn!r}: pass it without calling it, its arguments as args=(…)"
        )
    if isinstance(args, str) or not isinstance(args, Iterable):
        raise TypeError(f"args should be a tuple of arguments, such as ({args!r},), not {args!r}")
    if not isinstance(nprocs, Integral):
        raise TypeError(f"nprocs should be a number of processes, not {nprocs!r}")
    if nprocs < 1:
        raise ValueError(f"nprocs should be at least 1, not {nprocs}")
    _check_can_start(fn, start_method)
    context = mp.get_context(start_method)
    by_kernel = start_method != "forkserver" and threading.current_thread() is threading.main_thread()
    started = ProcessContext([], [], MemoryWatch())
    try:
        for index in range(nprocs):
            read_end, write_end = context.Pipe(duplex=False)
            with _without_interrupts(start_method) as is_blocked:
                work = (fn, index, args, write_end, by_kernel, is_blocked)
                process = context.Process(target=_run, args=work, daemon=daemon)
                _start(process)
            write_end.close()
            started.processes.append(process)
            started._pipes.append(read_end)
            started._running[index] = process
        if not join:
            return started
        while not started.join():
            pass
    except ProcessException:
        raise
    except BaseException as error:
        with contextlib.suppress(KeyboardInterrupt):
            if isinstance(error, KeyboardInterrupt):
                started._end_interrupted()
            started._end_all(AFTERMATH)
        started._end_all(0)
        raise
    return None


def spawn(
    fn: Callable[..., Any],
    args: Iterable[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> ProcessContext | None:
    """Run ``fn(i, *args)`` in ``nprocs`` new processes; see start_processes.

    ``start_method`` other than "spawn" is accepted with a warning, as in torch.
    """
    if start_method != "spawn":
        import warnings

        warnings.warn(
            f"spawn with start_method={start_method!r}: use start_processes for that",
            FutureWarning,
            stacklevel=2,
        )
    return start_processes(fn, args, nprocs, join, daemon, start_method)


def __getattr__(name):
    """Give everything else from the standard library: ``Queue``, ``Process``, ``get_context`` and so on."""
    if name in mp.__all__:
        return getattr(mp, name)
    raise AttributeError(f"module 'cdist.multiprocessing' has no attribute {name!r}")


def __dir__():
    return sorted(set(globals()) | set(mp.__all__))
