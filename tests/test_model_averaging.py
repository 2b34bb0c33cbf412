"""Averages of models every few steps, against torch's: post-local and hierarchical SGD."""

import importlib
import pickle

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch comes with EXTRAS in .ci/run")

import cdist  # noqa: E402
from cdist.algorithms.model_averaging import averagers, hierarchical_model_averager, utils  # noqa: E402
from cdist.optim import PostLocalSGDOptimizer  # noqa: E402
from cdist.testing import run  # noqa: E402
from test_ddp_torch import close, compare, numbers, shard, small, vectors  # noqa: E402
from torch import nn  # noqa: E402

torch.set_num_threads(1)


def of(package, path):
    base = "cdist" if package is cdist else "torch.distributed"
    return importlib.import_module(f"{base}.{path}")


def hook_in_pairs(ddp, package, start):
    post = of(package, "algorithms.ddp_comm_hooks.post_localSGD_hook")
    pair, _ = package.new_subgroups(2)
    ddp.register_comm_hook(post.PostLocalSGDState(None, pair, start), post.post_localSGD_hook)


def train_small(ddp, rank, world, optimizer, then=lambda: None, steps=8):
    for batch in vectors(steps, 12):
        x, y = shard(batch, rank, world)
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(x), y).backward()
        optimizer.step()
        then()


@pytest.mark.parametrize(("warmup", "period"), [(0, 2), (2, 3), (7, 2), (2, 1)])
@pytest.mark.filterwarnings("ignore:When period is 1")
def test_periodic_averages_equal_torch(warmup, period):
    """As torch's page on post-local SGD has it; models of two pairs are equal after an average alone."""

    def train(ddp, rank, world, package):
        hook_in_pairs(ddp, package, warmup)
        averager = of(package, "algorithms.model_averaging.averagers").PeriodicModelAverager(
            period=period, warmup_steps=warmup
        )
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        train_small(ddp, rank, world, optimizer, lambda: averager.average_parameters(ddp.parameters()))
        assert averager.step == 8

    mine = [outcome[0] for outcome in compare(4, small, train)]
    close(mine[0], mine[1], 0)
    apart = any((a != b).any() for a, b in zip(mine[0], mine[2], strict=True))
    assert apart == ((7 - warmup) % period != 0)


@pytest.mark.parametrize("resumed", [False, True])
def test_post_local_optimizer_equals_torch(resumed):
    """Its state holds the averager's count; schedules see the groups that a loaded state has made."""

    def train(ddp, rank, world, package):
        hook_in_pairs(ddp, package, 2)
        make = of(package, "algorithms.model_averaging.averagers").PeriodicModelAverager
        wrapper = of(package, "optim").PostLocalSGDOptimizer

        def wrap():
            local = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
            return wrapper(optim=local, averager=make(period=3, warmup_steps=2))

        optimizer = wrap()
        if resumed:
            train_small(ddp, rank, world, optimizer, steps=5)
            state = pickle.loads(pickle.dumps(optimizer.state_dict()))
            assert state["step"] == 5
            optimizer = wrap()
            optimizer.load_state_dict(state)
            assert optimizer.averager.step == 5
        train_small(ddp, rank, world, optimizer, steps=4)

    compare(4, small, train)


def test_post_local_optimizer_stands_for_its_optimizer():
    def body(rank, world):
        module = small()
        local = torch.optim.SGD(module.parameters(), lr=0.1)
        optimizer = PostLocalSGDOptimizer(local, averagers.PeriodicModelAverager(4))
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert repr(optimizer) == repr(local)
        assert optimizer.defaults is local.defaults
        seen = []
        optimizer.register_step_pre_hook(lambda *args: seen.append(1))
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "lr": 1.0})
        optimizer.load_state_dict(optimizer.state_dict())
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.5, 2.0], total_steps=10)

        def closure():
            optimizer.zero_grad(set_to_none=False)
            loss = module(torch.ones(2, 6)).sum()
            loss.backward()
            return loss

        before = module(torch.ones(2, 6)).sum().item()
        assert optimizer.step(closure).item() == before
        assert seen == [1]
        schedule.step()
        assert [group["lr"] for group in local.param_groups] == schedule.get_last_lr()
        state = optimizer.state_dict()
        del state["step"]
        with pytest.warns(UserWarning, match="'step' of an averager"):
            optimizer.load_state_dict(state)
        assert optimizer.averager.step == 0

    run(body, 1)


def test_hierarchical_averages_equal_torch():
    def train(ddp, rank, world, package):
        averager = of(
            package, "algorithms.model_averaging.hierarchical_model_averager"
        ).HierarchicalModelAverager(period_group_size_dict={2: 2, 6: 4}, warmup_steps=1)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        seen = []

        def average():
            averager.average_parameters(ddp.parameters())
            seen.extend(numbers(ddp))

        post = of(package, "algorithms.ddp_comm_hooks.post_localSGD_hook")
        state = post.PostLocalSGDState(None, None, 0, post_local_gradient_allreduce=False)
        ddp.register_comm_hook(state, post.post_localSGD_hook)
        train_small(ddp, rank, world, optimizer, average)
        return seen

    compare(4, small, train)


def test_averages_within_a_group_of_some_ranks():
    """Ranks 1 to 4 of five, in pairs: those of a pair are neighbours in the group."""

    def body(rank, world):
        group = cdist.new_group([1, 2, 3, 4])
        parameter = nn.Parameter(torch.full((2, 3), float(rank)))
        parameter.grad = torch.zeros(2, 3)
        if rank == 0:
            utils.average_parameters([parameter], group)
            return [parameter[0, 0].item()]
        averager = hierarchical_model_averager.HierarchicalModelAverager({1: 2, 2: 4}, process_group=group)
        averager.step = 1
        values = []
        for _ in range(2):
            parameter.data.fill_(rank)
            averager.average_parameters([{"params": [parameter]}])
            values.append(parameter[0, 0].item())
        return values

    assert run(body, 5) == [[0], [1.5, 2.5], [1.5, 2.5], [3.5, 2.5], [3.5, 2.5]]


def test_what_is_averaged():
    """Parameters without a gradient stay; memory stays; dtypes and layouts may differ; no torch is needed."""

    def body(rank, world):
        kept = nn.Parameter(torch.full((3,), float(rank)))
        wide = nn.Parameter(torch.full((2, 3, 4, 4), rank, dtype=torch.float64).to(
            memory_format=torch.channels_last))  # fmt: skip
        half = nn.Parameter(torch.tensor(float(rank), dtype=torch.bfloat16))
        array = cdist.Parameter(np.full(5, rank + 1.0))
        wide.grad, half.grad = torch.zeros_like(wide), torch.zeros_like(half)
        view = wide.data.as_strided((1,), (1,))
        array.grad = np.zeros(5)
        utils.average_parameters_or_parameter_groups([kept, {"params": [wide, half]}, array], None)
        assert (kept == rank).all()
        assert (wide == 1).all()
        assert wide.is_contiguous(memory_format=torch.channels_last)
        assert view.item() == half.item() == 1
        assert array.data.tolist() == [2] * 5
        with pytest.raises(NotImplementedError, match="not int"):
            utils.get_params_to_average([1])
        with pytest.raises(cdist.MismatchError):
            utils.average_parameters([nn.Parameter(torch.zeros(3 + (rank == 1)))], None)

    run(body, 3)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: averagers.PeriodicModelAverager(0), "period should be 1 or more, not 0"),
        (lambda: averagers.PeriodicModelAverager(2, -1), "warmup_steps should not be negative, not -1"),
        (lambda: hierarchical_model_averager.HierarchicalModelAverager(), "a period at least"),
        (
            lambda: hierarchical_model_averager.HierarchicalModelAverager({0: 1}),
            "periods should be 1 or more, not 0",
        ),
        (lambda: hierarchical_model_averager.HierarchicalModelAverager({2: 2}), "all 1 ranks .* not of 2"),
        (lambda: hierarchical_model_averager.HierarchicalModelAverager({2: 1}, -1), "not be negative"),
    ],
)
def test_bad_arguments(make, text):
    def body(rank, world):
        with pytest.raises(ValueError, match=text):
            make()

    run(body, 1)


def test_averaging_in_every_step_warns():
    def body(rank, world):
        with pytest.warns(UserWarning, match="period is 1") as caught:
            averagers.PeriodicModelAverager(1)
        assert caught[0].filename == __file__
        with pytest.warns(UserWarning, match="last period"):
            hierarchical_model_averager.HierarchicalModelAverager({1: 1})

    run(body, 1)
