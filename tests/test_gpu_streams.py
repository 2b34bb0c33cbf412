"""Streams of arrays that tell of them by __cuda_array_interface__ version 3, as numba's do; and what a signal
handler may do in a launch. On the fake driver and NCCL.
"""

import ctypes
import signal
import time
from datetime import timedelta

import cdist
import fake_gpu
import numpy as np
import pytest
from cdist.testing import run
from test_gpu_fake import fakes, outcome  # noqa: F401

COUNT = 30_000  # more than the fake's mailbox holds: a send waits for its receiver


class Streams(fake_gpu.Module):
    """The fake driver's streams and copies."""

    def __init__(self, device):
        super().__init__(device)
        self.cuda.cuCtxPushCurrent_v2(self.context)

    def make(self):
        stream = ctypes.c_void_p()
        assert self.cuda.cuStreamCreateWithPriority(ctypes.byref(stream), 1, 0) == 0
        return stream.value

    def copy(self, to, source, stream):
        addresses = [ctypes.c_uint64(a.memory.ctypes.data) for a in (to, source)]
        bytes_ = ctypes.c_size_t(to.memory.nbytes)
        assert self.cuda.cuMemcpyAsync(*addresses, bytes_, ctypes.c_void_p(stream)) == 0

    def hold(self, stream):
        self.cuda.fake_stream_hold(ctypes.c_void_p(stream))

    def let_go(self, stream):
        self.cuda.fake_streams_let_go()
        self.cuda.fake_stream_drain(ctypes.c_void_p(stream))


class Numba:
    """What numba's device arrays say: no device, no dtype, but the stream they were made in."""

    def __init__(self, memory, stream):
        self.__cuda_array_interface__ = {
            "shape": memory.shape,
            "typestr": memory.dtype.str,
            "data": (memory.ctypes.data, False),
            "strides": None,
            "stream": stream,
            "version": 3,
        }


def at_once(array):
    cdist.all_reduce(array)


def waited_for(array):
    assert cdist.all_reduce(array, async_op=True).wait()


def synchronized(array):
    cdist.all_reduce(array, async_op=True).synchronize()


def by_future(array):
    cdist.all_reduce(array, async_op=True).get_future().wait()


@pytest.mark.parametrize("call", [at_once, waited_for, synchronized, by_future])
@pytest.mark.parametrize("told", ["its own", 1, 2, None])
def test_the_stream_of_the_interface_is_respected_both_ways(fakes, told, call):  # noqa: F811
    """What is queued comes before, what is queued later behind; the host waits for neither."""

    def body(rank, world):
        xp = Streams(rank)
        stream = xp.make() if told == "its own" else None
        x, given, after = (xp.put(np.full(COUNT, value)) for value in (0.0, rank + 1.0, -1.0))
        array = Numba(x.memory, stream or told)
        cdist.all_reduce(array)  # connected
        xp.hold(stream)
        xp.copy(x, given, stream)
        call(array)
        xp.copy(after, x, stream)
        early = set(after.memory)
        xp.let_go(stream)
        return early, set(after.memory)

    assert run(body, 2, environ=fakes, check_leftovers=False) == [({-1.0}, {3.0})] * 2


def test_the_stream_0_of_an_interface_is_refused_on_its_rank_alone(fakes):  # noqa: F811
    def body(rank, world):
        xp = Streams(rank)
        x = xp.put(np.ones(3))
        calls = [at_once, waited_for] if rank == 0 else []
        refused = [outcome(lambda call=call: call(Numba(x.memory, 0))) for call in calls]
        cdist.all_reduce(Numba(x.memory, None))
        return refused, xp.get(x).tolist()

    (refused, value), (_, other) = run(body, 2, environ=fakes, check_leftovers=False)
    assert value == other == [2.0] * 3
    for kind, text in refused:
        assert kind is ValueError
        assert "parameter `tensor`" in text
        assert "1 is the legacy default stream, 2 that of the thread" in text


@pytest.mark.parametrize("call", ["gather", "isend"])
def test_what_was_given_is_not_overwritten_before_it_is_sent(fakes, call):  # noqa: F811
    """A rank that gets nothing back waits all the same, in its array's stream."""

    def body(rank, world):
        xp = Streams(rank)
        store = cdist.group.WORLD.get_group_store()
        x = xp.put(np.full(COUNT, rank + 1.0))
        cdist.all_reduce(xp.put(np.ones(3)))  # the communicator is there
        if rank == 0:
            out = xp.put(np.zeros(COUNT))
            lists = [xp.put(np.zeros(COUNT)), out]
            store.wait(["queued"], timedelta(seconds=20))
            if call == "gather":
                cdist.gather(x, lists, dst=0)
            else:
                cdist.recv(out, 1)
            return set(xp.get(out))
        stream = xp.make()
        array = Numba(x.memory, stream)
        work = cdist.gather(array, dst=0, async_op=True) if call == "gather" else cdist.isend(array, 0)
        work.wait()
        xp.copy(x, xp.put(np.zeros(COUNT)), stream)
        patience = time.monotonic() + 0.3
        while x.memory[-1] and time.monotonic() < patience:
            time.sleep(0.01)
        store.set("queued", "")
        xp.let_go(stream)
        return None

    assert run(body, 2, environ=fakes, check_leftovers=False)[0] == {2.0}


@pytest.mark.parametrize("inner", [False, True], ids=["sync in", "async in"])
@pytest.mark.parametrize("outer", [False, True], ids=["sync", "async"])
def test_a_signal_handler_in_a_launch_that_waits_is_refused_its_collective(fakes, outer, inner):  # noqa: F811
    """And the launch goes on: rank 1 comes to it when the handler has run."""

    def body(rank, world):
        xp = Streams(rank)
        store = cdist.group.WORLD.get_group_store()
        x, y = xp.put(np.full(3, rank + 1.0)), xp.put(np.full(3, rank + 1.0))
        cdist.all_reduce(x)
        refused = []

        def handler(*unused):
            refused.append(outcome(lambda: cdist.all_reduce(y, async_op=inner)))
            store.set("handled", "")

        if rank == 0:
            signal.signal(signal.SIGALRM, handler)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
        else:
            store.wait(["handled"], timedelta(seconds=20))
        work = cdist.broadcast(x, 1, async_op=outer)  # connects: waits inside NCCL for the other
        if outer:
            work.wait()
        cdist.all_reduce(y)
        return refused, xp.get(x).tolist(), xp.get(y).tolist()

    outcomes = run(body, 2, environ=fakes, check_leftovers=False)
    assert [o[1:] for o in outcomes] == [([3.0] * 3, [3.0] * 3)] * 2
    ((kind, text),) = outcomes[0][0]
    assert kind is cdist.DistError
    assert "rank 0 in all_reduce: this thread is still in broadcast 3 of the same group" in text
    assert "a signal handler, __del__ or callback" in text
