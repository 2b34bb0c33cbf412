"""The fault matrix: what strikes, in which call, over which transport, at which rank; and what every rank
must raise.

A cell is one world of three forked ranks that repeat one call. After a few rounds the victim is struck;
every other rank must raise what the fault promises, naming the victim, in time. The times are collected for
the table in docs/failures.md.

Transports: "shm" and "tcp" on this host; "hosts" are two network namespaces that see nothing of each other
but what goes through the cable: rank 0, which passes news on, on the first; on the second rank 1, which does
the same from there, and rank 2.
"""

import atexit
import contextlib
import itertools
import mmap
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from datetime import timedelta

import cdist
import numpy as np
from cdist.testing import RankFailedError, run
from hosts import hosts, python

WORLD = 3
HOST_OF = (0, 1, 1)
# Promised is a second; a loaded machine gets five.
LIMIT = 5.0
LOST_HOST_LIMIT = 20.0
GROUP_TIMEOUT = 20
FROZEN_TIMEOUT = 0.6
# The victim is struck this long after the first rounds, wherever it is.
STRIKE_AFTER = 0.03

# Shared by the ranks of the cell that runs (they are forked): when it struck, and the victim's process id.
_shared = mmap.mmap(-1, 4096)
_store = None
_keys = None  # of this cell: the store outlives it
_model = None


def _ring(rank, count, timeout):
    work = cdist.isend(np.zeros(count), (rank + 1) % WORLD)
    cdist.recv(np.zeros(count), (rank - 1) % WORLD, timeout=timeout)
    work.wait()


def _batch(rank, count):
    send = cdist.P2POp(cdist.isend, np.zeros(count), (rank + 1) % WORLD)
    receive = cdist.P2POp(cdist.irecv, np.zeros(count), (rank - 1) % WORLD)
    for work in cdist.batch_isend_irecv([receive, send]):
        work.wait()


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


_rounds = itertools.count()


def _get_from_store(rank, victim):
    """The victim writes a key a round, the others wait for it."""
    key = f"round {next(_rounds)}"
    if rank == victim:
        _keys.set(key, b"here")
        time.sleep(0.001)
    else:
        _keys.get(key)


class _Net:
    def __init__(self):
        self.parameters = [cdist.Parameter(np.zeros((50, 50))) for _ in range(4)]

    def named_parameters(self):
        return ((str(i), p) for i, p in enumerate(self.parameters))

    def named_buffers(self):
        return ()

    def __call__(self, x):
        return x


def _backward():
    global _model
    if _model is None:
        _model = cdist.DistributedDataParallel(_Net())
    _model(np.zeros(3))
    _model.zero_grad()
    for parameter in reversed(_model.module.parameters):
        parameter.accumulate_grad(np.ones((50, 50)))


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
    "isend and recv in a ring": lambda r, v, t: _ring(r, 2000, t),
    "batch_isend_irecv": lambda r, v, t: _batch(r, 200),
    "batch_isend_irecv 1 MiB": lambda r, v, t: _batch(r, 1 << 17),
    "monitored_barrier": lambda r, v, t: cdist.monitored_barrier(timeout=t, wait_all_ranks=True),
    "Work.wait of eight": lambda r, v, t: _queue(t),
    "new_group": lambda r, v, t: _new_group(t or GROUP_TIMEOUT),
    "all_gather_object": lambda r, v, t: cdist.all_gather_object([None] * WORLD, {"rank": r}),
    "broadcast_object_list": lambda r, v, t: cdist.broadcast_object_list([r, "x" * 30000], v),
    "gather to the victim": lambda r, v, t: (
        cdist.gather(np.ones(9), [np.zeros(9) for _ in range(WORLD)] if r == v else None, v, timeout=t),
        cdist.barrier(timeout=t),
    ),
    "scatter from the victim": lambda r, v, t: cdist.scatter(
        np.zeros(9), [np.ones(9) for _ in range(WORLD)] if r == v else None, v, timeout=t
    ),
    "backward of DDP": lambda r, v, t: _backward(),
    "store.get": lambda r, v, t: _get_from_store(r, v),
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
    "lost host": ("from outside", None),
}


def _end_as_interpreter(error):
    """What the interpreter does when the main thread ends: the hooks, then the exit functions."""
    if not isinstance(error, SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)
    atexit._run_exitfuncs()
    os._exit(0 if isinstance(error, SystemExit) else 1)


def _await_death(call, rank, cell):
    """Repeat the call until it raises; return ("went on", rounds) or the error."""
    fault, victim = cell["fault"], cell["victim"]
    moment, action = FAULTS[fault]
    timeout = FROZEN_TIMEOUT if fault == "SIGSTOP" else None
    rounds, end = 0, time.monotonic() + GROUP_TIMEOUT
    while time.monotonic() < end:
        if fault == "SIGSTOP" and rank == victim and cell["call"] == "store.get" and any(_shared[:8]):
            break  # thawed: who only writes to the store does not hear of the others' end
        call(rank, victim, timeout)
        rounds += 1
        if rounds == 3 and timeout:
            cdist.set_timeout(timeout)
            _store.set_timeout(timedelta(seconds=timeout))
        if rounds == 3 and rank == 0 and moment == "from outside":
            _shared[12] = 1
        if rounds == 3 and rank == victim and moment == "any moment":
            threading.Timer(STRIKE_AFTER, action, [cell["inherited"]]).start()
        if rounds == 10 and rank == victim and moment == "between calls":
            _note_strike()
            if fault != "delay":
                sys.stderr = open(os.devnull, "w")  # noqa: SIM115
            action(cell["inherited"])
        if rounds == 40 and fault == "delay":
            return rounds
    return rounds


def _rank_main(rank, world, cell, places):
    """One rank: ("raised", class, rank blamed, text, seconds since the strike, class of the next call's
    error, seconds that destroy took), or ("went on", rounds)."""
    call = CALLS[cell["call"]]
    # Of the store's server too: its end of the connections of ranks that were forked before this one.
    cell["inherited"] = {f"socket:[{os.stat(f'/proc/self/fd/{n}').st_ino}]" for n in _descriptors()}
    if places:
        places[HOST_OF[rank]].enter()
    _init(rank, world, cell)
    try:
        return ("went on", _await_death(call, rank, cell))
    except cdist.DistError as error:
        now = time.monotonic()
        try:
            cdist.barrier()
            sticky = None
        except cdist.DistError as later:
            sticky = type(later).__name__
        begin = time.monotonic()
        cdist.destroy_process_group()
        ended = time.monotonic() - begin
        at, _ = struct.unpack("di", _shared[:12])
        return ("raised", type(error).__name__, error.rank, str(error), now - at, sticky, ended)
    except (BoomError, SystemExit) as error:
        _end_as_interpreter(error)


def _init(rank, world, cell):
    global _store, _keys
    host, port = cell["store"]
    _store = cdist.TCPStore(host, port, None, False, wait_for_workers=False)
    if cell["fault"] == "exit 0":
        _store.set_timeout(timedelta(seconds=1))  # who leaves in good order ends no wait in the store
    _keys = cdist.PrefixStore(f"keys of {cell['name']}", _store)
    prefix = cdist.PrefixStore(cell["name"], _store)
    limit = GROUP_TIMEOUT if cell["fault"] != "lost host" else 3 * LOST_HOST_LIMIT
    cdist.init_process_group(store=prefix, rank=rank, world_size=world, timeout=limit)


# In a monitored barrier the others wait 2 s longer for the verdict of rank 0.
_THAW_AFTER = {"monitored_barrier": FROZEN_TIMEOUT + 2.8}


def _thaw_later(after):
    """Let the frozen rank go once the others had time to find out, so that the cell can end."""

    def thaw():
        for _ in range(200):
            time.sleep(0.05)
            at, pid = struct.unpack("di", _shared[:12])
            if pid and time.monotonic() - at > after:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
                return

    threading.Thread(target=thaw, daemon=True).start()


def _cut_later(host):
    def cut():
        for _ in range(1000):
            time.sleep(0.005)
            if _shared[12]:
                _note_strike()
                host.cut()
                return

    thread = threading.Thread(target=cut, daemon=True)
    thread.start()
    return thread


class Place:
    """Where cells run: this host, or two hosts with a store on the first; with a store that outlives all."""

    def __init__(self, transport):
        self.transport, self.places, self._cells = transport, None, 0
        self._stack = contextlib.ExitStack()
        if transport == "hosts":
            self.places = self._stack.enter_context(hosts(2))
            serve = (
                "import cdist, sys; s = cdist.TCPStore(sys.argv[1], 0, None, True, wait_for_workers=False);"
                "print(s.port, flush=True); sys.stdin.read()"
            )
            command = [*python(serve), self.places[0].address]
            server = self.places[0].start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self.store = (self.places[0].address, int(server.stdout.readline()))
        else:
            self._server = cdist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
            self.store = ("127.0.0.1", self._server.port)

    def close(self):
        self._stack.close()

    def run_cell(self, fault, call, victim):
        """Run one cell; return (problems, {rank: seconds from the strike to the exception})."""
        _shared[:16] = bytes(16)
        self._cells += 1
        cell = {"fault": fault, "call": call, "victim": victim, "transport": self.transport}
        cell |= {"store": self.store, "name": str(self._cells)}
        cutting = _cut_later(self.places[1]) if fault == "lost host" else None
        if fault == "SIGSTOP":
            _thaw_later(_THAW_AFTER.get(call, FROZEN_TIMEOUT + 0.8))
        try:
            outcomes = run(
                _rank_main, WORLD, cell, self.places, init=False, allow_failures=True, check_leftovers=False,
                timeout=90 if cutting else 30, transport="tcp" if self.transport == "tcp" else "shm",
            )  # fmt: skip
        except RankFailedError as error:
            return [str(error)], {}
        finally:
            if cutting:
                cutting.join()
                self.places[1].mend()
        return _judge(cell, outcomes)


def _descriptors():
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            os.stat(f"/proc/self/fd/{name}")
            yield name


def _expected(cell, rank):
    """(class, what the text must say, ranks that may be blamed, class of the next call's error)"""
    fault, victim, of_store = cell["fault"], cell["victim"], cell["call"] == "store.get"
    blamed = {victim}
    if of_store and fault in ("SIGSTOP", "exit 0"):
        # Nobody knows who was to write a key; who has left is said.
        if fault == "SIGSTOP":
            return "DistStoreTimeoutError", "keys: /.*round", {None}, None
        # The first to wait in vain makes its next call, which ends the group, and then leaves too.
        return "DistStoreTimeoutError|PeerLostError", "have left|closed|left", blamed, "PeerLostError"
    if fault == "SIGSTOP":
        return "DistTimeoutError", "did not|stopped|missing|members|waits for|failed to pass", blamed, None
    if fault == "lost host":
        lost = [other for other in range(WORLD) if HOST_OF[other] != HOST_OF[rank]]
        return "PeerLostError", re.escape(f"ranks {lost} run there"), set(lost), "PeerLostError"
    words = {"exception": "BoomError", "exit 0": "left|closed|gone|hand out", "sockets cut": "cut"}
    return "PeerLostError", words.get(fault, "lost|left|closed"), blamed, "PeerLostError"


def _judge(cell, outcomes):
    problems, times = [], {}
    if cell["fault"] == "delay":
        return [f"rank {r}: {o}" for r, o in enumerate(outcomes) if o != ("went on", 40)], {}
    limit = LOST_HOST_LIMIT if cell["fault"] == "lost host" else LIMIT
    for rank, outcome in enumerate(outcomes):
        if rank == cell["victim"] and cell["fault"] != "lost host":
            continue
        if not isinstance(outcome, tuple) or outcome[0] != "raised":
            problems.append(f"rank {rank}: {outcome!r}")
            continue
        _, kind, blamed, said, seconds, sticky, ended = outcome
        wanted, text, culprits, next_kind = _expected(cell, rank)
        times[rank] = seconds
        if kind not in wanted.split("|"):
            problems.append(f"rank {rank} raised {kind}: {said}")
        if blamed not in culprits:
            problems.append(f"rank {rank} blames rank {blamed}: {said}")
        if not re.search(text, said):
            problems.append(f"rank {rank} does not say /{text}/: {said}")
        if seconds > limit:
            problems.append(f"rank {rank} took {seconds:.1f} s")
        if next_kind and sticky != next_kind:
            problems.append(f"rank {rank}: the next call gave {sticky}")
        if ended > LIMIT:
            problems.append(f"rank {rank}: destroy took {ended:.1f} s")
    return problems, times


def table(rows):
    """Return the times as a Markdown table: rows {(transport, fault): [seconds]}."""
    lines = ["| transport | fault | exceptions | median | slowest |", "|---|---|---|---|---|"]
    for (transport, fault), seconds in sorted(rows.items()):
        ordered = sorted(seconds)
        median, slowest = ordered[len(ordered) // 2] * 1e3, ordered[-1] * 1e3
        name = f"{fault}, deadline {FROZEN_TIMEOUT:g} s" if fault == "SIGSTOP" else fault
        lines.append(f"| {transport} | {name} | {len(ordered)} | {median:.0f} ms | {slowest:.0f} ms |")
    return "\n".join(lines)
