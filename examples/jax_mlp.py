"""A network in JAX on several processes: each rank computes the gradients of its share, cdist averages them.

    pip install jax
    cdistrun --nproc-per-node 2 examples/jax_mlp.py

Every world size gives the same losses: the global batch is the same.
"""

import argparse

import cdist as dist
import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

TRAINING_SAMPLES = 1500
SIZES = (64, 128, 10)


def load():
    digits = load_digits()
    order = np.random.default_rng(1).permutation(len(digits.target))
    images, labels = (digits.data[order] / 16).astype(np.float32), digits.target[order]
    parts = np.split(images, [TRAINING_SAMPLES]), np.split(labels, [TRAINING_SAMPLES])
    return zip(*parts, strict=True)


def initial_parameters(seed=0):
    """A pytree: one dict for each layer."""
    random = np.random.default_rng(seed)
    return [{"w": jnp.asarray(random.normal(0, np.sqrt(2 / inputs), (inputs, outputs)), jnp.float32),
             "b": jnp.zeros(outputs)}
            for inputs, outputs in zip(SIZES, SIZES[1:], strict=False)]  # fmt: skip


def scores(parameters, images):
    for layer in parameters[:-1]:
        images = jax.nn.relu(images @ layer["w"] + layer["b"])
    return images @ parameters[-1]["w"] + parameters[-1]["b"]


def loss_of(parameters, images, labels):
    log_probabilities = jax.nn.log_softmax(scores(parameters, images))
    return -jnp.mean(log_probabilities[jnp.arange(len(labels)), labels])


@jax.jit
def update(parameters, velocities, gradients, rate):
    velocities = jax.tree.map(lambda v, g: 0.9 * v + g, velocities, gradients)
    return jax.tree.map(lambda p, v: p - rate * v, parameters, velocities), velocities


def main(options):
    dist.init_process_group()
    rank, world = dist.get_rank(), dist.get_world_size()
    if options.batch % world:
        raise SystemExit(f"--batch {options.batch} must be a multiple of the number of ranks, {world}")
    (images, labels), (test_images, test_labels) = load()
    parameters = initial_parameters()
    velocities = jax.tree.map(jnp.zeros_like, parameters)
    sampler = dist.DistributedSampler(images, seed=0, drop_last=True)
    loss_and_gradients = jax.jit(jax.value_and_grad(loss_of))
    share = options.batch // world
    reducer = dist.GradientReducer(parameters)

    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        losses = []
        for mine in np.split(sampler.indices(), range(share, len(sampler), share)):
            loss, gradients = loss_and_gradients(parameters, images[mine], labels[mine])
            gradients = reducer.reduce(gradients)  # the same tree, averaged over the ranks
            parameters, velocities = update(parameters, velocities, gradients, options.rate)
            losses.append(loss)
        mean = np.array(np.mean(losses))
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {mean:.7f}")

    mine = dist.DistributedSampler(test_images, shuffle=False, pad=False).indices()
    right = np.array([(scores(parameters, test_images[mine]).argmax(1) == test_labels[mine]).sum()])
    dist.all_reduce(right)
    if rank == 0:
        print(f"test accuracy: {right[0] / len(test_labels):.2%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch", type=int, default=60, help="samples of a step on all ranks (%(default)s)")
    parser.add_argument("--rate", type=float, default=0.05, help="learning rate (%(default)s)")
    main(parser.parse_args())
