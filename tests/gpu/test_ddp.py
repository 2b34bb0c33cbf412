"""DistributedDataParallel over GPUs against torch's over NCCL: modes, joining, a gradient that is missing."""

import copy
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import cdist  # noqa: E402
from cdist.testing import run  # noqa: E402
from test_gpu import device_of, gpu_run, raised, two_ranks  # noqa: E402

torch = pytest.importorskip("torch", reason="torch comes with EXTRAS in .ci/run")
pytestmark = two_ranks


def model(seed=0, norm=True):
    from torch import nn

    torch.manual_seed(seed)
    middle = [nn.BatchNorm1d(64)] if norm else []
    return nn.Sequential(
        nn.Linear(32, 64), *middle, nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)
    ).cuda()


def data(rank, steps, seed=1):
    generator = torch.Generator().manual_seed(seed + 10 * rank)
    return [
        (torch.randn(16, 32, generator=generator).cuda(), torch.randn(16, 8, generator=generator).cuda())
        for _ in range(steps)
    ]


def fit(ddp, batches):
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    for x, y in batches:
        optimizer.zero_grad()
        (ddp(x).float() - y).square().mean().backward()
        optimizer.step()
    return [value.float().cpu().numpy() for value in ddp.state_dict().values()]


def both(rank, world, train, path, ours, theirs, norm):
    import torch.distributed as dist

    torch.cuda.set_device(device_of(rank))
    dist.init_process_group("nccl", init_method=f"file://{path}", rank=rank, world_size=world)
    mine = train(cdist.DistributedDataParallel(model(norm=norm), device_ids=[device_of(rank)], **ours), rank)
    ddp = torch.nn.parallel.DistributedDataParallel(model(norm=norm), device_ids=[device_of(rank)], **theirs)
    reference = train(ddp, rank)
    torch.cuda.synchronize()
    return mine, reference


def compare(train, ours=None, theirs=None, tolerance=1e-6, norm=True):
    folder = tempfile.mkdtemp()
    ours = ours or {}
    theirs = ours if theirs is None else theirs
    outcomes = gpu_run(
        lambda rank, world: both(rank, world, train, os.path.join(folder, "store"), ours, theirs, norm)
    )
    for mine, reference in outcomes:
        for a, b in zip(mine, reference, strict=True):
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


MODES = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 0.01},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}


@pytest.mark.parametrize("mode", MODES)
def test_modes_equal_torch(mode):
    compare(lambda ddp, rank: fit(ddp, data(rank, 5)), MODES[mode])


def fit_low_precision_by_hand(batches, reduce_dtype):
    """Train as mixed precision is defined: a float16 copy computes, its mean gradient moves the master."""
    import torch.distributed as dist

    master = model(norm=False)
    low = copy.deepcopy(master).half()
    optimizer = torch.optim.SGD(master.parameters(), lr=0.05, momentum=0.9)
    for x, y in batches:
        with torch.no_grad():
            for own, parameter in zip(low.parameters(), master.parameters(), strict=True):
                own.copy_(parameter)
                own.grad = None
        (low(x.half()).float() - y).square().mean().backward()
        for own, parameter in zip(low.parameters(), master.parameters(), strict=True):
            gradient = own.grad.to(reduce_dtype)
            dist.all_reduce(gradient)
            parameter.grad = gradient.float() / dist.get_world_size()
        optimizer.step()
    return [value.cpu().numpy() for value in master.state_dict().values()]


@pytest.mark.parametrize("reduce_name", ["float32", "float16"])
def test_mixed_precision_equals_its_definition(reduce_name):
    """Not torch's DDP: its first mixed precision gradient is wrong (torch 2.11: norm 4.65, not 0.185)."""
    from torch.nn.parallel.distributed import _MixedPrecision

    reduce_dtype = getattr(torch, reduce_name)
    config = _MixedPrecision(torch.float16, reduce_dtype)

    def body(rank, world):
        import torch.distributed as dist

        torch.cuda.set_device(device_of(rank))
        dist.init_process_group("nccl", init_method=f"file://{path}", rank=rank, world_size=world)
        ddp = cdist.DistributedDataParallel(
            model(norm=False), device_ids=[device_of(rank)], mixed_precision=config
        )
        return fit(ddp, data(rank, 3)), fit_low_precision_by_hand(data(rank, 3), reduce_dtype)

    path = os.path.join(tempfile.mkdtemp(), "store")
    for mine, reference in gpu_run(body):
        for a, b in zip(mine, reference, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6 if reduce_name == "float32" else 2e-3, atol=1e-6)


@pytest.mark.parametrize("hook", ["fp16_compress_hook", "bf16_compress_hook"])
def test_hooks_equal_torch(hook):
    import importlib

    def train(ddp, rank):
        base = "cdist" if isinstance(ddp, cdist.DistributedDataParallel) else "torch.distributed"
        module = importlib.import_module(f"{base}.algorithms.ddp_comm_hooks.default_hooks")
        ddp.register_comm_hook(None, getattr(module, hook))
        return fit(ddp, data(rank, 4))

    compare(train, tolerance=2e-2)


@pytest.mark.parametrize("views", [False, True])
def test_weights_give_the_mean_over_all_samples(views):
    """Uneven batches: NCCL multiplies each rank's gradients by its own factor."""

    def body(rank, world):
        torch.cuda.set_device(device_of(rank))
        sizes = [3, 9]
        x = torch.linspace(-1, 1, 32 * sum(sizes)).view(-1, 32).cuda()
        alone = model(norm=False)
        alone(x).square().mean().backward()
        ddp = cdist.DistributedDataParallel(
            model(norm=False), device_ids=[device_of(rank)], reduce="weights", gradient_as_bucket_view=views
        )
        for _ in range(3):
            ddp.zero_grad()
            ddp.set_weight(sizes[rank])
            ddp(x.split(sizes)[rank]).square().mean().backward()
        for p, wanted in zip(ddp.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p.grad, wanted.grad, rtol=1e-4, atol=1e-6)

    gpu_run(body)


def test_join_equals_torch():
    def train(ddp, rank):
        with ddp.join():
            fit(ddp, data(rank, 3 + 2 * rank))
        return [value.float().cpu().numpy() for value in ddp.state_dict().values()]

    compare(train, norm=False)


def test_groups_for_gpus_alone():
    """What DDP tells the other ranks of itself is in host memory."""

    def body(rank, world):
        torch.cuda.set_device(device_of(rank))
        ddp = cdist.DistributedDataParallel(
            model(), device_ids=[device_of(rank)], find_unused_parameters=True, reduce="weights"
        )
        with ddp.join():
            for x, y in data(rank, 3 + rank):
                ddp.set_weight(len(x))
                (ddp(x) - y).square().mean().backward()
        values = [float(p.detach().sum()) for p in ddp.parameters()]
        everyone = [None] * world
        cdist.all_gather_object(everyone, values)
        assert everyone[0] == everyone[1]
        return "device type cpu" in raised(lambda: cdist.DistributedDataParallel(model().cpu()))[1]

    assert gpu_run(body, backend="nccl") == [True, True]


def test_missing_gradient_is_named_on_every_rank():
    """K139: the rank that lacks it ends the group with its name: the others' calls raise the same text."""

    def body(rank, world):
        torch.cuda.set_device(device_of(rank))
        from torch import nn

        torch.manual_seed(0)
        module = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}).cuda()
        module.forward = lambda x, both: module["a"](x) + (module["b"](x) if both else 0)
        ddp = cdist.DistributedDataParallel(module, device_ids=[device_of(rank)])
        x = torch.ones(2, 4, device="cuda")
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

        def steps():
            for _ in range(3):
                ddp(x, rank == 0).sum().backward()
                optimizer.step()
                torch.cuda.synchronize()

        with pytest.raises((RuntimeError, cdist.DistBackendError)) as caught:
            steps()
        return str(caught.value)

    for text in run(
        body, 2, backend="cpu:gloo,cuda:nccl", check_leftovers=False, timeout=60, group_timeout=30
    ):
        assert "'b.weight', 'b.bias'" in text
        assert "rank 1" in text


def test_grad_scaler_equals_torch():
    """The scale starts so high that steps are skipped, on both ranks the same ones."""

    def train(ddp, rank):
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40, backoff_factor=2.0**-6)
        scales = []
        for x, y in data(rank, 8):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16):
                loss = (ddp(x) - y).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        assert scales[0] < 2.0**40
        return [np.array(scales), *(v.float().cpu().numpy() for v in ddp.state_dict().values())]

    compare(train, tolerance=2e-3, norm=False)


@pytest.mark.parametrize("channels_last", [False, True])
def test_sync_batchnorm_equals_torch(channels_last):
    def train(ddp, rank):
        del ddp
        from torch import nn

        def convert(library, wrap):
            torch.manual_seed(3)
            net = nn.Sequential(
                nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)
            )
            net = library.convert_sync_batchnorm(net).cuda()
            if channels_last:
                net = net.to(memory_format=torch.channels_last)
            return wrap(net, device_ids=[device_of(rank)])

        ours = convert(cdist.nn.SyncBatchNorm, cdist.DistributedDataParallel)
        theirs = convert(nn.SyncBatchNorm, nn.parallel.DistributedDataParallel)
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(4 + 2 * rank, 3, 8, 8, generator=generator).cuda()
        for net in (ours, theirs):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                net(x).square().mean().backward()
                optimizer.step()
        for (name, a), b in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
            torch.testing.assert_close(
                a, b, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
            )
        return []

    compare(train, norm=False)


def test_powersgd_equals_torch():
    import importlib

    def train(ddp, rank):
        base = "cdist" if isinstance(ddp, cdist.DistributedDataParallel) else "torch.distributed"
        module = importlib.import_module(f"{base}.algorithms.ddp_comm_hooks.powerSGD_hook")
        state = module.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3)
        ddp.register_comm_hook(state, module.powerSGD_hook)
        return fit(ddp, data(rank, 6))

    compare(train, tolerance=1e-3, norm=False)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints_equal_torch(reentrant):
    def train(ddp, rank):
        from torch.utils.checkpoint import checkpoint

        net = ddp.module
        net.forward = lambda x: net[-1](checkpoint(net[:-1], x.requires_grad_(), use_reentrant=reentrant))
        return fit(ddp, data(rank, 4))

    compare(train, {"static_graph": True} if reentrant else {}, norm=False)


def test_compiled_model_equals_torch():
    def train(ddp, rank):
        return fit(torch.compile(ddp, backend="aot_eager"), data(rank, 3))

    compare(train, tolerance=1e-5, norm=False)


def test_optimizer_in_a_stream_of_its_own():
    """Forward and backward in a side stream: gradients are whole when that stream goes on."""

    def train(ddp, rank):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            result = fit(ddp, data(rank, 5))
        torch.cuda.current_stream().wait_stream(side)
        return result

    compare(train, {"bucket_cap_mb": 0.01}, norm=False)


def test_no_sync_and_two_backwards():
    def train(ddp, rank):
        batches = data(rank, 6)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        for k in range(0, 6, 2):
            optimizer.zero_grad()
            with ddp.no_sync():
                (ddp(batches[k][0]) - batches[k][1]).square().mean().backward()
            (ddp(batches[k + 1][0]) - batches[k + 1][1]).square().mean().backward()
            optimizer.step()
        return [value.float().cpu().numpy() for value in ddp.state_dict().values()]

    for views in (False, True):
        compare(train, {"gradient_as_bucket_view": views})
