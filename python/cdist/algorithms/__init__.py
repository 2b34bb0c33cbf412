"""Algorithms on top of collectives: uneven inputs, communication hooks, averages of models."""

import importlib


def __getattr__(name):
    if name in ("join", "ddp_comm_hooks", "model_averaging"):
        return importlib.import_module(f"cdist.algorithms.{name}")
    raise AttributeError(f"module 'cdist.algorithms' has no attribute {name!r}")
