"""The examples without torch, and the README's: they run, train, and give the same for every world size."""

import os
import re
import subprocess
import sys
from pathlib import Path

import cdist
import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.timeout(300)


def run(ranks, script, *arguments, folder=None):
    """What a script prints under cdistrun; nothing may come on stderr."""
    environ = os.environ | {"PYTHONPATH": str(Path(cdist.__file__).parent.parent), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "cdist.run", "--nproc-per-node", str(ranks), str(script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environ, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def curve(text):
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", text)]


@pytest.mark.parametrize(("package", "worlds", "limit"), [("jax", (2,), 1e-6), ("autograd", (2, 3), 1e-9)])
def test_a_framework_trains_alike_on_every_world_size(package, worlds, limit):
    pytest.importorskip(package, reason=f"{package} comes with EXTRAS in .ci/run")
    script = ROOT / "examples" / f"{package}_mlp.py"
    texts = [run(ranks, script) for ranks in (1, *worlds)]
    assert len(curve(texts[0])) >= 15
    for text in texts:
        np.testing.assert_allclose(curve(text), curve(texts[0]), rtol=0, atol=limit)
        assert float(re.search(r"test accuracy: ([\d.]+)%", text)[1]) >= 97


def test_cupy_example_runs_on_numpy_too():
    losses = curve(run(2, ROOT / "examples/cupy_mlp.py"))
    assert len(losses) == 4
    assert losses[-1] < losses[0] / 2


def readme_scripts():
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("number", range(len(readme_scripts())))
def test_readme_script(number, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(readme_scripts()[number])
    expected = re.findall(r"# prints (.*)", script.read_text())
    assert sorted(set(run(2, script, folder=tmp_path).splitlines())) == sorted(expected)


def test_readme_names_every_example():
    text = (ROOT / "README.md").read_text()
    named = set(re.findall(r"examples/([\w/]+\.py)", text))
    named |= {f"torch/{name}" for name in re.findall(r"^\| `(\w+\.py)`", text, re.MULTILINE)}
    there = {str(path.relative_to(ROOT / "examples")) for path in (ROOT / "examples").rglob("*.py")}
    assert named == there
