"""An optimizer of torch whose state is shared out over the ranks."""

import torch

import cdist
from cdist.collectives import _coalescing_manager
from cdist.parallel.join import Join, Joinable, JoinHook
from cdist.parallel.torch_parts import map_tensors

__all__ = ["ZeroRedundancyOptimizer"]


def _settings(group):
    return {key: value for key, value in group.items() if key != "params"}


class _Step(JoinHook):
    """A rank without data steps on its share all the same."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def main_hook(self):
        """Take part in one step."""
        self.optimizer._step_together()


class ZeroRedundancyOptimizer(torch.optim.Optimizer, Joinable):
    """Steps on a share of the parameters and takes the others from the ranks that stepped on them.

    Each rank keeps the state of its own share alone. Gradients must be equal on all ranks, as
    DistributedDataParallel makes them.

    Args:
        params: tensors or parameter groups; the same on all ranks.
        optimizer_class: a class of optimizers that treats each parameter by itself.
        process_group: the ranks that share; None is the default group.
        parameters_as_bucket_view: accepted; parameters are sent from where they lie.
        overlap_with_ddp: False; a step within the backward pass is not there.
        defaults: further arguments of `optimizer_class`.

    Attributes:
        optim: the optimizer of this rank's share.

    Raises:
        TypeError: `params` is not an iterable of tensors or of dicts.
        ValueError: there are no parameters, or they are sparse.
        NotImplementedError: ``overlap_with_ddp=True``.

    """

    _uses_gradients = True  # of a rank that has joined, too: see Join

    def __init__(
        self,
        params,
        optimizer_class,
        process_group=None,
        parameters_as_bucket_view=False,
        overlap_with_ddp=False,
        **defaults,
    ):
        if overlap_with_ddp:
            raise NotImplementedError(
                "ZeroRedundancyOptimizer: overlap_with_ddp=True is not there: leave it and "
                "hook_with_zero_step out, and call step() after the backward pass"
            )
        groups = self._checked(params)
        self.process_group = cdist.group.WORLD if process_group is None else process_group
        self.rank = cdist.get_rank(self.process_group)
        self.world_size = cdist.get_world_size(self.process_group)
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self._owners: dict = {}  # parameter → rank, in the order of the parameters
        self._sizes = [0] * self.world_size
        self._gathered = self.optim = None
        Joinable.__init__(self)
        torch.optim.Optimizer.__init__(self, groups, defaults)
        self.optim = optimizer_class([self._share(group) for group in self.param_groups], **defaults)
        self.defaults = self.optim.defaults
        for group, own in zip(self.param_groups, self.optim.param_groups, strict=True):
            group.update(_settings(own))

    @staticmethod
    def _checked(params):
        if isinstance(params, torch.Tensor) or not hasattr(params, "__iter__"):
            raise TypeError(
                "ZeroRedundancyOptimizer: params should be tensors or parameter groups, not "
                f"{torch.typename(params)}"
            )
        groups = list(params)
        if not groups:
            raise ValueError("ZeroRedundancyOptimizer: there are no parameters")
        kinds = {dict if isinstance(g, dict) else torch.Tensor if isinstance(g, torch.Tensor) else None
                 for g in groups}  # fmt: skip
        if len(kinds) > 1 or None in kinds:
            raise TypeError("ZeroRedundancyOptimizer: params should be all tensors or all parameter groups")
        return groups

    # ---- shares

    def add_param_group(self, param_group):
        """Give the optimizer further parameters; the same on all ranks."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if any(p.is_sparse for p in group["params"]):
            raise ValueError("ZeroRedundancyOptimizer: sparse parameters are not supported")
        largest_first = sorted(group["params"], key=lambda p: -p.numel())
        chosen = {}
        for p in largest_first:
            owner = chosen[p] = self._sizes.index(min(self._sizes))
            self._sizes[owner] += p.numel()
        self._owners |= {p: chosen[p] for p in group["params"]}
        if self.optim is not None:
            self.optim.add_param_group(self._share(group))
            group.update(_settings(self.optim.param_groups[-1]))

    def _share(self, group):
        """Return the group with this rank's parameters alone."""
        mine = [p for p in group["params"] if self._owners[p] == self.rank]
        return {**_settings(group), "params": mine}

    # ---- a step

    def step(self, closure=None, **kwargs):
        """Step on this rank's share, and share. Collective.

        Args:
            closure: computes the loss anew; called by the optimizer of each rank.
            kwargs: given to the optimizer's step.

        Returns:
            What the optimizer returns.

        """
        Join.notify_join_context(self)
        return self._step_together(closure, **kwargs)

    def _step_together(self, closure=None, **kwargs):
        for group, own in zip(self.param_groups, self.optim.param_groups, strict=True):
            own.update(_settings(group))  # as schedules have set them
        loss = self.optim.step(**kwargs) if closure is None else self.optim.step(closure=closure, **kwargs)
        for group, own in zip(self.param_groups, self.optim.param_groups, strict=True):
            group.update(_settings(own))
        with _coalescing_manager(self.process_group, async_ops=False) as manager:
            for p, owner in self._owners.items():
                work = cdist.broadcast(p.detach(), group_src=owner, group=self.process_group, async_op=True)
                manager.append(work)
        return loss

    # ---- state

    def consolidate_state_dict(self, to=0):
        """Gather the whole state on group rank `to`, in host memory, for its ``state_dict``. Collective."""
        numbers = {p: number for number, p in enumerate(self._owners)}
        mine = {
            numbers[p]: map_tensors(lambda tensor: tensor.detach().cpu(), state)
            for p, state in self.optim.state.items()
            if p in numbers
        }
        parts = [None] * self.world_size if self.rank == to else None
        cdist.gather_object(mine, parts, group_dst=to, group=self.process_group)
        self._gathered = None
        if parts is not None:
            together = {number: state for part in parts for number, state in part.items()}
            self._gathered = dict(sorted(together.items()))

    def state_dict(self):
        """Return the state that was gathered last, in the form of an optimizer that is not shared out.

        RuntimeError on a rank to which none was gathered.
        """
        if self._gathered is None:
            raise RuntimeError(
                "ZeroRedundancyOptimizer: this rank has its own share of the state alone; call "
                f"consolidate_state_dict(to={self.rank}) on all ranks before"
            )
        return {"state": dict(self._gathered), "param_groups": super().state_dict()["param_groups"]}

    def load_state_dict(self, state_dict):
        """Take this rank's share of a whole state: one of ours, at any world size, or of `optimizer_class`.

        ValueError where it has other numbers of groups or parameters.
        """
        theirs = state_dict["param_groups"]
        if [len(group["params"]) for group in theirs] != [len(g["params"]) for g in self.param_groups]:
            raise ValueError(
                "ZeroRedundancyOptimizer: the state is of another number of groups, or of parameters in one"
            )
        states, groups = {}, []
        for group, mine in zip(theirs, self.param_groups, strict=True):
            own = []
            for number, p in zip(group["params"], mine["params"], strict=True):
                if self._owners[p] != self.rank:
                    continue
                own.append(number)
                if number in state_dict["state"]:
                    states[number] = state_dict["state"][number]
            groups.append({**_settings(group), "params": own})
            mine.update(_settings(group))
        self.optim.load_state_dict({"state": states, "param_groups": groups})

    # ---- uneven inputs

    def join_hook(self, **kwargs):
        """Return what a rank without data does in the place of its steps."""
        return _Step(self)

    @property
    def join_device(self):
        """Device of the collectives."""
        return next(iter(self._owners)).device

    @property
    def join_process_group(self):
        """Group of the collectives."""
        return self.process_group
