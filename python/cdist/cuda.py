"""Memory on this rank's GPU that NCCL has registered."""

import math
from numbers import Integral

import numpy

from cdist import _core

__all__ = ["CudaArray", "empty"]


class _Device:
    """The GPU of an array, as CuPy describes one."""

    def __init__(self, index):
        self.id = index


class CudaArray:
    """A C-contiguous array in GPU memory, which ``cupy.asarray`` and ``torch.as_tensor`` take without a copy.

    Attributes:
        shape: tuple of ints.
        dtype: numpy.dtype.
        device: has the GPU's index as ``id``.

    """

    def __init__(self, group, shape, dtype):
        self.shape, self.dtype = shape, dtype
        self.device = _Device(_core._gpu_open(group, -1)["index"])
        self._address, self._owner = _core._gpu_alloc(group, math.prod(shape) * dtype.itemsize)

    @property
    def __cuda_array_interface__(self):
        """Version 3 of the interface: the memory, in order with the legacy default stream."""
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self._address, False),
            "strides": None,
            "stream": None,
            "version": 3,
        }

    def __repr__(self):
        return f"CudaArray(shape={self.shape}, dtype={self.dtype}, device={self.device.id})"


def empty(shape, dtype="float32", group=None) -> CudaArray:
    """Return an uninitialised array in GPU memory that is registered with the group's communicator.

    The first call on a group that has no GPU connection yet makes one, collectively. The array may be dropped
    while the GPU still works with it, and outlives the group: its memory is given back by a later call.

    Args:
        shape: an int or a tuple of ints.
        dtype: anything that numpy.dtype takes, without Python objects.
        group: whose GPU; None is the default group's.

    Raises:
        ValueError: there is no default group.
        TypeError: Python objects; no GPU or no NCCL here.
        MemoryError: the GPU is full.

    """
    dtype = numpy.dtype(dtype)
    if dtype.hasobject:
        raise TypeError(f"Python objects cannot lie in GPU memory (dtype {dtype})")
    if group is None:
        group = _core._need_default_group("cuda.empty")
    return CudaArray(group, (shape,) if isinstance(shape, Integral) else tuple(shape), dtype)
