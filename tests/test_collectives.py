"""Every collective over dtype, layout, size, reduction, world size and transport.

Compared with NumPy in rank order, bit by bit.
"""

import inspect
import time
import warnings

import cdist
import ml_dtypes
import numpy as np
import pytest
from cdist import ReduceOp
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

# Around what is sent in one piece, and around 64 KiB, where the plan changes (csrc/coll/plan.c), for 4-byte
# elements.
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
    """K64, K68."""
    check(
        [{"kind": kind, "name": name, "shape": (3, 4)} for kind in MOVING for name in NUMBERS + OTHERS],
        world,
        transport,
    )


@everywhere
def test_layouts(world, transport):
    """Gaps between strides stay untouched."""
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
    """K53, K61."""
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


# ------------------------------------------------------------------------------------------- uneven, in place


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
    """K55, K62."""
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


def test_numpy_scalars_are_refused_with_a_hint():
    """K61: a scalar of NumPy cannot be written to."""

    def body(rank, world):
        for call in (cdist.all_reduce, lambda x: cdist.broadcast(x, 0)):
            with pytest.raises(TypeError, match="float64") as caught:
                call(np.float64(3))
        return str(caught.value)

    assert run(body, 1)[0]


def test_inputs_may_be_read_only():
    assert run(_read_only_source, 2) == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 2


# ---------------------------------------------------------------------------------------- reduction semantics


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
    """K65, K67, K70."""
    assert run(_semantics, 2, transport=transport) == ["ok"] * 2


def _averages_of_subgroup(rank, world):
    group = cdist.new_group([0, 2])
    for count in (3, 5):
        x = np.full(count, -3 - rank, "i4")
        cdist.all_reduce(x, ReduceOp.AVG)
        assert x.tolist() == [-4] * count  # (-3 - 4 - 5) / 3
        x = np.full(count, -3 - rank // 2, "i4")
        if rank != 1:
            cdist.all_reduce(x, ReduceOp.AVG, group=group)
            assert x.tolist() == [-3] * count  # -7 / 2, toward zero
    return "ok"


@pairs
def test_averages_divide_by_the_size_of_the_group(transport):
    """K65."""
    assert run(_averages_of_subgroup, 3, transport=transport) == ["ok"] * 3


def _broadcast_of_all_types(rank, world):
    wrong = []
    known = {np.dtype(kind) for kind in np.sctypeDict.values() if kind is not np.object_}
    dtypes = {dtype.name: dtype for dtype in known}
    for kind, dtype in sorted(dtypes.items()):
        if dtype.itemsize == 0:
            dtype = np.dtype(dtype.str.replace("0", "3"))
        x = np.zeros(4, dtype)
        if rank == 0:
            x.view("u1")[:] = np.arange(x.nbytes) % 2 if kind == "bool" else np.arange(x.nbytes) % 127
        want = x.tobytes() if rank == 0 else None
        cdist.broadcast(x, 0)
        texts = [None] * world
        cdist.all_gather_object(texts, want or x.tobytes())
        if texts[0] != texts[1]:
            wrong.append(kind)
    return wrong


@pairs
def test_every_type_of_numpy_can_be_broadcast(transport):
    """K68."""
    assert run(_broadcast_of_all_types, 2, transport=transport) == [[], []]


def test_supports_agrees_with_the_calls():
    """K71."""

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
    """K64."""
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


# ------------------------------------------------------------------------------------------------------ torch


def _torch(rank, world):
    torch = pytest.importorskip("torch", reason="torch comes with EXTRAS in .ci/run")
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


# ----------------------------------------------------------------------------------------------------- others


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
