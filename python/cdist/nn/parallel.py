"""The names of torch.nn.parallel that cdist offers."""

from cdist.parallel.ddp import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
