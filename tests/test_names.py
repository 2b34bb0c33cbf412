"""Our public names against torch's: each is there, or docs/torch-names.md says why not."""

import importlib
import importlib.util
import inspect
import os
import pkgutil
import pty
import re
import select
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import cdist
import numpy as np
import pytest
from cdist.launch.record import read_error
from cdist.testing import run

ROOT = Path(__file__).parent.parent
PYTHON = str(Path(cdist.__file__).parent.parent)
ENVIRON = {"PYTHONPATH": PYTHON, "PATH": os.environ["PATH"]}


def documented():
    """Names by section of docs/torch-names.md, each with its reason."""
    sections, rows = {}, None
    for line in (ROOT / "docs/torch-names.md").read_text().splitlines():
        if line.startswith("#"):
            rows = sections.setdefault(line.lstrip("# "), {})
        elif match := re.fullmatch(r"\| `([\w.]+)` \| (.+) \|", line):
            rows[match[1]] = match[2]
    return sections


def public(module):
    names = getattr(module, "__all__", None)
    if names is not None:
        return set(names)
    return {name for name in dir(module) if not name.startswith("_")}


def from_elsewhere(value):
    """Things that a module merely imported."""
    if isinstance(value, types.ModuleType):
        return not value.__name__.startswith("torch.distributed")
    return getattr(value, "__module__", None) in ("datetime", "typing")


def compare(theirs, ours, section):
    reasons = documented().get(section, {})
    missing = {name for name in theirs if not hasattr(ours, name)}
    assert not missing - set(reasons), "neither there nor explained in docs/torch-names.md"
    there = {name for name in reasons if hasattr(ours, name)}
    assert not there, "explained as missing, and there"


def test_torch_distributed():
    torch_distributed = pytest.importorskip("torch.distributed", reason="torch comes with EXTRAS in .ci/run")
    c10d = torch_distributed.distributed_c10d
    # Submodules that other tests imported are attributes by now: a fresh process is asked what a plain import
    # gives.
    code = "import torch.distributed as d; print(*dir(d))"
    fresh = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = set(c10d.__all__) | {
        name
        for name in public(torch_distributed) & set(fresh.stdout.split())
        if not from_elsewhere(getattr(torch_distributed, name)) and name not in ("logging", "log")
    }
    assert len(names) > 100
    compare(names, cdist, "torch.distributed")


CLASSES = ["Backend", "BackendConfig", "ProcessGroup", "Work", "ReduceOp", "P2POp", "Store", "TCPStore"]


@pytest.mark.parametrize("name", CLASSES)
def test_methods(name):
    torch_distributed = pytest.importorskip("torch.distributed", reason="torch comes with EXTRAS in .ci/run")
    theirs = {method for method in public(getattr(torch_distributed, name)) if not method.startswith("_")}
    compare(theirs, getattr(cdist, name), name)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("torch.nn.parallel", "cdist.nn.parallel"),
        ("torch.multiprocessing", "cdist.multiprocessing"),
        ("torch.utils.data.distributed", "cdist.utils.data.distributed"),
        (
            "torch.distributed.algorithms.model_averaging.averagers",
            "cdist.algorithms.model_averaging.averagers",
        ),
        ("torch.distributed.algorithms.model_averaging.utils", "cdist.algorithms.model_averaging.utils"),
        ("torch.distributed.algorithms.join", "cdist.algorithms.join"),
        ("torch.distributed.optim", "cdist.optim"),
        ("torch.distributed.elastic.multiprocessing.errors", "cdist.elastic.multiprocessing.errors"),
    ],
)
def test_module(theirs, ours):
    pytest.importorskip("torch", reason="torch comes with EXTRAS in .ci/run")
    compare(public(importlib.import_module(theirs)), importlib.import_module(ours), theirs)


def test_attributes_of_ddp():
    torch = pytest.importorskip("torch", reason="torch comes with EXTRAS in .ci/run")
    pytest.importorskip("torch.distributed", reason="torch comes with EXTRAS in .ci/run")

    def body(rank, world):
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
        classes = torch.nn.parallel.DistributedDataParallel, cdist.DistributedDataParallel
        return [dir(ddp(torch.nn.Linear(2, 2))) for ddp in classes]

    theirs, ours = run(body, 1)[0]
    missing = {name for name in theirs if not name.startswith("_")} - set(ours)
    assert missing == set(documented()["DistributedDataParallel"])


def test_modules_of_torch_distributed():
    torch_distributed = pytest.importorskip("torch.distributed", reason="torch comes with EXTRAS in .ci/run")
    theirs = {module.name for module in pkgutil.iter_modules(torch_distributed.__path__)}
    ours = {module.name for module in pkgutil.iter_modules(cdist.__path__)}
    reasons = documented()["modules of torch.distributed"]
    assert {name for name in theirs if not name.startswith("_")} - ours == set(reasons)


def test_modules_inside_of_torch_distributed():
    """Each import path is there, or docs/torch-names.md says why not and what to do."""
    pytest.importorskip("torch.distributed", reason="torch comes with EXTRAS in .ci/run")
    reasons = documented()["modules further inside of torch.distributed"]
    outside = documented()["modules of torch.distributed"]
    explained, there, missing = set(), set(), set()
    for module in pkgutil.iter_modules(importlib.import_module("torch.distributed").__path__):
        if not module.ispkg or module.name.startswith("_") or module.name in outside:
            continue
        package = importlib.import_module(f"torch.distributed.{module.name}")
        for inner in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            path = inner.name.split(".")[2:]
            heads = {".".join(path[:end]) for end in range(len(path) + 1)} & set(reasons)
            explained |= heads
            if any(part.startswith("_") for part in path):
                continue
            try:
                found = importlib.util.find_spec(".".join(["cdist", *path])) is not None
            except ModuleNotFoundError:
                found = False
            (there if found else set()).update(heads)
            if not found and not heads:
                missing.add(".".join(path))
    assert not missing
    assert not there, "explained as missing, and there"
    assert explained == set(reasons)


def _own(cls):
    """Public names that this package, and not Python, gives a class."""
    bases = [base for base in cls.__mro__ if base.__module__.startswith("cdist")]
    return {name for base in bases for name in vars(base) if not name.startswith("_")}


def test_every_public_name_is_documented():
    """A docstring for whatever can be called or read, and a signature for what can be called."""
    undocumented, unsigned = [], []
    for name in cdist.__all__:
        value = getattr(cdist, name)
        if not callable(value):
            continue
        things = {name: value}
        if inspect.isclass(value):
            things |= {f"{name}.{member}": inspect.getattr_static(value, member) for member in _own(value)}
        for path, thing in things.items():
            thing = getattr(thing, "__func__", thing)
            if not callable(thing) and not isinstance(thing, property):
                continue
            if not inspect.getdoc(thing):
                undocumented.append(path)
            try:
                inspect.signature(thing) if callable(thing) else None
            except ValueError:
                unsigned.append(path)
    assert not undocumented
    assert set(unsigned) <= {"GroupName", "Store"}  # a str; a base that nobody makes


def test_parameters_of_functions():
    """Whatever torch's functions can be called with, ours can: names in the same order, ours after them."""
    torch_distributed = pytest.importorskip("torch.distributed", reason="torch comes with EXTRAS in .ci/run")
    compared, wrong = 0, {}
    for name in set(cdist.__all__):
        theirs, ours = getattr(torch_distributed, name, None), getattr(cdist, name)
        if not inspect.isfunction(inspect.unwrap(theirs)) or not callable(ours) or inspect.isclass(ours):
            continue
        parameters = inspect.signature(theirs).parameters.values()
        expected = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        got = list(inspect.signature(ours).parameters)
        compared += 1
        if got[: len(expected)] != expected:
            wrong[name] = (expected, got)
    assert compared > 50
    assert not wrong


def test_flags_of_torchrun():
    """Each is there, or docs/launching.md says that it is not."""
    theirs = pytest.importorskip("torch.distributed.run").get_args_parser()
    from cdist.launch.options import _parser

    ours = {name for action in _parser()._actions for name in action.option_strings}
    page = (ROOT / "docs" / "launching.md").read_text()
    absent = set(re.findall(r"`(--[a-z-]+)`", page.split("but for ")[1].split(":")[0]))
    names = {name.replace("_", "-") for action in theirs._actions for name in action.option_strings}
    assert names - ours == absent


def test_every_name_can_be_had():
    for name in sorted({*cdist.__all__, *dir(cdist)}):
        getattr(cdist, name)
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        cdist.no_such_name  # noqa: B018


IMPORTS = re.findall(r"\| `((?:import|from) cdist[^`]*)`", (ROOT / "docs/torch-names.md").read_text())


@pytest.mark.parametrize("line", IMPORTS)
def test_import_lines_of_the_page(line):
    done = subprocess.run([sys.executable, "-c", line], env=ENVIRON,
                          capture_output=True, text=True, timeout=30)  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def gather_all(rank, world):
    results = []
    for shape in [(world * 3,), (world, 3)]:
        output = np.zeros(shape) if rank == 1 else None
        cdist.gather_into_tensor(np.full(3, rank + 1.0), output, dst=1)
        results.append(None if output is None else output.tolist())
    output = np.zeros(world) if rank == 0 else None
    cdist.gather_single(np.array(rank + 1.0), output)
    results.append(None if output is None else output.tolist())
    with pytest.raises(ValueError, match=r"do not fit gather_tensor of shape \(5,\)"):
        cdist.gather_into_tensor(np.zeros(3), np.zeros(5), dst=rank)
    with pytest.raises(ValueError):
        cdist.gather_into_tensor(np.zeros(3), np.zeros(3 * world), dst=(rank + 1) % world)
    with pytest.raises(ValueError):
        cdist.gather_into_tensor(np.zeros(3), dst=rank)
    return results


def test_gather_into_tensor():
    first, second, third = cdist.testing.run(gather_all, 3)
    assert first == [None, None, [1, 2, 3]]
    assert second == [[1] * 3 + [2] * 3 + [3] * 3, [[1] * 3, [2] * 3, [3] * 3], None]
    assert third == [None] * 3


def low_level(rank, world):
    group = cdist.group.WORLD
    x, y = np.full(2, rank + 1.0), np.full(3, rank + 2.0)
    group.allreduce_coalesced([x, y], cdist.AllreduceCoalescedOptions(reduceOp=cdist.ReduceOp.MAX)).wait()
    part = group.split_group([0, 1]) if rank < 2 else None
    z = np.ones(1)
    if part is not None:
        part.allreduce(z).wait()
    with cdist.record_comm("label"):
        cdist.barrier()
    return x.tolist(), y.tolist(), z.item(), group.boxed() is group


def test_low_level_names():
    outcomes = cdist.testing.run(low_level, 3)
    assert outcomes == [([3, 3], [4] * 3, 2 if rank < 2 else 1, True) for rank in range(3)]


def late(rank, world):
    store = cdist.group.WORLD.get_group_store()
    if rank == 1:
        store.get("over")
        return None
    with pytest.raises(cdist.DistError) as caught:
        cdist.monitored_barrier(timeout=0.4)
    store.set("over", "")
    return str(caught.value)


def test_monitored_barrier_names_the_time():
    text = cdist.testing.run(late, 2)[0]
    assert "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 400 ms" in text


PROGRAM = """
import os, time
import numpy as np
import cdist as dist
dist.init_process_group()
x = np.full(1, dist.get_rank() + 1.0)
{body}
dist.all_reduce(x)
print("rank", dist.get_rank(), "has", x.item(), flush=True)
dist.destroy_process_group()
"""


def in_terminal(argv, environ, answer, limit=40):
    """Run a command in a pseudo-terminal and type `answer(text)` when it gives one.

    Returns what was printed and the exit code.
    """
    pid, master = pty.fork()
    if pid == 0:
        os.environ.update(environ)
        os.execv(argv[0], argv)
    text, end, code = "", time.monotonic() + limit, None
    try:
        while time.monotonic() < end:
            if select.select([master], [], [], 0.1)[0]:
                try:
                    piece = os.read(master, 4096)
                except OSError:
                    break
                if not piece:
                    break
                text += piece.decode()
            typed = answer(text)
            if typed:
                os.write(master, typed.encode())
        else:
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        os.close(master)
    return text, code


def test_breakpoint_waits_for_the_user(tmp_path):
    """K134: the worker has no terminal of its own; three seconds in the debugger end no one-second wait."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(body="dist.set_timeout(1)\ndist.breakpoint(rank=1)"))
    seen = []

    def answer(text):
        if "(Pdb)" in text and not seen:
            seen.append(time.monotonic())
        if len(seen) == 1 and time.monotonic() > seen[0] + 3:
            seen.append(None)
            return "p x[0] + 40\nc\n"
        return None

    argv = [sys.executable, "-m", "cdist.run", "--nproc-per-node", "2", str(program)]
    text, code = in_terminal(argv, ENVIRON, answer)
    assert code == 0, text
    assert "42.0" in text
    assert "rank 0 has 3.0" in text
    assert "rank 1 has 3.0" in text


def test_pending_operation_at_exit_gives_one_line(tmp_path):
    """K95: exit code 0, and who forgot the wait is told."""
    program = tmp_path / "program.py"
    body = """
if dist.get_rank() == 0:
    work = dist.all_reduce(x, async_op=True)
else:
    try:
        dist.recv(x, 0, timeout=20)  # until rank 0 has left
    except dist.PeerLostError:
        pass
raise SystemExit"""
    program.write_text(PROGRAM.format(body=body))
    server = cdist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    environ = {**ENVIRON, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
               "MASTER_PORT": str(server.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}  # fmt: skip
    command = [sys.executable, str(program)]
    ranks = [
        subprocess.Popen(command, env={**environ, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    outcomes = [(process.communicate(timeout=30)[1], process.returncode) for process in ranks]
    assert [code for _, code in outcomes] == [0, 0]
    assert outcomes[1][0] == ""
    assert outcomes[0][0].splitlines() == [
        "[rank0]: cdist: 1 asynchronous operation(s) were not complete when the program ended, and were "
        "aborted: call wait() on each Work"
    ]


def test_uncaught_exception_reaches_the_launcher_without_record(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(body="raise KeyError('no such layer')"))
    path = tmp_path / "error.json"
    environ = {**ENVIRON, "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
               "TORCHELASTIC_ERROR_FILE": str(path)}  # fmt: skip
    command = [sys.executable, str(program)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert "[rank0]: KeyError: 'no such layer'" in done.stderr
    when, text = read_error(path)
    assert abs(when - time.time()) < 60
    assert "KeyError: 'no such layer'" in text
    assert f'File "{program}"' in text


@pytest.mark.parametrize(
    "path",
    [
        "nn.parallel.DistributedDataParallel",
        "utils.data.DistributedSampler",
        "utils.data.distributed.DistributedSampler",
        "elastic.multiprocessing.errors.record",
        "launch.record",
        "algorithms.join.Join",
        "nn.SyncBatchNorm",
    ],
)
def test_paths_of_attributes(path):
    # In a fresh process: a module that was imported is an attribute of its package.
    code = f"import cdist; value = cdist.{path}; assert callable(value)"
    fresh = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRON)
    assert fresh.returncode == 0, fresh.stderr


def _module_behind(rank, world):
    c10d = cdist.distributed_c10d
    assert set(cdist.__all__) <= set(dir(c10d))
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        c10d._get_default_group()
    with pytest.raises(AttributeError, match="torch-names"):
        c10d._new_process_group_helper  # noqa: B018
    cdist.init_process_group("gloo", store=cdist.HashStore(), rank=0, world_size=1)
    mine = c10d._get_default_group()
    assert mine is cdist.group.WORLD
    assert c10d._get_default_store() is mine.get_group_store()
    assert c10d._get_default_timeout("nccl") < c10d._get_default_timeout("gloo") == c10d.default_pg_timeout
    assert (c10d._get_group_size(None), c10d._get_global_rank(mine, 0)) == (1, 0)
    assert c10d._rank_not_in_group(cdist.GroupMember.NON_GROUP_MEMBER)
    assert not c10d._rank_not_in_group(None)
    return c10d._get_object_coll_device(), str(c10d._get_pg_default_device(mine))


def test_the_module_behind_the_names():
    """Utilities in the manner of detectron2 and others name it, and some of its private functions."""
    pytest.importorskip("torch", reason="torch comes with EXTRAS in .ci/run")
    assert run(_module_behind, 1, init=False) == [("cpu", "cpu")]


MIXED = """
import sys
import cdist as dist
import torch.distributed
if sys.argv[1] == "ours":
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
else:
    torch.distributed.init_process_group(store=torch.distributed.HashStore(), rank=0, world_size=1)
if sys.argv[2] == "ddp":
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
elif sys.argv[2] == "sampler":
    from torch.utils.data.distributed import DistributedSampler
    DistributedSampler(range(4))
elif sys.argv[2] == "rank":
    print(dist.get_rank())
"""


@pytest.mark.parametrize(
    ("group", "call", "words"),
    [
        (
            "ours",
            "ddp",
            "The process group of this program is cdist's, and this call is torch's: import it from cdist",
        ),
        (
            "ours",
            "sampler",
            "The process group of this program is cdist's, and this call is torch's: import it from cdist",
        ),
        ("torch", "rank", "(torch.distributed has one, cdist has not: import cdist as dist)"),
    ],
)
def test_a_forgotten_import_is_said(group, call, words):
    pytest.importorskip("torch", reason="torch comes with EXTRAS in .ci/run")
    result = subprocess.run(
        [sys.executable, "-c", MIXED, group, call],
        capture_output=True,
        text=True,
        env=ENVIRON | {"OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 1
    assert words in result.stderr.splitlines()[-1], result.stderr


def test_groups_are_told_apart():
    def names(rank, world):
        return [
            repr(cdist.group.WORLD),
            repr(cdist.new_group([0])),
            repr(cdist.new_group([0], group_desc="mine")),
        ]

    (shown,) = cdist.testing.run(names, 1)
    assert [text.partition(":")[0] for text in shown] == [
        "<ProcessGroup default_pg",
        "<ProcessGroup 1",
        "<ProcessGroup mine",
    ]
