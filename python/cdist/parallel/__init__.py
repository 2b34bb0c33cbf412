"""Data parallelism: DistributedDataParallel, GradientReducer, DataParallel, joining, communication hooks."""

from cdist.parallel.array_module import Parameter, no_sync
from cdist.parallel.ddp import DistributedDataParallel
from cdist.parallel.gradients import GradientReducer
from cdist.parallel.join import Join, Joinable, JoinHook

__all__ = [
    "DistributedDataParallel",
    "GradientReducer",
    "Join",
    "JoinHook",
    "Joinable",
    "Parameter",
    "no_sync",
]
