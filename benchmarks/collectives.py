"""Collectives: cdist, torch's Gloo and mpi4py on Open MPI, interleaved in one run on one machine.

    PYTHONPATH=python python benchmarks/collectives.py --out /tmp/figures [--ranks 2,4]
        [--ops all_reduce,broadcast] [--sizes 4,65536,1048576,67108864]
        [--repetitions 3] [--raw build/c/bench_coll_shm] [--limit-s 80]
    python benchmarks/collectives.py --show DIR     the tables of an earlier run

Each repetition starts a short job for each contestant in turn and each operation. A figure is the median
(and the best) over the batches of all repetitions of the time that the slowest rank took for one call;
float32, blocking. The folder --out gets figures.json (added to when it is there, so that a run can be made
in pieces) and, where matplotlib is installed, a plot for each number of ranks.
"""

import argparse
import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
CONTESTANTS = ["cdist", "cdist-torch", "cdist-arena", "gloo", "mpi4py"]
OPS = ["all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "outstanding",
       "broadcast_object", "all_gather_object"]  # fmt: skip
SIZES = [4, 64 << 10, 1 << 20, 64 << 20]
# (bytes, arena) → ahead of Gloo, ahead of mpi4py: the goals for all_reduce between 2 ranks on 2 cores
GOALS = {
    (4, False): (150, 1.3),
    (64 << 10, False): (25, 2),
    (1 << 20, False): (8, 1.8),
    (64 << 20, False): (5, 4),
    (1 << 20, True): (25, 5),
    (64 << 20, True): (8, 6),
}


def size_name(size):
    return f"{size} B" if size < 1024 else f"{size >> 10} KiB" if size < 1 << 20 else f"{size >> 20} MiB"


def cases_of(op, sizes, kind):
    """What a contestant measures in a job."""
    if kind in ("cdist-arena", "cdist-torch") and op != "all_reduce":
        return []
    if op.endswith("object"):
        sizes = [size for size in sizes if size == 64 << 20]
    elif op == "outstanding":
        sizes = [size for size in sizes if size <= 1 << 20]
    return [[op, size] for size in sizes]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_job(kind, ranks, cases, out, limit):
    """Run one job of a contestant; seconds of each batch by case, None if it failed or took too long."""
    command = [sys.executable, str(HERE / "contestant.py"), kind, json.dumps(cases), str(out)]
    env = dict(os.environ, OMP_NUM_THREADS="1", WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1")
    out.unlink(missing_ok=True)
    if kind == "mpi4py":
        env.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
        mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        # Only where it must: with the flag Open MPI yields while it waits, which costs it time.
        more = ["--oversubscribe"] if ranks > os.cpu_count() else []
        jobs = [subprocess.Popen([mpirun, *more, "-n", str(ranks), *command], env=env)]
    else:
        env["MASTER_PORT"] = str(free_port())
        own = [dict(env, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(ranks)]
        jobs = [subprocess.Popen(command, env=env) for env in own]
    end = time.monotonic() + limit
    try:
        codes = [job.wait(max(end - time.monotonic(), 0.1)) for job in jobs]
    except subprocess.TimeoutExpired:
        codes = ["late"]
    finally:
        for job in jobs:
            if job.poll() is None:
                job.terminate()
                job.wait()
    if any(codes):
        print(f"{kind}, {ranks} ranks, {cases}: exit codes {codes}", file=sys.stderr)
        return None
    return json.loads(out.read_text())


def run_raw(program, ranks, op, sizes, limit):
    """Seconds of the C library alone, without Python: {case: [median]}."""
    run = subprocess.run([program, str(ranks), op], capture_output=True, text=True, timeout=limit)
    found = re.findall(r"(\d+) B  best +([\d.]+)  median +([\d.]+) us", run.stdout)
    return {f"{op} {size}": [float(median) * 1e-6] for size, _, median in found if int(size) in sizes}


def collect(options, out):
    """Run all jobs; adds to figures.json."""
    file = out / "figures.json"
    figures = json.loads(file.read_text()) if file.exists() else {}
    kinds = options.contestants.split(",")
    began = time.monotonic()
    for ranks in map(int, options.ranks.split(",")):
        here = figures.setdefault(str(ranks), {})
        for op in options.ops.split(","):
            for _ in range(options.repetitions):
                for kind in kinds:
                    cases = cases_of(op, options.sizes, kind)
                    if not cases or time.monotonic() - began > options.limit_s:
                        continue
                    got = run_job(kind, ranks, cases, out / "job.json", options.limit_s) or {}
                    rate = got.pop("copy_rate", None)
                    if rate:
                        figures["copy_rate"] = max(rate, figures.get("copy_rate", 0))
                    for case, seconds in got.items():
                        here.setdefault(kind, {}).setdefault(case, []).extend(seconds)
            if options.raw and op in OPS[:5]:
                for case, seconds in run_raw(options.raw, ranks, op, options.sizes, options.limit_s).items():
                    here.setdefault("C", {}).setdefault(case, []).extend(seconds)
    figures["cores"], figures["date"] = os.cpu_count(), time.strftime("%Y-%m-%d")
    (out / "job.json").unlink(missing_ok=True)
    file.write_text(json.dumps(figures))
    return figures


def median_us(here, kind, case):
    seconds = here.get(kind, {}).get(case)
    return statistics.median(seconds) * 1e6 if seconds else None


def number(value, unit=""):
    return "–" if value is None else f"{value:.2f}{unit}" if value < 100 else f"{value:.0f}{unit}"


def cell(here, kind, case):
    seconds = here.get(kind, {}).get(case)
    return f"{number(median_us(here, kind, case))} ({number(min(seconds) * 1e6)})" if seconds else "–"


def ratio(ours, theirs, goal):
    """How many times ours is faster, and what is missing."""
    if ours is None or theirs is None:
        return "–"
    return f"{theirs / ours:.1f}×" + (f" (goal {goal}×: missed)" if theirs / ours < goal else "")


def show(figures):
    """Print a table for each number of ranks: µs a call, and how far ahead."""
    copy = figures.get("copy_rate")
    rate = number(copy and copy / 1e9)
    print(f"{figures['date']}, {figures['cores']} cores; one core copies 64 MiB at {rate} GB/s")
    for ranks, here in figures.items():
        if not ranks.isdigit():
            continue
        print(f"\n{ranks} ranks; µs, median (best)\n")
        print("| operation | bytes | C | cdist | cdist, torch tensor | cdist, arena | Gloo | mpi4py "
              "| ahead of Gloo | ahead of mpi4py | of one core's copy |")  # fmt: skip
        print("|---|---|---|---|---|---|---|---|---|---|---|")
        cases = [f"{op} {size}" for op in OPS for size in SIZES if f"{op} {size}" in here.get("cdist", {})]
        for case in cases:
            op, size = case.split()
            row = [cell(here, kind, case) for kind in ["C", *CONTESTANTS]]
            for arena in (False, True):
                ours = median_us(here, "cdist-arena" if arena else "cdist", case)
                if arena and (ours is None or (int(size), True) not in GOALS):
                    continue
                has_goal = op == "all_reduce" and ranks == "2"
                goals = GOALS.get((int(size), arena), (1, 1)) if has_goal else (1, 1)
                theirs = [median_us(here, kind, case) for kind in ("gloo", "mpi4py")]
                ahead = [ratio(ours, them, goal) for them, goal in zip(theirs, goals, strict=True)]
                rate = number(int(size) / ours * 1e6 / copy if copy and ours and int(size) > 65536 else None)
                cells = row if not arena else [""] * len(row)
                name = f"{op} in the arena" if arena else op
                print("|", " | ".join([name, size_name(int(size)), *cells, *ahead, rate]), "|")


def plot(figures, out):
    try:
        import matplotlib
    except ImportError:
        print("no matplotlib: no plot", file=sys.stderr)
        return
    matplotlib.use("svg")
    from matplotlib import pyplot

    for ranks, here in figures.items():
        if not ranks.isdigit():
            continue
        ops = [op for op in OPS[:7] if any(case.startswith(op + " ") for case in here.get("cdist", {}))]
        grid, axes = pyplot.subplots(1, max(len(ops), 1), figsize=(4 * max(len(ops), 1), 4), squeeze=False)
        for op, axis in zip(ops, axes[0], strict=False):
            for kind in ["C", *CONTESTANTS]:
                line = [(size, median_us(here, kind, f"{op} {size}")) for size in SIZES]
                line = [point for point in line if point[1]]
                if line:
                    axis.loglog(*zip(*line, strict=True), marker="o", label=kind)
            axis.set(title=f"{op}, {ranks} ranks", xlabel="bytes", ylabel="µs a call")
            axis.legend(fontsize=7)
        grid.tight_layout()
        grid.savefig(out / f"collectives-{ranks}.svg")
        pyplot.close(grid)


def main():
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--out", type=Path)
    options.add_argument("--show", type=Path)
    options.add_argument("--ranks", default="2,4")
    options.add_argument("--ops", default=",".join(OPS))
    options.add_argument("--contestants", default=",".join(CONTESTANTS))
    options.add_argument("--sizes", default=",".join(map(str, SIZES)))
    options.add_argument("--repetitions", type=int, default=3)
    options.add_argument(
        "--raw", help="the program bench_coll_shm (built by make -C tests/c T=bench_coll_shm)"
    )
    options.add_argument("--limit-s", type=float, default=3600, help="starts no further job after this time")
    options = options.parse_args()
    options.sizes = [int(size) for size in options.sizes.split(",")]
    out = options.show or options.out
    if not out:
        sys.exit("collectives.py: give --out DIR for a run, or --show DIR")
    if options.out:
        out.mkdir(parents=True, exist_ok=True)
        figures = collect(options, out)
        plot(figures, out)
    else:
        figures = json.loads((out / "figures.json").read_text())
    show(figures)


if __name__ == "__main__":
    main()
