"""Averages every few steps."""

from cdist.parallel.averaging import ModelAverager, PeriodicModelAverager

__all__ = ["ModelAverager", "PeriodicModelAverager"]
