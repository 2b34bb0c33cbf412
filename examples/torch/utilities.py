"""Without DDP: gradients averaged by hand, and the helpers that many repositories carry along.

cdistrun --nproc-per-node 2 examples/torch/utilities.py
torchrun --nproc-per-node 2 examples/torch/utilities.py
"""

import argparse
import functools
import pickle

import cdist as dist
import torch
from torch import nn


def is_ready():
    return dist.is_available() and dist.is_initialized()


def get_rank():
    return dist.get_rank() if is_ready() else 0


def get_world_size():
    return dist.get_world_size() if is_ready() else 1


@functools.cache
def group_on_cpu():
    """Objects travel through host memory, whatever the backend of the gradients."""
    if dist.get_backend() == "nccl":
        return dist.new_group(backend="gloo")
    return dist.distributed_c10d._get_default_group()


def all_gather_pickled(data):
    """What every rank gave, whatever its size."""
    group = group_on_cpu()
    device = dist.distributed_c10d._get_pg_default_device(group)
    mine = torch.frombuffer(bytearray(pickle.dumps(data)), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(get_world_size())]
    dist.all_gather(sizes, torch.tensor([mine.numel()]), group=group)
    longest = int(max(sizes))
    padded = torch.cat((mine, mine.new_zeros(longest - mine.numel())))
    pieces = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(pieces, padded, group=group)
    return [pickle.loads(piece.numpy()[: int(size)]) for piece, size in zip(pieces, sizes, strict=True)]


def mean_of_dict(values):
    """The means over all ranks, on rank 0; in one message."""
    names = sorted(values)
    packed = torch.stack([values[name].detach() for name in names])
    dist.reduce(packed, dst=0)
    return dict(zip(names, (packed / get_world_size()).tolist(), strict=True))


class Average:
    """Of a number over the steps of all ranks."""

    def __init__(self):
        self.total, self.count = 0.0, 0

    def update(self, value):
        self.total, self.count = self.total + value, self.count + 1

    def over_all_ranks(self):
        both = torch.tensor([self.total, self.count], dtype=torch.float64)
        dist.barrier()
        dist.all_reduce(both)
        return (both[0] / both[1]).item()


def average_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad.data, op=dist.ReduceOp.SUM)
        parameter.grad.data /= get_world_size()


def sum_around_the_ring(tensor):
    """An all_reduce of messages: each rank passes on what came from its left, until all has come round."""
    rank, size = get_rank(), get_world_size()
    total, travelling, coming = tensor.clone(), tensor.clone(), torch.empty_like(tensor)
    for _ in range(size - 1):
        request = dist.isend(travelling, (rank + 1) % size)
        dist.recv(coming, (rank - 1) % size)
        request.wait()
        total += coming
        travelling, coming = coming, travelling
    return total


def main(options):
    assert (get_rank(), get_world_size()) == (0, 1)
    dist.init_process_group(backend="gloo", init_method="env://")
    rank, size = get_rank(), get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    generator = torch.Generator().manual_seed(rank)
    average, stop = Average(), torch.zeros(1)
    while not stop.item():
        x = torch.randn(16, 8, generator=generator)
        loss = nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long())
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model)
        optimizer.step()
        average.update(loss.item())
        told = mean_of_dict({"loss": loss, "norm": model[0].weight.norm()})
        if rank == 0:
            print(f"step {average.count}: loss {told['loss']:.6f} norm {told['norm']:.6f}")
            stop[0] = told["loss"] < 0.5 or average.count == 20
        dist.broadcast(stop, src=0)  # all stop in the same step

    for name, buffer in model.named_buffers():
        if "running" in name:
            dist.all_reduce(buffer)
            buffer /= size
    mean = average.over_all_ranks()
    ring = sum_around_the_ring(torch.arange(3.0) + rank)
    lengths = [len(words) for words in all_gather_pickled("word " * (rank + 1))]
    lines = all_gather_pickled(
        f"rank {rank}: mean loss {mean:.6f}, around the ring {ring.tolist()}, lengths {lengths}"
    )
    if rank == 0:
        print("\n".join(lines))
        torch.save(model.state_dict(), options.output)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", default="utilities.pt")
    main(parser.parse_args())
