"""Modules that talk: ``cdist.nn.parallel.DistributedDataParallel``, ``cdist.nn.SyncBatchNorm``."""

import importlib


def __getattr__(name):
    if name == "SyncBatchNorm":
        from cdist.parallel.sync_batchnorm import SyncBatchNorm

        return SyncBatchNorm
    if name == "parallel":
        return importlib.import_module("cdist.nn.parallel")
    raise AttributeError(f"module 'cdist.nn' has no attribute {name!r}")
