"""Starting up: what `import cdist` adds to `import numpy`, and set-up beside torch's Gloo.

    PYTHONPATH=python python benchmarks/startup.py [--runs 11] [--json FILE]

Milliseconds, medians (least – most) of runs that take turns. Set-up is init and the first all_reduce, between
two ranks that have imported all they need and begin together; the slower one counts. Goals: import at most
30 ms; set-up under 10 ms and not slower than Gloo's.
"""

import argparse
import atexit
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile

IMPORT = """
import time
import numpy
began = time.perf_counter()
import {module}
print((time.perf_counter() - began) * 1e3)
"""
SET_UP = """
import sys, time
import numpy as np
import {dist} as dist
x = {array}
print("ready", flush=True)
sys.stdin.readline()
began = time.perf_counter()
dist.init_process_group("gloo")
middle = time.perf_counter()
dist.all_reduce(x)
end = time.perf_counter()
print((end - began) * 1e3, (middle - began) * 1e3, flush=True)
dist.barrier()
dist.destroy_process_group()
"""
KINDS = {
    "cdist": dict(dist="cdist", array="np.ones(1, np.float32)"),
    "Gloo": dict(dist="torch.distributed", array="__import__('torch').ones(1)"),
}


def time_import(module):
    command = [sys.executable, "-c", IMPORT.format(module=module)]
    run = subprocess.run(command, capture_output=True, text=True)
    return float(run.stdout)


def time_set_up(kind):
    """Milliseconds of the slower of two ranks: (init and first all_reduce, init alone)."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = dict(
        os.environ, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1"
    )
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    command = [sys.executable, "-c", SET_UP.format(**KINDS[kind])]
    ranks = [subprocess.Popen(command, env=dict(env, RANK=str(rank)), **pipes) for rank in range(2)]
    try:
        for rank in ranks:
            assert rank.stdout.readline() == "ready\n"
        for rank in ranks:
            rank.stdin.write("\n")
            rank.stdin.flush()
        times = [tuple(map(float, rank.communicate(timeout=60)[0].split())) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return max(times)


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--runs", type=int, default=11)
    options.add_argument("--json")
    options = options.parse_args()
    # An installed package has its bytecode: so has ours here, from the first run on, which is not counted.
    os.environ["PYTHONPYCACHEPREFIX"] = tempfile.mkdtemp(prefix="cdist_startup_")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    atexit.register(shutil.rmtree, os.environ["PYTHONPYCACHEPREFIX"])
    time_import("cdist.launch.main"), [time_set_up(kind) for kind in KINDS]
    figures = {}
    for _ in range(options.runs):
        for module in ("cdist", "cdist.launch.main"):
            figures.setdefault(f"import {module}, over numpy's", []).append(time_import(module))
        for kind in KINDS:
            both, init = time_set_up(kind)
            figures.setdefault(f"{kind}: init and first all_reduce", []).append(both)
            figures.setdefault(f"{kind}: init", []).append(init)
    for name, times in figures.items():
        print(f"{name:40} {statistics.median(times):8.2f} ms ({min(times):.2f} – {max(times):.2f})")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
