"""Collectives of Python objects."""

import pickle
import time

import cdist
import numpy as np
import pytest
from cdist import _core, errors
from cdist.testing import run
from collective_cases import TRANSPORTS


class Counted:
    """Its array leaves the pickle stream: the stream stays small."""

    def __init__(self, array):
        self.array = array


class Slow:
    def __setstate__(self, state):
        time.sleep(0.8)
        self.__dict__.update(state)

    def __init__(self):
        self.x = 1


class Vanishing:
    """Cannot be unpickled on rank 1."""

    def __reduce__(self):
        return _fail_on_rank_1, ()


def _fail_on_rank_1():
    if cdist.get_rank() == 1:
        raise AttributeError("no such class here")
    return "fine"


def _all(rank, world):
    thing = {"rank": rank, "big": np.full(300_000, float(rank)), "text": "ü" * rank, "none": None}
    out = [None] * world
    cdist.all_gather_object(out, thing)
    assert [o["rank"] for o in out] == list(range(world))
    assert all((o["big"] == r).all() and o["big"].flags.writeable for r, o in enumerate(out))

    out = [None] * world if rank == world - 1 else None
    cdist.gather_object([thing["big"]] * (rank + 1), out, dst=world - 1)
    if out:
        assert [len(o) for o in out] == list(range(1, world + 1))
        assert all((o[-1] == r).all() for r, o in enumerate(out))

    things = [1, "two", np.arange(100_000)] if rank == 0 else [None] * 3
    cdist.broadcast_object_list(things)
    assert things[:2] == [1, "two"]
    assert (things[2] == np.arange(100_000)).all()

    out = [None]
    cdist.scatter_object_list(out, [np.full(50_000 * r, r) for r in range(world)] if rank == 0 else None)
    assert out[0].shape == (50_000 * rank,)
    assert (out[0] == rank).all()
    if world > 1 and rank == 0:
        cdist.send_object_list([{"a": 1}, np.ones(70_000), None], 1)
    elif rank == 1:
        got = [None] * 3
        assert cdist.recv_object_list(got) == 0
        assert got[0] == {"a": 1}
        assert got[1].sum() == 70_000
    return "ok"


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_all_functions(world, transport):
    assert run(_all, world, transport=transport) == ["ok"] * world


def _out_of_band(rank, world):
    from cdist.objects import _Message

    message = _Message(Counted(np.zeros(1_000_000)))
    assert len(message.stream) < 1000
    assert [b.size for b in message.buffers] == [8_000_000]
    small = _Message(Counted(np.zeros(10)))
    assert small.buffers == []
    return "ok"


def test_large_arrays_stay_out_of_the_stream():
    """K97."""
    assert run(_out_of_band, 1) == ["ok"]


ODD = [
    np.zeros((3, 0, 2)),
    np.array(2.5),
    np.arange(12, dtype="i2").reshape(3, 4)[:, ::2],
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.array([1, 2], ">i4"),
    np.zeros(3, np.dtype("f4", metadata={"unit": "m"})),
    np.array([True, False]),
    np.arange(3).astype(np.float16),
    np.arange(3).astype(np.longdouble),
    np.arange(3) * 1j,
    np.array(["a", "bc"]),
    np.array([None, {}], object),
    np.zeros(2, [("a", "i4"), ("b", "f8")]),
    np.ma.masked_array([1, 2], [True, False]),
    np.array(["2020-01-01", "NaT"], "M8[D]"),
]


def _round_trip(rank, world):
    fixed = np.arange(3)
    fixed.flags.writeable = False
    same = np.ones(2)
    for thing in [*ODD, fixed]:
        got = [thing if rank == 0 else None]
        cdist.send_object_list(got, 1) if rank == 0 else cdist.recv_object_list(got, 0)
        usual = pickle.loads(pickle.dumps(thing, 5))
        (a,), b = got, usual
        assert type(a) is type(b)
        assert (a.dtype, a.shape, a.dtype.metadata) == (b.dtype, b.shape, b.dtype.metadata)
        assert a.flags.writeable == b.flags.writeable
        assert a.flags.f_contiguous == b.flags.f_contiguous
        assert repr(a) == repr(b)
    got = [[same, same] if rank == 0 else None]
    cdist.broadcast_object_list(got)
    assert got[0][0] is got[0][1]
    return "ok"


def test_arrays_come_as_numpy_pickles_them():
    assert run(_round_trip, 2) == ["ok"] * 2


@pytest.mark.parametrize(
    "arguments",
    [
        ((2,), 11, b"1234"),
        ((-1,), 11, b""),
        ((1 << 62, 4), 11, b""),
        ((1,), 17, b"12345678"),
        ((1,) * 99, 1, b"1"),
    ],
)
def test_a_bad_array_in_a_pickle_is_refused(arguments):
    with pytest.raises(ValueError, match="do not fit together"):
        _core._array_of(*arguments)
    assert _core._array_of((1,), 11, b"\0\0\x80?") == 1.0


@pytest.mark.parametrize("size", [900, 940, 960, 984, 990, 1000, 1024, 1100, 70_000])
def test_around_the_size_of_a_slot(size):
    assert run(_sized, 2, size) == ["ok"] * 2


def _sized(rank, world, size):
    things = [bytes([r + 65]) * (size + r) for r in range(world)]
    out = [None] * world
    cdist.all_gather_object(out, things[rank])
    assert out == things
    out = [None] * world if rank == 1 else None
    cdist.gather_object(things[rank], out, dst=1)
    assert rank == 0 or out == things
    out = [None]
    cdist.scatter_object_list(out, things if rank == 0 else None)
    assert out == [things[rank]]
    out = [things[0] if rank == 0 else None]
    cdist.broadcast_object_list(out)
    assert out == things[:1]
    if rank == 0:
        cdist.send_object_list(things, 1)
    else:
        out = [None] * 2
        cdist.recv_object_list(out, 0)
        assert out == things
    return "ok"


def _cannot_pickle(rank, world):
    texts = []
    bad = lambda: None if rank == 0 else 1  # noqa: E731

    def fails(function, *args, **kwargs):
        start = time.monotonic()
        with pytest.raises(errors.DistError, match="pickle") as caught:
            function(*args, **kwargs)
        assert time.monotonic() - start < 10  # told at once, and not at the deadline
        assert caught.value.rank == 0
        texts.append(str(caught.value))

    fails(cdist.broadcast_object_list, [bad if rank == 0 else None])
    fails(cdist.all_gather_object, [None] * world, bad if rank == 0 else 1)
    fails(cdist.gather_object, bad if rank == 0 else 1, [None] * world if rank == 0 else None)
    fails(cdist.scatter_object_list, [None], [1, bad] if rank == 0 else None)
    if rank == 0:
        fails(cdist.send_object_list, [bad], 1)
    else:
        fails(cdist.recv_object_list, [None], 0)
    out = [None] * world
    cdist.all_gather_object(out, rank)  # the group still works
    assert out == list(range(world))
    return texts


def test_what_cannot_be_pickled_raises_on_every_rank():
    """K100."""
    a, b = run(_cannot_pickle, 2)
    assert [t.partition(":")[2] for t in a] == [t.partition(":")[2] for t in b]
    assert "rank 0 could not pickle its object" in a[0]


def _cannot_unpickle(rank, world):
    out = [None] * world
    try:
        cdist.all_gather_object(out, Vanishing())
        result = out
    except AttributeError as error:
        result = str(error)
    cdist.barrier()
    return result


def test_what_cannot_be_unpickled_raises_there_and_the_group_goes_on():
    """K100."""
    assert run(_cannot_unpickle, 2) == [["fine", "fine"], "no such class here"]


def _slow(rank, world):
    cdist.barrier()
    cdist.set_timeout(1)
    out = [None] * world if rank == 0 else None
    cdist.gather_object(Slow(), out)
    if out:
        assert [o.x for o in out] == [1, 1]
    return "ok"


def test_unpickling_is_outside_of_the_timeout():
    """K98."""
    assert run(_slow, 2) == ["ok"] * 2


def _restricted(rank, world):
    out = [None] * world
    cdist.all_gather_object(out, {"w": np.arange(3.0) + rank, "n": (1, 2.5, "x", True)}, weights_only=True)
    assert out[1]["w"].tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(pickle.UnpicklingError, match="does not allow"):
        cdist.all_gather_object(out, time.sleep, weights_only=True)
    cdist.set_allow_pickle(False)
    with pytest.raises(RuntimeError, match="set_allow_pickle"):
        cdist.all_gather_object(out, 1)
    cdist.all_gather_object(out, [rank], weights_only=True)
    return out


def test_restricted_unpickling():
    assert run(_restricted, 2) == [[[0], [1]]] * 2


def _bad(rank, world):
    with pytest.raises(ValueError, match="object_list has 1 places for 2 ranks"):
        cdist.all_gather_object([None], 1)
    with pytest.raises(ValueError, match="object_gather_list`` must be specified on destination rank"):
        cdist.gather_object(1, None, dst=rank)
    with pytest.raises(
        ValueError, match="object_gather_list`` must NOT be specified on non-destination ranks"
    ):
        cdist.gather_object(1, [None] * 2, dst=1 - rank)
    with pytest.raises(ValueError, match="to be a list of size at least 1."):
        cdist.scatter_object_list([], [1, 2])
    with pytest.raises(ValueError, match="source rank must provide non-None scatter_object_input_list"):
        cdist.scatter_object_list([None], None, src=rank)
    with pytest.raises(ValueError, match="Can't specify both"):
        cdist.broadcast_object_list([None], src=0, group_src=0)
    with pytest.raises(ValueError, match="Global rank 7 is not part of group"):
        cdist.broadcast_object_list([None], src=7)
    if rank == 0:
        cdist.broadcast_object_list([1, 2])
    else:
        with pytest.raises(ValueError, match="has 3 places, the source's 2"):
            cdist.broadcast_object_list([None] * 3)
    cdist.barrier()
    return "ok"


def test_wrong_calls():
    assert run(_bad, 2) == ["ok"] * 2
