"""Data parallelism: DistributedDataParallel, GradientReducer, joining, communication hooks."""

from cdist.parallel.array_module import no_sync
from cdist.parallel.data_parallel import DataParallel, data_parallel
from cdist.parallel.ddp import DistributedDataParallel
from cdist.parallel.gradients import GradientReducer
from cdist.parallel.join import Join, Joinable, JoinHook
from cdist.parallel.parameter import Parameter
from cdist.parallel.values import GradBucket, MixedPrecision

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
