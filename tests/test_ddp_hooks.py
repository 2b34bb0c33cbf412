"""Quantization, batched PowerSGD and post-local SGD against torch's hooks; hooks for buffers; times of a
step.
"""

import importlib
import os
import pickle

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch comes with EXTRAS in .ci/run")

import cdist  # noqa: E402
from cdist.parallel.torch_comm import BufferCommHookLocation  # noqa: E402
from cdist.testing import run  # noqa: E402
from test_ddp_torch import batches, close, compare, numbers, shard, small, vectors  # noqa: E402
from torch import nn  # noqa: E402

torch.set_num_threads(1)


def hooks(package, name=""):
    base = "cdist" if package is cdist else "torch.distributed"
    return importlib.import_module(f"{base}.algorithms.ddp_comm_hooks.{name}".rstrip("."))


def train_small(ddp, rank, world, steps=5):
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for batch in vectors(steps, 12):
        x, y = shard(batch, rank, world)
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(x), y).backward()
        optimizer.step()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["pertensor", "perchannel"])
def test_quantization_equals_torch(kind, world):
    """With torch's observers and its arithmetic: its hooks themselves take Gloo's futures for NCCL's and fail
    on the CPU.
    """

    def reference(gradients):
        torchs = importlib.import_module("torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks")
        total = 0
        for flat in gradients:
            if kind == "pertensor":
                observer = torch.ao.quantization.MinMaxObserver()
                observer(flat)
                scale, zero = (float(v) for v in observer.calculate_qparams())
                levels = torchs._quantize_per_tensor_backend(flat, scale, zero)
                total = total + torchs._dequantize_per_tensor_backend(levels, scale, zero)
            else:
                rows = nn.functional.pad(flat, (0, 512 - len(flat) % 512)).view(-1, 512)
                observer = torch.ao.quantization.PerChannelMinMaxObserver()
                observer(rows)
                scale, zero = observer.calculate_qparams()
                levels = torchs._quantize_per_channel_backend(rows, scale, zero)
                total = total + torchs._dequantize_per_channel_backend(levels, scale, zero)
        return (total / len(gradients)).flatten()[: len(gradients[0])]

    def body(rank, world):
        torch.manual_seed(0)
        module = nn.Module()
        module.weight = nn.Parameter(torch.zeros(1500))
        module.forward = lambda x: (module.weight * x).sum()
        ddp = cdist.DistributedDataParallel(module)
        hook = getattr(hooks(cdist, "quantization_hooks"), f"quantization_{kind}_hook")
        ddp.register_comm_hook(None, hook)
        for step in range(3):
            everyone = torch.randn(world, 1500) * 10**step
            ddp.zero_grad()
            ddp(everyone[rank]).backward()
            close([module.weight.grad], [reference(list(everyone))], 1e-6 * 10**step)

    run(body, world)


def test_quantization_is_near_the_mean():
    """8 bits over the range of each 512 elements: an error of at most half a level a rank, and gradients of
    zero stay zero.
    """

    def body(rank, world):
        from cdist.algorithms.ddp_comm_hooks.quantization_hooks import quantization_perchannel_hook

        torch.manual_seed(0)
        module = nn.Module()
        module.weight = nn.Parameter(torch.zeros(1500))
        module.forward = lambda x: (module.weight * x).sum()
        ddp = cdist.DistributedDataParallel(module)
        ddp.register_comm_hook(None, quantization_perchannel_hook)
        everyone = torch.randn(world, 1500)
        everyone[:, 700] = 0
        ddp(everyone[rank]).backward()
        mean = everyone.mean(0)
        levels = (everyone.max() - everyone.min()) / 255
        assert (module.weight.grad - mean).abs().max() <= levels / 2 + 1e-6
        assert module.weight.grad[700] == 0

    run(body, 3)


@pytest.mark.parametrize("rank_of_approximation", [1, 3])
@pytest.mark.parametrize("feedback", [True, False])
def test_batched_power_sgd_equals_torch(feedback, rank_of_approximation):
    """A bucket that is a square matrix: torch's plain hook does the same with it (its batched one asserts 3-D
    matrices and fails).
    """

    def build():
        torch.manual_seed(0)
        return nn.Linear(32, 32, bias=False)

    def train(ddp, rank, world, package):
        power = hooks(package, "powerSGD_hook")
        state = power.PowerSGDState(
            None,
            rank_of_approximation,
            start_powerSGD_iter=2,
            use_error_feedback=feedback,
            warm_start=feedback,
        )
        ddp.register_comm_hook(
            state, power.batched_powerSGD_hook if package is cdist else power.powerSGD_hook
        )
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
        for batch in batches(6, 8, (32,), 32):
            x, y = shard(batch, rank, world)
            optimizer.zero_grad()
            nn.functional.mse_loss(ddp(x), y).backward()
            optimizer.step()

    compare(2, build, train, tolerance=1e-5)


def test_batched_power_sgd_pads_a_bucket():
    """A bucket whose length is no square: gradients of rank one pass unchanged, ranks stay equal."""

    def body(rank, world):
        from cdist.parallel.powersgd import PowerSGDState, batched_powerSGD_hook

        module = small()
        ddp = cdist.DistributedDataParallel(module)
        state = PowerSGDState(None, 1, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, batched_powerSGD_hook)
        train_small(ddp, rank, world)
        rate, before, after = state.compression_stats()
        assert before == 3 * 169  # 163 elements as 13 x 13, in three of five steps
        assert after == 3 * 2 * 13
        assert rate == before / after
        return numbers(ddp)

    first, second = run(body, 2)
    close(first, second, 0)


def test_power_sgd_of_a_model_equals_torch():
    """Several matrices and vectors in one bucket, which lie in it in the order in which torch has them after
    its new plan.
    """

    def train(ddp, rank, world, package):
        power = hooks(package, "powerSGD_hook")
        state = power.PowerSGDState(None, 2, start_powerSGD_iter=3, min_compression_rate=1)
        ddp.register_comm_hook(state, power.powerSGD_hook)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
        for batch in batches(7, 8, (24,), 32):
            x, y = shard(batch, rank, world)
            optimizer.zero_grad()
            nn.functional.mse_loss(ddp(x), y).backward()
            optimizer.step()

    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 32))

    compare(2, build, train, tolerance=1e-5)


@pytest.mark.parametrize("reduces", [True, False])
def test_post_local_sgd_equals_torch(reduces):
    """Four ranks in two subgroups: models of a subgroup stay equal, models of two drift apart after the
    start.
    """

    def train(ddp, rank, world, package):
        post = hooks(package, "post_localSGD_hook")
        subgroup, _ = package.new_subgroups(2)
        state = post.PostLocalSGDState(None, subgroup, 2, post_local_gradient_allreduce=reduces)
        ddp.register_comm_hook(state, post.post_localSGD_hook)
        train_small(ddp, rank, world)

    mine = [outcome[0] for outcome in compare(4, small, train)]
    if reduces:
        close(mine[0], mine[1], 0)
        close(mine[2], mine[3], 0)
    assert any((a != b).any() for a, b in zip(mine[0], mine[2], strict=True))


def test_post_local_sgd_finds_the_ranks_of_a_host():
    """On CPUs, too, where torch's hook asks for a subgroup."""

    def body(rank, world):
        os.environ["LOCAL_WORLD_SIZE"] = "2"
        post = hooks(cdist, "post_localSGD_hook")
        states = []
        for subgroup in (None, cdist.new_subgroups(2)[0]):
            ddp = cdist.DistributedDataParallel(small())
            states.append(post.PostLocalSGDState(None, subgroup, 1))
            ddp.register_comm_hook(states[-1], post.post_localSGD_hook)
            train_small(ddp, rank, world)
            yield numbers(ddp)
        yield cdist.get_process_group_ranks(states[0].subgroup)

    outcomes = run(lambda *ranks: list(body(*ranks)), 4)
    for rank, (found, given, members) in enumerate(outcomes):
        close(found, given, 0)
        assert members == [rank // 2 * 2, rank // 2 * 2 + 1]


@pytest.mark.parametrize("given", ["group", "state"])
def test_hooks_by_name(given):
    """The state of PowerSGD hooks is a process group, as torch's; a PowerSGDState is taken too."""

    def body(rank, world):
        kinds = hooks(cdist).DDPCommHookType
        state_of = hooks(cdist, "powerSGD_hook").PowerSGDState
        for kind in kinds:
            if kind.name == "POST_LOCAL_SGD":
                continue
            power = "POWER" in kind.name
            state = state_of(None, start_powerSGD_iter=2) if power and given == "state" else cdist.group.WORLD
            ddp = cdist.DistributedDataParallel(small())
            kind.value(model=ddp, state=state)
            train_small(ddp, rank, world)
            if power:
                used = ddp._hook[0]
                expected = 2 if "RANK2" in kind.name and given == "group" else 1
                assert (used.matrix_approximation_rank, used.iter > 2) == (expected, True)

    run(body, 2)
    theirs = hooks(torch.distributed).DDPCommHookType
    assert {kind.name for kind in theirs} <= {kind.name for kind in hooks(cdist).DDPCommHookType}


def test_power_sgd_goes_on_from_a_checkpoint():
    """The state is pickled without its group, and goes on with the default one."""

    def body(rank, world):
        power = hooks(cdist, "powerSGD_hook")

        def wrap(module, state):
            ddp = cdist.DistributedDataParallel(module)
            ddp.register_comm_hook(state, power.powerSGD_hook)
            return ddp

        torch.manual_seed(0)
        ddp = wrap(nn.Linear(24, 32), power.PowerSGDState(cdist.group.WORLD, 2, 2))
        x = torch.randn(4, 24, generator=torch.Generator().manual_seed(rank))

        def step(ddp):
            ddp.zero_grad()
            ddp(x).square().sum().backward()
            return [p.grad.clone() for p in ddp.parameters()]

        for _ in range(4):
            step(ddp)
        state, module = pickle.loads(pickle.dumps((ddp._hook[0], ddp.module)))
        assert state.process_group is cdist.group.WORLD
        again = wrap(module, state)
        for _ in range(3):
            assert all(map(torch.equal, step(ddp), step(again)))

    run(body, 2)


class Counting(nn.Module):
    """A layer that keeps a running mean of its inputs, which takes no part in the graph."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        self.count += 1
        return self.layer(x)


@pytest.mark.parametrize("location", ["PRE_FORWARD", "POST_FORWARD"])
def test_buffer_hook_equals_torch(location):
    """A hook that averages buffers, called where torch does; the end of backward waits for its futures."""

    def train(ddp, rank, world, package):
        from torch.nn.parallel.distributed import _BufferCommHookLocation

        seen = []

        def average(state, buffers):
            seen.append((sorted(buffers), int(ddp.module.count)))
            work = package.all_reduce(buffers["mean"], async_op=True)
            future = work.get_future().then(lambda done: buffers["mean"].div_(world))
            if location == "PRE_FORWARD":
                future.wait()  # torch leaves it to the user to wait before the forward pass uses the buffers
            return [future]

        ours = package is cdist and location == "PRE_FORWARD"
        where = BufferCommHookLocation[location] if ours else _BufferCommHookLocation[location]
        ddp._register_buffer_comm_hook(None, average, where)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for batch in vectors(3, 8):
            x, y = shard(batch, rank, world)
            optimizer.zero_grad()
            nn.functional.mse_loss(ddp(x), y).backward()
            optimizer.step()
        first = 0 if location == "PRE_FORWARD" else 1
        assert seen == [(["count", "mean"], first + step) for step in range(3)]

    outcomes = compare(2, Counting, train)
    if location == "POST_FORWARD":
        close(outcomes[0][0], outcomes[1][0], 0)


def test_buffer_hook_must_be_callable():
    def body(rank, world):
        ddp = cdist.DistributedDataParallel(small(norm=True))
        with pytest.raises(TypeError, match="must be callable"):
            ddp._register_buffer_comm_hook(None, 1)
        called = []
        ddp._register_buffer_comm_hook("state", lambda state, buffers: called.append(state))
        with torch.no_grad():
            ddp.eval()(torch.ones(2, 6))
        assert called == ["state"]

    run(body, 1)


def test_hooks_are_called_by_position():
    def body(rank, world):
        from cdist.parallel.hooks import allreduce_hook

        def other_names(group, gradients: cdist.GradBucket):
            return allreduce_hook(group, gradients)

        for hook in (other_names, lambda *both: allreduce_hook(*both)):
            ddp = cdist.DistributedDataParallel(small())
            ddp.register_comm_hook(None, hook)
            ddp(torch.full((2, 6), float(rank))).sum().backward()
            assert ddp.module[-1].bias.grad.tolist() == [2.0] * 3

        def wrong(group, gradients: int):
            return None

        ddp = cdist.DistributedDataParallel(small())
        with pytest.raises(ValueError, match="bucket annotation should be GradBucket"):
            ddp.register_comm_hook(None, wrong)
        for hook in (lambda bucket: None, lambda state, *, bucket: None, lambda a, b, c: None):
            with pytest.raises(TypeError, match=r"called as hook\(state, bucket\), but .*by position"):
                ddp.register_comm_hook(None, hook)

    run(body, 2)


def test_times_of_a_step():
    def body(rank, world, hooked):
        ddp = cdist.DistributedDataParallel(small(rank))
        if hooked:
            from cdist.parallel.hooks import allreduce_hook

            ddp.register_comm_hook(None, allreduce_hook)
        ddp._set_ddp_runtime_logging_sample_rate(20)
        with pytest.raises(ValueError, match="sample rate should be equal or greater than 1"):
            ddp._set_ddp_runtime_logging_sample_rate(0)
        before = ddp._get_ddp_logging_data()
        assert before["avg_forward_compute_time"] == 0
        assert "forward_compute_time" not in before
        samples = []
        for _ in range(21):
            ddp(torch.ones(2, 6)).sum().backward()
            samples.append(ddp._times.samples)
        with ddp.no_sync():
            ddp(torch.ones(2, 6)).sum().backward()
        assert samples == [*range(1, 11), *[10] * 9, 11, 11]
        return ddp._get_ddp_logging_data()

    for hooked in (False, True):
        for data in run(body, 2, hooked):
            parts = ("forward_compute", "backward_compute", "backward_comm", "backward_compute_comm_overlap")
            for part in parts:
                assert data[f"avg_{part}_time"] >= 0
            assert data["avg_forward_compute_time"] > 0
            assert data["avg_backward_comm_time"] > 0
            assert (
                data["forward_compute_time_start"]
                < data["backward_compute_time_start"]
                <= data["backward_comm_time_start"]
                <= data["backward_comm_time_end"]
            )
            assert data["backward_compute_time_end"] <= data["backward_comm_time_end"]
            overlap = data["backward_compute_time_end"] - data["backward_comm_time_start"]
            assert data["backward_compute_comm_overlap_time"] == max(0, overlap)


def test_torch_gives_these_times_too():
    """The names are those of torch's DDP."""

    def train(ddp, rank, world, package):
        for _ in range(2):
            ddp(torch.ones(2, 6)).sum().backward()
        ddp(torch.ones(2, 6))
        return [np.array(sorted(name for name in ddp._get_ddp_logging_data() if "_time" in name))]

    import tempfile

    from test_ddp_torch import both

    with tempfile.TemporaryDirectory() as folder:
        (ours,), (theirs,) = run(both, 1, small, train, None, None, f"{folder}/store")[0]
    assert set(theirs) <= set(ours)


def test_views_hold_gradients_once():
    """K145: with gradients as views of buckets memory holds them once, also when grads are replaced by fresh
    tensors each step.
    """

    def body(rank, world, views):
        ddp = cdist.DistributedDataParallel(small(), gradient_as_bucket_view=views)
        x = torch.full((2, 6), float(rank + 1))
        for step in range(4):
            for p in ddp.parameters():
                p.grad = None if step % 2 else torch.zeros_like(p)
            ddp(x).sum().backward()
        held = {g.untyped_storage().data_ptr(): g.untyped_storage().nbytes() for g in ddp._bucket_tensors}
        held |= {
            p.grad.untyped_storage().data_ptr(): p.grad.untyped_storage().nbytes() for p in ddp.parameters()
        }
        return sum(held.values()), [p.grad.numpy().copy() for p in ddp.parameters()]

    apart, together = run(body, 2, False), run(body, 2, True)
    size = sum(p.numel() * p.element_size() for p in small().parameters())
    for (twice, plain), (once, viewed) in zip(apart, together, strict=True):
        close(viewed, plain, 0)
        assert once < size + 64
        assert twice >= 2 * size


def test_strides_of_dimensions_of_size_one_do_not_matter():
    """K146: a gradient of shape (8, 4, 1, 1) in channels-last strides lies in its bucket without a copy and
    without a warning.
    """
    import warnings

    def body(rank, world):
        torch.manual_seed(0)
        module = nn.Conv2d(4, 8, 1)
        ddp = cdist.DistributedDataParallel(module, gradient_as_bucket_view=True)
        x = torch.randn(2, 4, 5, 5).to(memory_format=torch.channels_last)
        places = []
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(4):
                ddp.zero_grad()
                ddp(x).sum().backward()
                places.append(module.weight.grad.data_ptr())
            module.weight.grad = torch.as_strided(torch.zeros(32), (8, 4, 1, 1), (4, 1, 4, 4))
            ddp(x).sum().backward()
        places.append(module.weight.grad.data_ptr())
        assert len(set(places[1:])) == 1

        odd = nn.Module()
        odd.weight = nn.Parameter(torch.empty_strided((8, 1, 4, 2), (8, 999, 1, 4)).fill_(1))
        odd.forward = lambda x: (odd.weight * x).sum()
        for views in (False, True):
            ddp = cdist.DistributedDataParallel(odd, gradient_as_bucket_view=views)
            ddp(torch.arange(8.0).view(1, 1, 4, 2)).backward()
            assert ddp._views[0].stride()[2:] == odd.weight.grad.stride()[2:] == (1, 4)
            odd.weight.grad = None
        return numbers(ddp)

    run(body, 2)
