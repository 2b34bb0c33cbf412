"""Our own rules that no formatter checks."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
C_FILES = sorted((ROOT / "csrc").glob("*/*.[ch]"))
PY_FILES = sorted((ROOT / "python").rglob("*.py"))


@pytest.mark.parametrize("path", C_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_c_file(path):
    text = path.read_text()
    lines = text.splitlines()
    assert len(lines) <= 600, "split by object"
    too_long = [number for number, line in enumerate(lines, 1) if len(line) > 130]
    assert not too_long, f"lines too long: {too_long}"
    assert "\t" not in text
    assert not re.search(r"\b(TODO|FIXME|XXX|HACK)\b", text)
    if path.suffix == ".h" and not path.stem.endswith("_body"):  # a body is included several times
        guard = "CD_" + "_".join(path.relative_to(ROOT / "csrc").with_suffix("").parts).upper() + "_H"
        assert f"#ifndef {guard}\n#define {guard}\n" in text


@pytest.mark.parametrize("path", C_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_core_never_exits_or_prints(path):
    text = path.read_text()
    calls = re.findall(r"(?<![\w.>])(exit|_exit|abort|printf|puts|putchar)\s*\(", text)
    assert not calls


@pytest.mark.parametrize("path", PY_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_file(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 600, "split by object"
    assert not re.search(r"\b(TODO|FIXME|XXX|HACK)\b", text)


HAS_RUFF = importlib.util.find_spec("ruff") is not None


@pytest.mark.skipif(not HAS_RUFF, reason="ruff is not installed; the test extra has it")
@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=["check", "format"])
def test_ruff(command):
    places = ["python", "tests", "benchmarks", "examples", "setup.py"]
    line = [sys.executable, "-m", "ruff", *command, "--no-cache", *places]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_generated_is_tracked():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a git checkout (an sdist)")
    made = (".so", ".o", ".pyc", ".fatbin", ".ptx")
    assert not [name for name in tracked.stdout.split() if name.endswith(made)]
