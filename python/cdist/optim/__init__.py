"""Optimizers of torch that communicate: PostLocalSGDOptimizer, ZeroRedundancyOptimizer."""

import importlib

_HOMES = {
    "PostLocalSGDOptimizer": "cdist.parallel.post_local_optimizer",
    "ZeroRedundancyOptimizer": "cdist.parallel.zero",
}


def __getattr__(name):
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'cdist.optim' has no attribute {name!r}")
