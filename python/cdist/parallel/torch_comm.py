"""Communication hooks of DistributedDataParallel over torch modules: called in place of reducing a bucket."""

import enum
import inspect
from dataclasses import dataclass

import torch

from cdist.parallel.torch_parts import all_reduce_max, untraced
from cdist.parallel.values import GradBucket


class BufferCommHookLocation(enum.Enum):
    """When a buffer hook is called: before or after the module's forward."""

    PRE_FORWARD = enum.auto()
    POST_FORWARD = enum.auto()


@dataclass(frozen=True)
class BufferHook:
    """A hook that makes buffers equal, its state, and whether it is called after the module's forward."""

    state: object
    function: object
    after: bool


def _check_hook(hook):
    """Raise TypeError or ValueError for what cannot be called with a state and a bucket, as annotated.

    The call is by position: unlike torch, which looks for a parameter `bucket`, any names do.
    """
    if not callable(hook):
        raise TypeError("Communication hook must be callable.")
    try:
        signature = inspect.signature(hook)
    except ValueError:  # a callable in C that does not tell
        return
    bucket = object()
    try:
        given = signature.bind(None, bucket).arguments
    except TypeError as error:
        raise TypeError(
            f"register_comm_hook: a hook is called as hook(state, bucket), but this one's parameters are "
            f"{signature} ({error}): give it two that can be passed by position, the bucket second"
        ) from None
    named = next((name for name, value in given.items() if value is bucket), None)
    taker = signature.parameters.get("bucket") or signature.parameters.get(named)
    kind = inspect._empty if taker is None else taker.annotation
    if kind not in (inspect._empty, GradBucket) and "GradBucket" not in str(kind):
        raise ValueError("Communication hook: bucket annotation should be GradBucket.")
    promised = signature.return_annotation
    if promised is not inspect._empty and "Future" not in str(promised):
        raise ValueError(
            "Communication hook: return annotation should be torch.futures.Future or cdist.Future."
        )


class CommHooks:
    """The part of TorchDataParallel that gives full buckets to a hook."""

    def register_comm_hook(self, state, hook):
        """Replace the reduction of buckets: ``hook(state, bucket)`` gives a future of the flat tensor."""
        _check_hook(hook)
        if self._hook is not None:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        if self._sparse:
            raise RuntimeError(
                "register_comm_hook: sparse gradients (embeddings made with sparse=True) are in no bucket"
            )
        self._hook = (state, hook)

    def _register_builtin_comm_hook(self, kind):
        from cdist.parallel import hooks

        self.register_comm_hook(self.process_group, hooks.builtin(kind))

    @untraced
    def _run_hook(self, number):
        inside = self._members[number]
        bucket = GradBucket(
            number,
            self._bucket_tensors[number],
            [self._views[index] for index in inside],
            [self._params[index] for index in inside],
            number == len(self._members) - 1,
        )
        state, hook = self._hook
        self._times.hook_begins(number)
        with torch.no_grad():
            future = hook(state, bucket)
        if not callable(getattr(future, "wait", None)) or not callable(getattr(future, "then", None)):
            raise RuntimeError(
                "register_comm_hook: the callback must return a torch.futures.Future object, but got "
                f"{type(future).__module__}.{type(future).__qualname__}"
            )
        self._futures.append((number, future))

    def _finish_hooks(self):
        """Wait for the hooks' results. A missing gradient must become an error on every rank: ask all."""
        filled = self._sync.reducer.fill(False)
        self._sync._hand_out()
        futures, self._futures = self._futures, []
        with torch.no_grad():
            for number, future in futures:
                value = future.wait()
                value = value[0] if isinstance(value, (list, tuple)) else value
                buffer = self._bucket_tensors[number]
                if value.data_ptr() != buffer.data_ptr():
                    buffer.copy_(value.view_as(buffer))
        self._sync.steps += 1
        if all_reduce_max([filled > 0 and not self._join_config.enable], self.process_group)[0]:
            raise RuntimeError(self._sync.missing_text())
