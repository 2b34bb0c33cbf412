"""DistributedDataParallel over torch modules, against torch's own (Gloo) and against one process with the
whole batch.
"""

import copy
import inspect
import os
import pickle
import tempfile
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch comes with EXTRAS in .ci/run")

import cdist  # noqa: E402
from cdist.parallel import torch_buffers  # noqa: E402
from cdist.testing import run  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

WORLDS = [1, 2, 3, 4]
torch.set_num_threads(1)
# The first optimizer imports much: once here rather than in every forked rank.
torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1).zero_grad()


class Net(nn.Module):
    """Linear layers, a convolution in channels-last, batch normalisation, a tied weight and a frozen bias."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.one = nn.Linear(8 * 16, 16)
        self.two = nn.Linear(16, 16)
        self.three = nn.Linear(16, 16)
        self.three.weight = self.two.weight
        self.last = nn.Linear(16, 4)
        self.last.bias.requires_grad_(False)
        self.spare = nn.Linear(16, 4)
        self.conv.to(memory_format=torch.channels_last)

    def forward(self, x, spare=True):
        x = torch.relu(self.norm(self.conv(x))).flatten(1)
        x = torch.tanh(self.two(torch.tanh(self.one(x))))
        x = torch.tanh(self.three(x))
        return self.last(x) + (self.spare(x) if spare else 0)


def make(seed=0):
    torch.manual_seed(seed)
    return Net()


def small(seed=0, norm=False):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 16), *([nn.BatchNorm1d(16)] if norm else []), nn.Tanh(), nn.Linear(16, 3)
    )


def batches(steps, size, shape=(3, 4, 4), outputs=4, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, *shape, generator=generator), torch.randn(size, outputs, generator=generator))
        for _ in range(steps)
    ]


def vectors(steps, size, seed=3):
    return batches(steps, size, (6,), 3, seed)


def shard(batch, rank, world):
    return [t[rank * len(t) // world : (rank + 1) * len(t) // world] for t in batch]


def numbers(module):
    return [p.detach().numpy().copy() for p in module.state_dict().values()]


def elsewhere(function, *args):
    """Calls it in a forked process: torch builds with CUDA refuse a fork after this process has run a
    backward pass.
    """
    return run(lambda rank, world: function(*args), 1, init=None)[0]


def close(a, b, tolerance=1e-6):
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


def both(rank, world, build, train, ours=None, theirs=None, path=None):
    """Trains with torch's DDP and ours in the same process; returns (ours, theirs) as lists of arrays."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    results = []
    for package, kwargs, wrap in (
        (cdist, ours, cdist.DistributedDataParallel),
        (dist, theirs, nn.parallel.DistributedDataParallel),
    ):
        ddp = wrap(build(), **(kwargs or {}))
        results.append(train(ddp, rank, world, package) or numbers(ddp))
    # torch's group is left to the process's end: its destructor can wait for a thread that waits for the GIL.
    return results


def compare(world, build, train, ours=None, theirs=None, tolerance=1e-6):
    folder = tempfile.mkdtemp()
    try:
        outcomes = run(
            both, world, build, train, ours, ours if theirs is None else theirs, os.path.join(folder, "store")
        )
    finally:
        for name in os.listdir(folder):
            os.unlink(os.path.join(folder, name))
        os.rmdir(folder)
    for mine, reference in outcomes:
        close(mine, reference, tolerance)
    return outcomes


def fit(ddp, rank, world, package, steps=5, **kwargs):
    optimizer = torch.optim.SGD([p for p in ddp.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    for batch in batches(steps, 12):
        x, y = shard(batch, rank, world)
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(x, **kwargs), y).backward()
        optimizer.step()


def descend(ddp, rank, world, package):
    """Four steps of plain descent; the inputs want gradients, as reentrant checkpoints need it."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for batch in vectors(4, 12):
        x, y = shard(batch, rank, world)
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(x.requires_grad_()), y).backward()
        optimizer.step()


MODES = {
    "plain": {},
    "small buckets": {"bucket_cap_mb": 0.001},
    "views": {"gradient_as_bucket_view": True},
    "small views": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "no buffers": {"broadcast_buffers": False},
}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("mode", MODES)
def test_equals_torch(mode, world):
    outcomes = compare(world, make, fit, MODES[mode])
    if mode != "no buffers":
        for mine, _ in outcomes:
            names = [name for name in make().state_dict() if "running" not in name]
            same = zip(make().state_dict(), mine, outcomes[0][0], strict=True)
            assert all((a == b).all() for name, a, b in same if name in names)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_bitwise_equal_where_divisions_are_exact(world):
    """Two and four ranks divide by powers of two, and two ranks have one order of summing."""

    outcomes = compare(world, small, descend)
    if world <= 2:
        for mine, reference in outcomes:
            assert all((a == b).all() for a, b in zip(mine, reference, strict=True))


def test_equals_one_process_with_the_whole_batch():
    data = vectors(5, 12)

    def train(module, part):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for batch in data:
            x, y = part(batch)
            optimizer.zero_grad()
            nn.functional.mse_loss(module(x), y).backward()
            optimizer.step()
        return numbers(module)

    alone = elsewhere(lambda: train(small().double(), lambda batch: [t.double() for t in batch]))

    def body(rank, world):
        ddp = cdist.DistributedDataParallel(small(rank).double())
        return train(ddp, lambda batch: [t.double() for t in shard(batch, rank, world)])

    for world in WORLDS:
        for outcome in run(body, world):
            close(outcome, alone, 1e-12)


def test_no_sync_and_accumulation():
    def accumulate(ddp, rank, world, package):
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        for number, batch in enumerate(vectors(9, 8)):
            x, y = shard(batch, rank, world)
            if number % 3 == 2:
                nn.functional.mse_loss(ddp(x), y).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=number == 2)
            else:
                with ddp.no_sync():
                    nn.functional.mse_loss(ddp(x), y).backward()

    for views in (False, True):
        outcomes = compare(2, lambda: small(norm=True), accumulate, {"gradient_as_bucket_view": views})

        def helper(rank, world, views=views):
            ddp = cdist.DistributedDataParallel(small(norm=True), gradient_as_bucket_view=views)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
            for batch, last in ddp.accumulate(3, vectors(9, 8)):
                x, y = shard(batch, rank, world)
                nn.functional.mse_loss(ddp(x), y).backward()
                if last:
                    optimizer.step()
                    optimizer.zero_grad()
            assert ddp._sync.reducer.launched[0] == 3
            return numbers(ddp)

        close(run(helper, 2)[0], outcomes[0][0])


def test_unused_parameters():
    """K139: with find_unused_parameters a parameter that one rank did not use gets the mean with zeros."""

    def train(ddp, rank, world, package):
        optimizer = torch.optim.SGD([p for p in ddp.parameters() if p.requires_grad], lr=0.05)
        gone = []
        for number, batch in enumerate(batches(6, 8)):
            x, y = shard(batch, rank, world)
            optimizer.zero_grad()
            spare = number % 3 != 0 and (number % 2 == 0 or rank == 0)
            nn.functional.mse_loss(ddp(x, spare=spare), y).backward()
            gone.append(ddp.module.spare.weight.grad is None)
            optimizer.step()
        return [*numbers(ddp), np.array(gone)]

    for views in (False, True):
        kwargs = {"find_unused_parameters": True, "gradient_as_bucket_view": views}
        for mine, _ in compare(2, make, train, kwargs):
            assert mine[-1].tolist() == [True, False, False, True, False, False]


class Heads(nn.Module):
    """Several outputs, of which a loss may take some."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.heads = nn.Linear(6, 5), nn.ModuleList(nn.Linear(5, 3) for _ in range(3))

    def forward(self, x):
        return [head(torch.tanh(self.body(x))) for head in self.heads]


@pytest.mark.parametrize("views", [False, True])
def test_outputs_that_have_no_part_in_the_loss_equal_torch(views):
    """With find_unused_parameters; also where each rank takes another output, and where no rank takes one."""

    def train(ddp, rank, world, package):
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        gone = []
        for number, batch in enumerate(vectors(5, 8)):
            x, y = shard(batch, rank, world)
            optimizer.zero_grad(set_to_none=number % 2 == 0)
            nn.functional.mse_loss(ddp(x)[0 if number > 2 else (number + rank) % 3], y).backward()
            gone.append([head.weight.grad is None for head in ddp.module.heads])
            optimizer.step()
        return [*numbers(ddp), np.array(gone)]

    compare(2, Heads, train, {"find_unused_parameters": True, "gradient_as_bucket_view": views})


def test_a_search_for_unused_parameters_under_a_static_graph_is_told():
    def body(rank, world):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            cdist.DistributedDataParallel(small(), static_graph=True)
            ddp = cdist.DistributedDataParallel(small(), find_unused_parameters=True)
        for make in (
            lambda: cdist.DistributedDataParallel(small(), static_graph=True, find_unused_parameters=True),
            lambda: ddp._set_static_graph(),
        ):
            with pytest.warns(UserWarning, match="You passed find_unused_parameters") as caught:
                make()
            assert [warning.filename for warning in caught] == [__file__]

    run(body, 1)


def test_a_graph_that_is_not_static_is_told():
    def body(rank, world, first):
        class Changing(Heads):
            def forward(self, x, count):
                return sum(super().forward(x)[:count])

        ddp = cdist.DistributedDataParallel(Changing(), static_graph=True)
        for _ in range(2):
            ddp(torch.ones(2, 6), first).sum().backward()

        def train():
            for _ in range(2):
                ddp(torch.ones(2, 6), 5 - first).sum().backward()

        with pytest.raises(RuntimeError, match="training graph has changed.*find_unused_parameters=True"):
            train()

    for first in (2, 3):
        run(body, 1, first)


def test_optimizers_of_the_backward_pass_step_on_reduced_gradients():
    """Torch's own _apply_optimizer_in_backward would step on those of this rank, before they are reduced."""

    def body(rank, world, views):
        from torch.distributed.optim import _apply_optimizer_in_backward

        def wrap(in_backward):
            module = small()
            if in_backward:
                _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
            return cdist.DistributedDataParallel(module, gradient_as_bucket_view=views)

        ddp, reference = wrap(True), wrap(False)
        optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
        for batch in vectors(3, 8):
            x, y = shard(batch, rank, world)
            for model in (ddp, reference):
                with model.no_sync():
                    nn.functional.mse_loss(model(-x), y).backward()
                nn.functional.mse_loss(model(x), y).backward()
            assert all(p.grad is None for p in ddp.parameters())
            optimizer.step()
            optimizer.zero_grad()
            assert all(map(torch.equal, ddp.parameters(), reference.parameters()))

    pytest.importorskip("torch.distributed.optim")
    for views in (False, True):
        run(body, 2, views)


def test_static_graph_with_unused_and_checkpointed_layers():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.one, self.two, self.spare = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x):
            x = checkpoint(self.one, x, use_reentrant=True)
            x = checkpoint(self.one, x, use_reentrant=True)
            return self.two(x)

    compare(2, Twice, descend, {"static_graph": True})

    def body(rank, world):
        ddp = cdist.DistributedDataParallel(Twice(), find_unused_parameters=True)
        x, y = shard(vectors(1, 8)[0], rank, world)
        with pytest.raises(
            RuntimeError, match="mark a variable ready only once.*one.* has been marked as ready twice"
        ):
            nn.functional.mse_loss(ddp(x.requires_grad_()), y).backward()
        return True

    run(body, 1)


def test_missing_gradient_is_named_on_every_rank():
    """K139: a parameter that is not used on one rank is named on every rank, in the step or in the next
    forward.
    """

    def body(rank, world, how):
        ddp = cdist.DistributedDataParallel(make())
        x, y = shard(batches(1, 8)[0], rank, world)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)

        def train():
            nn.functional.mse_loss(ddp(x, spare=rank == 0), y).backward()
            if how == "step":
                optimizer.step()
            else:
                ddp(x)

        expected = "Expected to have finished reduction in the prior iteration"
        with pytest.raises(RuntimeError, match=expected) as caught:
            train()
        ddp.zero_grad()
        nn.functional.mse_loss(ddp(x), y).backward()
        optimizer.step()
        return str(caught.value)

    for how in ("step", "forward"):
        texts = run(body, 2, how)
        assert texts[0] == texts[1]
        assert "for rank 1" in texts[0]
        assert "'spare.weight', 'spare.bias'" in texts[0]
        assert "find_unused_parameters=True" in texts[0]


class Failing(torch.autograd.Function):
    """Raises in backward when `fails`."""

    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.fails:
            raise ArithmeticError("in backward")
        return grad, None


class Chain(nn.Module):
    """Two layers of one bucket each, and failures below the first, between them or above both."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x, fails=None):
        x = Failing.apply(x, fails == "below")
        x = Failing.apply(self.one(x), fails == "between")
        return Failing.apply(self.two(x), fails == "above")


def fail_in_backward(ddp, optimizer, batch, where):
    x, y = batch
    with pytest.raises(ArithmeticError, match="in backward"):
        nn.functional.mse_loss(ddp(x.clone().requires_grad_(), where), y).backward()
    optimizer.zero_grad()


@pytest.mark.parametrize("kwargs", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}], ids=str)
def test_step_after_an_exception_in_backward(kwargs):
    """Where no reduction began the next step is like any: on all ranks, or on one that skips a batch."""

    def body(rank, world, alone):
        ddp = cdist.DistributedDataParallel(Chain(), **kwargs)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for number, batch in enumerate(vectors(4, 8)):
            x, y = shard(batch, rank, world)
            if number > 1 and (rank == 0 or not alone):
                fail_in_backward(ddp, optimizer, (x, y), "between")
            optimizer.zero_grad()
            nn.functional.mse_loss(ddp(x), y).backward()
            optimizer.step()
        return numbers(ddp)

    for alone in (False, True):
        mine = run(body, 2, alone)
        for ours, theirs in zip(*mine, strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("hooked", [False, True])
def test_exception_in_backward_after_reductions_began(hooked):
    def body(rank, world, where):
        # A bucket for each layer: that of the second goes before the first layer's gradients are there.
        ddp = cdist.DistributedDataParallel(Chain(), bucket_cap_mb=1e-5)
        if hooked:
            from cdist.parallel.hooks import allreduce_hook

            ddp.register_comm_hook(None, allreduce_hook)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        said = []
        for number, batch in enumerate(vectors(6, 8)):
            x, y = shard(batch, rank, world)
            optimizer.zero_grad()
            if number in (2, 4):
                fail_in_backward(ddp, optimizer, (x, y), where)
                with pytest.raises(
                    RuntimeError, match="exception left an earlier backward pass in the middle"
                ) as caught:
                    ddp(x)
                said.append(str(caught.value))
                optimizer.zero_grad()
            nn.functional.mse_loss(ddp(x), y).backward()
            optimizer.step()
        return numbers(ddp), said

    for where, remedy in (("between", "go on with the next step"), ("below", "load a checkpoint")):
        (mine, said), (theirs, too) = run(body, 2, where)
        assert all(remedy in text for text in said + too)
        for ours, other in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(ours, other)


def test_negative_views_as_gradients():
    """torch may leave a gradient as a lazy negation of what lies in memory: a conjugate's imaginary part."""

    class Imaginary(nn.Module):
        def __init__(self):
            super().__init__()
            self.p = nn.Parameter(torch.tensor([2.0]))

        def forward(self, x):
            return (torch.complex(x, self.p).conj() * torch.tensor([1 + 2j])).real.sum()

    def body(rank, world):
        plain = Imaginary()
        plain(torch.ones(1)).backward()
        ddp = cdist.DistributedDataParallel(Imaginary())
        for _ in range(3):
            ddp.zero_grad()
            ddp(torch.ones(1)).backward()
            assert ddp.module.p.grad.tolist() == plain.p.grad.tolist()
        return plain.p.grad.is_neg()

    assert all(run(body, 2))


def test_an_evaluation_broadcasts_buffers_once():
    """As torch's: so ranks may evaluate different numbers of batches."""

    def body(rank, world):
        ddp = cdist.DistributedDataParallel(small(norm=True))
        for x, y in vectors(2, 8):
            ddp.train()
            nn.functional.mse_loss(ddp(x), y).backward()
            ddp.eval()
            with torch.no_grad():
                for _ in range(1 + 3 * rank):
                    ddp(x)
        return numbers(ddp)

    for ours, theirs in zip(*run(body, 2), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_evaluation_on_one_rank_says_what_to_do():
    def body(rank, world):
        ddp = cdist.DistributedDataParallel(small(norm=True))
        x, y = vectors(1, 8)[0]

        def train():
            nn.functional.mse_loss(ddp(x), y).backward()
            if rank == 0:
                with torch.no_grad():
                    ddp.eval()(x)
            for _ in range(2):
                nn.functional.mse_loss(ddp.train()(x), y).backward()

        with pytest.raises(cdist.DistError) as caught:
            train()
        return "".join(getattr(caught.value, "__notes__", []))

    assert any("use ddp.module for an evaluation on one rank" in note for note in run(body, 2))


def test_backward_in_two_parts():
    def body(rank, world):
        torch.manual_seed(0)
        module = nn.ModuleDict({"a": nn.Linear(3, 1), "b": nn.Linear(3, 1)})
        module.forward = lambda x: (module["a"](x).sum(), module["b"](x).sum())
        ddp = cdist.DistributedDataParallel(module)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            a, b = ddp(torch.full((2, 3), float(rank)))
            a.backward()
            b.backward()
            optimizer.step()
            assert (module["a"].weight.grad == 1).all()
            assert (module["b"].weight.grad == 1).all()

    run(body, 2)


def test_unsynced_step_raises_when_debugging():
    """K142: in debug mode an optimizer that steps on gradients that were not synchronised raises."""

    def body(rank, world):
        ddp = cdist.DistributedDataParallel(small())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        x, y = vectors(1, 4)[0]
        with ddp.no_sync():
            ddp(x).sum().backward()
        with pytest.raises(RuntimeError, match="not synchronised"):
            optimizer.step()
        ddp(x).sum().backward()
        optimizer.step()

    run(body, 2, environ={"CDIST_DEBUG": "DETAIL"})


def test_mixed_precision_as_in_the_tutorials():
    def train(ddp, rank, world, package):
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for batch in vectors(4, 8):
            x, y = shard(batch, rank, world)
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.mse_loss(ddp(x).float(), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()

    compare(2, small, train)


class Total(nn.Sequential):
    """Gives the sum of all parameters."""

    def forward(self, factor):
        return sum((p * factor).float().sum() for p in self.parameters())


def test_parameters_of_several_dtypes():
    def build():
        module = Total(*small())
        module[0].double()
        module[2].bfloat16()
        return module

    def body(rank, world):
        ddp = cdist.DistributedDataParallel(build())
        assert ddp._sync.reducer.buckets == 2
        for _ in range(3):
            ddp.zero_grad()
            ddp(rank + 1).backward()
            for p in ddp.parameters():
                assert p.grad.dtype == p.dtype
                assert (p.grad == 1.5).all()

    run(body, 2)


# ---- hooks


def hooks_of(package):
    import importlib

    base = "cdist" if package is cdist else "torch.distributed"
    load = lambda name: importlib.import_module(f"{base}.algorithms.ddp_comm_hooks.{name}")  # noqa: E731
    return load("default_hooks"), load("powerSGD_hook"), load("post_localSGD_hook")


def one_matrix():
    torch.manual_seed(0)
    return nn.Linear(24, 32, bias=False)


def fit_matrix(ddp, rank, world, steps=6):
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    for batch in batches(steps, 8, (24,), 32):
        x, y = shard(batch, rank, world)
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("hook", ["allreduce", "fp16", "fp16 wrapped", "power", "power plain", "builtin"])
def test_hooks_equal_torchs(hook):
    def train(ddp, rank, world, package):
        default, power, _ = hooks_of(package)
        if hook == "builtin":
            ddp._register_builtin_comm_hook(torch.distributed.BuiltinCommHookType.FP16_COMPRESS)
        elif hook == "allreduce":
            ddp.register_comm_hook(None, default.allreduce_hook)
        elif hook == "fp16":
            ddp.register_comm_hook(None, default.fp16_compress_hook)
        elif hook == "fp16 wrapped":
            ddp.register_comm_hook(None, default.fp16_compress_wrapper(default.allreduce_hook))
        else:
            # Where there are GPUs, torch's hook synchronises the bucket's device, also a CPU, and fails.
            torch.cuda.is_available = lambda: False
            kwargs = {"use_error_feedback": False, "warm_start": False} if hook == "power plain" else {}
            state = power.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2, **kwargs)
            ddp.register_comm_hook(state, power.powerSGD_hook)
        fit_matrix(ddp, rank, world)

    compare(2, one_matrix, train, tolerance=1e-3 if "fp16" in hook or hook == "builtin" else 1e-5)


def test_hooks_on_a_whole_model():
    def body(rank, world, kind):
        from cdist.algorithms.ddp_comm_hooks import DDPCommHookType, register_ddp_comm_hook
        from cdist.parallel.hooks import PostLocalSGDState
        from cdist.parallel.powersgd import PowerSGDState

        ddp = cdist.DistributedDataParallel(make(rank), bucket_cap_mb=0.001)
        state = None
        if "POWER" in kind:
            state = PowerSGDState(None, start_powerSGD_iter=2)
        elif kind == "POST_LOCAL_SGD":
            state = PostLocalSGDState(None, cdist.new_group([0, 1]), 100)
        register_ddp_comm_hook(DDPCommHookType[kind], ddp, state)
        fit(ddp, rank, world, cdist)
        return [p.detach().numpy() for p in ddp.parameters()]

    reference = run(lambda rank, world: numbers_of_fit(rank, world), 2)[0]
    for kind in (
        "ALLREDUCE",
        "FP16_COMPRESS",
        "BF16_COMPRESS",
        "POWER_SGD",
        "BATCHED_POWER_SGD",
        "POST_LOCAL_SGD",
    ):
        first, second = run(body, 2, kind)
        close(first, second, 0)
        if "POWER" not in kind:
            close(first, reference, 2e-2 if "COMPRESS" in kind else 1e-6)


def numbers_of_fit(rank, world, **kwargs):
    ddp = cdist.DistributedDataParallel(make(rank), **kwargs)
    fit(ddp, rank, world, cdist)
    return [p.detach().numpy() for p in ddp.parameters()]


class Many(nn.Module):
    """Parameters of many sizes, dtypes and layouts, more than one message's worth."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        made = [torch.randn(3 + i % 5, 7) for i in range(300)]
        made += [torch.randn(50, 1300) for _ in range(70)]  # 254 KiB: 64 fill a message
        made += [torch.randn(300, 300), torch.randn(9, 4).t(), torch.randn(0), torch.randn(())]
        made += [torch.randn(5).double(), torch.randn(7).bfloat16(), torch.randn(2, dtype=torch.complex64)]
        self.all = nn.ParameterList([nn.Parameter(p, i % 2 == 0) for i, p in enumerate(made)])


def test_all_parameters_come_from_rank_0():
    def body(rank, world):
        ddp = cdist.DistributedDataParallel(Many(rank))
        expected = Many(0)
        for p, q in zip(ddp.parameters(), expected.parameters(), strict=True):
            assert torch.equal(p, q)
            assert p.stride() == q.stride()
            assert p.is_leaf
        with torch.no_grad():
            for p in ddp.parameters():
                p.fill_(rank)
        ddp.broadcast_parameters(1)
        assert all((p == 1).all() for p in ddp.parameters())

    run(body, 2)


def test_own_hooks():
    def body(rank, world):
        seen = []

        def hook(state, bucket: cdist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            seen.append((bucket.index(), bucket.is_last(), len(bucket.gradients()), len(bucket.parameters())))
            assert sum(g.numel() for g in bucket.gradients()) == bucket.buffer().numel()
            work = cdist.all_reduce(bucket.buffer(), async_op=True)
            return work.get_future().then(lambda future: future.value()[0] / cdist.get_world_size())

        ddp = cdist.DistributedDataParallel(small(rank), bucket_cap_mb_list=[1e-4, 1.0])
        ddp.register_comm_hook(None, hook)
        ddp(torch.full((2, 6), float(rank))).sum().backward()
        mine = [p.grad.clone() for p in ddp.parameters()]
        plain = cdist.DistributedDataParallel(small(rank))
        plain(torch.full((2, 6), float(rank))).sum().backward()
        close(mine, [p.grad for p in plain.parameters()])
        assert [s[0] for s in seen] == list(range(len(seen)))
        assert [s[1] for s in seen][-1]

        with pytest.raises(TypeError, match="must be callable"):
            plain.register_comm_hook(None, 1)
        with pytest.raises(TypeError, match=r"called as hook\(state, bucket\)"):
            plain.register_comm_hook(None, lambda bucket: None)
        with pytest.raises(RuntimeError, match="can only be called once"):
            ddp.register_comm_hook(None, hook)
        plain.register_comm_hook(None, lambda state, bucket: 1)
        with pytest.raises(
            RuntimeError, match="must return a torch.futures.Future object, but got builtins.int"
        ):
            plain(torch.ones(2, 6)).sum().backward()

    run(body, 2)


# ---- buffers, batch normalisation


def test_kept_buffers_follow_the_module():
    """What GPUs keep between steps, over tensors of the CPU: new buffers and modules are found."""
    from cdist.parallel.torch_buffers import KeptBuffers

    def body(rank, world):
        module = nn.Sequential(nn.BatchNorm1d(3), nn.Sequential(nn.Linear(2, 2)))
        module.register_buffer("none", None)
        module.register_buffer("turned", torch.full((2, 3), float(rank)).t())
        module.register_buffer("flags", torch.tensor([rank == 0, True]))
        module[0].register_buffer("same", module.turned)
        kept = KeptBuffers(module, "cpu")

        def check(source):
            for buffer in module.buffers():
                buffer.add_(rank) if buffer.dtype != torch.bool else buffer.logical_and_(
                    torch.tensor(rank == 1)
                )
            sent = [buffer.clone() for buffer in module.buffers()]
            kept.broadcast(None, source)
            for buffer, mine in zip(module.buffers(), sent, strict=True):
                wanted = [None] * world
                cdist.all_gather_object(wanted, mine)
                assert torch.equal(buffer, wanted[source])

        check(0)
        check(1)
        message = kept._messages[0]
        module[1][0].register_buffer("late", torch.tensor([rank + 5.0]))
        check(0)
        assert kept._messages[0] is not message
        module[1] = nn.BatchNorm1d(4)
        module.turned = torch.full((5,), float(rank))
        check(1)
        module.double()
        check(0)
        message = kept._messages[0]
        check(1)
        assert kept._messages[0] is message

    run(body, 2)


def test_gradients_are_copied_together_before_their_bucket_goes():
    """The hooks of parameters on GPUs, over tensors of the CPU."""

    def body(rank, world):
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
        ddp = cdist.DistributedDataParallel(module, bucket_cap_mb_list=[1e-5, 4e-5, 1])
        sync = ddp._sync
        sync.reducer.begin(1)
        sync.reducer.backward = True
        views, params = ddp._views, ddp._params
        hooks = [sync.reducer.hook(i, view, i % 2 == 0, False) for i, view in enumerate(views)]
        for i, p in enumerate(params):
            p.grad = torch.full_like(p, float(rank + i), requires_grad=i == 1)
            views[i].fill_(-1)
        for i in sync.order[:-1]:
            hooks[i](params[i])
        last, before = sync.order[-1], sync.order[-2]
        assert sync.bucket_of[last] == sync.bucket_of[before]
        assert views[before].eq(-1).all()
        assert params[before].grad is not views[before]
        hooks[last](params[last])
        sync.finish()
        for i, p in enumerate(params):
            assert views[i].eq(0.5 + i).all()
            assert (p.grad is views[i]) is (i % 2 == 0)
        assert sync.reducer.linked == 3
        sync.reducer.begin(1)
        hooks[last](params[last])
        sync.reducer.flush()
        assert torch.equal(views[last], params[last].grad)
        sync.finish(expected=True)

    run(body, 2)


def test_buffers_are_those_of_rank_0():
    """K148, K149: also one that was assigned anew; buffers that are equal are not written."""

    def body(rank, world):
        module = nn.Module()
        module.register_buffer("count", torch.tensor([float(rank)]))
        module.weight = nn.Parameter(torch.ones(2))
        module.forward = lambda x: (module.weight * x).sum() + module.count.sum()
        ddp = cdist.DistributedDataParallel(module)
        assert module.count.item() == 0
        module.count = module.count + rank + 1
        assert ddp.will_sync_module_buffers()
        ddp(torch.ones(2)).backward()
        assert module.count.item() == 1
        with ddp.no_sync():
            ddp(torch.ones(2)).backward()
        module.count += rank
        ddp(torch.ones(2)).backward()
        assert module.count.item() == 1 + rank  # not after a pass without synchronisation
        written, overwrite = [], torch_buffers._overwrite

        def watched(buffers, values):
            written.append(len(buffers))
            overwrite(buffers, values)

        torch_buffers._overwrite = watched
        for _ in range(3):
            ddp.broadcast_buffers_now()
        assert written == [1] * rank

    run(body, 2)


def test_two_forward_passes_with_batch_norm_before_backward():
    """K148: two forward passes before one backward pass."""

    def body(rank, world):
        torch.manual_seed(rank)
        ddp = cdist.DistributedDataParallel(small(norm=True))
        ddp.module[1].eval()
        (ddp(torch.randn(4, 6)).sum() + ddp(torch.randn(4, 6)).sum()).backward()

    run(body, 2)


def test_two_forward_passes_in_training_with_batch_norm_equal_torch():
    """K148: the second forward's broadcast writes buffers that the first one's graph has saved."""

    def train(ddp, rank, world, package):
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for batch in vectors(3, 8):
            x, y = shard(batch, rank, world)
            optimizer.zero_grad()
            (nn.functional.mse_loss(ddp(x), y) + nn.functional.mse_loss(ddp(-x), y)).backward()
            optimizer.step()

    compare(2, lambda: small(norm=True), train)


@pytest.mark.parametrize("sizes", [(4, 4), (3, 7)])
def test_sync_batch_norm_equals_the_whole_batch(sizes):
    x = torch.randn(sum(sizes), 5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weights = torch.randn_like(x)

    def build():
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(5).double()
        nn.init.normal_(norm.weight)
        return nn.Sequential(nn.Identity(), norm)

    def alone():
        norm = build()
        inputs = x.clone().requires_grad_()
        out = norm(inputs)
        (out * weights).sum().backward()
        found = (
            out.detach(),
            inputs.grad,
            norm[1].weight.grad,
            norm[1].bias.grad,
            *norm[1].state_dict().values(),
        )
        return [value.numpy() for value in found]

    expected = elsewhere(alone)

    def body(rank, world):
        module = cdist.nn.SyncBatchNorm.convert_sync_batchnorm(build())
        assert isinstance(module[1], cdist.nn.SyncBatchNorm)
        ddp = cdist.DistributedDataParallel(module, reduce="sum")
        part = slice(0, sizes[0]) if rank == 0 else slice(sizes[0], None)
        mine = x[part].clone().requires_grad_()
        result = ddp(mine)
        (result * weights[part]).sum().backward()
        module.eval()
        module(mine)
        return (
            result.detach().numpy(),
            mine.grad.numpy(),
            module[1].weight.grad.numpy(),
            module[1].bias.grad.numpy(),
            module[1].running_mean.numpy(),
            module[1].running_var.numpy(),
        )

    import cdist.nn

    outcomes = run(body, 2)
    close([np.concatenate([o[0] for o in outcomes])], expected[:1], 1e-10)
    close([np.concatenate([o[1] for o in outcomes])], expected[1:2], 1e-10)
    for outcome in outcomes:
        close(outcome[2:], [*expected[2:4], *expected[6:8]], 1e-10)


def test_sync_batch_norm_converts_shared_modules_once_and_has_no_second_derivative():
    def body(rank, world):
        import cdist.nn

        norm = nn.BatchNorm1d(3)
        made = cdist.nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(norm, nn.Sequential(norm)))
        assert isinstance(made[0], cdist.nn.SyncBatchNorm)
        assert made[1][0] is made[0]
        x = torch.randn(4, 3).requires_grad_()
        (gradient,) = torch.autograd.grad(made(x).pow(3).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()
        with pytest.raises(ValueError, match="of 3 channels got an input of 5"):
            made(torch.zeros(2, 5))

    run(body, 1)


# ---- uneven inputs


@pytest.mark.parametrize("by_all", [True, False])
@pytest.mark.parametrize(
    "kwargs", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"hook": True}]
)
def test_join_equals_torchs(by_all, kwargs):
    hook = kwargs.get("hook")
    kwargs = {k: v for k, v in kwargs.items() if k != "hook"}

    def train(ddp, rank, world, package):
        if hook:
            ddp.register_comm_hook(None, hooks_of(package)[0].allreduce_hook)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        with ddp.join(divide_by_initial_world_size=by_all):
            for batch in vectors(3 + 2 * rank, 6, seed=rank):
                optimizer.zero_grad()
                nn.functional.mse_loss(ddp(batch[0]), batch[1]).backward()
                optimizer.step()

    outcomes = compare(2, lambda: small(norm=True), train, kwargs)
    close(outcomes[0][0], outcomes[1][0], 0)


class Branch(nn.Module):
    """A layer of which a forward pass may make use, and one that none does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.branch, self.never = nn.Linear(6, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x, branch=False):
        x = self.first(x)
        return self.branch(x) if branch else x


def gradients_of(module):
    """All gradients as arrays; a missing one is an array that no gradient is."""
    return [np.full(1, np.inf) if p.grad is None else p.grad.numpy().copy() for p in module.parameters()]


@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("branch_at", [1, 3])
def test_join_gives_unused_parameters_what_torch_gives(zero, branch_at):
    """Rank 1 has twice the steps of rank 0; in one of them both, or it alone, use the branch."""

    def train(ddp, rank, world, package):
        seen = []
        with ddp.join():
            for number, (x, y) in enumerate(vectors(3 + 3 * rank, 4, seed=rank)):
                if zero:
                    ddp.zero_grad()
                nn.functional.mse_loss(ddp(x, branch=number == branch_at), y).backward()
                seen += gradients_of(ddp)
        return seen

    one, two = compare(2, Branch, train, {"find_unused_parameters": True})
    assert np.inf in one[0][-1]
    assert np.inf in two[0][-1]


@pytest.mark.parametrize("views", [False, True])
def test_gradients_of_parameters_that_nobody_used_stay_as_in_torch(views):
    """Those of no_sync passes are reduced; one that was given by hand is none of the reducer's."""

    def train(ddp, rank, world, package):
        ddp.module.never.weight.grad = torch.full((3, 3), 1.0 + rank)
        seen = []
        for number, (x, y) in enumerate(vectors(6, 4, seed=rank)):
            ddp.require_backward_grad_sync = number % 3 == 2
            nn.functional.mse_loss(ddp(x, branch=number == rank), y).backward()
            seen += gradients_of(ddp)
        return seen

    compare(2, Branch, train, {"find_unused_parameters": True, "gradient_as_bucket_view": views})


def test_join_can_throw_and_be_disabled():
    def body(rank, world):
        ddp = cdist.DistributedDataParallel(small())

        def train():
            with ddp.join(throw_on_early_termination=True):
                for batch in vectors(2 + rank, 4):
                    ddp(batch[0]).sum().backward()

        with pytest.raises(RuntimeError) as caught:
            train()
        with ddp.join(enable=False):
            ddp(vectors(1, 4)[0][0]).sum().backward()
        return str(caught.value)

    texts = run(body, 2)
    assert texts[0] == "Rank 0 exhausted all inputs."
    assert "at least one rank that exhausted inputs" in texts[1]


def test_join_leaves_buffers_that_are_not_synchronised():
    def train(ddp, rank, world, package):
        with ddp.join():
            for x, y in vectors(2 + rank, 4, seed=rank):
                ddp.zero_grad()
                nn.functional.mse_loss(ddp(x), y).backward()
        return numbers(ddp)

    one, two = compare(2, lambda: small(norm=True), train, {"broadcast_buffers": False})
    assert any((a != b).any() for a, b in zip(one[0], two[0], strict=True))


# ---- modes of reduction, plans


def test_modes():
    """K151: sums, means over ranks, and means over all samples of uneven batches, to 1e-12."""
    shards = [slice(0, 3), slice(3, 8)]
    x, y = (t.double() for t in vectors(1, 8)[0])

    def alone(part):
        module = small().double()
        nn.functional.mse_loss(module(x[part]), y[part]).backward()
        return [p.grad.numpy() for p in module.parameters()]

    def body(rank, world, mode):
        ddp = cdist.DistributedDataParallel(small().double(), reduce=mode)
        if mode == "weights":
            ddp.set_weight(len(x[shards[rank]]))
        else:
            with pytest.raises(ValueError, match="weights"):
                ddp.set_weight(1)
        nn.functional.mse_loss(ddp(x[shards[rank]]), y[shards[rank]]).backward()
        return [p.grad.numpy() for p in ddp.parameters()]

    one, two, whole = (elsewhere(alone, part) for part in (*shards, slice(0, 8)))
    expected = {
        "weights": whole,
        "sum": [a + b for a, b in zip(one, two, strict=True)],
        "mean": [(a + b) / 2 for a, b in zip(one, two, strict=True)],
    }
    for mode, grads in expected.items():
        for outcome in run(body, 2, mode):
            close(outcome, grads, 1e-12)


def test_buckets_are_rebuilt_as_in_torch():
    def body(rank, world):
        torch.manual_seed(0)
        module = nn.Sequential(*[nn.Linear(1000, 1000) for _ in range(10)], nn.BatchNorm1d(1000))
        ddp = cdist.DistributedDataParallel(module)
        first = ddp._get_ddp_logging_data()
        for _ in range(2):
            ddp(torch.ones(2, 1000)).sum().backward()
        return first, ddp._get_ddp_logging_data()

    first, later = run(body, 2)[0]
    assert later["rebuilt_bucket_sizes"] == "4012000, 28028000, 8008000"
    order = later["prev_iteration_grad_ready_order_indices"].split(
        ", "
    )  # of the normalisation: 20, 21 or 21, 20
    assert sorted(order[:2]) == ["20", "21"]
    assert order[2:] == [str(index) for index in range(19, -1, -1)]
    groups = [" ".join(order[:4]), " ".join(order[4:18]), " ".join(order[18:])]
    assert later["rebuilt_per_bucket_param_indices"] == ", ".join(groups)
    assert first["world_size"] == 2
    assert first["module_name"] == "Sequential"
    assert first["num_parameter_tensors"] == 22
    assert first["total_parameter_size_bytes"] == 40048000
    assert first["bucket_cap_bytes"] == 26214400


def test_set_trainable():
    """K155: freezing between steps; ranks that freeze different parameters raise, naming them."""

    def body(rank, world):
        ddp = cdist.DistributedDataParallel(small(rank))
        names = [name for name, _ in ddp.module.named_parameters()]
        for chosen in (names, names[1:], names):
            ddp.set_trainable(chosen)
            ddp.zero_grad()
            ddp(torch.full((2, 6), float(rank))).sum().backward()
            assert (ddp.module[0].weight.grad is None) == (len(chosen) < len(names))
        before = [p.grad.clone() for p in ddp.parameters()]
        ddp.set_trainable(names[1:])
        assert ddp.module[0].weight.grad is None  # an optimizer with weight decay would step on it
        assert all(map(torch.equal, [p.grad for p in ddp.parameters()][1:], before[1:]))
        with pytest.raises(RuntimeError, match=names[0].replace(".", r"\.")):
            ddp.set_trainable(names[rank:])

    run(body, 2)


def test_gradients_as_views_are_linked_again():
    """K145: gradients are views of their buckets again after zero_grad, whichever way it sets them."""

    def body(rank, world):
        ddp = cdist.DistributedDataParallel(small(), gradient_as_bucket_view=True)
        x = torch.full((2, 6), float(rank))
        places = []
        for _ in range(4):
            ddp.zero_grad(set_to_none=True)
            ddp(x).sum().backward()
            places.append([p.grad.data_ptr() for p in ddp.parameters()])
            assert all(p.grad is view for p, view in zip(ddp._params, ddp._views, strict=True))
        assert places[-1] == places[-2]
        ddp.zero_grad(set_to_none=False)
        ddp(x).sum().backward()
        assert [p.grad.data_ptr() for p in ddp.parameters()] == places[-1]
        with pytest.raises(RuntimeError, match="Can't detach views in-place"):
            ddp.module[0].weight.grad.detach_()

    run(body, 2)


# ---- state


def test_state_dict_and_pickle():
    def body(rank, world):
        ddp = cdist.DistributedDataParallel(small(rank))
        assert list(ddp.state_dict()) == [
            "module.0.weight",
            "module.0.bias",
            "module.2.weight",
            "module.2.bias",
        ]
        again = pickle.loads(pickle.dumps(ddp))
        twin = copy.deepcopy(ddp)
        assert type(again) is type(ddp)
        for other in (again, twin):
            x = torch.full((2, 6), float(rank))
            ddp.zero_grad()
            ddp(x).sum().backward()
            other(x).sum().backward()
            close([p.grad for p in other.parameters()], [p.grad for p in ddp.parameters()], 0)
        grouped = cdist.DistributedDataParallel(small(rank), process_group=cdist.new_group([0, 1]))
        with pytest.raises(RuntimeError, match="DDP Pickling/Unpickling are only supported"):
            pickle.dumps(grouped)

    run(body, 2)


def test_subclass_and_subgroup():
    class Mine(cdist.DistributedDataParallel):
        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.module, name)

    def body(rank, world):
        group = cdist.new_group([1, 2])
        if rank == 0:
            return None
        module = small(rank)
        module.hello = "hello"
        ddp = Mine(module, process_group=group)
        assert isinstance(ddp, Mine)
        assert isinstance(ddp, nn.Module)
        assert ddp.hello == "hello"
        assert isinstance(ddp, cdist.DistributedDataParallel)
        ddp(torch.full((2, 6), float(rank))).sum().backward()
        return numbers(ddp) + [p.grad.numpy() for p in ddp.parameters()]

    _, one, two = run(body, 3)
    close(one, two, 0)
    close(one[:4], numbers(small(1)), 0)


# ---- wrong use


def with_buffer(count, dtype=None):
    module = nn.Linear(2, 3)
    module.register_buffer("mask", torch.zeros(count, dtype=dtype))
    return module


def test_models_that_differ_raise_everywhere():
    def body(rank, world):
        said = []
        builds = [
            lambda: nn.Linear(2, 3 + rank),
            lambda: nn.Linear(2, 3, bias=rank == 0),
            lambda: nn.Linear(2, 3).to(torch.float64 if rank else torch.float32),
            lambda: nn.ModuleDict({"a" if rank else "b": nn.Linear(1, 1)}),
            lambda: nn.Linear(2, 3).requires_grad_(rank == 0),
            lambda: with_buffer(4 + rank),
            lambda: with_buffer(4) if rank else nn.Linear(2, 3),
            lambda: with_buffer(4, torch.float64 if rank else torch.float32),
        ]
        for build in builds:
            with pytest.raises(RuntimeError, match="DDP expects same model across all ranks") as caught:
                cdist.DistributedDataParallel(build())
            said.append(str(caught.value))
        with pytest.raises(RuntimeError, match="is not needed when a module doesn't have any parameter"):
            cdist.DistributedDataParallel(nn.Linear(1, 1).requires_grad_(False))
        return said

    for rank, said in enumerate(run(body, 2)):
        assert "(3, 2)" in said[0]
        assert "(4, 2)" in said[0]
        assert f"Rank {rank} has {2 - rank} params" in said[1]
        assert "float64" in said[2]
        assert "'a.weight'" in said[3]
        assert "'b.weight'" in said[3]
        assert "frozen" in said[4]
        assert "only on rank 1: buffer 'mask': float32 (5,)" in said[5]
        assert "only on rank 1: buffer 'mask': float32 (4,)" in said[6]
        assert "parameters or buffers differ" in said[6]
        assert "buffer 'mask': float64" in said[7]


def test_buffers_that_are_not_broadcast_may_differ():
    def body(rank, world):
        ddp = cdist.DistributedDataParallel(with_buffer(4 + rank), broadcast_buffers=False)
        ignoring = with_buffer(4 + rank)
        ddp._set_params_and_buffers_to_ignore_for_model(ignoring, ["mask"])
        for wrapped in (ddp, cdist.DistributedDataParallel(ignoring)):
            wrapped(torch.ones(1, 2)).sum().backward()
            assert len(wrapped.module.mask) == 4 + rank

    run(body, 2)


def test_modules_without_values_are_told():
    def body(rank, world):
        for module in (nn.LazyLinear(3), nn.Sequential(nn.Linear(3, 3), nn.LazyBatchNorm1d(affine=False))):
            with pytest.raises(RuntimeError, match="Run a dummy forward pass"):
                cdist.DistributedDataParallel(module)
        with pytest.raises(RuntimeError, match=r"'weight' and 1 more.*to_empty\(device='cpu'\)"):
            cdist.DistributedDataParallel(nn.Linear(3, 3, device="meta"))
        module = nn.Linear(3, 3)
        module.register_buffer("shape", torch.zeros(3, device="meta"))
        module.register_buffer("count", torch.full((1,), float(rank)))
        cdist.DistributedDataParallel(module)(torch.ones(1, 3)).sum().backward()
        assert module.count.item() == 0

    run(body, 2)


def test_wrong_arguments():
    def body(rank, world):
        module = nn.Linear(1, 1)
        for kwargs, kind, text in (
            ({"device_ids": [0, 1]}, ValueError, "device_ids can only be None or contain a single element"),
            ({"device_ids": [0]}, ValueError, "only work with single-device/multiple-device GPU modules"),
            ({"output_device": 1}, ValueError, "only work with"),
            ({"delay_all_reduce_named_params": []}, ValueError, "set at the same time"),
            ({"reduce": "median"}, ValueError, "reduce must be"),
        ):
            with pytest.raises(kind, match=text):
                cdist.DistributedDataParallel(module, **kwargs)
        with pytest.raises(RuntimeError, match="uninitialized parameters"):
            cdist.DistributedDataParallel(nn.LazyLinear(1))
        with pytest.raises(ValueError, match="SyncBatchNorm layers only work with GPU modules"):
            cdist.DistributedDataParallel(nn.Sequential(nn.SyncBatchNorm(3)))

    run(body, 1)


def test_ignored_parameters():
    def body(rank, world):
        module = small(rank)
        wrap = cdist.DistributedDataParallel
        wrap._set_params_and_buffers_to_ignore_for_model(module, ["0.weight"])
        ddp = wrap(module)
        ddp(torch.full((2, 6), float(rank))).sum().backward()
        return numbers(ddp)[0], module[0].weight.grad.numpy(), module[2].weight.grad.numpy()

    one, two = run(body, 2)
    assert (one[0] != two[0]).any()
    assert (one[1] != two[1]).any()
    close([one[2]], [two[2]], 0)


def test_the_class_alone_shows_arguments_and_methods():
    theirs = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
    ours = inspect.signature(cdist.DistributedDataParallel.__init__).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    assert [ours[name].default for name in theirs] == [theirs[name].default for name in theirs]
    assert set(dir(cdist.DistributedDataParallel)) >= {"no_sync", "join", "register_comm_hook"}
    assert not hasattr(cdist.DistributedDataParallel, "nonsense")

    class Named(cdist.DistributedDataParallel):
        def __init__(self, module, name):
            cdist.DistributedDataParallel.__init__(self, module, bucket_cap_mb=3)
            self.name = name

    def body(rank, world):
        ddp = Named(small(norm=True), "mine")
        assert (ddp.name, ddp.bucket_bytes_cap, ddp.bucket_bytes_cap_default) == ("mine", 3 << 20, False)
        assert [tuple(b.shape) for b in ddp.modules_buffers] == [(16,), (16,), ()]
        ddp = cdist.DistributedDataParallel(small(), bucket_cap_mb_list=[2, 1])
        assert (ddp.bucket_bytes_cap, ddp.bucket_bytes_cap_list) == (2 << 20, [2 << 20, 1 << 20])

    run(body, 1)


def test_torch_is_not_imported_for_arrays():
    import subprocess
    import sys

    code = """
import sys, numpy, cdist
cdist.init_process_group(store=cdist.HashStore(), rank=0, world_size=1)
p = cdist.Parameter(numpy.zeros(2))
M = type("M", (), {"named_parameters": lambda self: [("p", p)]})
ddp = cdist.DistributedDataParallel(M())
p.accumulate_grad(numpy.ones(2)); p.grad
cdist.GradientReducer([numpy.zeros(2)]).reduce([numpy.zeros(2)])
assert "torch" not in sys.modules
cdist.destroy_process_group()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
