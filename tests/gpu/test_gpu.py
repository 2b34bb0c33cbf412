"""The suite for real GPUs, two of one host or one that NCCL lets two ranks share: `make test-gpu`."""

import os
import signal
import socket
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


def nccl_shares_gpus():
    """Whether ranks may share a GPU: NCCL is told so and, by its version, can."""
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
        return False
    ask = "import ctypes, torch; v = ctypes.c_int(); torch.cuda.is_available(); "
    ask += "ctypes.CDLL(LIBRARY).ncclGetVersion(ctypes.byref(v)); print(v.value)"
    library = os.environ.get("CDIST_NCCL_LIB") or "libnccl.so.2"
    command = [sys.executable, "-c", ask.replace("LIBRARY", repr(library))]
    told = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout
    return int(told) >= 23000


COUNT = min(gpus(), 8)
SHARED = COUNT == 1 and nccl_shares_gpus()
two_ranks = pytest.mark.skipif(
    COUNT < 2 and not SHARED,
    reason="needs two GPUs of one host, or NCCL 2.30 and NCCL_MULTI_RANK_GPU_ENABLE=1",
)
two_devices = pytest.mark.skipif(COUNT < 2, reason="is about two devices: needs two GPUs of one host")
pytestmark = two_ranks


def device_of(rank):
    """The GPU of a rank; one for all where there is but one."""
    return rank % COUNT


class Torch:
    name = "torch"

    def __init__(self, rank):
        import torch

        torch.cuda.set_device(device_of(rank))
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

        cupy.cuda.Device(device_of(rank)).use()
        self.cupy = cupy

    def put(self, array):
        return self.cupy.asarray(array)

    def get(self, array):
        return self.cupy.asnumpy(array)

    def view(self, array, index):
        return array[index]


def gpu_run(body, world=2, backend="cpu:gloo,cuda:nccl", **options):
    return run(
        body,
        world,
        backend=backend,
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


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def raised(function):
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error)
    return None, ""


def test_cuda_graph_of_registered_memory():
    def body(rank, world):
        torch = Torch(rank).torch
        first = torch.ones(1, device="cuda")
        cdist.all_reduce(first)
        x = torch.as_tensor(cdist.empty((1000,), "float32", device="cuda"), device="cuda")
        x.fill_(1.0)
        side = torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=side):
            cdist.all_reduce(x)
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        assert x.eq(8).all(), x

    gpu_run(body)


def test_registered_memory():
    def body(rank, world):
        torch = Torch(rank).torch
        first = torch.ones(1, device="cuda")
        cdist.all_reduce(first)
        for count in (1, 1000, 1_000_000):
            dropped = cdist.empty((4,), "float32", device="cuda")
            x = torch.as_tensor(cdist.empty((count,), "float64", device="cuda"), device="cuda")
            x.fill_(rank + 1)
            cdist.all_reduce(x)
            assert x.eq(3).all()
            with cdist._coalescing_manager(device="cuda"):
                cdist.all_reduce(x)
                del dropped
                made = cdist.empty((4,), "float32", device="cuda")
                cdist.all_reduce(first)
            assert x.eq(6).all()
            del made
        return first.item()

    assert gpu_run(body) == [16.0, 16.0]


def test_registered_memory_is_kept_for_the_kernels_that_use_it():
    """ncclMemFree alone takes it away under them, which ends the process's use of the GPU."""

    def body(rank, world):
        torch = Torch(rank).torch
        side = torch.cuda.Stream()
        first = torch.ones(1, device="cuda")
        cdist.all_reduce(first)
        with torch.cuda.stream(side):
            torch.cuda._sleep(1000)
            torch.zeros(5, device="cuda").add_(1)
        torch.cuda.synchronize()
        for size in (1000, 20_000_000, 200_000_000, 1000):
            x = torch.as_tensor(cdist.empty((size,), "float32", device="cuda"), device="cuda")
            with torch.cuda.stream(side):
                torch.cuda._sleep(300_000_000)
                x.fill_(1.0)
                x.add_(1)
            del x
        torch.cuda.synchronize()
        kept = torch.as_tensor(cdist.empty((1000,), "float32", device="cuda"), device="cuda")
        kept.fill_(rank + 1)
        cdist.all_reduce(kept)
        cdist.destroy_process_group()
        return kept.eq(3).all().item()

    assert gpu_run(body) == [True, True]


def test_destroying_a_group_lets_the_work_on_the_gpu_end():
    def body(rank, world):
        torch = Torch(rank).torch
        x = torch.full((1_000_000,), rank + 1.0, device="cuda")
        cdist.all_reduce(x)
        if rank == 1:
            torch.cuda.synchronize()
            time.sleep(1)
        torch.cuda._sleep(300_000_000)
        cdist.all_reduce(x)
        cdist.destroy_process_group()
        return x.eq(6).all().item()

    assert gpu_run(body) == [True, True]


def test_groups_come_and_go():
    def body(rank, world):
        torch = Torch(rank).torch
        x = torch.ones(100, device="cuda")
        cdist.all_reduce(x)
        for _ in range(3):
            group = cdist.new_group([0, 1])
            cdist.all_reduce(x, group=group)
            cdist.destroy_process_group(group)
        return x.max().item()

    assert gpu_run(body) == [16.0, 16.0]


@pytest.mark.parametrize("async_op", [False, True])
def test_ctrl_c_while_connecting(async_op):
    """Rank 1 comes late; rank 0 is interrupted in the wait and lives; both calls end."""

    def body(rank, world):
        torch = Torch(rank).torch
        x = torch.ones(10, device="cuda")
        torch.cuda.synchronize()
        if rank == 1:
            time.sleep(4)
            return raised(lambda: cdist.all_reduce(x))
        signal.signal(signal.SIGALRM, lambda *args: signal.raise_signal(signal.SIGINT))
        signal.setitimer(signal.ITIMER_REAL, 1)
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            cdist.all_reduce(x, async_op=async_op)
        name, text = raised(lambda: cdist.all_reduce(x))
        assert torch.ones(3, device="cuda").sum().item() == 3
        return name, text, time.monotonic() - start

    first, second = gpu_run(body, allow_failures=True)
    assert first[0] == "AbortedError", first
    assert first[2] < 4
    assert second[0] == "AbortedError", second


def test_abort_ends_a_collective_that_waits():
    def body(rank, world):
        torch = Torch(rank).torch
        x = torch.ones(10, device="cuda")
        cdist.all_reduce(x)
        torch.cuda.synchronize()
        if rank == 1:
            time.sleep(4)
            return raised(lambda: cdist.all_reduce(x))[0]
        cdist.all_reduce(x)
        start = time.monotonic()
        cdist.group.WORLD.abort()
        torch.cuda.synchronize()
        assert torch.ones(3, device="cuda").sum().item() == 3
        return time.monotonic() - start

    first, second = gpu_run(body, allow_failures=True)
    assert isinstance(first, float), first
    assert first < 3
    assert second is not None


def test_objects_meshes_and_barriers():
    def body(rank, world):
        torch = Torch(rank).torch
        out = [None] * world
        cdist.all_gather_object(out, {"rank": rank, "gpu": torch.full((3,), rank, device="cpu")})
        assert [o["rank"] for o in out] == [0, 1]
        box = [rank]
        cdist.broadcast_object_list(box, 1)
        assert box == [1]
        mesh = cdist.init_device_mesh("cuda", (2, 1), mesh_dim_names=("dp", "tp"))
        x = torch.full((5,), rank + 1.0, device="cuda")
        cdist.all_reduce(x, group=mesh.get_group("dp"))
        assert x.eq(3).all()
        cdist.all_reduce(x, group=mesh.get_group("tp"))
        assert x.eq(3).all()
        cdist.barrier()
        cdist.barrier(device_ids=[device_of(rank)])
        cdist.monitored_barrier()
        work = cdist.barrier(async_op=True)
        work.wait()

    gpu_run(body)


def test_early_connection_and_a_group_for_gpus_alone():
    def body(rank, world):
        torch = Torch(rank).torch
        cdist.init_process_group("nccl", device_id=torch.device("cuda", device_of(rank)))
        assert cdist.get_backend() == "nccl"
        x = torch.full((5,), rank + 1.0, device="cuda")
        cdist.all_reduce(x)
        assert x.eq(3).all()
        if rank == 0:
            assert "device type cpu" in raised(lambda: cdist.all_reduce(torch.ones(3)))[1]
        half = cdist.split_group(split_ranks=[[0], [1]])
        cdist.all_reduce(x, group=half)
        assert x.eq(3).all()
        out = [None] * world
        cdist.all_gather_object(out, rank)
        return out

    port = free_port()
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    assert run(body, 2, init=False, check_leftovers=False, timeout=60, environ=environ) == [[0, 1]] * 2


def test_two_ranks_on_one_gpu():
    def body(rank, world):
        os.environ.pop("NCCL_MULTI_RANK_GPU_ENABLE", None)
        return raised(lambda: cdist.all_reduce(Torch(0).put(np.ones(3))))

    for name, text in gpu_run(body):
        assert name == "ValueError"
        assert "both use the GPU" in text


@two_devices
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
