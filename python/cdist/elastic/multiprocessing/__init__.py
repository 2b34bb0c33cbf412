"""``cdist.elastic.multiprocessing.errors``."""

import importlib


def __getattr__(name):
    if name == "errors":
        return importlib.import_module("cdist.elastic.multiprocessing.errors")
    raise AttributeError(f"module 'cdist.elastic.multiprocessing' has no attribute {name!r}")
