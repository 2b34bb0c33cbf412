"""DistributedDataParallel over torch modules: optimizers that step as a part of the backward pass."""


class BackwardOptimizers:
    """The part of TorchDataParallel that knows of torch's ``_apply_optimizer_in_backward``.

    It gives parameters optimizers of their own, which step as soon as a gradient is there. They must step on
    the reduced one.
    """

    def _take_over_optimizers(self):
        """Have these optimizers step after the reduction, no longer before it; at the first forward."""
        self._stepping = [p for p in self._params if hasattr(p, "_in_backward_optimizers")]
        if not self._stepping:
            return
        from torch.distributed.optim.apply_optimizer_in_backward import (
            param_to_optim_hook_handle_map as handles,
        )

        for p in self._stepping:
            for handle in handles.get(p, []):
                handle.remove()

    def _step_in_backward(self):
        """Step on the gradients of this pass and forget them."""
        for p in self._stepping or ():
            if p.grad is not None:
                for optimizer in p._in_backward_optimizers:
                    optimizer.step()
                p.grad = None
