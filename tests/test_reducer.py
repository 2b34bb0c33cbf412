"""The gradient reducer: buckets, steps, errors (cdist._core.Reducer), and bare gradients
(cdist.GradientReducer).
"""

import gc
import weakref

import cdist
import numpy as np
import pytest
from cdist import _core
from cdist.testing import run

WORLDS = [1, 2, 3, 4]


def views_of(reducer, shapes, dtype=np.float32):
    buckets = [reducer.bucket(k) for k in range(reducer.buckets)]
    places = [reducer.place(i) for i in range(len(shapes))]
    return [
        np.ndarray(shape, dtype, buffer=buckets[k], offset=at)
        for shape, (k, at) in zip(shapes, places, strict=True)
    ]


def make(shapes, bucket_of, mode="mean"):
    reducer = _core.Reducer(
        None, [int(np.prod(s)) for s in shapes], ["float32"] * len(shapes), bucket_of, mode
    )
    return reducer, views_of(reducer, shapes)


def test_assignment_is_torchs():
    counts = [1000000, 1000] * 10 + [1000, 1000]
    order = [20, 21] + list(range(19, -1, -1))
    buckets = _core.assign_buckets(counts, ["float32"] * 22, [1 << 20, 25 << 20], order)
    sizes = [0] * 3
    for count, bucket in zip(counts, buckets, strict=True):
        sizes[bucket] += 4 * count
    assert sizes == [4012000, 28028000, 8008000]


@pytest.mark.parametrize("wrong", [[0, 0], [0, 2], [0, -1]])
def test_assignment_refuses_a_wrong_order(wrong):
    with pytest.raises(ValueError):
        _core.assign_buckets([1, 1], ["float32"] * 2, [1], wrong)
    with pytest.raises(ValueError):
        _core.assign_buckets([1, 1], ["float32"] * 2, [])


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_steps_in_any_order(world, transport):
    def body(rank, world):
        shapes = [(3, 2), (5,), (), (0,), (1000, 100)]
        reducer, views = make(shapes, [2, 1, 1, 0, 0])
        same = []
        for step in range(6):
            reducer.begin(1)
            for i in range(5):
                at = (i * (rank + 1) + step) % 5 if world < 5 else i
                views[at][...] = (rank + 1) * (at + 1)
                reducer.ready(at)
            assert reducer.unready == 0
            assert reducer.finish(False)
            mean = (world + 1) / 2
            for at, view in enumerate(views):
                np.testing.assert_allclose(view, np.full(view.shape, mean * (at + 1)), rtol=1e-6)
            same.append(b"".join(view.tobytes() for view in views))
        assert reducer.launched[0] == 18
        return same

    outcomes = run(body, world, transport=transport)
    assert all(outcome == outcomes[0] for outcome in outcomes)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"])
def test_dtypes(dtype):
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes comes with the package's test extra")
    numpy_dtype = np.dtype(getattr(ml_dtypes, dtype)) if dtype == "bfloat16" else np.dtype(dtype)

    def body(rank, world):
        reducer = _core.Reducer(None, [7], [dtype], [0], "mean")
        (view,) = views_of(reducer, [(7,)], numpy_dtype)
        for _ in range(2):
            reducer.begin(1)
            view[...] = rank * 2
            reducer.ready(0)
            assert reducer.finish(False)
            assert (view == np.asarray(world - 1, numpy_dtype)).all()
        reducer.begin(1)
        if rank:
            reducer.ready(0)
        assert not reducer.finish(False)
        return reducer.missing()

    assert run(body, 3) == [b"\1\0\0"] * 3


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("mode", ["mean", "sum"])
def test_the_bits_do_not_depend_on_who_reduces(monkeypatch, world, mode):
    def body(rank, world):
        shapes = [(700_001,), (3,), (), (0,), (300_000,), (1,)]
        reducer, views = make(shapes, [0, 0, 1, 1, 1, 2], mode)
        random = np.random.default_rng(rank)
        results = []
        for step in range(5):
            reducer.set_divisor(world if step % 2 else 3.0)
            reducer.set_scale(1.0 if step < 3 else 0.3)
            reducer.begin(1)
            for at in random.permutation(len(shapes)):
                views[at][...] = np.random.default_rng(100 * rank + 10 * step + at).normal(size=shapes[at])
                reducer.ready(at)
            assert reducer.finish(False)
            results.append(b"".join(view.tobytes() for view in views))
        assert reducer.launched[0] == 15
        return results

    outcomes = []
    for way in ("inline", "worker"):
        monkeypatch.setenv("CDIST_REDUCER", way)
        outcomes += run(body, world)
    monkeypatch.setenv("CDIST_ARENA_BYTES", "0")
    monkeypatch.setenv("CDIST_REDUCER", "inline")
    outcomes += run(body, world)
    assert all(outcome == outcomes[0] for outcome in outcomes)


def test_a_rank_that_goes_elsewhere_is_told(monkeypatch):
    """Also when gradients are reduced in place, where no operation waits for the other ranks' gradients."""
    monkeypatch.setenv("CDIST_REDUCER", "inline")

    def body(rank, world, elsewhere):
        reducer, (view,) = make([(3,)], [0])
        for step in range(4):
            if step == 3 and rank == 1:
                if elsewhere:
                    with pytest.raises(cdist.DistError):
                        cdist.all_reduce(np.ones(7))
                return ""
            reducer.begin(1)
            view[...] = rank
            reducer.ready(0)
            if step < 3:
                assert reducer.finish(False)
                np.testing.assert_array_equal(view, 0.5)
        with pytest.raises(cdist.DistError) as caught:
            reducer.finish(False)
        return str(caught.value)

    assert "rank 1" in run(body, 2, False, group_timeout=20)[0]
    assert "7" in run(body, 2, True, group_timeout=20)[0]


def test_integers_are_refused():
    def body(rank, world):
        with pytest.raises(TypeError, match="int32"):
            _core.Reducer(None, [7], ["int32"], [0])
        with pytest.raises(ValueError):
            _core.Reducer(None, [7], ["float32"], [1])
        with pytest.raises(ValueError):
            _core.Reducer(None, [7, 8], ["float32"], [0])
        with pytest.raises(ValueError):
            _core.Reducer(None, [7], ["float32"], [0], "median")
        with pytest.raises(IndexError):
            _core.Reducer(None, [7], ["float32"], [0]).ready(1)
        with pytest.raises(TypeError):
            _core.Reducer(7, [7], ["float32"], [0])

    run(body, 1)
    with pytest.raises(ValueError, match="Default process group"):
        _core.Reducer(None, [7], ["float32"], [0])


def test_missing_gradient_fails_everywhere_and_the_group_lives_on():
    def body(rank, world):
        reducer, views = make([(2,), (3,), (4,)], [1, 1, 0])
        for allowed in (True, False):
            reducer.begin(1)
            for i in range(3):
                if not (rank == 1 and i == 1):
                    views[i][...] = 3
                    reducer.ready(i)
            assert reducer.finish(allowed) == allowed
            if allowed:
                np.testing.assert_allclose(views[1], np.full(3, 3 * (world - 1) / world), rtol=1e-6)
        table = np.frombuffer(reducer.missing(), np.uint8).reshape(world, 3)
        reducer.begin(1)
        for i in range(3):
            views[i][...] = 1
            reducer.ready(i)
        assert reducer.finish(False)
        assert (views[1] == 1).all()
        return table.tolist()

    for table in run(body, 3):
        assert table == [[0, 0, 0], [0, 1, 0], [0, 0, 0]]


def test_memory_outlives_the_reducer():
    def body(rank, world):
        reducer, views = make([(100,)], [0])
        alive = weakref.ref(views[0])
        reducer.begin(1)
        views[0][...] = rank
        reducer.ready(0)
        reducer.finish(False)
        view = views[0]
        del reducer, views
        gc.collect()
        view += 1
        assert alive() is view
        return float(view.sum())

    assert run(body, 2) == [150.0, 150.0]


def test_sum_divisor_and_scale():
    def body(rank, world):
        reducer, (view,) = make([(3,)], [0], "sum")
        reducer.set_scale(rank + 1.0)
        reducer.begin(1)
        view[...] = 2
        reducer.ready(0)
        assert reducer.finish(False)
        total = view.tolist()
        reducer, (view,) = make([(3,)], [0])
        reducer.set_divisor(4.0)
        reducer.begin(1)
        view[...] = 2
        reducer.ready(0)
        assert reducer.finish(False)
        return total, view.tolist()

    assert run(body, 2) == [([6.0] * 3, [1.0] * 3)] * 2


# ---- GradientReducer


@pytest.mark.parametrize("world", WORLDS)
def test_nests_come_back_as_they_were(world):
    from collections import namedtuple

    Pair = namedtuple("Pair", "w b")

    def body(rank, world):
        params = {
            "b": [np.zeros(3, np.float32), (np.zeros((2, 2)),)],
            "a": Pair(np.zeros(1), np.zeros((), np.float32)),
        }
        reducer = cdist.GradientReducer(params)
        grads = {
            "a": Pair(np.full(1, rank, float), np.float32(rank)),
            "b": [np.full(3, rank, np.float32), (np.full((2, 2), 2.0 * rank),)],
        }
        w = grads["a"].w
        out = reducer.reduce(grads)
        mean = (world - 1) / 2
        assert list(out) == ["a", "b"]
        assert isinstance(out["a"], Pair)
        assert isinstance(out["b"][1], tuple)
        assert out["a"].w is w
        assert w[0] == mean
        assert out["a"].b == np.float32(mean)
        np.testing.assert_array_equal(out["b"][1][0], np.full((2, 2), 2 * mean))

    run(body, world)


def test_read_only_and_strided_leaves():
    def body(rank, world):
        reducer = cdist.GradientReducer([np.zeros(4), np.zeros((3, 2))])
        frozen = np.full(4, float(rank))
        frozen.flags.writeable = False
        strided = np.full((2, 3), float(rank)).T
        out = reducer.reduce([frozen, strided])
        assert (frozen == rank).all()
        assert (out[0] == 0.5).all()
        assert out[1] is strided
        assert (strided == 0.5).all()

    run(body, 2)


class Producer:
    """Offers its memory by DLPack and in no other way."""

    def __init__(self, array):
        self.array = array
        self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__


def test_leaves_of_other_kinds():
    """None where there is no parameter, numbers, DLPack alone, integers where the mean is none."""

    def body(rank, world):
        params = {"a": None, "b": [0.0, np.float32(0)], "c": Producer(np.zeros(2)), "d": np.zeros(2)}
        reducer = cdist.GradientReducer(params)
        produced = Producer(np.full(2, float(rank)))
        grads = {"a": None, "b": [float(rank), np.float32(rank)], "c": produced, "d": np.full(2, rank)}
        out = reducer.reduce(grads)
        assert out["a"] is None
        assert (out["b"], type(out["b"][0]), type(out["b"][1])) == ([0.5, 0.5], float, np.float32)
        assert out["c"] is produced
        assert (produced.array == 0.5).all()
        assert out["d"].tolist() == [0.5, 0.5]
        with pytest.raises(ValueError, match="where the parameter is None.*'a'"):
            reducer.reduce({**grads, "a": 1.0})

    run(body, 2)


def test_other_kinds_of_dicts_come_back_as_they_were():
    from collections import OrderedDict, defaultdict

    class Named(dict):
        """A dict that wants other arguments than items."""

        def __init__(self, name):
            self.name = name

    def nest(value):
        named = Named("layer")
        named["w"] = np.full(2, value)
        lists = defaultdict(list)
        lists["b"].append(np.full(1, value))
        return OrderedDict(z=named, a=lists)

    def body(rank, world):
        out = cdist.GradientReducer(nest(0.0)).reduce(nest(float(rank)))
        assert list(out) == ["z", "a"]
        assert (type(out["z"]), out["z"].name, out["z"]["w"].tolist()) == (Named, "layer", [0.5, 0.5])
        assert out["a"]["more"] == []
        assert out["a"]["b"][0] == 0.5

    run(body, 2)


def test_numbers_of_the_other_byte_order():
    class Layer:
        def __init__(self):
            self.w = cdist.Parameter(np.zeros(2, ">f4"))

        def named_parameters(self):
            return [("w", self.w)]

    def body(rank, world):
        gradient = np.full(2, rank + 1, ">f4")
        assert cdist.GradientReducer(np.zeros(2, ">f4")).reduce(gradient) is gradient
        assert gradient.tolist() == [1.5, 1.5]
        ddp = cdist.DistributedDataParallel(Layer())
        ddp.module.w.accumulate_grad(np.full(2, rank + 1, ">f4"))
        assert ddp.module.w.grad.tolist() == [1.5, 1.5]

    run(body, 2)


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"w": np.zeros(2), "step": 3}, r"\['step'\] is of int64.*put None in its place"),
        ([object()], r"\[0\] is no array of numbers.*dicts, lists and tuples"),
    ],
)
def test_what_is_no_gradient_says_what_to_do(params, text):
    def body(rank, world):
        with pytest.raises(TypeError, match=text):
            cdist.GradientReducer(params)

    run(body, 1)


def test_weights_give_the_exact_global_mean():
    """K151: batches of 3 and 5 give the gradient of 8 samples."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 5)), rng.normal(size=8)
    w = rng.normal(size=5)
    shards = [slice(0, 3), slice(3, 8)]

    def gradient(part):
        return x[part].T @ (x[part] @ w - y[part]) / len(y[part])

    def body(rank, world):
        results = []
        for mode in ("weights", "sum", "mean"):
            reducer = cdist.GradientReducer([w], reduce=mode)
            extra = {"weight": 3 if rank == 0 else 5} if mode == "weights" else {}
            results.append(reducer.reduce([gradient(shards[rank])], **extra)[0])
        with pytest.raises(ValueError, match="weights"):
            reducer.reduce([gradient(shards[rank])], weight=3)
        with pytest.raises(ValueError, match="set_weight"):
            cdist.GradientReducer([w], reduce="weights").reduce([w.copy()])
        return results

    parts = [gradient(s) for s in shards]
    for weighted, total, mean in run(body, 2):
        np.testing.assert_allclose(weighted, gradient(slice(0, 8)), rtol=1e-12)
        np.testing.assert_allclose(total, parts[0] + parts[1], rtol=1e-14)
        np.testing.assert_allclose(mean, (parts[0] + parts[1]) / 2, rtol=1e-14)


def test_fresh_arrays_each_step():
    def body(rank, world):
        reducer = cdist.GradientReducer({"w": np.zeros(1000)})
        for step in range(5):
            grads = {"w": np.full(1000, float(step + rank))}
            assert (reducer.reduce(grads)["w"] == step + 0.5).all()

    run(body, 2)


def test_missing_leaf():
    def body(rank, world):
        params = {"a": np.zeros(2), "b": np.zeros(2), "c": np.zeros(2)}
        grads = {"a": np.ones(2), "b": None if rank == 1 else np.ones(2), "c": None}
        loose = cdist.GradientReducer(params, find_unused_parameters=True)
        out = loose.reduce(grads)
        assert (out["b"] == 0.5).all()
        assert out["c"] is None
        strict = cdist.GradientReducer(params)
        with pytest.raises(RuntimeError, match="'b'") as caught:
            strict.reduce({**grads, "c": np.ones(2)})
        return str(caught.value)

    for text in run(body, 2):
        assert "did not receive grad for rank 1" in text
        assert "rank 0" not in text


def test_differences_raise_on_every_rank():
    def body(rank, world):
        said = []
        for params in (
            {"a": np.zeros(2 + rank // 2)},
            {"a" if rank else "b": np.zeros(2)},
            [np.zeros(2)] * (1 + rank // 2),
            [np.zeros(2, np.float32 if rank == 1 else np.float64)],
        ):
            with pytest.raises(RuntimeError, match="DDP expects same model across all ranks") as caught:
                cdist.GradientReducer(params)
            said.append(str(caught.value))
        cdist.GradientReducer([np.zeros(2)]).reduce([np.zeros(2)])
        return said

    for rank, said in enumerate(run(body, 3)):
        assert "(3,)" in said[0]
        assert "rank 2" in said[0]
        assert "'a'" in said[1]
        assert "'b'" in said[1]
        assert "params, while rank" in said[2]
        assert f"Rank {rank} has {1 + rank // 2} params" in said[2]
        assert "float32" in said[3]
        assert "rank 1" in said[3]


def test_wrong_gradients_are_refused_locally():
    def body(rank, world):
        reducer = cdist.GradientReducer({"a": np.zeros(2)})
        if rank == 0:
            with pytest.raises(ValueError, match="structure"):
                reducer.reduce({"b": np.zeros(2)})
            with pytest.raises(ValueError, match="shape"):
                reducer.reduce({"a": np.zeros(3)})
            with pytest.raises(TypeError, match="'a'.*is of complex128, its parameter of float64"):
                reducer.reduce({"a": np.zeros(2, complex)})
            with pytest.raises(TypeError, match="'a'.*is of int64; gradients are real or complex floats"):
                cdist.GradientReducer({"a": np.zeros(2, np.int64)})
            weighted = cdist.GradientReducer([np.zeros(1)], reduce="weights", init_sync=False)
            for weight in (-1, float("nan"), float("inf")):
                with pytest.raises(ValueError, match="weight must be a number from 0 on"):
                    weighted.reduce([np.zeros(1)], weight=weight)
        reducer.reduce({"a": np.zeros(2)})
        with pytest.raises(ValueError, match="reduce must be one of"):
            cdist.GradientReducer([np.zeros(1)], reduce="median", init_sync=False)

    run(body, 2)


def test_nothing_to_reduce():
    def body(rank, world):
        reducer = cdist.GradientReducer({})
        assert reducer.reduce({}) == {}
        return reducer._sync.reducer.launched

    assert run(body, 2) == [(0, 0)] * 2


def test_ranks_without_the_reducer_time_out():
    def body(rank, world):
        store = cdist.group.WORLD.get_group_store()
        reducer = cdist.GradientReducer([np.zeros(3)])
        cdist.set_timeout(1)
        if rank == 0:
            with pytest.raises(cdist.DistTimeoutError):
                reducer.reduce([np.ones(3)])
            store.set("over", "")
        else:
            store.get("over")

    run(body, 2)
