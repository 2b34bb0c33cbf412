"""Every collective over dtype, layout, size, reduction, world size and transport: bits against NumPy in rank order."""

import inspect
import time
import warnings

import cdist
import ml_dtypes
import numpy as np
import pytest
from cdist import ReduceOp, errors
from cdist.testing import RankFailedError, run
from collective_cases import (
    MOVING,
    NUMBERS,
    OPS,
    OTHERS,
    REDUCING,
    TRANSPORTS,
    failures,
    legal,
    reduced,
    same,
)

WORLDS = [1, 2, 3, 4]

everywhere = pytest.mark.parametrize(("world", "transport"), [(w, t) for t in TRANSPORTS for w in WORLDS])
pairs = pytest.mark.parametrize("transport", TRANSPORTS)

# Around what is sent in one piece, and around 64 KiB, where the plan changes (csrc/coll/plan.c), for 4-byte elements.
COUNTS = [1, 2, 3, 11, 12, 13, 1000, 16383, 16384, 16385, 65535, 65537, 300_001]


def check(cases, world, transport, **options):
    outcomes = run(lambda rank, size: failures(cases, rank, size), world, transport=transport, **options)
    assert outcomes == [[]] * world


@everywhere
def test_reductions_of_all_dtypes(world, transport):
    check(
        [
            {"kind": kind, "name": name, "op": op, "shape": shape}
            for op in OPS
            for name in NUMBERS
            if legal(op, name)
            for kind, shape in [("all_reduce", (7, 5)), ("reduce", (3,)), ("reduce_scatter_tensor", (5, 2))]
        ],
        world,
        transport,
    )


@everywhere
def test_moves_of_all_dtypes(world, transport):
    check(
        [{"kind": kind, "name": name, "shape": (3, 4)} for kind in MOVING for name in NUMBERS + OTHERS],
        world,
        transport,
    )


@everywhere
def test_layouts(world, transport):
    check(
        [
            {"kind": kind, "name": name, "shape": shape, "layout": layout}
            for kind in REDUCING + MOVING
            for layout in ("contiguous", "strided", "transposed", "negative", "offset")
            for name, shape in [
                ("float32", (5, 7)),
                ("float16", (2, 3, 4)),
                ("complex128", (9,)),
                ("float32", (150, 130)),
            ]
        ],
        world,
        transport,
    )


@pytest.mark.parametrize(
    ("world", "transport", "async_op"),
    [(w, t, False) for t in TRANSPORTS for w in WORLDS] + [(w, t, True) for t in TRANSPORTS for w in (1, 3)],
)
def test_sizes(world, transport, async_op):
    options = {"async_op": True} if async_op else {}
    check(
        [
            {"kind": kind, "name": "float32", "shape": (count,), **(options if kind != "send" else {})}
            for kind in REDUCING + MOVING
            for count in COUNTS
        ],
        world,
        transport,
    )


@everywhere
def test_empty_and_0d_arrays(world, transport):
    check(
        [
            {"kind": kind, "name": name, "shape": shape}
            for kind in REDUCING + MOVING
            for name in ("float32", "int8")
            for shape in [(), (0,), (1, 0, 2), (0, 5), (1,)]
        ]
        + [{"kind": "all_reduce", "name": "float32", "shape": (5,)}],
        world,
        transport,
    )


def _large(rank, world):
    wrong = []
    for kind in (
        "all_reduce",
        "reduce_scatter_tensor",
        "all_gather_into_tensor",
        "broadcast",
        "all_to_all_single",
    ):
        wrong += failures([{"kind": kind, "name": "float32", "shape": (1_000_003,)}], rank, world)
    return wrong


@pytest.mark.parametrize(("world", "transport"), [(2, t) for t in TRANSPORTS] + [(3, "shm")])
def test_large_arrays(world, transport):
    assert run(_large, world, transport=transport) == [[]] * world


# ---------------------------------------------------------------------------------------------------- uneven, in place


def _uneven(rank, world):
    shapes = [(r, 3) if r % 2 else (r, 0) for r in range(world)]
    outs = [np.zeros(s, "i4") for s in shapes]
    cdist.all_gather(outs, np.full(shapes[rank], rank, "i4"))
    assert [o.tolist() for o in outs] == [np.full(s, r, "i4").tolist() for r, s in enumerate(shapes)]

    got = cdist.all_gather_v(np.full((2 * rank + 1, 3), rank, "f4"))
    assert [g.shape for g in got] == [(2 * r + 1, 3) for r in range(world)]
    assert all((g == r).all() for r, g in enumerate(got))

    outs = [np.zeros(r + 1) for r in range(world)] if rank == 0 else None
    cdist.gather(np.full(rank + 1, float(rank)), outs)
    if rank == 0:
        assert [o.tolist() for o in outs] == [[float(r)] * (r + 1) for r in range(world)]

    out = np.zeros(rank)
    cdist.scatter(out, [np.full(r, r + 0.5) for r in range(world)] if rank == 0 else None)
    assert (out == rank + 0.5).all()

    out = np.zeros(2 * rank)
    cdist.reduce_scatter(out, [np.full(2 * r, rank + 1.0) for r in range(world)])
    assert (out == sum(range(1, world + 1))).all()

    # rank r sends j + 1 rows to rank j
    rows = sum(range(1, world + 1))
    x = np.repeat(np.arange(world), np.arange(1, world + 1))[:, None] + np.array([[10.0 * rank, 0]])
    out = np.zeros(((rank + 1) * world, 2))
    cdist.all_to_all_single(out, x, [rank + 1] * world, [j + 1 for j in range(world)])
    assert rows == len(x)
    assert out[:, 0].tolist() == [rank + 10.0 * r for r in range(world) for _ in range(rank + 1)]

    outs = [np.zeros((r, 2)) for r in range(world)]
    cdist.all_to_all(outs, [np.full((rank, 2), 100.0 * rank + j) for j in range(world)])
    assert [o.tolist() for o in outs] == [np.full((r, 2), 100.0 * r + rank).tolist() for r in range(world)]
    return "ok"


@everywhere
def test_uneven_blocks(world, transport):
    assert run(_uneven, world, transport=transport) == ["ok"] * world


def _in_place(rank, world):
    whole = np.zeros((world, 1000))
    whole[rank] = rank + 1
    cdist.all_gather_into_tensor(whole, whole[rank])
    assert (whole == np.arange(1, world + 1)[:, None]).all()

    parts = [np.zeros(3) for _ in range(world)]
    parts[rank][:] = rank
    cdist.all_gather(parts, parts[rank])
    assert [p[0] for p in parts] == list(range(world))

    flat = np.arange(world * 500.0)
    cdist.reduce_scatter_tensor(flat[rank * 500 : (rank + 1) * 500], flat)
    assert (flat[rank * 500 : (rank + 1) * 500] == world * np.arange(rank * 500, (rank + 1) * 500)).all()

    concatenated = np.zeros((2 * world, 3))
    cdist.all_gather_into_tensor(concatenated, np.full((2, 3), float(rank)))
    assert concatenated[:, 0].tolist() == [float(r) for r in range(world) for _ in range(2)]
    return "ok"


@everywhere
def test_own_blocks_in_place(world, transport):
    assert run(_in_place, world, transport=transport) == ["ok"] * world


def _read_only_source(rank, world):
    x = np.arange(5.0)
    if rank == 0:
        x.flags.writeable = False
    cdist.broadcast(x, 0)
    cdist.reduce(np.broadcast_to(np.float64(2.0), 5) if rank else np.ones(5), 0)
    return x.tolist()


def test_inputs_may_be_read_only():
    assert run(_read_only_source, 2) == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 2


# ------------------------------------------------------------------------------------------------ reduction semantics


def _semantics(rank, world):
    # Sums of finite 16-bit numbers may overflow, their average may not.
    x = np.full(3, 40000, "f2")
    cdist.all_reduce(x, ReduceOp.AVG)
    assert x.tolist() == [40000.0] * 3
    cdist.all_reduce(x, ReduceOp.SUM)
    assert np.isinf(x).all()
    # AVG divides by the number of ranks, whatever the shape; integers truncate toward zero.
    for n in (1, 3, 5):
        x = np.full(n, -2 - rank, "i4")
        cdist.all_reduce(x, ReduceOp.AVG)
        assert x.tolist() == [-2] * n, x
    x = np.array([1 + 2j, 3 - 1j][rank], "c16")
    cdist.all_reduce(x, ReduceOp.PRODUCT)
    assert x == 5 + 5j
    for op in (ReduceOp.MIN, ReduceOp.MAX):
        x = np.array([np.nan if rank else 1.0, 2.0 + rank])
        cdist.all_reduce(x, op)
        assert np.isnan(x[0])
    x = np.array([2, 0], "u1").view(bool)  # any non-zero byte is true
    cdist.all_reduce(x)
    assert x.view("u1").tolist() == [1, 0]
    x = np.full(4, 3.0)
    cdist.all_reduce(x, cdist._make_nccl_premul_sum(0.25))
    assert x.tolist() == [1.5] * 4
    for name in ("SUM", "MAX"):  # numbers do for members
        x = np.full(2, rank + 1)
        cdist.all_reduce(x, int(getattr(ReduceOp, name)))
        assert x[0] == {"SUM": 3, "MAX": 2}[name]
    return "ok"


@pairs
def test_rules_of_reductions(transport):
    assert run(_semantics, 2, transport=transport) == ["ok"] * 2


def test_supports_agrees_with_the_calls():
    def body(rank, world):
        wrong = []
        for name in NUMBERS:
            x = np.ones(2, getattr(ml_dtypes, name, None) or name)
            for op in OPS:
                value = ReduceOp(ReduceOp.PREMUL_SUM, 1.0) if op == "PREMUL_SUM" else getattr(ReduceOp, op)
                try:
                    cdist.all_reduce(x.copy(), value)
                    works = True
                except TypeError:
                    works = False
                if not works == cdist.supports(value, x.dtype) == legal(op, name):
                    wrong.append((name, op, works))
        return wrong

    assert run(body, 1) == [[]]


def test_bfloat16_is_accumulated_in_float32():
    inputs = [np.full(3, 1 + 2**-7, ml_dtypes.bfloat16)] * 64
    want = reduced("SUM", inputs)
    assert want[0] == np.float32(64 * (1 + 2**-7)).astype(ml_dtypes.bfloat16)

    def body(rank, world):
        x = np.full(3, 1 + 2**-7, ml_dtypes.bfloat16)
        for _ in range(2):  # 4 ranks: 1 + 2^-7 four times, each sum exact in float32
            y = x.copy()
            cdist.all_reduce(y)
        return same(y, reduced("SUM", [x] * world))

    assert run(body, 4) == [True] * 4


# ------------------------------------------------------------------------------------------------------ bad arguments


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
    _raises(TypeError, "can be moved but not reduced", cdist.all_reduce, x.astype(">f8"))
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


# Between hosts a rank that only sends a short message does not hear from the others.
SEEN_ONLY_IN_SHARED_MEMORY = {"root", "rooted operation"}


@pytest.mark.parametrize(
    ("name", "transport"),
    [(n, t) for n in MISMATCHES for t in TRANSPORTS if t == "shm" or n not in SEEN_ONLY_IN_SHARED_MEMORY],
)
def test_differing_calls_raise_on_all_ranks(name, transport):
    outcomes = run(_mismatch, 2, name, transport=transport, group_timeout=20)
    for texts in outcomes:
        assert len(texts) == 2
        assert "rank 0" in texts[0]
        assert "rank 1" in texts[0]
        assert texts[0] == texts[1]


def test_mismatch_text_shows_both_sides():
    def body(rank, world):
        with pytest.raises(errors.MismatchError) as caught:
            cdist.all_reduce(np.ones(3, "f8" if rank == 2 else "f4"))
        return str(caught.value)

    for text in run(body, 3):
        assert "float32" in text
        assert "float64" in text
        assert "rank 2" in text


# ------------------------------------------------------------------------------------------------------ time and waits


def _late(rank, world):
    if rank:
        time.sleep(1.5)
        with pytest.raises((errors.DistTimeoutError, errors.DistBackendError)):
            cdist.barrier()
        return "late"
    start = time.monotonic()
    with pytest.raises(errors.DistTimeoutError, match="rank 1") as caught:
        cdist.all_reduce(np.ones(3), timeout=0.4)
    waited = time.monotonic() - start
    assert 0.3 < waited < 1.2, waited
    assert caught.value.operation == "all_reduce"
    assert isinstance(caught.value, TimeoutError)
    return "on time"


@pairs
def test_timeout_of_one_call(transport):
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


# ------------------------------------------------------------------------------------------------------------- torch


def _torch(rank, world):
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.complex64):
        t = torch.full((4, 3), rank + 1).to(dtype)
        cdist.all_reduce(t.t())
        assert (t == 3).all()
    leaf = torch.full((3,), rank + 1.0, requires_grad=True)
    cdist.all_reduce(leaf)
    assert leaf.tolist() == [3.0] * 3
    outs = [torch.zeros(2, 2) for _ in range(world)]
    work = cdist.all_gather(outs, torch.full((2, 2), float(rank)), async_op=True)
    future = work.get_future()
    assert isinstance(future, torch.futures.Future)
    assert future.wait()[1] is outs[1]
    assert outs[1].eq(1).all()
    x = torch.arange(6.0).reshape(2, 3)[:, ::2] + rank
    y = np.zeros((2, 2), "f4")
    if rank == 0:
        cdist.send(x, 1)
    else:
        cdist.recv(y, 0)  # torch on one side, NumPy on the other
        assert y.tolist() == [[0, 2], [3, 5]]
    got = cdist.all_gather_v(torch.ones(rank + 1))
    assert [tuple(t.shape) for t in got] == [(1,), (2,)]
    return "ok"


@pairs
def test_torch_tensors(transport):
    assert run(_torch, 2, transport=transport) == ["ok"] * 2


# ------------------------------------------------------------------------------------------------------------- others


def _outsider(rank, world):
    group = cdist.new_group([0])
    if rank == 0:
        cdist.all_reduce(np.ones(2), group=group)
        return None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert cdist.all_reduce(np.ones(2), group=group) is None
        assert cdist.recv(np.ones(2), 0, group=group) == -1
        assert cdist.isend(np.ones(2), 0, group=group) is None
        assert cdist.monitored_barrier(group) is None
    return [str(w.message) for w in caught]


def test_non_members_are_warned():
    texts = run(_outsider, 2)[1]
    assert len(texts) == 4
    assert texts[0] == "Running all_reduce on global rank 1 which does not belong to the given group."


def _coalesced(rank, world):
    xs = [np.full(i + 1, float(rank)) for i in range(3)]
    cdist.all_reduce_coalesced(xs)
    assert [x[0] for x in xs] == [1.0] * 3
    future = cdist.all_reduce_coalesced(xs, async_op=True)
    assert [x[0] for x in future.wait(10)] == [2.0] * 3
    outs = [[np.zeros(1), np.zeros(2)] for _ in range(world)]
    cdist.all_gather_coalesced(outs, [np.full(1, float(rank)), np.full(2, 10.0 * rank)])
    assert [[o.tolist() for o in of] for of in outs] == [[[0.0], [0.0, 0.0]], [[1.0], [10.0, 10.0]]]
    with cdist._coalescing_manager() as manager:
        for x in xs:
            manager.append(cdist.all_reduce(x, async_op=True))
    assert [x[0] for x in xs] == [4.0] * 3
    return "ok"


def test_coalesced():
    assert run(_coalesced, 2) == ["ok"] * 2


def _arena(rank, world):
    x = cdist.empty((1000, 300), "f4")
    x[...] = rank + 1
    cdist.all_reduce(x)
    assert (x == sum(range(1, world + 1))).all()
    small = cdist.empty(3)
    small[...] = rank
    cdist.all_reduce(small[1:])
    assert small.tolist() == [rank] + [sum(range(world))] * 2
    assert cdist.empty((0, 3)).shape == (0, 3)
    view = x[:10]
    del x
    kept = view.copy()
    more = [cdist.empty(300_000, "f8") for _ in range(3)]
    for m in more:
        m[...] = 7
    assert (view == kept).all()
    with pytest.raises(TypeError, match="Python objects"):
        cdist.empty(3, object)
    return "ok"


@everywhere
def test_arrays_in_the_arena(world, transport):
    assert run(_arena, world, transport=transport) == ["ok"] * world


def test_signatures_and_docstrings_can_be_read():
    for name in REDUCING + [m for m in MOVING if m != "send"] + ["send", "recv", "isend", "irecv", "barrier"]:
        function = getattr(cdist, name)
        parameters = inspect.signature(function).parameters
        assert "group" in parameters
        assert "timeout" in parameters
        assert "Args:" in function.__doc__
        assert "Raises:" in function.__doc__
    assert (
        str(inspect.signature(cdist.all_reduce)) == "(tensor, op=0, group=None, async_op=False, timeout=None)"
    )


def test_the_test_helper_reports_failures():
    def body(rank, world):
        if rank == 1:
            raise KeyError("here")
        cdist.barrier()

    with pytest.raises(RankFailedError, match="here") as caught:
        run(body, 2, group_timeout=10)
    assert isinstance(caught.value.outcomes[1], KeyError)
    assert isinstance(caught.value.outcomes[0], RuntimeError)
    with pytest.raises(RankFailedError, match="did not end within"):
        run(lambda rank, world: time.sleep(30), 2, timeout=0.5, init=False)
