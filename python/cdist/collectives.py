"""The collectives.

Those that move arrays are C functions of cdist._core; those made of several calls stand here.
"""

import contextlib
import warnings

from cdist import _core
from cdist._core import (
    _all_gather_base,
    _reduce_scatter_base,
    all_gather,
    all_gather_into_tensor,
    all_reduce,
    all_to_all,
    all_to_all_single,
    barrier,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    scatter,
)
from cdist.constants import ReduceOp

__all__ = [
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_gather_v",
    "gather",
    "gather_into_tensor",
    "gather_single",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "monitored_barrier",
    "all_reduce_coalesced",
    "all_gather_coalesced",
    "_coalescing_manager",
    "_all_gather_base",
    "_reduce_scatter_base",
]

all_gather_single = all_gather_into_tensor
reduce_scatter_single = reduce_scatter_tensor


def _member(group, function):
    """Return the group meant, or None after a warning when the caller is not in it."""
    if group is None:
        group = _core._need_default_group(function)
    if isinstance(group, int):
        world = _core._get_default_group()
        rank = world.rank() if world is not None else -1
        warnings.warn(
            f"Running {function} on global rank {rank} which does not belong to the given group.",
            stacklevel=3,
        )
        return None
    return group


def monitored_barrier(group=None, timeout=None, wait_all_ranks=False) -> None:
    """Return when all ranks have called it, or raise on all of them, naming the ranks that did not.

    Args:
        group: the ranks that take part; None is the default group.
        timeout: seconds or timedelta; None is the group's.
        wait_all_ranks: wait until the end of the time and name all missing ranks, not only the first.

    Raises:
        DistTimeoutError: "Rank N failed to pass monitoredBarrier in T ms".

    """
    group = _member(group, "monitored_barrier")
    if group is not None:
        group._monitored_barrier(timeout, wait_all_ranks)


def gather_into_tensor(
    tensor, gather_tensor=None, dst=None, group=None, async_op=False, group_dst=None, timeout=None
):
    """Gather arrays of one shape into one array on the rank `dst`.

    Args:
        tensor: any shape, the same on all ranks.
        gather_tensor: on `dst` an array of shape ``(ranks * n, …)`` or ``(ranks, n, …)`` for inputs
            ``(n, …)``; None elsewhere.
        dst: global rank; None is 0.
        group: the ranks that take part; None is the default group.
        async_op: return a Work at once.
        group_dst: rank in the group, instead of `dst`.
        timeout: seconds or timedelta; None is the group's.

    Raises:
        ValueError: `gather_tensor` is missing on `dst`, given elsewhere, or of another shape.

    """
    group = _member(group, "gather_into_tensor")
    if group is None:
        return None
    parts = None
    if gather_tensor is not None:
        size, shape = group.size(), tuple(tensor.shape)
        rows = shape[0] if shape else 1
        if tuple(gather_tensor.shape) == (size, *shape):
            parts = [gather_tensor[rank, ...] for rank in range(size)]
        elif shape and tuple(gather_tensor.shape) == (size * rows, *shape[1:]):
            parts = [gather_tensor[rank * rows : (rank + 1) * rows] for rank in range(size)]
        else:
            raise ValueError(
                f"gather_into_tensor: {size} inputs of shape {shape} do not fit gather_tensor of shape "
                f"{tuple(gather_tensor.shape)}"
            )
    return gather(tensor, parts, dst, group, async_op, group_dst, timeout)


gather_single = gather_into_tensor


def _like(tensor, shape):
    """Return a new array of the kind and dtype of `tensor`."""
    if hasattr(tensor, "new_empty"):
        return tensor.new_empty(shape)
    if type(tensor).__module__.partition(".")[0] == "cupy":
        import cupy

        return cupy.empty(shape, tensor.dtype)
    import numpy

    return numpy.empty(shape, numpy.asarray(tensor).dtype)


def all_gather_v(tensor, group=None, timeout=None) -> list:
    """Gather arrays whose shapes may differ between ranks and need not be known before.

    Args:
        tensor: any shape; the same dtype on all ranks.
        group: the ranks that take part; None is the default group.
        timeout: of each of the two steps; seconds or timedelta; None is the group's.

    Returns:
        A list with the array of each rank, of the kind of `tensor` (NumPy, torch, CuPy).

    Raises:
        ValueError: dtypes differ; on all ranks.

    """
    from cdist.objects import all_gather_object

    group = _member(group, "all_gather_v")
    if group is None:
        return []
    seen = [None] * group.size()
    all_gather_object(seen, (str(tensor.dtype).rpartition(".")[2], tuple(tensor.shape)), group=group)
    if len({dtype for dtype, _ in seen}) > 1:
        raise ValueError(
            f"Invalid usage of tensors with different dtypes: found {', '.join(d for d, _ in seen)}"
        )
    outputs = [_like(tensor, shape) for _, shape in seen]
    all_gather(outputs, tensor, group=group, timeout=timeout)
    return outputs


def _join_futures(works, value):
    from cdist.futures import Future

    result = Future()
    left = [len(works)]
    if not works:
        result.set_result(value)

    def one_done(future):
        left[0] -= 1
        if left[0] == 0:
            try:
                for work in works:
                    work.wait()
            except Exception as error:
                result.set_exception(error)
            else:
                result.set_result(value)

    for work in works:
        work.get_future().add_done_callback(one_done)
    return result


@contextlib.contextmanager
def _one_launch(group, tensor):
    """Make operations one launch where `tensor` lies on a GPU; None: where the group has connected GPUs."""
    inner = _core._get_default_group() if group is None else group
    coalesced = _core._gpu_coalesce_begin(inner, tensor)
    try:
        yield
    finally:
        if coalesced:
            _core._gpu_coalesce_end(inner)


def all_reduce_coalesced(tensors, op=ReduceOp.SUM, group=None, async_op=False):
    """Reduce several arrays, each in place. With ``async_op`` returns a Future of the list.

    Args:
        tensors: a list of arrays of one dtype and device.
        op: as in all_reduce.
        group: the ranks that take part; None is the default group.
        async_op: return at once.

    """
    if not isinstance(tensors, (list, tuple)):
        tensors = [tensors]
    group = _member(group, "all_reduce_coalesced")
    if group is None:
        return None
    with _one_launch(group, tensors[0] if len(tensors) else None):
        works = [all_reduce(tensor, op, group, True) for tensor in tensors]
    if async_op:
        return _join_futures(works, list(tensors))
    for work in works:
        work.wait()
    return None


def all_gather_coalesced(output_tensor_lists, input_tensor_list, group=None, async_op=False):
    """Gathers several arrays: ``output_tensor_lists[rank][i]`` becomes the i-th input of that rank.

    With ``async_op`` returns a Future.
    """
    group = _member(group, "all_gather_coalesced")
    if group is None:
        return None
    if not isinstance(input_tensor_list, (list, tuple)) or not isinstance(output_tensor_lists, (list, tuple)):
        raise TypeError("all_gather_coalesced: expected lists of arrays")
    if any(len(outputs) != len(input_tensor_list) for outputs in output_tensor_lists):
        raise ValueError("all_gather_coalesced: every output list must be as long as the list of inputs")
    with _one_launch(group, input_tensor_list[0] if len(input_tensor_list) else None):
        works = [
            all_gather([outputs[i] for outputs in output_tensor_lists], tensor, group, True)
            for i, tensor in enumerate(input_tensor_list)
        ]
    if async_op:
        return _join_futures(works, output_tensor_lists)
    for work in works:
        work.wait()
    return None


class _CoalescingManager:
    """What ``_coalescing_manager`` yields."""

    def __init__(self):
        self.works = []

    def append(self, work):
        """Add a Work to wait for."""
        if work is not None:
            self.works.append(work)

    def wait(self):
        """Wait for what was added."""
        for work in self.works:
            work.wait()


@contextlib.contextmanager
def _coalescing_manager(group=None, device=None, async_ops=False):
    """Mark operations of one group that belong together: on GPUs they are one launch, at the end.

    On the CPU they run as they are called. On GPUs nothing is written before the end, and no Work of an
    operation inside can be waited for until then.

    Args:
        group: None is the default group.
        device: where the operations run; None: on the group's GPU, if it has connected one already.
        async_ops: do not wait for the Works that were appended.

    """
    manager = _CoalescingManager()
    member = _member(group, "_coalescing_manager")
    on_gpu = member is not None and str(device or "cuda").partition(":")[0] == "cuda"
    if on_gpu and device is not None:
        number = str(device).partition(":")[2]  # "cuda", "cuda:1", torch.device
        _core._gpu_open(member, int(number or -1))
    with _one_launch(member, None) if on_gpu else contextlib.nullcontext():
        yield manager
    if not async_ops:
        manager.wait()
