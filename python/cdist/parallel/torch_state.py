"""DistributedDataParallel over torch modules: buffers, which parameters train, pickling."""

import contextlib

import numpy as np
import torch

import cdist
from cdist import _core
from cdist.parallel.torch_buffers import KeptBuffers, broadcast_many, broadcast_tensors, buffers_of
from cdist.parallel.torch_comm import BufferCommHookLocation, BufferHook
from cdist.parallel.verify import agree


def _make_again(cls):
    from cdist.parallel.ddp import concrete
    from cdist.parallel.torch_module import TorchDataParallel

    made = concrete(cls, TorchDataParallel)
    return made.__new__(made)


class ModelState:
    """The part of TorchDataParallel that keeps the replicas of a model equal outside of backward."""

    def _buffers_to_sync(self):
        if not self.parameters_to_ignore:
            return buffers_of(self.module)
        named = self.module.named_buffers()
        return [b for name, b in named if name not in self.parameters_to_ignore]

    def will_sync_module_buffers(self):
        """Whether the next forward broadcasts buffers."""
        return self.require_forward_param_sync and self.forward_sync_buffers and self._has_buffers

    @contextlib.contextmanager
    def _explaining_mismatch(self):
        try:
            yield
        except (cdist.MismatchError, cdist.DistTimeoutError) as error:
            if self.forward_sync_buffers and self._has_buffers:
                error.add_note(
                    "The forward of DistributedDataParallel broadcasts the module's buffers, also in an "
                    "evaluation: use ddp.module for an evaluation on one rank."
                )
            raise

    def _sync_buffers(self, after=False):
        """Before the module's forward (or after it, for a hook registered so): make buffers equal."""
        hook = self._buffer_hook
        if after != (hook is not None and hook.after):
            return
        if not self.will_sync_module_buffers():
            return
        if hook is None:
            source = 0
            if self._join_config.enable:
                source = self._highest(cdist.get_rank(self.process_group))
            with self._explaining_mismatch():
                self._broadcast_buffers(source)
            return
        named = self.module.named_buffers()
        futures = list(
            hook.function(hook.state, {n: b for n, b in named if n not in self.parameters_to_ignore}) or []
        )
        if torch.is_grad_enabled():
            self._buffer_futures += futures
        else:
            for future in futures:
                future.wait()

    def _broadcast_buffers(self, source):
        if self.device.type != "cuda" or self.parameters_to_ignore:
            broadcast_tensors(self._buffers_to_sync(), self.process_group, source)
            return
        if self._kept_buffers is None:
            self._kept_buffers = KeptBuffers(self.module)
        self._kept_buffers.broadcast(self.process_group, source)

    def _highest(self, rank):
        highest = np.array([rank], np.int64)
        cdist.all_reduce(highest, op=cdist.ReduceOp.MAX, group=_core._host_side(self.process_group))
        return int(highest[0])

    def _register_buffer_comm_hook(self, state, hook, comm_hook_location=BufferCommHookLocation.POST_FORWARD):
        """Have ``hook(state, {name: buffer})`` make buffers equal, in place of the broadcast from rank 0.

        It is called before or after the module's forward, as `comm_hook_location` (ours or torch's) says, and
        gives futures, for which the end of the backward pass waits, or None.
        """
        if not callable(hook):
            raise TypeError("Communication hook must be callable.")
        after = getattr(comm_hook_location, "name", "POST_FORWARD") == "POST_FORWARD"
        self._buffer_hook = BufferHook(state, hook, after)

    def broadcast_parameters(self, src=0):
        """Give every rank the parameters of group rank `src`. Collective."""
        broadcast_many([p.detach() for _, p in self._named()], self.process_group, src)

    def broadcast_buffers_now(self, src=0):
        """Give every rank the buffers of group rank `src`. Collective."""
        self._broadcast_buffers(src)

    def set_trainable(self, names):
        """From the next step on exactly these parameters need gradients.

        Collective; RuntimeError on all ranks if they differ.
        """
        names = list(names)
        agree(
            sorted(map(repr, names)),
            self.process_group,
            lambda _: "set_trainable: ranks name different parameters.",
        )
        known = dict(self._named())
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ValueError(f"set_trainable: no such parameters: {', '.join(map(repr, unknown))}")
        chosen = set(names)
        for name, p in known.items():
            p.requires_grad_(name in chosen)
            if p.grad is not None:
                p.grad = p.grad.clone() if name in chosen else None
        self._adopt([(name, p) for name, p in known.items() if name in chosen])

    def __getstate__(self):
        if self.process_group is not None and self.process_group is not cdist.group.WORLD:
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group. "
                "That is, when you have called init_process_group and have not passed process_group argument "
                "to DDP constructor"
            )
        gone = (
            "process_group",
            "_sync",
            "_views",
            "_bucket_tensors",
            "_hook_handles",
            "_hook_tables",
            "_announce_pass",
            "_futures",
            "_memory",
            "_params",
            "_low",
            "_kept_buffers",
            "_stepping",
        )
        state = {key: value for key, value in self.__dict__.items() if key not in gone}
        state["_hook"] = state["_buffer_hook"] = None
        return state

    def __setstate__(self, state):
        self.__dict__.update(state)
        self.process_group, self._kept_buffers = cdist.group.WORLD, None
        chosen = set(self._names)
        self._set_up_precision()
        self._adopt([(name, p) for name, p in self._named() if name in chosen])

    def __reduce__(self):
        return _make_again, (self._made_from,), self.__getstate__()
