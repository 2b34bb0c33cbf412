"""One deadline for every call (K83), and who only works is not taken for dead (K85, K86)."""

import ctypes
import os
import signal
import subprocess
import sys
import textwrap
import time

import cdist
import numpy as np
import pytest
from cdist.testing import run

WORLD = 2
CALLS = {
    "all_reduce": lambda **kw: cdist.all_reduce(np.ones(4), **kw),
    "all_reduce of 8 MiB": lambda **kw: cdist.all_reduce(np.ones(1 << 20), **kw),
    "reduce": lambda **kw: cdist.reduce(np.ones(4), 0, **kw),
    "broadcast": lambda **kw: cdist.broadcast(np.ones(4), 1, **kw),
    "all_gather": lambda **kw: cdist.all_gather([np.ones(4), np.ones(4)], np.ones(4), **kw),
    "all_gather_into_tensor": lambda **kw: cdist.all_gather_into_tensor(np.ones(8), np.ones(4), **kw),
    "gather": lambda **kw: cdist.gather(np.ones(4), [np.ones(4), np.ones(4)], **kw),
    "scatter": lambda **kw: cdist.scatter(np.ones(4), src=1, **kw),
    "reduce_scatter": lambda **kw: cdist.reduce_scatter(np.ones(4), [np.ones(4), np.ones(4)], **kw),
    "all_to_all_single": lambda **kw: cdist.all_to_all_single(np.ones(4), np.ones(4), **kw),
    "barrier": lambda **kw: cdist.barrier(**kw),
    "recv": lambda **kw: cdist.recv(np.ones(4), 1, **kw),
    "send": lambda **kw: cdist.send(np.ones(1 << 20), 1, **kw),
    "wait": lambda timeout: cdist.all_reduce(np.ones(4), async_op=True).wait(timeout),
    "wait of irecv": lambda **kw: cdist.irecv(np.ones(4), 1).wait(**kw),
    "wait of isend": lambda **kw: cdist.isend(np.ones(1 << 20), 1).wait(**kw),
    "asynchronous": lambda **kw: cdist.all_reduce(np.ones(4), async_op=True, **kw).wait(),
    "new_group": lambda **kw: cdist.new_group([0, 1], **kw),
}


def _times_out(rank, world, name, how):
    store = cdist.group.WORLD.get_group_store()
    if rank == 1:
        store.get("over")
        return None
    by_default = how == "set_timeout" and name not in ("wait", "new_group")
    if by_default:
        cdist.group.WORLD.set_timeout(0.4)
    start = time.monotonic()
    with pytest.raises(cdist.DistTimeoutError):
        CALLS[name](**{} if by_default else {"timeout": 0.4})
    took = time.monotonic() - start
    store.set("over", "")
    return 0.35 < took < 15  # the group has 60 s


@pytest.mark.parametrize("how", ["timeout=", "set_timeout"])
@pytest.mark.parametrize("name", CALLS)
def test_every_call_ends_at_its_deadline(name, how):
    """K83: by its own argument, and by set_timeout()."""
    assert run(_times_out, WORLD, name, how, group_timeout=60) == [True, None]


@pytest.mark.parametrize("name", ["all_reduce", "barrier", "recv"])
def test_over_tcp_too(name):
    """K83."""
    assert run(_times_out, WORLD, name, "timeout=", group_timeout=60, transport="tcp") == [True, None]


def _zero(rank, world):
    cdist.barrier()
    if rank == 0:
        start = time.monotonic()
        for _ in range(3):
            with pytest.raises(cdist.DistTimeoutError):
                cdist.recv(np.ones(1), 1, timeout=0)
        took = time.monotonic() - start
        cdist.send(np.ones(1), 1)
        return took < 5
    cdist.recv(np.ones(1), 0)
    return True


def test_zero_is_a_poll_and_not_the_default():
    """K83."""
    assert run(_zero, 2, group_timeout=60) == [True, True]


def _holds_the_gil(rank, world):
    cdist.barrier()
    if rank == 0:
        ctypes.PyDLL(None).usleep(3_000_000)  # no other thread of Python runs meanwhile
    x = np.ones(4)
    cdist.all_reduce(x)
    y = np.ones(4)
    cdist.isend(y, 1 - rank)
    cdist.recv(y, 1 - rank)
    return float(x[0])


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_who_holds_the_gil_is_not_dead(transport):
    """K85: what listens for the death of ranks is no thread of Python, and nobody must answer it."""
    assert run(_holds_the_gil, 2, transport=transport) == [2.0, 2.0]


def _alone(rank, world):
    cdist.all_reduce(np.ones(4))
    ctypes.PyDLL(None).usleep(500_000)
    x = np.ones(4)
    cdist.all_reduce(x)
    return float(x[0])


def test_one_process_alone():
    """K85."""
    assert run(_alone, 1, group_timeout=1) == [1.0]


def test_the_launchers_store_outlives_rank_0(tmp_path):
    """K86: rank 0 is killed; rank 1's store calls go on; all are started again."""
    script = tmp_path / "worker.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, signal, time
            import cdist, numpy
            cdist.init_process_group()
            rank, attempt = cdist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = cdist.TCPStore(host, port, is_master=False)
            if attempt == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # until rank 1 is done
                if rank == 0:
                    store.get("ready")  # it may still be on its way out of init
                    os.kill(os.getpid(), signal.SIGKILL)
                store.set("ready", "")
                try:
                    cdist.barrier()
                except cdist.PeerLostError as error:
                    lost = error.rank
                calls = [store.add("after", 1) for _ in range(100)]
                store.set("outcome", f"lost {lost}, {calls[-1]} calls")
                os._exit(0)
            x = numpy.ones(2)
            cdist.all_reduce(x)
            print(rank, attempt, x[0], store.get("outcome").decode(), flush=True)
            """
        )
    )
    settings = dict(os.environ, PYTHONPATH=os.path.dirname(os.path.dirname(cdist.__file__)))
    command = [sys.executable, "-m", "cdist.run", "--nproc-per-node", "2", "--max-restarts", "1", str(script)]
    process = subprocess.Popen(
        command,
        env=settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, err
    words = "1 2.0 lost 0, 100 calls"
    assert sorted(out.splitlines()) == [f"0 {words}", f"1 {words}"], err
