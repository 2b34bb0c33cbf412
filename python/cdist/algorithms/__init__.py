"""Algorithms on top of collectives: joining uneven inputs, communication hooks of DistributedDataParallel."""

import importlib


def __getattr__(name):
    if name in ("join", "ddp_comm_hooks"):
        return importlib.import_module(f"cdist.algorithms.{name}")
    raise AttributeError(f"module 'cdist.algorithms' has no attribute {name!r}")
