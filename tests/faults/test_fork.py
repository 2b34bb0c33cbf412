"""What a process forked in the middle of things may call: it is refused or served at once, and never hangs.

The parents' other threads hold locks at the fork, or wait for something; in the child they do not exist.
"""

import contextlib
import os
import signal
import threading
import time
from datetime import timedelta

import cdist
import numpy as np
import pytest
from cdist.testing import run


def _in_child(function, seconds=10):
    """Return what the forked child's function returns as text, or how the child ended instead."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            text = str(function())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode()[:60_000])
        os._exit(0)
    os.close(writer)
    end, text, status = time.monotonic() + seconds, "", (0, 0)
    while status[0] == 0 and time.monotonic() < end:
        status = os.waitpid(pid, os.WNOHANG)
        time.sleep(0.002)
    if status[0] == 0:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        text = "hung, "
    elif status[1]:
        text = f"ended with {status[1]}, "
    with os.fdopen(reader) as pipe:
        return text + pipe.read()


def _all_of_it(calls):
    """Each call is answered with the error of a fork; what has no way to fail does nothing."""
    told = []
    for name, call in calls.items():
        try:
            call()
            told.append(f"{name} worked")
        except (cdist.DistError, RuntimeError) as error:
            if "fork" not in str(error):
                told.append(f"{name}: {error}")
    return told


def _after_async(rank, world, how):
    """The worker waits for work; the fork comes then."""
    x = np.ones(4)
    sub = cdist.new_group([0, 1])
    cdist.all_reduce(x, group=sub, async_op=True).wait()
    cdist.all_reduce(x, async_op=True).wait()
    cdist.irecv(np.ones(3), 1 - rank)  # the helper waits
    time.sleep(0.05)

    def child():
        nonlocal sub
        if how == "destroy":
            cdist.destroy_process_group(sub)
            sub = None
            cdist.destroy_process_group()
        elif how == "exit":
            from cdist.groups import _teardown

            _teardown()
        else:
            told = _all_of_it(
                {
                    "all_reduce": lambda: cdist.all_reduce(x),
                    "async": lambda: cdist.all_reduce(x, async_op=True),
                    "send": lambda: cdist.send(x, 1 - rank),
                    "irecv": lambda: cdist.irecv(x, 1 - rank),
                    "barrier": lambda: cdist.barrier(group=sub),
                    "monitored_barrier": lambda: cdist.monitored_barrier(),
                    "new_group": lambda: cdist.new_group([0, 1]),
                    "all_gather_object": lambda: cdist.all_gather_object([None] * world, 1),
                    "shrink": lambda: cdist.shrink(),
                }
            )
            cdist.group.WORLD.abort()
            return told
        return "done"

    text = _in_child(child)
    cdist.send(np.ones(3), 1 - rank)
    cdist.barrier()
    return text


@pytest.mark.parametrize(("how", "expected"), [("destroy", "done"), ("exit", "done"), ("calls", "[]")])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_child_does_not_wait_for_threads_of_its_parent(how, expected, transport):
    assert run(_after_async, 2, how, transport=transport) == [expected] * 2


def _forked_while_busy(rank, world):
    """Other threads make and use groups as fast as they can: some fork comes while they hold a lock."""
    stop, odd = threading.Event(), []
    mine = cdist.new_group([rank])

    def make():
        while not stop.is_set():
            group = cdist.new_group([rank], use_local_synchronization=True)
            cdist.all_reduce(np.ones(1), group=group, async_op=True).wait()
            cdist.destroy_process_group(group)

    def exchange():
        while not stop.is_set():
            cdist.isend(np.ones(1), rank, group=mine)
            cdist.irecv(np.ones(1), rank, group=mine).wait()

    threads = [threading.Thread(target=body) for body in (make, make, exchange)]
    for thread in threads:
        thread.start()
    for _ in range(60):
        text = _in_child(lambda: cdist.destroy_process_group())
        if text != "None":
            odd.append(text)
    stop.set()
    for thread in threads:
        thread.join()
    cdist.barrier()
    return odd


def test_a_child_does_not_wait_for_locks_of_its_parents_threads():
    assert run(_forked_while_busy, 2) == [[], []]


def _file_store(folder):
    return cdist.FileStore(os.path.join(folder, "file"), 1)


def _tcp_store(_):
    return cdist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def _hash_store(_):
    return cdist.HashStore()


@pytest.mark.parametrize("make", [_tcp_store, _file_store, _hash_store])
def test_a_store_that_is_waited_in_and_written_to_refuses_the_child(make, tmp_path):
    store, stop = make(tmp_path), threading.Event()
    store.set("k", b"v")

    def write():
        while not stop.is_set():
            store.add("n", 1)

    def wait():
        while not stop.is_set():
            with contextlib.suppress(cdist.DistStoreError):
                store.wait(["never"], timedelta(seconds=0.2))

    threads = [threading.Thread(target=body) for body in (write, write, wait)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(40):

            def child():
                nonlocal store
                told = _all_of_it(
                    {
                        "get": lambda: store.get("k"),
                        "set": lambda: store.set("a", b"b"),
                        "wait": lambda: store.wait(["never"]),
                        "num_keys": lambda: store.num_keys(),
                    }
                )
                store = None
                return told

            assert _in_child(child) == "[]"
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert store.get("k") == b"v"
