"""Shims under the paths of torch.utils: ``cdist.utils.data.distributed``."""

import importlib


def __getattr__(name):
    if name == "data":
        return importlib.import_module("cdist.utils.data")
    raise AttributeError(f"module 'cdist.utils' has no attribute {name!r}")
