"""Gradients in GPU memory that are no torch tensors: GradientReducer and DistributedDataParallel, on the fake
driver.
"""

import ctypes
import sys
import types

import cdist
import fake_gpu
import numpy as np
import pytest
from cdist.testing import run
from test_gpu_fake import outcome


@pytest.fixture(scope="module")
def fakes(tmp_path_factory):
    return fake_gpu.build(tmp_path_factory.mktemp("fakes"))


class DlTensor(ctypes.Structure):
    """DLPack's DLManagedTensor."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


class Capsule:
    """An array of floats in the fake GPU's memory that DLPack alone tells of."""

    def __init__(self, array):
        memory = array.memory
        self.memory = memory
        self.shape = (ctypes.c_int64 * memory.ndim)(*memory.shape)
        self.strides = (ctypes.c_int64 * memory.ndim)(*(s // memory.itemsize for s in memory.strides))
        self.managed = DlTensor(
            memory.__array_interface__["data"][0],
            2,
            array.device.id,
            memory.ndim,
            2,
            memory.itemsize * 8,
            1,
            ctypes.addressof(self.shape),
            ctypes.addressof(self.strides),
            0,
            None,
            None,
        )

    def __dlpack_device__(self):
        return 2, self.managed.device_id

    def __dlpack__(self, stream=None):
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return make(ctypes.addressof(self.managed), b"dltensor", None)

    __array__ = None  # whoever takes it for an array in host memory fails


KINDS = {"interface": lambda array: array, "dlpack": Capsule}


def drain(xp):
    xp.get(fake_gpu.Array(np.zeros(0), xp.device))


@pytest.mark.parametrize("kind", KINDS)
def test_bare_gradients_are_reduced_in_place(fakes, kind):
    def body(rank, world):
        xp, made = fake_gpu.Module(rank), KINDS[kind]
        shapes = {"a": (3, 2), "b": (), "c": (70, 50), "d": (0,)}

        def put(value):
            return {k: xp.put(np.full(s, value, "float32")) for k, s in shapes.items()}

        params = {k: made(x) for k, x in put(0).items()}
        reducer = cdist.GradientReducer(params, bucket_cap_mb=0.001)
        for step in range(3):
            raw = put(rank + step)
            whole = xp.put(np.full((3, 5), 100.0 * rank, "float32"))
            raw["a"] = xp.view(whole, np.s_[:, 1:5:2])  # not contiguous
            grads = {k: made(x) for k, x in raw.items()}
            out = reducer.reduce(grads)
            drain(xp)
            assert all(out[k] is grads[k] for k in grads)
            np.testing.assert_array_equal(raw["a"].memory, np.full((3, 2), 50.0))
            np.testing.assert_array_equal(whole.memory[:, ::2], np.full((3, 3), 100.0 * rank))
            np.testing.assert_array_equal(raw["c"].memory, np.full((70, 50), step + 0.5))
            assert raw["b"].memory == step + 0.5
        return reducer._sync.reducer.launched[0]

    assert run(body, 2, environ=fakes, check_leftovers=False) == [6, 6]  # two buckets a step


def test_weights_and_gradients_that_some_ranks_lack(fakes):
    def body(rank, world):
        xp = fake_gpu.Module(rank)
        params = [xp.put(np.zeros(4)), xp.put(np.zeros(3)), xp.put(np.zeros(2))]
        weighted = cdist.GradientReducer(params[:1], reduce="weights")
        x = xp.put(np.full(4, rank + 1.0))
        weighted.reduce([x], weight=1 + 2 * rank)
        drain(xp)
        loose = cdist.GradientReducer(params, find_unused_parameters=True)
        got = loose.reduce([xp.put(np.ones(4)), xp.put(np.ones(3)) if rank else None, None])
        drain(xp)
        address = got[1].__cuda_array_interface__["data"][0]
        ours = np.frombuffer((ctypes.c_char * 24).from_address(address))
        strict = cdist.GradientReducer(params)
        wrong = [outcome(lambda: strict.reduce([*params[:2], np.zeros(2)]))]
        wrong.append(outcome(lambda: strict.reduce([*params[:2], xp.put(np.zeros(2, "float32"))])))
        wrong.append(outcome(lambda: strict.reduce([*params[:2], params[1]])))
        missing = outcome(lambda: strict.reduce([*params[:2], params[2] if rank else None]))
        if missing[0] is None:  # the rank that lacks nothing is told by its next call
            drain(xp)
            missing = outcome(lambda: strict.reduce(params))
        return x.memory.tolist(), ours.tolist(), got[2], wrong, missing

    for weighted, ours, nothing, wrong, (kind, text) in run(body, 2, environ=fakes, check_leftovers=False):
        assert weighted == [1.75] * 4
        assert ours == [0.5] * 3
        assert nothing is None
        assert [w[0] for w in wrong] == [TypeError, TypeError, ValueError]
        assert "host memory" in wrong[0][1]
        assert "float32" in wrong[1][1]
        assert issubclass(kind, RuntimeError)
        assert "did not receive grad for rank 0: 2 ('[2]')" in text


def test_gradients_in_two_places_are_refused(fakes):
    def body(rank, world):
        x, y = fake_gpu.Module(rank).put(np.zeros(3)), fake_gpu.Module(rank + 2).put(np.zeros(3))
        return [outcome(lambda tree=tree: cdist.GradientReducer(tree)) for tree in ([x, np.zeros(3)], [x, y])]

    for (kind, text), (other_kind, other_text) in run(body, 2, environ=fakes, check_leftovers=False):
        assert kind is TypeError
        assert (
            "gradient[1] lies in host memory, gradient[0] on a GPU" in text
            or "[1] lies in host memory, [0]" in text
        )
        assert other_kind is ValueError
        assert "a rank uses one GPU" in other_text


class Holder:
    """A parameter class that is not cdist's."""

    def __init__(self, data):
        self.data, self.grad = data, None


class Module:
    def __init__(self, parameters, buffers=()):
        self.named = parameters
        self.buffers = list(buffers)

    def named_parameters(self):
        return self.named

    def named_buffers(self):
        return self.buffers

    def __call__(self):
        return None


def test_modules_with_parameters_of_their_own_kind(fakes):
    def body(rank, world):
        xp = fake_gpu.Module(rank)
        holders = [Holder(xp.put(np.full(s, rank + 1.0))) for s in ((4, 3), (5,))]
        running = xp.put(np.full(2, rank * 10.0))
        module = Module(list(zip("ab", holders, strict=True)), [("running", running)])
        ddp = cdist.nn.parallel.DistributedDataParallel(module)
        ddp()
        drain(xp)
        values = [h.data.memory.max() for h in holders] + [running.memory.max()]
        for step in range(3):
            for number, holder in enumerate(holders):
                holder.grad = xp.put(np.full(holder.data.memory.shape, float(rank + step + number)))
            ddp.synchronize()
            drain(xp)
            for number, holder in enumerate(holders):
                np.testing.assert_array_equal(
                    holder.grad.memory, np.full(holder.data.memory.shape, step + number + 0.5)
                )
        holders[1].grad = np.zeros(5)
        return values, outcome(ddp.synchronize)

    for values, (kind, text) in run(body, 2, environ=fakes, check_leftovers=False):
        assert values == [1.0, 1.0, 0.0]
        assert kind is ValueError
        assert "'b': gradient in host memory" in text


def fake_cupy(xp):
    """Make a module named cupy; its arrays compute at once, not in a stream's order: tests drain before."""

    class ndarray:  # noqa: N801
        def __init__(self, memory):
            self.memory = memory
            address = memory.__array_interface__["data"][0]
            self.data = types.SimpleNamespace(ptr=address, device_id=xp.device)
            self.dtype, self.shape, self.strides = memory.dtype, memory.shape, memory.strides
            self.__cuda_array_interface__ = fake_gpu.Array(memory, xp.device).__cuda_array_interface__

        def __setitem__(self, index, value):
            self.memory[index] = getattr(value, "memory", value)

        def copy(self):
            return put(self.memory)

        def __array_function__(self, function, kinds, args, kwargs):
            plain = [getattr(a, "memory", a) for a in args]
            return function(*plain, **kwargs)

        def __array_ufunc__(self, ufunc, method, *inputs, out=(), **kwargs):
            drain(xp)
            plain = [getattr(a, "memory", a) for a in inputs]
            ufunc(*plain, out=tuple(a.memory for a in out), **kwargs)

    def put(array):
        return ndarray(xp.put(array).memory)

    def asarray(told):
        interface = told.__cuda_array_interface__
        count = int(np.prod(interface["shape"])) * np.dtype(interface["typestr"]).itemsize
        raw = (ctypes.c_char * count).from_address(interface["data"][0])
        array = ndarray(np.frombuffer(raw, interface["typestr"]).reshape(interface["shape"]))
        array.base = told
        return array

    ndarray.__module__ = "cupy"
    stream = types.SimpleNamespace(get_current_stream=lambda: types.SimpleNamespace(ptr=0))
    sys.modules["cupy"] = types.SimpleNamespace(ndarray=ndarray, cuda=stream, asarray=asarray)
    return put


@pytest.mark.parametrize("cap", [None, 0.0001])
def test_parameters_accumulate_on_the_gpu(fakes, cap):
    def body(rank, world):
        xp = fake_gpu.Module(rank)
        put = fake_cupy(xp)
        parameters = [cdist.Parameter(put(np.full(s, rank + 1.0))) for s in ((4, 3), (5,), (6,))]
        module = Module([(f"p{i}", p) for i, p in enumerate(parameters)])
        ddp = cdist.nn.parallel.DistributedDataParallel(module, bucket_cap_mb=cap)
        drain(xp)
        assert [p.data.memory.max() for p in parameters] == [1.0] * 3
        for step in range(4):  # the second one is planned anew
            ddp.zero_grad()
            for number, p in enumerate(parameters):  # the order of the plan is the other way round
                p.accumulate_grad(put(np.full(p.data.shape, float(rank))), ready=False)
                p.accumulate_grad(put(np.full(p.data.shape, float(step + number))))
            grads = [p.grad for p in parameters]
            drain(xp)
            for number, grad in enumerate(grads):
                assert type(grad) is sys.modules["cupy"].ndarray
                np.testing.assert_array_equal(grad.memory, np.full(grad.shape, step + number + 0.5))
        return ddp._sync.order

    orders = run(body, 2, environ=fakes, check_leftovers=False)
    assert orders == [[0, 1, 2]] * 2


def test_parameters_of_a_kind_that_nobody_adds_up_are_refused(fakes):
    def body(rank, world):
        p = cdist.Parameter(fake_gpu.Module(rank).put(np.zeros(3)))
        return outcome(lambda: cdist.nn.parallel.DistributedDataParallel(Module([("p", p)])))

    for kind, text in run(body, 2, environ=fakes, check_leftovers=False):
        assert kind is TypeError
        assert "fake_gpu.Array" in text
