"""Communication hooks for DistributedDataParallel over torch modules: what is sent for plain gradients.

A hook is called as ``hook(state, bucket)`` when a bucket is full and gives a future of the reduced flat
tensor. `state` of the simple hooks is the process group (None: the default one).
"""

import enum
import functools
import os

import torch

import cdist
from cdist.parallel.values import GradBucket

__all__ = [
    "BuiltinCommHookType",
    "DDPCommHookType",
    "Later",
    "PostLocalSGDState",
    "allreduce_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "noop_hook",
    "post_localSGD_hook",
    "register_ddp_comm_hook",
]


class Later:
    """A future whose callbacks run in the thread that waits for it: no other thread is needed."""

    def __init__(self, work, compute):
        self._work = work
        self._compute = compute
        self._result = None
        self._is_done = False

    @classmethod
    def of(cls, value):
        """Return a future that has its value already."""
        return cls(None, lambda: value)

    def wait(self):
        """Wait for the operation and return the value."""
        if not self._is_done:
            if self._work is not None:
                self._work.wait()
            self._result = self._compute()
            self._is_done = True
            self._work = self._compute = None
        return self._result

    value = wait

    def done(self):
        """Return whether waiting would not block."""
        return self._is_done or self._work is None or self._work.is_completed()

    def then(self, callback):
        """Return the future of ``callback(self)``."""
        return Later(None, lambda: callback(self._waited()))

    def _waited(self):
        self.wait()
        return self


def average(group, tensor):
    """Return the future of the mean of `tensor` over the ranks, in place."""
    work = cdist.all_reduce(tensor, op=cdist.ReduceOp.AVG, group=group, async_op=True)
    return Later(work, lambda: tensor)


def allreduce_hook(process_group, bucket: GradBucket):
    """Average gradients: the same as without a hook."""
    return average(process_group, bucket.buffer())


def noop_hook(process_group, bucket: GradBucket):
    """Send nothing: to measure what communication costs."""
    return Later.of(bucket.buffer())


def _compressed(process_group, bucket, dtype):
    buffer = bucket.buffer()
    small = buffer.to(dtype)
    return average(process_group, small).then(lambda future: buffer.copy_(future.value()))


def fp16_compress_hook(process_group, bucket: GradBucket):
    """Send gradients as float16; sums are taken in float32 and rounded once."""
    return _compressed(process_group, bucket, torch.float16)


def bf16_compress_hook(process_group, bucket: GradBucket):
    """Send gradients as bfloat16; sums are taken in float32 and rounded once."""
    return _compressed(process_group, bucket, torch.bfloat16)


def _wrapper(hook, dtype):
    def compressed(state, bucket: GradBucket):
        buffer = bucket.buffer()
        bucket.set_buffer(buffer.to(dtype))

        def decompress(future):
            value = future.value()
            return buffer.copy_(value[0] if isinstance(value, (list, tuple)) else value)

        return hook(state, bucket).then(decompress)

    return compressed


def fp16_compress_wrapper(hook):
    """Make another hook (PowerSGD, …) work on float16."""
    return _wrapper(hook, torch.float16)


def bf16_compress_wrapper(hook):
    """Make another hook work on bfloat16."""
    return _wrapper(hook, torch.bfloat16)


class PostLocalSGDState:
    """State of post_localSGD_hook: global averages until `start_localSGD_iter`, then only within `subgroup`.

    `subgroup` None: the ranks of this host, as many as LOCAL_WORLD_SIZE says, otherwise as it has GPUs.
    `post_local_gradient_allreduce` False: nothing is sent afterwards. Models are to be averaged from time to
    time by the caller (cdist.algorithms.model_averaging).
    """

    def __init__(self, process_group, subgroup, start_localSGD_iter, post_local_gradient_allreduce=True):
        self.process_group = process_group
        self.subgroup = subgroup
        self.start_localSGD_iter = start_localSGD_iter
        self.post_local_gradient_allreduce = post_local_gradient_allreduce
        self.iter = 0

    def maybe_increase_iter(self, bucket):
        """Count a step at its last bucket."""
        if bucket.is_last():
            self.iter += 1


def post_localSGD_hook(state: PostLocalSGDState, bucket: GradBucket):
    """Average globally at first, later within a subgroup."""
    if state.iter < state.start_localSGD_iter:
        state.maybe_increase_iter(bucket)
        return average(state.process_group, bucket.buffer())
    if not state.post_local_gradient_allreduce:
        return Later.of(bucket.buffer())
    if state.subgroup is None:
        size = os.environ.get("LOCAL_WORLD_SIZE")
        state.subgroup, _ = cdist.new_subgroups(int(size) if size else None, group=state.process_group)
    return average(state.subgroup, bucket.buffer())


class BuiltinCommHookType(enum.Enum):
    """Hooks that torch implements in C++."""

    ALLREDUCE = 0
    FP16_COMPRESS = 1


def builtin(kind):
    """Return the hook of a BuiltinCommHookType (of ours or of torch's)."""
    table = {"ALLREDUCE": allreduce_hook, "FP16_COMPRESS": fp16_compress_hook}
    return table[getattr(kind, "name", str(kind)).rpartition(".")[2]]


def _register(model, state=None, *, hook):
    model.register_comm_hook(state if state is not None else model.process_group, hook)


def _register_quantization(model, state=None, *, name):
    from cdist.parallel import quantization

    _register(model, state, hook=getattr(quantization, name))


def _register_power(model, state=None, *, name, rank):
    from cdist.parallel import powersgd

    if not isinstance(state, powersgd.PowerSGDState):
        state = powersgd.PowerSGDState(state, matrix_approximation_rank=rank)
    _register(model, state, hook=getattr(powersgd, name))


def _member(register, **kwargs):
    return enum.member(functools.partial(register, **kwargs))


class DDPCommHookType(enum.Enum):
    """Hooks by name. A value registers its hook: ``DDPCommHookType.NOOP.value(model=ddp, state=group)``.

    The state of PowerSGD hooks is a process group (None: the model's) or a PowerSGDState, which also says
    when they begin; that of POST_LOCAL_SGD is a PostLocalSGDState.
    """

    ALLREDUCE = _member(_register, hook=allreduce_hook)
    FP16_COMPRESS = _member(_register, hook=fp16_compress_hook)
    BF16_COMPRESS = _member(_register, hook=bf16_compress_hook)
    QUANTIZE_PER_TENSOR = _member(_register_quantization, name="quantization_pertensor_hook")
    QUANTIZE_PER_CHANNEL = _member(_register_quantization, name="quantization_perchannel_hook")
    POWER_SGD = _member(_register_power, name="powerSGD_hook", rank=1)
    POWER_SGD_RANK2 = _member(_register_power, name="powerSGD_hook", rank=2)
    BATCHED_POWER_SGD = _member(_register_power, name="batched_powerSGD_hook", rank=1)
    BATCHED_POWER_SGD_RANK2 = _member(_register_power, name="batched_powerSGD_hook", rank=2)
    POST_LOCAL_SGD = _member(_register, hook=post_localSGD_hook)
    NOOP = _member(_register, hook=noop_hook)


def register_ddp_comm_hook(comm_hook_type, model, state=None):
    """Register the hook that a DDPCommHookType names. `state`: see there; None: the model's process group."""
    comm_hook_type.value(model=model, state=state)
