"""The names of torch.nn.parallel that cdist offers."""

from cdist.parallel.data_parallel import DataParallel, data_parallel
from cdist.parallel.ddp import DistributedDataParallel

__all__ = ["DataParallel", "DistributedDataParallel", "data_parallel"]


def __getattr__(name):
    if name in ("MixedPrecision", "_MixedPrecision"):
        from cdist.parallel.mixed_precision import MixedPrecision

        return MixedPrecision
    raise AttributeError(f"module 'cdist.nn.parallel' has no attribute {name!r}")
