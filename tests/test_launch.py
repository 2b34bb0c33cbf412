"""cdistrun: environment, output, failures, signals, several nodes, and that nothing is left."""

import inspect
import json
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
import types
import uuid
from pathlib import Path

import pytest
from cdist import TCPStore
from cdist.launch import agent, interrupts, logs, nodes, options
from cdist.launch.binding import core_sets, parse_cores
from cdist.launch.exits import MemoryWatch
from cdist.launch.record import read_error, record
from processes import is_alive, marked

LIMIT = 30  # seconds; only a hang takes as long
PER_NODE = "--nproc-per-node"


HEAD = """\
import os, signal, subprocess, sys, time
from pathlib import Path

rank = int(os.environ["RANK"])
folder = Path(__file__).parent

def touch(name):
    (folder / name).touch()

def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.01)

"""
HEAD += inspect.getsource(is_alive) + "\n"


class Launcher:
    """Starts cdistrun on small scripts; its processes carry a mark, its temporary files lie in one folder."""

    def __init__(self, folder):
        self.folder = folder
        self.mark = f"CDIST_TEST_MARK={uuid.uuid4()}"
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        self.started = []

    def script(self, body, name="worker.py"):
        path = self.folder / name
        path.write_text(HEAD + textwrap.dedent(body))
        return path

    def start(self, *arguments, env=None, **kw):
        variables = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "CDIST_JOB_SECRET")}
        paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        variables |= dict([self.mark.split("=")], TMPDIR=str(self.temporary))
        variables |= {"PYTHONPATH": os.pathsep.join(paths)} | (env or {})
        kw = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | kw
        command = [sys.executable, "-m", "cdist.run", *map(str, arguments)]
        process = subprocess.Popen(command, env=variables, text=True, start_new_session=True, **kw)
        self.started.append(process)
        return process

    def finish(self, process):
        out, err = process.communicate(timeout=LIMIT)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def run(self, *arguments, **kw):
        return self.finish(self.start(*arguments, **kw))

    def wait_for(self, *names):
        end = time.monotonic() + LIMIT
        while not all((self.folder / name).exists() for name in names):
            assert time.monotonic() < end, f"{names} did not come"
            time.sleep(0.01)

    def marked(self):
        return marked(self.mark)

    def assert_nothing_left(self):
        end = time.monotonic() + 10
        while (self.marked() or any(self.temporary.iterdir())) and time.monotonic() < end:
            time.sleep(0.02)
        assert not self.marked()
        assert not list(self.temporary.iterdir())


@pytest.fixture
def launcher(tmp_path):
    launcher = Launcher(tmp_path)
    yield launcher
    for process in launcher.started:
        if process.poll() is None:
            process.kill()
            process.communicate()
    launcher.assert_nothing_left()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_closed_standard_descriptors(launcher, closed):
    script = launcher.script("""
        import cdist, numpy as np
        from cdist import multiprocessing as mp

        def child(index):
            assert os.fstat(0) and os.fstat(1) and os.fstat(2)
            touch(f"child{index}.{os.getpid()}")

        if __name__ == "__main__":
            cdist.init_process_group()
            x = np.ones(1)
            cdist.all_reduce(x)
            print("to stdout")
            print("to stderr", file=sys.stderr)
            if rank == 0:
                mp.spawn(child, nprocs=2)
            cdist.destroy_process_group()
            touch(f"ended{rank}")
        """)
    launched = launcher.start(
        PER_NODE, 2, script, stdout=None, stderr=None, preexec_fn=lambda: [os.close(fd) for fd in closed]
    )
    assert launched.wait(LIMIT) == 0
    launcher.wait_for("ended0", "ended1")
    assert len(list(launcher.folder.glob("child*"))) == 2


# -- environment and command


def test_environment(launcher):
    script = launcher.script("import json\nprint(json.dumps(dict(os.environ)))")
    result = launcher.run(PER_NODE, 2, "--max-restarts", 3, "--role", "actor", script)
    assert result.returncode == 0, result.stderr
    envs = sorted((json.loads(line) for line in result.stdout.splitlines()), key=lambda env: env["RANK"])
    assert len(envs) == 2
    cores = len(os.sched_getaffinity(0))
    for rank, env in enumerate(envs):
        expected = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": 2,
            "LOCAL_WORLD_SIZE": 2,
            "GROUP_RANK": 0,
            "GROUP_WORLD_SIZE": 1,
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": 2,
            "ROLE_NAME": "actor",
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 3,
            "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": 1,
            "OMP_NUM_THREADS": max(1, cores // 2),
        }
        assert {name: env[name] for name in expected} == {name: str(v) for name, v in expected.items()}
        assert env["TORCHELASTIC_ERROR_FILE"].endswith(f"attempt_0/{rank}/error.json")
        assert re.fullmatch("[0-9a-f]{64}", env["CDIST_JOB_SECRET"])
    for name in ("MASTER_PORT", "CDIST_JOB_SECRET"):
        assert envs[0][name] == envs[1][name]
    assert int(envs[0]["MASTER_PORT"]) > 0


def test_the_users_variables_win(launcher):
    script = launcher.script("""
        print(*(os.environ[name] for name in ["OMP_NUM_THREADS", "CDIST_JOB_SECRET", "CDIST_SOCKET_IFNAME"]))
        """)
    env = {"OMP_NUM_THREADS": "7", "CDIST_JOB_SECRET": "ab" * 32}
    result = launcher.run(PER_NODE, 2, "--local-addr", "10.0.0.7", script, env=env)
    assert result.stdout.splitlines() == [f"7 {'ab' * 32} 10.0.0.7/32"] * 2  # K169


def test_ways_to_start(launcher):
    script = launcher.script("print(Path(sys.argv[0]).name, __name__, *sys.argv[1:])")
    plain = launcher.run("--nproc_per_node=2", script, PER_NODE, "9", "x${local_rank}")
    lines = sorted(plain.stdout.splitlines())
    assert lines == ["worker.py __main__ --nproc-per-node 9 x0", "worker.py __main__ --nproc-per-node 9 x1"]
    by_path = launcher.run("--run-path", script, "a")
    assert by_path.stdout == "worker.py __main__ a\n"
    module = launcher.run("--standalone", "-m", "worker", "b", cwd=launcher.folder)
    assert module.stdout == "worker.py __main__ b\n"
    program = launcher.run("--no-python", "/bin/echo", "rank", "${local_rank}")
    assert program.stdout == "rank 0\n"
    defaults = launcher.run(script, env={"PET_NPROC_PER_NODE": "2", "PET_RUN_PATH": "1"})
    assert defaults.stdout == "worker.py __main__\n" * 2


def test_the_launcher_of_old(launcher):
    """python -m cdist.launch: --local-rank=N comes first unless --use-env is given."""
    script = launcher.script("print(os.environ['LOCAL_RANK'], *sys.argv[1:])")

    def lines(*arguments):
        command = [sys.executable, "-m", "cdist.launch", PER_NODE, 2, *arguments]
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=60)
        return done.returncode, sorted(done.stdout.splitlines()), done.stderr

    assert lines(script, "--lr", 1) == (0, ["0 --local-rank=0 --lr 1", "1 --local-rank=1 --lr 1"], "")
    assert lines("--use-env", script, "x") == (0, ["0 x", "1 x"], "")
    assert lines("--use_env", "--no-python", "/bin/echo", "y") == (0, ["y", "y"], "")
    code, _, text = lines("--no-python", "/bin/echo")
    assert (code, text) == (2, "cdistrun: --no-python needs --use-env: a program is not given --local-rank\n")
    with pytest.raises(options.OptionError, match="unrecognized arguments: --use-env"):
        options.parse(["--use-env", "s"])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--nproc-per-node", "x", "s"], "Unsupported nproc_per_node value: x"),
        (["--nproc-per-node", "0", "s"], "Unsupported nproc_per_node value: 0"),
        (["--nproc-per-node", "xpu", "s"], "Unsupported nproc_per_node value: xpu"),
        (["--nnodes", "1:4", "s"], "changing number of nodes"),
        (["--nnodes", "0", "s"], "positive number"),
        (["--nnodes", "2", "--node-rank", "2", "s"], "--node-rank should be 0 to 1, not 2"),
        (["--master-port", "65536", "s"], "0 to 65535"),
        (["--nnodes", "2", "--rdzv-backend", "c10d", "s"], "needs --rdzv-endpoint"),
        (["--rdzv-backend", "etcd", "s"], "static or c10d"),
        (["--no-python", "-m", "s"], "--no-python"),
        (["--tee", "4", "s"], "--tee should be"),
        (["--redirects", "5:1", "s"], "--redirects should be"),
        (["--signals-to-handle", "SIGKILL", "s"], "SIGKILL"),
        (["--local-ranks-filter", "a", "s"], "--local-ranks-filter"),
        (["--max-restarts", "-1", "s"], "negative"),
        (["--max-restarts", "many", "s"], "invalid int value"),
        (["--bind", "socket", "s"], "invalid choice"),
        (["--nosuch", "s"], "unrecognized arguments: --nosuch$"),
        (["--nproc-per-nod=2", "s"], "unrecognized arguments: --nproc-per-nod=2; is --nproc-per-node meant"),
        (["-np", "2", "s"], "unrecognized arguments: -np; is --nproc-per-node meant"),
        (["--local-ranks-filter", "7", "s"], "no such local rank; they are 0 to 0"),
        (["--start-method", "bogus", "s"], "--start-method"),
        (["--nproc", "2", "s"], "unrecognized arguments: --nproc; is --nproc-per-node meant"),
        ([], "the following arguments are required: script$"),
    ],
)
def test_bad_command_lines(arguments, text):
    with pytest.raises(options.OptionError, match=text):
        options.parse(arguments)


def test_a_bad_command_line_ends_with_2(launcher):
    result = launcher.run(PER_NODE, "x", "s")
    assert result.returncode == 2
    assert result.stderr.startswith("cdistrun: Unsupported nproc_per_node value: x; it should be a number, ")


def test_help_shows_every_option_once(launcher):
    text = launcher.run("--help").stdout
    names = {name for name in options._parser().options() if "_" not in name}
    assert len(names) > 25
    shown = re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, re.MULTILINE)
    assert sorted(shown) == sorted(name for name in names if name.startswith("--"))


@pytest.mark.parametrize("arguments", [[], [PER_NODE, "8"]])
def test_a_script_that_is_not_there_is_said_once(launcher, arguments):
    result = launcher.run(*arguments, "nosuch.py")
    assert result.returncode == 2
    assert result.stderr == "cdistrun: cannot open the script 'nosuch.py': there is no such file\n"


def test_folders_that_cannot_serve_are_said(launcher):
    result = launcher.run(launcher.folder)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "is a folder without a __main__.py" in result.stderr
    result = launcher.run("--log-dir", "/proc/nothing", launcher.script("pass"))
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert result.stderr.startswith("cdistrun: --log-dir /proc/nothing: cannot write there: ")


def test_a_node_0_that_is_not_there_is_said(launcher):
    where = ["--nnodes", 2, "--node-rank", 1, "--master-port", free_port(), "--rdzv-conf", "timeout=1"]
    result = launcher.run(*where, launcher.script("time.sleep(600)"))
    assert result.returncode == 1
    assert "cdistrun: on node 0: not reached: DistNetworkError: " in result.stderr
    assert "does rank 0 run?" in result.stderr


def test_a_script_that_is_not_there_ends_all_nodes(launcher):
    processes = start_nodes(launcher, launcher.folder / "nosuch.py")
    assert [launcher.finish(process).returncode for process in processes] == [2, 2]


def test_options(monkeypatch):
    parsed = options.parse([PER_NODE, "3", "--tee", "0:1,2:3", "--redirects", "2", "s", "--tee", "9"])
    assert parsed.tee == [{"stdout"}, set(), {"stdout", "stderr"}]
    assert parsed.redirects == [{"stderr"}] * 3
    assert parsed.script_args == ["--tee", "9"]
    assert (parsed.master_addr, parsed.master_port) == ("127.0.0.1", 0)
    two = options.parse(["--nnodes", "2:2", "--node-rank", "1", "--master-addr", "h", "s"])
    assert (two.nnodes, two.node_rank, two.master_addr, two.master_port) == (2, 1, "h", 29500)
    dynamic = options.parse(["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=[::1]:77", "s"])
    assert (dynamic.dynamic, dynamic.master_addr, dynamic.master_port) == (True, "::1", 77)
    assert options.parse(["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=h", "s"]).master_port == 29400
    assert options.parse(["--nproc-per-node", "cpu", "s"]).local_size == len(os.sched_getaffinity(0))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2,5")
    assert options.parse(["--nproc-per-node", "gpu", "s"]).local_size == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(options.OptionError, match="Cuda is not available"):
        options.parse(["--nproc-per-node", "gpu", "s"])
    assert options.parse(["--nproc-per-node", "auto", "s"]).local_size == len(os.sched_getaffinity(0))


def test_virtual_local_rank(launcher):
    script = launcher.script("print(rank, os.environ['LOCAL_RANK'], os.environ['CUDA_VISIBLE_DEVICES'])")
    env = {"CUDA_VISIBLE_DEVICES": "3,5"}
    result = launcher.run(PER_NODE, 2, "--virtual-local-rank", script, env=env)
    assert sorted(result.stdout.splitlines()) == ["0 0 3", "1 0 5"]


# -- cores


def test_core_sets():
    assert core_sets("none", 2) == [None, None]
    shares = core_sets("core", 2, usable={100, 101, 102, 103, 104})
    assert [len(share) for share in shares] == [2, 3]
    assert set.union(*shares) == {100, 101, 102, 103, 104}
    assert core_sets("core", 3, usable={100, 101}) == [{100}, {101}, {100}]
    assert set.union(*core_sets("numa", 2)) <= os.sched_getaffinity(0)
    assert parse_cores("0-2,8,10-11\n") == {0, 1, 2, 8, 10, 11}


def test_threads_follow_the_usable_cores(launcher):  # K169
    usable = sorted(os.sched_getaffinity(0))
    script = launcher.script("print(rank, os.environ['OMP_NUM_THREADS'], *sorted(os.sched_getaffinity(0)))")
    one = launcher.run(PER_NODE, 2, script, preexec_fn=lambda: os.sched_setaffinity(0, usable[:1]))
    assert sorted(one.stdout.splitlines()) == [f"{rank} 1 {usable[0]}" for rank in (0, 1)]
    bound = launcher.run(PER_NODE, 2, "--bind", "core", script)
    rows = [list(map(int, line.split())) for line in bound.stdout.splitlines()]
    masks = {row[0]: set(row[2:]) for row in rows}
    assert all(row[1] == len(row[2:]) for row in rows)
    assert set.union(*masks.values()) <= set(usable)
    assert len(usable) == 1 or not masks[0] & masks[1]


@pytest.mark.parametrize("package", ["cdist", "torch.distributed"])
def test_the_launchers_store_serves_the_ranks(launcher, package):
    """The secret of the job is there, and does not keep torch's clients out."""
    pytest.importorskip(package, reason="torch comes with EXTRAS in .ci/run")
    script = launcher.script("""
        import importlib
        package = importlib.import_module(sys.argv[1])
        assert len(os.environ["CDIST_JOB_SECRET"]) == 64
        store = package.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        store.set(f"{rank}", "here")
        store.wait(["0", "1"])
        print(rank)
        """)
    result = launcher.run(PER_NODE, 2, script, package)
    assert sorted(result.stdout.splitlines()) == ["0", "1"], result.stderr


# -- failures


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ("sys.exit(7)", 7, "exit code 7"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "signal SIGSEGV"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "signal SIGKILL"),
        ("raise ValueError('unwell')", 1, "exit code 1"),
    ],
)
def test_the_first_failure_ends_the_job(launcher, end, code, words):  # K131, K125
    script = launcher.script(f"if rank == 1:\n    {end}\ntime.sleep(600)")
    result = launcher.run(PER_NODE, 3, script)
    assert result.returncode == code
    report = result.stderr[result.stderr.index("cdistrun: ") :]
    first = report.splitlines()[0]
    assert re.match(r"cdistrun: rank 1 \(host \S+, local rank 1, pid \d+\) ended with " + words, first)
    assert re.search(r"after \d+\.\d s, peak memory \d+ MiB: the first failure$", first)
    assert "stopped for it: rank 0, 2\n" in report
    assert ("out of memory" in report) == (code == 137)
    if "raise" in end:
        assert "Traceback (most recent call last)" in report
        assert report.splitlines()[-1] == "ValueError: unwell"


def test_who_waits_for_a_rank_that_left_learns_it(launcher):
    """K130: an exit with 0 in the middle is no success of the job."""
    script = launcher.script("""
        import cdist
        cdist.init_process_group("gloo", timeout=60)
        cdist.barrier()
        if rank == 1:
            sys.exit(0)
        cdist.barrier()
        """)
    result = launcher.run(PER_NODE, 2, script)
    assert result.returncode == 1
    assert re.search(r"PeerLostError: .*rank 1 left the group", result.stderr), result.stderr


def test_all_ranks_resume_together_after_a_restart(launcher):
    """K136: one of three is killed; all start anew, and every one takes the one resync step."""
    script = launcher.script("""
        import cdist
        import numpy as np
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        cdist.init_process_group("gloo", timeout=60)
        behind = np.array([0 if attempt == 0 else 1 if rank == 1 else 0])
        cdist.all_reduce(behind, cdist.ReduceOp.MAX)
        syncs = 0
        step = [3 if rank != 1 else None]
        if behind[0]:
            cdist.broadcast_object_list(step, 0)
            syncs += 1
        x = np.full(5, rank + 1.0)
        cdist.all_reduce(x)
        if attempt == 0 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        cdist.barrier()
        print(attempt, rank, syncs, step[0], x[0])
        """)
    result = launcher.run(PER_NODE, 3, "--max-restarts", 1, script)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [f"1 {rank} 1 3 6.0" for rank in range(3)]


def _memory_cgroup():
    """A memory cgroup of this test's own with a limit of 400 MiB, or None where none can be made."""
    root = Path("/sys/fs/cgroup/memory")
    folder = root / f"cdist-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(400 << 20))
    except OSError:
        return None
    return folder


def test_the_out_of_memory_killer_is_named(launcher):
    """K125: a worker that the kernel kills in its memory cgroup."""
    folder = _memory_cgroup()
    if folder is None:
        pytest.skip("no memory cgroup (version 1) can be made here; test_memory_watch reads both kinds")
    script = launcher.script("if rank == 1:\n    x = bytearray(800 << 20)\ntime.sleep(600)")
    join = f'echo $$ > {folder}/cgroup.procs && exec "$@"'
    try:
        command = ["sh", "-c", join, "sh", sys.executable, "-m", "cdist.run", PER_NODE, "2", str(script)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    finally:
        end = time.monotonic() + 10
        while (folder / "cgroup.procs").read_text() and time.monotonic() < end:
            time.sleep(0.01)
        folder.rmdir()
    assert done.returncode == 137
    assert "out of memory: the kernel's out-of-memory killer struck" in done.stderr
    assert "memory limit of the cgroup: 400 MiB" in done.stderr


def test_an_early_end_is_no_failure_by_itself(launcher):  # K130
    script = launcher.script(
        "if rank == 0:\n    touch('gone')\n    sys.exit(0)\n"
        "wait_for('gone')\ntime.sleep(0.3)\nsys.exit(int(sys.argv[1]))"
    )
    assert launcher.run(PER_NODE, 2, script, 0).returncode == 0
    assert launcher.run(PER_NODE, 2, script, 3).returncode == 3


def test_the_cause_comes_last_and_not_its_consequence(launcher):
    script = launcher.script("""
        import traceback
        from cdist.errors import PeerLostError

        def hook(*error):   # as init_process_group's
            lines = "".join(traceback.format_exception(*error)).splitlines()
            print(*(f"[rank{rank}]: {line}" for line in lines), sep="\\n", file=sys.stderr)

        sys.excepthook = hook
        if rank == 0:
            touch(f"{os.getpid()}.pid")
            raise PeerLostError("rank 1 is lost")
        while not (found := list(folder.glob("*.pid"))) or is_alive(found[0].stem):
            time.sleep(0.01)
        try:
            {}["key"]
        except KeyError as error:
            raise ValueError("cause") from error
        """)
    result = launcher.run(PER_NODE, 2, script)
    assert result.returncode == 1
    report = result.stderr[result.stderr.index("cdistrun: ") :]
    assert re.search(r"cdistrun: rank 1 .*: the first failure\ncdistrun: rank 0 .*: a consequence\n", report)
    assert report.splitlines()[-1] == "ValueError: cause"
    assert report.count("Traceback") == 2
    assert "KeyError: 'key'" in report


def test_record(launcher):
    script = launcher.script("""
        from cdist.launch import record

        @record
        def main():
            raise ValueError("recorded")

        sys.stderr = open(os.devnull, "w")
        main()
        """)
    result = launcher.run(PER_NODE, 2, "--log-dir", launcher.folder / "logs", script)
    assert result.stderr.splitlines()[-1] == "ValueError: recorded"
    (path,) = (launcher.folder / "logs").glob("*/attempt_0/0/error.json")
    message = json.loads(path.read_text())["message"]
    assert message["message"] == "ValueError: recorded"
    assert "in main" in message["extraInfo"]["py_callstack"]
    assert int(message["extraInfo"]["timestamp"]) > 0


def test_record_alone(monkeypatch, tmp_path):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)

    @record
    def double(x):
        """Twice."""
        return 2 * x

    assert (double(4), double.__name__, double.__doc__) == (8, "double", "Twice.")
    with pytest.raises(TypeError):
        double(None)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(TypeError):
        double(None)
    assert "TypeError" in read_error(tmp_path / "error.json")[1]
    seen = []
    with pytest.raises(TypeError):
        record(error_handler=seen.append)(lambda: double(None))()
    assert isinstance(seen[0], TypeError)


def test_torchs_record_is_read(tmp_path, monkeypatch):
    errors = pytest.importorskip(
        "torch.distributed.elastic.multiprocessing.errors", reason="torch comes with EXTRAS in .ci/run"
    )
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))

    @errors.record
    def main():
        raise ValueError("theirs")

    with pytest.raises(ValueError, match="theirs"):
        main()
    when, text = read_error(tmp_path / "error.json")
    assert abs(when - time.time()) < 60
    assert "ValueError: theirs" in text


def test_restarts(launcher):
    script = launcher.script(
        "attempt = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "print(rank, attempt, os.environ['MASTER_PORT'], flush=True)\n"
        "if attempt < 2:\n    if rank == 1: sys.exit(3)\n    time.sleep(600)\n"
    )
    result = launcher.run(PER_NODE, 2, "--max-restarts", 2, script)
    assert result.returncode == 0
    rows = [line.split() for line in result.stdout.splitlines()]
    assert {(rank, attempt) for rank, attempt, _ in rows} >= {("1", "0"), ("1", "1"), ("0", "2"), ("1", "2")}
    assert len({port for _, _, port in rows}) == 1
    assert "restarting all workers (2 of 2)" in result.stderr
    assert launcher.run(PER_NODE, 2, "--max-restarts", 1, script).returncode == 3


def test_a_program_that_is_not_there(launcher):
    result = launcher.run("--no-python", "/nowhere/program")
    assert result.returncode == 1
    assert result.stderr == "cdistrun: cannot start /nowhere/program: No such file or directory\n"


def test_an_occupied_port_is_named_at_once(launcher):  # K23
    script = launcher.script("touch('started')")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = launcher.run(PER_NODE, 3, "--master-port", port, script)
    assert result.returncode == 1
    assert re.match(
        rf"cdistrun: cannot listen on 127.0.0.1:{port}: Address already in use; choose another "
        "--master-port",
        result.stderr,
    )
    assert not (launcher.folder / "started").exists()


def test_a_port_that_the_kernel_gives_away_is_warned_of(launcher):  # K43
    script = launcher.script("print(os.environ['MASTER_PORT'])")
    port = free_port()  # out of that range
    result = launcher.run(PER_NODE, 2, "--master-port", port, script)
    assert result.stdout.splitlines() == [str(port)] * 2
    assert result.stderr.count("ip_local_port_range") == 1
    assert launcher.run(PER_NODE, 2, script).stderr == ""


def test_memory_watch(tmp_path, monkeypatch):
    from cdist.launch import exits

    monkeypatch.setattr(exits, "_memory_cgroup", lambda: str(tmp_path))
    for events, limit in (("memory.events", "memory.max"), ("memory.oom_control", "memory.limit_in_bytes")):
        (tmp_path / events).write_text("low 0\noom 1\noom_kill 1\n")
        (tmp_path / limit).write_text(f"{64 << 20}\n")
        watch = MemoryWatch()
        assert "often means out of memory (memory limit of the cgroup: 64 MiB)" in watch.hint()
        (tmp_path / events).write_text("low 0\noom 2\noom_kill 2\n")
        assert watch.hint().startswith("out of memory: the kernel's out-of-memory killer struck")
        (tmp_path / events).unlink()
        (tmp_path / limit).unlink()
    assert "dmesg" in MemoryWatch().hint()


# -- signals; nothing is left


def test_ctrl_c(launcher):
    script = launcher.script(
        "signal.signal(signal.SIGINT, signal.SIG_IGN) if rank == 1 else None\n"
        "touch(f'up{rank}')\ntime.sleep(600)"
    )
    process = launcher.start(PER_NODE, 2, script)
    launcher.wait_for("up0", "up1")
    process.send_signal(signal.SIGINT)
    result = launcher.finish(process)
    assert result.returncode == 130
    assert "cdistrun: SIGINT: stopping all workers" in result.stderr
    assert not launcher.marked()  # at once, the stubborn rank too


@pytest.mark.parametrize("arguments", [[], ["--log-dir"], ["--tee", "3"]])
def test_ctrl_c_is_told_in_a_line_for_each_place(launcher, arguments):
    script = launcher.script("""
        import json

        def train():
            touch(f"up{rank}")
            while True:
                json.loads("1")
                time.sleep(0.01)

        def main():
            try:
                train()
            except KeyboardInterrupt:
                print("saved", rank, file=sys.stderr)
                raise

        if rank == 1:
            touch("up1")
            time.sleep(600)
        main()
        """)
    logs = launcher.folder / "logs"
    arguments = [*arguments, logs] if arguments == ["--log-dir"] else arguments
    process = launcher.start(PER_NODE, 4, *arguments, script)
    launcher.wait_for(*(f"up{rank}" for rank in range(4)))
    process.send_signal(signal.SIGINT)
    result = launcher.finish(process)
    assert result.returncode == 130
    assert "Traceback" not in result.stderr
    assert [f"saved {rank}" in result.stderr for rank in range(4)] == [True, False, True, True]
    said = [line for line in result.stderr.splitlines() if line.startswith("cdistrun: ")]
    places = [line for line in said if "worker.py" in line]
    # The others are in one line or in several, and so before or behind rank 1; a rank may still be in touch.
    at_rank_1 = [line for line in places if line.startswith("cdistrun: rank 1: ")]
    assert len(at_rank_1) == 1
    assert re.fullmatch(r"cdistrun: rank 1: worker.py:\d+ in (<module>|touch)", at_rank_1[0])
    others = [line for line in places if line not in at_rank_1]
    assert others
    assert all(
        re.fullmatch(r"cdistrun: ranks? [023, -]+: worker.py:\d+ in (train|touch)", line) for line in others
    )
    if logs.exists():
        assert all("KeyboardInterrupt" in path.read_text() for path in logs.rglob("stderr.log"))


def test_tracebacks_of_an_interruption():
    text = """hello
        [rank0]: Traceback (most recent call last):
        [rank0]:   File "/home/me/train.py", line 106, in <module>
        [rank0]:     main()
        [rank0]:   File "/usr/lib/python3.11/selectors.py", line 52, in select
        [rank0]:     def __init__(self, *args):
        [rank0]: 
        [rank0]: KeyboardInterrupt
        saved
        Traceback (most recent call last):
          File "x.py", line 1, in f
        cdist.errors.AbortedError: rank 1 was interrupted in all_reduce

        During handling of the above exception, another exception occurred:

        Traceback (most recent call last):
          File "x.py", line 1, in f
        KeyboardInterrupt
        Exception ignored in atexit callback: <function main at 0x7f394f8fc720>
        Traceback (most recent call last):
          File "x.py", line 82, in main
            time.sleep(600)
            ^^^^^^^^^^^^^^^
        KeyboardInterrupt: 
        Traceback (most recent call last):
          File "x.py", line 1, in f
        ValueError: kept
        """
    left, place = interrupts.without_tracebacks(text.replace("\n        ", "\n").encode())
    kept = 'hello\nsaved\nTraceback (most recent call last):\n  File "x.py", line 1, in f\nValueError: kept\n'
    assert left.decode() == kept
    assert place == "train.py:106 in <module>"
    assert (
        interrupts.summary({3: "a", 0: "a", 2: "b", 1: "a"})
        == "cdistrun: ranks 0-1, 3: a\ncdistrun: rank 2: b\n"
    )


def test_sigterm_leaves_time_to_finish(launcher):
    script = launcher.script("""
        def finish(*_):
            time.sleep(0.5)
            touch(f"saved{rank}")
            sys.exit(0)

        signal.signal(signal.SIGTERM, finish)
        touch(f"up{rank}")
        time.sleep(600)
        """)
    process = launcher.start(PER_NODE, 2, script)
    launcher.wait_for("up0", "up1")
    process.send_signal(signal.SIGTERM)
    assert launcher.finish(process).returncode == 143
    assert (launcher.folder / "saved0").exists()
    assert (launcher.folder / "saved1").exists()


def test_sigterm_while_the_store_is_started(launcher):
    script = launcher.script("touch('up')\ntime.sleep(600)")
    command = f"""
        import sys, time
        from cdist.launch import agent, main

        agent.StoreHost.serve = lambda self: time.sleep(600)
        sys.exit(main.main([{str(script)!r}]))
        """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(command)],
        env=os.environ | dict([launcher.mark.split("=")], TMPDIR=str(launcher.temporary)),
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    launcher.started.append(process)
    launcher.wait_for("up")
    process.send_signal(signal.SIGTERM)
    assert launcher.finish(process).returncode == 143


STUBBORN_CHILD = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
signal.signal(signal.SIGTERM, signal.SIG_DFL)
touch(f"up{rank}")
"""
FAIL_AS_RANK_1 = """
if rank == 1:
    wait_for("up0")
    sys.exit(4)
time.sleep(600)
"""


def test_nothing_survives_the_launchers_death(launcher):  # K121
    process = launcher.start(PER_NODE, 3, launcher.script(STUBBORN_CHILD + "time.sleep(600)"))
    launcher.wait_for("up0", "up1", "up2")
    assert len(launcher.marked()) >= 8  # launcher, guard, workers, their children
    process.kill()
    process.communicate(timeout=LIMIT)
    launcher.assert_nothing_left()


def test_daemons_stay(launcher):
    script = launcher.script("""
        null = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        child = subprocess.Popen(["sleep", "600"], **null)
        daemon = subprocess.Popen(["sleep", "600"], start_new_session=True, env={}, **null)
        (folder / "pids").write_text(f"{child.pid} {daemon.pid}")
        """)
    result = launcher.run(PER_NODE, 1, script)
    assert result.returncode == 0, result.stderr
    child, daemon = map(int, (launcher.folder / "pids").read_text().split())
    end = time.monotonic() + LIMIT
    while is_alive(child) and time.monotonic() < end:
        time.sleep(0.01)
    alive = is_alive(child), is_alive(daemon)
    os.kill(daemon, signal.SIGKILL)
    assert alive == (False, True)


def test_grandchildren_go_too(launcher):  # K122
    script = launcher.script(STUBBORN_CHILD + FAIL_AS_RANK_1)
    result = launcher.run(PER_NODE, 2, "--shutdown-timeout", 0.2, script)
    assert result.returncode == 4
    launcher.assert_nothing_left()
    assert launcher.run(PER_NODE, 1, launcher.script(STUBBORN_CHILD)).returncode == 0
    launcher.assert_nothing_left()


def test_a_stubborn_worker_is_killed_after_the_grace(launcher):
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntouch(f'up{rank}')\n"
    script = launcher.script(ignore + FAIL_AS_RANK_1)
    assert launcher.run(PER_NODE, 2, "--shutdown-timeout", 0.2, script).returncode == 4


def test_jobs_do_not_disturb_each_other(launcher):  # K137
    script = launcher.script("touch(f'up{sys.argv[1]}')\nwait_for('go')\nprint('whole')")
    jobs = [launcher.start(PER_NODE, 1, script, name) for name in "ab"]
    alike = subprocess.Popen([sys.executable, "-u", "-c", "import time; time.sleep(600)", str(script), "a"])
    try:
        launcher.wait_for("upa", "upb")
        jobs[0].send_signal(signal.SIGINT)
        assert launcher.finish(jobs[0]).returncode == 130
        assert alike.poll() is None
        (launcher.folder / "go").touch()
        result = launcher.finish(jobs[1])
        assert (result.returncode, result.stdout) == (0, "whole\n")
    finally:
        alike.kill()
        alike.wait()


# -- output


def test_lines_stay_whole(launcher):  # K133
    script = launcher.script("""
        for i in range(1000):
            sys.stdout.write(f"{rank} {i} " + "x" * 300)
            print()
        print("err", rank, file=sys.stderr)
        """)
    logs = launcher.folder / "logs"
    result = launcher.run(PER_NODE, 4, "--log-dir", logs, "--tee", 3, script)
    assert result.returncode == 0
    host = socket.gethostname()
    lines = result.stdout.splitlines()
    assert sorted(lines) == sorted(f"[{host}:{r}] {r} {i} {'x' * 300}" for r in range(4) for i in range(1000))
    assert sorted(result.stderr.splitlines()) == [f"[{host}:{r}] err {r}" for r in range(4)]
    files = sorted(logs.glob("*/attempt_0/*/*.log"))
    assert len(files) == 8
    for file in files:
        rank = file.parent.name
        count = 1 if file.name == "stderr.log" else 1000
        content = file.read_text().splitlines()
        assert len(content) == count
        assert all(line.startswith((f"{rank} ", f"err {rank}")) for line in content)


def test_lines_pass_through_without_prefix(launcher):
    script = launcher.script("""
        for i in range(200):
            sys.stdout.write(f"{rank} {i} ")
            sys.stdout.write("y" * 5000)
            print()
        """)
    result = launcher.run(PER_NODE, 3, script)
    expected = [f"{r} {i} {'y' * 5000}" for r in range(3) for i in range(200)]
    assert sorted(result.stdout.splitlines()) == sorted(expected)


def test_what_is_shown(launcher):
    script = launcher.script("print('out', rank)\nprint('err', rank, file=sys.stderr)")
    logs = launcher.folder / "logs"
    some = launcher.run(PER_NODE, 3, "--local-ranks-filter", "0,2", script)
    assert sorted(some.stdout.splitlines()) == ["out 0", "out 2"]
    files_only = launcher.run(PER_NODE, 2, "-r", "0:1,1:3", "--log-dir", logs, script)
    assert (files_only.stdout, files_only.stderr) == ("", "err 0\n")
    texts = sorted(path.read_text() for path in logs.glob("*/attempt_0/*/*.log"))
    assert texts == ["err 0\n", "err 1\n", "out 0\n", "out 1\n"]
    kept = launcher.run("-r", 3, script)
    folder = Path(re.fullmatch("cdistrun: logs are in (.*)\n", kept.stderr)[1])
    assert (folder / "attempt_0" / "0" / "stdout.log").read_text() == "out 0\n"
    shutil.rmtree(folder)
    template = launcher.run(
        PER_NODE,
        2,
        "--role",
        "r",
        "--log-line-prefix-template",
        "${role_name}/${local_rank}/${rank}:",
        script,
    )
    assert sorted(template.stdout.splitlines()) == ["r/0/0:out 0", "r/1/1:out 1"]
    assert launcher.run("--log-dir", "/dev/null", script).stdout == "out 0\n"


def test_a_prompt_is_shown_before_its_line_ends(launcher):
    script = launcher.script("sys.stdout.write('more? ')\nwait_for('answered')\nprint('yes')")
    process = launcher.start(script)
    assert process.stdout.read(6) == "more? "  # hangs if it is held back
    (launcher.folder / "answered").touch()
    result = launcher.finish(process)
    assert result.stdout == "yes\n"


def test_a_full_disk_is_said_and_the_job_goes_on(launcher):
    script = launcher.script("print('out', flush=True)\ntouch('up')")
    with open("/dev/full", "w") as full:
        result = launcher.run(script, stdout=full)
        assert (launcher.folder / "up").exists()
        silent = launcher.run(launcher.script("print('out', file=sys.stderr)"), stderr=full)
        failed = launcher.run(launcher.script("print('out', flush=True)\nsys.exit(3)"), stdout=full)
    assert result.stderr == "cdistrun: stdout: No space left on device: output of the workers is lost\n"
    assert (result.returncode, silent.returncode, failed.returncode) == (120, 120, 3)


def test_a_reader_that_wants_no_more_loses_nothing(launcher):
    """As in ``cdistrun … | head``: the job goes on and counts as what it is."""
    script = launcher.script("print('out', flush=True)\nprint('more', flush=True)\ntouch('up')")
    read_end, write_end = os.pipe()
    os.close(read_end)
    result = launcher.run(script, stdout=write_end)
    os.close(write_end)
    assert (result.returncode, result.stderr) == (0, "")
    assert (launcher.folder / "up").exists()


def test_a_console_that_does_not_take_it_does_not_stop_the_end(launcher):
    script = launcher.script(
        "if rank == 1:\n    wait_for('up0')\n    sys.exit(3)\ntouch('up0')\nwhile True: print('z' * 1000)"
    )
    process = launcher.start(PER_NODE, 2, script)
    assert process.wait(timeout=LIMIT) == 3  # nobody reads


class Sink:
    """A console that remembers."""

    def __init__(self):
        self.pieces = []

    def write(self, data, stream=None, finished=True):
        self.pieces.append((data, finished))


def test_a_log_file_that_cannot_be_written_is_given_up():
    said, sink = [], Sink()
    read_end, write_end = os.pipe()
    stream = logs.Stream(0, "stdout", read_end, sink, log_path="/dev/full", say=said.append)
    for line in (b"one\n", b"two\n"):
        os.write(write_end, line)
        assert stream.read(0.0) == 4
    os.close(write_end)
    stream.close()
    assert said == ["cdistrun: /dev/full: No space left on device: the rest of this output is not kept\n"]
    assert stream.has_failed
    assert sink.pieces == [(b"one\n", True), (b"two\n", True)]


def test_a_line_that_a_full_buffer_cut_is_waited_for():
    """Its end comes when the worker runs on, before which another one's line would break it."""
    read_end, write_end = os.pipe()
    stream = logs.Stream(0, "stdout", read_end, Sink(), b"")
    os.write(write_end, b"x" * 8192)
    stream.read(5.0)
    os.write(write_end, b"x")
    stream.read(5.1)
    assert stream.show_at == 5.0 + logs.CUT_AFTER
    os.write(write_end, b"\n")
    stream.read(5.2)
    assert stream.show_at is None
    assert stream.console.pieces == [(b"x" * 8193 + b"\n", True)]
    os.close(write_end)
    stream.close()


def test_stream():
    read_end, write_end = os.pipe()
    sink = Sink()
    stream = logs.Stream(0, "stdout", read_end, sink, b"> ")
    assert stream.read(0) == 0
    os.write(write_end, b"one\ntwo")
    assert stream.read(0) == 7
    assert stream.show_at == logs.PARTIAL_AFTER
    stream.show_rest()
    assert stream.show_at is None
    os.write(write_end, b"2\nthree\nfour")
    stream.read(1)
    os.close(write_end)
    assert stream.read(2) is None
    assert sink.pieces[:2] == [(b"> one\n", True), (b"> two", False)]
    assert b"".join(data for data, _ in sink.pieces) == b"> one\n> two2\n> three\n> four\n"
    assert stream.tail == b"one\ntwo2\nthree\nfour"


# -- several nodes


def start_nodes(launcher, script, *arguments, count=2, port=None, dynamic=False, **kw):
    port = port or free_port()
    processes = []
    for node in range(count):
        where = ["--node-rank", node, "--master-port", port]
        if dynamic:
            where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "job"]
        nodes = ["--nnodes", count, PER_NODE, 2, *where]
        processes.append(launcher.start(*nodes, script, *arguments, **kw))
    return processes


NODES = """
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE"]
print(*(os.environ[name] for name in names))
"""


@pytest.mark.parametrize("dynamic", [False, True])
def test_two_nodes(launcher, dynamic):
    results = [launcher.finish(p) for p in start_nodes(launcher, launcher.script(NODES), dynamic=dynamic)]
    assert [r.returncode for r in results] == [0, 0], results
    lines = sorted(line for r in results for line in r.stdout.splitlines())
    assert lines == ["0 4 0 0 2", "1 4 1 0 2", "2 4 0 1 2", "3 4 1 1 2"]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("bad_rank", [0, 3])
def test_the_code_of_the_first_failure_on_all_nodes(launcher, dynamic, bad_rank):  # K131
    script = launcher.script(
        f"touch(f'up{{rank}}')\nfor r in range(4): wait_for(f'up{{r}}')\n"
        f"if rank == {bad_rank}: sys.exit(9)\ntime.sleep(600)"
    )
    results = [launcher.finish(p) for p in start_nodes(launcher, script, dynamic=dynamic)]
    assert [r.returncode for r in results] == [9, 9]
    assert sum(f"cdistrun: rank {bad_rank} (host" in r.stderr for r in results) == 1
    assert sum(f"cdistrun: on node {bad_rank // 2}: rank {bad_rank} (host" in r.stderr for r in results) == 1


def test_the_cause_is_on_the_other_node(launcher):
    script = launcher.script("""
        from cdist.errors import PeerLostError
        touch(f"up{rank}")
        for other in range(4):
            wait_for(f"up{other}")
        if rank == 3:
            time.sleep(0.5)
            sys.exit(9)
        raise PeerLostError("rank 3 is lost")
        """)
    results = [launcher.finish(p) for p in start_nodes(launcher, script)]
    assert [r.returncode for r in results] == [9, 9]
    assert results[0].stderr.splitlines()[-1].startswith("cdistrun: on node 1: rank 3 (host")


def test_one_node_waits_for_the_other(launcher):
    script = launcher.script("if rank < 2: sys.exit(0)\ntime.sleep(0.5)\nsys.exit(5)")
    assert [launcher.finish(p).returncode for p in start_nodes(launcher, script)] == [5, 5]


def test_restart_on_all_nodes(launcher):
    script = launcher.script(
        "attempt = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\nprint(rank, attempt)\n"
        "if attempt == 0:\n    if rank == 2: sys.exit(3)\n    time.sleep(600)\n"
    )
    results = [launcher.finish(p) for p in start_nodes(launcher, script, env={"PET_MAX_RESTARTS": "1"})]
    assert [r.returncode for r in results] == [0, 0]
    lines = {line for r in results for line in r.stdout.splitlines()}
    assert lines >= {"0 1", "1 1", "2 1", "3 1"}


def test_a_node_is_done_with_one_attempt_at_a_time(launcher):
    """Node 0 is done with the first one when node 1 fails, and with the second one while node 1 is not."""
    script = launcher.script("""
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if rank == 2:
            wait_for(f"go{attempt}")
            if attempt == 0:
                sys.exit(3)
            touch("through")
        """)
    port = free_port()
    processes = start_nodes(launcher, script, port=port, env={"PET_MAX_RESTARTS": "1"})
    store = TCPStore("127.0.0.1", port, None, False)
    for attempt in range(2):
        while store.add(f"cdist.agent/none/done/{attempt}", 0) == 0:
            time.sleep(0.01)
        time.sleep(0.5)  # time to take it for the end of all, wrongly
        (launcher.folder / f"go{attempt}").touch()
    del store
    assert [launcher.finish(process).returncode for process in processes] == [0, 0]
    assert (launcher.folder / "through").exists()


def test_a_failure_of_the_attempt_before_is_none_of_this_one():
    """The thread that talks to the other nodes may post it when the next attempt has begun."""
    one = agent.Agent(types.SimpleNamespace(nnodes=2, rdzv_id="x"))
    one.attempt = 1
    one.nodes = types.SimpleNamespace(events=queue.SimpleQueue())
    read_end, write_end = os.pipe()
    for attempt, expected in ((0, None), (1, "of 1")):
        os.write(write_end, b"e")
        one.nodes.events.put(("failed", attempt, f"of {attempt}"))
        one._on_nodes(types.SimpleNamespace(fd=read_end))
        assert one.remote == expected
    os.close(read_end)
    os.close(write_end)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_launcher_that_dies_ends_the_others(launcher, killed):
    script = launcher.script("touch(f'up{rank}')\ntime.sleep(600)")
    conf = {"PET_RDZV_CONF": "keep_alive_interval=1,keep_alive_max_attempt=2"}
    port = free_port()
    processes = start_nodes(launcher, script, env=conf, port=port)
    launcher.wait_for("up0", "up1", "up2", "up3")
    store = TCPStore("127.0.0.1", port, None, False)
    while store.add("cdist.agent/none/beat/1", 0) == 0:  # so that node 0 knows of it
        time.sleep(0.01)
    del store
    processes[killed].kill()
    processes[killed].communicate()
    other = launcher.finish(processes[1 - killed])
    assert other.returncode == 1
    assert f"cdistrun: on node {killed}: lost: " in other.stderr


@pytest.mark.parametrize("ends", [False, True])
def test_a_launcher_with_the_rank_of_another_one_ends_alone(launcher, ends):
    """What it, or a worker of it that ends, has to say is nothing that the job at work should end for."""
    script = launcher.script(f"""
        if os.environ.get("LATE"):
            sys.exit(3) if {ends} else time.sleep(600)
        touch(f"up{{rank}}")
        wait_for("go")
        """)
    port = free_port()
    processes = start_nodes(launcher, script, port=port)
    launcher.wait_for("up0", "up1", "up2", "up3")
    late = ["--nnodes", 2, PER_NODE, 2, "--node-rank", 1, "--master-port", port, script]
    result = launcher.finish(launcher.start(*late, env={"LATE": "1"}))
    assert result.returncode == (3 if ends else 1), result.stderr
    if not ends:
        assert "cdistrun: on node 1: --node-rank 1 is that of another launcher" in result.stderr
        assert f"(pid {processes[1].pid} on " in result.stderr
    (launcher.folder / "go").touch()
    assert [launcher.finish(p).returncode for p in processes] == [0, 0]


def test_a_launcher_takes_the_place_of_one_that_was_killed(launcher):
    script = launcher.script(
        "if rank > 1: touch(f'up{rank}')\ntime.sleep(0 if os.environ.get('AGAIN') else 600)"
    )
    port = free_port()
    start = ["--nnodes", 3, PER_NODE, 1, "--master-port", port]
    processes = [launcher.start(*start, "--node-rank", node, script) for node in range(2)]
    store = TCPStore("127.0.0.1", port, None, False)
    while store.add("cdist.agent/none/beat/1", 0) == 0:
        time.sleep(0.01)
    del store
    processes[1].kill()
    processes[1].communicate()
    again = launcher.start(*start, "--node-rank", 1, script, env={"AGAIN": "1"})
    third = launcher.start(*start, "--node-rank", 2, script)
    launcher.wait_for("up2")
    third.send_signal(signal.SIGTERM)  # heard of by all that are part of the job
    assert [launcher.finish(p).returncode for p in (third, processes[0], again)] == [143] * 3


@pytest.mark.parametrize("node", [0, 1])
def test_ctrl_c_while_other_nodes_are_missing(launcher, node):  # K119
    script = launcher.script("touch('up')\ntime.sleep(600)")
    process = launcher.start("--nnodes", 2, "--node-rank", node, "--master-port", free_port(), script)
    launcher.wait_for("up")
    process.send_signal(signal.SIGINT)
    assert launcher.finish(process).returncode == 130


def test_ctrl_c_of_one_node_ends_all(launcher):
    script = launcher.script("touch(f'up{rank}')\ntime.sleep(600)")
    processes = start_nodes(launcher, script)
    launcher.wait_for("up0", "up1", "up2", "up3")
    processes[1].send_signal(signal.SIGINT)
    assert [launcher.finish(p).returncode for p in processes] == [130, 130]


def test_node_0_that_never_comes(launcher):
    process = launcher.start(
        "--nnodes",
        2,
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "192.0.2.1:29400",
        "--rdzv-conf",
        "timeout=1",
        launcher.script("pass"),
    )
    result = launcher.finish(process)
    assert result.returncode == 1
    assert "no connection to node 0 at 192.0.2.1:29400" in result.stderr


def test_the_host_says_that_nodes_are_missing(monkeypatch):
    """Once, and without an end of the job: they may come."""
    monkeypatch.setattr(nodes, "_SAY_AFTER", 0.1)
    store = TCPStore("127.0.0.1", 0, None, True)
    settings = dict(nnodes=3, node_rank=0, dynamic=False, rdzv_id="x", timeout=20, lost_after=60)
    host = nodes.Nodes(
        types.SimpleNamespace(master_addr="127.0.0.1", master_port=store.port, **settings), True
    )
    assert host.events.get(timeout=20) == ("waiting", 1)
    host.leave(0)
    assert host.events.empty()


def test_a_launcher_says_that_it_waits_for_node_0(monkeypatch):
    monkeypatch.setattr(nodes, "_SAY_AFTER", 0.1)
    port = free_port()
    settings = dict(nnodes=2, node_rank=1, dynamic=False, rdzv_id="x", timeout=20, lost_after=60)
    other = nodes.Nodes(types.SimpleNamespace(master_addr="127.0.0.1", master_port=port, **settings), False)
    assert other.events.get(timeout=20) == ("seeking",)
    store = TCPStore("127.0.0.1", port, None, True)
    store.wait(["cdist.agent/x/joined"])
    other.leave(1)
    assert other.events.empty()


@pytest.mark.parametrize("inner", ["cdist.run", "torch.distributed.run"])
def test_a_launcher_inside_a_worker(launcher, inner):
    """Whose store it is that the inner ranks meet in: that of their own launcher."""
    pytest.importorskip(inner.partition(".")[0], reason="torch comes with EXTRAS in .ci/run")
    leaf = launcher.script(
        """
        import cdist, numpy

        cdist.init_process_group()
        x = numpy.ones(1)
        cdist.all_reduce(x)
        touch(f"{cdist.get_rank()} of {cdist.get_world_size()}: {x[0]}")
        """,
        "leaf.py",
    )
    command = [sys.executable, "-m", inner, "--standalone", "--nproc-per-node", "2", str(leaf)]
    # torchrun leaves a folder of its own behind.
    start = f"sys.exit(subprocess.run({command!r}, env=os.environ | dict(TMPDIR=str(folder))).returncode)"
    result = launcher.run(launcher.script(start))
    assert result.returncode == 0, result.stderr
    assert sorted(path.name for path in launcher.folder.glob("* of *")) == ["0 of 2: 2.0", "1 of 2: 2.0"]


def test_a_launcher_comes_again_where_its_rival_was_refused_too(monkeypatch):
    """Linux refuses both of two sockets that begin to listen on one port in the same instant."""
    refusals = [True, False]
    attempts = []

    def listen(*where):
        attempts.append(where)
        if refusals[len(attempts) - 1]:
            raise agent.HostError("address already in use")
        return "the host"

    monkeypatch.setattr(agent, "StoreHost", listen)
    assert agent._host_if_possible("localhost", 29400) == "the host"
    assert attempts == [("localhost", 29400, True)] * 2
    attempts.clear()
    refusals[:] = [True] * 3
    assert agent._host_if_possible("localhost", 29400) is None
    assert len(attempts) == 3
