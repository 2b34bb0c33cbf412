"""Uneven inputs: ranks that run out of data shadow the collectives of those that still train."""

import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import numpy as np

import cdist
from cdist import _core

__all__ = ["Join", "Joinable", "JoinHook"]

SKEW_WARNING_STEPS = 1000


class JoinHook:
    """What a joinable does in the place of a rank that has joined.

    Attributes:
        gives_gradients: another joinable steps on gradients: leave this rank the reduced ones. Set by Join.

    """

    gives_gradients = False

    def main_hook(self):
        """Take part in the collectives of a step; called once for each step of the ranks that still train."""

    def post_hook(self, is_last_joiner):
        """Do what is left when all ranks have joined. `is_last_joiner`: this one trained to the last step."""


@dataclass
class _JoinConfig:
    enable: bool = False
    throw_on_early_termination: bool = False
    is_first_joinable: bool = False
    kwargs: dict = field(default_factory=dict)


class Joinable(ABC):
    """Base of classes that communicate in each step, such as DistributedDataParallel.

    Gives the hook for joined ranks, and calls :meth:`Join.notify_join_context` before the collectives of each
    step.
    """

    @abstractmethod
    def __init__(self):
        super().__init__()
        self._join_config = _JoinConfig()

    @abstractmethod
    def join_hook(self, **kwargs):
        """Return the JoinHook of this object; kwargs are those of Join."""

    @property
    @abstractmethod
    def join_device(self):
        """Device of the collectives."""

    @property
    @abstractmethod
    def join_process_group(self):
        """Process group of the collectives."""


class Join:
    """Context manager around the training loop of one or more joinables.

    As in::

        with Join([ddp]):
            for batch in batches_of_this_rank:
                ...

    When a rank leaves its loop, it goes on calling the hooks of its joinables until all ranks have left
    theirs. With `throw_on_early_termination` every rank raises RuntimeError instead as soon as one has run
    out of data. `enable=False` makes it do nothing. Further keyword arguments go to ``join_hook`` of each
    joinable. All joinables share one group.
    """

    def __init__(self, joinables, enable=True, throw_on_early_termination=False, **kwargs):
        if not joinables:
            raise ValueError("The join context manager requires at least one joinable")
        self._joinables = joinables
        self._enable = enable
        self._throw = throw_on_early_termination
        self._group = joinables[0].join_process_group
        if any(joinable.join_process_group is not self._group for joinable in joinables):
            raise ValueError("Using join context manager with multiple process groups")
        self._hooks = [joinable.join_hook(**kwargs) for joinable in joinables]
        if any(getattr(joinable, "_uses_gradients", False) for joinable in joinables):
            for hook in self._hooks:
                hook.gives_gradients = True
        self._kwargs = kwargs

    def __enter__(self):
        for number, joinable in enumerate(self._joinables):
            joinable._join_config = _JoinConfig(self._enable, self._throw, number == 0, self._kwargs)
        return self

    def __exit__(self, kind, value, traceback):
        try:
            if self._enable and kind is None:
                self._shadow()
        finally:
            for joinable in self._joinables:
                joinable._join_config = _JoinConfig()

    def _shadow(self):
        """Until all ranks have joined, plays the part of one that still trains."""
        is_last_joiner, steps = True, 0
        while self._count_active(self._group) > 0:
            if self._throw:
                self._report_exhausted()
            is_last_joiner = False
            steps += 1
            if steps == SKEW_WARNING_STEPS:
                warnings.warn(
                    f"Detected uneven input skew of greater than {steps}. This means that rank "
                    f"{cdist.get_rank(self._group)} has at least {steps} fewer inputs than other "
                    "currently-active ranks. This level of skew could lead to performance degradation during "
                    "training.",
                    stacklevel=3,
                )
            for hook in self._hooks:
                hook.main_hook()
        for hook in self._hooks:
            hook.post_hook(is_last_joiner)

    @staticmethod
    def _count_active(group):
        count = np.zeros(1, np.int64)
        cdist.all_reduce(count, group=_core._host_side(group))
        return int(count[0])

    def _report_exhausted(self):
        cdist.all_reduce(np.ones(1, np.int64), group=_core._host_side(self._group))
        raise RuntimeError(f"Rank {cdist.get_rank(self._group)} exhausted all inputs.")

    @staticmethod
    def notify_join_context(joinable):
        """Tell joined ranks that this rank starts a step; to be called before its first collective.

        Nothing happens outside of a Join, or for other joinables than the first. Raises RuntimeError if a
        rank has run out of data and this was asked for.
        """
        config = joinable._join_config
        if not config.enable or not config.is_first_joinable:
            return
        group = _core._host_side(joinable.join_process_group)
        active = np.ones(1, np.int64)
        cdist.all_reduce(active, group=group)
        if config.throw_on_early_termination and int(active[0]) < cdist.get_world_size(
            joinable.join_process_group
        ):
            cdist.all_reduce(np.zeros(1, np.int64), group=group)
            raise RuntimeError("Detected at least one rank that exhausted inputs. Throwing across all ranks.")
