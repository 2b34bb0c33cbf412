"""Averages among few ranks often, among all seldom."""

from cdist.parallel.averaging import HierarchicalModelAverager

__all__ = ["HierarchicalModelAverager"]
