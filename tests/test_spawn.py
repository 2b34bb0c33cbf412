"""cdist.multiprocessing: results, failures, signals, and that nothing is left."""

import copy
import functools
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import cdist
import pytest
from cdist import multiprocessing as mp
from cdist.errors import PeerLostError
from processes import is_alive, marked

METHODS = ["spawn", "fork", "forkserver"]


def assert_gone(mark, seconds=10.0):
    end = time.monotonic() + seconds
    while (left := marked(mark)) and time.monotonic() < end:
        time.sleep(0.02)
    assert not left


@pytest.fixture(autouse=True)
def mark(monkeypatch):
    """Every process of a test carries the mark, and none is left after it."""
    name = f"CDIST_TEST_MARK={uuid.uuid4()}"
    monkeypatch.setenv(*name.split("="))
    yield name
    from multiprocessing import forkserver, resource_tracker

    forkserver._forkserver._stop()
    resource_tracker._resource_tracker._stop()
    assert_gone(name)


def write_index(index, folder, text):
    Path(folder, f"{index}.{text}").touch()


@pytest.mark.parametrize("method", METHODS)
def test_runs_every_index(tmp_path, method):
    assert mp.start_processes(write_index, (tmp_path, "x"), nprocs=3, start_method=method) is None
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0.x", "1.x", "2.x"]


def test_spawn_defaults(tmp_path):
    mp.spawn(write_index, (tmp_path, "y"))
    assert [p.name for p in tmp_path.iterdir()] == ["0.y"]
    with pytest.warns(FutureWarning, match="start_processes"):
        mp.spawn(write_index, (tmp_path, "z"), start_method="fork")
    assert Path(tmp_path, "0.z").exists()


def end_somehow(index, how):
    if index != 1:
        time.sleep(600)
    if how == "raise":
        raise ValueError("number one is unwell")
    if how == "exit":
        sys.exit(5)
    os.kill(os.getpid(), getattr(signal, how))
    time.sleep(600)


@pytest.mark.parametrize("method", METHODS)
def test_exception_reaches_the_parent(method):
    with pytest.raises(mp.ProcessRaisedException) as caught:
        mp.start_processes(end_somehow, ("raise",), nprocs=3, start_method=method)
    error = caught.value
    assert error.error_index == error.rank == 1
    assert "\n\n-- Process 1 terminated with the following error:\nTraceback" in str(error)
    assert str(error).rstrip().endswith("ValueError: number one is unwell")
    assert error.error_pid > 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGINT", "SIGTERM"])
def test_signals_are_named(method, name):  # K124, K125
    with pytest.raises(mp.ProcessExitedException) as caught:
        mp.start_processes(end_somehow, (name,), nprocs=3, start_method=method)
    error = caught.value
    assert (error.error_index, error.signal_name, error.exit_code) == (1, name, -getattr(signal, name))
    assert f"process 1 terminated with signal {name}" in str(error)
    assert "peak memory" in str(error)
    assert ("out of memory" in str(error)) == (name == "SIGKILL")


def test_exit_code():
    with pytest.raises(mp.ProcessExitedException, match="process 1 terminated with exit code 5") as caught:
        mp.spawn(end_somehow, ("exit",), nprocs=2)
    assert (caught.value.exit_code, caught.value.signal_name) == (5, None)


def test_exceptions_survive_pickle_and_copy():  # K127
    errors = [
        mp.ProcessRaisedException("text", 3, 99),
        mp.ProcessExitedException("text", 1, 98, -9, "SIGKILL"),
    ]
    for error in errors:
        for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
            assert type(other) is type(error)
            assert str(other) == str(error)
            assert vars(other) == vars(error)


def fail_after_the_other(index, folder):
    if index == 0:
        Path(folder, str(os.getpid())).touch()
        raise PeerLostError("rank 1 is lost", rank=1)
    while not (names := os.listdir(folder)) or is_alive(names[0]):
        time.sleep(0.01)
    raise ValueError("the cause")


def test_the_cause_is_named_and_not_the_consequence(tmp_path):
    with pytest.raises(mp.ProcessRaisedException, match="the cause") as caught:
        mp.start_processes(fail_after_the_other, (tmp_path,), nprocs=2, start_method="fork")
    assert caught.value.error_index == 1


def ignore_sigterm(index, folder):
    if index == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Path(folder, "ready").touch()
        time.sleep(600)
    while not Path(folder, "ready").exists():
        time.sleep(0.01)
    raise ValueError("over")


def test_stubborn_processes_are_killed_after_the_grace(tmp_path):
    context = mp.start_processes(ignore_sigterm, (tmp_path,), nprocs=2, join=False)
    with pytest.raises(mp.ProcessRaisedException, match="over"):
        context.join(grace_period=0.1)
    assert context.processes[0].exitcode == -signal.SIGKILL


def wait_for_file(index, folder):
    while not Path(folder, "go").exists():
        time.sleep(0.01)


def test_context(tmp_path):
    context = mp.start_processes(wait_for_file, (tmp_path,), nprocs=2, join=False, start_method="fork")
    assert isinstance(context, mp.ProcessContext)
    assert context.pids() == [p.pid for p in context.processes]
    assert context.join(timeout=0.05) is False
    assert context.join(timeout=0) is False
    Path(tmp_path, "go").touch()
    while not context.join(timeout=1):
        pass
    assert context.join() is True
    assert [p.exitcode for p in context.processes] == [0, 0]


def test_from_a_thread_that_ends(tmp_path):
    """Children are not tied to the thread that started them."""
    contexts = []

    def start():
        contexts.append(mp.start_processes(wait_for_file, (tmp_path,), nprocs=2, join=False))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert contexts[0].join(timeout=0.3) is False
    Path(tmp_path, "go").touch()
    assert contexts[0].join() is True


def test_bad_arguments():
    with pytest.raises(ValueError, match="start_method"):
        mp.start_processes(write_index, start_method="thread")
    with pytest.raises(ValueError, match="nprocs"):
        mp.spawn(write_index, nprocs=0)
    with pytest.raises((pickle.PicklingError, AttributeError)):
        mp.spawn(lambda index: None, nprocs=2)


PARENT = """
import sys, time
from pathlib import Path
from cdist.multiprocessing import start_processes

def sleep(index, folder):
    Path(folder, str(index)).touch()
    time.sleep(600)

if __name__ == "__main__":
    start_processes(sleep, (sys.argv[1],), nprocs=3, start_method=sys.argv[2])
"""


def start_parent(tmp_path, method):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    folder = tmp_path / "up"
    folder.mkdir()
    parent = subprocess.Popen(
        [sys.executable, script, folder, method], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while len(list(folder.iterdir())) < 3:
        assert parent.poll() is None
        time.sleep(0.01)
    return parent


@pytest.mark.parametrize("method", METHODS)
def test_children_end_when_the_parent_is_killed(tmp_path, mark, method):  # K121
    parent = start_parent(tmp_path, method)
    parent.kill()
    parent.communicate(timeout=20)
    assert_gone(mark, 10)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("whole_group", [False, True])
def test_ctrl_c(tmp_path, mark, method, whole_group):
    parent = start_parent(tmp_path, method)
    (os.killpg if whole_group else os.kill)(parent.pid, signal.SIGINT)
    _, err = parent.communicate(timeout=20)
    assert parent.returncode == -signal.SIGINT
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert_gone(mark, 10)


def sleep_on(ready):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ready.touch()
    time.sleep(600)


def own_children(index, folder):
    """As a DataLoader does: workers of its own, and semaphores with names to reach them."""
    context = mp.get_context("spawn")
    semaphore = context.Semaphore()
    ready = folder.with_name(f"ready{index}")
    child = context.Process(target=sleep_on, args=(ready,), daemon=True)
    child.start()
    while not ready.exists():
        time.sleep(0.01)
    folder.joinpath(str(index)).write_text(f"{child.pid} {semaphore._semlock.name}")
    time.sleep(600)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("whole_group", [False, True])
def test_ctrl_c_ends_what_the_processes_started(tmp_path, mark, method, whole_group):
    folder = tmp_path / "up"
    folder.mkdir()
    code = (
        "from cdist import multiprocessing as mp\n"
        "from pathlib import Path\n"
        "from test_spawn import own_children\n"
        f"mp.start_processes(own_children, (Path({str(folder)!r}),), nprocs=2, start_method={method!r})\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}
    command = [sys.executable, "-c", code]
    parent = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while len(words := [path.read_text().split() for path in folder.iterdir()]) < 2 or not all(words):
        assert parent.poll() is None
        time.sleep(0.01)
    (os.killpg if whole_group else os.kill)(parent.pid, signal.SIGINT)
    _, err = parent.communicate(timeout=20)
    assert parent.returncode == -signal.SIGINT
    assert err.count("KeyboardInterrupt") == 1
    assert_gone(mark, 10)
    assert not any(Path("/dev/shm", f"sem.{name.strip('/')}").exists() for _, name in words)


IMPORTS_LONG = """
import os, time
from pathlib import Path
from cdist.multiprocessing import spawn

def nothing(index):
    pass

if __name__ == "__main__":
    spawn(nothing, nprocs=3)
else:
    Path(__file__).with_name("up").joinpath(str(os.getpid())).touch()
    time.sleep(600)
"""


def test_ctrl_c_while_the_processes_import(tmp_path, mark):
    """The one traceback is the parent's."""
    script, folder = tmp_path / "parent.py", tmp_path / "up"
    script.write_text(IMPORTS_LONG)
    folder.mkdir()
    command = [sys.executable, script]
    parent = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while len(list(folder.iterdir())) < 3:
        assert parent.poll() is None
        time.sleep(0.01)
    os.killpg(parent.pid, signal.SIGINT)
    _, err = parent.communicate(timeout=20)
    assert parent.returncode == -signal.SIGINT
    assert err.count("Traceback") == 1
    assert_gone(mark, 10)


def note_mask(index, folder):
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    Path(folder, str(index)).write_text(repr(signal.SIGINT in blocked))


@pytest.mark.parametrize("method", METHODS)
def test_signals_are_let_in(tmp_path, method):
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    mp.start_processes(note_mask, (tmp_path,), nprocs=2, start_method=method)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
    assert [path.read_text() for path in tmp_path.iterdir()] == ["False"] * 2


def fail_in_a_group(index, folder):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # by which the parent ends those that did not fail
    cdist.init_process_group(init_method=f"file://{folder}/meet", rank=index, world_size=2)
    if index == 1:
        raise ValueError("bad sample 17")
    try:
        cdist.barrier()
        cdist.barrier()
    except PeerLostError as error:
        folder.joinpath("told").write_text(f"{error.rank}: {error}")
        raise


@pytest.mark.parametrize("method", METHODS)
def test_the_other_processes_are_told_of_an_exception(tmp_path, method):
    with pytest.raises(mp.ProcessRaisedException, match="bad sample 17") as caught:
        mp.start_processes(fail_in_a_group, (tmp_path,), nprocs=2, start_method=method)
    assert caught.value.error_index == 1
    told = (tmp_path / "told").read_text()
    assert told.startswith("1: ")
    assert "rank 1 ended with ValueError: bad sample 17" in told


def run_python(arguments, **kw):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60, **kw)


@pytest.mark.parametrize("arguments", [["-"], ["-c"]])
def test_session_without_a_file(arguments):  # K128
    code = "from cdist.multiprocessing import spawn\ndef f(i): pass\nspawn(f, nprocs=4)\n"
    result = run_python(["-c", code]) if arguments == ["-c"] else run_python(["-"], input=code)
    assert result.returncode == 1
    assert "RuntimeError" in result.stderr
    assert "session without a file" in result.stderr
    assert 'start_method="fork"' in result.stderr
    good = code.replace("spawn(f, nprocs=4)", "start_processes(f, nprocs=2, start_method='fork')")
    good = good.replace("import spawn", "import start_processes")
    assert run_python(["-"], input=good).returncode == 0


def test_script_without_a_guard(tmp_path):  # K128
    script = tmp_path / "script.py"
    script.write_text(
        "from pathlib import Path\nfrom cdist.multiprocessing import spawn\ndef f(i): pass\n"
        "Path(__file__).with_name('runs').open('a').write('x')\nspawn(f, nprocs=2)\n"
    )
    result = run_python([script])
    assert result.returncode == 1
    assert 'if __name__ == "__main__"' in result.stderr.splitlines()[-1]
    assert len((tmp_path / "runs").read_text()) <= 3  # the parent and its children, no storm


def test_import_is_quiet():
    code = (
        "import os, signal, threading\n"
        "def state():\n"
        "    handlers = [signal.getsignal(s) for s in signal.Signals]\n"
        "    return handlers, os.sched_getaffinity(0), dict(os.environ)\n"
        "before = state()\n"
        "import cdist.multiprocessing, cdist.launch.main, cdist.sampler\n"
        "assert before == state() and threading.active_count() == 1\n"
    )
    result = run_python(["-c", code])  # K170
    assert result.returncode == 0, result.stderr


def test_ctrl_c_during_the_import(tmp_path):
    """It is not told as a NumPy that cannot be imported."""
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").write_text("raise KeyboardInterrupt\n")
    code = "try:\n    import cdist\nexcept KeyboardInterrupt:\n    print('interrupted')\n"
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    result = run_python(["-c", code], env=env)
    assert (result.stdout, result.stderr) == ("interrupted\n", "")


def _answer(index, folder):
    assert all(os.fstat(descriptor) for descriptor in range(3))
    Path(folder, str(index)).touch()


@pytest.mark.parametrize("method", METHODS)
def test_closed_standard_descriptors(tmp_path, method):
    code = (
        "from cdist import multiprocessing as mp\n"
        "from test_spawn import _answer\n"
        f"mp.start_processes(_answer, ({str(tmp_path)!r},), nprocs=2, start_method={method!r})\n"
    )
    close = functools.partial(os.closerange, 0, 3)
    command = [sys.executable, "-c", code]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}
    assert subprocess.run(command, preexec_fn=close, env=env, timeout=60).returncode == 0
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]
