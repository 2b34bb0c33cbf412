"""Which backward passes DistributedDataParallel reduces, and what of them: against torch's own (Gloo)."""

import dataclasses
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch comes with EXTRAS in .ci/run")

import cdist  # noqa: E402
from cdist.testing import run  # noqa: E402
from test_ddp_torch import close, compare, shard, small, vectors  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

VIEWS = pytest.mark.parametrize("views", [False, True])


def loss_of(model, batch, rank, world):
    x, y = shard(batch, rank, world)
    return nn.functional.mse_loss(model(x), y)


def gradients_of(ddp):
    return [np.array(np.nan) if p.grad is None else p.grad.numpy().copy() for p in ddp.parameters()]


@VIEWS
def test_a_pass_of_the_bare_module_stays_with_its_rank(views):
    """Rank 0 alone looks at the gradient of an input, between the steps of all."""

    def train(ddp, rank, world, package):
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        seen = []
        for batch in vectors(4, 8):
            optimizer.zero_grad()
            loss_of(ddp, batch, rank, world).backward()
            optimizer.step()
            if rank == 0:
                ddp.zero_grad()
                x = batch[0].clone().requires_grad_()
                ddp.module(x).sum().backward()
                seen += [x.grad.numpy(), *gradients_of(ddp)]
        return seen + [p.detach().numpy() for p in ddp.parameters()]

    compare(2, small, train, {"gradient_as_bucket_view": views})


def test_under_no_sync_and_outside_of_it():
    """The mode of the forward counts; a pass through both kinds is reduced; a second pass is as the first."""

    def train(ddp, rank, world, package):
        def loss(number):
            return loss_of(ddp, batches[number], rank, world)

        batches, seen = vectors(4, 8), []
        kept = loss(0)
        with ddp.no_sync():
            local = loss(1)
        (kept + local).backward()
        seen += gradients_of(ddp)
        with ddp.no_sync():
            local = loss(2)
        local.backward()
        seen += gradients_of(ddp)
        loss(3).backward()
        return seen + gradients_of(ddp)

    compare(2, small, train)

    def body(rank, world):
        ddp = cdist.DistributedDataParallel(small())
        loss = loss_of(ddp, vectors(1, 8)[0], rank, world)
        loss.backward(retain_graph=True)
        first = gradients_of(ddp)
        with ddp.no_sync():
            loss_of(ddp, vectors(1, 8)[0], rank, world).backward()
        ddp.zero_grad()
        loss.backward()
        close(gradients_of(ddp), first)

    run(body, 2)


def test_stepping_on_gradients_of_the_bare_module_is_told():
    def body(rank, world, debug):
        module = small()
        ddp = cdist.DistributedDataParallel(module)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

        def step(model):
            model(torch.ones(2, 6)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        cdist.set_debug_level(cdist.DebugLevel.DETAIL if debug else cdist.DebugLevel.OFF)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            step(ddp)
            ddp.module(torch.ones(2, 6)).sum().backward()  # nobody steps on these
            ddp.zero_grad()
            step(ddp)
            assert not said
            if debug:
                with pytest.raises(RuntimeError, match="not come from a forward of DistributedDataParallel"):
                    step(module)
            else:
                step(module)
                step(module)
                assert [
                    str(w.message).startswith("DistributedDataParallel: the optimizer") for w in said
                ] == [True]

    for debug in (False, True):
        run(body, 2, debug)


def test_another_wrapper_of_the_module_is_left_alone():
    """Also one whose group is gone."""

    def body(rank, world):
        module = small()
        idle = cdist.DistributedDataParallel(module, process_group=cdist.new_group([0, 1]))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

        def step(ddp):
            optimizer.zero_grad()
            ddp(torch.ones(2, 6) * (rank + 1)).sum().backward()
            optimizer.step()
            return gradients_of(ddp)

        step(idle)
        launched = idle._sync.reducer.launched[0]
        ddp = cdist.DistributedDataParallel(module)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(ddp)
            assert idle._sync.reducer.launched[0] == launched
            cdist.destroy_process_group(idle.process_group)
            return step(ddp)

    one, other = run(body, 2)
    close(one, other)


@VIEWS
@pytest.mark.parametrize("wrapped", [False, True])
def test_what_hooks_of_others_make_of_a_gradient_is_reduced(views, wrapped):
    """Registered before the module was wrapped, or after its first step."""

    def double(p):
        p.grad.mul_(2)

    def build():
        module = small()
        if not wrapped:
            module.apply(hang)
        return module

    def hang(module):
        for p in module.parameters(recurse=False):
            p.register_post_accumulate_grad_hook(double)

    def train(ddp, rank, world, package):
        seen = []
        for number, batch in enumerate(vectors(3, 8)):
            if wrapped and number == 1:
                ddp.apply(hang)
            ddp.zero_grad()
            loss_of(ddp, batch, rank, world).backward()
            seen += gradients_of(ddp)
        return seen

    compare(2, build, train, {"gradient_as_bucket_view": views, "bucket_cap_mb": 0.0001})


class Scale(torch.autograd.Function):
    """Gives its factor a gradient, or none."""

    @staticmethod
    def forward(ctx, x, factor, gives):
        ctx.save_for_backward(x, factor)
        ctx.gives = gives
        return x * factor

    @staticmethod
    def backward(ctx, gradient):
        x, factor = ctx.saved_tensors
        return gradient * factor, (gradient * x).sum(0) if ctx.gives else None, None


class Scaled(nn.Module):
    """A layer, a factor whose gradient may be none, a layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.factor, self.two = nn.Linear(6, 5), nn.Parameter(torch.ones(5)), nn.Linear(5, 3)

    def forward(self, x, gives):
        return self.two(Scale.apply(self.one(x), self.factor, gives))


@pytest.mark.parametrize("kwargs", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}])
def test_a_gradient_that_autograd_gives_as_none_counts_as_zeros(kwargs):
    def train(ddp, rank, world, package):
        seen = []
        for number, (x, y) in enumerate(vectors(4, 8)):
            ddp.zero_grad()
            gives = (True, rank == 0, False, rank == 1)[number]
            x, y = shard((x, y), rank, world)
            nn.functional.mse_loss(ddp(x, gives), y).backward()
            seen += gradients_of(ddp)
        return seen

    compare(2, Scaled, train, kwargs)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_the_wrapped_model(reentrant):
    """The forward is run again inside of the backward pass, and may be left before its end."""

    def train(ddp, rank, world, package):
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for batch in vectors(3, 8):
            x, y = shard(batch, rank, world)
            optimizer.zero_grad()
            y = nn.functional.mse_loss(checkpoint(ddp, x.requires_grad_(), use_reentrant=reentrant), y)
            y.backward()
            optimizer.step()

    compare(2, small, train)


@VIEWS
def test_another_memory_format_after_wrapping(views):
    """Torch's own mixes up the elements where gradients are no views."""

    def build():
        torch.manual_seed(0)
        return nn.Conv2d(3, 4, 3)

    def body(rank, world):
        ddp, alone = cdist.DistributedDataParallel(build(), gradient_as_bucket_view=views), build()
        ddp.to(memory_format=torch.channels_last)
        images = torch.randn(2 * world, 3, 5, 5, generator=torch.Generator().manual_seed(3))
        for _ in range(2):
            ddp.zero_grad()
            alone.zero_grad()
            ddp(images[2 * rank : 2 * rank + 2]).pow(2).mean().backward()
            alone(images).pow(2).mean().backward()
            close(gradients_of(ddp), gradients_of(alone), 1e-5)

    run(body, 2)


class Inside(nn.Module):
    """Makes its backward pass in its forward."""

    def __init__(self):
        super().__init__()
        self.layers = small()

    def forward(self, x, y):
        nn.functional.mse_loss(self.layers(x), y).backward()


def test_a_backward_pass_inside_of_the_forward_is_reduced():
    def body(rank, world):
        ddp = cdist.DistributedDataParallel(Inside())
        seen = []
        for batch in vectors(3, 8):
            ddp.zero_grad()
            assert ddp(*shard(batch, rank, world)) is None
            seen += gradients_of(ddp)
        assert ddp._get_ddp_logging_data()["avg_forward_compute_time"] > 0
        return seen

    one, other = run(body, 2)
    close(one, other)


class Dated(nn.Module):
    """Gives a dataclass."""

    def __init__(self):
        super().__init__()
        self.inner = small()

    def forward(self, x):
        return Given(self.inner(x))


@dataclasses.dataclass
class Given:
    output: torch.Tensor


def test_outputs_in_a_dataclass_are_reduced_under_a_static_graph():
    """torch's own class misses the first step there."""

    def train(ddp, rank, world, package):
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for batch in vectors(3, 8):
            x, y = shard(batch, rank, world)
            optimizer.zero_grad()
            nn.functional.mse_loss(ddp(x).output, y).backward()
            optimizer.step()

    compare(2, Dated, train, {"static_graph": True}, {})


def test_delayed_gradients_are_reduced():
    """As without the delay; torch's own class is not always in time."""

    def body(rank, world):
        def train(**kwargs):
            module = small()
            named = list(module.named_parameters())
            if kwargs:
                kwargs = {"delay_all_reduce_named_params": named[2:], "param_to_hook_all_reduce": named[0][1]}
            ddp = cdist.DistributedDataParallel(module, **kwargs)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            for batch in vectors(3, 8):
                optimizer.zero_grad()
                loss_of(ddp, batch, rank, world).backward()
                optimizer.step()
            return [p.detach().numpy() for p in ddp.parameters()]

        close(train(delayed=True), train(), 0)

    run(body, 2)


def unfreeze(ddp):
    ddp.module[0].requires_grad_(True)


def assign(ddp):
    ddp.load_state_dict({name: value.clone() for name, value in ddp.state_dict().items()}, assign=True)


def add(ddp):
    ddp.module.append(nn.Linear(3, 2))


@pytest.mark.parametrize("change", [unfreeze, assign, add])
def test_parameters_that_came_after_wrapping_are_named(change):
    def body(rank, world):
        module = small()
        module[0].requires_grad_(False)
        ddp = cdist.DistributedDataParallel(module)
        x = torch.full((2, 6), rank + 1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ddp(x).sum().backward()
            change(ddp)
            ddp(x).sum().backward()
            ddp.eval()
            with torch.no_grad():
                ddp(x)
            ddp.train()
        name = {unfreeze: "0.weight", assign: "2.weight", add: "3.weight"}[change]
        with pytest.warns(UserWarning, match=f"'{name}'.* stay with their rank.*set_trainable"):
            ddp(x).sum().backward()
        ddp.train()
        ddp.set_trainable([name for name, p in ddp.module.named_parameters() if p.requires_grad])
        ddp.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ddp(x).sum().backward()
        return gradients_of(ddp)

    first, second = run(body, 2)
    close(first, second, 0)
