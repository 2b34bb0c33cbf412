"""Layers in plain CuPy (NumPy where CuPy is not) under DistributedDataParallel: gradients travel in backward.

To run it:

    cdistrun --nproc-per-node 2 examples/cupy_ddp.py
"""

import os

import cdist as dist

try:
    import cupy as xp

    xp.cuda.Device(int(os.environ.get("LOCAL_RANK", 0)) % xp.cuda.runtime.getDeviceCount()).use()
except ImportError:
    import numpy as xp

SIZES = [2, 64, 64, 1]
STEPS, BATCH, RATE = 400, 256, 0.05


class Network:
    """All that DistributedDataParallel asks for: named_parameters(), and a call that is the forward pass."""

    def __init__(self):
        shapes = list(zip(SIZES, SIZES[1:], strict=False))
        self.weights = [dist.Parameter(xp.random.standard_normal(shape) * 0.3) for shape in shapes]
        self.biases = [dist.Parameter(xp.zeros(columns)) for _, columns in shapes]

    def named_parameters(self):
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            yield f"{i}.weight", weight
            yield f"{i}.bias", bias

    def __call__(self, x):
        self.outputs = [x]
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = x @ weight.data + bias.data
            self.outputs.append(xp.tanh(x) if i + 1 < len(self.weights) else x)
            x = self.outputs[-1]
        return x

    def backward(self, delta):
        """From the last layer to the first: what is accumulated is on its way to the other ranks at once."""
        for i in reversed(range(len(self.weights))):
            self.biases[i].accumulate_grad(delta.sum(axis=0))
            self.weights[i].accumulate_grad(self.outputs[i].T @ delta)
            if i:
                delta = (delta @ self.weights[i].data.T) * (1 - self.outputs[i] ** 2)


def main():
    dist.init_process_group()
    rank = dist.get_rank()
    model = Network()
    ddp = dist.DistributedDataParallel(model)  # every rank starts with rank 0's values
    xp.random.seed(rank + 1)  # every rank its own data
    for step in range(STEPS):
        x = xp.random.uniform(-1, 1, (BATCH, 2))
        target = xp.sin(3 * x[:, :1]) * x[:, 1:]
        error = ddp(x) - target
        model.backward(2 * error / BATCH)
        for _, parameter in model.named_parameters():
            parameter.data -= RATE * parameter.grad  # the mean over all ranks: the first look waits for it
        ddp.zero_grad()
        if step % 100 == 99 and rank == 0:
            print(f"step {step + 1}: loss {float((error**2).mean()):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
