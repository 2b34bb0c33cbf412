"""The classes of cdist.errors, and the mapping from C status codes to them."""

import copy
import datetime
import os
import pickle
import signal
import threading
import time

import pytest
from cdist import _core, errors

CLASSES = [getattr(errors, name) for name in errors.__all__]

BASES = {
    "DistError": (RuntimeError,),
    "DistBackendError": (errors.DistError,),
    "DistNetworkError": (errors.DistError,),
    "DistStoreError": (errors.DistError,),
    "DistTimeoutError": (errors.DistError, TimeoutError),
    "DistStoreTimeoutError": (errors.DistStoreError, errors.DistTimeoutError),
    "PeerLostError": (errors.DistBackendError,),
    "MismatchError": (errors.DistBackendError,),
    "AbortedError": (errors.DistBackendError,),
    "RefusedError": (errors.DistNetworkError,),
    "QueueEmptyError": (errors.DistStoreError,),
}

# csrc/base/status.h
CODES = {
    1: ValueError, 2: TypeError, 3: TypeError, 4: MemoryError, 5: errors.QueueEmptyError,
    6: errors.DistTimeoutError, 7: errors.DistStoreTimeoutError, 8: errors.DistStoreError,
    10: errors.DistError,
    32: errors.DistTimeoutError, 33: errors.PeerLostError, 34: errors.AbortedError, 35: errors.MismatchError,
    36: errors.DistNetworkError, 37: errors.DistBackendError, 64: errors.RefusedError,
    65: errors.DistNetworkError, 66: errors.DistNetworkError,
}  # fmt: skip


def test_every_class_has_its_bases():
    assert {cls.__name__: cls.__bases__ for cls in CLASSES} == BASES


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("again", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy])
def test_fields_survive_pickle_and_copy(cls, again):
    error = cls("rank 3 is gone", rank=3, operation="all_reduce")
    error.add_note("seen by rank 1")
    twin = again(error)
    assert type(twin) is cls
    assert (twin.args, str(twin)) == (("rank 3 is gone",), "rank 3 is gone")
    assert (twin.rank, twin.operation, twin.__notes__) == (3, "all_reduce", ["seen by rank 1"])


@pytest.mark.parametrize(("code", "cls"), CODES.items())
def test_status_codes_raise_their_class(code, cls):
    with pytest.raises(cls) as caught:
        _core._raise(code, "what happened", 2, "broadcast")
    assert type(caught.value) is cls
    remedy = " (free some first, or raise the limit of this process: ulimit -v, the container's)"
    said = {4: f"broadcast: what happened{remedy}", 8: "broadcast: what happened"}
    assert str(caught.value) == said.get(code, "what happened")
    if issubclass(cls, errors.DistError):
        assert (caught.value.rank, caught.value.operation) == (2, "broadcast")


def test_a_call_is_named_once():
    with pytest.raises(MemoryError, match=r"^no memory to queue broadcast \(free"):
        _core._raise(4, "no memory to queue broadcast", -1, "broadcast")


def test_a_limit_that_is_named_is_the_remedy():
    with pytest.raises(MemoryError) as caught:
        _core._raise(4, "Too many open files; this process may open 24 files: ulimit -n raises it", -1, "x")
    assert str(caught.value).endswith("ulimit -n raises it")


def test_no_rank_is_none():
    with pytest.raises(errors.DistError) as caught:
        _core._raise(33, "x")
    assert caught.value.rank is None
    assert caught.value.operation is None


@pytest.mark.parametrize("timeout", [0, 0.0, 0.05, datetime.timedelta(milliseconds=50)])
def test_waits_end_at_their_timeout(timeout):
    with pytest.raises(errors.DistTimeoutError):
        _core._wait(timeout)


@pytest.mark.parametrize("timeout", [-1, -0.5, float("nan"), datetime.timedelta(seconds=-1)])
def test_negative_timeouts_are_refused(timeout):
    with pytest.raises(ValueError, match="timeout"):
        _core._wait(timeout)


def test_timeouts_of_other_types_are_refused():
    with pytest.raises(TypeError, match="timeout must be a timedelta or a number of seconds, not str"):
        _core._wait("1")


def test_signal_handlers_run_while_waiting_in_the_main_thread():
    class HandlerError(Exception):
        pass

    def raise_it(number, frame):
        raise HandlerError

    before = signal.signal(signal.SIGUSR1, raise_it)
    try:
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))
        timer.start()
        with pytest.raises(HandlerError):
            _core._wait(60)
        timer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_other_threads_run_while_one_waits():
    ticks = []

    def wait():
        with pytest.raises(errors.DistTimeoutError):
            _core._wait(1)
        ticks.append("waited")

    waiter = threading.Thread(target=wait)
    waiter.start()
    while waiter.is_alive():
        ticks.append("tick")
        time.sleep(0.01)
    assert ticks.count("tick") > 5
    assert "waited" in ticks
