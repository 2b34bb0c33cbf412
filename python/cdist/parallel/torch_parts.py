"""Parts of DistributedDataParallel over torch modules: views into buckets, graphs."""

import dataclasses
import functools

import numpy as np
import torch
from torch._compile import _disable_dynamo

import cdist
from cdist import _core
from cdist.parallel.parameter import dict_like


def untraced(method):
    """Keep torch.compile out of a method and all that it calls.

    It would guard the figures of a step, which change, and compile anew in every one. torch's decorator alone
    would import the compiler, which takes a second, where nobody compiles.
    """
    disabled = _disable_dynamo(method)

    @functools.wraps(method)
    def call(*args):
        return disabled(*args) if torch.compiler.is_dynamo_compiling() else method(*args)

    return call


def name_of(dtype):
    """NumPy's name of a torch dtype."""
    return str(dtype).removeprefix("torch.")


def is_dense(tensor):
    """Tell whether the elements lie in one block without gaps, in any order of dimensions over 1."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(
        (st, sz) for st, sz in zip(tensor.stride(), tensor.size(), strict=True) if sz != 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


def view_like(flat, tensor):
    """Return the elements of `flat` in the shape, and if possible the strides, of `tensor`."""
    if tensor.numel() == 0:
        return torch.empty_like(tensor, requires_grad=False)
    if is_dense(tensor):
        return flat.as_strided(tensor.size(), tensor.stride(), flat.storage_offset())
    return flat.view(tensor.size())


def bucket_tensors(reducer, dtypes, memory=None):
    """Make a flat tensor over each bucket. `memory`: uint8 tensors that hold them; None: the reducer does."""
    tensors = []
    for k, dtype in enumerate(dtypes):
        if memory is not None:
            tensors.append(memory[k].view(dtype))
            continue
        buffer = reducer.bucket(k)
        empty = memoryview(buffer).nbytes == 0
        tensors.append(torch.empty(0, dtype=dtype) if empty else torch.frombuffer(buffer, dtype=dtype))
    return tensors


def tensors_in(value):
    """All tensors in nests of lists, tuples, dicts and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors_in(part)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def reached_parameters(outputs):
    """Ids of the leaf tensors from which the outputs were computed."""
    reached = set()
    todo = []
    for tensor in tensors_in(outputs):
        if tensor.grad_fn is not None:
            todo.append(tensor.grad_fn)
        elif tensor.requires_grad:
            reached.add(id(tensor))
    seen = set(todo)
    while todo:
        node = todo.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            reached.add(id(leaf))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    return reached


def remove_hooks(handles):
    """Take the hooks off their tensors, and empty the list."""
    for handle in handles:
        handle.remove()
    handles.clear()


def group_of(process_group, device_mesh):
    """Return the group that the arguments mean; None and None is the default group."""
    if process_group is not None and device_mesh is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh is not None:
        if device_mesh.ndim != 1:
            raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
        process_group = device_mesh.get_group()
    if device_mesh is not None and process_group is None or isinstance(process_group, int):
        raise ValueError(
            "DistributedDataParallel: this rank is not in the process group (new_group gave it "
            "GroupMember.NON_GROUP_MEMBER): only the members of a group wrap a module for it"
        )
    return cdist.group.WORLD if process_group is None else process_group


def index_of(device):
    """Return the number of a device, which may be one itself."""
    return device if isinstance(device, int) else torch.device(device).index


def map_tensors(function, value):
    """Return the nest of lists, tuples and dicts with `function` applied to each of its tensors."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, part) for part in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(function, part) for part in value)
    if isinstance(value, dict):
        return dict_like(value, {key: map_tensors(function, part) for key, part in value.items()})
    return value


def to_device(value, device):
    """Move the tensors in nests of lists, tuples and dicts to a device."""
    return map_tensors(lambda tensor: tensor.to(device), value)


def all_reduce_max(values, group):
    """Element-wise maximum of a list of 0 and 1 over the ranks. Collective."""
    array = np.array(values, np.uint8)
    if array.size:
        cdist.all_reduce(array, op=cdist.ReduceOp.MAX, group=_core._host_side(group))
    return array.tolist()
