"""Collectives that go wrong or come late: bad arguments, calls that differ between ranks, timeouts, Work."""

import time

import cdist
import numpy as np
import pytest
from cdist import ReduceOp, errors
from cdist.testing import run
from collective_cases import TRANSPORTS

pairs = pytest.mark.parametrize("transport", TRANSPORTS)


# ---------------------------------------------------------------------------------------------- bad arguments


def _raises(kind, match, function, *args, **kwargs):
    with pytest.raises(kind, match=match):
        function(*args, **kwargs)


def _bad(rank, world):
    x = np.ones(4)
    frozen = np.ones(4)
    frozen.flags.writeable = False
    other = 1 - rank
    parts = [np.ones(4), np.ones(4)]
    _raises(TypeError, "Expected parameter `tensor` of type", cdist.all_reduce, [1.0])
    _raises(TypeError, "numpy.array", cdist.all_reduce, np.float64(3))
    _raises(ValueError, "read-only", cdist.all_reduce, frozen)
    _raises(TypeError, "op must be a ReduceOp", cdist.all_reduce, x, "sum")
    _raises(ValueError, "op must be one of", cdist.all_reduce, x, 99)
    _raises(TypeError, "non-integral dtype", cdist.all_reduce, x, ReduceOp.BAND)
    _raises(
        TypeError,
        "all_reduce does not support ReduceOp.MAX on complex",
        cdist.all_reduce,
        x + 0j,
        ReduceOp.MAX,
    )
    _raises(TypeError, "moved but not reduced: reduce a copy in numbers", cdist.all_reduce, x.astype(">f8"))
    _raises(TypeError, "can be moved but not reduced", cdist.all_reduce, x.astype("M8[s]"))
    _raises(ValueError, "timeout", cdist.all_reduce, x, timeout=-1)
    _raises(TypeError, "timeout", cdist.all_reduce, x, timeout="1")
    _raises(TypeError, "group must be a ProcessGroup", cdist.all_reduce, x, group="g")
    _raises(TypeError, "unexpected keyword argument 'grup'", cdist.all_reduce, x, grup=None)
    _raises(TypeError, "multiple values", cdist.all_reduce, x, tensor=x)
    _raises(TypeError, "missing required argument: 'tensor'", cdist.all_reduce)
    _raises(TypeError, "at most 5 arguments", cdist.all_reduce, x, 0, None, False, None, 6)
    _raises(ValueError, "invalid root rank: 5", cdist.broadcast, x, 5)
    _raises(ValueError, "invalid root rank: -1", cdist.broadcast, x, -1)
    _raises(ValueError, "Must specify global_rank or group_rank", cdist.broadcast, x)
    _raises(ValueError, "Can't specify both group_rank and global_rank", cdist.broadcast, x, 0, group_src=0)
    _raises(TypeError, "must be an integer", cdist.broadcast, x, 0.5)
    _raises(ValueError, "tensor_list` has 0 arrays", cdist.all_gather, [], x)
    _raises(ValueError, "tensor_list` has 1 arrays", cdist.all_gather, [x], x)
    _raises(TypeError, "List", cdist.all_gather, x, x)
    _raises(ValueError, "the entry of this rank", cdist.all_gather, [np.ones(3), np.ones(3)], x)
    _raises(
        ValueError, "Invalid usage of tensors with different dtypes", cdist.all_gather, parts, x.astype("f4")
    )
    _raises(ValueError, "share memory", cdist.all_gather, [parts[0], parts[0]], x)
    _raises(ValueError, "must be equal to world_size times", cdist.all_gather_into_tensor, np.ones(7), x)
    _raises(ValueError, "output size times world size", cdist.reduce_scatter_tensor, np.ones(3), np.ones(7))
    _raises(ValueError, "different dtypes", cdist.reduce_scatter_tensor, np.ones(3, "f4"), np.ones(6))
    _raises(ValueError, "gather_list`` must be specified on destination rank", cdist.gather, x, None, rank)
    _raises(
        ValueError,
        "gather_list`` must NOT be specified on non-destination ranks",
        cdist.gather,
        x,
        parts,
        other,
    )
    _raises(ValueError, "scatter_list`` must be specified on source rank", cdist.scatter, x, None, rank)
    _raises(
        ValueError, "scatter_list`` must NOT be specified on non-source ranks", cdist.scatter, x, parts, other
    )
    _raises(
        ValueError, "Split sizes doesn't match total dim 0 size", cdist.all_to_all_single, x, x.copy(), [1, 1]
    )
    _raises(ValueError, "one entry for each", cdist.all_to_all_single, x, x.copy(), None, [4])
    _raises(ValueError, "negative", cdist.all_to_all_single, x, x.copy(), None, [5, -1])
    _raises(
        ValueError,
        "does not divide equally across group size",
        cdist.all_to_all_single,
        np.ones(3),
        np.ones(3),
    )
    _raises(ValueError, "share memory", cdist.all_to_all_single, x, x)
    _raises(ValueError, "to itself", cdist.all_to_all_single, np.ones(4), x,
            [1, 3] if rank == 0 else [3, 1], [3, 1] if rank == 0 else [1, 3])  # fmt: skip
    _raises(ValueError, "destination rank should not be the same as the rank", cdist.send, x, rank)
    _raises(ValueError, "source rank should not be the same as the rank", cdist.recv, x, rank)
    _raises(ValueError, "read-only", cdist.recv, frozen, other)
    cdist.all_reduce(x)  # nothing was sent by any of them
    return x.tolist()


def test_wrong_calls_raise_before_anything_is_sent():
    """K56."""
    assert run(_bad, 2) == [[2.0] * 4] * 2


def test_without_a_group():
    for call in (
        lambda: cdist.all_reduce(np.ones(1)),
        cdist.barrier,
        cdist.get_rank,
        cdist.monitored_barrier,
    ):
        with pytest.raises(
            ValueError, match="Default process group has not been initialized, please make sure to call"
        ):
            call()


MISMATCHES = {
    "count": lambda r: cdist.all_reduce(np.ones(100 + 100 * r)),
    "count, large": lambda r: cdist.all_reduce(np.ones(409600 - 2 * r)),
    "1 or 2 elements": lambda r: cdist.all_reduce(np.ones(1 + r)),
    "shape": lambda r: cdist.all_reduce(np.ones((2, 3) if r else (3, 2))),
    "dtype": lambda r: cdist.all_reduce(np.ones(8, "f4") if r else np.ones(8, "f8")),
    "dtype of equal size": lambda r: cdist.all_reduce(np.ones(8, "f4") if r else np.ones(8, "i4")),
    "bytes": lambda r: cdist.all_reduce(np.ones(4, "f4") if r else np.ones(8, "f2")),
    "unit": lambda r: cdist.broadcast(np.ones(8, "m8[ms]" if r else "m8[s]"), 0),
    "byte order": lambda r: cdist.broadcast(np.ones(8, ">f4" if r else "S4"), 0),
    "record": lambda r: cdist.broadcast(np.zeros(8, "i4,f4" if r else "f4,i4"), 0),
    "reduction": lambda r: cdist.all_reduce(np.ones(8), ReduceOp.MAX if r else ReduceOp.MIN),
    "factor": lambda r: cdist.all_reduce(np.ones(8), cdist._make_nccl_premul_sum(0.5 + r)),
    "root": lambda r: cdist.broadcast(np.ones(8), r),
    "operation": lambda r: cdist.all_reduce(np.ones(8)) if r else cdist.barrier(),
    "rooted operation": lambda r: cdist.all_reduce(np.ones(8)) if r else cdist.broadcast(np.ones(8), 0),
    "large and small": lambda r: cdist.all_reduce(np.ones(1_000_000 if r else 1)),
    "all_gather": lambda r: cdist.all_gather(
        [np.ones((3, 4) if r == 0 else ()) for _ in range(2)], np.ones((3, 4) if r == 0 else ())
    ),
}


def _mismatch(rank, world, name):
    start = time.monotonic()
    texts = []
    for _ in range(2):
        try:
            MISMATCHES[name](rank)
        except errors.MismatchError as error:
            texts.append(str(error))
    assert time.monotonic() - start < 5
    with pytest.raises(errors.MismatchError):  # the group is done for, with the same cause
        cdist.barrier()
    return texts


@pytest.mark.parametrize("name", MISMATCHES)
@pairs
def test_differing_calls_raise_on_all_ranks(name, transport):
    """K01, K02, K29."""
    outcomes = run(_mismatch, 2, name, transport=transport, group_timeout=20)
    for texts in outcomes:
        assert len(texts) == 2
        assert "rank 0" in texts[0]
        assert "rank 1" in texts[0]
        # The cause stays the same; where each call stands in the program is added behind it.
        assert texts[0].split("; rank ")[0] == texts[1].split("; rank ")[0]


def _splits(rank, world):
    x, out = np.zeros((world + (rank == 0), 3)), np.full((world, 3), -1.0)
    splits = [1, 2 if rank == 0 else 1, 1]
    return out, lambda: cdist.all_to_all_single(out, x, [1] * world, splits)


def _gathered(rank, world):
    outs = [np.full(3, -1.0) for _ in range(world)]
    return outs[2], lambda: cdist.gather(np.zeros(3 + (rank == 1)), outs if rank == 0 else None)


def _scattered(rank, world):
    out = np.full(3 + (rank == 1), -1.0)
    return out, lambda: cdist.scatter(out, [np.zeros(3)] * world if rank == 0 else None)


def _reduced(count):
    def prepare(rank, world):
        counts = [count, count + (rank != 1), count + (rank == 2)]  # who is right is not known
        out = np.full(counts[rank], -1.0)
        return out, lambda: cdist.reduce_scatter(out, [np.zeros(n) for n in counts])

    return prepare


BLOCKS = {
    "splits": _splits,
    "gather": _gathered,
    "scatter": _scattered,
    "reduce_scatter": _reduced(5),
    "large reduce_scatter": _reduced(5000),
}


@pytest.mark.parametrize("name", BLOCKS)
@pairs
def test_blocks_of_other_sizes_raise_on_all_ranks(name, transport):
    """K01, K62: only two ranks can see it, the third raises in this call too; nothing is written."""

    def body(rank, world):
        out, call = BLOCKS[name](rank, world)
        with pytest.raises(errors.MismatchError, match="differs") as caught:
            call()
        assert (out == -1).all()
        return str(caught.value).split("; rank ")[0]

    texts = run(body, 3, transport=transport, group_timeout=20)
    assert all(text.count("rank ") >= 2 for text in texts)


def test_mismatch_text_shows_both_sides():
    """K04."""

    def body(rank, world):
        with pytest.raises(errors.MismatchError) as caught:
            cdist.all_reduce(np.ones(3, "f8" if rank == 2 else "f4"))
        return str(caught.value)

    for text in run(body, 3):
        assert "float32" in text
        assert "float64" in text
        assert "rank 2" in text


# --------------------------------------------------------------------------------------------- time and waits


def _late(rank, world):
    if rank:
        time.sleep(1.5)
        with pytest.raises((errors.DistTimeoutError, errors.DistBackendError)):
            cdist.barrier()
        return "late"
    start = time.monotonic()
    with pytest.raises(errors.DistTimeoutError, match="rank 1") as caught:
        cdist.all_reduce(np.ones(3), timeout=0.4)
    assert 0.35 < time.monotonic() - start < 30  # the group has 60 s
    assert caught.value.operation == "all_reduce"
    assert isinstance(caught.value, TimeoutError)
    return "on time"


@pairs
def test_timeout_of_one_call(transport):
    """K83, for the first of the calls; tests/faults/test_deadlines.py has all."""
    assert run(_late, 2, transport=transport, group_timeout=60) == ["on time", "late"]


def _patient(rank, world):
    cdist.set_timeout(0.3)
    if rank:
        time.sleep(0.8)
    cdist.barrier(timeout=10)
    cdist.group.WORLD.set_timeout(30)
    cdist.barrier()
    return "ok"


def test_timeout_argument_goes_before_the_default():
    assert run(_patient, 2) == ["ok"] * 2


def _works(rank, world):
    x = np.full(1000, float(rank + 1))
    work = cdist.all_reduce(x, async_op=True)
    assert isinstance(work, cdist.Work)
    assert work.wait() is True
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    result = work.result()
    assert result[0] is x
    assert x[0] == 3
    assert work.get_future().value()[0] is x
    assert work._get_op_type() == "all_reduce"
    assert work._get_sequence_number() > 0
    assert work._get_duration() >= 0
    work.synchronize()

    many = [np.full(100 * i + 1, float(i + rank)) for i in range(30)]
    works = [cdist.all_reduce(y, async_op=True) for y in many]
    seen = []
    works[-1].get_future().then(lambda future: seen.append(future.value()[0] is many[-1]))
    for w in works:
        w.wait()
    assert all((y == 2 * i + 1).all() for i, y in enumerate(many))
    cdist.barrier()
    end = time.monotonic() + 5
    while not seen and time.monotonic() < end:
        time.sleep(0.001)
    assert seen == [True]

    outs = [np.zeros(5), np.zeros(5)]
    work = cdist.all_gather(outs, np.full(5, float(rank)), async_op=True)
    work.wait()
    assert all(a is b for a, b in zip(work.result(), outs, strict=True))

    if rank == 0:
        work = cdist.barrier(async_op=True)
        with pytest.raises(errors.DistTimeoutError, match="goes on"):
            work.wait(0.05)
        assert not work.is_completed()
        cdist.send(np.zeros(1), 1)
        work.wait()
    else:
        cdist.recv(np.zeros(1), 0)
        cdist.barrier()
    return "ok"


@pairs
def test_work(transport):
    """K101: what result() gives are the arrays of the call."""
    assert run(_works, 2, transport=transport) == ["ok"] * 2


def _temporaries(rank, world):
    import gc

    works = [cdist.all_reduce(np.full(50_000, float(i)), async_op=True) for i in range(20)]
    gc.collect()
    garbage = [np.full(50_000, -1.0) for _ in range(20)]
    for i, work in enumerate(works):
        work.wait()
        assert (work.result()[0] == 2.0 * i).all()
    assert len(garbage) == 20
    for i in range(10):  # nobody holds the Work either
        cdist.all_reduce(np.full(50_000, float(i)), async_op=True)
    cdist.barrier()
    return "ok"


@pairs
def test_arrays_live_until_their_operation_is_complete(transport):
    """K26."""
    assert run(_temporaries, 2, transport=transport) == ["ok"] * 2


def _monitored(rank, world):
    for _ in range(20):
        cdist.monitored_barrier(wait_all_ranks=True)
    if rank in (1, 3):
        time.sleep(1.5)
    with pytest.raises(RuntimeError) as caught:
        cdist.monitored_barrier(timeout=0.5, wait_all_ranks=True)
    return str(caught.value)


def test_monitored_barrier_names_all_that_are_missing():
    texts = run(_monitored, 4)
    assert "Ranks 1, 3 failed to pass monitoredBarrier in" in texts[0]
    assert "Rank 2 successfully reached monitoredBarrier, but received errors" in texts[2]
