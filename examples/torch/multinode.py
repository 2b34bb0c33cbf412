"""Several hosts: the same command on each of them, with its number.

    cdistrun --nnodes 2 --node-rank 0 --nproc-per-node 4 --master-addr host0 examples/torch/multinode.py
    cdistrun --nnodes 2 --node-rank 1 --nproc-per-node 4 --master-addr host0 examples/torch/multinode.py

The first rank of each host prepares the data for the others of its host; all train together.
"""

import argparse
import os
import socket

import cdist as dist
import torch
from cdist.nn.parallel import DistributedDataParallel as DDP
from cdist.utils.data.distributed import DistributedSampler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def prepare(path):
    """What would be a download: one rank of each host does it, the others wait for it."""
    local_rank = int(os.environ["LOCAL_RANK"])
    if local_rank == 0:
        generator = torch.Generator().manual_seed(0)
        x = torch.rand(256, 12, generator=generator) - 0.5
        torch.save((x, torch.sin(4 * x[:, :3]).sum(1, keepdim=True)), path)
    dist.barrier()
    return torch.load(path, weights_only=True)


def main(options):
    dist.init_process_group(backend="nccl" if torch.cuda.is_available() else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    local_rank, per_node = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")

    places = [None] * world_size
    dist.all_gather_object(places, (socket.gethostname(), int(os.environ["GROUP_RANK"]), local_rank))
    if rank == 0:
        print("ranks (node, local rank):", ", ".join(f"{r}: ({p[1]}, {p[2]})" for r, p in enumerate(places)))

    data = TensorDataset(*prepare(f"{options.folder}/data{os.environ['GROUP_RANK']}.pt"))
    sampler = DistributedSampler(data, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(12, 48), nn.Tanh(), nn.Linear(48, 1)).to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2, device=device)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item() * len(x), len(x)], device=device)
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss {total[0].item() / total[1].item():.7f} over {int(total[1])} samples")

    # A group for each host: how large the weights are is the same on all of them, and this shows it.
    node_group, _ = dist.new_subgroups(group_size=per_node)
    norm = torch.stack([p.detach().norm() for p in model.parameters()]).norm()
    spread = norm.clone()
    dist.all_reduce(spread, op=dist.ReduceOp.MAX, group=node_group)
    assert spread == norm, "the ranks of this host have different weights"
    if local_rank == 0:
        print(f"node {os.environ['GROUP_RANK']}: norm of the weights {norm.item():.6f} on all its ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--folder", default="/tmp", help="where each node puts its data (%(default)s)")
    main(parser.parse_args())
