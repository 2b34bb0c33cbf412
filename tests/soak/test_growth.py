"""Nothing grows: memory over many operations, groups and objects.

And descriptors, threads, shared memory and sockets are back after destroy.
"""

import gc
import os
import random
import threading
import time
from collections import Counter

import cdist
import numpy as np
import pytest
from cdist.store import TCPStore
from cdist.testing import run
from threads import count_threads

MB = 1 << 20
TRANSPORTS = ["shm", "tcp"]


def resident():
    """Bytes of this process's own memory, without what the ranks of a host share."""
    gc.collect()
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["RssAnon"].split()[0]) << 10


def _sizes(seed, most, count):
    """The same on all ranks; as many small ones as large ones."""
    chance = random.Random(seed)
    return [int(most ** chance.random()) for _ in range(count)]


def _operations(rank, world, count):
    """K82, with every kind of call among the all_reduces."""
    room, blocks = np.ones(1 << 17), np.ones((world, 1 << 12))
    after = {}
    for i, n in enumerate(_sizes(1, 1 << 17, count)):
        small = n % (1 << 12) + 1
        if i % 10 < 6:
            cdist.all_reduce(room[:n])
            room[:n] = 1
        elif i % 10 == 6:
            cdist.broadcast(room[:n], i % world)
        elif i % 10 == 7:
            cdist.all_gather([np.empty(small) for _ in range(world)], room[:small])
        elif i % 10 == 8:
            works = [cdist.all_reduce(np.ones(small), async_op=True) for _ in range(3)]
            for work in works:
                work.wait()
        else:
            work = cdist.isend(blocks[0, :small], (rank + 1) % world)
            cdist.recv(np.empty(small), (rank - 1) % world)
            work.wait()
        if i + 1 in (count // 10, count):
            after[i + 1] = resident()
    return after[count] - after[count // 10]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_operations_of_random_sizes(transport):
    """K82: 20,000 operations; memory after 2,000 and after all of them differs by under 5 MB."""
    for growth in run(_operations, 2, 20_000, transport=transport, timeout=110):
        assert growth < 5 * MB


def _groups(rank, world, count):
    after = {}
    for i in range(count):
        made = cdist.new_group([0, 1])
        cdist.all_reduce(np.ones(10), group=made)
        if i % 2:
            cdist.all_reduce(np.ones(1000), group=made, async_op=True).wait()  # with a thread of its own
        cdist.destroy_process_group(made)
        if i + 1 in (count // 10, count):
            after[i + 1] = (resident(), *baseline())
    first, last = after[count // 10], after[count]
    # A store's client keeps up to four connections for calls that had to wait.
    assert not Counter(last[1]) - Counter(first[1] + ["socket:"] * 4)
    assert last[2:] == first[2:]
    return last[0] - first[0]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_groups(transport):
    """2,000 groups that come and go."""
    for growth in run(_groups, 2, 2000, transport=transport, timeout=110):
        assert growth < 5 * MB


def _objects(rank, world, count):
    sizes = _sizes(2, 1 << 16, count)
    after = {}
    for i, n in enumerate(sizes):
        out = [None] * world
        cdist.all_gather_object(out, {"text": "x" * n, "array": np.ones(n), "nested": [list(range(n % 100))]})
        thing = [out[0] if rank == 0 else None]
        cdist.broadcast_object_list(thing)
        assert len(thing[0]["array"]) == n
        del out, thing
        if i + 1 in (count // 4, count):
            after[i + 1] = resident()
    return after[count] - after[count // 4]


def test_objects():
    """1,000 objects of random sizes, with arrays beside the pickle."""
    for growth in run(_objects, 2, 1000, timeout=110):
        assert growth < 5 * MB


def baseline():
    """Descriptors by kind, threads of the kernel and of Python, mappings of shared memory."""
    kinds = []
    for name in os.listdir("/proc/self/fd"):
        try:
            kinds.append(os.readlink(f"/proc/self/fd/{name}").partition("[")[0])
        except OSError:  # the descriptor of the listing itself
            continue
    with open("/proc/self/maps") as file:
        shared = sum("memfd:" in line or "/dev/shm" in line for line in file)
    return sorted(kinds), count_threads(), threading.active_count(), shared


def settles(before, seconds=10):
    """Check that the baseline is this one, or soon."""
    end = time.monotonic() + seconds
    while baseline() != before and time.monotonic() < end:
        time.sleep(0.01)
    assert baseline() == before


def abstract_sockets():
    """Names of this process's Unix sockets in the abstract name space."""
    mine = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            mine.add(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    return {fields[7] for fields in _unix_sockets() if f"socket:[{fields[6]}]" in mine}


def _unix_sockets():
    with open("/proc/net/unix") as file:
        return [
            fields for fields in map(str.split, file) if len(fields) == 8 and fields[7].startswith("@cdist")
        ]


def _cycle(rank, world, port, ending):
    before, names = None, set()
    for cycle in range(4):
        store = TCPStore("127.0.0.1", port, None, False)
        cdist.init_process_group(store=store, rank=rank, world_size=world, timeout=20)
        made = cdist.new_group([1, 0])
        pending = cdist.irecv(np.ones(4), 1 - rank, group=made)
        cdist.all_reduce(np.ones(1 << 18), group=made, async_op=True).wait()
        cdist.all_gather_object([None] * world, np.ones(100_000))
        names |= abstract_sockets()
        if ending == "abort":
            cdist.barrier()
            cdist.group.WORLD.abort("enough")
        elif ending == "shrink":
            cdist.barrier()
            cdist.shrink(grace=5)
        del made, pending
        cdist.destroy_process_group()
        del store
        gc.collect()
        if cycle == 0:
            before = baseline()
    settles(before)
    assert len(names) == 4
    assert not names & {fields[7] for fields in _unix_sockets()}
    return before[3]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("ending", ["destroy", "abort", "shrink"])
def test_everything_is_given_back_by_destroy(transport, ending):
    """K94, with a receive that never ends, a group of its own, after an abort and after a shrink."""
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    assert run(_cycle, 2, server.port, ending, init=False, transport=transport) == [0, 0]
