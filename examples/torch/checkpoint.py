"""Checkpoint and resume: rank 0 saves, everybody waits and loads.

python examples/torch/checkpoint.py --steps 10     # trains and leaves checkpoint.pt
python examples/torch/checkpoint.py --steps 20     # goes on from there
"""

import argparse
import os
from datetime import timedelta

import cdist as dist
import cdist.multiprocessing as mp
import torch
from cdist.nn.parallel import DistributedDataParallel as DDP
from torch import nn


def make_model():
    return nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 5))


def batch_of(step, rank, device):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(16, 10, generator=generator)
    return x.to(device), torch.stack([x.sum(1), x.prod(1), x.amax(1), x.amin(1), x.std(1)], dim=1).to(device)


def save(path, step, ddp_model, optimizer):
    if dist.get_rank() == 0:
        # All ranks start from the same parameters and reduce the same gradients: saving one copy is enough.
        torch.save({"step": step, "model": ddp_model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    dist.barrier()  # nobody loads before rank 0 has saved


def load(path, ddp_model, optimizer, device):
    checkpoint = torch.load(path, map_location=device, weights_only=True)
    ddp_model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return checkpoint["step"]


def train(rank, world_size, options):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = options.port
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= world_size
    dist.init_process_group(
        backend="nccl" if on_gpu else "gloo",
        init_method="env://",
        timeout=timedelta(seconds=60),
        world_size=world_size,
        rank=rank,
    )
    try:
        device = torch.device(f"cuda:{rank}") if on_gpu else torch.device("cpu")
        torch.manual_seed(7)
        model = make_model().to(device)
        ddp_model = DDP(model, device_ids=[rank] if on_gpu else None)
        optimizer = torch.optim.Adam(ddp_model.parameters(), lr=0.01)

        step = 0
        if os.path.exists(options.checkpoint):
            step = load(options.checkpoint, ddp_model, optimizer, device)
        if rank == 0:
            print(f"starting at step {step}")
        dist.barrier()  # nobody saves before all have looked
        while step < options.steps:
            x, target = batch_of(step, rank, device)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(ddp_model(x), target)
            loss.backward()
            optimizer.step()
            step += 1
            if step % options.every == 0 or step == options.steps:
                save(options.checkpoint, step, ddp_model, optimizer)
            if rank == 0:
                print(f"step {step}: loss {loss.item():.7f}")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=5, help="steps between checkpoints (%(default)s)")
    parser.add_argument("--checkpoint", default="checkpoint.pt")
    parser.add_argument("--port", default="12356")
    options = parser.parse_args()
    mp.spawn(train, args=(options.ranks, options), nprocs=options.ranks)
