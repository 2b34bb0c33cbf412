"""TCPStore: our client and server beside torch's, interleaved in one run; µs a call, median and spread.

    PYTHONPATH=python python benchmarks/store.py [--rounds 15] [--calls 400] [--json FILE]

The server runs in a process of its own, as it does in a launcher.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from datetime import timedelta

SERVE = {
    "cdist": "from cdist.store import TCPStore as S\ns = S('127.0.0.1', 0, None, True)",
    "torch": "from torch.distributed import TCPStore as S\ns = S('127.0.0.1', 0, None, True)",
}


def serve(kind):
    """Start a server process; (process, port)."""
    code = SERVE[kind] + "\nimport sys\nprint(s.port, flush=True)\nsys.stdin.read()"
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    process = subprocess.Popen([sys.executable, "-c", code], **pipes)
    return process, int(process.stdout.readline())


def measure(call, calls):
    """Microseconds a call."""
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - began) / calls * 1e6


def operations(store):
    """What is measured, by name. A set has no answer: "set" is the time to hand it over."""
    value = b"x" * 100
    store.set("k", value)
    return {
        "get": lambda: store.get("k"),
        "add": lambda: store.add("n", 1),
        "set": lambda: store.set("s", value),
        "check": lambda: store.check(["k"]),
        "wait": lambda: store.wait(["k"], timedelta(seconds=5)),
        "set+get": lambda: (store.set("k", value), store.get("k")),
    }


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--calls", type=int, default=400)
    options.add_argument("--json")
    options = options.parse_args()
    import cdist.store
    import torch.distributed

    servers = {kind: serve(kind) for kind in SERVE}
    classes = {"cdist": cdist.store.TCPStore, "torch": torch.distributed.TCPStore}
    pairs = [("cdist", "cdist"), ("torch", "torch"), ("cdist", "torch"), ("torch", "cdist")]
    try:
        stores = {}
        for client, server in pairs:
            port = servers[server][1]
            stores[client, server] = classes[client]("127.0.0.1", port, None, False, timedelta(seconds=20))
        calls = {pair: operations(store) for pair, store in stores.items()}
        times = {(pair, name): [] for pair in pairs for name in calls[pairs[0]]}
        for _ in range(options.rounds):
            for name in calls[pairs[0]]:
                for pair in pairs:
                    times[pair, name].append(measure(calls[pair][name], options.calls))
    finally:
        for process, _ in servers.values():
            process.stdin.close()
            process.wait(10)
    print(f"{os.cpu_count()} cores, torch {torch.__version__}; µs a call: median (least – most)")
    rows = []
    for name in calls[pairs[0]]:
        cells = []
        for pair in pairs:
            t = times[pair, name]
            cells.append(f"{statistics.median(t):7.1f} ({min(t):.1f} – {max(t):.1f})")
            median = statistics.median(t)
            rows.append(dict(operation=name, client=pair[0], server=pair[1], median_us=median, times_us=t))
        print(f"{name:8}", "   ".join(f"{c}→{s} {cell}" for (c, s), cell in zip(pairs, cells, strict=True)))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
