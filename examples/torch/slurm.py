"""Started by SLURM's srun, without a launcher of its own: ranks and addresses from SLURM's variables.

    srun --nodes 2 --ntasks-per-node 4 python examples/torch/slurm.py

Under srun a plain init_process_group() of cdist finds all of this by itself; the script shows how it is done
by hand, which works in torch too.
"""

import argparse
import os
import re

import cdist as dist
import torch
from cdist.nn.parallel import DistributedDataParallel as DDP
from torch import nn


def first_host(nodelist):
    """The first of SLURM's compressed lists: "gpu[03-05,9],login" gives "gpu03"."""
    prefix, numbers = re.match(r"([^\[,]+)(?:\[([^\],-]+))?", nodelist).groups()
    return prefix + (numbers or "")


def setup():
    rank = int(os.environ["SLURM_PROCID"])
    world_size = int(os.environ["SLURM_NTASKS"])
    local_rank = int(os.environ["SLURM_LOCALID"])
    os.environ["MASTER_ADDR"] = first_host(os.environ["SLURM_NODELIST"])
    os.environ.setdefault("MASTER_PORT", str(10000 + int(os.environ.get("SLURM_JOB_ID", 0)) % 10000))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method="env://", rank=rank, world_size=world_size)
    return rank, world_size, device


def main(options):
    rank, world_size, device = setup()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    for step in range(options.steps):
        x = torch.randn(32, 8, generator=generator).to(device)
        loss = (model(x) - x.abs().sum(1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            mean = loss.detach().clone()
            dist.all_reduce(mean, op=dist.ReduceOp.SUM)
            if rank == 0:
                print(f"step {step + 1}: loss {mean.item() / world_size:.7f}")
    if rank == 0:
        torch.save(model.module.state_dict(), options.output)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output", default=os.devnull, help="where rank 0 puts the weights")
    main(parser.parse_args())
