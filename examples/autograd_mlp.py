"""A network differentiated by HIPS autograd on several processes: cdist averages the gradients.

    pip install autograd
    cdistrun --nproc-per-node 2 examples/autograd_mlp.py

Every world size gives the same losses, in float64 to 1e-9: the global batch is the same.
"""

import argparse

import autograd.numpy as np
import cdist as dist
from autograd import value_and_grad
from sklearn.datasets import load_digits

TRAINING_SAMPLES = 1500
SIZES = (64, 64, 10)


def load():
    digits = load_digits()
    order = np.random.default_rng(1).permutation(len(digits.target))
    images, labels = digits.data[order] / 16, np.eye(10)[digits.target[order]]
    parts = np.split(images, [TRAINING_SAMPLES]), np.split(labels, [TRAINING_SAMPLES])
    return zip(*parts, strict=True)


def initial_parameters(seed=0):
    random = np.random.default_rng(seed)
    return [(random.normal(0, np.sqrt(2 / inputs), (inputs, outputs)), np.zeros(outputs))
            for inputs, outputs in zip(SIZES, SIZES[1:], strict=False)]  # fmt: skip


def scores(parameters, images):
    for weight, bias in parameters[:-1]:
        images = np.tanh(images @ weight + bias)
    weight, bias = parameters[-1]
    return images @ weight + bias


def loss_of(parameters, images, labels):
    """Sum, not mean, of the losses: shares may then be of different size."""
    outputs = scores(parameters, images)
    outputs = outputs - np.max(outputs, axis=1, keepdims=True)
    return np.sum(np.log(np.sum(np.exp(outputs), axis=1)) - np.sum(outputs * labels, axis=1))


def main(options):
    dist.init_process_group()
    rank, world = dist.get_rank(), dist.get_world_size()
    (images, labels), (test_images, test_labels) = load()
    parameters = initial_parameters()
    velocities = [(np.zeros_like(weight), np.zeros_like(bias)) for weight, bias in parameters]
    loss_and_gradients = value_and_grad(loss_of)
    reducer = dist.GradientReducer(parameters, reduce="sum")

    for epoch in range(options.epochs):
        order = np.random.default_rng(epoch).permutation(len(labels))  # the same on all ranks
        total = np.zeros(1)
        for batch in np.split(order, range(options.batch, len(order), options.batch)):
            mine = batch[rank::world]
            loss, gradients = loss_and_gradients(parameters, images[mine], labels[mine])
            gradients = reducer.reduce(gradients)  # in place
            total += loss
            for pair, speeds, slopes in zip(parameters, velocities, gradients, strict=True):
                for parameter, velocity, gradient in zip(pair, speeds, slopes, strict=True):
                    velocity *= 0.9
                    velocity += gradient / len(batch)
                    parameter -= options.rate * velocity
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {total[0] / len(labels):.12f}")

    mine = slice(rank, None, world)
    guesses = scores(parameters, test_images[mine]).argmax(1)
    right = np.sum(guesses == test_labels[mine].argmax(1), keepdims=True)
    dist.all_reduce(right)
    if rank == 0:
        print(f"test accuracy: {right[0] / len(test_labels):.2%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=50, help="samples of a step on all ranks (%(default)s)")
    parser.add_argument("--rate", type=float, default=0.05, help="learning rate (%(default)s)")
    main(parser.parse_args())
