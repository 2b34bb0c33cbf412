"""Trains a multilayer perceptron, in NumPy alone, on the handwritten digits that scikit-learn ships.

    cdistrun --nproc-per-node 2 examples/digits.py

Every world size gives the same loss curve: the global batch is the same, and gradients are averaged over the
ranks. Rank 0 writes a checkpoint every few epochs; a run that finds one goes on from there.
"""

import argparse
from pathlib import Path

import cdist as dist
import numpy as np
from sklearn.datasets import load_digits
from tqdm import tqdm

TRAINING_SAMPLES = 1500


class Perceptron:
    """64 pixels → hidden layers with ReLU → 10 classes.

    `backward` gives each gradient to its parameter as soon as it is known, last layer first, so that its
    bucket travels while the layers before it are still computed.
    """

    def __init__(self, sizes=(64, 128, 64, 10), seed=0):
        random = np.random.default_rng(seed)
        self.weights, self.biases = [], []
        for inputs, outputs in zip(sizes, sizes[1:], strict=False):
            self.weights.append(dist.Parameter(random.normal(0, np.sqrt(2 / inputs), (inputs, outputs))))
            self.biases.append(dist.Parameter(np.zeros(outputs)))

    def named_parameters(self):
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            yield f"weight{layer}", weight
            yield f"bias{layer}", bias

    def __call__(self, images):
        self.inputs = []
        for weight, bias in zip(self.weights, self.biases, strict=True):
            self.inputs.append(images)
            images = images @ weight.data + bias.data
            if weight is not self.weights[-1]:
                images = np.maximum(images, 0)
        return images

    def backward(self, gradient):
        for layer in reversed(range(len(self.weights))):
            inputs = self.inputs[layer]
            self.weights[layer].accumulate_grad(inputs.T @ gradient)
            self.biases[layer].accumulate_grad(gradient.sum(axis=0))
            if layer:
                gradient = (gradient @ self.weights[layer].data.T) * (inputs > 0)


def cross_entropy(scores, labels):
    """Mean loss of a batch, and its gradient with respect to the scores."""
    shifted = scores - scores.max(axis=1, keepdims=True)
    log_probability = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    rows = np.arange(len(labels))
    gradient = np.exp(log_probability)
    gradient[rows, labels] -= 1
    return -log_probability[rows, labels].mean(), gradient / len(labels)


class Momentum:
    """Stochastic gradient descent with momentum."""

    def __init__(self, parameters, rate, momentum=0.9):
        self.parameters, self.rate, self.momentum = list(parameters), rate, momentum
        self.velocities = [np.zeros_like(parameter.data) for parameter in self.parameters]

    def step(self, rate):
        for parameter, velocity in zip(self.parameters, self.velocities, strict=True):
            velocity *= self.momentum
            velocity += parameter.grad
            parameter.data -= rate * velocity


def load():
    digits = load_digits()
    order = np.random.default_rng(1).permutation(len(digits.target))
    images, labels = digits.data[order] / 16.0, digits.target[order]
    train, test = slice(TRAINING_SAMPLES), slice(TRAINING_SAMPLES, None)
    return (images[train], labels[train]), (images[test], labels[test])


def save(path, epoch, model, optimizer, losses):
    arrays = {f"data.{name}": parameter.data for name, parameter in model.named_parameters()}
    arrays |= {f"velocity.{i}": velocity for i, velocity in enumerate(optimizer.velocities)}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial.npz")
    np.savez(partial, epoch=epoch, losses=losses, **arrays)
    partial.replace(path)  # a reader sees the old file or the new one, never half of one


def restore(path, model, optimizer):
    with np.load(path) as file:
        for name, parameter in model.named_parameters():
            parameter.data[...] = file[f"data.{name}"]
        for i, velocity in enumerate(optimizer.velocities):
            velocity[...] = file[f"velocity.{i}"]
        return int(file["epoch"]) + 1, list(file["losses"])


def train_epoch(ddp, optimizer, images, labels, indices, options, rate):
    """One pass over this rank's share; returns the mean loss over all ranks."""
    micro = options.batch // dist.get_world_size() // options.accumulate
    batches = np.split(indices, range(micro, len(indices), micro))
    losses = []
    for chosen, last in ddp.accumulate(options.accumulate, batches):  # gradients travel in a step's last part
        loss, gradient = cross_entropy(ddp(images[chosen]), labels[chosen])
        ddp.module.backward(gradient / options.accumulate)
        losses.append(loss)
        if last:
            optimizer.step(rate)
            ddp.zero_grad()
    mean = np.array(np.mean(losses))
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    return float(mean)


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument(
        "--batch", type=int, default=60, help="samples of a step over all ranks (%(default)s)"
    )
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step (%(default)s)")
    parser.add_argument("--rate", type=float, default=0.05, help="learning rate (%(default)s)")
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints/digits.npz"))
    parser.add_argument("--every", type=int, default=10, help="epochs between checkpoints (%(default)s)")
    parser.add_argument("--fresh", action="store_true", help="ignore a checkpoint that is there")
    return parser.parse_args(arguments)


def main(options):
    dist.init_process_group()
    rank, world = dist.get_rank(), dist.get_world_size()
    if options.batch % (world * options.accumulate):
        raise SystemExit(
            f"--batch {options.batch} must be a multiple of ranks × --accumulate = "
            f"{world * options.accumulate}"
        )
    (images, labels), (test_images, test_labels) = load()
    model = Perceptron()
    optimizer = Momentum((parameter for _, parameter in model.named_parameters()), options.rate)
    first, losses = 0, []
    if options.checkpoint.exists() and not options.fresh:
        first, losses = restore(options.checkpoint, model, optimizer)
        if rank == 0:
            print(f"{options.checkpoint} holds {first} epochs: going on from there (--fresh: from the start)")
    dist.barrier()  # nobody writes a checkpoint that another rank has not read yet
    ddp = dist.DistributedDataParallel(model)
    sampler = dist.DistributedSampler(images, seed=0)

    is_quiet = rank != 0 or first >= options.epochs
    epochs = tqdm(range(first, options.epochs), desc=f"{world} ranks", unit="epoch", disable=is_quiet)
    for epoch in epochs:
        sampler.set_epoch(epoch)
        rate = options.rate * (0.1 if epoch >= 0.75 * options.epochs else 1)
        losses.append(train_epoch(ddp, optimizer, images, labels, sampler.indices(), options, rate))
        epochs.set_postfix(loss=f"{losses[-1]:.4f}")
        if rank == 0 and ((epoch + 1) % options.every == 0 or epoch + 1 == options.epochs):
            save(options.checkpoint, epoch, model, optimizer, losses)

    # Each rank scores its share of the test images; none of them is counted twice.
    mine = dist.DistributedSampler(test_images, shuffle=False, pad=False).indices()
    right = np.array([(ddp(test_images[mine]).argmax(axis=1) == test_labels[mine]).sum()])
    dist.all_reduce(right)
    if rank == 0:
        print(
            f"test accuracy: {right[0] / len(test_labels):.2%} ({right[0]} of {len(test_labels)} images, "
            f"{world} ranks)"
        )
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main(parse())
