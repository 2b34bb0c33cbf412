"""Collectives: cdist, torch's Gloo and mpi4py on Open MPI, interleaved in one run on one machine.

    PYTHONPATH=python python benchmarks/collectives.py --out DIR [--ranks 2,4] [--ops all_reduce,broadcast]
        [--sizes 4,65536,1048576,67108864] [--contestants cdist,gloo,mpi4py] [--repetitions 3]
        [--raw build/c/bench_coll_shm] [--limit-s 75] [--transport tcp]
    python benchmarks/collectives.py --show DIR                 the tables of earlier runs
    PYTHONPATH=python python benchmarks/collectives.py --out DIR --many [--limit-s 140]
        many ranks: 8, 16 and 32; 4 B, 64 KiB, 1 MiB and 64 MiB; with --raw also what the small and the staged
        path take on both sides of their threshold

A run goes operation by operation; each repetition of an operation starts a short job of each contestant
in turn. With --limit-s no further one is begun after that time; the same command goes on where the last
one stopped, until it says that all is done. With --transport tcp all contestants talk over loopback
sockets (Gloo does anyway). DIR/figures.json has the seconds of every batch,
DIR/collectives-N.svg (where matplotlib is installed) a plot for each number of ranks.

A figure is the median (and the best) over the batches of all repetitions of the time that the slowest
rank took for one call; float32, blocking. "C" is the same call without Python (tests/c/bench_coll_shm).
Goals are those of a 2-core machine, and for 8 ranks and more those of a machine with at least as many
cores.
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
NAMES = ["C", "cdist", "cdist, torch tensor", "cdist, arena", "Gloo", "mpi4py"]
RAW_OPS = ["all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"]
OBJECT_OPS = ["broadcast_object", "all_gather_object", "gather_object", "scatter_object", "send_object"]
OPS = [*RAW_OPS, "send_recv", "outstanding", *OBJECT_OPS]
SIZES = [4, 64 << 10, 1 << 20, 64 << 20]
# all_reduce between 2 ranks: (bytes, arena) → times ahead of Gloo and of mpi4py
AHEAD = {
    (4, False): (150, 1.3),
    (64 << 10, False): (25, 2),
    (1 << 20, False): (8, 1.8),
    (64 << 20, False): (5, 4),
    (1 << 20, True): (25, 5),
    (64 << 20, True): (8, 6),
}
SHARE = {1 << 20: 0.8, 64 << 20: 0.5}  # of one core's copy rate
LIMIT_US = {"C": 0.3, "cdist": 0.6, "cdist-torch": 0.8}  # 4 B
# 8 ranks and more: at most half of Open MPI's time, at least three times its rate
MANY_AHEAD = {4: (1, 2), 64 << 20: (1, 3)}
MEMORY_LIMIT = 8 << 20


def size_name(size):
    return f"{size} B" if size < 1024 else f"{size >> 10} KiB" if size < 1 << 20 else f"{size >> 20} MiB"


def cases_of(op, sizes, kind):
    """What a contestant measures in a job."""
    if kind == "cdist-torch" and op != "all_reduce":
        return []
    if kind == "cdist-arena" and op not in RAW_OPS:
        return []
    if op in OBJECT_OPS:
        sizes = [size for size in sizes if size in (4, 64 << 20)]
    return [[op, size] for size in sizes]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def find_mpirun():
    return shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


def start_job(kind, ranks, command, transport):
    env = dict(
        os.environ,
        OMP_NUM_THREADS="1",
        WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        PYTHONWARNINGS="ignore",
    )
    if kind == "mpi4py":
        env.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
        # Only where it must: with the flag Open MPI yields while it waits, which costs it time.
        more = ["--oversubscribe"] if ranks > len(os.sched_getaffinity(0)) else []
        if transport == "tcp":
            more += ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "coll", "^sm,xhc"]
        return [subprocess.Popen([find_mpirun(), *more, "-n", str(ranks), *command], env=env)]
    env["MASTER_PORT"] = str(free_port())
    if transport == "tcp":
        env["CDIST_TRANSPORT"] = "tcp"
    own = [dict(env, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(ranks)]
    return [subprocess.Popen(command, env=env) for env in own]


def run_job(kind, ranks, cases, out, limit, transport):
    """Run one job of a contestant; what its rank 0 wrote, None if it failed or took too long."""
    out.unlink(missing_ok=True)
    if kind == "mpi4py" and not find_mpirun():
        return None
    command = [sys.executable, str(HERE / "contestant.py"), kind, json.dumps(cases), str(out)]
    jobs = start_job(kind, ranks, command, transport)
    end = time.monotonic() + limit
    try:
        codes = [job.wait(max(end - time.monotonic(), 0.1)) for job in jobs]
    except subprocess.TimeoutExpired:
        codes = ["late"]
    finally:
        for job in jobs:
            if job.poll() is None:
                job.terminate()
                try:
                    job.wait(3)
                except subprocess.TimeoutExpired:
                    job.kill()
                    job.wait()
    if any(codes):
        print(f"{kind}, {ranks} ranks, {cases}: exit codes {codes}", file=sys.stderr)
        return None
    return json.loads(out.read_text())


def run_raw(program, ranks, op, sizes, path=None):
    """Seconds of the C library alone, without Python: {bytes: median}."""
    command = [program, str(ranks), op, path or "plan", *map(str, sizes)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.findall(r"(\d+) B  best +([\d.]+)  median +([\d.]+) us", run.stdout)
    return {int(size): float(median) * 1e-6 for size, _, median in found}


def run_unit(options, figures, ranks, op):
    """One repetition of an operation: each contestant once."""
    here = figures.setdefault(str(ranks), {})
    for kind in options.contestants:
        cases = cases_of(op, options.sizes, kind)
        if not cases:
            continue
        got = run_job(kind, ranks, cases, options.out / "job.json", options.job_limit_s, options.transport)
        if not got:
            continue
        figures["copy_rate"] = max(got["copy_rate"] or 0, figures.get("copy_rate", 0))
        for case, seconds in got["seconds"].items():
            here.setdefault(kind, {}).setdefault(case, []).extend(seconds)
        for case, extra in (got["memory"] or {}).items():
            peaks = figures.setdefault("memory", {}).setdefault(str(ranks), {})
            peaks[case] = max(extra, peaks.get(case, 0))
    if options.raw and op in RAW_OPS:
        for size, seconds in run_raw(options.raw, ranks, op, options.sizes).items():
            here.setdefault("C", {}).setdefault(f"{op} {size}", []).append(seconds)


def tune(options, figures, ranks):
    """Times of both paths of all_reduce around the size where the plan changes from one to the other."""
    sizes = [64, 256, 512, 1 << 10, 4 << 10, 16 << 10]
    both = {
        path: run_raw(options.raw, ranks, "all_reduce", sizes, path) for path in ("shm_small", "shm_stage")
    }
    figures.setdefault("tuning", {})[str(ranks)] = both


def collect(options):
    """Run what is not done yet; adds to figures.json."""
    file = options.out / "figures.json"
    figures = json.loads(file.read_text()) if file.exists() else {"done": []}
    figures["cores"], figures["date"] = len(os.sched_getaffinity(0)), time.strftime("%Y-%m-%d")
    began, left = time.monotonic(), 0
    units = [
        (ranks, op, i) for i in range(options.repetitions) for ranks in options.ranks for op in options.ops
    ]
    if options.many and options.raw:
        units += [(ranks, "tune", 0) for ranks in options.ranks]
    for ranks, op, i in units:
        unit = f"{ranks} {op} {i} {options.contestants} {options.sizes}"
        if unit in figures["done"]:
            continue
        if time.monotonic() - began > options.limit_s:
            left += 1
            continue
        if op == "tune":
            tune(options, figures, ranks)
        else:
            run_unit(options, figures, ranks, op)
        figures["done"].append(unit)
        file.write_text(json.dumps(figures))
    (options.out / "job.json").unlink(missing_ok=True)
    print(f"{left} of {len(units)} parts are left: run the same command again" if left else "all is done")
    return figures


def median_us(here, kind, case):
    seconds = here.get(kind, {}).get(case)
    return statistics.median(seconds) * 1e6 if seconds else None


def number(value, unit=""):
    return "–" if value is None else f"{value:.2f}{unit}" if value < 100 else f"{value:.0f}{unit}"


def cell(here, kind, case):
    seconds = here.get(kind, {}).get(case)
    return f"{number(median_us(here, kind, case))} ({number(min(seconds) * 1e6)})" if seconds else "–"


class Goals:
    """Which goals were looked at, and which were missed."""

    def __init__(self):
        self.met, self.missed = 0, []

    def judge(self, what, value, goal, text, at_most=False):
        """Return the cell: value, goal, and whether it is met."""
        if value is None:
            return "–"
        if goal is None:
            return text
        good = value <= goal if at_most else value >= goal
        sign = "≤" if at_most else "≥"
        self.met += good
        if not good:
            self.missed.append(f"{what}: {text}, goal {sign} {goal}")
        return f"{text} ({sign} {goal}: {'met' if good else 'MISSED'})"


def ahead_of(goals, here, ranks, case, kind):
    """The cells "ahead of Gloo" and "ahead of mpi4py" of a row."""
    op, size = case.split()
    wanted = (1, 1)
    if op == "all_reduce" and ranks == 2:
        wanted = AHEAD.get((int(size), kind == "cdist-arena"), wanted)
    elif op == "all_reduce" and ranks >= 8:
        wanted = MANY_AHEAD.get(int(size), wanted)
    ours, cells = median_us(here, kind, case), []
    for them, goal in zip(("gloo", "mpi4py"), wanted, strict=True):
        theirs = median_us(here, them, case)
        ratio = theirs / ours if theirs and ours else None
        what = f"{ranks} ranks, {op}, {size_name(int(size))}, {kind} ahead of {them}"
        cells.append(goals.judge(what, ratio, goal, number(ratio, "×")))
    return cells


def rows_of(figures, goals, ranks, here, case):
    """Rows of the table for one case: private memory, and the arena where it was measured."""
    op, size = case.split()
    name, copy = f"{ranks} ranks, {op}, {size_name(int(size))}", figures.get("copy_rate")
    is_goal = ranks == 2 and op == "all_reduce"
    times = [cell(here, kind, case) for kind in ("C", *CONTESTANTS)]
    if is_goal and size == "4":
        for i, kind in enumerate(("C", "cdist", "cdist-torch")):
            took = median_us(here, kind, case)
            times[i] = goals.judge(f"{name}, {kind}, µs", took, LIMIT_US[kind], times[i], True)
    for kind in ("cdist", "cdist-arena"):
        ours = median_us(here, kind, case)
        if ours is None:
            continue
        share = int(size) / ours * 1e6 / copy if copy and int(size) > 65536 and op in RAW_OPS else None
        goal = SHARE.get(int(size)) if is_goal and kind == "cdist" else None
        cells = ahead_of(goals, here, ranks, case, kind)
        cells.append(goals.judge(f"{name}, share of one core's copy rate", share, goal, number(share)))
        if kind == "cdist":
            peak = figures.get("memory", {}).get(str(ranks), {}).get(case)
            limit = MEMORY_LIMIT if peak is not None and op not in OBJECT_OPS else None
            text = number(peak and peak / (1 << 20), " MiB")
            good = goals.judge(f"{name}, peak extra memory", peak, limit, text, True)
            yield [op, size_name(int(size)), *times, *cells, text if "met" in good else good]
        else:
            yield [f"{op} in the arena", size_name(int(size)), *[""] * len(times), *cells, ""]


def show(figures):
    """Print a table for each number of ranks: µs a call, how far ahead, and which goals are met."""
    rate = number(figures.get("copy_rate") and figures["copy_rate"] / 1e9)
    print(f"{figures['date']}, {figures['cores']} cores; one core copies 64 MiB at {rate} GB/s")
    goals = Goals()
    for ranks, here in figures.items():
        if not ranks.isdigit():
            continue
        print(f"\n{ranks} ranks; µs, median (best)\n")
        head = [
            "operation",
            "bytes",
            *NAMES,
            "ahead of Gloo",
            "ahead of mpi4py",
            "of one core's copy",
            "memory",
        ]
        print("|", " | ".join(head), "|")
        print("|---" * len(head) + "|")
        for case in (
            f"{op} {size}" for op in OPS for size in SIZES if f"{op} {size}" in here.get("cdist", {})
        ):
            for row in rows_of(figures, goals, int(ranks), here, case):
                print("|", " | ".join(row), "|")
    for ranks, both in figures.get("tuning", {}).items():
        print(f"\n{ranks} ranks, all_reduce in C, µs: bytes small / stage:", end="")
        for size, small in both["shm_small"].items():
            print(f"  {size} {small * 1e6:.1f}/{both['shm_stage'].get(size, 0) * 1e6:.1f}", end="")
        print()
    print(f"\n{goals.met} goals met, {len(goals.missed)} missed")
    for text in goals.missed:
        print(f"  missed: {text}")


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
            for kind, name in zip(["C", *CONTESTANTS], NAMES, strict=True):
                line = [(size, median_us(here, kind, f"{op} {size}")) for size in SIZES]
                line = [point for point in line if point[1]]
                if line:
                    axis.loglog(*zip(*line, strict=True), marker="o", label=name)
            axis.set(title=f"{op}, {ranks} ranks", xlabel="bytes", ylabel="µs a call")
            axis.legend(fontsize=7)
        grid.tight_layout()
        grid.savefig(out / f"collectives-{ranks}.svg")
        pyplot.close(grid)


def parse():
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--out", type=Path)
    options.add_argument("--show", type=Path)
    options.add_argument("--many", action="store_true")
    options.add_argument("--ranks")
    options.add_argument("--ops")
    options.add_argument("--contestants")
    options.add_argument("--sizes", default=",".join(map(str, SIZES)))
    options.add_argument("--repetitions", type=int, default=3)
    options.add_argument("--transport", choices=["auto", "tcp"], default="auto")
    options.add_argument("--raw", help="the program bench_coll_shm (make -C tests/c T=bench_coll_shm)")
    options.add_argument("--limit-s", type=float, default=3600, help="begins no further part after this time")
    options.add_argument("--job-limit-s", type=float, default=60, help="a job that takes longer is given up")
    options = options.parse_args()
    if not (options.out or options.show):
        sys.exit("collectives.py: give --out DIR for a run, or --show DIR")
    options.ranks = [int(n) for n in (options.ranks or ("8,16,32" if options.many else "2,4")).split(",")]
    options.ops = (options.ops or ("all_reduce" if options.many else ",".join(OPS))).split(",")
    few = "cdist,gloo,mpi4py" if options.many else ",".join(CONTESTANTS)
    options.contestants = (options.contestants or few).split(",")
    options.sizes = [int(size) for size in options.sizes.split(",")]
    return options


def main():
    options = parse()
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        figures = collect(options)
        plot(figures, options.out)
    else:
        figures = json.loads((options.show / "figures.json").read_text())
    show(figures)


if __name__ == "__main__":
    main()
