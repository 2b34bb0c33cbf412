"""Arrays of other libraries that describe themselves wrongly: refused by name before any of it is used."""

import ctypes

import numpy as np
import pytest
from cdist import _core
from test_gpu_arrays import DlTensor

FAR = 1 << 62


class Interface:
    """What numba's arrays are: nothing but the interface, here of memory that nobody touches."""

    def __init__(self, **entries):
        whole = {"shape": (2, 3), "typestr": "<f4", "data": (4096, False), "strides": None, "version": 3}
        self.__cuda_array_interface__ = {**whole, **entries}


def facts(array):
    return _core._gpu_facts(array)


def test_what_an_interface_says_is_taken():
    assert facts(Interface()) == (-1, "float32", (2, 3), 4, 0)
    assert facts(Interface(shape=(np.int64(5), 1), strides=(-4, 77), data=(np.uint64(4096), 1)))[2] == (5, 1)
    assert facts(Interface(shape=(), typestr="<V2"))[1:4] == ("bytes", (), 2)
    assert facts(Interface(shape=(0, 7), data=(0, False)))[2] == (0, 7)
    assert facts(Interface(shape=(2, 3), strides=(0, FAR // 4), stream=1))[4] == 1
    high = (1 << 64) - 64
    assert facts(Interface(shape=(16, 1), data=(high - 64, False)))[2] == (16, 1)
    assert facts(Interface(stream=2))[4] == 2
    assert facts(Interface(stream=0x7F0012345678))[4] == 0x7F0012345678
    assert facts(Interface(stream=None))[4] == 0


WRONG_VALUES = {
    "negative extent": {"shape": (2, -3)},
    "two negative extents": {"shape": (-2, -3)},
    "too many elements": {"shape": (FAR, 8)},
    "as many as none": {"shape": (1 << 32, 1 << 32)},
    "too many elements of an empty array": {"shape": (0, FAR, 8)},
    "too many bytes": {"shape": (FAR - 1, 2)},
    "beyond the last address": {"data": ((1 << 64) - 8, False)},
    "a stride that is too long": {"strides": (FAR, 4), "shape": (9, 3)},
    "strides that are too long together": {"strides": (FAR, FAR), "shape": (2, 2)},
    "a stride before the first address": {"strides": (-4096, 4), "shape": (3, 1)},
    "the least stride": {"strides": (-(1 << 63), 4), "shape": (3, 1)},
    "the stream that may mean two": {"stream": 0},
    "65 dimensions": {"shape": (1,) * 65},
}


@pytest.mark.parametrize("entries", WRONG_VALUES.values(), ids=WRONG_VALUES)
def test_interfaces_with_impossible_values_are_refused(entries):
    with pytest.raises(ValueError, match="parameter `tensor`"):
        facts(Interface(**entries))


WRONG_TYPES = {
    "no shape": {"shape": None},
    "a list for a shape": {"shape": [2, 3]},
    "a text in the shape": {"shape": (2, "3")},
    "a fraction in the shape": {"shape": (2, 1.5)},
    "a shape beyond all numbers": {"shape": (1 << 80,)},
    "strides of another length": {"strides": (4,)},
    "a number for strides": {"strides": 4},
    "strides beyond all numbers": {"strides": (1 << 70, 4)},
    "no data": {"data": None},
    "one number as data": {"data": 4096},
    "three as data": {"data": (4096, False, 0)},
    "a text as address": {"data": ("4096", False)},
    "a negative address": {"data": (-4096, False)},
    "an address beyond 64 bits": {"data": (1 << 64, False)},
    "no address of elements": {"data": (0, False)},
    "no typestr": {"typestr": None},
    "a dtype for a typestr": {"typestr": np.dtype("f4")},
    "an unknown typestr": {"typestr": "<q9"},
    "objects": {"typestr": "|O"},
    "a mask": {"mask": np.zeros((2, 3), bool)},
    "a stream's name": {"stream": "1"},
    "a negative stream": {"stream": -1},
    "a stream beyond 64 bits": {"stream": 1 << 64},
}


@pytest.mark.parametrize("entries", WRONG_TYPES.values(), ids=WRONG_TYPES)
def test_interfaces_of_wrong_types_are_refused(entries):
    with pytest.raises(TypeError, match="parameter `tensor`"):
        facts(Interface(**entries))


def test_an_interface_that_is_no_dict_is_refused():
    array = Interface()
    array.__cuda_array_interface__ = [("shape", (3,))]
    with pytest.raises(TypeError, match="parameter `tensor`: malformed .*: it is no dict"):
        facts(array)


def test_an_interface_that_raises_says_why():
    class Freed:
        @property
        def __cuda_array_interface__(self):
            raise RuntimeError("its memory was given back\nand more")

    with pytest.raises(TypeError, match="parameter `tensor` .*Freed.*: its memory was given back$"):
        facts(Freed())


@pytest.mark.parametrize("dtype", [np.dtype("f8"), np.dtype("i4"), np.dtype("c8")])
def test_a_dtype_that_contradicts_the_typestr_is_refused(dtype):
    array = Interface()
    array.dtype = dtype
    with pytest.raises(TypeError, match="parameter `tensor`.*typestr is '<f4', its dtype " + dtype.name):
        facts(array)


@pytest.mark.parametrize("number", [-1, 1 << 31, (1 << 31) - 1, 1 << 80])
def test_a_gpu_that_cannot_be_is_refused(number):
    array = Interface()
    array.device = type("Device", (), {"id": number})()
    with pytest.raises(ValueError, match="parameter `tensor` says that it lies on GPU"):
        facts(array)


class HostInterface:
    def __init__(self, **entries):
        self.memory = np.arange(6, dtype="f4")
        address = self.memory.ctypes.data
        whole = {"shape": (2, 3), "typestr": "<f4", "data": (address, False), "version": 3}
        self.__array_interface__ = {**whole, **entries}


@pytest.mark.parametrize(
    "entries",
    [
        {"shape": (2, -3)},
        {"shape": (FAR, 8)},
        {"strides": (FAR, 4), "shape": (9, 3)},
        {"strides": (-FAR, -FAR)},
        {"strides": (4,)},
        {"shape": "23"},
        {"typestr": "<q9"},
        {"data": ("4096", False)},
        {"shape": (2, "3")},
    ],
    ids=str,
)
def test_host_interfaces_that_lie_are_refused(entries):
    assert _core._describe(HostInterface())["bytes"] == np.arange(6, dtype="f4").tobytes()
    with pytest.raises((TypeError, ValueError), match="parameter `tensor`"):
        _core._describe(HostInterface(**entries))


class Capsule:
    """Six floats by DLPack alone; fields as given."""

    def __init__(self, shape=(6,), strides=None, name=b"dltensor", **fields):
        self.memory = (ctypes.c_float * 6)(*range(6))
        self.numbers = [(ctypes.c_int64 * len(n))(*n) if n is not None else None for n in (shape, strides)]
        addresses = [ctypes.addressof(n) if n is not None else None for n in self.numbers]
        whole = {
            "data": ctypes.addressof(self.memory),
            "device_type": 1,
            "ndim": len(shape or ()),
            "code": 2,
            "bits": 32,
            "lanes": 1,
            "shape": addresses[0],
            "strides": addresses[1],
        }
        self.managed = DlTensor(**{**whole, **fields})
        self.name = name

    def __dlpack__(self):
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return make(ctypes.addressof(self.managed), self.name, None)


def test_what_a_capsule_says_is_taken():
    assert _core._describe(Capsule())["bytes"] == np.arange(6, dtype="f4").tobytes()
    assert (
        _core._describe(Capsule((2, 2), (-2, 1), byte_offset=8))["bytes"]
        == np.array([2, 3, 0, 1], "f4").tobytes()
    )
    assert _core._describe(Capsule((), ndim=0))["shape"] == ()


@pytest.mark.parametrize(
    ("kind", "capsule"),
    [
        (ValueError, Capsule((2, -3))),
        (ValueError, Capsule((FAR, 8))),
        (ValueError, Capsule((1 << 32, 1 << 32))),
        (ValueError, Capsule((2, 3), (FAR, 1))),
        (ValueError, Capsule((2, 3), (-FAR, 1))),
        (ValueError, Capsule(ndim=-1)),
        (ValueError, Capsule(ndim=1 << 30)),
        (ValueError, Capsule(byte_offset=(1 << 64) - 8)),
        (ValueError, Capsule(byte_offset=1 << 63, data=1 << 63)),
        (ValueError, Capsule(device_type=2, device_id=-7)),
        (ValueError, Capsule(device_type=2, device_id=(1 << 31) - 1)),
        (TypeError, Capsule(None, ndim=2)),
        (TypeError, Capsule(data=None)),
        (TypeError, Capsule(device_type=0)),
        (TypeError, Capsule(bits=0)),
        (TypeError, Capsule(bits=3)),
        (TypeError, Capsule(name=b"used_dltensor")),
        (TypeError, Capsule(name=b"else")),
    ],
    ids=range(18),
)
def test_capsules_that_lie_are_refused(kind, capsule):
    with pytest.raises(kind, match="parameter `tensor`"):
        _core._describe(capsule)


@pytest.mark.parametrize("answer", [None, 7, "dltensor"])
def test_what_is_no_capsule_is_refused(answer):
    class Other:
        def __dlpack__(self):
            return answer

    with pytest.raises(TypeError, match="parameter `tensor`: __dlpack__ gave"):
        _core._describe(Other())


def test_a_capsule_that_cannot_be_made_says_why():
    class Refusing:
        def __dlpack__(self, **arguments):
            raise BufferError("it is on Mars")

    with pytest.raises(TypeError, match="parameter `tensor` .*Refusing.*: it is on Mars"):
        _core._describe(Refusing())


def test_strides_of_numpy_beyond_the_address_space_are_refused():
    x = np.lib.stride_tricks.as_strided(np.zeros(4), (3, 3), (FAR, 8))
    with pytest.raises(ValueError, match="parameter `tensor` .* beyond what can be addressed"):
        _core._describe(x)
