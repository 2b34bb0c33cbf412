"""A model cut into two stages with two replicas each: activations by send and recv, DDP within a stage.

    cdistrun --nproc-per-node 4 examples/torch/model_parallel.py

Ranks 0 and 1 hold the first stage, ranks 2 and 3 the second; rank r talks to rank r + 2.
"""

import argparse
import os

import cdist as dist
import torch
from cdist.nn.parallel import DistributedDataParallel as DDP
from torch import nn

BATCH, WIDTH = 16, 24


def run_first(stage, optimizer, x, peer):
    activation = stage(x)
    dist.send(activation.detach(), dst=peer)
    gradient = torch.empty_like(activation)
    dist.recv(gradient, src=peer)
    optimizer.zero_grad()
    activation.backward(gradient)
    optimizer.step()


def run_second(stage, optimizer, target, peer):
    activation = torch.empty(BATCH, WIDTH)
    dist.recv(activation, src=peer)
    activation.requires_grad_()
    loss = nn.functional.mse_loss(stage(activation), target)
    optimizer.zero_grad()
    loss.backward()
    request = dist.isend(activation.grad, dst=peer)
    optimizer.step()
    request.wait()
    return loss.detach()


def main(options):
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    replicas = world_size // 2
    groups = [dist.new_group(list(range(replicas))), dist.new_group(list(range(replicas, world_size)))]
    number = rank // replicas  # of my stage
    peer = (rank + replicas) % world_size
    torch.manual_seed(number)
    stage = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU()) if number == 0 else nn.Linear(WIDTH, 1)
    stage = DDP(stage, process_group=groups[number])
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)

    # Both stages know the data of their replica.
    generator = torch.Generator().manual_seed(100 + rank % replicas)
    for step in range(options.steps):
        x = torch.randn(BATCH, 8, generator=generator)
        target = x[:, :2].prod(1, keepdim=True)
        if number == 0:
            run_first(stage, optimizer, x, peer)
        else:
            loss = run_second(stage, optimizer, target, peer)
            dist.all_reduce(loss, group=groups[1])
            if rank == replicas and step % 10 == 9:
                print(f"step {step + 1}: loss {loss.item() / replicas:.7f}")

    parts = [None] * world_size
    dist.all_gather_object(parts, stage.module.state_dict() if rank % replicas == 0 else None)
    if rank == 0:
        stages = [part for part in parts if part is not None]
        weights = {f"{i}.{name}": value for i, part in enumerate(stages) for name, value in part.items()}
        torch.save(weights, options.output)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output", default=os.devnull, help="where rank 0 puts the weights")
    main(parser.parse_args())
