"""mixed_precision=, autocast with GradScaler, activation checkpointing and gradients of gradients under
DistributedDataParallel.
"""

import copy
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch comes with EXTRAS in .ci/run")

import cdist  # noqa: E402
from cdist.parallel import MixedPrecision  # noqa: E402
from cdist.testing import run  # noqa: E402
from test_ddp_torch import close, compare, descend, elsewhere, numbers, shard, small, vectors  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

torch.set_num_threads(1)
BF16 = torch.bfloat16


def by_hand(world, config, steps=3, tied=False):
    """What mixed precision means: gradients of a low precision copy, averaged in reduce_dtype, applied to the
    masters.
    """
    master = small()
    optimizer = torch.optim.SGD(master.parameters(), lr=0.05)
    for batch in vectors(steps, 8):
        sums = None
        for rank in range(world):
            x, y = shard(batch, rank, world)
            low = copy.deepcopy(master).to(config.param_dtype)
            nn.functional.mse_loss(low(x.to(config.param_dtype)).float(), y).backward()
            grads = [p.grad.to(config.reduce_dtype or config.param_dtype).float() for p in low.parameters()]
            sums = grads if sums is None else [a + b for a, b in zip(sums, grads, strict=True)]
        for p, total in zip(master.parameters(), sums, strict=True):
            p.grad = (total / world).to(config.reduce_dtype or config.param_dtype).float()
        optimizer.step()
    return numbers(master)


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32, BF16])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_mixed_precision_is_that_of_low_precision_copies(world, reduce_dtype, views):
    config = MixedPrecision(BF16, reduce_dtype)

    def body(rank, world):
        seen = []
        module = small(rank)
        module.register_forward_hook(
            lambda m, args, out: seen.append((args[0].dtype, m[0].weight.dtype, out.dtype))
        )
        ddp = cdist.DistributedDataParallel(module, mixed_precision=config, gradient_as_bucket_view=views)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        for batch in vectors(3, 8):
            x, y = shard(batch, rank, world)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(ddp(x).float(), y)
            assert module[0].weight.dtype == BF16  # until the end of backward
            loss.backward()
            assert all(p.dtype == p.grad.dtype == torch.float32 for p in ddp.parameters())
            optimizer.step()
        assert seen == [(BF16, BF16, BF16)] * 3
        assert all(value.dtype == torch.float32 for value in ddp.state_dict().values())
        with torch.no_grad():
            assert ddp(x).dtype == BF16
        assert module[0].weight.dtype == torch.float32
        return numbers(ddp)

    outcomes = run(body, world)
    expected = elsewhere(by_hand, world, config)
    for outcome in outcomes:
        close(outcome, outcomes[0], 0)
        # Sums of three ranks are rounded to bfloat16 once or twice.
        close(outcome, expected, 1e-6 if world < 3 or reduce_dtype is torch.float32 else 1e-3)


def test_mixed_precision_accumulates_in_full_precision():
    def body(rank, world):
        ddp = cdist.DistributedDataParallel(small(), mixed_precision=MixedPrecision(BF16, torch.float32))
        total = None
        for number, batch in enumerate(vectors(4, 8)):
            x, y = shard(batch, rank, world)
            alone = copy.deepcopy(ddp.module).to(BF16)
            alone.zero_grad()
            nn.functional.mse_loss(alone(x.to(BF16)).float(), y).backward()
            grads = [p.grad.float() for p in alone.parameters()]
            total = grads if total is None else [a + b for a, b in zip(total, grads, strict=True)]
            if number < 3:
                with ddp.no_sync():
                    nn.functional.mse_loss(ddp(x).float(), y).backward()
                assert all(p.dtype == p.grad.dtype == torch.float32 for p in ddp.parameters())
            else:
                nn.functional.mse_loss(ddp(x).float(), y).backward()
        for p, mine in zip(ddp.parameters(), total, strict=True):
            cdist.all_reduce(mine, op=cdist.ReduceOp.AVG)
            close([p.grad], [mine])

    run(body, 2)


class Convolutions(nn.Module):
    """Convolutions save their weights themselves for the backward pass, linear layers views of them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Conv1d(1, 3, 3)
        self.second = nn.Conv1d(3, 2, 2)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x.unsqueeze(1))))


def gather_twice(model, context, how, xs):
    """Gradients of several backward passes, the last of them outside of `context`."""
    if how == "both forward passes first":
        with context():
            losses = [model(x).float().square().mean() for x in xs[:2]]
            for loss in losses:
                loss.backward()
    elif how == "one forward pass":
        with context():
            loss = model(xs[0]).float().square().mean()
            loss.backward(retain_graph=True)
            with torch.no_grad():
                model(xs[1])
            loss.backward()
    elif how == "one sum":
        sum(model(x).float().square().mean() for x in xs[:2]).backward()
    model(xs[2]).float().square().mean().backward()


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("how", ["both forward passes first", "one forward pass", "one sum"])
def test_mixed_precision_with_several_backward_passes(how, views):
    def body(rank, world):
        config = MixedPrecision(BF16, torch.float32)
        ddp = cdist.DistributedDataParallel(
            Convolutions(), mixed_precision=config, gradient_as_bucket_view=views
        )
        plain = cdist.DistributedDataParallel(Convolutions(), gradient_as_bucket_view=views)
        torch.manual_seed(10 + rank)
        xs = [torch.randn(4, 9) for _ in range(3)]
        for model in (ddp, plain):
            gather_twice(model, model.no_sync, how, xs)
        for p, q in zip(ddp.parameters(), plain.parameters(), strict=True):
            assert p.dtype == p.grad.dtype == torch.float32
            # bfloat16 has eight bits: some parts in a hundred of the largest.
            close([p.grad / q.grad.abs().max()], [q.grad / q.grad.abs().max()], 0.05)
        return [p.grad.clone() for p in ddp.parameters()]

    first, second = run(body, 2)
    for a, b in zip(first, second, strict=True):
        close([a], [b], 0)


def test_mixed_precision_with_checkpoints_buffers_unused_and_frozen_parameters():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.one, self.two, self.spare = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(6, 3)
            self.two.bias.requires_grad_(False)
            self.register_buffer("scale", torch.full((3,), 1.001))
            self.register_buffer("count", torch.tensor([7]))

        def forward(self, x, reentrant):
            x = checkpoint(self.one, x, use_reentrant=reentrant)
            return self.two(x) * self.scale

    def body(rank, world, reentrant):
        config = MixedPrecision(BF16, torch.float32, BF16)
        ddp = cdist.DistributedDataParallel(
            Deep(), mixed_precision=config, find_unused_parameters=not reentrant
        )
        if reentrant:
            for p in ddp.module.spare.parameters():
                p.requires_grad_(False)
            ddp.set_trainable([n for n, p in ddp.module.named_parameters() if p.requires_grad])
        assert ddp.module.scale.dtype == BF16
        assert ddp.module.count.dtype == torch.int64
        for _ in range(3):
            ddp.zero_grad()
            ddp(torch.full((2, 6), rank + 1.0, requires_grad=True), reentrant).float().sum().backward()
        assert {p.dtype for p in ddp.parameters()} == {torch.float32}
        assert ddp.module.spare.weight.grad is None
        ddp.module.register_forward_pre_hook(lambda m, args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ddp(torch.ones(2, 6), reentrant)
        assert {p.dtype for p in ddp.parameters()} == {torch.float32}
        return [p.grad.numpy() for p in ddp.parameters() if p.grad is not None]

    for reentrant in (False, True):
        one, two = run(body, 2, reentrant)
        close(one, two, 0)
        assert all(np.isfinite(g).all() for g in one)


def test_mixed_precision_of_torch_is_taken():
    from torch.nn.parallel.distributed import _MixedPrecision

    def body(rank, world):
        ddp = cdist.DistributedDataParallel(small(), mixed_precision=_MixedPrecision(reduce_dtype=BF16))
        x = torch.full((2, 6), rank + 1.0)
        assert ddp(x).dtype == torch.float32  # only the reduction is of low precision
        ddp(x).sum().backward()
        hooked = cdist.DistributedDataParallel(small(), mixed_precision=_MixedPrecision(reduce_dtype=BF16))
        seen = []

        def hook(state, bucket):
            seen.append(bucket.buffer().dtype)
            from cdist.parallel.hooks import allreduce_hook

            return allreduce_hook(state, bucket)

        hooked.register_comm_hook(None, hook)
        hooked(x).sum().backward()
        assert set(seen) == {BF16}
        close([p.grad for p in hooked.parameters()], [p.grad for p in ddp.parameters()], 0)
        assert all((p.grad == p.grad.to(BF16)).all() for p in ddp.parameters())

    run(body, 2)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_checkpointed_layers_equal_torch(world, reentrant):
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
            self.last = nn.Linear(6, 3)

        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(checkpoint(layer, x, use_reentrant=reentrant))
            return self.last(x)

    compare(world, Deep, descend)


def test_autocast_and_grad_scaler_skip_a_step_on_all_ranks():
    """An overflow on one rank is in the mean, so that every rank's scaler skips the step and halves its
    scale.
    """

    def train(ddp, rank, world, package):
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        scales = []
        for number, batch in enumerate(vectors(6, 8)):
            x, y = shard(batch, rank, world)
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=BF16):
                out = ddp(x)
                loss = nn.functional.mse_loss(out.float(), y)
            if number == 2 and rank == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return [*numbers(ddp), np.array(scales)]

    for mine, _ in compare(2, small, train):
        assert mine[-1].tolist() == [1024, 2048, 1024, 1024, 2048, 2048]


def test_gradient_penalty_equals_torch():
    """Double backward: the gradient by the input is itself part of the loss."""

    def train(ddp, rank, world, package):
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        for batch in vectors(4, 8):
            x, y = shard(batch, rank, world)
            x = x.requires_grad_()
            optimizer.zero_grad()
            out = ddp(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            (nn.functional.mse_loss(out, y) + (slope.norm() - 1) ** 2).backward()
            optimizer.step()

    compare(2, small, train)


def test_second_backward_of_one_forward_is_reduced_too():
    def body(rank, world):
        ddp = cdist.DistributedDataParallel(small())
        x, y = shard(vectors(1, 8)[0], rank, world)
        loss = nn.functional.mse_loss(ddp(x), y)
        loss.backward(retain_graph=True)
        once = [p.grad.clone() for p in ddp.parameters()]
        loss.backward()
        close([p.grad for p in ddp.parameters()], [2 * g for g in once])
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
        ddp.zero_grad()
        nn.functional.mse_loss(ddp(x), y).backward()
        close([p.grad for p in ddp.parameters()], once, 0)

    run(body, 2)


def test_create_graph_warns_once():
    def body(rank, world):
        ddp = cdist.DistributedDataParallel(small())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                ddp.zero_grad()
                ddp(torch.ones(2, 6)).square().sum().backward(create_graph=True)
        return [
            str(w.message) for w in caught if "gradients of gradients are not synchronised" in str(w.message)
        ]

    assert [len(said) for said in run(body, 2)] == [1, 1]
