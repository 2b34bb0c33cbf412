"""DistributedDataParallel and torch.compile: outside, inside and around both passes."""

import shutil
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch comes with EXTRAS in .ci/run")

import cdist  # noqa: E402
from cdist.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook  # noqa: E402
from cdist.testing import run  # noqa: E402
from torch import nn  # noqa: E402


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))


def outside(backend, **kwargs):
    ddp = cdist.DistributedDataParallel(small(), **kwargs)
    return ddp, torch.compile(ddp, backend=backend)


def inside(backend, **kwargs):
    ddp = cdist.DistributedDataParallel(torch.compile(small(), backend=backend), **kwargs)
    return ddp, ddp


def plain(backend, **kwargs):
    ddp = cdist.DistributedDataParallel(small(), **kwargs)
    return ddp, ddp


def hooked(backend, **kwargs):
    ddp, _ = plain(backend, **kwargs)
    ddp.register_comm_hook(None, allreduce_hook)
    return ddp, ddp


def train(make, rank, world, backend=None, whole=False, **kwargs):
    """Take eight steps. Returns the final state, and how many frames were compiled in four and in eight."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    ddp, model = make(backend, **kwargs)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)

    def passes(x, y):
        nn.functional.mse_loss(model(x), y).backward()

    if whole:
        passes = torch.compile(passes, backend=backend)
    generator = torch.Generator().manual_seed(rank)
    frames = []
    for number in range(8):
        optimizer.zero_grad()
        passes(torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator))
        optimizer.step()
        if number % 4 == 3:
            frames.append(counters["frames"].get("total", 0))
    return [t.numpy().copy() for t in ddp.state_dict().values()], frames


@pytest.mark.parametrize(
    ("make", "backend", "whole", "kwargs"),
    [
        (outside, "aot_eager", False, {"find_unused_parameters": True, "gradient_as_bucket_view": True}),
        (inside, "aot_eager", False, {"bucket_cap_mb": 0.001}),
        (hooked, "eager", True, {}),
    ],
    ids=["outside", "inside", "around both passes"],
)
def test_compiled_training_has_the_same_bits_and_compiles_once(make, backend, whole, kwargs):
    import torch._dynamo  # once here rather than in every forked rank

    def body(rank, world):
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        reference, _ = train(plain, rank, world, **kwargs)
        compiled, (early, late) = train(make, rank, world, backend, whole, **kwargs)
        for ours, expected in zip(compiled, reference, strict=True):
            np.testing.assert_array_equal(ours, expected)
        assert 0 < early == late

    run(body, 2, timeout=240)


@pytest.fixture(scope="module")
def inductor_folder(tmp_path_factory):
    """One for all cases: what one has compiled, the next one need not."""
    return tmp_path_factory.mktemp("inductor")


@pytest.mark.skipif(not shutil.which("g++"), reason="torch's Inductor needs a C++ compiler: g++")
@pytest.mark.parametrize(
    ("make", "whole", "kwargs"),
    [
        (outside, False, {"find_unused_parameters": True, "gradient_as_bucket_view": True}),
        (inside, False, {"static_graph": True}),
        (hooked, True, {}),
    ],
    ids=["outside", "inside", "around both passes"],
)
def test_inductor_trains_as_without_it(make, whole, kwargs, inductor_folder):
    """Its kernels add up otherwise, so the last bits may differ; it compiles once."""
    import torch._dynamo  # once here rather than in every forked rank
    import torch._inductor.compile_fx
    import torch._inductor.config

    def body(rank, world):
        torch.set_num_threads(1)
        torch._inductor.config.compile_threads = 1
        # Most of the time went to vectors, which are not the matter here (each kind is tried, their headers
        # are compiled), and to headers compiled beforehand, in a folder that all jobs of this host share.
        torch._inductor.config.cpp.vec_isa_ok = False
        torch._inductor.config.cpp_cache_precompile_headers = False
        warnings.simplefilter("ignore")
        reference, _ = train(plain, rank, world, **kwargs)
        compiled, (early, late) = train(make, rank, world, "inductor", whole, **kwargs)
        for ours, expected in zip(compiled, reference, strict=True):
            np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)
        assert 0 < early == late

    run(body, 2, timeout=240, environ={"TORCHINDUCTOR_CACHE_DIR": str(inductor_folder)})
