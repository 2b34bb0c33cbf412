"""PostLocalSGDOptimizer under the path that torch gives it."""

from cdist.parallel.post_local_optimizer import PostLocalSGDOptimizer

__all__ = ["PostLocalSGDOptimizer"]
