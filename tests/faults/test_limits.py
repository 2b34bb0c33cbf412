"""What a process may not have: descriptors, threads, addresses. All ranks are told at once, and whose limit
it was."""

import mmap
import os
import resource
import subprocess
import sys

import cdist
import numpy as np
import pytest
from cdist.testing import run

ROOT = os.path.dirname(os.path.dirname(cdist.__file__))


def _limited(rank, world, spare, port):
    """Leave rank 1 so many descriptors for init_process_group."""
    store = cdist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    if rank == 1:
        numbers = list(map(int, os.listdir("/proc/self/fd")))  # that of the listing is free again
        for _ in range(max(numbers) + 2 - len(numbers)):
            os.open("/dev/null", os.O_RDONLY)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(numbers) + 1 + spare,) * 2)
    named = cdist.PrefixStore(str(spare), store)
    cdist.init_process_group(store=named, rank=rank, world_size=world, timeout=4)
    x = np.ones(3)
    cdist.all_reduce(x)
    return float(x[0])


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_all_ranks_hear_whose_limit_of_files_it_was(transport):
    """Each number of descriptors: too few to meet the others, who miss this rank, or to go on, or enough."""
    server = cdist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    told = 0
    for spare in range(16):
        options = {"init": False, "allow_failures": True, "timeout": 40, "transport": transport}
        outcomes = run(_limited, 3, spare, server.port, **options)
        if outcomes == [3.0] * 3:
            break
        assert all(isinstance(error, (cdist.DistError, MemoryError)) for error in outcomes), outcomes
        told += all("rank 1 (" in str(error) and "ulimit -n" in str(error) for error in outcomes)
    assert outcomes == [3.0] * 3
    assert told  # how often depends on which deadline passes first


def _addresses():
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[0]) * resource.getpagesize()


def _without(rank, world, who, limit, port):
    store = cdist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    if rank == who and limit == "threads":
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
        os.setuid(65534)  # no limit holds for root
    elif rank == who:
        resource.setrlimit(resource.RLIMIT_AS, (_addresses() + (300 << 20),) * 2)
    cdist.init_process_group(store=store, rank=rank, world_size=world, timeout=30)


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize(("limit", "remedy"), [("threads", "ulimit -u"), ("addresses", "ulimit -v")])
def test_all_ranks_hear_whose_limit_it_was(limit, remedy, who):
    """A rank that waits for the host's memory, which the failing one makes, hears the reason."""
    if limit == "threads" and os.geteuid():
        pytest.skip("needs root, to be another user")
    environ = {"CDIST_ARENA_BYTES": 1 << 30}
    for _ in range(5):
        server = cdist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        options = {
            "init": False,
            "allow_failures": True,
            "timeout": 20,
            "transport": "shm",
            "environ": environ,
        }
        outcomes = run(_without, 3, who, limit, server.port, **options)
        if limit == "addresses" and who == 0:
            assert outcomes == [None] * 3  # who makes the memory makes less
            continue
        for rank, error in enumerate(outcomes):
            assert isinstance(error, MemoryError if rank == who else cdist.DistNetworkError), outcomes
            assert f"rank {who} (pid" in str(error)
            assert remedy in str(error)


def _with_room_for(rank, world, limit, sizes, port):
    os.environ["CDIST_ARENA_BYTES"] = sizes[rank]
    if limit:
        # As if torch were there: a quarter of all addresses would be three of those that are left.
        rest = 2 * limit - _addresses()
        mapped = mmap.mmap(-1, max(rest, mmap.PAGESIZE), mmap.MAP_PRIVATE, 0)
        resource.setrlimit(resource.RLIMIT_AS, (_addresses() + limit,) * 2)
    store = cdist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    cdist.init_process_group(store=store, rank=rank, world_size=world, timeout=20)
    shared = [cdist.empty(1 << 20) for _ in range(4)]
    own = np.full(limit // 16 or 1, rank + 1.0)  # half of the room is the program's
    for i, x in enumerate(shared):
        x[:] = rank * 10 + i
    cdist.barrier()
    assert all((x == rank * 10 + i).all() for i, x in enumerate(shared))
    for x in [*shared, own]:
        cdist.all_reduce(x)
    cdist.barrier()
    sums = [set(x.tolist()) for x in shared]
    if limit:
        mapped.close()
    return sums == [{30.0 + 3 * i} for i in range(4)] and own.min() == own.max() == 6


@pytest.mark.parametrize(
    ("limit", "sizes"),
    [
        (1 << 30, ["auto"] * 3),  # of addresses, as batch systems set it
        (0, ["128M", "1G", "512M"]),
        (0, ["1G", "0", "128M"]),
        (0, ["0", "1G", "1G"]),
    ],
)
def test_arenas_lie_where_the_maker_of_the_memory_says(limit, sizes):
    """Ranks that were told other sizes, or that have less room, wrote beside what was mapped."""
    server = cdist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    options = {"init": False, "timeout": 40, "transport": "shm"}
    assert run(_with_room_for, 3, limit, sizes, server.port, **options) == [True] * 3


def test_a_launcher_without_descriptors_says_so(tmp_path):
    """Its own pipes, or the store's connections: within seconds, and not after minutes."""
    script = tmp_path / "job.py"
    script.write_text("import cdist\ncdist.init_process_group(timeout=60)\ncdist.barrier()\n")
    told = 0
    for limit in (12, 24, 26, 28):
        start = ["prlimit", f"--nofile={limit}:{limit}", sys.executable, "-m", "cdist.run"]
        done = subprocess.run(
            [*start, "--nproc-per-node", "4", str(script)],
            capture_output=True,
            text=True,
            timeout=40,
            env=dict(os.environ, PYTHONPATH=ROOT),
        )
        if done.returncode:
            assert "ulimit -n" in done.stderr, done.stderr
            told += 1
    assert told
