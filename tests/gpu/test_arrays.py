"""GradientReducer, array modules and examples over real arrays of CuPy and JAX, of two ranks."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import cdist  # noqa: E402
from test_gpu import COUNT, Cupy, device_of, gpu_run, raised, two_ranks  # noqa: E402

pytestmark = two_ranks
ROOT = Path(__file__).parents[2]


def test_bare_cupy_gradients():
    def body(rank, world):
        cupy = Cupy(rank).cupy
        stream = cupy.cuda.Stream(non_blocking=True)
        shapes = {"a": (3, 2), "b": (), "c": (700, 500), "d": (0,)}
        reducer = cdist.GradientReducer(
            {k: cupy.zeros(s, "float32") for k, s in shapes.items()}, bucket_cap_mb=0.5
        )
        for step in range(5):
            with stream:
                grads = {k: cupy.zeros(s, "float32") for k, s in shapes.items()}
                whole = cupy.full((3, 5), 100.0 * rank, "float32")
                grads["a"] = whole[:, 1:5:2]
                for _ in range(20):
                    grads["c"] += 1
                for value in grads.values():
                    value[...] = rank + step
                out = reducer.reduce(grads)
                assert all(out[k] is grads[k] for k in grads)
                checks = [bool((grads[k] == step + 0.5).all()) for k in "abc"]
                assert all(checks), (step, checks)
                assert bool((whole[:, ::2] == 100 * rank).all())

    gpu_run(body)


def test_weights_of_cupy_gradients():
    def body(rank, world):
        cupy = Cupy(rank).cupy
        x = cupy.full(4000, rank + 1.0)
        cdist.GradientReducer([x], reduce="weights").reduce([x], weight=1 + 2 * rank)
        assert bool((x == 1.75).all())
        loose = cdist.GradientReducer([x, x], find_unused_parameters=True)
        got = loose.reduce([cupy.ones(4000), cupy.ones(4000) if rank else None])
        assert bool((got[1] == 0.5).all())
        assert raised(lambda: loose.reduce([np.ones(4000), x]))[0] == "TypeError"

    gpu_run(body)


class Net:
    """Two layers whose backward tells DDP of a gradient as soon as it is there."""

    def __init__(self, cupy):
        random = np.random.default_rng(0)
        self.cupy = cupy
        self.weights = [
            cdist.Parameter(cupy.asarray(random.standard_normal(shape) * 0.2))
            for shape in ((16, 64), (64, 4))
        ]

    def named_parameters(self):
        return [(f"w{i}", w) for i, w in enumerate(self.weights)]

    def __call__(self, x):
        self.x, self.h = x, self.cupy.tanh(x @ self.weights[0].data)
        return self.h @ self.weights[1].data

    def backward(self, delta):
        self.weights[1].accumulate_grad(self.h.T @ delta)
        self.weights[0].accumulate_grad(self.x.T @ (delta @ self.weights[1].data.T * (1 - self.h**2)))


@pytest.mark.parametrize("cap", [None, 0.001])
def test_cupy_module_trains_as_on_one_rank(cap):
    def body(rank, world):
        cupy = Cupy(rank).cupy
        random = np.random.default_rng(1)
        x, y = cupy.asarray(random.standard_normal((64, 16))), cupy.asarray(random.standard_normal((64, 4)))
        nets = {"alone": Net(cupy), "ddp": Net(cupy)}
        ddp = cdist.nn.parallel.DistributedDataParallel(nets["ddp"], bucket_cap_mb=cap)
        share = slice(rank * 32, rank * 32 + 32)
        for _ in range(10):
            for name, call, rows in (("alone", nets["alone"], slice(None)), ("ddp", ddp, share)):
                net = nets[name]
                for w in net.weights:
                    w.grad = None
                out = call(x[rows])
                net.backward(2 * (out - y[rows]) / out.size)
                for w in net.weights:
                    w.data -= 0.5 * w.grad
        for mine, other in zip(nets["ddp"].weights, nets["alone"].weights, strict=True):
            np.testing.assert_allclose(
                cupy.asnumpy(mine.data), cupy.asnumpy(other.data), rtol=1e-9, atol=1e-12
            )

    gpu_run(body)


def test_jax_arrays_can_be_sent_and_their_gradients_reduced():
    jax = pytest.importorskip("jax", reason="JAX is not there")
    del jax

    def body(rank, world):
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        import jax

        found = [d for d in jax.devices() if d.platform == "gpu"]
        if len(found) < COUNT:
            return "JAX has no GPUs"
        x = jax.device_put(np.full(1000, rank + 1.0, "float32"), found[device_of(rank)])
        jax.block_until_ready(x)
        cupy = Cupy(rank).cupy  # after JAX, which changes the current GPU
        assert "read-only" in raised(lambda: cdist.all_reduce(x))[1]
        out = cupy.zeros(2000, "float32")
        cdist.all_gather_into_tensor(out, x)
        assert bool((out.reshape(2, 1000)[1] == 2).all())
        reducer = cdist.GradientReducer({"w": x})
        mean = reducer.reduce({"w": x})["w"]
        return type(mean).__name__, float(np.asarray(mean).max())

    for outcome in gpu_run(body):
        if outcome == "JAX has no GPUs":
            pytest.skip(outcome)
        assert outcome[1] == 1.5, outcome


@pytest.mark.parametrize("example", ["cupy_mlp.py", "cupy_ddp.py"])
def test_example_trains(example, tmp_path):
    script = ROOT / "examples" / example
    command = [sys.executable, "-m", "cdist.run", "--nproc-per-node", "2", str(script)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if "loss" in line]
    assert len(losses) == 4, done.stdout
    assert losses[-1] < losses[0], done.stdout
