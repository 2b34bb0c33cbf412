"""Strangers at the doors of a job: who listens where, who gets in, what their bytes can do (K172 to K176)."""

import os
import pickle
import re
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time

import cdist
import numpy as np
import pytest
from cdist import errors
from cdist.store import TCPStore
from cdist.testing import run
from collective_cases import TRANSPORTS

# csrc/group/control.h: cd_control_head; cd_member, the first part of a hello, which ends with a proof.
HEAD = struct.Struct("<IHHQ")
MAGIC, HELLO, DATA = 0x31574443, 1, 2
MEMBER = struct.Struct("<ii16s40sQQII48sH6x40s")
KEY_OF_RANK_0 = "0/cdist/rank0"


def _listeners():
    """(address, port) of every TCP socket on which this process listens, as the kernel writes them."""
    mine = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            mine.add(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:  # the descriptor of the listing itself
            continue
    found = []
    for table in ("tcp", "tcp6"):
        with open(f"/proc/net/{table}") as rows:
            for row in rows:
                fields = row.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                    found.append(tuple(fields[1].split(":")))
    return found


def _listening(rank, world, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    cdist.init_process_group()
    cdist.all_reduce(np.ones(2))
    made = cdist.new_group([0, 1])
    cdist.barrier(group=made)
    found = _listeners()
    cdist.barrier()
    return found


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_nothing_listens_on_more_than_the_given_address(transport):
    """K172: the store, the control connections and the data links."""
    found = run(_listening, 2, _free_port(), init=False, transport=transport)
    assert len(found[0]) >= 2  # the store's server too
    assert {address for rank in found for address, _ in rank} == {"0100007F"}


def _address_of_rank_0(store, seconds=20):
    """Where the control connections of the job come in, from the record in the store."""
    record = store.get(KEY_OF_RANK_0)
    assert len(record) == MEMBER.size
    fields = MEMBER.unpack(record)
    return fields[8].partition(b"\0")[0].decode(), fields[9], fields[2]


def _hello(rank, world, target, kind=HELLO):
    """What a process sends that would be rank `rank`, and cannot know the secret."""
    member = MEMBER.pack(rank, world, b"n" * 16, b"", 0, 0, 0, 1, b"127.0.0.1", 1, b"evil")
    body = member + target + b"\0" * 32
    return HEAD.pack(MAGIC, kind, 0, len(body)) + body


def _answer(where, data):
    """Everything that comes back, until the other end closes; None when it does not within 15 s."""
    with socket.create_connection(where, 5) as door:
        door.settimeout(15)
        got = b""
        try:
            door.sendall(data)
            while piece := door.recv(4096):
                got += piece
        except ConnectionError:
            pass
        except TimeoutError:
            return None
        return got


def _victim(rank, world, port):
    store = TCPStore("127.0.0.1", port, None, False)
    if rank:
        store.get("attacked")
    cdist.init_process_group(store=store, rank=rank, world_size=world, timeout=30)
    cdist.all_reduce(np.ones(2))
    if rank == 0:
        store.set("working", "")
    store.get("attacked again")
    out = [None] * world
    cdist.all_gather_object(out, {"rank": rank})
    return [thing["rank"] for thing in out]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_without_the_secret_nobody_becomes_a_rank(transport, monkeypatch, capfd):
    """K173: before the real rank comes and afterwards, at every door; and it is logged."""
    monkeypatch.setenv("CDIST_JOB_SECRET", "5e" * 32)
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    done = []
    job = threading.Thread(
        target=lambda: done.append(
            run(_victim, 3, server.port, init=False, transport=transport, check_leftovers=False)
        )
    )
    job.start()
    try:
        store = TCPStore("127.0.0.1", server.port, None, False)
        host, port, nonce = _address_of_rank_0(store)
        for stage in ("attacked", "attacked again"):
            for kind in (HELLO, DATA):
                assert _answer((host, port), _hello(1, 3, nonce, kind)) == b""
            assert _answer(("127.0.0.1", server.port), b"\0" + struct.pack("<I", 0x3C85F7CE) + b"\7") == b""
            store.set(stage, "")
            if stage == "attacked":
                store.get("working")
    finally:
        job.join(60)
    assert done == [[[0, 1, 2]] * 3]
    assert (
        "refused a connection that does not know the job secret (claims to be rank 1)"
        in capfd.readouterr().err
    )


def _raise_if_loaded():
    os.write(2, b"LOADED")
    raise AssertionError("a stranger's pickle was loaded")


class Malicious:
    def __reduce__(self):
        return _raise_if_loaded, ()


def _opted_out(rank, world):
    out = [None] * world
    cdist.set_allow_pickle(False)
    for call in (
        lambda: cdist.all_gather_object(out, Malicious()),
        lambda: cdist.broadcast_object_list([Malicious()]),
        lambda: cdist.gather_object(Malicious(), out if rank == 0 else None),
        lambda: cdist.scatter_object_list([None], [Malicious()] * world if rank == 0 else None),
        lambda: cdist.recv_object_list([None], 1 - rank),
    ):
        with pytest.raises(RuntimeError, match="set_allow_pickle"):
            call()
    with pytest.raises(pickle.UnpicklingError, match="does not allow"):
        cdist.all_gather_object(out, Malicious(), weights_only=True)
    cdist.all_gather_object(out, {"rank": rank}, weights_only=True)
    return out


def test_pickle_can_be_forbidden(capfd):
    """K173, K175."""
    assert run(_opted_out, 2) == [[{"rank": 0}, {"rank": 1}]] * 2
    assert "LOADED" not in capfd.readouterr().err


FUZZ = """
import io, pickle, random, resource, sys
import numpy as np
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
from cdist.objects import _SafeUnpickler

refused = set()
chance = random.Random(int(sys.argv[1]))
things = [{"a": 1, "b": [1.5, None, True, "text"]}, np.arange(20.0), {1, 2}]
things += [[bytearray(b"x"), slice(1, 2)], 1j, "ä" * 30]
seeds = [pickle.dumps(thing, protocol) for thing in things for protocol in range(2, 6)]
modules = set(sys.modules)
ways = {}
for case in range(100_000):
    if case % 4 == 0:
        data = chance.randbytes(chance.randrange(60))
    else:
        data = bytearray(chance.choice(seeds))
        for _ in range(chance.randrange(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        if case % 4 == 1:
            data += b"cos\\nsystem\\n(S'exit 3'\\ntR."
        data = bytes(data)
    try:
        _SafeUnpickler(io.BytesIO(data), buffers=[]).load()
        way = "loaded"
    except Exception as error:
        way = type(error).__name__
        if "does not allow" in str(error):
            refused.add(str(error))
    ways[way] = ways.get(way, 0) + 1
new = set(sys.modules) - modules
assert all(name.startswith("numpy.core") for name in new), new
assert ways["loaded"] > 1000 and ways["UnpicklingError"] > 1000, ways
print(len(refused), "classes asked for and refused")
"""


def test_random_bytes_import_nothing():
    """K175: 100,000 pickles, random and mutated, through what weights_only=True loads with."""
    settings = dict(os.environ, PYTHONPATH=os.path.dirname(os.path.dirname(cdist.__file__)))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FUZZ), "7"],
        env=settings,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert re.match(r"[1-9]\d* classes asked for and refused", done.stdout)


def test_announced_lengths_are_not_allocated():
    """K175: keys, values, counts and requests over their limits, and many within them that never come."""
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    hello = b"\0" + struct.pack("<I", 0x3C85F7CE)
    where = ("127.0.0.1", server.port)
    for request in (
        b"\1" + struct.pack("<Q", 1 << 62),  # a key
        b"\1" + struct.pack("<Q", 2) + b"/k" + struct.pack("<Q", (8 << 20) + 1),  # a value
        b"\6" + struct.pack("<Q", 1 << 40),  # a count
        b"\xff",
    ):
        assert _answer(where, hello + request) == b""
    before = _resident()
    half = [socket.create_connection(where) for _ in range(200)]
    for door in half:
        door.sendall(hello + b"\1" + struct.pack("<Q", 2) + b"/k" + struct.pack("<Q", 8 << 20) + b"x")
    assert server.add("n", 1) == 1
    assert _resident() - before < 100 << 20  # and not 1600 MB
    for door in half:
        door.close()


def test_one_request_cannot_ask_for_the_memory_of_the_host():
    """K175: a value of 8 MiB, asked for 100,000 times in a request of 1 MB."""
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    server.set("large", b"x" * (8 << 20))
    assert server.get("large")  # a set is not answered: another connection's request could come before it
    key = struct.pack("<Q", 6) + b"/large"
    greedy = socket.create_connection(("127.0.0.1", server.port))
    greedy.sendall(
        b"\0" + struct.pack("<I", 0x3C85F7CE) + b"\x0a" + struct.pack("<Q", 100_000) + key * 100_000
    )
    assert server.get("large")[:1] == b"x"  # in turn after it, or before
    time.sleep(0.2)
    assert server.add("n", 1) == 1
    greedy.settimeout(20)
    assert _until_closed(greedy) < 1100 << 20
    assert _resident() < 1500 << 20
    greedy.close()


def _until_closed(door):
    """Bytes that come until the other end closes; TimeoutError if it does not."""
    got = 0
    try:
        while piece := door.recv(1 << 20):
            got += len(piece)
    except ConnectionError:
        pass
    return got


def _resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def _bothered(rank, world, port):
    store = TCPStore("127.0.0.1", port, None, False)
    if rank:
        store.get("go")
    cdist.init_process_group(store=store, rank=rank, world_size=world, timeout=8)
    x = np.ones(3)
    cdist.all_reduce(x)
    cdist.barrier()
    return float(x[0])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_strays_do_not_hold_up_init(transport):
    """K176: a web client, a flood of zeroes and silent connections at both doors, while ranks meet.

    Silent ones would be waited for at least the 10 s after which they are dropped, and init gives up after 8.
    """
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    outcomes, strays = [], []
    job = threading.Thread(
        target=lambda: outcomes.append(
            run(_bothered, 3, server.port, init=False, transport=transport, check_leftovers=False)
        )
    )
    job.start()
    try:
        store = TCPStore("127.0.0.1", server.port, None, False)
        host, port, _ = _address_of_rank_0(store)
        for door in ((host, port), ("127.0.0.1", server.port)):
            strays += [socket.create_connection(door) for _ in range(20)]
            for _ in range(3):
                assert _answer(door, b"GET / HTTP/1.0\r\n\r\n") == b""
                assert _answer(door, b"\0" * 1_000_000) == b""
        store.set("go", "")
    finally:
        job.join(60)
        for stray in strays:
            stray.close()
    assert outcomes == [[3.0] * 3]


def _two_secrets(rank, world, port):
    os.environ["CDIST_JOB_SECRET"] = ("5e" if rank == 0 else "6f") * 32
    store = cdist.FileStore(port, -1)  # no store of its own to refuse it first
    with pytest.raises(errors.DistError) as caught:
        cdist.init_process_group(store=store, rank=rank, world_size=world, timeout=3)
    return str(caught.value)


def test_another_secret_is_named(tmp_path):
    """K173: a rank with another secret does not get in, and is told what may be wrong."""
    texts = run(_two_secrets, 2, str(tmp_path / "store"), init=False)
    assert "missing ranks [1]" in texts[0]
    assert "secret" in texts[1]
