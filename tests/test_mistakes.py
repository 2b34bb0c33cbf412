"""What users get wrong first: one sentence says what, where and what to do instead."""

import os
import resource
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import cdist
import cdist.multiprocessing as mp
import ml_dtypes
import numpy as np
import pytest
from cdist import doctor
from cdist.testing import RankFailedError, run

PACKAGE = str(Path(cdist.__file__).parent.parent)


class _Bare:
    def named_parameters(self):
        return [("weight", np.ones(3))]


def _raises(kind, text, function, *args, **kw):
    with pytest.raises(kind) as caught:
        function(*args, **kw)
    assert text in str(caught.value)


def _calls(rank, world):
    x = np.ones(3)
    _raises(
        TypeError, "op must be a ReduceOp, such as cdist.ReduceOp.SUM, not str", cdist.all_reduce, x, "sum"
    )
    _raises(TypeError, "pass list(x) of an array", cdist.all_gather, np.ones((2, 3)), x)
    _raises(ValueError, "a root is given as src= or dst=", cdist.broadcast, x)
    _raises(TypeError, "tag must be an integer, not str", cdist.send, x, 1 - rank, tag="a")
    _raises(
        ValueError,
        "send: tag must be from -2**63 to 2**63 - 1, not 9223372036854775808",
        cdist.send,
        x,
        1 - rank,
        tag=1 << 63,
    )
    _raises(ValueError, "send: invalid destination rank: 7", cdist.send, x, 7)
    _raises(ValueError, "irecv: invalid source rank: -3", cdist.irecv, x, -3)
    _raises(
        ValueError, "isend: Must specify global_rank or group_rank: a destination is given", cdist.isend, x
    )
    _raises(ValueError, "send: Invalid destination rank", cdist.send, x, rank)
    _raises(ValueError, "or a timedelta, not -2.5", cdist.all_reduce, x, timeout=-2.5)
    for odd in (ml_dtypes.float8_e4m3fnuz, "M8[s]", np.dtype(float).newbyteorder()):
        _raises(TypeError, f"elements of dtype {np.dtype(odd)} (", cdist.all_reduce, np.zeros(3, odd))
    _raises(ValueError, "Call destroy_process_group() in between", cdist.init_process_group)
    _raises(
        TypeError,
        "parameter 'weight' is a bare ndarray: DistributedDataParallel needs .data and .grad",
        cdist.DistributedDataParallel,
        _Bare(),
    )
    _raises(
        TypeError,
        "GradientReducer: ['b'] is of <U1; gradients are real or complex floats",
        cdist.GradientReducer,
        {"a": x, "b": "x"},
    )
    _raises(
        ValueError,
        "GradientReducer: gradient has shape (4,), its parameter (3,)",
        cdist.GradientReducer(x).reduce,
        np.ones(4),
    )
    _raises(
        ValueError, "P2POp: Must specify global_rank or group_rank: give peer", cdist.P2POp, cdist.isend, x
    )
    _raises(ValueError, "P2POp: Global rank 9 is not part of", cdist.P2POp, cdist.isend, x, 9)
    pair = [cdist.P2POp(cdist.isend, x, 1 - rank, group) for group in (None, cdist.new_group([0, 1]))]
    _raises(ValueError, "call it once for each group", cdist.batch_isend_irecv, pair)
    cdist.destroy_process_group(pair[1].group)
    _raises(ValueError, "it was destroyed before", cdist.destroy_process_group, pair[1].group)
    destroyed = f"rank {rank} in all_reduce: the process group was destroyed"
    _raises(cdist.AbortedError, destroyed, cdist.all_reduce, x, group=pair[1].group)
    cdist.barrier()
    return "nothing was sent"


def test_mistakes_in_calls():
    assert run(_calls, 2) == ["nothing was sent"] * 2


@pytest.mark.parametrize(
    ("kind", "text", "given"),
    [
        (AssertionError, "init_process_group(init_method='env://')", {"backend": "env://"}),
        (AssertionError, "Unknown backend type foo: use gloo", {"backend": "foo"}),
        (RuntimeError, "MPI built in: use gloo", {"backend": "mpi"}),
        (TypeError, "datetime.timedelta, or a number of seconds, got '30'", {"timeout": "30"}),
        (RuntimeError, "should be env://, tcp://HOST:PORT or file:///PATH", {"init_method": "localhost:1"}),
        (ValueError, "port number missing: write tcp://HOST:PORT", {"init_method": "tcp://h", "rank": 0}),
        (ValueError, "rank parameter missing: give rank=", {"init_method": "tcp://h:1"}),
        (ValueError, "three slashes", {"init_method": "file://name", "rank": 0, "world_size": 1}),
        (RuntimeError, "`rank` must be an integer. '0'", {"rank": "0"}),
    ],
)
def test_mistakes_in_set_up(kind, text, given):
    _raises(kind, text, cdist.init_process_group, **given)
    _raises(AssertionError, "init_process_group was not called", cdist.destroy_process_group)


def test_srun_is_named_in_a_slurm_job(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    _raises(ValueError, "or in a SLURM job with srun, or set RANK", cdist.init_process_group)


def _nothing(index):
    pass


def test_mistakes_with_spawn():
    _raises(TypeError, "pass it without calling it", mp.spawn, _nothing(0), nprocs=2)
    _raises(TypeError, "args should be a tuple of arguments, such as (2,), not 2", mp.spawn, _nothing, 2, 2)
    _raises(TypeError, "nprocs should be a number of processes, not '2'", mp.spawn, _nothing, nprocs="2")
    with pytest.raises(Exception, match="pickle") as caught:
        mp.spawn(lambda index: None, nprocs=1)
    assert "no lambda" in caught.value.__notes__[0]


def test_what_holds_for_several_ranks_is_said_once():
    text = "ended with TypeError: op must be a ReduceOp, at a.py:3 in f"
    row = {"pid": 1, "known": "dump", "last": "", "where": ""}
    found = {
        "verdict": f"rank 0 {text}",
        "findings": [f"rank {rank} {text}" for rank in range(3)] + ["rank 3 is gone"],
        "causes": ["rank 0 was lost: rank 0 ended with TypeError: op must be a ReduceOp"],
        "ranks": [row | {"rank": rank} for rank in range(4)],
    }
    lines = doctor.render(found).splitlines()[5:]
    assert lines == ["also: rank 3 is gone", f"at fault: rank 0 {text}", "the same is true of rank 1, 2"]


def test_commands_work_without_docstrings():
    env = os.environ | {"PYTHONPATH": PACKAGE, "PYTHONOPTIMIZE": "2"}
    for command in (["-m", "cdist.doctor", "--help"], ["-m", "cdist.run", "--help"]):
        done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


def test_a_script_may_set_the_master_port_under_cdistrun(tmp_path):
    """As many tutorials do; torchrun's processes would wait at that port for a store that nobody has.

    TMPDIR is one that is not there, too.
    """
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, socket
            import cdist, numpy as np
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            if os.environ["RANK"] == "0":
                cdist.FileStore("port").set("port", str(port))
            os.environ["MASTER_ADDR"] = "localhost"
            os.environ["MASTER_PORT"] = cdist.FileStore("port").get("port").decode()
            cdist.init_process_group(timeout=20)
            x = np.ones(1)
            cdist.all_reduce(x)
            print(int(x[0]))
            """
        )
    )
    env = os.environ | {"PYTHONPATH": PACKAGE, "TMPDIR": str(tmp_path / "nowhere")}
    command = [sys.executable, "-m", "cdist.run", "--nproc-per-node", "2", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "2\n2\n"), done.stderr


def _in_a_process(body):
    script = textwrap.dedent(body)
    command = [sys.executable, "-c", script]
    return subprocess.run(
        command, env=os.environ | {"PYTHONPATH": PACKAGE}, capture_output=True, text=True, timeout=60
    )


def test_a_call_at_the_end_of_the_program_says_that_the_group_is_destroyed(tmp_path):
    done = _in_a_process(f"""
        import cdist, numpy
        class Late:
            def __del__(self):
                try:
                    cdist.barrier()
                except ValueError as error:
                    print(error)
                try:
                    cdist.get_rank()
                except ValueError as error:
                    print(error)
        late = Late()
        try:
            cdist.barrier()
        except ValueError as error:
            print(error)
        cdist.init_process_group(init_method="file://{tmp_path}/meet", rank=0, world_size=1)
        """)
    early, barrier, rank = done.stdout.splitlines()
    said = "Default process group has not been initialized, please make sure to call init_process_group."
    ended = " The one that was there is destroyed: by destroy_process_group(), or because the program ends"
    assert (early, barrier, rank) == (f"barrier: {said}", f"barrier: {said}{ended}", f"{said}{ended}")


def _limited(rank, world, path):
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, resource.RLIM_INFINITY))
    with pytest.raises((MemoryError, cdist.DistError)) as caught:
        cdist.init_process_group(init_method=f"file://{path}", rank=rank, world_size=world, timeout=20)
    return type(caught.value).__name__, str(caught.value)


def test_a_limit_of_file_sizes_is_named(tmp_path):
    (kind, text), _ = run(_limited, 2, tmp_path / "meet", init=False)
    assert kind == "MemoryError"
    assert "ulimit -f unlimited lifts it, CDIST_TRANSPORT=tcp does without" in text


def _destroy_meanwhile(rank, world, call):
    group = cdist.group.WORLD
    if rank:
        group.get_group_store().get("over")
        return None
    x = np.zeros(3)
    calls = {"all_reduce": lambda: cdist.all_reduce(x), "recv": lambda: cdist.recv(x, 1)}
    said = []

    def wait():
        try:
            calls[call]()
        except cdist.AbortedError as error:
            said.append(str(error))

    store = group.get_group_store()
    waiter = threading.Thread(target=wait)
    waiter.start()
    while cdist._core._records(group, 0, 1)["operations"][:1] in ([], None) or (
        cdist._core._records(group, 0, 1)["operations"][0]["state"] != "running"
    ):
        time.sleep(0.001)
    cdist.destroy_process_group()
    waiter.join()
    store.set("over", "")
    return said


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize(
    ("call", "begin"),
    [("all_reduce", "rank 0 in all_reduce (sequence 1): "), ("recv", "rank 0 in recv(from 1, tag 0): ")],
)
def test_a_call_that_destroy_cuts_off_is_named(call, begin, transport):
    (text,) = run(_destroy_meanwhile, 2, call, transport=transport)[0]
    assert text.startswith(f"{begin}the process group was destroyed: destroy_process_group() comes after"), (
        text
    )


def test_dumps_of_another_job_are_not_left_behind_by_this_one(tmp_path, monkeypatch):
    """The recorder's files of all jobs of a machine lie in one folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def body(rank, world, pid):
        (tmp_path / f"cdist-rank0-pid{pid or os.getpid()}.json").write_text("{}")

    run(body, 1, 1)
    with pytest.raises(RankFailedError, match="left behind.*cdist-rank0-pid"):
        run(body, 1, None)
