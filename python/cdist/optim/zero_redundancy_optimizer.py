"""ZeroRedundancyOptimizer under the path that torch gives it."""

from cdist.parallel.zero import ZeroRedundancyOptimizer

__all__ = ["ZeroRedundancyOptimizer"]
