"""Data parallelism: DistributedDataParallel, GradientReducer, joining, communication hooks."""

from cdist.parallel.array_module import no_sync
from cdist.parallel.data_parallel import DataParallel, data_parallel
from cdist.parallel.ddp import DistributedDataParallel
from cdist.parallel.gradients import GradientReducer
from cdist.parallel.join import Join, Joinable, JoinHook
from cdist.parallel.parameter import Parameter

__all__ = [
    "DataParallel",
    "DistributedDataParallel",
    "GradBucket",
    "GradientReducer",
    "Join",
    "JoinHook",
    "Joinable",
    "MixedPrecision",
    "Parameter",
    "data_parallel",
    "no_sync",
]


def __getattr__(name):
    if name == "GradBucket":  # needs torch
        from cdist.parallel.torch_parts import GradBucket

        return GradBucket
    if name == "MixedPrecision":
        from cdist.parallel.mixed_precision import MixedPrecision

        return MixedPrecision
    raise AttributeError(f"module 'cdist.parallel' has no attribute {name!r}")
