"""Runs a function on several ranks: as processes that are forked from this one, or as threads.

    def body(rank, world):
        x = numpy.full(3, rank + 1.0)
        cdist.all_reduce(x)
        return x

    outputs = cdist.testing.run(body, 4)

Every run has a hard time limit and its own process group, and afterwards it is checked that no process,
descriptor, shared memory or temporary file is left.
"""

import contextlib
import os
import pickle
import select
import signal
import sys
import tempfile
import threading
import time
import traceback

__all__ = ["run", "run_threads", "RankFailedError"]


class RankFailedError(AssertionError):
    """A rank raised, died or did not end in time.

    Attributes:
        rank: the first that failed.
        error: its exception, or None.
        outcomes: for each rank what it returned, or its exception.

    """

    def __init__(self, text, rank=None, error=None, outcomes=None):
        super().__init__(text)
        self.rank, self.error, self.outcomes = rank, error, outcomes


def _portable(error):
    """Return the exception if it survives pickle, otherwise its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _child(pipe, rank, world, function, args, init, environ):
    os.environ.update(environ)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world)
    )
    try:
        if init is not None:
            init(rank, world)
        outcome = (True, function(rank, world, *args), "")
        import cdist

        if cdist.is_initialized():
            cdist.destroy_process_group()
        data = pickle.dumps(outcome)
    except BaseException as error:
        data = pickle.dumps((False, _portable(error), traceback.format_exc()))
    sys.stdout.flush()
    sys.stderr.flush()
    while data:
        data = data[os.write(pipe, data) :]


def _start(rank, world, function, args, init, environ):
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        return pid, reader
    status = 1
    try:
        os.close(reader)
        os.setpgid(0, 0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _child(writer, rank, world, function, args, init, environ)
        status = 0
    finally:
        os._exit(status)


def _collect(readers, deadline):
    """Read every pipe to its end; returns the bytes of each rank and whether time was enough."""
    got = {reader: bytearray() for reader in readers}
    open_pipes = set(readers)
    while open_pipes:
        left = deadline - time.monotonic()
        ready = select.select(list(open_pipes), [], [], max(left, 0))[0] if left > 0 else []
        if not ready and left <= 0:
            return [got[r] for r in readers], False
        for reader in ready:
            piece = os.read(reader, 1 << 20)
            got[reader] += piece
            if not piece:
                open_pipes.discard(reader)
    return [got[r] for r in readers], True


def _groups_alive(pids):
    alive = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError, IndexError, ValueError):
            with open(f"/proc/{entry}/stat") as stat:
                fields = stat.read().rpartition(")")[2].split()
            if int(fields[2]) in pids and fields[0] != "Z":
                alive.append(int(entry))
    return alive


def _leftovers():
    """List what a run could leave behind, as sets that are compared before and after.

    A launcher's folder (cdistrun_…) belongs to another job: ranks that are forked here make none.
    """
    descriptors = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            descriptors[number] = os.readlink(f"/proc/self/fd/{number}")
    files = set()
    for folder in ("/dev/shm", tempfile.gettempdir()):
        with contextlib.suppress(OSError):
            files |= {
                os.path.join(folder, name)
                for name in os.listdir(folder)
                if name.startswith(("cdist", "torch_")) and not name.startswith("cdistrun_")
            }
    return set(descriptors.items()), files


def _reap(pids, grace):
    """Exit status of each, None for those that had to be killed."""
    statuses = dict.fromkeys(pids)
    end = time.monotonic() + grace
    left = set(pids)
    while left:
        for pid in list(left):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                statuses[pid] = os.waitstatus_to_exitcode(status)
                left.discard(pid)
        if left and time.monotonic() >= end:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            for pid in left:
                os.waitpid(pid, 0)
            break
        time.sleep(0.002)
    return statuses


def _tcp_init(backend, timeout, **options):
    """Return a store in this process, and the function that lets a child meet the others through it."""
    from cdist.store import TCPStore

    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    port = server.port

    def init(rank, world):
        import cdist
        from cdist.store import TCPStore

        store = TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
        cdist.init_process_group(
            backend, store=store, rank=rank, world_size=world, timeout=timeout, **options
        )

    return server, init


def run(
    function,
    world=2,
    *args,
    timeout=60,
    group_timeout=30,
    transport=None,
    backend="gloo",
    init=True,
    environ=None,
    allow_failures=False,
    check_leftovers=True,
):
    """Run ``function(rank, world, *args)`` in `world` forked processes; return what they returned, by rank.

    Args:
        function: any callable; need not be picklable, what it returns must be.
        world: number of ranks.
        args: further arguments.
        timeout: seconds after which the processes are killed and RankFailedError is raised.
        group_timeout: timeout of the process group in seconds.
        transport: None, "shm" or "tcp" (CDIST_TRANSPORT).
        backend: of init_process_group.
        init: call init_process_group before the function, and destroy_process_group after it.
        environ: further environment variables of the processes.
        allow_failures: return exceptions (and exit codes of ranks that died) in place of results instead of
            raising.
        check_leftovers: check descriptors, shared memory and temporary files afterwards.

    Raises:
        RankFailedError: with the traceback of the first rank that failed.

    """
    before = _leftovers()
    environ = {k: str(v) for k, v in (environ or {}).items()}
    if transport:
        environ["CDIST_TRANSPORT"] = "tcp" if transport == "tcp" else "auto"
    server, initialise = _tcp_init(backend, group_timeout) if init is True else (None, init or None)
    deadline = time.monotonic() + timeout
    children, data, in_time = [], [], False
    try:
        for rank in range(world):
            children.append(_start(rank, world, function, args, initialise, environ))
        data, in_time = _collect([reader for _, reader in children], deadline)
    finally:
        pids = [pid for pid, _ in children]
        statuses = _reap(pids, 5 if in_time else 0)
        strays = _groups_alive(set(pids))
        for pid in strays:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for _, reader in children:
            os.close(reader)
        del server
    outcomes, failed = _judge(data, [statuses[pid] for pid in pids])
    if not in_time:
        late = [rank for rank, piece in enumerate(data) if not piece]
        raise RankFailedError(
            f"ranks {late} did not end within {timeout} s", late[0] if late else None, None, outcomes
        )
    if failed and not allow_failures:
        rank, error, text = failed[0]
        raise RankFailedError(f"rank {rank} of {world} failed:\n{text}", rank, error, outcomes)
    if strays:
        raise RankFailedError(f"processes were left running: {strays}")
    if check_leftovers:
        _compare_leftovers(before, pids)
    return outcomes


def _judge(data, statuses):
    outcomes, failed = [], []
    for rank, (piece, status) in enumerate(zip(data, statuses, strict=True)):
        if not piece:
            outcomes.append(status)
            failed.append((rank, None, f"it ended with status {status} without a result"))
            continue
        ok, value, text = pickle.loads(bytes(piece))
        outcomes.append(value)
        if not ok:
            failed.append((rank, value, text))
    # A rank that failed of itself explains more than those that lost it.
    failed.sort(key=lambda failure: isinstance(failure[1], RuntimeError))
    return outcomes, failed


def _is_of_another_job(path, pids):
    """Tell that a recorder's file is of a process that is none of `pids`."""
    name, _, number = os.path.basename(path).removesuffix(".json").rpartition("-pid")
    return name.startswith("cdist-rank") and number.isdigit() and int(number) not in pids


def _compare_leftovers(before, pids):
    # A store of this process may not yet have closed the connections of ranks that have ended.
    for _ in range(100):
        after = _leftovers()
        left = sorted(path for path in after[1] - before[1] if not _is_of_another_job(path, pids))
        opened = sorted(
            what for _, what in after[0] - before[0] if what.startswith(("socket:", "/memfd:", "anon_inode:"))
        )
        if not left and not opened:
            return
        time.sleep(0.02)
    raise RankFailedError(f"left behind: files {left}, descriptors {opened}")


def run_threads(function, world=2, *args, timeout=60, group_timeout=30, force_tcp=False):
    """Run ``function(group, *args)`` in `world` threads of this process.

    Each has its own group object of one world. Returns what they returned, by rank; raises RankFailedError
    with the first failure.
    """
    from cdist.process_group import ProcessGroup
    from cdist.store import HashStore

    store = HashStore()
    results: list = [None] * world
    failures: list = []

    def body(rank):
        group = None
        try:
            group = ProcessGroup._open(
                store, rank, world, "threads", group_timeout, group_timeout, force_tcp=force_tcp
            )
            results[rank] = function(group, *args)
        except BaseException as error:
            results[rank] = error
            failures.append((rank, error, traceback.format_exc()))
            if group is not None:
                group.abort(f"{type(error).__name__}: {error}"[:200])
        finally:
            if group is not None:
                group.shutdown()

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(end - time.monotonic(), 0.01))
    if any(thread.is_alive() for thread in threads):
        raise RankFailedError(
            f"threads {[i for i, t in enumerate(threads) if t.is_alive()]} did not end within {timeout} s"
        )
    if failures:
        rank, error, text = failures[0]
        raise RankFailedError(f"rank {rank} of {world} failed:\n{text}", rank, error, results)
    return results
