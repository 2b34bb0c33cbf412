"""DistributedSampler against torch's: time to the first index and to drain, interleaved, medians.

python benchmarks/sampler.py [--samples 10000000] [--replicas 8] [--rounds 7] [--json FILE]
"""

import argparse
import json
import statistics
import time

import torch.utils.data
from cdist.sampler import DistributedSampler


def one_pass(cls, samples, replicas, epoch):
    sampler = cls(range(samples), replicas, 3 % replicas)
    sampler.set_epoch(epoch)
    begin = time.perf_counter()
    iterator = iter(sampler)
    next(iterator)
    first = time.perf_counter()
    for _ in iterator:
        pass
    return (first - begin) * 1e3, (time.perf_counter() - first) * 1e3


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=10_000_000)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", help="write the medians to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    times = {"cdist": [], "torch": []}
    classes = {"cdist": DistributedSampler, "torch": torch.utils.data.DistributedSampler}
    for epoch in range(args.rounds + 1):
        for name, cls in classes.items():
            measured = one_pass(cls, args.samples, args.replicas, epoch)
            if epoch > 0:  # the first round warms up
                times[name].append(measured)
    medians = {
        name: [statistics.median(column) for column in zip(*rows, strict=True)]
        for name, rows in times.items()
    }
    print(f"{args.samples} samples over {args.replicas} replicas, median of {args.rounds} rounds")
    for i, what in enumerate(("first index", "drain")):
        ours, theirs = medians["cdist"][i], medians["torch"][i]
        print(f"{what:12} cdist {ours:8.1f} ms   torch {theirs:8.1f} ms   {theirs / ours:5.1f} times")
    if args.json:
        with open(args.json, "w") as file:
            out = {"samples": args.samples, "replicas": args.replicas}
            for name, (first, drain) in medians.items():
                out |= {f"{name}_first_ms": first, f"{name}_drain_ms": drain}
            json.dump(out, file)


if __name__ == "__main__":
    main()
