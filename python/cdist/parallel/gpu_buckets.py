"""Gradients in GPU memory: what is known of them, their buckets, and the copies between the two."""

import sys
from dataclasses import dataclass

import numpy as np

from cdist import _core

__all__ = [
    "Facts",
    "GpuBuckets",
    "empty",
    "empty_like",
    "facts_of",
    "framework_of",
    "is_on_gpu",
    "same_place",
]

_CUDA, _CUDA_MANAGED = 2, 13  # kinds of devices in DLPack


@dataclass(frozen=True)
class Facts:
    """What an array in GPU memory says of itself.

    The index of its GPU (-1: unknown), dtype by name, shape, bytes of an element, its framework's stream.
    """

    index: int
    dtype: str
    shape: tuple
    item_bytes: int
    stream: int

    @property
    def size(self):
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))


def framework_of(array):
    """Name the package that the array's type belongs to."""
    return type(array).__module__.partition(".")[0]


def is_on_gpu(array):
    """Tell whether an array lies in GPU memory and can be written there.

    JAX's and tinygrad's cannot: they go through host memory, as new arrays.
    """
    if array is None or isinstance(array, np.ndarray) or np.isscalar(array):
        return False
    framework = framework_of(array)
    if framework in ("jax", "jaxlib", "tinygrad"):
        return False
    if framework == "torch":
        return array.is_cuda
    if hasattr(array, "__cuda_array_interface__"):
        return True
    where = getattr(array, "__dlpack_device__", None)
    return where is not None and where()[0] in (_CUDA, _CUDA_MANAGED)


def _plain(array):
    """Take a torch tensor out of its graph; other arrays as they are."""
    return array.detach() if framework_of(array) == "torch" else array


def facts_of(array):
    """Facts of an array that :func:`is_on_gpu`."""
    return Facts(*_core._gpu_facts(_plain(array)))


def same_place(named):
    """Find the GPU that all of these (name, array) lie on; None: all lie in host memory.

    Raises TypeError where some lie on a GPU and some do not, ValueError where they lie on several GPUs.
    """
    on_gpu = [(name, is_on_gpu(array)) for name, array in named]
    if not any(there for _, there in on_gpu):
        return None
    if not all(there for _, there in on_gpu):
        here = next(name for name, there in on_gpu if not there)
        there = next(name for name, there in on_gpu if there)
        raise TypeError(
            f"{here} lies in host memory, {there} on a GPU: the gradients of one reducer lie in one place; "
            "make a reducer for each"
        )
    found = {facts_of(array).index: name for name, array in reversed(named)}
    if len(found) > 1:
        (first, a), (second, b) = sorted(found.items())[:2]
        raise ValueError(f"{a} lies on GPU {first}, {b} on GPU {second}: a rank uses one GPU")
    return next(iter(found))


def empty(framework, shape, dtype, index, group=None):
    """Return an uninitialised array on this rank's GPU `index`, of a package's kind or our own."""
    if framework == "cupy":
        return sys.modules["cupy"].empty(shape, dtype)
    if framework == "torch":
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, dtype), device=torch.device("cuda", index))
    from cdist import cuda

    return cuda.empty(shape, dtype, group)


def empty_like(example):
    """Return an uninitialised array of the kind of `example`, in GPU memory."""
    facts = facts_of(example)
    return empty(framework_of(example), facts.shape, facts.dtype, facts.index)


class _Memory:
    """Plain memory on the group's GPU; it may be dropped while the GPU still works with it."""

    def __init__(self, group, size):
        self.address, self._owner = _core._gpu_alloc(group, size, True)


class _Slot:
    """A gradient's place, as CuPy takes it without a copy; keeps the memory."""

    def __init__(self, memory, address, shape, dtype):
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": np.dtype(dtype).str,
            "data": (address, False),
            "strides": None,
            "stream": None,
            "version": 3,
        }


class GpuBuckets:
    """Memory of buckets on this rank's GPU, and the copies of arrays to and from their places there.

    Connects the group's GPUs if that was not done: collective.

    Args:
        group: None is the default group.
        index: of the GPU on which the arrays lie; -1: unknown.

    Attributes:
        index: of the GPU on which the group runs.

    Raises:
        ValueError: the group's part of this rank runs on another GPU.
        TypeError: no NCCL here.

    """

    def __init__(self, group, index):
        self.group = _core._get_default_group() if group is None else group
        found = _core._gpu_open(self.group, index)["index"]
        if index not in (-1, found):
            raise ValueError(
                f"the arrays lie on GPU {index}, but this rank's part of the group runs on GPU {found}"
            )
        self.index = found
        self._memory = []
        self._places = self._bytes = None

    def allocate(self, sizes):
        """Addresses of buckets of these sizes in bytes; they are given back with this object."""
        self._memory = [_Memory(self.group, size) for size in sizes]
        return [memory.address for memory in self._memory]

    def lay_out(self, reducer, gradients):
        """Note where each Gradient lies."""
        places = [reducer.place(index) for index in range(len(gradients))]
        self._places = [self._memory[bucket].address + offset for bucket, offset in places]
        self._bytes = [gradient.count * gradient.item_bytes for gradient in gradients]

    def views(self, shapes, dtypes, example):
        """CuPy arrays over the places; `example` is of the kind that parameters are."""
        if framework_of(example) != "cupy":
            raise TypeError(
                f"cdist.Parameter over {type(example).__module__}.{type(example).__name__}: gradients in GPU "
                "memory are added up by CuPy alone; give .grad by a parameter class of your own and call "
                "synchronize()"
            )
        memory, asarray = self._memory, sys.modules["cupy"].asarray
        return [
            asarray(_Slot(memory, address, shape, dtype))
            for address, shape, dtype in zip(self._places, shapes, dtypes, strict=True)
        ]

    def zero(self, indices, stream):
        """Enqueue zeros to these places."""
        _core._gpu_pack(
            self.group,
            [None] * len(indices),
            [self._places[index] for index in indices],
            [self._bytes[index] for index in indices],
            stream,
            False,
        )

    def pack(self, arrays, stream):
        """Enqueue copies of the arrays to their places, contiguous ones by one kernel; None: zeros."""
        _core._gpu_pack(
            self.group, list(map(_plain_or_none, arrays)), self._places, self._bytes, stream, False
        )

    def unpack(self, arrays, stream):
        """Enqueue copies from their places to the arrays; None: left out."""
        chosen = [index for index, array in enumerate(arrays) if array is not None]
        _core._gpu_pack(
            self.group,
            [_plain(arrays[index]) for index in chosen],
            [self._places[index] for index in chosen],
            [self._bytes[index] for index in chosen],
            stream,
            True,
        )


def _plain_or_none(array):
    return None if array is None else _plain(array)
