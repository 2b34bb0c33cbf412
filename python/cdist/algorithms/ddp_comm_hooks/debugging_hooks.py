"""Hooks that send nothing."""

from cdist.parallel.hooks import noop_hook

__all__ = ["noop_hook"]
