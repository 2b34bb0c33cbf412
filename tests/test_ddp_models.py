"""DistributedDataParallel over models, losses and optimizers of many kinds, against torch's own (Gloo)."""

import collections
import copy
import io
import warnings

import pytest

torch = pytest.importorskip("torch", reason="torch comes with EXTRAS in .ci/run")

import cdist  # noqa: E402
from test_ddp_torch import compare, small  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import utils  # noqa: E402
from torch.nn.utils import prune  # noqa: E402

torch.set_num_threads(1)


def random(rank, step, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 * step + rank))


def words(rank, step, *shape):
    return torch.randint(0, 20, shape, generator=torch.Generator().manual_seed(100 * step + rank))


def vectors(rank, step):
    return (random(rank, step, 4, 6),)


class Tied(nn.Module):
    """The input embedding is the output layer, and a layer is used three times."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.layers = nn.ModuleDict({"a": nn.ModuleList([nn.Linear(8, 8)])})
        self.out = nn.Linear(8, 20, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x)
        for _ in range(3):
            x = torch.tanh(self.layers["a"][0](x))
        return self.out(x)


class Sizes(nn.Module):
    """Parameters without dimensions, without elements, in a list, a dict, and none."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.several = nn.ParameterList([nn.Parameter(torch.randn(6)) for _ in range(3)])
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.randn(1))})
        self.register_parameter("absent", None)
        self.register_buffer("nothing", None)

    def forward(self, x):
        return sum(p * x for p in self.several) * self.scale * self.named["a"] + self.empty.sum()


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.randn((), dtype=torch.complex128))
        self.real = nn.Parameter(torch.randn(3))

    def forward(self, x):
        return (x.to(torch.complex64) @ self.weight.conj() * self.real * self.scale).abs()


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cell = kind(4, 6, 2, bidirectional=True, batch_first=True)
        self.out = nn.Linear(12, 2)

    def forward(self, x):
        output, _ = self.cell(x)
        return self.out(utils.rnn.pad_packed_sequence(output, batch_first=True)[0])


def packed(rank, step):
    lengths = [5, 3 + rank % 2, 2]
    return (utils.rnn.pack_padded_sequence(random(rank, step, 3, 5, 4), lengths, batch_first=True),)


class Expanded(nn.Module):
    """Gradients that come as expanded, transposed and conjugated views."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Parameter(torch.ones(4, 5))
        self.turned = nn.Parameter(torch.ones(5, 4).T)
        self.short = nn.Parameter(torch.ones(3))

    def forward(self, x):
        conjugate = torch.conj(self.short.to(torch.complex64)).sum().real
        return self.wide.sum() * x.mean() + (self.turned * 2).sum() * x.std() + self.short.sum() + conjugate


class Nested(nn.Module):
    """Takes and gives nests."""

    Given = collections.namedtuple("Given", "first rest")

    def __init__(self):
        super().__init__()
        self.inner = small()

    def forward(self, batch, *, mask, **more):
        out = [self.inner(x) * mask for x in batch["xs"]]
        return self.Given(out[0], {"rest": [out[1]], "text": "a", "none": None, "sum": more["z"]})


class Reparametrised(nn.Sequential):
    def __init__(self):
        norms = utils.parametrizations
        super().__init__(
            norms.weight_norm(nn.Linear(6, 8)),
            nn.Tanh(),
            norms.orthogonal(nn.Linear(8, 8)),
            norms.spectral_norm(nn.Linear(8, 3)),
        )


class Kept(nn.Module):
    """Keeps its loss and gives nothing."""

    def __init__(self):
        super().__init__()
        self.inner = small()

    def forward(self, x):
        self.loss = self.inner(x).square().mean()


def pruned():
    model = small()
    prune.l1_unstructured(model[0], "weight", 0.3)
    return model


def hooked():
    """With hooks of users on tensors and modules, some of which change gradients."""
    model = small()
    model[0].weight.register_hook(lambda gradient: gradient * 2)
    model[2].register_full_backward_hook(lambda module, given, got: (given[0] * 0.5,))
    model[0].register_forward_hook(lambda module, inputs, output: output + 1)
    return model


def several_dtypes():
    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 5), nn.Linear(5, 4).double()

        def forward(self, x):
            return self.b(self.a(x).double())

    return Cast()


def mean_square(output):
    return output.square().mean()


KINDS = {
    "tied": (Tied, lambda rank, step: (words(rank, step, 5),), mean_square),
    "sizes": (Sizes, vectors, mean_square),
    "complex": (Complex, vectors, mean_square),
    "dtypes": (several_dtypes, vectors, mean_square),
    "LSTM": (lambda: Recurrent(nn.LSTM), packed, mean_square),
    "GRU": (lambda: Recurrent(nn.GRU), packed, mean_square),
    "expanded": (Expanded, vectors, mean_square),
    "reparametrised": (Reparametrised, vectors, mean_square),
    "pruned": (pruned, vectors, mean_square),
    "hooked": (hooked, lambda rank, step: (random(rank, step, 4, 6).requires_grad_(),), mean_square),
    "transformer": (
        lambda: nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True),
        lambda rank, step: (random(rank, step, 2, 5, 8), random(rank, step + 20, 2, 3, 8)),
        mean_square,
    ),
}
MODES = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True, "bucket_cap_mb": 1e-4},
}


def seeded(build):
    def made():
        torch.manual_seed(0)
        return build()

    return made


def descend(ddp, loss, steps=4, optimizer=None, **zero):
    optimizer = optimizer or torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad(**zero)
        loss(step).backward()
        optimizer.step()


def everything(*modules):
    """States and gradients, as NumPy arrays."""
    tensors = [t for module in modules for t in module.state_dict().values()]
    tensors += [p.grad for module in modules for p in module.parameters() if p.grad is not None]
    return [t.detach().clone().numpy() for t in tensors]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_models_equal_torch(kind, mode):
    build, inputs, loss = KINDS[kind]

    def train(ddp, rank, world, package):
        descend(ddp, lambda step: loss(ddp(*inputs(rank, step))))
        return everything(ddp)

    compare(2, seeded(build), train, MODES[mode], tolerance=2e-6)


@pytest.mark.parametrize("mode", MODES)
def test_nests_equal_torch(mode):
    def train(ddp, rank, world, package):
        def loss(step):
            batch = {"xs": [random(rank, step, 4, 6), random(rank, step + 7, 4, 6)], "name": "a"}
            out = ddp(batch, mask=random(rank, step + 50, 4, 1), z=3)
            assert (type(out), out.rest["text"], out.rest["sum"]) == (Nested.Given, "a", 3)
            return mean_square(out.first) + mean_square(out.rest["rest"][0])

        descend(ddp, loss)
        return everything(ddp)

    compare(2, Nested, train, MODES[mode])


@pytest.mark.parametrize("mode", ["plain", "views"])
def test_a_forward_that_gives_nothing_equals_torch(mode):
    def train(ddp, rank, world, package):
        def loss(step):
            assert ddp(*vectors(rank, step)) is None
            return ddp.module.loss

        descend(ddp, loss)
        return everything(ddp)

    compare(2, Kept, train, MODES[mode])


OPTIMIZERS = {
    "foreach": lambda p: torch.optim.Adam(p, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "clipped": lambda p: torch.optim.SGD(p, lr=0.1, foreach=False),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_equal_torch(kind, mode):
    def train(ddp, rank, world, package):
        optimizer = OPTIMIZERS[kind](ddp.parameters())
        norms = []

        def loss(step):
            if kind == "clipped" and step:
                norms.append(utils.clip_grad_norm_(ddp.parameters(), 0.5).numpy())
                utils.clip_grad_value_(ddp.parameters(), 0.1)
            return mean_square(10 * ddp(*vectors(rank, step)))

        descend(ddp, loss, 4, optimizer, set_to_none=kind != "clipped")
        return everything(ddp) + norms

    compare(2, small, train, MODES[mode], tolerance=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_closures_equal_torch(mode):
    """L-BFGS: several passes in a step, as many as the reduced loss and gradients ask for."""

    def train(ddp, rank, world, package):
        optimizer = torch.optim.LBFGS(ddp.parameters(), lr=0.5, max_iter=4)
        for step in range(2):

            def closure(step=step):
                optimizer.zero_grad()
                loss = mean_square(ddp(*vectors(rank, step)))
                loss.backward()
                return loss

            optimizer.step(closure)
        return everything(ddp)

    compare(2, small, train, MODES[mode], tolerance=1e-5)


@pytest.mark.parametrize("mode", ["plain", "views"])
def test_copies_equal_torch(mode):
    """Of the wrapper, by copy, pickle and torch.save, and of the model for moving averages."""

    def train(ddp, rank, world, package):
        def steps(wrapped, count=3):
            descend(wrapped, lambda step: mean_square(wrapped(*vectors(rank, step))), count)

        average = torch.optim.swa_utils.AveragedModel(ddp.module)
        moving = copy.deepcopy(ddp.module).requires_grad_(False)
        steps(ddp)
        average.update_parameters(ddp.module)
        with torch.no_grad():
            for mean, p in zip(moving.parameters(), ddp.module.parameters(), strict=True):
                mean.lerp_(p, 0.5)
        file = io.BytesIO()
        torch.save(ddp, file)
        file.seek(0)
        copies = [copy.deepcopy(ddp), torch.load(file, weights_only=False)]
        for wrapped in (*copies, ddp):
            steps(wrapped)
        ddp.load_state_dict(copies[0].state_dict())
        steps(ddp, 2)
        return everything(ddp, moving, *copies) + everything(average)

    compare(2, small, train, MODES[mode])


@pytest.mark.parametrize("mode", ["plain", "views"])
def test_functional_calls_equal_torch(mode):
    """Other values in the place of parameters; gradients of torch.func go past the wrapper."""

    def train(ddp, rank, world, package):
        doubled = {name: p * 2 for name, p in ddp.named_parameters()}
        mean_square(torch.func.functional_call(ddp, doubled, vectors(rank, 0))).backward()
        seen = everything(ddp)
        plain = {name: p.detach() for name, p in ddp.module.named_parameters()}

        def loss(values, x):
            return mean_square(torch.func.functional_call(ddp.module, values, (x,)))

        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(plain, random(rank, 1, 4, 1, 6))
        ddp.zero_grad()
        descend(ddp, lambda step: mean_square(ddp(*vectors(rank, step))))
        return everything(ddp) + seen + [gradient.numpy() for gradient in each.values()]

    compare(2, small, train, MODES[mode])


@pytest.mark.parametrize("mode", ["plain", "views"])
def test_two_models_that_train_in_turns_equal_torch(mode):
    """One of them is frozen and thawed in each step, while the gradient goes through it."""

    def train(ddp, rank, world, package):
        torch.manual_seed(1)
        critic = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
        critic = type(ddp)(critic, **MODES[mode])
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ddp, critic)]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(4):
                optimizers[1].zero_grad()
                made = ddp(*vectors(rank, step)).detach()
                (critic(made).mean() - critic(random(rank, step + 9, 4, 3)).mean()).backward()
                optimizers[1].step()
                critic.requires_grad_(False)
                optimizers[0].zero_grad()
                (-critic(ddp(*vectors(rank, step))).mean()).backward()
                optimizers[0].step()
                critic.requires_grad_(True)
        return everything(ddp, critic)

    compare(2, small, train, MODES[mode])


def test_states_travel_between_torchs_class_and_ours():
    def train(ddp, rank, world, package):
        other = cdist.DistributedDataParallel if package is not cdist else nn.parallel.DistributedDataParallel
        descend(ddp, lambda step: mean_square(ddp(*vectors(rank, step))), 2)
        theirs = other(small(1))
        theirs.load_state_dict(ddp.state_dict())
        descend(theirs, lambda step: mean_square(theirs(*vectors(rank, step))), 2)
        ddp.load_state_dict(theirs.state_dict())
        return everything(ddp)

    compare(2, small, train)
