"""cdist beside torch.distributed and NCCL in a C loop, on the GPUs of one host, in the same processes.

    python benchmarks/gpu.py [--ranks 2] [--raw build/gpu/nccl_raw.so] [--out FOLDER] [--only small,big,ddp]
    python benchmarks/gpu.py --ranks 1 --only small …     what one GPU can tell

Writes gpu.json and gpu.txt. Every figure is the median over rounds; times of a rank are of rank 0. The part
`profile` (not in the default) says where a DDP step's time goes.

A step that communicates ends when the slowest rank does, whatever the library: so what communication
exposes is told against steps without it of which the slowest rank counts too ("exposed_ms"), beside the plain
times of rank 0; and against steps in which the ranks wait for each other and send nothing (beyond lockstep).
Both compare steps of one short turn, in which the clocks and the host's pace are the same, and tell the
quartiles of the turns. The collector of Python's garbage rests while steps are timed.
"""

import argparse
import contextlib
import copy
import ctypes
import gc
import itertools
import json
import math
import os
import random
import socket
import statistics
import subprocess
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

from gpu_profile import Profile

BLOCK = 3  # steps of a kind in a turn that count: the host's pace drifts by milliseconds within seconds


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Rank(Profile):
    """Both libraries and the raw loop, connected, in one process."""

    def __init__(self, args):
        import cdist
        import torch
        import torch.distributed as dist

        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        torch.cuda.set_device(self.rank)
        self.torch, self.dist, self.cdist, self.results, self.args = torch, dist, cdist, {}, args
        limit = timedelta(seconds=100)
        dist.init_process_group(
            "nccl",
            init_method=f"tcp://127.0.0.1:{args.ports[0]}",
            rank=self.rank,
            world_size=self.world,
            timeout=limit,
            device_id=torch.device("cuda", self.rank),
        )
        cdist.init_process_group(
            "cpu:gloo,cuda:nccl",
            init_method=f"tcp://127.0.0.1:{args.ports[1]}",
            rank=self.rank,
            world_size=self.world,
            timeout=limit,
            device_id=self.rank,
        )
        self.raw = self.connect_raw()

    def connect_raw(self):
        if not self.args.raw:
            return None
        raw = ctypes.CDLL(os.path.abspath(self.args.raw))
        raw.raw_issue_ns.restype = ctypes.c_double
        if raw.raw_open(None):
            return None
        name = ctypes.create_string_buffer(128)
        if self.rank == 0:
            raw.raw_id(name)
        box = [bytes(name.raw)]
        self.dist.broadcast_object_list(box)
        if raw.raw_connect(ctypes.create_string_buffer(box[0], 128), self.world, self.rank):
            return None
        return raw

    def contenders(self, x):
        """Name → function that enqueues one in-place all_reduce of a float32 tensor in the current stream."""
        stream = self.torch.cuda.current_stream().cuda_stream
        found = {"torch": lambda: self.dist.all_reduce(x), "cdist": lambda: self.cdist.all_reduce(x)}
        try:
            import cupy

            y = cupy.from_dlpack(x)
            external = cupy.cuda.ExternalStream(stream) if stream else cupy.cuda.Stream.null

            def with_cupy():
                self.cdist.all_reduce(y)

            external.use()
            found["cdist, CuPy"] = with_cupy
        except Exception:
            traceback.print_exc()
        if self.raw:
            data, count = ctypes.c_void_p(x.data_ptr()), ctypes.c_size_t(x.numel())
            found["raw NCCL"] = lambda: self.raw.raw_all_reduce(data, count, ctypes.c_void_p(stream))
        return found

    def small(self):
        """Host time of a call, and one-shot latency, at 4 bytes."""
        torch = self.torch
        x = torch.zeros(1, device="cuda")
        found = self.contenders(x)
        host = {name: [] for name in found}
        latency = {name: [] for name in found}
        for call in found.values():
            for _ in range(30):
                call()
            torch.cuda.synchronize()
        for _ in range(15):
            for name, call in found.items():
                torch.cuda.synchronize()
                self.dist.barrier()
                torch.cuda.synchronize()
                if name == "raw NCCL":
                    ns = self.raw.raw_issue_ns(
                        ctypes.c_void_p(x.data_ptr()),
                        ctypes.c_size_t(1),
                        ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
                        200,
                    )
                else:
                    start = time.perf_counter_ns()
                    for _ in range(200):
                        call()
                    ns = (time.perf_counter_ns() - start) / 200
                host[name].append(ns / 1e3)
                torch.cuda.synchronize()
                times = []
                for _ in range(50):
                    start = time.perf_counter_ns()
                    call()
                    torch.cuda.synchronize()
                    times.append((time.perf_counter_ns() - start) / 1e3)
                latency[name].append(statistics.median(times))
        self.time_driver(x)
        self.results["host_us"] = {name: statistics.median(v) for name, v in host.items()}
        self.results["latency_4B_us"] = {name: statistics.median(v) for name, v in latency.items()}

    def time_driver(self, x):
        """Host time of the driver's calls that an operation can need."""
        if not self.raw:
            return
        names = ["CtxGetCurrent", "PointerAttribute", "IsCapturing", "EventRecord", "StreamWaitEvent"]
        names += ["EventQuery", "EventCreate"]
        out = (ctypes.c_double * len(names))()
        stream = self.torch.cuda.Stream()
        data, handle = ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(stream.cuda_stream)
        if self.raw.raw_driver_ns(data, handle, out) == 0:
            self.results["driver_us"] = {name: ns / 1e3 for name, ns in zip(names, out, strict=True)}

    def big(self):
        """Bus bandwidth at 256 MiB and 16 MiB."""
        torch = self.torch
        for mib in (256, 16):
            x = torch.zeros(mib << 18, device="cuda")
            found = self.contenders(x)
            rates = {name: [] for name in found}
            for call in found.values():
                call()
            for _ in range(6):
                for name, call in found.items():
                    torch.cuda.synchronize()
                    self.dist.barrier()
                    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                    begin.record()
                    for _ in range(10):
                        call()
                    end.record()
                    end.synchronize()
                    seconds = begin.elapsed_time(end) / 1e4
                    rates[name].append(x.numel() * 4 / seconds * 2 * (self.world - 1) / self.world / 1e9)
            self.results[f"busbw_{mib}MiB_GBps"] = {name: statistics.median(v) for name, v in rates.items()}
            del x, found

    def models(self):
        """Name → (functions that make the model, make an input, and give the loss; steps)."""
        torch = self.torch

        def gpt2():
            from transformers import GPT2Config, GPT2LMHeadModel

            return GPT2LMHeadModel(GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))

        def resnet():
            import torchvision

            return torchvision.models.resnet50()

        def mlp():
            layers = [layer for _ in range(64) for layer in (torch.nn.Linear(1024, 1024), torch.nn.ReLU())]
            return torch.nn.Sequential(*layers)

        return {
            "64-layer MLP": (
                mlp,
                lambda: torch.randn(256, 1024, device="cuda"),
                lambda m, x: m(x).float().square().mean(),
            ),
            "GPT-2 124M bf16": (
                gpt2,
                lambda: torch.randint(0, 50257, (4, 512), device="cuda"),
                lambda m, x: m(input_ids=x, labels=x).loss,
            ),
            "ResNet-50 bf16": (
                resnet,
                lambda: torch.randn(32, 3, 224, 224, device="cuda"),
                lambda m, x: m(x).float().square().mean(),
            ),
        }

    def step_ms(self, model, optimizer, x, loss, steps, context=contextlib.nullcontext, after=None):
        """Milliseconds of steps: until all is done, and of the host in forward, backward, optimizer, wait."""
        torch = self.torch
        times = []
        for _ in range(steps):
            torch.cuda.synchronize()
            marks = [time.perf_counter_ns()]
            with context():
                with torch.autocast("cuda", torch.bfloat16):
                    value = loss(model, x)
                marks.append(time.perf_counter_ns())
                value.backward()
            if after:
                after()
            marks.append(time.perf_counter_ns())
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            marks.append(time.perf_counter_ns())
            torch.cuda.synchronize()
            marks.append(time.perf_counter_ns())
            parts = [marks[-1] - marks[0], *(b - a for a, b in itertools.pairwise(marks))]
            times.append([part / 1e6 for part in parts])
        return times

    def rounds(self, runs, x, loss, count):
        """Kind → times of its steps: BLOCK and one for warmth before of each kind in turn, `count` turns.

        The order of kinds is another in each turn: a place in it costs or saves up to a millisecond.
        """
        times = {kind: [] for kind in runs}
        order = random.Random(0)
        gc.collect()
        gc.disable()
        for turn in range(count + 1):
            for kind in order.sample(list(runs), len(runs)):
                model, optimizer, context, after = runs[kind]
                self.dist.barrier()
                steps = self.step_ms(model, optimizer, x, loss, BLOCK + 1, context, after)
                times[kind] += steps[1:] if turn else []
        gc.enable()
        return times

    def exposed(self, times):
        """What steps take beyond those without communication, and beyond lockstep, of the slowest rank each.

        The differences are those of one turn's medians; told are their median and quartiles.
        """
        mine = {kind: [step[0] for step in steps] for kind, steps in times.items()}
        ranks = [None] * self.world
        self.dist.all_gather_object(ranks, mine)
        slowest = {kind: [max(step) for step in zip(*(r[kind] for r in ranks), strict=True)] for kind in mine}
        turns = {
            kind: [statistics.median(steps[i : i + BLOCK]) for i in range(0, len(steps), BLOCK)]
            for kind, steps in slowest.items()
        }

        def beyond(kind, base):
            return [a - b for a, b in zip(turns[kind], turns[base], strict=True)]

        def ratio(ours, theirs):
            return ours / theirs if theirs > 0 else math.nan

        row = {kind: statistics.median(beyond(kind, "local")) for kind in turns}
        row["cdist / torch"] = ratio(row["cdist"], row["torch"])
        for kind in ("torch", "cdist"):
            row[f"{kind} beyond lockstep"] = statistics.median(beyond(kind, "lockstep"))
        row["beyond, cdist / torch"] = ratio(row["cdist beyond lockstep"], row["torch beyond lockstep"])
        for kind in ("torch", "cdist", "lockstep"):
            low, _, high = statistics.quantiles(beyond(kind, "local"), n=4)
            row[f"{kind}, quartiles"] = f"{low:.2f} to {high:.2f}"
        row["local"] = statistics.median(slowest["local"])
        return row

    def wraps(self):
        """Name → (a function that wraps a model, the context of its steps by model, what follows backward).

        `lockstep`: no gradients are sent, but the ranks wait for each other. `alone`: each rank is a group of
        its own, so that hooks, buckets and launches cost what they cost, and no rank waits. `quiet`: no_sync.
        """
        torch, dist, cdist = self.torch, self.dist, self.cdist
        if not hasattr(self, "own"):
            theirs = [dist.new_group([r]) for r in range(self.world)]
            self.own = theirs[self.rank], cdist.new_group([self.rank])
            self.word = torch.zeros(1, device="cuda")

        def of(library, **options):
            return lambda m: library(m, device_ids=[self.rank], gradient_as_bucket_view=True, **options)

        theirs, ours = torch.nn.parallel.DistributedDataParallel, cdist.parallel.DistributedDataParallel
        return {
            "local": (lambda m: m, False, None),
            "torch": (of(theirs), False, None),
            "cdist": (of(ours), False, None),
            "lockstep": (lambda m: m, False, lambda: dist.all_reduce(self.word)),
            "torch alone": (of(theirs, process_group=self.own[0]), False, None),
            "cdist alone": (of(ours, process_group=self.own[1]), False, None),
            "torch quiet": (of(theirs), True, None),
            "cdist quiet": (of(ours), True, None),
        }

    def ddp(self):
        """Step time without communication, with torch DDP, with cdist DDP, and what it consists of."""
        torch = self.torch
        for name, (make, inputs, loss) in self.models().items():
            if self.args.models not in name:
                continue
            try:
                torch.manual_seed(0)
                base = make().cuda()
                runs = {}
                for kind, (wrap, quiet, after) in self.wraps().items():
                    model = wrap(copy.deepcopy(base))
                    context = model.no_sync if quiet else contextlib.nullcontext
                    optimizer = torch.optim.SGD(model.parameters(), 1e-4, foreach=True)
                    runs[kind] = (model, optimizer, context, after)
                x = inputs()
                times = self.rounds(runs, x, loss, self.args.rounds)
                medians = {
                    kind: [statistics.median(part) for part in zip(*v, strict=True)]
                    for kind, v in times.items()
                }
                self.results[f"step_ms {name}"] = {kind: v[0] for kind, v in medians.items()}
                self.results[f"exposed_ms {name}"] = self.exposed(times)
                self.results[f"host_ms {name} (forward backward optimizer, then until done)"] = {
                    kind: " ".join(f"{part:8.3f}" for part in v[1:]) for kind, v in medians.items()
                }
                ours = runs["cdist"][0]._sync
                self.results[f"buckets_MiB {name}"] = {
                    "parameters": float(len(ours.gradients)),
                    **{str(k): size / 2**20 for k, size in enumerate(ours.bucket_bytes)},
                }
                del runs, base, ours
                torch.cuda.empty_cache()
            except Exception as error:
                traceback.print_exc()
                self.results[f"step_ms {name}"] = {"failed": f"{type(error).__name__}: {error}"[:300]}


def table(results):
    lines = [json.dumps(results.get("about", {}))]
    for what, row in results.items():
        if what != "about":
            lines.append(what)
            lines += [
                f"    {name:16} {value if isinstance(value, str) else format(value, '10.2f')}"
                for name, value in row.items()
            ]
    return "\n".join(lines)


def rank_main(args):
    me = Rank(args)
    torch = me.torch
    me.results["about"] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "nccl": list(torch.cuda.nccl.version()),
        "ranks": me.world,
        "raw": bool(me.raw),
    }
    for part in args.only.split(","):
        try:
            getattr(me, part)()
        except Exception:
            traceback.print_exc()
            me.results[part] = {"failed": traceback.format_exc(limit=1)[-300:]}
        if me.rank == 0:
            Path(args.out, "gpu.json").write_text(json.dumps(me.results, indent=1))
            Path(args.out, "gpu.txt").write_text(table(me.results) + "\n")
    if me.rank == 0:
        print(table(me.results))
    torch.cuda.synchronize()
    me.cdist.destroy_process_group()
    me.dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--raw", default="")
    parser.add_argument("--out", default="build/gpu")
    parser.add_argument("--only", default="small,big,ddp")
    parser.add_argument("--rounds", type=int, default=16, help=f"of {BLOCK} steps of each contender")
    parser.add_argument("--models", default="", help="those whose name has this")
    parser.add_argument("--ports", default="")
    args = parser.parse_args()
    Path(args.out).mkdir(parents=True, exist_ok=True)
    if args.ports:
        args.ports = [int(port) for port in args.ports.split(",")]
        return rank_main(args)
    ports = f"{free_port()},{free_port()}"
    command = [sys.executable, __file__, *sys.argv[1:], "--ports", ports]
    ranks = [
        subprocess.Popen(
            command, env={**os.environ, "RANK": str(r), "LOCAL_RANK": str(r), "WORLD_SIZE": str(args.ranks)}
        )
        for r in range(args.ranks)
    ]
    codes = [rank.wait() for rank in ranks]
    return max(abs(code) for code in codes)


if __name__ == "__main__":
    sys.exit(main())
