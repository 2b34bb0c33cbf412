"""breakpoint: a debugger on one rank; record_comm: a label for profilers."""

import bdb
import contextlib
import os
import pdb
import signal
import sys

__all__ = ["breakpoint", "record_comm"]

_calls: dict = {}  # how often breakpoint was called, by place


def _terminal_paths():
    """Yield where the user's terminal may be: one's own, or an ancestor's (launched processes have none)."""
    yield "/dev/tty"
    pid = os.getppid()
    while pid > 1:
        for number in (0, 1, 2):
            with contextlib.suppress(OSError):
                path = os.readlink(f"/proc/{pid}/fd/{number}")
                if path.startswith(("/dev/pts/", "/dev/tty")):
                    yield path
        try:
            with open(f"/proc/{pid}/stat") as stat:
                pid = int(stat.read().rpartition(")")[2].split()[1])
        except OSError:
            return


def _open_terminal():
    """Return (reader, writer) of the user's terminal."""
    for path in _terminal_paths():
        try:
            number = os.open(path, os.O_RDWR | os.O_NOCTTY)
        except OSError:
            continue
        return os.fdopen(number, "r"), os.fdopen(os.dup(number), "w")
    raise RuntimeError("breakpoint: there is no terminal, neither this process's nor one of its launcher")


@contextlib.contextmanager
def _in_foreground(terminal):
    """Let a background process read its terminal. For the terminal of another session nothing is needed."""
    try:
        before = os.tcgetpgrp(terminal.fileno())
    except OSError:
        yield
        return
    handler = signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # moving oneself to the foreground would stop us
    try:
        os.tcsetpgrp(terminal.fileno(), os.getpgrp())
        yield
        os.tcsetpgrp(terminal.fileno(), before)
    finally:
        signal.signal(signal.SIGTTOU, handler)


def _debug(frame):
    """Run the debugger in a frame until the user goes on."""
    if sys.stdin is not None and sys.stdin.isatty():
        reader, writer = sys.stdin, sys.stdout
    else:
        reader, writer = _open_terminal()
    debugger = pdb.Pdb(stdin=reader, stdout=writer, skip=["cdist.*", "contextlib"], nosigint=True)
    debugger.use_rawinput = reader is sys.stdin
    debugger.reset()
    debugger.botframe = frame
    with _in_foreground(reader):
        debugger.interaction(frame, None)
    if debugger.quitting:
        raise bdb.BdbQuit
    if debugger.stoplineno != -1 or debugger.breaks:  # stay with the caller
        frame.f_trace = debugger.trace_dispatch
        sys.settrace(debugger.trace_dispatch)


def breakpoint(rank: int = 0, skip: int = 0, timeout_s: float = 3600) -> None:
    """Stop one rank in the debugger at the calling line until the user goes on. All ranks call it, and wait.

    Args:
        rank: the rank that stops.
        skip: how many calls of this line go by before one stops.
        timeout_s: how long the others wait, seconds. The group's own time limit does not end this wait.

    Raises:
        RuntimeError: no terminal is there.
        bdb.BdbQuit: the user typed "q".
        DistTimeoutError: the user took longer than `timeout_s`.

    """
    from cdist import _core, groups

    caller = sys._getframe(1)
    place = (caller.f_code.co_filename, caller.f_lineno)
    _calls[place] = _calls.get(place, 0) + 1
    if _calls[place] <= skip:
        return
    if not 0 <= rank < groups.get_world_size():
        raise ValueError(f"breakpoint: rank {rank} is not one of 0 to {groups.get_world_size() - 1}")
    if groups.get_rank() == rank:
        _debug(caller)
    _core.barrier(timeout=timeout_s)


@contextlib.contextmanager
def record_comm(name: str):
    """Label what runs inside for torch's profiler, where torch is in use; without it the label has no reader.

    Args:
        name: the label.

    """
    torch = sys.modules.get("torch")
    with torch.profiler.record_function(name) if torch is not None else contextlib.nullcontext():
        yield
