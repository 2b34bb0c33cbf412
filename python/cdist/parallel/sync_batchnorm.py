"""Batch normalisation over the batches of all ranks, on the CPU and on GPUs. Imports torch."""

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

import cdist

__all__ = ["SyncBatchNorm"]


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, module):
        group = module.process_group
        dims = [0, *range(2, x.dim())]
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        channels = x.shape[1]
        count = x.numel() // channels if channels else 0
        mine = wide.new_zeros(2 * channels + 1)
        if count:
            mean = wide.mean(dims)
            mine[:channels] = mean
            mine[channels : 2 * channels] = (wide - _along(mean, x)).square_().sum(dims)
            mine[-1] = count
        world = cdist.get_world_size(group)
        everyone = wide.new_empty(world * (2 * channels + 1))
        cdist.all_gather_into_tensor(everyone, mine, group=group)
        rows = everyone.view(world, 2 * channels + 1)
        counts = rows[:, -1:]
        total = counts.sum()
        if total < 2:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)} and "
                f"{int(total)} in all"
            )
        means = rows[:, :channels]
        mean = (means * counts).sum(0) / total
        spread = (rows[:, channels : 2 * channels] + counts * (means - mean).square()).sum(0)
        module._update(mean, spread / (total - 1))
        inverse = torch.rsqrt(spread / total + module.eps)
        normal = (wide - _along(mean, x)) * _along(inverse, x)
        ctx.save_for_backward(normal, weight, inverse, total)
        ctx.group, ctx.dims, ctx.dtype = group, dims, x.dtype
        out = normal if weight is None else normal * _along(weight, x) + _along(bias, x)
        return out.to(x.dtype)

    @staticmethod
    @once_differentiable  # nothing is differentiated through the all_reduce
    def backward(ctx, gradient):
        normal, weight, inverse, total = ctx.saved_tensors
        wide = gradient.to(normal.dtype)
        channels = normal.shape[1]
        sums = torch.cat([wide.sum(ctx.dims), (wide * normal).sum(ctx.dims)])
        grad_weight = sums[channels:].clone() if weight is not None else None
        grad_bias = sums[:channels].clone() if weight is not None else None
        cdist.all_reduce(sums, group=ctx.group)
        sums /= total
        scale = inverse if weight is None else inverse * weight
        grad = wide - _along(sums[:channels], wide) - normal * _along(sums[channels:], wide)
        return (grad * _along(scale, wide)).to(ctx.dtype), grad_weight, grad_bias, None


def _along(vector, x):
    return vector.view(1, -1, *[1] * (x.dim() - 2))


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """BatchNorm whose statistics in training are of the batches of all ranks of a group, however uneven."""

    def __init__(
        self,
        num_features,
        eps=1e-5,
        momentum=0.1,
        affine=True,
        track_running_stats=True,
        process_group=None,
        device=None,
        dtype=None,
    ):
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.process_group = process_group

    def _check_input_dim(self, x):
        if x.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {x.dim()}D input)")
        if x.shape[1] == 0:
            raise ValueError("SyncBatchNorm number of input channels should be non-zero")
        if x.shape[1] != self.num_features:
            raise ValueError(f"SyncBatchNorm of {self.num_features} channels got an input of {x.shape[1]}")

    def _update(self, mean, unbiased):
        if not self.track_running_stats or self.running_mean is None:
            return
        self.num_batches_tracked.add_(1)
        rate = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        self.running_mean.mul_(1 - rate).add_(mean.to(self.running_mean.dtype), alpha=rate)
        self.running_var.mul_(1 - rate).add_(unbiased.to(self.running_var.dtype), alpha=rate)

    def forward(self, x):
        """Normalise x of shape (N, C, …)."""
        self._check_input_dim(x)
        use_batch = self.training or self.running_mean is None
        if not use_batch:
            return functional.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        if not cdist.is_initialized():
            raise RuntimeError("SyncBatchNorm in training needs init_process_group")
        return _Normalize.apply(x, self.weight, self.bias, self)

    @classmethod
    def convert_sync_batchnorm(cls, module, process_group=None):
        """Replace every BatchNorm*d (and torch's SyncBatchNorm) in the module; parameters are shared."""
        return cls._convert(module, process_group, {})

    @classmethod
    def _convert(cls, module, process_group, known):
        """`known`: what was made of modules by id, since one may stand in several places."""
        if id(module) in known:
            return known[id(module)]
        made = module
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, cls):
            made = cls(
                module.num_features,
                module.eps,
                module.momentum,
                module.affine,
                module.track_running_stats,
                process_group,
            )
            if module.affine:
                made.weight, made.bias = module.weight, module.bias
            made.running_mean, made.running_var = module.running_mean, module.running_var
            made.num_batches_tracked = module.num_batches_tracked
            made.training = module.training
        known[id(module)] = made
        for name, child in list(module._modules.items()):
            if child is not None:
                made.add_module(name, cls._convert(child, process_group, known))
        return made
