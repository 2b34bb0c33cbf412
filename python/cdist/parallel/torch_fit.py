"""DistributedDataParallel over torch modules: steps that did not come to their end, gradients left out."""

import weakref
from itertools import chain

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import cdist
from cdist.parallel.synchronizer import HAND_OUT, debugging, warn
from cdist.parallel.torch_passes import BYPASSED

LEFT_IN_THE_MIDDLE = (
    "DistributedDataParallel: an exception left an earlier backward pass in the middle, when the reductions "
    "of that step had begun with the other ranks. "
)
NOBODY_STEPS = (
    "Its gradients are not to be used on any rank: each has this error, or that of a missing gradient. Catch "
    "it on all ranks and go on with the next step."
)
OTHERS_MAY_STEP = (
    "All its gradients were reduced, so other ranks may have stepped on them: on all ranks load a "
    "checkpoint, or call ddp.broadcast_parameters() and give the optimizers equal states."
)
# Modules whose gradients are not fit to step on: looked at by every optimizer's step.
unfit = weakref.WeakSet()


def _before_optimizer_step(optimizer, args, kwargs):
    if not unfit:
        return
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for ddp in list(unfit):
        if any(id(p) in stepped for p in ddp._params):
            ddp._check_fit(stepping=True)


register_optimizer_step_pre_hook(_before_optimizer_step)


class Fitness:
    """The part of TorchDataParallel that tells whether gradients are reduced, and ends broken steps."""

    def train(self, mode=True):
        """Set the module to training or evaluation, as torch.nn.Module.train does."""
        self._unchecked = True
        return super().train(mode)

    def _look_for_strays(self):
        """Say that parameters came, or were unfrozen, after wrapping; at the first forward after train()."""
        self._unchecked = False
        if self._warned_of_strays:
            return
        known = {id(p) for p in chain(self._params, self._delayed)}
        strays = [name for name, p in self._named() if p.requires_grad and id(p) not in known]
        if strays:
            self._warned_of_strays = True
            more = f" and {len(strays) - 20} more" if len(strays) > 20 else ""
            warn(
                "DistributedDataParallel: gradients of "
                f"{', '.join(map(repr, strays[:20]))}{more} stay with their rank, so that ranks drift apart: "
                "these parameters were added, replaced or unfrozen after wrapping. Wrap the module "
                "afterwards, or call ddp.set_trainable(names) on all ranks"
            )

    def _check_fit(self, stepping=False):
        """Raise unless the gradients are the reduced ones."""
        unsynced = self in unfit and not self._open
        if self._open and self._sync.reducer.unready:
            self._open = self._expected = False
            unfit.discard(self)
            self._sync.reducer.backward = False
            if self._low is not None:
                self._low.leave()
            if self.device.type == "cuda" and self._sync.reducer.step != HAND_OUT:
                self._sync.fail_for_all()
            if self._sync.reducer.step == HAND_OUT:
                self._finish_hooks()
            else:
                self._sync.finish()
        unfit.discard(self)
        if not stepping or not unsynced:
            return
        if debugging():
            raise RuntimeError(
                BYPASSED
                if self._bypassed
                else "the optimizer would step on gradients that were not synchronised: the last backward "
                "pass belongs to a forward under no_sync(); run the last micro-batch outside of it, or use "
                "ddp.accumulate(n)"
            )
        if self._bypassed:
            self._warn_of_bypass()

    def _leave_broken_step(self):
        """After a backward pass that an exception ended: make ready for a new one.

        Where nothing was sent no other rank knows of the step: it is forgotten. Otherwise the others wait for
        the rest of it: it is ended with them, then this raises.
        """
        reducer = self._sync.reducer
        reducer.backward = False
        if not self._open or torch._C._current_graph_task_id() != -1:
            return  # all was local; or no exception, but a forward inside of backward (checkpointing)
        self._buffer_futures = []
        if not reducer.first_launch_ns and not self._futures and self.reduce != "weights":
            self._open = False
            unfit.discard(self)
            if self._low is not None:
                self._low.leave()
            return
        complete = not reducer.unready
        try:
            if complete:
                reducer.flush()
                self._finish()
            else:
                self._check_fit()
        except cdist.DistError:
            raise
        except RuntimeError as error:
            raise RuntimeError(LEFT_IN_THE_MIDDLE + NOBODY_STEPS) from error
        raise RuntimeError(LEFT_IN_THE_MIDDLE + OTHERS_MAY_STEP)
