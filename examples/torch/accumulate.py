"""Gradient accumulation: gradients travel in the last of several backward passes only.

cdistrun --nproc-per-node 2 examples/torch/accumulate.py
torchrun --nproc-per-node 2 examples/torch/accumulate.py
"""

import argparse
import contextlib
import os

import cdist as dist
import torch
from cdist.nn.parallel import DistributedDataParallel
from torch import nn


def micro_batches(rank, world_size, step, count, size=8):
    """This rank's part of a global batch that is the same for every world size and count."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(world_size * count * size, 16, generator=generator)
    y = (x[:, 0] * x[:, 1] > 0).long()
    mine = slice(rank, None, world_size)
    return zip(x[mine].split(size), y[mine].split(size), strict=True)


def main(options):
    dist.init_process_group(backend="gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 2)),
        gradient_as_bucket_view=True,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.5)

    for step in range(options.steps):
        total = torch.zeros(1)
        batches = micro_batches(rank, world_size, step, options.accumulate)
        for number, (x, y) in enumerate(batches, 1):
            is_last = number == options.accumulate
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss = nn.functional.cross_entropy(model(x), y) / options.accumulate
                loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

        dist.reduce(total, dst=0, op=dist.ReduceOp.SUM)
        if rank == 0:
            print(f"step {step + 1}: loss {total.item() / world_size:.7f}, norm of the gradient {norm:.6f}")

    if rank == 0:
        torch.save(model.module.state_dict(), options.output)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--accumulate", type=int, default=4, help="micro-batches of a step (%(default)s)")
    parser.add_argument("--output", default=os.devnull, help="where rank 0 puts the weights")
    main(parser.parse_args())
