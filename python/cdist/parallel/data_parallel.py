"""Data parallelism within one process: replicas of a module that work in threads."""

import copy
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from cdist.parallel.ddp import is_torch_module
from cdist.parallel.parameter import Parameter, unique_parameters


def scatter(value, chunks, dim=0):
    """Cut arrays, in nests of lists, tuples and dicts, into at most `chunks` parts along `dim`, none empty.

    What is no array, or has no such dimension, is given to every part. Returns a list of values.
    """
    count = _count_chunks(value, chunks, dim)
    return [_part(value, number, count, dim) for number in range(count)]


def _arrays(value):
    if isinstance(value, dict):
        return [a for part in value.values() for a in _arrays(part)]
    if isinstance(value, (list, tuple)):
        return [a for part in value for a in _arrays(part)]
    return [value] if hasattr(value, "shape") else []


def _count_chunks(value, chunks, dim):
    lengths = {a.shape[dim] for a in _arrays(value) if len(a.shape) > dim}
    if len(lengths) > 1:
        raise ValueError(f"arrays of a batch differ in length along dimension {dim}: {sorted(lengths)}")
    return max(1, min(chunks, *lengths)) if lengths else 1


def _part(value, number, count, dim):
    if isinstance(value, dict):
        return {key: _part(part, number, count, dim) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [_part(part, number, count, dim) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if not hasattr(value, "shape") or len(value.shape) <= dim:
        return value
    length = value.shape[dim]
    cut = slice(number * length // count, (number + 1) * length // count)
    return value[(slice(None),) * dim + (cut,)]


def gather(outputs, dim=0):
    """Join the outputs of the parts in order: arrays along `dim`, scalars to a vector, nests part by part."""
    first = outputs[0]
    if isinstance(first, dict):
        return {key: gather([out[key] for out in outputs], dim) for key in first}
    if isinstance(first, (list, tuple)):
        parts = [gather(list(column), dim) for column in zip(*outputs, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    if first is None:
        return None
    if np.ndim(first) == 0:
        return np.array(outputs)
    return np.concatenate(outputs, axis=dim)


class ArrayReplicas:
    """DataParallel over an array module; see there."""

    def __init__(self, module, replicas=2, dim=0):
        if replicas < 1:
            raise ValueError(f"replicas must be at least 1, not {replicas}")
        self.module = module
        self.dim = dim
        named = unique_parameters(module)
        for name, p in named:
            if not isinstance(p, Parameter):
                raise TypeError(
                    f"DataParallel: parameter {name!r} is a {type(p).__name__}, not a cdist.Parameter"
                )
        self._parameters = [p for _, p in named]
        self._replicas = [self._copy() for _ in range(replicas)]

    def _copy(self):
        """Return the module with the same parameter arrays, own gradients and own everything else."""
        own = [Parameter(p.data, p.name, p.requires_grad) for p in self._parameters]
        memo = {id(p): replica for p, replica in zip(self._parameters, own, strict=True)}
        return copy.deepcopy(self.module, memo), own

    def named_parameters(self):
        """(name, parameter) of the module."""
        return self.module.named_parameters()

    def __call__(self, *inputs, **kwargs):
        """Run the module on parts of the inputs in threads and join the outputs in order."""
        return gather(
            self.run(lambda replica, args, named: replica(*args, **named), inputs, kwargs), self.dim
        )

    def run(self, function, *batch):
        """Call ``function(replica, *part)`` in a thread for each part of the batch; return results in order.

        Gradients that the calls gave to their replica's parameters are then added to those of the module, in
        the order of the parts, so that the sums do not depend on timing. The first error of a call is raised
        when all have ended.
        """
        parts = scatter(batch, len(self._replicas), self.dim)
        busy = self._replicas[: len(parts)]
        for _, own in busy:
            for p, mine in zip(self._parameters, own, strict=True):
                mine.data, mine.requires_grad = p.data, p.requires_grad
                mine.zero_grad()
        with ThreadPoolExecutor(len(parts), "cdist replica") as pool:
            tasks = [
                pool.submit(function, replica, *part) for (replica, _), part in zip(busy, parts, strict=True)
            ]
        results = [task.result() for task in tasks]
        for position, p in enumerate(self._parameters):
            for _, own in busy:
                if own[position].grad is not None:
                    p.accumulate_grad(own[position].grad)
        return results


def data_parallel(module, inputs, device_ids=None, output_device=None, dim=0, module_kwargs=None):
    """Run a torch module on parts of the inputs on several GPUs, without wrapping it."""
    import torch

    return torch.nn.parallel.data_parallel(module, inputs, device_ids, output_device, dim, module_kwargs)


class DataParallel:
    """Wraps a module so that one process runs replicas of it on parts of each batch.

    Over a torch.nn.Module: ``DataParallel(module, device_ids=None, output_device=None, dim=0)`` is torch's
    own ``torch.nn.DataParallel`` over this machine's GPUs (no process group is involved); without GPUs it
    calls the module as it is.

    Over an array module, whose parameters are cdist.Parameter: ``DataParallel(module, replicas=2, dim=0)``
    runs replicas in threads that share the parameters' arrays. ``dp(x)`` is the forward pass;
    ``dp.run(function, *batch)`` calls ``function(replica, *part)`` for each part, forward and backward, and
    adds up the gradients in order. Parts are never empty.
    """

    def __new__(cls, module, *args, **kwargs):
        """Make an object of the class that fits the module."""
        if is_torch_module(module):
            import torch

            return torch.nn.DataParallel(module, *args, **kwargs)
        if not callable(getattr(module, "named_parameters", None)):
            raise TypeError(
                f"DataParallel wraps a module with named_parameters(), not {type(module).__name__}"
            )
        return ArrayReplicas(module, *args, **kwargs)
