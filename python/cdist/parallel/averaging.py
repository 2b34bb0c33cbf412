"""Averages of models instead of gradients: what post-local and hierarchical SGD do every few steps."""

import warnings
from abc import ABC, abstractmethod

import cdist

__all__ = [
    "HierarchicalModelAverager",
    "ModelAverager",
    "PeriodicModelAverager",
    "average_parameters",
    "average_parameters_or_parameter_groups",
    "get_params_to_average",
]


def average_parameters(params, process_group):
    """Replace each parameter's values by their mean over the ranks of a group. Collective.

    Args:
        params: an iterable of parameters (torch's, :class:`cdist.Parameter`, anything with ``.data``): the
            same number, shapes and dtypes on all ranks. Their memory stays, so views of it see the mean.
        process_group: the ranks that take part; None is the default group. Elsewhere nothing happens.

    Raises:
        MismatchError: on all ranks, where the parameters of ranks differ.

    """
    if process_group is cdist.GroupMember.NON_GROUP_MEMBER:
        return
    kinds: dict = {}
    for data in (p.data for p in params):
        kinds.setdefault((str(data.dtype), str(getattr(data, "device", "cpu"))), []).append(data)
    for same in kinds.values():
        cdist.all_reduce_coalesced(same, op=cdist.ReduceOp.AVG, group=process_group)


def get_params_to_average(params):
    """Return the list of those parameters that have a gradient.

    Args:
        params: parameters, or parameter groups of an optimizer (dicts with ``'params'``), or both.

    Raises:
        NotImplementedError: something else.

    """
    found = []
    for param in params:
        if isinstance(param, dict):
            found += [p for p in param["params"] if p.grad is not None]
        elif hasattr(param, "data") and hasattr(param, "grad"):
            found += [param] if param.grad is not None else []
        else:
            raise NotImplementedError(
                "averages of models take parameters or an optimizer's param_groups, not "
                f"{type(param).__name__}"
            )
    return found


def average_parameters_or_parameter_groups(params, process_group):
    """Average those parameters that have a gradient; see the two functions that it is made of."""
    average_parameters(get_params_to_average(params), process_group)


def _check(warmup_steps):
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps should not be negative, not {warmup_steps}")


def _warn_of_every_step(which):
    warnings.warn(
        f"{which} is 1: parameters then travel in every step, as gradients do under DistributedDataParallel, "
        "which is enough without averages of the model",
        stacklevel=3,
    )


class ModelAverager(ABC):
    """Base of averagers.

    Args:
        process_group: the ranks whose models are averaged; None is the default group.

    Attributes:
        step: how often ``average_parameters`` was called.

    """

    def __init__(self, process_group=None):
        self.process_group = cdist.group.WORLD if process_group is None else process_group
        self.step = 0

    @abstractmethod
    def average_parameters(self, params):
        """Count a step, and average in it if it is due; `params`: parameters or parameter groups."""


class PeriodicModelAverager(ModelAverager):
    """Averages parameters in step `warmup_steps` (counted from 0) and in every `period`-th after it.

    As in::

        averager = PeriodicModelAverager(period=4, warmup_steps=100)
        for batch in loader:
            ...
            optimizer.step()
            averager.average_parameters(model.parameters())

    `warmup_steps` is to be the ``start_localSGD_iter`` of the hook's PostLocalSGDState. Parameters without a
    gradient are left as they are.

    Args:
        period: steps from one average to the next.
        warmup_steps: steps before the first one.
        process_group: as in ModelAverager.

    Raises:
        ValueError: a period below 1, a negative number of steps.

    """

    def __init__(self, period, warmup_steps=0, process_group=None):
        super().__init__(process_group)
        _check(warmup_steps)
        if period < 1:
            raise ValueError(f"period should be 1 or more, not {period}")
        if period == 1:
            _warn_of_every_step("period")
        self.warmup_steps = warmup_steps
        self.period = period

    def average_parameters(self, params):
        """Count a step, and average in it if it is due (collective); see the class."""
        since = self.step - self.warmup_steps
        if since >= 0 and since % self.period == 0:
            average_parameters_or_parameter_groups(params, self.process_group)
        self.step += 1


class HierarchicalModelAverager(ModelAverager):
    """Averages parameters among few ranks often, and among more of them less often.

    Args:
        period_group_size_dict: {period: number of ranks}, in ascending order; the last number is the size of
            `process_group`. Groups of fewer are consecutive ranks of it. In a step that several periods
            divide, the largest counts.
        warmup_steps: steps, counted from 0, in which nothing is averaged.
        process_group: as in ModelAverager.

    Attributes:
        period_process_group_dict: {period: this rank's group}.

    Raises:
        ValueError: no period or one below 1, a size that does not divide that of `process_group`, a last one
            that is not it, a negative number of steps.

    """

    def __init__(self, period_group_size_dict=None, warmup_steps=0, process_group=None):
        super().__init__(process_group)
        if not period_group_size_dict:
            raise ValueError(
                "period_group_size_dict should name a period at least: {period: number of ranks}"
            )
        _check(warmup_steps)
        self._periods = list(period_group_size_dict)
        if min(self._periods) <= 0:
            raise ValueError(f"periods should be 1 or more, not {min(self._periods)}")
        if self._periods[-1] == 1:
            _warn_of_every_step("the last period")
        sizes, whole = list(period_group_size_dict.values()), cdist.get_world_size(self.process_group)
        if sizes[-1] != whole:
            raise ValueError(
                f"the last period should be that of all {whole} ranks of process_group, not of {sizes[-1]}"
            )
        self.warmup_steps = warmup_steps
        self.period_process_group_dict = {
            period: self.process_group
            if size == whole
            else cdist.new_subgroups(size, group=self.process_group)[0]
            for period, size in period_group_size_dict.items()
        }

    def _find_process_group(self):
        for period in reversed(self._periods):
            if self.step % period == 0:
                return self.period_process_group_dict[period]
        return None

    def average_parameters(self, params):
        """Count a step, and average in it if it is due (collective); see the class."""
        group = self._find_process_group() if self.step >= self.warmup_steps else None
        if group is not None:
            average_parameters_or_parameter_groups(params, group)
        self.step += 1
