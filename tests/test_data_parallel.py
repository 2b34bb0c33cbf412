"""DataParallel: replicas of one process."""

import cdist
import numpy as np
import pytest
from cdist.parallel.data_parallel import gather, scatter


class Linear:
    def __init__(self):
        self.w = cdist.Parameter(np.arange(6.0).reshape(3, 2))
        self.calls = 0

    def named_parameters(self):
        yield "w", self.w

    def __call__(self, x):
        self.calls += 1
        self.x = x
        return x @ self.w.data

    def backward(self, g):
        self.w.accumulate_grad(self.x.T @ g)


@pytest.mark.parametrize("rows", range(1, 8))
@pytest.mark.parametrize("replicas", [1, 2, 3, 5])
def test_equals_one_module(rows, replicas):
    x = np.random.default_rng(0).normal(size=(rows, 3))
    alone, parallel = Linear(), cdist.DataParallel(Linear(), replicas=replicas)
    np.testing.assert_allclose(parallel(x), alone(x), rtol=1e-14)
    assert parallel.module.calls == 0

    def both(replica, x, g):
        assert len(x) > 0
        replica(x)
        replica.backward(g)
        return len(x)

    g = np.ones((rows, 2))
    sizes = parallel.run(both, x, g)
    assert sum(sizes) == rows
    assert len(sizes) == min(rows, replicas)
    alone.backward(g)
    np.testing.assert_allclose(parallel.module.w.grad, alone.w.grad, rtol=1e-13)
    parallel.run(both, x, g)
    np.testing.assert_allclose(parallel.module.w.grad, 2 * alone.w.grad, rtol=1e-13)
    parallel.module.w.data = parallel.module.w.data + 1
    np.testing.assert_allclose(parallel(x), x @ parallel.module.w.data)


def test_scatter_and_gather():
    batch = {"x": np.arange(10).reshape(5, 2), "pair": (np.arange(5), "same"), "scale": 2.0}
    parts = scatter(batch, 3)
    assert [len(p["x"]) for p in parts] == [1, 2, 2]
    assert all(p["pair"][1] == "same" and p["scale"] == 2.0 for p in parts)
    joined = gather([(p["x"], {"n": p["pair"][0]}, float(len(p["x"])), None) for p in parts])
    np.testing.assert_array_equal(joined[0], batch["x"])
    np.testing.assert_array_equal(joined[1]["n"], np.arange(5))
    assert joined[2].tolist() == [1, 2, 2]
    assert joined[3] is None
    assert len(scatter((np.ones((2, 7)),), 3, dim=1)) == 3
    assert len(scatter((), 3)) == 1


def test_errors():
    with pytest.raises(TypeError, match="named_parameters"):
        cdist.DataParallel(3)
    with pytest.raises(ValueError, match="at least 1"):
        cdist.DataParallel(Linear(), replicas=0)
    with pytest.raises(TypeError, match="'w' is a float, not a cdist.Parameter"):
        cdist.DataParallel(type("Plain", (), {"named_parameters": lambda self: [("w", 1.0)]})())
    with pytest.raises(ValueError, match="differ in length"):
        scatter((np.ones(3), np.ones(4)), 2)

    def fail(replica, x):
        raise ZeroDivisionError(f"{len(x)}")

    with pytest.raises(ZeroDivisionError):
        cdist.DataParallel(Linear()).run(fail, np.ones((4, 3)))


def test_torch_modules_without_gpu_are_called_as_they_are():
    torch = pytest.importorskip("torch", reason="torch comes with EXTRAS in .ci/run")
    module = torch.nn.Linear(2, 2)
    wrapped = cdist.DataParallel(module)
    assert list(wrapped.state_dict()) == ["module.weight", "module.bias"]
    if not torch.cuda.is_available():
        assert wrapped.device_ids == []
        x = torch.ones(3, 2)
        assert torch.equal(wrapped(x), module(x))
