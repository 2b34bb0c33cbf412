"""Averagers of models, post-local SGD and ZeroRedundancyOptimizer on CUDA tensors, against torch's."""

import importlib
import os
import sys
import tempfile
import warnings
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import cdist  # noqa: E402
from test_ddp import data, model  # noqa: E402
from test_gpu import device_of, gpu_run, two_ranks  # noqa: E402

torch = pytest.importorskip("torch", reason="torch comes with EXTRAS in .ci/run")
pytestmark = two_ranks
BACKENDS = ["nccl", "cpu:gloo,cuda:nccl"]


def of(package, path):
    base = "cdist" if package is cdist else "torch.distributed"
    return importlib.import_module(f"{base}.{path}")


def numbers(ddp):
    return [value.detach().cpu().numpy() for value in ddp.module.state_dict().values()]


def descend(ddp, rank, optimizer, then=lambda: None, steps=8):
    for x, y in data(rank, steps):
        optimizer.zero_grad()
        (ddp(x) - y).square().mean().backward()
        optimizer.step()
        then()


def compare(backend, train, tolerance=1e-6):
    """What train(ddp, rank, package) returns, of both libraries in the same processes."""
    folder = tempfile.mkdtemp()

    def body(rank, world):
        import torch.distributed as dist

        warnings.simplefilter("ignore")
        torch.cuda.set_device(device_of(rank))
        store = f"file://{os.path.join(folder, 'store')}"
        dist.init_process_group(backend, init_method=store, rank=rank, world_size=world)
        found = []
        for package, wrap in (
            (cdist, cdist.DistributedDataParallel),
            (dist, torch.nn.parallel.DistributedDataParallel),
        ):
            ddp = wrap(model(norm=False), device_ids=[device_of(rank)])
            found.append(train(ddp, rank, package))
        torch.cuda.synchronize()
        return found

    outcomes = gpu_run(body, backend=backend)
    for mine, reference in outcomes:
        for a, b in zip(mine, reference, strict=True):
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
    return [mine for mine, _ in outcomes]


def average_alone(package, start):
    """A comm hook's state by which gradients stay on their rank from step `start` on."""
    post = of(package, "algorithms.ddp_comm_hooks.post_localSGD_hook")
    alone, _ = package.new_subgroups(1)
    return post.PostLocalSGDState(None, alone, start), post.post_localSGD_hook


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("steps", [8, 9])
def test_post_local_sgd_equals_torch(backend, steps):
    """Models differ between averages, and are equal after one: steps 2, 5 and 8 from 0."""

    def train(ddp, rank, package):
        ddp.register_comm_hook(*average_alone(package, 2))
        averager = of(package, "algorithms.model_averaging.averagers").PeriodicModelAverager(
            period=3, warmup_steps=2
        )
        local = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
        optimizer = of(package, "optim").PostLocalSGDOptimizer(optim=local, averager=averager)
        descend(ddp, rank, optimizer, steps=steps)
        assert averager.step == steps
        return numbers(ddp)

    first, second = compare(backend, train)
    apart = any((a != b).any() for a, b in zip(first, second, strict=True))
    assert apart is (steps == 8)


@pytest.mark.parametrize("backend", BACKENDS)
def test_hierarchical_averages_equal_torch(backend):
    def train(ddp, rank, package):
        ddp.register_comm_hook(*average_alone(package, 0))
        home = of(package, "algorithms.model_averaging.hierarchical_model_averager")
        averager = home.HierarchicalModelAverager(
            period_group_size_dict=OrderedDict([(2, 2)]), warmup_steps=1
        )
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        descend(ddp, rank, optimizer, lambda: averager.average_parameters(ddp.parameters()), steps=6)
        return numbers(ddp)

    compare(backend, train)


@pytest.mark.parametrize("backend", BACKENDS)
def test_averages_of_parameters_on_gpus(backend):
    def body(rank, world):
        torch.cuda.set_device(device_of(rank))
        utils = of(cdist, "algorithms.model_averaging.utils")
        shapes = [(3,), (0,), (5, 7), ()]
        parameters = [torch.nn.Parameter(torch.full(s, rank + 1.0, device="cuda")) for s in shapes]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            with torch.no_grad():
                parameters[2] += rank
            utils.average_parameters(iter(parameters), None)
            total = sum(p.detach().sum() for p in parameters)
        side.synchronize()
        return total.item(), [p.device.type for p in parameters]

    wanted = 3 * 1.5 + 35 * 2.0 + 1.5
    assert gpu_run(body, backend=backend) == [(wanted, ["cuda"] * 4)] * 2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_zero_redundancy_equals_torch_and_keeps_a_share(backend, kind):
    cls, defaults = {
        "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
        "Adam": (torch.optim.Adam, {"lr": 0.01}),
    }[kind]

    def train(ddp, rank, package):
        made = of(package, "optim").ZeroRedundancyOptimizer
        optimizer = made(ddp.parameters(), optimizer_class=cls, **defaults)
        descend(ddp, rank, optimizer)
        held = len(optimizer.optim.state)
        assert 0 < held < len(list(ddp.parameters()))
        optimizer.consolidate_state_dict(to=0)
        found = numbers(ddp)
        if rank == 0:
            state = optimizer.state_dict()["state"]
            assert len(state) == len(list(ddp.parameters()))
            for key in sorted(state):
                found += [state[key][name].cpu().numpy() for name in sorted(state[key]) if name != "step"]
        return found

    compare(backend, train)


@pytest.mark.parametrize("backend", BACKENDS)
def test_zero_redundancy_goes_on_from_a_state(backend):
    def body(rank, world):
        torch.cuda.set_device(device_of(rank))
        made = of(cdist, "optim").ZeroRedundancyOptimizer

        def wrap():
            ddp = cdist.DistributedDataParallel(model(norm=False), device_ids=[device_of(rank)])
            return ddp, made(ddp.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)

        through, optimizer = wrap()
        descend(through, rank, optimizer, steps=4)
        optimizer.consolidate_state_dict(to=0)
        box = [optimizer.state_dict() if rank == 0 else None]
        cdist.broadcast_object_list(box, 0)
        resumed, other = wrap()
        resumed.module.load_state_dict(through.module.state_dict())
        other.load_state_dict(box[0])
        for ddp, one in ((through, optimizer), (resumed, other)):
            descend(ddp, rank, one, steps=3)
        return all(torch.equal(a, b) for a, b in zip(through.parameters(), resumed.parameters(), strict=True))

    assert gpu_run(body, backend=backend) == [True, True]
