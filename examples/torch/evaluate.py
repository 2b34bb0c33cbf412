"""Trains on the handwritten digits of scikit-learn and evaluates exactly: every test image counts once.

cdistrun --nproc-per-node 2 examples/torch/evaluate.py
torchrun --nproc-per-node 2 examples/torch/evaluate.py
"""

import argparse
import os

import cdist as dist
import torch
from cdist.nn.parallel import DistributedDataParallel as DDP
from cdist.utils.data.distributed import DistributedSampler
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

TRAINING_SAMPLES, CLASSES = 1500, 10


def load():
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    data = TensorDataset(images[order], labels[order])
    return Subset(data, range(TRAINING_SAMPLES)), Subset(data, range(TRAINING_SAMPLES, len(labels)))


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 16, CLASSES),
    )  # fmt: skip


def train_epoch(model, loader, optimizer):
    model.train()
    total = torch.zeros(2, dtype=torch.float64)
    for images, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        total += torch.tensor([loss.item() * len(labels), len(labels)])
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    return (total[0] / total[1]).item()


@torch.no_grad()
def evaluate(model, dataset):
    """The table of (label, prediction) counts over all ranks, and on rank 0 the images that went wrong.

    DistributedSampler repeats samples so that all ranks have as many; an exact count needs uneven shares.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model.eval()
    mine = range(rank, len(dataset), world_size)
    table = torch.zeros(CLASSES, CLASSES, dtype=torch.int64)
    wrong, indices = [], iter(mine)
    for images, labels in DataLoader(Subset(dataset, mine), batch_size=64):
        for label, guess in zip(labels, model.module(images).argmax(1), strict=True):
            table[label, guess] += 1
            index = next(indices)
            if label != guess:
                wrong.append((index, label.item(), guess.item()))
    work = dist.all_reduce(table, async_op=True)
    gathered = [None] * world_size if rank == 0 else None
    dist.gather_object(wrong, gathered, dst=0)
    work.wait()
    return table, sorted(sum(gathered, [])) if rank == 0 else None


def main(options):
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    training, test = load()
    model = DDP(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sampler = DistributedSampler(training, num_replicas=world_size, rank=rank, shuffle=True, drop_last=True)
    loader = DataLoader(training, batch_size=64 // world_size, sampler=sampler)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        loss = train_epoch(model, loader, optimizer)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss:.7f}")

    table, wrong = evaluate(model, test)
    if rank == 0:
        right, count = table.trace().item(), table.sum().item()
        print(f"test accuracy: {right / count:.2%} ({right} of {count} images)")
        print("wrong (image, label, guess):", wrong)
        torch.save(model.module.state_dict(), options.output)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--output", default=os.devnull, help="where rank 0 puts the weights")
    main(parser.parse_args())
