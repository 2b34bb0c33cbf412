"""A network in plain CuPy (NumPy where CuPy is not) on several ranks: one all_reduce averages the gradients.

To run it:

    cdistrun --nproc-per-node 2 examples/cupy_mlp.py
"""

import os

import cdist

try:
    import cupy as xp

    xp.cuda.Device(int(os.environ.get("LOCAL_RANK", 0)) % xp.cuda.runtime.getDeviceCount()).use()
except ImportError:
    import numpy as xp

SIZES = [2, 64, 64, 1]
STEPS, BATCH, RATE = 400, 256, 0.05


def views(flat):
    """Weights and biases of each layer, as views of one flat array: one all_reduce then serves all."""
    layers, at = [], 0
    for rows, cols in zip(SIZES, SIZES[1:], strict=False):
        weight = flat[at : at + rows * cols].reshape(rows, cols)
        bias = flat[at + rows * cols : at + rows * cols + cols]
        layers.append((weight, bias))
        at += rows * cols + cols
    return layers


def forward(layers, x):
    """Activations of every layer, input first."""
    outputs = [x]
    for i, (weight, bias) in enumerate(layers):
        x = x @ weight + bias
        if i + 1 < len(layers):
            x = xp.tanh(x)
        outputs.append(x)
    return outputs


def backward(layers, gradients, outputs, target):
    """Fills the gradients of the mean squared error."""
    delta = 2 * (outputs[-1] - target) / len(target)
    for i in reversed(range(len(layers))):
        gradients[i][0][...] = outputs[i].T @ delta
        gradients[i][1][...] = delta.sum(axis=0)
        if i:
            delta = (delta @ layers[i][0].T) * (1 - outputs[i] ** 2)


def main():
    cdist.init_process_group()
    rank = cdist.get_rank()
    count = sum(rows * cols + cols for rows, cols in zip(SIZES, SIZES[1:], strict=False))
    xp.random.seed(0)
    flat = (xp.random.standard_normal(count) * 0.3).astype("float32")
    cdist.broadcast(flat, 0)
    gradient = xp.zeros_like(flat)
    layers, gradients = views(flat), views(gradient)
    xp.random.seed(rank + 1)  # every rank its own data
    for step in range(STEPS):
        x = xp.random.uniform(-1, 1, (BATCH, 2)).astype("float32")
        target = xp.sin(3 * x[:, :1]) * x[:, 1:]
        outputs = forward(layers, x)
        backward(layers, gradients, outputs, target)
        cdist.all_reduce(gradient, op=cdist.ReduceOp.AVG)
        flat -= RATE * gradient
        if step % 100 == 99 and rank == 0:
            print(f"step {step + 1}: loss {float(((outputs[-1] - target) ** 2).mean()):.4f}")
    cdist.destroy_process_group()


if __name__ == "__main__":
    main()
