"""Names of backends: which library a group uses for which device."""

import importlib.util
import os
import sys
from datetime import timedelta

__all__ = [
    "Backend",
    "BackendConfig",
    "is_gloo_available",
    "is_nccl_available",
    "is_mpi_available",
    "is_ucc_available",
    "is_xccl_available",
    "is_backend_available",
    "get_default_backend_for_device",
]


class Backend(str):
    """A backend's name in lower case. "gloo" is cdist's CPU backend, "nccl" its GPU backend."""

    UNDEFINED = "undefined"
    GLOO = "gloo"
    NCCL = "nccl"
    UCC = "ucc"
    MPI = "mpi"
    XCCL = "xccl"
    FAKE = "fake"

    backend_list = [UNDEFINED, GLOO, NCCL, XCCL, UCC, MPI, FAKE]
    default_device_backend_map = {"cpu": GLOO, "cuda": NCCL, "xpu": XCCL, "mps": GLOO}
    backend_capability = {
        GLOO: ["cpu", "cuda"],
        NCCL: ["cuda"],
        XCCL: ["xpu"],
        UCC: ["cpu", "cuda"],
        MPI: ["cpu", "cuda"],
    }
    backend_type_map: dict = {}

    def __new__(cls, name: str):
        """Take a name in any case; ValueError for what is not text."""
        if not isinstance(name, str):
            raise ValueError(f"Backend constructor parameter must be string-ish, but got {name!r}")
        known = getattr(cls, name.upper(), None)
        return str.__new__(cls, known if isinstance(known, str) else name.lower())


class BackendConfig:
    """Which backend serves which device: from "gloo", "nccl" or "cpu:gloo,cuda:nccl"."""

    def __init__(self, backend):
        text = str(backend)
        self.device_backend_map: dict[str, Backend] = {}
        if ":" in text:
            for pair in text.lower().split(","):
                device, colon, name = pair.partition(":")
                if not colon or not device or not name or ":" in name:
                    raise ValueError(
                        f"Invalid device:backend pairing: {pair!r} in {text!r}. "
                        "Expected a form like cpu:gloo,cuda:nccl"
                    )
                if device in self.device_backend_map:
                    raise ValueError(f"Duplicate device type {device} in backend string: {text}")
                self.device_backend_map[device] = Backend(name)
        elif text == Backend.UNDEFINED:
            for device in ("cpu", "cuda"):
                self.device_backend_map[device] = Backend(Backend.default_device_backend_map[device])
        else:
            for device in Backend.backend_capability.get(text.lower(), ["cpu", "cuda"]):
                self.device_backend_map[device] = Backend(text)

    def get_device_backend_map(self) -> dict:
        """Return a dict from device type to Backend."""
        return self.device_backend_map

    def __repr__(self):
        return ",".join(f"{device}:{name}" for device, name in self.device_backend_map.items())


def is_gloo_available() -> bool:
    """Return True: the CPU backend is always there."""
    return True


def is_nccl_available() -> bool:
    """Return whether a CUDA driver and NCCL's library can be found. Loads neither."""
    if not os.environ.get("CDIST_CUDA_LIB") and not any(
        os.path.exists(path) for path in ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg")
    ):
        return False
    if os.environ.get("CDIST_NCCL_LIB") or "cupy" in sys.modules or "torch" in sys.modules:
        return True
    try:
        if importlib.util.find_spec("nvidia.nccl") is not None:
            return True
    except ModuleNotFoundError:
        pass
    import ctypes.util

    return ctypes.util.find_library("nccl") is not None


def is_mpi_available() -> bool:
    """Return False: no part of cdist is made of MPI."""
    return False


def is_ucc_available() -> bool:
    """Return False."""
    return False


def is_xccl_available() -> bool:
    """Return False."""
    return False


def is_backend_available(backend: str) -> bool:
    """Return whether a backend, or all parts of "cpu:gloo,cuda:nccl", can be used."""
    text = str(backend).lower()
    if ":" in text:
        return all(
            is_backend_available(name) for name in BackendConfig(text).get_device_backend_map().values()
        )
    if text == "nccl":
        return is_nccl_available()
    return text == "gloo"


def get_default_backend_for_device(device) -> str:
    """Return "gloo" for cpu, "nccl" for cuda. ValueError for devices without one."""
    kind = str(getattr(device, "type", device)).partition(":")[0]
    try:
        return Backend.default_device_backend_map[kind]
    except KeyError:
        raise ValueError(f"Default backend not registered for device : {device}") from None


def default_timeout(backend) -> timedelta:
    """Return the time limit where none is given."""
    from cdist.constants import default_pg_nccl_timeout, default_pg_timeout

    return default_pg_nccl_timeout if backend == "nccl" else default_pg_timeout


def check(backend: str) -> None:
    """Raise for names that nobody offers."""
    if "://" in backend:
        raise AssertionError(
            f"Unknown backend type {backend}: a URL is given as init_process_group(init_method={backend!r})"
        )
    if ":" in backend:
        for name in BackendConfig(backend).get_device_backend_map().values():
            if name not in ("gloo", "nccl"):
                check(name)
        return
    if backend == "nccl" and not is_nccl_available():
        raise RuntimeError(
            "Distributed package doesn't have NCCL built in (no CUDA driver or no libnccl on this machine)"
        )
    if backend in ("mpi", "ucc", "xccl"):
        raise RuntimeError(
            f"Distributed package doesn't have {backend.upper()} built in: use gloo, nccl or None"
        )
    if backend not in ("gloo", "nccl", "undefined"):
        raise AssertionError(f"Unknown backend type {backend}: use gloo (CPU), nccl (GPU) or None")
