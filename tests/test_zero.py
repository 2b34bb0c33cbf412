"""ZeroRedundancyOptimizer against torch's and against the plain optimizer."""

import copy
import importlib

import pytest

torch = pytest.importorskip("torch", reason="torch comes with EXTRAS in .ci/run")

import cdist  # noqa: E402
from cdist.optim import ZeroRedundancyOptimizer  # noqa: E402
from cdist.testing import run  # noqa: E402
from test_ddp_torch import close, compare, numbers, shard, small, vectors  # noqa: E402
from torch import nn  # noqa: E402

torch.set_num_threads(1)
KINDS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "betas": (0.8, 0.9)}),
    "AdamW": (torch.optim.AdamW, {"foreach": True}),
}


def descend(ddp, rank, world, optimizer, steps=4, schedule=None):
    for batch in vectors(steps, 12):
        x, y = shard(batch, rank, world)
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(x), y).backward()
        optimizer.step()
        if schedule:
            schedule.step()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_torch_and_the_plain_optimizer(kind, world):
    """With a schedule and a group that comes later. One of four ranks has a parameter, or none."""
    cls, defaults = KINDS[kind]

    def train(ddp, rank, world, package):
        first, *rest = list(ddp.parameters())
        if package is cdist:
            optimizer = ZeroRedundancyOptimizer(rest, cls, **defaults)
        elif world == 3:  # torch's own and the plain one by turns
            optimizer = cls(rest, **defaults)
        else:
            made = importlib.import_module("torch.distributed.optim").ZeroRedundancyOptimizer
            optimizer = made(rest, optimizer_class=cls, **defaults)
        optimizer.add_param_group({"params": [first], "lr": 0.03})
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        descend(ddp, rank, world, optimizer, schedule=schedule)
        assert len(optimizer.param_groups) == 2
        assert optimizer.param_groups[1]["lr"] == pytest.approx(0.03 / 16)
        if package is cdist:
            held = torch.tensor([len(group["params"]) for group in optimizer.optim.param_groups])
            cdist.all_reduce(held)
            assert held.tolist() == [3, 1]

    compare(world, small, train)


@pytest.mark.filterwarnings("ignore")
def test_state_of_a_plain_optimizer_both_ways_and_at_another_world_size():
    cls, defaults = KINDS["Adam"]

    def body(rank, world):
        def make(plain=False):
            ddp = cdist.DistributedDataParallel(small())
            made = cls if plain else lambda p, **kw: ZeroRedundancyOptimizer(p, cls, **kw)
            return ddp, made(ddp.parameters(), **defaults)

        reference, plain = make(plain=True)
        ddp, zero = make()
        for model, optimizer in ((reference, plain), (ddp, zero)):
            descend(model, rank, world, optimizer)
        assert len(zero.optim.state) < len(plain.state)
        with pytest.raises(RuntimeError, match=rf"consolidate_state_dict\(to={rank}\)"):
            zero.state_dict()
        zero.consolidate_state_dict(to=1)
        if rank == 1:
            ours, theirs = zero.state_dict(), plain.state_dict()
            assert ours["param_groups"] == theirs["param_groups"]
            assert list(ours["state"]) == list(theirs["state"])
            for mine, other in zip(ours["state"].values(), theirs["state"].values(), strict=True):
                assert mine.keys() == other.keys()
                assert all(torch.equal(mine[key], other[key]) for key in mine)
        else:
            with pytest.raises(RuntimeError, match="its own share"):
                zero.state_dict()
        saved = [zero.state_dict() if rank == 1 else None]
        cdist.broadcast_object_list(saved, src=1)
        before = copy.deepcopy(saved[0])
        pairs = cdist.new_subgroups(1)[0]
        other = cdist.DistributedDataParallel(copy.deepcopy(ddp.module), process_group=pairs)
        alone = ZeroRedundancyOptimizer(other.parameters(), cls, process_group=pairs, lr=7.0)
        alone.load_state_dict(saved[0])
        assert alone.param_groups[0]["lr"] == alone.optim.param_groups[0]["lr"] == 0.01
        assert saved[0]["param_groups"] == before["param_groups"]
        assert saved[0]["state"].keys() == before["state"].keys()
        again, resumed = make()
        again.load_state_dict(ddp.state_dict())
        resumed.load_state_dict(copy.deepcopy(plain.state_dict()))
        for model, optimizer in ((reference, plain), (ddp, zero), (again, resumed)):
            descend(model, rank, world, optimizer, 3)
        close(numbers(ddp), numbers(reference), 0)
        close(numbers(again), numbers(reference), 0)
        for batch in vectors(3, 12):
            parts = [shard(batch, r, world) for r in range(world)]
            alone.zero_grad()
            sum(nn.functional.mse_loss(other(x), y) for x, y in parts).div(world).backward()
            alone.step()
        close(numbers(other), numbers(reference))
        with pytest.raises(ValueError, match="another number of groups"):
            zero.load_state_dict({"state": {}, "param_groups": []})

    run(body, 3)


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("by_all", [False, True])
def test_uneven_inputs(by_all, views):
    """As DistributedDataParallel alone with the plain optimizer; a rank without data steps on its share."""
    cls, defaults = KINDS["SGD"]

    def body(rank, world):
        results = []
        for sharded in (False, True):
            ddp = cdist.DistributedDataParallel(small(), gradient_as_bucket_view=views)
            optimizer = (
                ZeroRedundancyOptimizer(ddp.parameters(), cls, **defaults)
                if sharded
                else cls(ddp.parameters(), **defaults)
            )
            joined = [ddp, optimizer] if sharded else [ddp]
            with cdist.Join(joined, divide_by_initial_world_size=by_all):
                descend(ddp, rank, world, optimizer, 2 + 2 * rank)
            results.append(numbers(ddp))
        close(*results, 1e-6)
        return results[1]

    mine = run(body, 2)
    close(*mine, 0)


def test_closures_and_hooks():
    def body(rank, world):
        ddp = cdist.DistributedDataParallel(small())
        zero = ZeroRedundancyOptimizer(list(ddp.parameters()), torch.optim.SGD, lr=0.01)
        seen = []
        zero.register_step_post_hook(lambda *args: seen.append(1))

        def closure():
            zero.zero_grad()
            loss = ddp(torch.ones(2, 6)).square().sum()
            loss.backward()
            return loss

        losses = [zero.step(closure).item() for _ in range(3)]
        assert losses == sorted(losses, reverse=True)
        assert (len(seen), isinstance(zero, torch.optim.Optimizer)) == (3, True)

    run(body, 2)


@pytest.mark.parametrize(
    ("params", "kwargs", "error", "text"),
    [
        (torch.ones(1), {}, TypeError, "tensors or parameter groups, not torch"),
        (3, {}, TypeError, "tensors or parameter groups, not int"),
        ([], {}, ValueError, "no parameters"),
        ([1], {}, TypeError, "all tensors or all"),
        ([{"params": [nn.Parameter(torch.ones(1))]}, torch.ones(1)], {}, TypeError, "all tensors or all"),
        (
            [nn.Parameter(torch.ones(1))],
            {"overlap_with_ddp": True},
            NotImplementedError,
            "after the backward",
        ),
    ],
)
def test_bad_arguments(params, kwargs, error, text):
    def body(rank, world):
        with pytest.raises(error, match=text):
            ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1, **kwargs)

    run(body, 1)
