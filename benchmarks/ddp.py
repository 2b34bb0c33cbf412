"""What DistributedDataParallel costs beside torch's over Gloo: 2 ranks on the CPU, the same
processes run both, in turns.

    python benchmarks/ddp.py [--steps 60] [--models mlp transformer resnet18] [--json out.json]

For each model: median time of a step, of the same step under no_sync(), and what synchronisation costs: the
median, over pairs of steps that follow each other, of the difference. All are means of the ranks. Then the
cost of a gradient hook per parameter, and the peak memory of a process that trains with either.
"""

import argparse
import json
import os
import resource
import statistics
import tempfile
import time

import cdist
import torch
from cdist.testing import run
from torch import nn


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Residual(nn.Module):
    def __init__(self, inside, outside, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(),
            nn.Conv2d(outside, outside, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outside),
        )
        self.skip = nn.Sequential()
        if stride > 1 or inside != outside:
            self.skip = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
            )

    def forward(self, x):
        return torch.relu(self.body(x) + self.skip(x))


def mlp():
    layers = [layer for _ in range(64) for layer in (nn.Linear(256, 256), nn.ReLU())]
    return nn.Sequential(*layers), torch.randn(8, 256)


def transformer():
    return nn.Sequential(*[Block(256, 4) for _ in range(4)]), torch.randn(2, 32, 256)


def resnet18():
    layers = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    inside = 64
    for outside, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Residual(inside, outside, stride), Residual(outside, outside, 1)]
        inside = outside
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)), torch.randn(
        1, 3, 32, 32
    )


TURN = 5  # steps of either before it is the other's turn

MODELS = {"mlp": mlp, "transformer": transformer, "resnet18": resnet18}


def start_torch(rank, world, path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)


def step(ddp, x):
    ddp.zero_grad()
    ddp(x).square().mean().backward()


def timed(ddp, x, sync):
    cdist.barrier()
    begin = time.perf_counter()
    if sync:
        step(ddp, x)
    else:
        with ddp.no_sync():
            step(ddp, x)
    return (time.perf_counter() - begin) * 1e3


def measure(rank, world, path, names, steps):
    torch.set_num_threads(1)
    start_torch(rank, world, path)
    rows = []
    for name in names:
        torch.manual_seed(0)
        pairs = {}
        for who, wrap in (
            ("cdist", cdist.DistributedDataParallel),
            ("torch", nn.parallel.DistributedDataParallel),
        ):
            module, x = MODELS[name]()
            pairs[who] = wrap(module, gradient_as_bucket_view=True)
        times = {(who, sync): [] for who in pairs for sync in (True, False)}
        for turn in range(steps // TURN + 1):
            for who in pairs:
                # The first steps of a turn find the caches full of the other's model.
                for number in range(TURN + 1):
                    for sync in (True, False):
                        value = timed(pairs[who], x, sync)
                        if turn and number:
                            times[who, sync].append(value)
        row = {"parameters": len(list(pairs["cdist"].parameters()))}
        for who in pairs:
            row[f"{who}_step_ms"] = statistics.median(times[who, True])
            row[f"{who}_no_sync_ms"] = statistics.median(times[who, False])
            differences = [a - b for a, b in zip(times[who, True], times[who, False], strict=True)]
            row[f"{who}_sync_ms"] = statistics.median(differences)
        rows.append(row)
    return rows


def of_all_ranks(names, ranks):
    """One row a model: the mean of what the ranks measured."""
    rows = []
    for name, of_ranks in zip(names, zip(*ranks, strict=True), strict=True):
        row = {key: statistics.mean(r[key] for r in of_ranks) for key in of_ranks[0]}
        row["ratio"] = row["torch_sync_ms"] / max(row["cdist_sync_ms"], 1e-3)
        rows.append({"model": name} | row)
    return rows


def hook_cost(rank, world):
    """Microseconds per parameter of 400 tiny parameters: backward with hooks minus backward of the bare
    module; one rank.
    """
    torch.set_num_threads(1)
    parts = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(400)])
    module = nn.Module()
    module.parts = parts
    module.forward = lambda x: torch.stack([p * x for p in parts]).sum()
    results = {}

    def time_backward(run_forward):
        values = []
        for _ in range(60):
            module.zero_grad()
            loss = run_forward(torch.ones(2))
            begin = time.perf_counter()
            loss.backward()
            values.append(time.perf_counter() - begin)
        return statistics.median(values) * 1e6 / len(parts)

    results["bare"] = time_backward(module.forward)
    ddp = cdist.DistributedDataParallel(module, gradient_as_bucket_view=True)
    results["ddp"] = time_backward(ddp)
    results["hook_us"] = results["ddp"] - results["bare"]
    return results


def memory(rank, world, who, path):
    torch.set_num_threads(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if who == "torch":
        start_torch(rank, world, path)
    module = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(16)])
    wrap = cdist.DistributedDataParallel if who == "cdist" else nn.parallel.DistributedDataParallel
    ddp = wrap(module, gradient_as_bucket_view=True)
    for _ in range(4):
        step(ddp, torch.randn(4, 1024))
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        ranks = run(
            measure,
            2,
            os.path.join(folder, "a"),
            options.models,
            options.steps,
            timeout=300,
            check_leftovers=False,
        )
        rows = of_all_ranks(options.models, ranks)
        peaks = {
            who: max(run(memory, 2, who, os.path.join(folder, who), timeout=120, check_leftovers=False))
            for who in ("cdist", "torch")
        }
    hooks = run(hook_cost, 1, timeout=60)[0]
    print(
        f"{'model':12} {'params':>6} {'cdist step':>11} {'sync costs':>11} {'torch step':>11} "
        f"{'sync costs':>11} {'ratio':>6}"
    )
    for r in rows:
        print(
            f"{r['model']:12} {r['parameters']:6g} {r['cdist_step_ms']:8.2f} ms {r['cdist_sync_ms']:8.2f} ms "
            f"{r['torch_step_ms']:8.2f} ms {r['torch_sync_ms']:8.2f} ms {r['ratio']:6.1f}"
        )
    print(
        f"hook: {hooks['hook_us']:.2f} us per parameter ({hooks['ddp']:.2f} with, {hooks['bare']:.2f} "
        "without)"
    )
    print(
        f"peak memory above the start, 64 MiB of gradients: cdist {peaks['cdist']:.0f} MiB, torch "
        f"{peaks['torch']:.0f} MiB"
    )
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"models": rows, "hook": hooks, "peak_mib": peaks}, file, indent=1)


if __name__ == "__main__":
    main()
