"""An optimizer of torch that averages the model after its steps."""

import warnings

import torch


class PostLocalSGDOptimizer(torch.optim.Optimizer):
    """Steps with another optimizer, then counts a step of an averager.

    Args:
        optim: the optimizer of this rank. Whatever is not named here (``defaults``, hooks) is asked of it.
        averager: a ModelAverager, whose count is saved and restored with the state.

    """

    def __init__(self, optim, averager):
        self.optim = optim
        self.averager = averager

    def __getattr__(self, name):
        if name in ("optim", "averager"):  # being made by copy or pickle
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __getstate__(self):
        return self.__dict__

    def __setstate__(self, state):
        self.__dict__.update(state)

    @property
    def param_groups(self):
        """Return the parameter groups of the optimizer."""
        return self.optim.param_groups

    @property
    def state(self):
        """Return the state of the optimizer."""
        return self.optim.state

    def __repr__(self):
        return repr(self.optim)

    def state_dict(self):
        """Return that of the optimizer, and the averager's count as ``'step'``."""
        return {**self.optim.state_dict(), "step": self.averager.step}

    def load_state_dict(self, state_dict):
        """Restore both; a dict without ``'step'`` gives a warning, and the count begins at 0."""
        self.optim.load_state_dict(state_dict)
        if "step" not in state_dict:
            warnings.warn(
                "PostLocalSGDOptimizer: the state has no 'step' of an averager, whose count begins at 0",
                stacklevel=2,
            )
        self.averager.step = state_dict.get("step", 0)

    def step(self, closure=None):
        """Step, then average if it is due (collective). Return what the optimizer returns."""
        loss = self.optim.step(closure) if closure is not None else self.optim.step()
        self.averager.average_parameters(self.param_groups)
        return loss

    def zero_grad(self, set_to_none=True):
        """Forget the gradients, or set them to zero."""
        self.optim.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group):
        """Give the optimizer further parameters."""
        self.optim.add_param_group(param_group)
