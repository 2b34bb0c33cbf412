"""DistributedDataParallel over array modules: cdist.Parameter, other parameter classes, and everything around
a step.
"""

import copy

import cdist
import numpy as np
import pytest
from cdist.parallel import no_sync
from cdist.testing import run
from test_reducer import Producer

WORLDS = [1, 2, 3, 4]


class Net:
    """A multilayer perceptron with a buffer, by hand."""

    def __init__(self, seed, sizes=(6, 8, 5, 3), dtype=np.float64, frozen=()):
        rng = np.random.default_rng(seed)
        self.layers = []
        for number, (i, o) in enumerate(zip(sizes, sizes[1:], strict=False)):
            w = cdist.Parameter(rng.normal(size=(i, o)).astype(dtype))
            b = cdist.Parameter(rng.normal(size=o).astype(dtype))
            w.requires_grad = f"{number}.w" not in frozen
            self.layers.append((w, b))
        self.count = np.array([float(seed)])

    def named_parameters(self):
        for number, (w, b) in enumerate(self.layers):
            yield f"{number}.w", w
            yield f"{number}.b", b

    def named_buffers(self):
        yield "count", self.count

    def set_buffer(self, name, value):
        setattr(self, name, value)

    def __call__(self, x):
        self.inputs = []
        for w, b in self.layers:
            self.inputs.append(x)
            x = np.tanh(x @ w.data + b.data)
        self.out = x
        return x

    def backward(self, target):
        g = 2 * (self.out - target) / len(target) / target.shape[1]
        out = self.out
        for (w, b), x in zip(self.layers[::-1], self.inputs[::-1], strict=True):
            g = g * (1 - out**2)
            b.accumulate_grad(g.sum(0))
            if w.requires_grad:
                w.accumulate_grad(x.T @ g)
            g = g @ w.data.T
            out = x


def batches(steps, size, seed=5):
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=(size, 6)), rng.normal(size=(size, 3))) for _ in range(steps)]


def descend(model, rate=0.1):
    for _, p in model.named_parameters():
        if p.grad is not None:
            p.data -= rate * p.grad


def train_alone(data, **kwargs):
    net = Net(0, **kwargs)
    for x, y in data:
        net(x)
        for _, p in net.named_parameters():
            p.zero_grad()
        net.backward(y)
        descend(net)
    return [p.data for _, p in net.named_parameters()]


def assert_equal(ours, theirs, rtol=1e-12):
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-14)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("cap", [None, 1e-4])
def test_equals_training_on_the_whole_batch(world, cap):
    data = batches(6, 12)

    def body(rank, world):
        ddp = cdist.DistributedDataParallel(Net(rank), bucket_cap_mb=cap)
        assert isinstance(ddp, cdist.DistributedDataParallel)
        for x, y in data:
            part = slice(rank * 12 // world, (rank + 1) * 12 // world)
            ddp(x[part])
            ddp.zero_grad()
            ddp.module.backward(y[part])
            descend(ddp)
        return [p.data for p in ddp.parameters()]

    outcomes = run(body, world)
    for outcome in outcomes:
        assert_equal(outcome, train_alone(data))
        assert all((a == b).all() for a, b in zip(outcome, outcomes[0], strict=True))


def test_buckets_are_replanned_by_readiness():
    def body(rank, world):
        ps = {name: cdist.Parameter(np.zeros(n)) for name, n in (("a", 10), ("b", 20), ("c", 30))}

        class Module:
            def named_parameters(self):
                return list(ps.items())

        ddp = cdist.DistributedDataParallel(Module(), bucket_cap_mb_list=[1e-4, 1e-4])
        before = ddp._sync.bucket_of
        for step in range(3):
            ddp.zero_grad()
            for name in "acb" if rank == 0 else "bca":
                ps[name].accumulate_grad(np.full(ps[name].data.shape, rank + step))
            for p in ps.values():
                assert (p.grad == step + 0.5).all()
        return before, ddp._sync.bucket_of, ddp._sync.reducer.launched[0]

    for before, after, launched in run(body, 2):
        assert before == [2, 1, 0]
        assert after == [0, 1, 0]
        assert launched == 4  # two steps since the new plan


def test_no_sync_and_accumulation():
    data = batches(8, 12)

    def reference():
        net = Net(0)
        for first in range(0, 8, 4):
            for _, p in net.named_parameters():
                p.zero_grad()
            for x, y in data[first : first + 4]:
                net(x)
                net.backward(y)
            descend(net)
        return [p.data for _, p in net.named_parameters()]

    def body(rank, world, how):
        ddp = cdist.DistributedDataParallel(Net(rank))

        def one(batch):
            x, y = batch
            part = slice(rank * 12 // world, (rank + 1) * 12 // world)
            ddp(x[part])
            ddp.module.backward(y[part])

        if how == "walk":
            for batch, last in ddp.accumulate(4, data):
                one(batch)
                if last:
                    descend(ddp)
                    ddp.zero_grad()
        for first in range(0, 8, 4):
            if how == "no_sync":
                with ddp.no_sync():
                    for batch in data[first : first + 3]:
                        one(batch)
                one(data[first + 3])
            elif how == "count":
                for i in ddp.accumulate(4):
                    one(data[first + i])
            elif how == "late":
                with ddp.no_sync():
                    for batch in data[first : first + 4]:
                        one(batch)
                ddp.synchronize()
            if how != "walk":
                descend(ddp)
                ddp.zero_grad()
        assert ddp._sync.reducer.launched[0] == 2
        return [p.data for p in ddp.parameters()]

    for how in ("no_sync", "count", "walk", "late"):
        for outcome in run(body, 2, how):
            assert_equal(outcome, reference())


def test_accumulate_synchronises_the_last_micro_batch():
    """K142: the helper synchronises the last micro-batch: 5.5 on both ranks."""

    def body(rank, world):
        p = cdist.Parameter(np.zeros(1))

        class Module:
            def named_parameters(self):
                yield "p", p

        ddp = cdist.DistributedDataParallel(Module())
        for i in ddp.accumulate(2):
            p.accumulate_grad(np.full(1, float([[1, 2], [3, 5]][rank][i])))
        first = float(p.grad[0])
        ddp.zero_grad()
        # A remainder that does not fill an accumulation is synchronised too.
        flags = []
        for value, last in ddp.accumulate(2, [1.0, 2.0, 3.0]):
            p.accumulate_grad(np.full(1, value))
            flags.append(last)
            if last:
                assert p.grad[0] == 3.0
                ddp.zero_grad()
        return first, flags

    assert run(body, 2) == [(5.5, [False, True, True])] * 2


def test_stepping_on_unsynced_gradients_raises_when_debugging():
    """K142: in debug mode a step on gradients that were not synchronised raises."""

    def body(rank, world):
        ddp = cdist.DistributedDataParallel(Net(0))
        x, y = batches(1, 4)[0]
        with ddp.no_sync():
            ddp(x)
            ddp.module.backward(y)
        with pytest.raises(RuntimeError, match="not synchronised"):
            ddp.optimizer_step(descend, ddp)
        ddp(x)
        ddp.module.backward(y)
        ddp.optimizer_step(descend, ddp)

    run(body, 2, environ={"CDIST_DEBUG": "DETAIL"})


def test_no_sync_of_many_modules():
    """K143: no_sync of several modules covers all of them."""

    def body(rank, world):
        nets = [cdist.DistributedDataParallel(Net(0)) for _ in range(2)]
        x, y = batches(1, 4)[0]
        with no_sync(*nets):
            for net in nets:
                net(x)
                net.module.backward(y)
        return [net._sync.reducer.launched for net in nets]

    assert run(body, 2) == [[(0, 0)] * 2] * 2


def test_reading_a_gradient_waits_for_it():
    def body(rank, world):
        ddp = cdist.DistributedDataParallel(Net(0))
        x, y = batches(1, 4)[0]
        ddp(x * (rank + 1))
        ddp.module.backward(y)
        (w, b) = ddp.module.layers[1]
        return w.grad.copy(), b.grad.copy()

    first, second = run(body, 2)
    assert (first[0] == second[0]).all()
    assert (first[1] == second[1]).all()


def test_missing_gradient_is_named_on_every_rank():
    """K139: a gradient that does not come is zeros where that is allowed, otherwise an error on every rank
    that names it.
    """

    def body(rank, world, loose):
        names = ("a", "b", "c")
        ps = {name: cdist.Parameter(np.zeros(4)) for name in names}

        class Module:
            def named_parameters(self):
                return list(ps.items())

        ddp = cdist.DistributedDataParallel(Module(), find_unused_parameters=loose)
        for name in names:
            if name == "c" or (rank == 1 and name == "b"):
                continue
            ps[name].accumulate_grad(np.ones(4))
        if loose:
            return ps["b"].grad.tolist(), ps["c"].grad
        with pytest.raises(RuntimeError, match="'b'") as caught:
            _ = ps["a"].grad
        ddp.zero_grad()
        for p in ps.values():
            p.accumulate_grad(np.full(4, rank + 1.0))
        assert (ps["b"].grad == 1.5).all()
        return str(caught.value)

    assert run(body, 2, True) == [([0.5] * 4, None)] * 2
    texts = run(body, 2, False)
    assert texts[0] == texts[1]
    assert "for rank 0: 2 ('c')" in texts[0]
    assert "for rank 1: 1 2 ('b', 'c')" in texts[0]


def test_tied_parameters_and_marking_twice():
    """K140: an array under two names is reduced once; marking twice names it; static_graph counts uses."""

    def body(rank, world):
        w = cdist.Parameter(np.zeros(3))
        v = cdist.Parameter(np.zeros(3))

        class Module:
            def named_parameters(self):
                yield from (("w", w), ("tied", w), ("v", v))

        ddp = cdist.DistributedDataParallel(Module())
        assert len(ddp.parameters()) == 2
        w.accumulate_grad(np.ones(3), ready=False)
        v.accumulate_grad(np.ones(3))
        w.accumulate_grad(np.full(3, rank))
        assert (w.grad == 1.5).all()
        ddp.zero_grad()
        w.accumulate_grad(np.ones(3))
        with pytest.raises(RuntimeError, match="name w has been marked as ready twice"):
            w.accumulate_grad(np.ones(3))
        v.accumulate_grad(np.ones(3))
        assert (w.grad == 1).all()

        static = cdist.DistributedDataParallel(
            type("M", (), {"named_parameters": lambda self: [("u", u), ("x", x)]})(), static_graph=True
        )
        for _ in range(3):
            static.zero_grad()
            u.accumulate_grad(np.ones(3))
            x.accumulate_grad(np.ones(3))
            u.accumulate_grad(np.full(3, float(rank)))
            assert (u.grad == 1.5).all()

    u, x = cdist.Parameter(np.zeros(3)), cdist.Parameter(np.zeros(3))
    run(body, 2)


def test_modes():
    """K151: sums, means over ranks, and means over all samples of uneven batches, to 1e-12."""
    shards = [slice(0, 3), slice(3, 8)]
    x, y = batches(1, 8)[0]

    def alone(part):
        net = Net(0)
        net(x[part])
        net.backward(y[part])
        return [p.grad for _, p in net.named_parameters()]

    def body(rank, world, mode):
        ddp = cdist.DistributedDataParallel(Net(rank), reduce=mode)
        for _ in range(2):
            ddp.zero_grad()
            if mode == "weights":
                ddp.set_weight(shards[rank].stop - shards[rank].start)
            ddp(x[shards[rank]])
            ddp.module.backward(y[shards[rank]])
            grads = [p.grad.copy() for p in ddp.parameters()]
        if mode == "sum":
            with pytest.raises(RuntimeError, match="zero_grad"):
                ddp.module.backward(y[shards[rank]])
        if mode != "weights":
            with pytest.raises(ValueError, match="weights"):
                ddp.set_weight(1)
        return grads

    one, two = alone(shards[0]), alone(shards[1])
    for grads in run(body, 2, "weights"):
        assert_equal(grads, alone(slice(0, 8)))
    for grads in run(body, 2, "sum"):
        assert_equal(grads, [a + b for a, b in zip(one, two, strict=True)])
    for grads in run(body, 2, "mean"):
        assert_equal(grads, [(a + b) / 2 for a, b in zip(one, two, strict=True)])


def test_frozen_models():
    """K154: a model without trainable parameters sends nothing; if only one rank froze its own, all raise
    with a diff.
    """

    def body(rank, world):
        names = [name for name, _ in Net(0).named_parameters()]

        def make(frozen):
            net = Net(0)
            for _, p in net.named_parameters():
                p.requires_grad = not frozen
            return net

        ddp = cdist.DistributedDataParallel(make(True))
        ddp(np.ones((2, 6)))
        ddp.synchronize()
        assert ddp._sync.reducer.launched == (0, 0)
        assert len(names) == 6
        with pytest.raises(RuntimeError, match="frozen") as caught:
            cdist.DistributedDataParallel(make(rank == 0))
        return str(caught.value)

    for text in run(body, 2):
        assert "'0.w'" in text
        assert "rank 1" in text


def test_set_trainable():
    """K155: freezing between steps equals one process; ranks that freeze different parameters raise, naming
    them.
    """
    data = batches(6, 8)

    def reference():
        net = Net(0)
        for step, (x, y) in enumerate(data):
            net.layers[1][0].requires_grad = not 2 <= step < 4
            for _, p in net.named_parameters():
                p.zero_grad()
            net(x)
            net.backward(y)
            descend(net)
        return [p.data for _, p in net.named_parameters()]

    def body(rank, world):
        ddp = cdist.DistributedDataParallel(Net(rank))
        names = [name for name, _ in ddp.named_parameters()]
        for step, (x, y) in enumerate(data):
            if step == 2:
                ddp.set_trainable([name for name in names if name != "1.w"])
            if step == 4:
                ddp.set_trainable(names)
            ddp.zero_grad()
            part = slice(rank * 4, rank * 4 + 4)
            ddp(x[part])
            ddp.module.backward(y[part])
            descend(ddp)
        with pytest.raises(RuntimeError, match="'1.b'") as caught:
            ddp.set_trainable([name for name in names if rank or name != "1.b"])
        with pytest.raises(ValueError, match="no such"):
            ddp.set_trainable(["nothing"])
        assert "set_trainable" in str(caught.value)
        return [p.data for p in ddp.parameters()]

    for outcome in run(body, 2):
        assert_equal(outcome, reference())


def test_buffers():
    """K148, K149: buffers are looked up anew, written only where they differ, and on request out of place."""

    def body(rank, world):
        net = Net(rank + 7)
        ddp = cdist.DistributedDataParallel(net)
        assert net.count[0] == 7
        net.count = net.count + 1 + rank  # re-assigned
        ddp(np.ones((2, 6)))
        assert net.count[0] == 8
        net.count[0] = rank
        old = net.count
        ddp.broadcast_buffers(average=True, copy=True)
        assert old[0] == rank
        assert net.count[0] == 0.5
        old = net.count
        ddp.broadcast_buffers(copy=True)
        assert net.count is old
        quiet = cdist.DistributedDataParallel(Net(rank), broadcast_buffers=False)
        quiet(np.ones((2, 6)))
        assert quiet.module.count[0] == rank
        quiet.broadcast_buffers(src=1)
        assert quiet.module.count[0] == 1
        for _, p in quiet.named_parameters():
            p.data[...] = rank
        quiet.broadcast_parameters(src=1)
        assert all((p.data == 1).all() for p in quiet.parameters())

    run(body, 2)


def test_subgroup_starts_from_its_first_rank():
    """K113."""

    def body(rank, world):
        group = cdist.new_group([2, 3])
        if rank < 2:
            return None
        ddp = cdist.DistributedDataParallel(Net(rank), process_group=group)
        x, y = batches(1, 4)[0]
        ddp(x)
        ddp.module.backward(y * rank)
        return [p.data for p in ddp.parameters()] + [p.grad.copy() for p in ddp.parameters()]

    outcomes = run(body, 4)
    start = [p.data for _, p in Net(2).named_parameters()]
    for outcome in outcomes[2:]:
        assert_equal(outcome[:6], start)
        assert_equal(outcome, outcomes[2], rtol=0)


def test_models_that_differ():
    def with_buffer(rank):
        net = Net(0)
        net.named_buffers = lambda: [("mean", np.zeros(4 + rank))]
        return net

    def body(rank, world):
        said = []
        for make in (
            lambda: Net(0, sizes=(6, 4 + rank, 3)),
            lambda: Net(0, sizes=(6, 4, 3) if rank else (6, 3)),
            lambda: Net(0, dtype=np.float32 if rank else np.float64),
            lambda: with_buffer(rank),
        ):
            with pytest.raises(RuntimeError, match="DDP expects same model across all ranks") as caught:
                cdist.DistributedDataParallel(make())
            said.append(str(caught.value))
        return said

    for said in run(body, 2):
        assert "(6, 4)" in said[0]
        assert "(6, 5)" in said[0]
        assert (
            "Rank 0 has 2 params, while rank 1 has inconsistent 4 params" in said[1]
            or "Rank 1 has 4 params" in said[1]
        )
        assert "float32" in said[2]
        assert "only on rank 1: buffer 'mean': float64 (5,)" in said[3]


class Plain:
    """A parameter class that knows nothing of cdist."""

    def __init__(self, data):
        self.data, self.grad = data, None


def test_foreign_parameters():
    def body(rank, world):
        ps = {"a": Plain(np.full(3, float(rank))), "b": Plain(np.full((2, 2), float(rank), np.float32))}
        module = type(
            "M", (), {"named_parameters": lambda self: list(ps.items()), "__call__": lambda self, x: x}
        )()
        ddp = cdist.DistributedDataParallel(module)
        assert (ps["a"].data == 0).all()
        for step in range(3):
            for p in ps.values():
                p.grad = np.full(p.data.shape, rank + step, p.data.dtype)
            ddp.synchronize()
            assert all((p.grad == step + 0.5).all() for p in ps.values())
        ps["a"].grad = Producer(np.full(3, float(rank)))
        ddp.synchronize()
        assert (ps["a"].grad.array == 0.5).all()
        with ddp.no_sync():
            ddp.synchronize()
        if rank == 1:
            ps["b"].grad = None
        with pytest.raises(RuntimeError, match="'b'"):
            ddp.synchronize()

    run(body, 2)


def test_wrong_use():
    with pytest.raises(TypeError, match="GradientReducer"):
        cdist.DistributedDataParallel([1, 2])
    with pytest.raises(ValueError, match="Default process group"):
        cdist.DistributedDataParallel(Net(0))
    p = cdist.Parameter(np.zeros((2, 2)))
    with pytest.raises(ValueError, match="shape"):
        p.accumulate_grad(np.zeros(3))
    p.grad = np.ones((2, 2))
    p.accumulate_grad(np.ones((2, 2)))
    assert (p.grad == 2).all()
    assert "float64 (2, 2)" in repr(p)

    def body(rank, world):
        net = Net(0)
        ddp = cdist.DistributedDataParallel(net)
        w = net.layers[0][0]
        with pytest.raises(ValueError, match="accumulate_grad"):
            w.grad = np.zeros((6, 8))
        with pytest.raises(ValueError, match="shape"):
            w.accumulate_grad(np.zeros(3))
        with pytest.raises(TypeError, match="gradient of complex128"):
            w.accumulate_grad(np.zeros((6, 8), complex))
        with pytest.raises(TypeError, match="pickle or copy ddp.module"):
            copy.deepcopy(ddp)
        assert copy.deepcopy(net).layers[0][0].grad is None
        with pytest.raises(ValueError, match="another"):
            cdist.DistributedDataParallel(net)
        with pytest.raises(ValueError, match="at least one"):
            ddp.accumulate(0)

    run(body, 1)


# ---- uneven inputs


@pytest.mark.parametrize("by_all", [True, False])
def test_join_equals_one_process(by_all):
    """K17: three steps on one rank, five on the other."""
    steps = [3, 5]

    def reference():
        net = Net(0)
        for step in range(5):
            active = [rank for rank in range(2) if step < steps[rank]]
            grads = None
            for rank in active:
                for _, p in net.named_parameters():
                    p.zero_grad()
                x, y = batches(5, 4, seed=rank)[step]
                net(x)
                net.backward(y)
                mine = [p.grad for _, p in net.named_parameters()]
                grads = mine if grads is None else [a + b for a, b in zip(grads, mine, strict=True)]
            for (_, p), g in zip(net.named_parameters(), grads, strict=True):
                p.data -= 0.1 * g / (2 if by_all else len(active))
        return [p.data for _, p in net.named_parameters()]

    def body(rank, world):
        ddp = cdist.DistributedDataParallel(Net(rank))
        with ddp.join(divide_by_initial_world_size=by_all):
            for x, y in batches(5, 4, seed=rank)[: steps[rank]]:
                ddp(x)
                ddp.zero_grad()
                ddp.module.backward(y)
                descend(ddp)
        return [p.data for p in ddp.parameters()]

    for outcome in run(body, 2):
        assert_equal(outcome, reference(), rtol=1e-10)


def test_join_divides_by_active_or_initial_ranks():
    """K152: one of four ranks leaves: gradients of ones are 1 or 0.75."""

    def body(rank, world, by_all):
        p = cdist.Parameter(np.zeros(2))
        module = type("M", (), {"named_parameters": lambda self: [("p", p)], "__call__": lambda self: None})()
        ddp = cdist.DistributedDataParallel(module)
        seen = []
        with ddp.join(divide_by_initial_world_size=by_all):
            for _ in range(1 if rank == 3 else 2):
                ddp()
                ddp.zero_grad()
                p.accumulate_grad(np.ones(2))
                seen.append(float(p.grad[0]))
        return seen

    assert run(body, 4, True) == [[1, 0.75]] * 3 + [[1]]
    assert run(body, 4, False) == [[1, 1]] * 3 + [[1]]


def test_join_can_throw():
    def body(rank, world):
        ddp = cdist.DistributedDataParallel(Net(0))

        def train():
            with ddp.join(throw_on_early_termination=True):
                for x, y in batches(2 + rank, 4):
                    ddp(x)
                    ddp.zero_grad()
                    ddp.module.backward(y)
                    descend(ddp)

        with pytest.raises(RuntimeError) as caught:
            train()
        return str(caught.value)

    first, second = run(body, 2)
    assert first == "Rank 0 exhausted all inputs."
    assert second.startswith("Detected at least one rank that exhausted inputs.")


def test_uneven_inputs_without_join_raise_on_both():
    """K17."""

    def body(rank, world):
        ddp = cdist.DistributedDataParallel(Net(0))
        for x, y in batches(3 + 2 * rank, 4):
            ddp(x)
            ddp.zero_grad()
            ddp.module.backward(y)
            descend(ddp)
        cdist.all_reduce(np.zeros(1))

    outcomes = run(body, 2, group_timeout=20, allow_failures=True)
    assert all(isinstance(outcome, cdist.DistError) for outcome in outcomes), outcomes


def test_join_without_joinables():
    with pytest.raises(ValueError, match="at least one joinable"):
        cdist.Join([])
