"""Our own rules that no formatter checks."""

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
C_FILES = sorted((ROOT / "csrc").glob("*/*.[ch]"))
PY_FILES = sorted((ROOT / "python").rglob("*.py"))
TEST_FILES = sorted((ROOT / "tests").rglob("*.py"))


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


def _longer_than_the_test(text, default):
    """List the lines with a `timeout=` as long as that of the whole test: a mark, or the default."""
    tree = ast.parse(text)
    assigned = {
        ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)
    }
    constants = {name: node.value for name, node in assigned.items() if isinstance(node, ast.Constant)}

    def value(node):
        """Return the number that an expression of literals and the module's constants is, otherwise 0."""
        try:
            number = eval(compile(ast.Expression(node), "timeout", "eval"), {"__builtins__": {}}, constants)
        except (NameError, AttributeError, TypeError):
            return 0
        return number if isinstance(number, int | float) else 0

    def marked(*nodes):
        """Return the timeout of the first pytest.mark.timeout(…) among expressions, otherwise 0."""
        calls = (node for top in nodes for node in ast.walk(top) if isinstance(node, ast.Call))
        return next((value(c.args[0]) for c in calls if ast.unparse(c.func) == "pytest.mark.timeout"), 0)

    of_file = marked(assigned["pytestmark"]) if "pytestmark" in assigned else 0
    late = []
    for top in tree.body:
        limit = marked(*getattr(top, "decorator_list", [])) or of_file or default
        for node in ast.walk(top):
            if isinstance(node, ast.keyword) and node.arg == "timeout" and value(node.value) >= limit:
                late.append(node.lineno)
    return late


LIMIT = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["timeout"]


@pytest.mark.parametrize("path", TEST_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_limit_lies_below_that_of_the_whole_test(path):
    """Else a slow machine is told of a hang, and a hang is not told by whoever knows the ranks at fault."""
    assert not _longer_than_the_test(path.read_text(), LIMIT)


def test_the_check_of_limits_finds_them():
    late = """
import pytest
LIMIT = 150
@pytest.mark.timeout(300)
def test_marked():
    run(body, 2, timeout=2 * LIMIT)
    run(body, 2, timeout=299)
def test_default():
    run(body, 2, timeout=LIMIT)
    run(body, 2, timeout=99)
    run(body, 2, timeout=unknown)
"""
    assert _longer_than_the_test(late, 100) == [6, 9]
    assert _longer_than_the_test(late + "pytestmark = [pytest.mark.timeout(2 * LIMIT)]\n", 100) == [6]


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
