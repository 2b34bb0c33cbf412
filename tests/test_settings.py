"""The README's table of settings is the code's, and the code reads no setting that is not in it."""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import cdist.settings

ROOT = Path(__file__).parent.parent


def test_readme_table():
    text = (ROOT / "README.md").read_text()
    assert cdist.settings.table() in text


def test_every_setting_that_is_read_has_a_row():
    known = {name for name, _, _ in cdist._core.settings()}
    read = set()
    for path in [*(ROOT / "csrc").rglob("*.[ch]"), *(ROOT / "python").rglob("*.py")]:
        read |= set(re.findall(r'"(CDIST_[A-Z_]*[A-Z])"', path.read_text()))
    assert read <= known


BAD = [
    ("CDIST_LOG=loud", "CDIST_LOG='loud': 'loud' is none of error, warn, info, debug, plan"),
    ("CDIST_LOG=info, nett", "'nett' is none of"),
    ("CDIST_TRANSPORT=rdma", "CDIST_TRANSPORT='rdma' is none of auto, tcp"),
    ("CDIST_SIMD=sse9", "CDIST_SIMD='sse9' is none of auto, scalar, avx2"),
    ("CDIST_SINGLE_COPY=yes", "CDIST_SINGLE_COPY='yes' is none of auto, always, never"),
    ("CDIST_ARENA_BYTES=lots", "CDIST_ARENA_BYTES='lots' is not auto or a whole number from 0 to"),
    ("CDIST_ARENA_BYTES=99999G", "is not auto or a whole number from 0 to"),
    ("CDIST_REDUCER=fast", "CDIST_REDUCER='fast' is none of auto, inline, worker"),
    ("CDIST_PORT_RANGE=200-100", "CDIST_PORT_RANGE='200-100' is not a range such as 20000-20100"),
    ("CDIST_PORT_RANGE=20000-20100x", "is not a range such as"),
    ("CDIST_JOB_SECRET=xyz", "CDIST_JOB_SECRET must be 64 hexadecimal digits"),
    ("CDIST_STALL_SECONDS=1.5", "CDIST_STALL_SECONDS='1.5' is not a whole number from 0 to"),
    ("CDIST_DEBUG=MAYBE", "CDIST_DEBUG='MAYBE' is none of OFF, INFO, DETAIL"),
    ("TORCH_DISTRIBUTED_DEBUG=MAYBE", "TORCH_DISTRIBUTED_DEBUG='MAYBE' is none of OFF, INFO, DETAIL"),
]
FINE = ["CDIST_LOG=DEBUG Plan,net", "CDIST_TRANSPORT=TCP", "CDIST_SIMD=scalar", "CDIST_ARENA_BYTES=AUTO"]
FINE += ["CDIST_ARENA_BYTES=64m", "CDIST_REDUCER=Inline", "CDIST_STALL_SECONDS=0", "CDIST_DEBUG=detail"]
ALONE = """
import cdist
cdist.init_process_group(store=cdist.HashStore(), rank=0, world_size=1)
"""
THREADS = """
import numpy
from cdist.testing import run_threads
run_threads(lambda group: cdist.all_reduce(numpy.ones(9), group=group))
"""
IN_TURN = """
import os, sys
import cdist
for setting in sys.argv[1:]:
    name, _, value = setting.partition("=")
    os.environ[name] = value
    try:
        cdist.init_process_group(store=cdist.HashStore(), rank=0, world_size=1)
        cdist.destroy_process_group()
        print("fine")
    except ValueError as error:
        print(error)
    del os.environ[name]
"""


def _run(script, *settings, **environment):
    env = {k: v for k, v in os.environ.items() if not k.startswith("CDIST_")}
    env |= {"PYTHONPATH": str(Path(cdist.__file__).parent.parent)} | environment
    command = [sys.executable, "-c", script, *settings]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


def test_a_wrong_value_is_refused_before_anybody_is_met():
    done = _run(IN_TURN, *FINE, *(setting for setting, _ in BAD))
    lines = done.stdout.splitlines()
    assert lines[: len(FINE)] == ["fine"] * len(FINE), done.stderr
    for (setting, text), line in zip(BAD, lines[len(FINE) :], strict=True):
        assert text in line, setting


def test_a_wrong_plan_is_refused():
    done = _run(ALONE, CDIST_PLAN="all_reduce:0-64K:nonsense")
    assert 'ValueError: CDIST_PLAN: "all_reduce:0-64K:nonsense" is not kind:' in done.stderr


def test_a_wrong_name_is_told_once():
    done = _run(ALONE, CDIST_LOGG="info", CDIST_PORTS="1-2", CDIST_WERROR="1", CDIST_STALL_SECONDS="9")
    assert done.returncode == 0
    assert re.findall(r"warn: (.*) \(", done.stderr) == [
        "no setting of cdist, without effect: CDIST_LOGG, CDIST_PORTS"
    ], done.stderr


def test_kernels_that_this_machine_lacks_are_passed_over_with_a_word():
    lacking = "avx2" if platform.machine() == "aarch64" else "neon"
    done = _run(ALONE + THREADS, CDIST_SIMD=lacking)
    assert done.stderr.count(f"CDIST_SIMD={lacking}: this build or processor has no such kernels") == 1
    assert done.returncode == 0
