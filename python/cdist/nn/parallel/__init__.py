"""The names of torch.nn.parallel that cdist offers."""

from cdist.parallel.data_parallel import DataParallel, data_parallel
from cdist.parallel.ddp import DistributedDataParallel
from cdist.parallel.values import MixedPrecision

__all__ = ["DataParallel", "DistributedDataParallel", "data_parallel"]

_MixedPrecision = MixedPrecision  # torch's name
