"""What becomes of arrays when a call is cut off: by Ctrl-C, at its deadline, by an abort from elsewhere.

Collectives behind others that are queued, and messages. Once a call has raised, nobody touches its arrays.
"""

import contextlib
import gc
import os
import signal
import socket
import threading
import time
from typing import ClassVar

import cdist
import numpy as np
import pytest
from cdist.testing import run
from collective_cases import TRANSPORTS
from threads import ctrl_c_soon, soon

transports = pytest.mark.parametrize("transport", TRANSPORTS)
COUNT = 1 << 18


# how: (context in which a call is cut off, timeout of the call, what it raises)
CUTS = {
    "ctrl-c": (lambda: ctrl_c_soon(0.3), 20, KeyboardInterrupt),
    "abort": (lambda: soon(cdist.group.WORLD.abort, "enough", seconds=0.3), 20, cdist.AbortedError),
    "deadline": (contextlib.nullcontext, 0.3, cdist.DistTimeoutError),
}


def _fresh():
    """Arrays that probably lie where those that were just freed have lain."""
    gc.collect()
    return [np.full(COUNT, 7.0) for _ in range(6)]


def _untouched(arrays):
    return all((x == 7).all() for x in arrays)


def _behind(rank, world, how):
    store = cdist.group.WORLD.get_group_store()
    if rank:
        store.get("cut off")
        try:
            cdist.all_reduce(np.full(COUNT, 2.0))
        except cdist.DistError as error:
            return type(error)
        return None
    # Nobody keeps this Work: its array goes with the worker, which needs the GIL for that.
    cdist.all_reduce(np.full(COUNT, 1.0), async_op=True)
    begin, timeout, expected = CUTS[how]
    x = np.full(COUNT, 1.0)
    with pytest.raises(expected) as caught, begin():
        cdist.all_reduce(x, timeout=timeout)
    if how == "deadline":
        assert caught.value.rank == 1
        assert "missing ranks: [1]" in str(caught.value)
    del x
    fresh = _fresh()
    store.set("cut off", "")
    with pytest.raises(cdist.DistError):
        cdist.barrier()
    return _untouched(fresh)


@transports
@pytest.mark.parametrize(
    ("how", "other"),
    [("ctrl-c", cdist.AbortedError), ("abort", cdist.AbortedError), ("deadline", cdist.DistTimeoutError)],
)
def test_a_collective_behind_the_queue_lets_go_of_its_array(transport, how, other):
    assert run(_behind, 2, how, transport=transport) == [True, other]


def _transfer(call, x, timeout):
    if call in ("send", "recv"):
        getattr(cdist, call)(x, 1, timeout=timeout)
    else:
        getattr(cdist, call)(x, 1).wait(timeout)


def _message(rank, world, how, call):
    store = cdist.group.WORLD.get_group_store()
    sends = call in ("send", "isend")
    if rank:
        store.get("cut off")
        x = np.full(COUNT, 3.0)
        if call == "send":  # this rank may have met the message before it was withdrawn
            with contextlib.suppress(cdist.AbortedError):
                cdist.recv(x, 0, timeout=20)
            cdist.recv(x, 0, timeout=20)
        for _ in range(2 if call != "send" else 0):
            (cdist.recv if sends else cdist.send)(x, 0, timeout=20)
        cdist.send(x, 0, tag=1)
        return bool((x == (5 if sends else 3)).all())
    begin, timeout, expected = CUTS[how]
    x = np.full(COUNT, 5.0)
    with pytest.raises(expected), begin():
        _transfer(call, x, timeout)
    del x
    fresh = _fresh()
    store.set("cut off", "")
    x = np.full(COUNT, 5.0)
    works = []
    for _ in range(1 if call in ("isend", "irecv") else 2):  # those go on after their wait was cut off
        works.append((cdist.isend if sends else cdist.irecv)(x, 1))
    cdist.recv(np.empty(COUNT), 1, tag=1)
    if not sends:
        for work in works:
            work.wait()
    return _untouched(fresh) and bool((x == (5 if sends else 3)).all())


@transports
@pytest.mark.parametrize("call", ["send", "recv", "isend", "irecv"])
@pytest.mark.parametrize("how", ["ctrl-c", "deadline"])
def test_a_message_that_is_cut_off_is_withdrawn_or_keeps_its_array(transport, how, call):
    assert run(_message, 2, how, call, transport=transport) == [True, True]


def _shut_connections():
    """As if the network between this process and all others failed, without a call that would notice."""
    for name in os.listdir("/proc/self/fd"):
        try:
            is_socket = os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
            end = socket.socket(fileno=os.dup(int(name))) if is_socket else None
        except OSError:
            continue
        if end is not None and end.family == socket.AF_INET:
            try:
                end.getpeername()
                end.shutdown(socket.SHUT_RDWR)
            except OSError:  # listens
                pass
        if end is not None:
            end.close()


def _fails_in_the_background(rank, world):
    store = cdist.group.WORLD.get_group_store()
    cdist.barrier()
    if rank:
        store.get("shut")
        return None
    works = [cdist.irecv(np.zeros(COUNT), 1), cdist.all_reduce(np.zeros(COUNT), async_op=True)]
    time.sleep(0.1)
    assert [work.is_completed() for work in works] == [False, False]
    store.set("shut", "")
    _shut_connections()
    end = time.monotonic() + 20
    while not all(work.is_completed() for work in works) and time.monotonic() < end:
        time.sleep(0.01)
    for work in works:
        assert isinstance(work.exception(), cdist.PeerLostError)
        for _ in range(2):
            # Rank 1, or itself: the end of the control connection that it cut may be known first.
            with pytest.raises(cdist.PeerLostError, match="rank [01]"):
                work.wait()
    return "raised"


def test_a_failure_in_a_background_thread_is_raised_by_wait():
    """K25: connections fail while only the worker and the mesh's helper look at them."""
    outcomes = run(_fails_in_the_background, 2, transport="tcp", allow_failures=True, check_leftovers=False)
    assert outcomes[0] == "raised"


def _records_of(group):
    return [
        (op["operation"], op["state"])
        for op in cdist._core._records(group, cdist.get_rank(), 4)["operations"]
    ]


def _signal_when_inside(group, operation):
    while (operation, "running") not in _records_of(group):
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGUSR1)


def _handle(rank, world):
    """Rank 0 makes calls in a handler that runs while it waits in all_reduce; rank 1 comes afterwards."""
    group, other = cdist.group.WORLD, cdist.new_group([0, 1])
    store = group.get_group_store()
    said = []

    def refused(call, *given, **kw):
        with pytest.raises(cdist.DistError) as caught:
            call(*given, **kw)
        assert type(caught.value) is cdist.DistError
        said.append(str(caught.value))

    def handler(number, frame):
        refused(cdist.barrier)
        refused(cdist.all_gather_object, [None] * 2, rank)
        works.append(cdist.all_reduce(x, async_op=True))
        refused(works[0].wait)
        store.set("in other", "")
        cdist.all_reduce(y, group=other)
        store.set("handled", "")

    works, x, y = [], np.full(3, rank + 1.0), np.full(3, rank + 1.0)
    if rank == 0:
        signal.signal(signal.SIGUSR1, handler)
        threading.Thread(target=_signal_when_inside, args=(group, "all_reduce")).start()
    else:
        store.get("in other")
        cdist.all_reduce(y, group=other)
        store.get("handled")
    outer = np.full(3, rank + 1.0)
    cdist.all_reduce(outer)
    if rank:
        cdist.all_reduce(x)
    for work in works:
        work.wait()
    return said, outer[0], x[0], y[0]


@transports
def test_calls_that_would_wait_for_themselves_are_refused(transport):
    (said, *first), (_, *second) = run(_handle, 2, transport=transport)
    assert first == second == [3, 3, 3]
    within = "this thread is still in all_reduce 1 of the same group, which would wait for itself"
    for operation, text in zip(["barrier", "all_gather", "all_reduce"], said, strict=True):
        assert text.startswith(f"rank 0 in {operation}: {within}"), text


class _Talkative(np.ndarray):
    said: ClassVar = []

    def __del__(self):
        if self.base is None:
            try:
                cdist.barrier()
            except Exception as error:
                self.said.append(f"{type(error).__name__}: {error}")


def _die_in_worker(rank, world):
    store = cdist.group.WORLD.get_group_store()
    if rank == 0:
        # Nobody keeps the Work: its array goes with the worker, behind which a further operation is queued.
        cdist.all_reduce(np.zeros(3).copy().view(_Talkative).copy(), async_op=True)
        last = cdist.all_reduce(np.zeros(3), async_op=True)
        store.set("queued", "")
        last.wait()
        while not _Talkative.said:
            time.sleep(0.001)
        return _Talkative.said
    store.get("queued")
    cdist.all_reduce(np.zeros(3))
    cdist.all_reduce(np.zeros(3))
    return None


def test_the_worker_does_not_wait_for_itself():
    (text,) = run(_die_in_worker, 2)[0]
    assert text.startswith("DistError: rank 0 in barrier: this thread runs the group's queued operations"), (
        text
    )
