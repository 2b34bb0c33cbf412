"""The fault matrix: what strikes, in which call, over which transport, at which rank; and what every rank
must raise.

A cell is one world of three forked ranks that repeat one call. After a few rounds the victim is struck;
every other rank must raise what the fault promises, in time. The times are collected for the table in
docs/failures.md.
"""

import atexit
import contextlib
import ctypes
import mmap
import os
import signal
import socket
import struct
import sys
import threading
import time

import cdist
import numpy as np
from cdist.testing import RankFailedError, run

WORLD = 3
# Promised is a second; a loaded machine gets five.
LIMIT = 5.0
GROUP_TIMEOUT = 20
FROZEN_TIMEOUT = 0.6
# The victim is struck this long after the first round, wherever it is.
STRIKE_AFTER = 0.03

# Shared by the ranks of the cell that runs (they are forked): when it struck, and the victim's process id.
_shared = mmap.mmap(-1, 4096)


def _ring(rank, world, count, timeout):
    out, into = np.full(count, float(rank)), np.zeros(count)
    work = cdist.isend(out, (rank + 1) % world)
    cdist.recv(into, (rank - 1) % world, timeout=timeout) if timeout else cdist.recv(into, (rank - 1) % world)
    work.wait()
    return into


def _send_to_victim(rank, victim, timeout):
    """Everyone floods the victim, which receives one message of each a round."""
    x = np.zeros(100_000)
    if rank != victim:
        cdist.send(x, victim, timeout=timeout)
    else:
        for other in range(WORLD):
            if other != victim:
                cdist.recv(x, other)


def _receive_from_victim(rank, victim, timeout):
    x = np.zeros(10)
    if rank != victim:
        cdist.recv(x, victim, timeout=timeout)
    else:
        for other in range(WORLD):
            if other != victim:
                cdist.send(x, other)
        time.sleep(0.001)


def _queue(timeout):
    arrays = [np.ones(1000) for _ in range(8)]
    works = [cdist.all_reduce(a, async_op=True, timeout=timeout) for a in arrays]
    errors = []
    for work in works:
        try:
            work.wait()
        except cdist.DistError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _new_group(timeout):
    made = cdist.new_group(timeout=timeout)
    cdist.barrier(group=made)
    cdist.destroy_process_group(made)


# name: call(rank, victim, timeout of the call)
CALLS = {
    "all_reduce 32 B": lambda r, v, t: cdist.all_reduce(np.ones(4), timeout=t),
    "all_reduce 4 MiB": lambda r, v, t: cdist.all_reduce(np.ones(1 << 19), timeout=t),
    "broadcast from the victim": lambda r, v, t: cdist.broadcast(np.ones(1 << 16), v, timeout=t),
    "broadcast to the victim": lambda r, v, t: cdist.broadcast(np.ones(1 << 16), (v + 1) % WORLD, timeout=t),
    "all_gather": lambda r, v, t: cdist.all_gather(
        [np.zeros(999) for _ in range(WORLD)], np.ones(999), timeout=t
    ),
    "reduce_scatter": lambda r, v, t: cdist.reduce_scatter(
        np.zeros(500), [np.ones(500) for _ in range(WORLD)], timeout=t
    ),
    "all_to_all": lambda r, v, t: cdist.all_to_all_single(
        np.zeros(WORLD * 300), np.ones(WORLD * 300), timeout=t
    ),
    "barrier": lambda r, v, t: cdist.barrier(timeout=t),
    "send to the victim": _send_to_victim,
    "recv from the victim": _receive_from_victim,
    "isend and recv in a ring": lambda r, v, t: _ring(r, WORLD, 2000, t),
    "Work.wait of eight": lambda r, v, t: _queue(t),
    "new_group": lambda r, v, t: _new_group(t or GROUP_TIMEOUT),
    "all_gather_object": lambda r, v, t: cdist.all_gather_object([None] * WORLD, {"rank": r}),
}


class BoomError(Exception):
    pass


def _note_strike():
    _shared[:12] = struct.pack("di", time.monotonic(), os.getpid())


def _kill_self(number):
    _note_strike()
    os.kill(os.getpid(), number)


def _cut_sockets(inherited):
    """Shut every socket down that was opened after the fork: as if a firewall had cut them all."""
    _note_strike()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, ValueError):
            what = os.readlink(f"/proc/self/fd/{name}")
            if what.startswith("socket:") and what not in inherited:
                with socket.socket(fileno=os.dup(int(name))) as copy:
                    copy.shutdown(socket.SHUT_RDWR)


def _raise_in_main():
    raise BoomError("no good")


def _exit_quietly():
    sys.exit(0)


# name: (how it is done: at a random moment by a thread, or between two calls; the action)
FAULTS = {
    "SIGKILL": ("any moment", lambda inherited: _kill_self(signal.SIGKILL)),
    "SIGSTOP": ("any moment", lambda inherited: _kill_self(signal.SIGSTOP)),
    "exception": ("between calls", lambda inherited: _raise_in_main()),
    "exit 0": ("between calls", lambda inherited: _exit_quietly()),
    "os._exit": ("between calls", lambda inherited: os._exit(3)),
    "sockets cut": ("any moment", _cut_sockets),
    "delay": ("between calls", lambda inherited: time.sleep(0.3)),
}


def _end_as_interpreter(error):
    """What the interpreter does when the main thread ends: the hooks, then the exit functions."""
    if not isinstance(error, SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)
    atexit._run_exitfuncs()
    os._exit(0 if isinstance(error, SystemExit) else 1)


def _rank_main(rank, world, cell, where):
    fault, call_name, victim = cell["fault"], cell["call"], cell["victim"]
    call, (moment, action) = CALLS[call_name], FAULTS[fault]
    frozen = fault == "SIGSTOP"
    timeout = FROZEN_TIMEOUT if frozen else None
    inherited = cell["inherited"]
    if where is not None:
        _enter_namespace(where[rank])
    _init(rank, world, cell)
    end, rounds, struck = None, 0, False
    devnull = open(os.devnull, "w")  # noqa: SIM115
    try:
        while end is None or time.monotonic() < end:
            if frozen and call_name == "all_gather_object":
                cdist.set_timeout(FROZEN_TIMEOUT)
            call(rank, victim, timeout)
            rounds += 1
            if rounds == 3 and rank == victim and moment == "any moment":
                threading.Timer(STRIKE_AFTER, action, [inherited]).start()
            if rounds == 10 and rank == victim and moment == "between calls":
                _note_strike()
                if fault != "delay":
                    sys.stderr = devnull
                action(inherited)
                struck = True
            if fault == "delay" and rounds == 40:
                return ("went on", rounds)
            if rounds == 3:
                end = time.monotonic() + GROUP_TIMEOUT
    except cdist.DistError as error:
        now = time.monotonic()
        try:
            cdist.barrier()
            sticky = None
        except cdist.DistError as later:
            sticky = type(later).__name__
        at, _ = struct.unpack("di", _shared[:12])
        return ("raised", type(error).__name__, error.rank, str(error), now - at, sticky)
    except (BoomError, SystemExit) as error:
        _end_as_interpreter(error)
    return ("nothing happened", rounds, struck)


def _enter_namespace(name):
    with open(f"/run/netns/{name}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0x40000000) != 0:
            raise OSError(ctypes.get_errno(), "setns")


def _init(rank, world, cell):
    from cdist.store import TCPStore

    host, port = cell["store"]
    store = TCPStore(host, port, None, False, wait_for_workers=False)
    cdist.init_process_group(store=store, rank=rank, world_size=world, timeout=GROUP_TIMEOUT)


def _thaw_later():
    """Let the frozen rank go once the others had time to find out, so that the cell can end."""

    def thaw():
        for _ in range(200):
            time.sleep(0.05)
            at, pid = struct.unpack("di", _shared[:12])
            if pid and time.monotonic() - at > FROZEN_TIMEOUT + 0.8:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
                return

    threading.Thread(target=thaw, daemon=True).start()


def run_cell(cell, store=None, where=None):
    """Run one cell; return (problems, {rank: seconds from the strike to the exception})."""
    from cdist.store import TCPStore

    _shared[:12] = bytes(12)
    server = None
    if store is None:
        server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        store = ("127.0.0.1", server.port)
    inherited = {os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if n.isdigit() and int(n) > 2
                 and os.path.exists(f"/proc/self/fd/{n}") or os.path.islink(f"/proc/self/fd/{n}")}  # fmt: skip
    cell = dict(cell, store=store, inherited=inherited)
    if cell["fault"] == "SIGSTOP":
        _thaw_later()
    transport = "shm" if cell["transport"] == "shm" else "tcp"
    try:
        outcomes = run(
            _rank_main, WORLD, cell, where, init=False, transport=transport, allow_failures=True, timeout=30,
            check_leftovers=False,
        )  # fmt: skip
    except RankFailedError as error:
        return [str(error)], {}
    finally:
        del server
    return _judge(cell, outcomes)


def _expected(cell):
    fault = cell["fault"]
    if fault == "SIGSTOP":
        return {"DistTimeoutError"}, "did not|stopped|missing|members"
    if fault == "exception":
        return {"PeerLostError"}, "BoomError"
    if fault == "exit 0":
        return {"PeerLostError"}, "left|closed|gone|hand out"
    return {"PeerLostError"}, "cut" if fault == "sockets cut" else "lost|left|closed"


def _judge(cell, outcomes):
    import re

    victim, fault = cell["victim"], cell["fault"]
    problems, times = [], {}
    if fault == "delay":
        return [f"rank {r}: {o}" for r, o in enumerate(outcomes) if o != ("went on", 40)], {}
    kinds, text = _expected(cell)
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            continue
        if not isinstance(outcome, tuple) or outcome[0] != "raised":
            problems.append(f"rank {rank}: {outcome!r}")
            continue
        _, kind, blamed, said, seconds, sticky = outcome
        times[rank] = seconds
        hub_frozen = fault == "SIGSTOP" and cell["transport"] == "tcp" and victim == 0
        if (
            hub_frozen and kind == "AbortedError"
        ):  # of a rank that timed out first, whose reason rank 0 did not pass on
            continue
        if kind not in kinds:
            problems.append(f"rank {rank} raised {kind}: {said}")
        # In a ring of messages each is late for its neighbour. Whose connections are all cut thinks that the others are lost.
        # Between hosts rank 0 passes the first cause on: when it is the victim, a rank may see only who failed because of it.
        excused = (
            (fault == "SIGSTOP" and "ring" in cell["call"])
            or (fault == "sockets cut" and (blamed == 0 or victim == 0))
            or (cell["transport"] == "tcp" and victim == 0)
        )
        if blamed != victim and not excused:
            problems.append(f"rank {rank} blames rank {blamed}: {said}")
        if not re.search(text, said):
            problems.append(f"rank {rank} does not say /{text}/: {said}")
        if seconds > LIMIT:
            problems.append(f"rank {rank} took {seconds:.1f} s")
        if fault != "SIGSTOP" and sticky != "PeerLostError":
            problems.append(f"rank {rank}: the next call gave {sticky}")
    return problems, times


def table(rows):
    """Return the times as a Markdown table: rows {(transport, fault): [seconds]}."""
    lines = ["| transport | fault | ranks | median | slowest |", "|---|---|---|---|---|"]
    for (transport, fault), seconds in sorted(rows.items()):
        ordered = sorted(seconds)
        median, slowest = ordered[len(ordered) // 2] * 1e3, ordered[-1] * 1e3
        lines.append(f"| {transport} | {fault} | {len(ordered)} | {median:.1f} ms | {slowest:.1f} ms |")
    return "\n".join(lines)
