"""What one GPU is enough for, in a group of one rank: arrays, streams, memory, DDP, deadlines."""

import sys
import time
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import cdist  # noqa: E402
from test_gpu import COUNT, Cupy, Torch, gpu_run  # noqa: E402

pytestmark = pytest.mark.skipif(COUNT < 1, reason="needs a GPU")


class Interface:
    """An array of which nothing but __cuda_array_interface__ is known, as numba's."""

    def __init__(self, array):
        self.__cuda_array_interface__ = dict(array.__cuda_array_interface__)
        self._array = array


def test_arrays_of_all_kinds():
    def body(rank, world):
        cupy, torch = Cupy(rank).cupy, Torch(rank).torch
        made = cupy.arange(6, dtype="float32")
        cdist.all_reduce(Interface(made), op=cdist.ReduceOp.AVG)
        cdist.broadcast(made, 0)
        out = cupy.zeros(6, "float32")
        cdist.all_gather_into_tensor(Interface(out), made)
        assert out.tolist() == list(range(6))
        strided = torch.arange(12.0, device="cuda").reshape(3, 4)
        cdist.all_reduce(strided.T)
        got = torch.zeros(4, 3, device="cuda")
        cdist.all_gather_into_tensor(got, strided.T)
        assert torch.equal(got, strided.T)
        half = torch.ones(5, dtype=torch.bfloat16, device="cuda")
        cdist.all_reduce(half, async_op=True).wait()
        assert half.tolist() == [1.0] * 5

    gpu_run(body, 1)


def test_a_stream_that_is_behind():
    def body(rank, world):
        torch = Torch(rank).torch
        stream = torch.cuda.Stream()
        x = torch.zeros(1000, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)
            x += 3
            cdist.all_reduce(x)
            work = cdist.all_gather_into_tensor(torch.empty(1000, device="cuda"), x, async_op=True)
            work.wait()
            total = x.sum()
        stream.synchronize()
        assert total.item() == 3000

    gpu_run(body, 1)


def test_ddp_equals_the_bare_model():
    def body(rank, world):
        torch = Torch(rank).torch
        import copy

        torch.manual_seed(3)
        bare = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)).cuda()
        ddp = cdist.DistributedDataParallel(copy.deepcopy(bare), device_ids=[0], gradient_as_bucket_view=True)
        for model in (bare, ddp):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            torch.manual_seed(4)
            for _ in range(5):
                optimizer.zero_grad()
                model(torch.randn(16, 32, device="cuda")).square().mean().backward()
                optimizer.step()
        for a, b in zip(bare.parameters(), ddp.parameters(), strict=True):
            assert torch.equal(a, b)

    gpu_run(body, 1)


def test_memory_comes_and_goes():
    def body(rank, world):
        cupy = Cupy(rank).cupy
        for i in range(20):
            x = cdist.empty(8 << 20, "float32", device="cuda")
            view = cupy.asarray(x)
            view[...] = i
            cdist.all_reduce(view)
            assert int(view[-1]) == i
            del x, view

    gpu_run(body, 1)


def test_an_allocation_behind_a_busy_gpu_has_a_deadline():
    """Released memory waits for all that the GPU has queued; who allocates then, or leaves, need not."""

    def body(rank, world):
        torch = Torch(rank).torch
        cdist.all_reduce(torch.zeros(1, device="cuda"))
        cdist.set_timeout(1)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(12):
                torch.cuda._sleep(1_000_000_000)  # about half a second each
        began = time.monotonic()

        def take_and_release():
            for _ in range(8):
                cdist.empty(64 << 20, "float32", device="cuda")

        with pytest.raises(cdist.DistTimeoutError, match="an allocation on GPU 0 waited to its deadline"):
            take_and_release()
        cdist.destroy_process_group()
        assert time.monotonic() - began < 5
        assert not side.query()  # the GPU is still busy

    gpu_run(body, 1)


def test_text_of_a_wrong_device():
    def body(rank, world):
        cupy = Cupy(rank).cupy
        with pytest.raises(ValueError, match="different devices"):
            cdist.all_gather_into_tensor(cupy.zeros(3), np.zeros(3))
        cdist.barrier()

    gpu_run(body, 1)
