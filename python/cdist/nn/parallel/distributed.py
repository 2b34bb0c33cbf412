"""DistributedDataParallel under the longer of torch's two paths."""

from cdist.nn.parallel import DistributedDataParallel, _MixedPrecision

__all__ = ["DistributedDataParallel", "_MixedPrecision"]
