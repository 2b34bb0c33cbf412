"""Mixed precision as an argument of DistributedDataParallel over torch modules."""

from cdist.parallel.torch_parts import map_tensors


def cast_floats(value, dtype):
    """Return the nest of lists, tuples and dicts with its floating point tensors cast."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)


class LowPrecision:
    """Parameters that hold low precision values from a forward pass to the end of a backward pass.

    The values that autograd saves for the backward pass are the parameters themselves, and activation
    checkpointing runs layers again meanwhile: so the parameters' data are exchanged rather than copies put in
    their place. A further backward pass finds them exchanged back, so each output exchanges them when its
    gradient comes.
    """

    def __init__(self, config, named_parameters, buffers):
        self.param_dtype = config.param_dtype
        self._reduce_dtype = config.reduce_dtype
        self._named_parameters = named_parameters
        self._masters = []
        if config.buffer_dtype is not None:
            for buffer in buffers:
                if buffer.is_floating_point():
                    buffer.data = buffer.data.to(config.buffer_dtype)

    def gradient_dtype(self, parameter):
        """Return the dtype in which the gradient of a parameter is reduced."""
        if not parameter.is_floating_point():
            return parameter.dtype
        return self._reduce_dtype or self.param_dtype or parameter.dtype

    def enter(self):
        """Give parameters their low precision values; no change where they hold them already.

        Exchanging them twice would part graphs of two forward passes, which then mark a gradient twice. A
        gradient that has gathered keeps its dtype.
        """
        if self.param_dtype is None or self._masters:
            return
        for _, p in self._named_parameters():
            if p.is_floating_point() and p.dtype != self.param_dtype:
                self._masters.append((p, p.data))
                p.data = p.data.to(self.param_dtype)

    @property
    def entered(self):
        """Whether parameters hold low precision values."""
        return bool(self._masters)

    def enter_for_backward(self, outputs):
        """Have parameters hold low precision values when a backward pass comes to one of these tensors."""
        for tensor in outputs:
            if tensor.requires_grad:
                tensor.register_hook(self._enter)

    def _enter(self, gradient):
        self.enter()

    def leave(self):
        """Give parameters back what they had, and their gradients, if of low precision, that dtype."""
        masters, self._masters = self._masters, []
        for p, master in masters:
            grad, p.grad = p.grad, None
            p.data = master
            if grad is not None:
                p.grad = grad.to(master.dtype)
