"""DistributedSampler under torch's path."""

from cdist.sampler import DistributedSampler

__all__ = ["DistributedSampler"]
