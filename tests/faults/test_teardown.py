"""Teardown, init again, abort, exit, fork: cases K88 to K95."""

import contextlib
import io
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from datetime import timedelta

import cdist
import numpy as np
import pytest
from cdist.testing import run
from tally import Tally
from threads import count_threads, ctrl_c_soon

PYTHON = os.path.dirname(os.path.dirname(cdist.__file__))


def _store(port):
    return cdist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)


@pytest.fixture
def server():
    return cdist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def _abort_and_again(rank, world, port, through):
    cdist.init_process_group(
        store=cdist.PrefixStore("a", _store(port)), rank=rank, world_size=world, timeout=20
    )
    x = np.ones(1 << 18)
    cdist.all_reduce(x)
    through.note(rank)
    if rank == 2:
        through.wait_for(world)
        os.kill(os.getpid(), signal.SIGSTOP)
        return "thawed"
    frozen = cdist._core._records(cdist.group.WORLD, 2, 1)["pid"]
    work = cdist.all_reduce(x, async_op=True)
    time.sleep(0.1)
    start = time.monotonic()
    cdist.group.WORLD.abort("rank 2 hangs")
    with pytest.raises(cdist.AbortedError):
        work.wait()
    cdist.destroy_process_group()
    new = {0: 0, 1: 1, 3: 2}[rank]
    again = cdist.PrefixStore("b", _store(port))
    cdist.init_process_group(store=again, rank=new, world_size=3, timeout=20)
    y = np.ones(4)
    cdist.all_reduce(y)
    seconds = time.monotonic() - start
    cdist.barrier()
    if rank == 0:
        os.kill(frozen, signal.SIGCONT)
    return float(y[0]), seconds < 10  # and not the 20 s of the group


def test_healthy_ranks_drop_a_group_while_another_hangs(server):
    """K88."""
    outcomes = run(_abort_and_again, 4, server.port, Tally(), init=False)
    assert outcomes == [(3.0, True), (3.0, True), "thawed", (3.0, True)]


def _script(tmp_path, text, world=2, limit=20, **environ):
    """Run a program as `world` ranks by hand; return [(exit code, stdout, stderr)] and the seconds."""
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(text))
    server = cdist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    settings = dict(os.environ, PYTHONPATH=PYTHON, WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1")
    settings.update(MASTER_PORT=str(server.port), TORCHELASTIC_USE_AGENT_STORE="True", **environ)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(path)],
            env=dict(settings, RANK=str(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for rank in range(world)
    ]
    start, outcomes = time.monotonic(), []
    try:
        for process in ranks:
            out, err = process.communicate(timeout=limit)
            outcomes.append((process.returncode, out, err))
    finally:
        for process in ranks:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    del server
    return outcomes, time.monotonic() - start


def test_finally_destroy_is_safe(tmp_path):
    """K89."""
    outcomes, seconds = _script(
        tmp_path,
        """
        import cdist, numpy
        cdist.init_process_group()
        try:
            if cdist.get_rank() == 1:
                raise ValueError("mine")
            cdist.all_reduce(numpy.ones(3))
            cdist.all_reduce(numpy.ones(3))
        finally:
            cdist.destroy_process_group()
        """,
    )
    assert [code for code, _, _ in outcomes] == [1, 1]
    assert "PeerLostError" in outcomes[0][2]
    assert "rank 1" in outcomes[0][2]
    assert "ValueError: mine" in outcomes[1][2]
    assert seconds < 10


def test_an_exception_reaches_the_others_without_user_code(tmp_path):
    """K28."""
    outcomes, _ = _script(
        tmp_path,
        """
        import cdist
        cdist.init_process_group()
        if cdist.get_rank() == 0:
            raise ValueError("no good")
        cdist.barrier()
        """,
    )
    assert "[rank0]: ValueError: no good" in outcomes[0][2]
    assert "PeerLostError" in outcomes[1][2]
    assert "ValueError: no good" in outcomes[1][2]


@pytest.mark.parametrize(
    ("ending", "pending"),
    [
        ("", 0),
        ("sys.exit(0)", 0),
        ("work = cdist.irecv(numpy.ones(1), 1 - cdist.get_rank())", 1),
        ("work = cdist.all_reduce(numpy.ones(1000), async_op=True)", 1),
        ("work = cdist.isend(numpy.ones(1000000), 1 - cdist.get_rank(), group=cdist.new_group())", 1),
    ],
)
def test_exit_without_destroy_is_quiet(tmp_path, ending, pending):
    """K95: and one line tells of operations that nobody waited for, messages too."""
    outcomes, seconds = _script(
        tmp_path,
        f"""
        import sys, cdist, numpy
        cdist.init_process_group()
        cdist.all_reduce(numpy.ones(3))
        cdist.barrier()
        if cdist.get_rank() == 1:
            # A message to a rank that has left is over, not under way: rank 0 leaves while rank 1 is here.
            done = cdist.new_group() if "new_group" in {ending!r} else None
            try:
                cdist.recv(numpy.ones(1), 0, tag=7)
            except cdist.PeerLostError:
                sys.exit(0)
        {ending}
        """,
    )
    for rank, (code, out, err) in enumerate(outcomes):
        assert (code, out) == (0, "")
        lines = err.splitlines()
        assert len(lines) == (bool(pending) and rank == 0)
        assert all(f"{pending} asynchronous operation(s) were not complete" in line for line in lines)
    assert seconds < 10


def _chain(rank, world):
    cdist.barrier()
    if rank == 2:
        return None
    try:
        cdist.recv(np.ones(1), rank + 1)
    except cdist.PeerLostError as error:
        if rank == 0:
            return error.rank, str(error)
        with contextlib.redirect_stderr(io.StringIO()):
            sys.excepthook(type(error), error, error.__traceback__)  # uncaught
        os._exit(1)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_who_dies_of_anothers_leaving_is_not_blamed(transport):
    """Messages alone: rank 2 left, rank 1 waits for it and dies of that, rank 0 waits for rank 1."""
    (blamed, text), _, _ = run(_chain, 3, transport=transport, allow_failures=True)
    assert blamed == 2, text
    assert "rank 1 ended with PeerLostError" in text


def _leave_early(rank, world):
    x, message = np.full(70_000, rank + 1.0), np.zeros(50_000)
    cdist.barrier()
    if rank == 1:
        time.sleep(0.5)
    work = cdist.all_reduce(x, async_op=True)
    if rank == 0:
        cdist.isend(np.ones(50_000), 1)
        cdist.destroy_process_group()  # nobody has waited for anything
        return None
    work.wait()
    if rank == 1:
        cdist.recv(message, 0)
    return float(x[-1]), float(message[-1])


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_who_leaves_first_lets_go_out_what_it_owes(transport):
    """A late rank gets what an early one has promised, although that one leaves at once."""
    assert run(_leave_early, 3, transport=transport) == [None, (6.0, 1.0), (6.0, 0.0)]


@pytest.mark.parametrize("raises", [False, True])
def test_a_failed_isend_that_nobody_waited_for_is_told(tmp_path, raises):
    """Unless the loss of the rank that ended it was raised."""
    outcomes, _ = _script(
        tmp_path,
        f"""
        import cdist, numpy
        cdist.init_process_group()
        cdist.barrier()
        if cdist.get_rank() == 0:
            failed = cdist.isend(numpy.ones(1_000_000), 1, tag=3)
            if {raises}:
                other = cdist.irecv(numpy.ones(1), 1)
            else:
                other = cdist.isend(numpy.ones(1_000_000), 1, tag=4)
            try:
                while not other.is_completed():
                    pass
                if {raises}:
                    other.wait()
            except cdist.PeerLostError:
                print("raised")
        """,
    )
    assert [code for code, _, _ in outcomes] == [0, 0]
    lines = outcomes[0][2].splitlines()
    if raises:
        assert (outcomes[0][1], lines) == ("raised\n", [])
    else:
        (line,) = lines
        assert line.startswith("[rank0]: cdist: 2 isend(s) failed and nobody waited")
        assert "to rank 1 (tag 3, 8000000 bytes)" in line
    assert outcomes[1][2] == ""


@pytest.mark.parametrize("waited", [11, 12])
def test_failed_isends_are_counted(tmp_path, waited):
    """More than are remembered with their texts."""
    outcomes, _ = _script(
        tmp_path,
        f"""
        import cdist, numpy
        cdist.init_process_group()
        works = [cdist.isend(numpy.ones(100_000), 1, tag=t) for t in range(12 * (1 - cdist.get_rank()))]
        for tag in range(12 * cdist.get_rank()):
            try:
                cdist.recv(numpy.ones(1), 0, tag=tag)
            except cdist.MismatchError:
                print(tag)
        for work in works[:{waited}]:
            try:
                work.wait()
            except cdist.MismatchError:
                pass
        while not all(work.is_completed() for work in works):
            pass
        cdist.barrier()
        """,
    )
    assert [code for code, _, _ in outcomes] == [0, 0]
    assert len(outcomes[1][1].splitlines()) == 12
    assert len(outcomes[0][2].splitlines()) == 12 - waited
    if waited < 12:
        assert "1 isend(s) failed and nobody waited" in outcomes[0][2]


def _drop_a_group(rank, world):
    made = cdist._core.ProcessGroup._create(cdist.group.WORLD, tuple(range(world)), 10.0, 10.0)
    x = np.ones(3)
    cdist.all_reduce(x, group=made)
    del made
    again = cdist.new_group()
    cdist.all_reduce(x, group=again)
    return float(x[0])


def test_group_that_nobody_kept():
    """A signal's exception between making a group and keeping it leaves the world without a stale group."""
    assert run(_drop_a_group, 2) == [4.0, 4.0]


def test_import_has_no_side_effects():
    program = """
    import os, signal, sys, threading
    before = (dict(os.environ), os.sched_getaffinity(0), len(os.listdir("/proc/self/task")), sys.excepthook,
              [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2, signal.SIGCHLD)],
              len(os.listdir("/proc/self/fd")))
    import numpy
    threads = len(os.listdir("/proc/self/task"))
    import cdist, cdist.store, cdist.recorder, cdist.elastic, cdist.doctor
    after = (dict(os.environ), os.sched_getaffinity(0), before[2], sys.excepthook,
             [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2, signal.SIGCHLD)],
             len(os.listdir("/proc/self/fd")))
    assert before == after, (before, after)
    assert len(os.listdir("/proc/self/task")) == threads
    assert "torch" not in sys.modules
    """
    settings = dict(os.environ, PYTHONPATH=PYTHON)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=settings,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def _cycles(rank, world, port, count):
    chance = random.Random(rank)
    store = _store(port)
    for cycle in range(count):
        cdist.init_process_group(store=store, rank=rank, world_size=world, timeout=20)
        x = np.full(3, rank + cycle)
        cdist.all_reduce(x)
        assert x[0] == sum(r + cycle for r in range(world))
        cdist.destroy_process_group()
        time.sleep(chance.random() * 0.05)


def _one_port(rank, world, port, count):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    for cycle in range(count):
        cdist.init_process_group(timeout=20)
        x = np.full(3, rank + cycle)
        cdist.all_reduce(x)
        assert x[0] == sum(r + cycle for r in range(world))
        cdist.destroy_process_group()


def test_a_hundred_cycles_on_one_port_without_a_sleep():
    """K91: rank 0's server is a new one each time, on the port of the last."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run(_one_port, 3, port, 100, init=False, timeout=100)


def _no_sleep(rank, world, port, count):
    store = _store(port)
    for cycle in range(count):
        cdist.init_process_group(store=store, rank=rank, world_size=world, timeout=20)
        x = np.full(3, rank + cycle)
        cdist.all_reduce(x)
        assert x[0] == sum(r + cycle for r in range(world))
        cdist.destroy_process_group()


def test_a_hundred_cycles_on_one_store_without_a_sleep(server):
    """K91."""
    run(_no_sleep, 4, server.port, 100, init=False, timeout=100)


def test_a_hundred_cycles_on_one_store(server):
    """K91."""
    run(_cycles, 4, server.port, 100, init=False, timeout=100)


def _late(rank, world, port):
    store = _store(port)
    if rank == 1:
        time.sleep(1.0)
        limit = 10
    else:
        with pytest.raises(cdist.DistTimeoutError, match=r"missing ranks \[1\]"):
            cdist.init_process_group(store=store, rank=rank, world_size=world, timeout=0.5)
        assert not cdist.is_initialized()
        limit = 10
    cdist.init_process_group(store=store, rank=rank, world_size=world, timeout=limit)
    x = np.ones(2)
    cdist.all_reduce(x)
    return float(x[0])


def test_after_a_failed_init_the_next_one_works(server):
    """K92."""
    assert run(_late, 2, server.port, init=False) == [2.0, 2.0]


def _baseline():
    names = [f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd")]
    kinds = sorted(os.readlink(name).partition("[")[0] for name in names if os.path.islink(name))
    return count_threads(), kinds, threading.active_count()


def _clean(rank, world, port):
    before = None
    for _ in range(3):
        store = _store(
            port
        )  # a store keeps a connection for each call that ran at the same time: a new one each time
        cdist.init_process_group(store=store, rank=rank, world_size=world, timeout=20)
        work = cdist.all_reduce(np.ones(10), async_op=True)
        work.wait()
        half = cdist.new_group([0, 1])
        if rank < 2:
            cdist.all_reduce(np.ones(10), group=half, async_op=True).wait()
            cdist.isend(np.ones(4), 1 - rank).wait()
            cdist.recv(np.ones(4), 1 - rank)
        cdist.barrier()
        del work, half
        cdist.destroy_process_group()
        del store
        if before is None:
            before = _baseline()
    return before, _baseline()


def test_threads_and_descriptors_go_back(server):
    """K94."""
    for before, after in run(_clean, 3, server.port, init=False):
        assert after == before
    assert server.num_keys() == 0


def _fork(rank, world):
    cdist.barrier()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            cdist.all_reduce(np.ones(2))
            os.write(writer, b"worked")
        except cdist.AbortedError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    text = b"".join(iter(lambda: os.read(reader, 4096), b""))
    os.waitpid(pid, 0)
    x = np.ones(2)
    cdist.all_reduce(x)
    return text.decode(), float(x[0])


def test_a_forked_child_gets_an_error_and_the_parent_goes_on():
    """A fork after init: the child is told, the parent is not disturbed."""
    for text, total in run(_fork, 2):
        assert "forked" in text
        assert total == 2.0


def _fork_with_works(rank, world):
    """The child lets go of everything that it was given; the parent goes on with it."""
    other = 1 - rank
    in_arena = cdist.empty((1 << 18,), np.float64)  # enough for its pages to be given back
    in_arena.fill(5)
    received = np.zeros(3)
    receive = cdist.irecv(received, other)
    gate = cdist.new_group([0, 1])
    pending = cdist.all_reduce(np.ones(3), group=gate, async_op=True) if rank == 0 else None
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        told = []
        calls = [receive.wait, cdist.shrink, lambda: cdist.new_group([0, 1])]
        for call in calls + ([pending.wait] if pending else []):
            try:
                call()
                told.append("worked")
            except cdist.AbortedError as error:
                told.append(str(error))
        told.append(str(receive.is_completed()))
        del in_arena
        own = cdist.empty((1 << 18,), np.float64)
        own.fill(9)
        cdist.group.WORLD.abort()
        del receive, call, calls, pending
        cdist.destroy_process_group()
        os.write(writer, "\n".join(told).encode())
        os._exit(0)
    os.close(writer)
    text = b"".join(iter(lambda: os.read(reader, 4096), b""))
    os.waitpid(pid, 0)
    cdist.barrier()
    if pending:
        pending.wait()
    else:
        cdist.all_reduce(np.ones(3), group=gate)
    cdist.send(np.full(3, rank + 1.0), other)
    receive.wait()
    return text.decode().split("\n"), set(in_arena), list(received)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_what_a_forked_child_inherits_stays_the_parents(transport):
    for rank, (told, in_arena, received) in enumerate(run(_fork_with_works, 2, transport=transport)):
        *errors, completed = told
        assert len(errors) == 4 - rank
        assert all("forked" in text for text in errors)
        assert completed == "False"
        assert in_arena == {5.0}
        assert received == [2.0 - rank] * 3


def _huge():
    return np.ones(1 << 21)


BLOCKING = {
    "all_reduce": lambda: cdist.all_reduce(np.ones(3)),
    "all_reduce of 16 MiB": lambda: cdist.all_reduce(_huge()),
    "broadcast": lambda: cdist.broadcast(np.ones(3), 0),
    "all_gather": lambda: cdist.all_gather([np.ones(3), np.ones(3)], np.ones(3)),
    "barrier": lambda: cdist.barrier(),
    "monitored_barrier": lambda: cdist.monitored_barrier(),
    "send": lambda: cdist.send(_huge(), 0),
    "recv": lambda: cdist.recv(np.ones(2), 0),
    "recv from anyone": lambda: cdist.recv(np.ones(2)),
    "wait": lambda: cdist.all_reduce(np.ones(3), async_op=True).wait(),
    "wait of a receive": lambda: cdist.irecv(np.ones(3), 0).wait(),
    "future": lambda: cdist.all_reduce(np.ones(3), async_op=True).get_future().wait(),
    "gather_object": lambda: cdist.all_gather_object([None] * 2, 1),
    "new_group": lambda: cdist.new_group([0, 1]),
}
STORE_CALLS = {
    "store.get": lambda store: store.get("never"),
    "store.wait": lambda store: store.wait(["never"], timedelta(seconds=20)),
    "store.barrier": lambda store: store.barrier("never", 2, timedelta(seconds=20)),
    "store.queue_pop": lambda store: store.queue_pop("never"),
    "store.multi_get": lambda store: store.multi_get(["never", "ever"]),
}


def _interrupt(rank, world, where):
    store = cdist.group.WORLD.get_group_store()
    if rank == 0:
        store.wait(["interrupted"], timedelta(seconds=20))
        return None
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt), ctrl_c_soon():
        BLOCKING[where]() if where in BLOCKING else STORE_CALLS[where](store)
    took = time.monotonic() - start
    store.set("interrupted", "")
    return took < 5  # and not the 30 s of the group


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("where", BLOCKING)
def test_ctrl_c_in_every_blocking_call(where, transport):
    """K119."""
    assert run(_interrupt, 2, where, transport=transport) == [None, True]


def _interrupt_destroy(rank, world, which):
    store = cdist.group.WORLD.get_group_store()
    group = cdist.new_group()
    if rank == 0:
        store.wait(["interrupted"], timedelta(seconds=20))
        return None
    work = cdist.isend(_huge(), 0, group=group)  # for which nobody asks
    with pytest.raises(KeyboardInterrupt), ctrl_c_soon():
        cdist.destroy_process_group(group if which == "group" else None)
    closed = not cdist.is_initialized() if which == "all" else group not in cdist.groups._registry.groups
    with pytest.raises(cdist.DistError):
        work.wait()
    store.set("interrupted", "")
    return closed


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("which", ["group", "all"])
def test_ctrl_c_while_destroy_lets_messages_go_out(which, transport):
    """It is over at once, and the group is closed all the same."""
    assert run(_interrupt_destroy, 2, which, transport=transport) == [None, True]


@pytest.mark.parametrize("where", STORE_CALLS)
def test_ctrl_c_in_every_call_of_a_store(where):
    """K119."""
    assert run(_interrupt, 2, where) == [None, True]


def test_ctrl_c_while_a_store_waits_for_its_workers():
    """K119: the constructor that waits for a worker that never comes."""
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt), ctrl_c_soon():
        cdist.TCPStore("127.0.0.1", 0, 2, True, timedelta(seconds=20))
    assert time.monotonic() - start < 5


def _abort_from_a_thread(rank, world, where):
    store = cdist.group.WORLD.get_group_store()
    if rank == 0:
        store.wait(["aborted"], timedelta(seconds=20))
        return None
    timer = threading.Timer(0.2, cdist.group.WORLD.abort, ["from a thread"])
    timer.start()
    start = time.monotonic()
    with pytest.raises(cdist.AbortedError, match="from a thread"):
        BLOCKING[where]()
    took = time.monotonic() - start
    timer.join()
    with pytest.raises(cdist.AbortedError, match="from a thread"):
        cdist.barrier()
    store.set("aborted", "")
    return took < 5


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("where", BLOCKING)
def test_abort_from_another_thread_ends_every_call(where, transport):
    """K88."""
    assert run(_abort_from_a_thread, 2, where, transport=transport) == [None, True]


def _init_interrupt(rank, world, port):
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt), ctrl_c_soon():
        cdist.init_process_group(store=_store(port), rank=rank, world_size=2, timeout=20)
    return time.monotonic() - start < 10  # and not the 20 s of the call


def test_ctrl_c_in_init(server):
    """K119."""
    assert run(_init_interrupt, 1, server.port, init=False) == [True]


def _queue_of_eight(rank, world):
    cdist.barrier()
    start, outcomes, works = time.monotonic(), [], []
    for _ in range(8):
        try:
            works.append(cdist.all_reduce(np.ones(1 << 18), async_op=True))
        except cdist.PeerLostError as error:  # already known
            outcomes.append(error.rank)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for work in works:
        try:
            work.wait()
            outcomes.append("done")
        except cdist.PeerLostError as error:
            outcomes.append(error.rank)
    return outcomes, time.monotonic() - start < 10  # and not the deadline of the group


def test_every_queued_work_returns_or_raises():
    """K08."""
    outcomes = run(_queue_of_eight, 4, allow_failures=True)
    for rank in (0, 2, 3):
        results, soon = outcomes[rank]
        assert soon
        assert len(results) == 8
        assert set(results) <= {"done", 1}


def _cpu_while_waiting(rank, world, through):
    x = np.ones(1 << 21)
    cdist.all_reduce(x)
    through.note(rank)
    if rank == 2:
        through.wait_for(world)
        pid = os.getpid()
        subprocess.Popen(["sh", "-c", f"sleep 2; kill -CONT {pid}"])
        os.kill(pid, signal.SIGSTOP)
    before, start = time.process_time(), time.monotonic()
    y = np.ones(1 << 21)
    cdist.all_reduce(y)
    used, seconds = time.process_time() - before, time.monotonic() - start
    return float(y[0]), used / seconds, seconds > 1


def test_a_thawed_rank_goes_on_and_waiting_costs_little():
    """K07."""
    for rank, (total, share, waited) in enumerate(run(_cpu_while_waiting, 3, Tally(), check_leftovers=False)):
        assert total == 3.0
        if rank != 2:
            assert waited
            assert share < 0.2
