"""The examples without torch and the scripts of the pages: they run, train, alike for every world size."""

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


@pytest.mark.parametrize("name", ["cupy_mlp.py", "cupy_ddp.py"])
def test_cupy_example_runs_on_numpy_too(name):
    losses = curve(run(2, ROOT / "examples" / name))
    assert len(losses) == 4
    assert losses[-1] < losses[0] / 2


PAGES = ("README.md", "docs/data-parallel.md", "docs/launching.md")
SCRIPTS = {
    f"{Path(page).stem}-{number}": text
    for page in PAGES
    for number, text in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL))
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_of_a_page_prints_what_it_says(name, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPTS[name])
    expected = re.findall(r"# prints (.*)", script.read_text())
    launched = "mp.spawn" not in SCRIPTS[name]
    assert sorted(set(run(2 if launched else 1, script, folder=tmp_path).splitlines())) == sorted(expected)


def test_readme_names_every_example():
    text = (ROOT / "README.md").read_text()
    named = set(re.findall(r"examples/([\w/]+\.py)", text))
    named |= {f"torch/{name}" for name in re.findall(r"^\| `(\w+\.py)`", text, re.MULTILINE)}
    there = {str(path.relative_to(ROOT / "examples")) for path in (ROOT / "examples").rglob("*.py")}
    assert named == there


@pytest.mark.parametrize(
    "page", [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"], ids=lambda path: path.name
)
def test_links_of_a_page_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        path, _, heading = target.partition("#")
        text = (page.parent / path).read_text()
        slugs = re.sub(r"[^\w\- \n#]", "", text.lower())
        assert not heading or f"# {heading.replace('-', ' ')}\n" in slugs, target
