"""The fake driver and the fake NCCL for Python tests: where they are built, and arrays in the fake GPU's
memory.
"""

import ctypes
import math
import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent


def build(folder):
    """Compile both libraries into a folder; returns the environment that makes ranks use them."""
    flags = ["-std=c11", "-O1", "-g", "-D_GNU_SOURCE", f"-I{ROOT / 'csrc'}", "-fPIC", "-shared"]
    source = ROOT / "tests" / "fake_nccl"
    cc = os.environ.get("CC", "cc")
    cuda, nccl = folder / "libcuda_fake.so", folder / "libnccl_fake.so"
    subprocess.run([cc, *flags, source / "fake_cuda.c", "-lpthread", "-o", cuda], check=True, timeout=60)
    subprocess.run(
        [
            cc,
            *flags,
            source / "fake_nccl.c",
            f"-L{folder}",
            "-lcuda_fake",
            "-Wl,-rpath,$ORIGIN",
            "-lpthread",
            "-o",
            nccl,
        ],
        check=True,
        timeout=60,
    )
    return {
        "CDIST_CUDA_LIB": cuda,
        "CDIST_NCCL_LIB": nccl,
        "FAKE_NCCL_DIR": folder,
        "CDIST_NVRTC_LIB": "/nowhere",
    }


class Device:
    """What CuPy calls a device: its number."""

    def __init__(self, number):
        self.id = number


class Array:
    """An array in the fake GPU's memory; what the interface says is all that cdist sees."""

    def __init__(self, memory, device, base=None):
        self.memory, self.device, self.base = memory, Device(device), base

    @property
    def __cuda_array_interface__(self):
        """The array as version 3 of the interface describes it."""
        return {
            "shape": self.memory.shape,
            "typestr": self.memory.dtype.str,
            "data": (self.memory.__array_interface__["data"][0], False),
            "strides": None if self.memory.flags.c_contiguous else self.memory.strides,
            "stream": None,
            "version": 3,
        }


class Module:
    """The array module that tests/gpu_cases.py asks for, on one fake GPU."""

    name = "fake"

    def __init__(self, device):
        self.device = device
        self.cuda = ctypes.CDLL(os.environ["CDIST_CUDA_LIB"])
        self.context = ctypes.c_void_p()
        self.cuda.cuDevicePrimaryCtxRetain(ctypes.byref(self.context), device)

    def put(self, array):
        """A copy in GPU memory, never given back: the rank ends soon."""
        address = ctypes.c_uint64()
        bytes_ = math.prod(array.shape) * array.itemsize
        self.cuda.cuCtxPushCurrent_v2(self.context)
        self.cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(bytes_))
        self.cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
        raw = (ctypes.c_char * bytes_).from_address(address.value)
        memory = np.frombuffer(raw, array.dtype).reshape(array.shape)
        memory[...] = array
        return Array(memory, self.device)

    def get(self, array):
        """The values once the stream has run dry."""
        self.cuda.cuCtxPushCurrent_v2(self.context)
        self.cuda.fake_stream_drain(None)
        self.cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
        return array.memory.copy()

    def view(self, array, index):
        return Array(array.memory[index], self.device, array)


class Cupy(Module):
    """Arrays that say what CuPy's say, by attributes alone, from a loaded module of its name."""

    name = "cupy"

    def __init__(self, device):
        super().__init__(device)
        self.asked = 0

        class ndarray:  # noqa: N801
            def __init__(self, memory, base=None):
                self.memory, self.base = memory, base
                address = memory.__array_interface__["data"][0]
                self.data = types.SimpleNamespace(ptr=address, device_id=device)
                self.dtype, self.shape, self.strides = memory.dtype, memory.shape, memory.strides

        self.ndarray = ndarray
        cuda = types.SimpleNamespace(get_current_stream=self.current_stream)
        sys.modules["cupy"] = types.SimpleNamespace(ndarray=ndarray, cuda=cuda)

    def current_stream(self):
        """The null stream, as an object."""
        self.asked += 1
        return types.SimpleNamespace(ptr=0)

    def put(self, array):
        return self.ndarray(super().put(array).memory)

    def view(self, array, index):
        return self.ndarray(array.memory[index], array)


class CompiledCupy(Cupy):
    """Arrays whose class has getters in C, as CuPy's has, and a C function that tells the current stream."""

    def __init__(self, device):
        super().__init__(device)
        self.asked_objects = 0

        class ndarray(np.ndarray):  # noqa: N801
            @property
            def data(self):
                address = self.__array_interface__["data"][0]
                return types.SimpleNamespace(ptr=address, device_id=device)

            @property
            def memory(self):
                return self.view(np.ndarray)

        self.ndarray = ndarray
        sys.modules["cupy"].ndarray = ndarray
        self.function = ctypes.PYFUNCTYPE(ctypes.c_ssize_t)(self.current_pointer)
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        self.signature = ctypes.c_char_p(b"intptr_t (void)")
        capsule = make(ctypes.cast(self.function, ctypes.c_void_p), self.signature, None)
        table = {"get_current_stream_ptr": capsule}
        sys.modules["cupy_backends.cuda.stream"] = types.SimpleNamespace(__pyx_capi__=table)

    def current_stream(self):
        """What is not to be asked."""
        self.asked_objects += 1
        return super().current_stream()

    def current_pointer(self):
        """The null stream, as a number."""
        self.asked += 1
        return 0

    def put(self, array):
        return Module.put(self, array).memory.view(self.ndarray)

    def view(self, array, index):
        return array[index]
