"""The suite for real GPUs, at least two of one host: `make test-gpu`."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
import cdist  # noqa: E402
import gpu_cases  # noqa: E402
from cdist.testing import run  # noqa: E402


def gpus():
    """How many there are, without starting CUDA in this process, which forks."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except OSError:
        return 0
    return listed.stdout.count("GPU ")


COUNT = min(gpus(), 8)
pytestmark = pytest.mark.skipif(COUNT < 2, reason="needs two GPUs of one host")


class Torch:
    name = "torch"

    def __init__(self, rank):
        import torch

        torch.cuda.set_device(rank)
        self.torch = torch

    def put(self, array):
        return self.torch.from_numpy(np.ascontiguousarray(array)).cuda()

    def get(self, array):
        return array.cpu().numpy()

    def view(self, array, index):
        return array[index]


class Cupy:
    name = "cupy"

    def __init__(self, rank):
        import cupy

        cupy.cuda.Device(rank).use()
        self.cupy = cupy

    def put(self, array):
        return self.cupy.asarray(array)

    def get(self, array):
        return self.cupy.asnumpy(array)

    def view(self, array, index):
        return array[index]


def gpu_run(body, world=2, **options):
    return run(
        body,
        world,
        backend="cpu:gloo,cuda:nccl",
        check_leftovers=False,
        timeout=100,
        group_timeout=60,
        **options,
    )


@pytest.mark.parametrize("module", [Torch, Cupy])
@pytest.mark.parametrize("case", gpu_cases.ALL, ids=lambda case: case.__name__)
def test_case(case, module):
    gpu_run(lambda rank, size: case(module(rank), rank, size))


def test_bfloat16_and_factors():
    def body(rank, world):
        torch = Torch(rank).torch
        x = torch.full((1000,), rank + 1.0, dtype=torch.bfloat16, device="cuda")
        cdist.all_reduce(x)
        assert x.eq(3).all()
        cdist.all_reduce(x, op=cdist.ReduceOp.AVG)
        assert x.eq(3).all()
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            y = torch.full((10,), rank + 1.0, dtype=dtype, device="cuda")
            cdist.all_reduce(y, op=cdist._make_nccl_premul_sum(0.5))
            assert y.eq(1.5).all(), y

    gpu_run(body)


def test_float8():
    def body(rank, world):
        torch = Torch(rank).torch
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            x = torch.full((1000,), rank + 1.0, device="cuda").to(dtype)
            y = x.clone()
            cdist.broadcast(y, 1)
            assert y.float().eq(2).all()
            out = torch.zeros(2000, device="cuda").to(dtype)
            cdist.all_gather_into_tensor(out, x)
            assert out.float().view(2, 1000)[1].eq(2).all()
            if torch.cuda.nccl.version() < (2, 24):
                assert raised(lambda x=x: cdist.all_reduce(x))[0] == "TypeError"
                continue
            cdist.all_reduce(x)
            assert x.float().eq(3).all()
            cdist.all_reduce(x, op=cdist.ReduceOp.MAX)
            assert x.float().eq(3).all()

    gpu_run(body)


def test_cupy_streams_order_work():
    def body(rank, world):
        cupy = Cupy(rank).cupy
        stream = cupy.cuda.Stream(non_blocking=True)
        for i in range(20):
            with stream:
                x = cupy.zeros(4_000_000, "float32")
                for _ in range(50):
                    x += 1
                x += rank + i - 50
                if i % 2:
                    cdist.all_reduce(x, async_op=True).wait()
                else:
                    cdist.all_reduce(x)
                y = x * 2
            stream.synchronize()
            assert bool((y == 2 * (2 * i + 1)).all())

    gpu_run(body)


def test_streams_order_work():
    def body(rank, world):
        torch = Torch(rank).torch
        stream = torch.cuda.Stream()
        for i in range(20):
            with torch.cuda.stream(stream):
                x = torch.empty(4_000_000, device="cuda")
                torch.cuda._sleep(3_000_000)
                x.fill_(rank + i)
                work = cdist.all_reduce(x, async_op=True)
                work.wait()
                y = x * 2
            stream.synchronize()
            assert y.eq(2 * (2 * i + 1)).all()

    gpu_run(body)


def test_cuda_graph():
    def body(rank, world):
        torch = Torch(rank).torch
        x = torch.ones(1000, device="cuda")
        cdist.all_reduce(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            cdist.all_reduce(x)
            work = cdist.all_reduce(x, async_op=True)
            work.wait()
        x.fill_(1.0)
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        assert x.eq(64).all(), x

    gpu_run(body)


def raised(function):
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error)
    return None, ""


def test_two_ranks_on_one_gpu():
    for name, text in gpu_run(lambda rank, world: raised(lambda: cdist.all_reduce(Torch(0).put(np.ones(3))))):
        assert name == "ValueError"
        assert "both use the GPU" in text


def test_wrong_gpu():
    def body(rank, world):
        torch = Torch(rank).torch
        cdist.all_reduce(torch.ones(3, device="cuda"))
        return raised(lambda: cdist.all_reduce(torch.ones(3, device=f"cuda:{1 - rank}")))

    for name, text in gpu_run(body):
        assert name == "ValueError"
        assert "lies on GPU" in text


def test_killed_rank():
    def body(rank, world):
        torch = Torch(rank).torch
        x = torch.ones(1000, device="cuda")
        cdist.all_reduce(x)
        torch.cuda.synchronize()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        cdist.all_reduce(x)
        torch.cuda.synchronize()
        while raised(lambda: cdist.all_reduce(x))[0] is None and time.monotonic() - start < 20:
            torch.cuda.synchronize()
        name, text = raised(lambda: cdist.all_reduce(x))
        alive = torch.ones(3, device="cuda").sum().item()
        return name, text, time.monotonic() - start, alive

    name, text, seconds, alive = gpu_run(body, allow_failures=True)[0]
    assert name == "PeerLostError", text
    assert seconds < 5
    assert alive == 3


def test_launch_queue_full_behind_a_missing_rank():
    def body(rank, world):
        torch = Torch(rank).torch
        x = torch.ones(1000, device="cuda")
        cdist.all_reduce(x)
        torch.cuda.synchronize()
        if rank == 1:
            time.sleep(8)
            return None
        start = time.monotonic()
        name, text = raised(lambda: [cdist.all_reduce(x, timeout=2) for _ in range(5000)])
        while name is None and time.monotonic() - start < 7:
            torch.cuda.synchronize()
            name, text = raised(lambda: cdist.all_reduce(x, timeout=2))
        return name, text, time.monotonic() - start

    name, text, seconds = gpu_run(body, allow_failures=True)[0]
    assert name == "DistTimeoutError", text
    assert seconds < 6


def test_missing_rank_times_out():
    def body(rank, world):
        torch = Torch(rank).torch
        x = torch.ones(1000, device="cuda")
        cdist.all_reduce(x)
        torch.cuda.synchronize()
        if rank == 1:
            time.sleep(6)
            return None
        work = cdist.all_reduce(x, async_op=True, timeout=2)
        start = time.monotonic()
        name, text = raised(lambda: (work.wait(), torch.cuda.synchronize(), cdist.all_reduce(x)))
        return name, text, time.monotonic() - start

    name, text, seconds = gpu_run(body, allow_failures=True)[0]
    assert name == "DistTimeoutError", text
    assert seconds < 6
