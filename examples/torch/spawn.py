"""First steps: a toy model on two processes that the script starts by itself.

python examples/torch/spawn.py --ranks 2
"""

import argparse
import os

import cdist as dist
import cdist.multiprocessing as mp
import torch
from cdist.nn.parallel import DistributedDataParallel as DDP
from torch import nn

STEPS, BATCH = 20, 20


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def setup(rank, world_size):
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "12355")
    backend = "nccl" if torch.cuda.device_count() >= world_size else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=world_size)


def cleanup():
    dist.destroy_process_group()


def demo_basic(rank, world_size, output):
    print(f"Running basic DDP example on rank {rank}.")
    setup(rank, world_size)
    on_gpu = dist.get_backend() == "nccl"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")

    torch.manual_seed(rank)  # other weights on every rank: DDP gives them those of rank 0
    model = ToyModel().to(device)
    ddp_model = DDP(model, device_ids=[rank] if on_gpu else None)

    loss_fn = nn.MSELoss()
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        outputs = ddp_model(torch.randn(BATCH, 10).to(device))
        labels = torch.randn(BATCH, 5).to(device)
        loss = loss_fn(outputs, labels)
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item():.7f}")
    if rank == 0:
        torch.save(ddp_model.state_dict(), output)
    cleanup()
    print(f"Finished running basic DDP example on rank {rank}.")


def run_demo(demo_fn, world_size, output):
    mp.spawn(demo_fn, args=(world_size, output), nprocs=world_size, join=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--output", default="toy.pt", help="where rank 0 puts the weights (%(default)s)")
    options = parser.parse_args()
    run_demo(demo_basic, options.ranks, options.output)
