"""How cdist reads arrays of NumPy, torch, buffers and DLPack: dtype, shape, layout, writability."""

import array as stdarray

import ml_dtypes
import numpy as np
import pytest
from cdist import _core

torch = pytest.importorskip("torch", reason="torch comes with EXTRAS in .ci/run")


def read(tensor, output=False):
    return _core._describe(tensor, output)


LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.T,
    "fortran": np.asfortranarray,
    "strided": lambda x: x[::2, 1::3],
    "negative": lambda x: x[::-1, ::-2],
    "offset": lambda x: x[1:, 2:],
    "one column": lambda x: x[:, 3:4],
    "one row": lambda x: x[2],
    "0-d": lambda x: x[1, 2, ...],
    "empty": lambda x: x[:0, :3],
    "3-d swapped": lambda x: x.reshape(2, 2, -1).swapaxes(0, 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", "?bBhHiIlLqQefdgFDG")
def test_numpy_layouts_are_read_in_logical_order(layout, dtype):
    x = LAYOUTS[layout](np.arange(32).reshape(4, 8).astype(dtype))
    got = read(x, True)
    assert got["bytes"] == x.tobytes()
    assert got["shape"] == x.shape
    assert got["item_bytes"] == x.itemsize
    assert got["dtype"] == np.dtype(dtype).name.replace("float128", "longdouble").replace(
        "complex256", "clongdouble"
    )
    assert got["data"] == x.ctypes.data
    contiguous = x.flags.c_contiguous or x.size == 0
    assert got["strided"] is (not contiguous)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_extension_dtypes_are_known_by_name(name):
    x = np.arange(6).astype(getattr(ml_dtypes, name))
    assert read(x)["dtype"] == name
    t = torch.arange(6).to(getattr(torch, name))
    assert read(t)["dtype"] == name
    assert read(t)["bytes"] == x.tobytes() == read(x)["bytes"]


@pytest.mark.parametrize(
    "x",
    [
        np.array(["2020-01-01", "2021-02-03"], "M8[D]"),
        np.arange(3).astype("m8[s]"),
        np.zeros(3, [("a", "i4"), ("b", "f8")]),
        np.array([b"ab", b"c"]),
        np.array(["ab", "c"]),
        np.zeros(3, "V5"),
        np.arange(4).astype(ml_dtypes.int4),
    ],
    ids=lambda x: str(x.dtype),
)
def test_other_dtypes_are_bytes(x):
    got = read(x, True)
    assert (got["dtype"], got["item_bytes"], got["bytes"]) == ("bytes", x.itemsize, x.tobytes())


def test_foreign_byte_order_is_bytes_and_marked():
    got = read(np.arange(3, dtype=">f4"))
    assert (got["dtype"], got["swapped"], got["bytes"]) == (
        "bytes",
        True,
        np.arange(3, dtype=">f4").tobytes(),
    )


TORCH_DTYPES = [
    "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "bool",
    "complex64", "complex128",
]  # fmt: skip


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_torch_tensors_are_read_in_place(dtype):
    t = torch.arange(24).reshape(4, 6).to(getattr(torch, dtype))
    for view in (t, t.T, t[::2, 1:], t[1, 2], t[:0]):
        got = read(view, True)
        assert got["dtype"] == dtype
        assert got["shape"] == tuple(view.shape)
        assert got["bytes"] == view.numpy().tobytes()
        if view.numel():
            assert got["data"] == view.data_ptr()


def test_torch_parameters_and_results_of_autograd():
    parameter = torch.nn.Parameter(torch.ones(3))
    assert read(parameter, True)["bytes"] == np.ones(3, "f4").tobytes()
    assert read(parameter * 2)["bytes"] == np.full(3, 2, "f4").tobytes()


@pytest.mark.parametrize("bad", [
    torch.empty(2, device="meta"), torch.zeros(2, 2).to_sparse(),
], ids=["meta", "sparse"])  # fmt: skip
def test_torch_tensors_without_memory_are_refused(bad):
    with pytest.raises(TypeError, match="parameter `tensor` .* has no memory that can be sent") as caught:
        read(bad)
    assert "\n" not in str(caught.value)


def test_lazy_torch_views_are_refused():
    z = torch.complex(torch.ones(2, 2), torch.ones(2, 2))
    with pytest.raises(ValueError, match="lazy conjugate view: pass tensor.resolve_conj"):
        read(z.conj())
    with pytest.raises(ValueError, match="lazy negative view"):
        read(z.conj().imag)
    for one in (
        z[:1, :1],
        z[0, 1],
        torch.ones(1, dtype=torch.complex128),
        torch.ones((), dtype=torch.complex64),
    ):
        for view in (one.conj().imag, one.conj().imag.detach()):
            with pytest.raises(ValueError, match="lazy negative view: pass tensor.resolve_neg"):
                read(view)
            assert read(view.resolve_neg())["bytes"] == (-one.imag).numpy().tobytes()
        assert read(one.imag)["bytes"] == one.imag.numpy().tobytes()
    with pytest.raises(ValueError, match="lazy negative view"):
        read(torch._neg_view(z))
    with pytest.raises(ValueError, match="lazy negative view"):
        read(torch._neg_view(torch.ones(1 << 16)))
    assert read(z.imag)["bytes"] == np.ones((2, 2), "f4").tobytes()


class OnlyDLPack:
    """Nothing but __dlpack__, in the new or the old form."""

    def __init__(self, source, versions=True):
        self.source, self.versions = source, versions

    def __dlpack__(self, **arguments):
        if arguments and not self.versions:
            raise TypeError("unexpected keyword")
        return self.source.__dlpack__(**arguments)


@pytest.mark.parametrize("versions", [True, False])
@pytest.mark.parametrize("source", [np.arange(6.0).reshape(2, 3), torch.arange(6.0).reshape(2, 3)])
def test_dlpack_capsules(source, versions):
    got = read(OnlyDLPack(source, versions), True)
    assert got["shape"] == (2, 3)
    assert got["bytes"] == np.asarray(source).tobytes()


def test_read_only_dlpack_is_no_output():
    x = np.arange(3.0)
    x.flags.writeable = False
    assert read(OnlyDLPack(x))["writable"] is False
    with pytest.raises(ValueError, match="read-only"):
        read(OnlyDLPack(x), True)


def test_buffers_and_array_interfaces():
    assert read(bytearray(b"abc"), True)["bytes"] == b"abc"
    assert read(memoryview(b"abcd")[::2])["bytes"] == b"ac"
    assert read(stdarray.array("f", [1, 2]), True)["dtype"] == "float32"

    class Interface:
        x = np.arange(4, dtype="i2")
        __array_interface__ = x.__array_interface__

    assert read(Interface(), True)["data"] == Interface.x.ctypes.data


@pytest.mark.parametrize("output", [np.broadcast_to(np.ones(1), 3), memoryview(b"abc"), b"abc"])
def test_read_only_outputs_are_refused(output):
    assert read(output)["writable"] is False
    with pytest.raises(
        ValueError, match="parameter `tensor` is written to, but the array given is read-only"
    ):
        read(output, True)


def test_outputs_whose_elements_share_memory_are_refused():
    with pytest.raises(ValueError, match="share one place"):
        read(torch.zeros(2, 1).expand(2, 3), True)
    shared = np.lib.stride_tricks.as_strided(np.zeros(4), (3, 4), (0, 8))
    with pytest.raises(ValueError, match="share one place"):
        read(shared, True)


def test_masks_are_not_ignored():
    x = np.ma.masked_array(np.arange(4.0), mask=[False, True, False, False])
    for hidden in (x, x.reshape(2, 2), np.ma.masked_array(np.zeros(2, [("a", "f4")]), [(0,), (1,)])):
        for output in (False, True):
            with pytest.raises(TypeError, match=r"`tensor` is a masked array.*pass x.filled\(value\)"):
                read(hidden, output)
    assert read(x.filled(7))["bytes"] == np.array([0.0, 7, 2, 3]).tobytes()
    for open_ in (np.ma.masked_array(np.arange(3.0)), np.ma.masked_array(np.arange(3.0), mask=[False] * 3)):
        assert read(open_, True)["bytes"] == np.arange(3.0).tobytes()


@pytest.mark.parametrize("scalar", [1, 1.5, True, "x", np.float64(3), np.int8(1), 2j])
def test_scalars_are_refused_with_a_hint(scalar):
    with pytest.raises(
        TypeError, match=r"Expected parameter `tensor` of type .*scalar.*numpy.array\(value\)"
    ):
        read(scalar)


@pytest.mark.parametrize("thing", [None, [1, 2], (1,), {}, object(), np.ndarray])
def test_other_objects_are_refused(thing):
    with pytest.raises(TypeError, match="Invalid function argument. Expected parameter `tensor` of type"):
        read(thing)


@pytest.mark.parametrize(
    "x", [np.array([None]), np.zeros(2, [("a", object)]), np.array(["a"], np.dtypes.StringDType())]
)
def test_arrays_of_python_objects_are_refused(x):
    with pytest.raises(TypeError, match="elements that are Python objects"):
        read(x)


def test_numpy_subclasses_are_arrays(tmp_path):
    mapped = np.memmap(tmp_path / "x", "f4", "w+", shape=(3,))
    assert read(mapped, True)["dtype"] == "float32"
    assert read(np.matrix([[1, 2]]))["shape"] == (1, 2)
