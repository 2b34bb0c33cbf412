"""What is large: worlds of many ranks, objects and arrays beyond 32-bit sizes."""

import json
import os
import signal
import threading

import cdist
import ml_dtypes
import numpy as np
import pytest
from cdist.testing import run, run_threads
from collective_cases import MOVING, REDUCING, TRANSPORTS, failures, reduced

pairs = pytest.mark.parametrize("transport", TRANSPORTS)


def _all_kinds(rank, size):
    cases = [
        {"kind": kind, "name": name, "shape": (n,)}
        for kind in REDUCING + MOVING
        for name, n in [("float32", 1), ("int64", 13), ("float32", 3001)]
    ]
    wrong = failures(cases, rank, size)
    out = np.zeros(size, np.int64)
    cdist.all_gather_into_tensor(out, np.array([rank]))
    return wrong, (out == np.arange(size)).all()


@pytest.mark.parametrize(("size", "transport"), [(17, "shm"), (17, "tcp"), (32, "shm")])
def test_worlds_of_many_processes(size, transport):
    """K50."""
    assert run(_all_kinds, size, transport=transport, timeout=110) == [([], True)] * size


def test_a_sum_of_64_ranks_is_rounded_once():
    """K64: bfloat16 is accumulated in float32, also by 64 ranks."""

    def body(group):
        x = np.full(5, 1 + 2**-7, ml_dtypes.bfloat16)
        cdist.all_reduce(x, group=group)
        return x

    want = reduced("SUM", [np.full(5, 1 + 2**-7, ml_dtypes.bfloat16)] * 64)
    assert want[0] == np.float32(64 * (1 + 2**-7)).astype(ml_dtypes.bfloat16)
    assert all((x == want).all() for x in run_threads(body, 64))


def _objects(rank, size, bytes_):
    sent = {"data": bytes(bytes_), "n": 3}
    if rank == 0:
        cdist.send_object_list([sent], 1)
        cdist.broadcast_object_list([sent])
    else:
        got = [None]
        cdist.recv_object_list(got, 0)
        assert got == [sent]
        got = [None]
        cdist.broadcast_object_list(got)
        assert got == [sent]
    return "ok"


@pairs
def test_objects_of_50_megabytes(transport):
    """K58: no size is told beforehand."""
    assert run(_objects, 2, 50_000_000, transport=transport) == ["ok"] * 2


@pytest.mark.slow
@pytest.mark.timeout(600)
@pairs
def test_objects_of_3_gigabytes(transport):
    """K58."""
    assert run(_objects, 2, 3 << 30, transport=transport, timeout=580, group_timeout=500) == ["ok"] * 2


ALWAYS = {"CDIST_SINGLE_COPY": "always", "CDIST_LOG": "plan"}


def _all_kinds_large(rank, size):
    cases = [
        {"kind": kind, "name": name, "shape": (count,)}
        for kind in REDUCING + MOVING
        for name, count in [("float32", 70_001), ("bfloat16", 300_000), ("int64", 40_000)]
    ]
    return failures(cases, rank, size)


@pytest.mark.parametrize("size", [2, 3])
def test_operations_that_read_in_the_memory_of_others(size):
    assert run(_all_kinds_large, size, environ=ALWAYS) == [[]] * size


def _dies_while_it_is_read(rank, size):
    x, y = np.ones(6_000_000), np.ones(12_000_000)
    if rank == 1:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    try:
        while True:
            cdist.all_reduce(x, cdist.ReduceOp.MAX)
            cdist.all_gather_into_tensor(y, x)
    except cdist.PeerLostError as error:
        return error.rank


def test_a_rank_that_dies_while_its_memory_is_read_is_named():
    outcomes = run(_dies_while_it_is_read, 2, environ=ALWAYS, allow_failures=True)
    assert outcomes[0] == 1


def _beyond_31_bits(rank, size):
    """Marks in the last 8 bytes of each half of 2**31 + 8, and of the whole."""
    x, out = np.zeros(2**31 + 8, np.uint8), np.zeros(2**31 + 8, np.uint8)
    half = len(x) // 2
    x[half - 8 : half] = 10 + rank
    x[-8:] = 20 + rank
    cdist.all_to_all_single(out, x)
    wanted = [10, 11] if rank == 0 else [20, 21]
    assert out[half - 8 : half].tolist() == [wanted[0]] * 8
    assert out[-8:].tolist() == [wanted[1]] * 8
    assert int(np.count_nonzero(out)) == 16
    cdist.all_reduce(x, cdist.ReduceOp.MAX)
    assert x[half - 8 : half].tolist() == [11] * 8
    assert x[-8:].tolist() == [21] * 8
    if rank == 0:
        cdist.send(x, 1)
    else:
        cdist.recv(out, 0)
        assert (out[-8:] == 21).all()
    return "ok"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pairs
def test_arrays_beyond_31_bits(transport):
    """K49."""
    assert run(_beyond_31_bits, 2, transport=transport, timeout=580, group_timeout=500) == ["ok"] * 2


def test_counts_in_the_recorder_are_wide(tmp_path):
    """K52: bytes of an operation on 3e9 elements (of which there is one in memory)."""

    def body(rank, size):
        cdist.broadcast(np.broadcast_to(np.zeros((), np.uint8), 3_000_000_000), 0)
        with open(cdist.dump(str(tmp_path / "dump.json"))) as file:
            return json.load(file)["operations"][0]["bytes"]

    assert run(body, 1) == [3_000_000_000]
