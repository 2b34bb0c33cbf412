"""What a torch rank that ran out of data does in the place of its steps."""

import numpy as np
import torch

import cdist
from cdist import _core
from cdist.parallel.join import JoinHook
from cdist.parallel.synchronizer import HAND_OUT, REDUCE
from cdist.parallel.torch_parts import all_reduce_max


class TorchJoinHook(JoinHook):
    """Shadows the collectives of a step of the ranks that still train."""

    def __init__(self, ddp):
        self.ddp = ddp

    def main_hook(self):
        """Take part in one step with zeros."""
        ddp = self.ddp
        flags = np.zeros(3, np.int64)
        cdist.all_reduce(flags, group=_core._host_side(ddp.process_group))
        sync = ddp._sync
        sync.set_divisor(None if ddp._divide_by_all else float(flags[0]))
        if flags[1] and sync.wants_replan() and ddp._may_replan():
            ddp._replan()
        if flags[2]:
            ddp._broadcast_buffers(ddp._highest(-1))
        if not flags[1]:
            return
        self._keep_gradients()
        if ddp.reduce == "weights":
            sync.weight = 0.0
        if ddp.device.type == "cuda":
            sync.reducer.set_stream(torch.cuda.current_stream(ddp.device).cuda_stream)
            for flat in ddp._bucket_tensors:
                flat.zero_()
        sync.begin(HAND_OUT if ddp._hook else REDUCE)
        if ddp._hook:
            ddp._finish_hooks()
        else:
            sync.finish(expected=True)
        given = None
        if ddp.find_unused_parameters:
            # As in torch what the others used in one such step counts as used here in the next.
            given = all_reduce_max(ddp._used.tolist(), ddp.process_group)
            ddp._used[:] = given
        for index in ddp._sparse:
            ddp._params[index].grad = None
        ddp._finish_sparse(given)
        if self.gives_gradients:
            self._give_gradients(given)

    def _give_gradients(self, given):
        """Give this rank the gradients that the others have."""
        ddp = self.ddp
        for index, (p, view) in enumerate(zip(ddp._params, ddp._views, strict=True)):
            if index not in ddp._sparse and (given is None or given[index]):
                p.grad = view.to(p.dtype, copy=True)

    def _keep_gradients(self):
        """Leave this rank the gradients of its own last step where they are views of the buckets."""
        for p, view in zip(self.ddp._params, self.ddp._views, strict=True):
            if p.grad is view:
                p.grad = view.clone()

    def post_hook(self, is_last_joiner):
        """Give all ranks the model of one that trained until the end."""
        ddp = self.ddp
        source = ddp._highest(cdist.get_rank(ddp.process_group) if is_last_joiner else -1)
        ddp.broadcast_parameters(source)
        if ddp.forward_sync_buffers:
            ddp._broadcast_buffers(source)
        ddp._sync.set_divisor(None)
        ddp._used[:] = 0
