# ruff: noqa: PT018
"""The stores: one body over all kinds, TCPStore against torch's both ways, threads, timeouts, faults."""

import http.server
import itertools
import os
import resource
import signal
import socket
import socketserver
import struct
import subprocess
import sys
import textwrap
import threading
import time
from datetime import timedelta

import pytest
from cdist import barrier, errors
from cdist.store import FileStore, HashStore, PrefixStore, Store, TCPStore
from cdist.testing import run


class PlainStore(Store):
    """A store as a user writes one."""

    def __init__(self):
        super().__init__()
        self.table = {}
        self.changed = threading.Condition()

    def set(self, key, value):
        with self.changed:
            self.table[key] = value.encode() if isinstance(value, str) else value
            self.changed.notify_all()

    def get(self, key):
        self.wait([key], timedelta(seconds=10))
        return self.table[key]

    def add(self, key, value):
        with self.changed:
            total = int(self.table.get(key, b"0")) + value
            self.set(key, str(total))
            return total

    def compare_set(self, key, expected, desired):
        now = self.table.get(key)
        if (now or b"") == expected.encode() and (now is not None or expected == ""):
            self.set(key, desired)
            return desired.encode()
        return expected.encode() if now is None else now

    def check(self, keys):
        return all(k in self.table for k in keys)

    def wait(self, keys, timeout=timedelta(seconds=10)):
        with self.changed:
            if not self.changed.wait_for(lambda: self.check(keys), timeout.total_seconds()):
                raise RuntimeError("wait timeout")

    def delete_key(self, key):
        return self.table.pop(key, None) is not None

    def num_keys(self):
        return len(self.table)

    def list_keys(self):
        return list(self.table)


def _tcp():
    # Against hangs: a get waits while others add for 20 s on a loaded machine.
    return TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60))


def _torch_python_store():
    theirs = pytest.importorskip("torch.distributed", reason="torch comes with EXTRAS in .ci/run")
    return PrefixStore("mine", theirs.HashStore())


KINDS = {
    "tcp": lambda path: _tcp(),
    "file": lambda path: FileStore(str(path / "store"), 1),
    "hash": lambda path: HashStore(),
    "prefix(tcp)": lambda path: PrefixStore("p", _tcp()),
    "prefix(prefix(hash))": lambda path: PrefixStore("p", PrefixStore("q", HashStore())),
    "prefix(file)": lambda path: PrefixStore("p", FileStore(str(path / "store"), 1)),
    "prefix(python)": lambda path: PrefixStore("p", PlainStore()),
    "prefix(torch)": lambda path: _torch_python_store(),
}
WITH_QUEUES = ["tcp", "hash", "prefix(tcp)", "prefix(prefix(hash))"]


@pytest.fixture(params=KINDS)
def store(request, tmp_path):
    return KINDS[request.param](tmp_path)


@pytest.fixture(params=WITH_QUEUES)
def queue_store(request, tmp_path):
    return KINDS[request.param](tmp_path)


def test_values(store):
    store.set("a", "one")
    assert store.get("a") == b"one"
    store.set("a", b"\x00\xfftwo")
    assert store.get("a") == b"\x00\xfftwo"
    store.set("empty", "")
    assert store.get("empty") == b""
    assert store.add("n", 5) == 5
    assert store.add("n", -7) == -2
    assert store.get("n") == b"-2"
    assert store.check([]) and store.check(["a", "n"]) and not store.check(["a", "zz"])
    store.wait([])
    store.wait(["a", "n"], timedelta(seconds=5))
    store.append("l", "ab")
    store.append("l", b"cd")
    assert store.multi_get(["l", "n"]) == [b"abcd", b"-2"]
    store.multi_set(["x", "y"], ["1", b"2"])
    assert store.multi_get(["y", "x"]) == [b"2", b"1"]
    assert {"a", "empty", "n", "l", "x", "y"} == set(store.list_keys())
    assert store.num_keys() >= 6
    assert store.delete_key("x") is True
    assert not store.check(["x"])


def test_every_byte_comes_back(store):
    """K59: values are bytes, whether char is signed or not (.ci/run tries both)."""
    everything = bytes(range(256))
    store.set("bytes", everything)
    assert store.get("bytes") == everything
    for value in range(256):
        store.set(f"byte{value}", bytes([value]) * 3)
    assert store.multi_get([f"byte{value}" for value in range(256)]) == [bytes([v]) * 3 for v in range(256)]


def test_values_are_buffers_too(store):
    store.set("a", bytearray(b"\x00one"))
    assert store.get("a") == b"\x00one"
    store.set("a", memoryview(b"t-w-o")[::2])
    assert store.get("a") == b"two"
    store.append("l", "a")
    store.append("l", bytearray(b"b"))
    values = (bytearray(b"1"), memoryview(b"2"))
    store.multi_set(["x", "y"], values)
    assert [type(value) for value in values] == [bytearray, memoryview]
    assert store.multi_get(["l", "x", "y"]) == [b"ab", b"1", b"2"]
    for bad in (1, None, ["a"]):
        with pytest.raises(TypeError, match="value must be str or bytes"):
            store.set("a", bad)
        with pytest.raises(TypeError, match="values must be str or bytes"):
            store.multi_set(["a"], [bad])


def test_buffers_in_compare_set_and_queues():
    store = HashStore()
    assert store.compare_set("k", bytearray(), bytearray(b"v")) == b"v"
    assert store.compare_set("k", memoryview(b"v"), "w") == b"w"
    store.queue_push("q", bytearray(b"item"))
    assert store.queue_pop("q") == b"item"


def test_compare_set(store):
    assert store.compare_set("k", "other", "v") == b"other"
    assert not store.check(["k"])
    assert store.compare_set("k", "", "v") == b"v"
    assert store.compare_set("k", "v", "w") == b"w"
    assert store.compare_set("k", "v", "x") == b"w"
    assert store.get("k") == b"w"


def test_bad_arguments_are_refused(store):
    with pytest.raises(TypeError, match="value must be str or bytes"):
        store.set("k", 5)
    with pytest.raises(TypeError, match="key"):
        store.get(3)
    with pytest.raises(TypeError):
        store.add("k", 1.5)
    with pytest.raises(TypeError, match="list of str"):
        store.wait("ab")
    with pytest.raises(ValueError, match="timeout"):
        store.wait(["k"], -1)
    with pytest.raises(errors.DistStoreError, match="multiSet keys and values vectors must be of same size"):
        store.multi_set(["a", "b"], ["1"])


def test_queues(queue_store):
    store = queue_store
    with pytest.raises(errors.QueueEmptyError, match="queue is empty: key .*q'; block=True waits"):
        store.queue_pop("q", block=False)
    store.queue_push("q", "a")
    store.queue_push("q", b"")
    assert store.queue_len("q") == 2
    assert [store.queue_pop("q"), store.queue_pop("q", False)] == [b"a", b""]
    threading.Timer(0.1, store.queue_push, ("q", "late")).start()
    assert store.queue_pop("q") == b"late"


def test_file_has_no_queues(tmp_path):
    with pytest.raises(NotImplementedError, match="no queues"):
        FileStore(str(tmp_path / "f"), 1).queue_push("q", "x")


def test_timeout_of_one_call_stays_with_it(store):
    """K76."""
    store.set_timeout(timedelta(seconds=0.6))
    assert store.timeout == timedelta(seconds=0.6)
    with pytest.raises(RuntimeError, match="[t -i]imeout"):
        store.wait(["x"], timedelta(milliseconds=100))
    began = time.monotonic()
    with pytest.raises(errors.DistStoreError, match="imeout") as caught:
        store.get("y")
    assert isinstance(caught.value, TimeoutError)
    assert time.monotonic() - began > 0.55
    with pytest.raises(errors.DistStoreError):
        store.wait(["x"], 0)
    store.set_timeout(60)
    began = time.monotonic()
    with pytest.raises(errors.DistStoreError):
        store.wait(["x"], timedelta(milliseconds=100))
    assert 0.09 < time.monotonic() - began < 30  # its own time, and not the store's


def test_wait_text_names_keys_and_time():
    with pytest.raises(errors.DistStoreError, match="wait timeout after 300ms, keys: /zz"):
        _tcp().wait(["zz"], timedelta(milliseconds=300))


@pytest.mark.parametrize("order", list(itertools.permutations("abc")))
def test_wait_for_keys_in_any_order(order):
    """K77: some set before the call and others after, in all six orders."""
    for store in (_tcp(), HashStore()):
        store.set(order[0], "")
        timers = [threading.Timer(0.03 * i, store.set, (k, "")) for i, k in enumerate(order[1:], 1)]
        for timer in timers:
            timer.start()
        store.wait(list("abc"), timedelta(seconds=5))
        assert store.check(list("abc"))
        for timer in timers:
            timer.join()


def test_eight_threads_share_one_client(store):
    """K79: seven add 10,000 times together while one waits."""
    rounds = 50 if "File" in type(getattr(store, "_underlying_non_prefix_store", store)).__name__ else 1430
    got = []
    waiter = threading.Thread(target=lambda: got.append(store.get("go")))
    waiter.start()

    def count():
        for _ in range(rounds):
            store.add("count", 1)

    threads = [threading.Thread(target=count) for _ in range(7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.add("count", 0) == 7 * rounds
    assert not got
    store.set("go", "now")
    waiter.join()
    assert got == [b"now"]


def test_barrier_can_be_used_again(store):
    def meet():
        for _ in range(3):
            store.barrier("b", 4, timedelta(seconds=10))

    threads = [threading.Thread(target=meet) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.add("b", 0) == 12


def test_master_waits_for_workers_without_the_gil():
    """K80."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    made = []
    thread = threading.Thread(target=lambda: made.append(TCPStore("127.0.0.1", port, 2, True, 20)))
    thread.start()
    client = TCPStore("127.0.0.1", port, 2, False, 20)
    thread.join()
    made[0].set("k", "v")
    assert client.get("k") == b"v"


def test_missing_workers_and_bad_ports():
    with pytest.raises(errors.DistStoreError, match=r"^Timed out after 1 seconds .* 1/2 clients joined\."):
        TCPStore("127.0.0.1", 0, 2, True, timedelta(seconds=1))
    with pytest.raises(ValueError, match="TCPStore world size cannot be 0"):
        TCPStore("127.0.0.1", 0, 0, True)
    with pytest.raises(ValueError, match="port"):
        TCPStore("127.0.0.1", 70000, None, True)
    store = _tcp()
    with pytest.raises(errors.DistNetworkError, match=f"^The server socket has failed to.*{store.port}"):
        TCPStore("127.0.0.1", store.port, None, True)
    port = store.port
    del store
    with pytest.raises(errors.DistNetworkError, match=r"socket has timed out after \d+ms while trying"):
        TCPStore("127.0.0.1", port, None, False, 0.3)


class _Answers(socketserver.BaseRequestHandler):
    """Says 220 before it is asked, or nothing at all."""

    def handle(self):
        self.request.sendall(self.server.answer)
        while self.request.recv(100):
            pass


@pytest.mark.parametrize(
    ("handler", "answer", "told"),
    [
        (
            http.server.BaseHTTPRequestHandler,
            b"",
            "is no store, it answered .*: another program has that port",
        ),
        (_Answers, b"220 mail ready\r\n", 'is no store, it answered "220 mail ready": another program'),
        (_Answers, b"", "takes connections but does not answer as a store does"),
    ],
)
def test_a_server_that_is_no_store_is_named(handler, answer, told, capfd):
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        server.answer, server.daemon_threads = answer, True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        # Who says something is found out at once, whatever the time limit.
        limit = 60 if "is no store" in told else 0.5
        with pytest.raises(errors.DistNetworkError, match=told):
            TCPStore("127.0.0.1", server.server_address[1], None, False, limit)
        server.shutdown()


def test_multi_tenant_shares_the_server():
    first = TCPStore("127.0.0.1", 0, None, True, multi_tenant=True)
    second = TCPStore("127.0.0.1", first.port, None, True, multi_tenant=True)
    first.set("k", "v")
    assert second.get("k") == b"v"
    del first
    assert second.get("k") == b"v"
    assert second.clone().get("k") == b"v"


def test_listening_socket_can_be_handed_over():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        store = TCPStore("127.0.0.1", port, None, True, master_listen_fd=listener.detach())
    store.set("k", "v")
    assert TCPStore("127.0.0.1", port, None, False).get("k") == b"v"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_only_the_given_address_listens(host):
    """K172."""
    store = TCPStore(host, 0, None, True)
    assert TCPStore(host, store.port, None, False, 5).add("n", 1) == 1
    for family, wildcard in (("tcp", "0" * 8), ("tcp6", "0" * 32)):
        with open(f"/proc/net/{family}") as table:
            assert f" {wildcard}:{store.port:04X} " not in table.read()


def test_lost_server_is_named():
    store = _tcp()
    client = TCPStore("127.0.0.1", store.port, None, False)
    caught = []

    def wait():
        with pytest.raises(errors.DistStoreError, match="lost"):
            client.get("never")
        caught.append(True)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    port = store.port
    del store
    thread.join(5)
    assert caught
    with pytest.raises(errors.DistStoreError, match=f"store at 127.0.0.1:{port} lost"):
        client.add("n", 1)


def test_child_of_a_fork_is_told():
    store = _tcp()
    pid = os.fork()
    if pid == 0:
        try:
            store.set("k", "v")
        except errors.DistStoreError as error:
            os._exit(7 if "fork" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    store.set("k", "v")
    assert store.get("k") == b"v"


def test_value_over_the_limit_is_refused_and_named():
    store = _tcp()
    large = b"x" * (8 << 20)
    store.set("large", large)
    assert store.get("large") == large
    with pytest.raises(ValueError, match="8 MiB"):
        store.set("large", large + b"x")
    with pytest.raises(ValueError, match="8191"):
        store.set("k" * 8192, "v")


def test_secret(monkeypatch):
    """K173."""
    monkeypatch.setenv("CDIST_JOB_SECRET", "ab" * 32)
    store = _tcp()
    assert TCPStore("127.0.0.1", store.port, None, False).add("n", 1) == 1
    for other in ("cd" * 32, ""):
        monkeypatch.setenv("CDIST_JOB_SECRET", other)
        with pytest.raises(errors.RefusedError, match="CDIST_JOB_SECRET"):
            TCPStore("127.0.0.1", store.port, None, False)
    assert store.add("n", 1) == 2


def test_junk_disturbs_nobody():
    """K176."""
    store = _tcp()
    silent = socket.create_connection(("127.0.0.1", store.port))
    for junk in (b"GET / HTTP/1.0\r\n\r\n", b"\0" * 1000000, b"\x00\xce\xf7\x85\x3c\x03" + b"\xff" * 8):
        with socket.create_connection(("127.0.0.1", store.port)) as other:
            try:
                other.sendall(junk)
                assert other.recv(1) == b""
            except ConnectionError:
                pass
    assert store.add("n", 1) == 1
    silent.close()


@pytest.mark.parametrize("kind", ["tcp", "hash", "file"])
def test_ctrl_c_ends_a_wait(kind):
    code = (
        "import sys, tempfile, signal, os, threading, time\n"
        "from cdist.store import *\n"
        "make = dict(tcp=lambda: TCPStore('127.0.0.1', 0, None, True), hash=HashStore,\n"
        "            file=lambda: FileStore(tempfile.mktemp(), 1))\n"
        "store = make[sys.argv[1]]()\n"
        "def shoot():\n"
        "    time.sleep(0.2)\n"
        "    global shot\n"
        "    shot = time.monotonic()\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "try:\n"
        "    threading.Thread(target=shoot).start()\n"
        "    store.get('never')\n"
        "except KeyboardInterrupt:\n"
        "    store.set('k', 'v')\n"
        "    assert store.get('k') == b'v'\n"
        "    sys.exit(5)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, kind], timeout=20).returncode == 5


@pytest.mark.parametrize(
    "program",
    [
        # At the end of the program the collector takes the extension's own classes too.
        """
        class Holder: pass
        holder = Holder()
        holder.itself, holder.store = holder, TCPStore("127.0.0.1", 0, None, True)
        """,
        """
        def lose():
            class Mine(TCPStore): pass
            Mine.last = Mine("127.0.0.1", 0, None, True, multi_tenant=True)
            return Mine.last.port
        port = lose()
        gc.collect()
        TCPStore("127.0.0.1", port, None, True, multi_tenant=True).set("k", "v")  # the port is free again
        """,
    ],
)
def test_a_store_that_is_collected_together_with_its_class(program):
    program = "import gc\nfrom cdist.store import TCPStore\n" + textwrap.dedent(program)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_many_clients_meet():
    """Waits are pushed: the server does nothing while 400 clients wait."""
    store = _tcp()
    clients = [TCPStore("127.0.0.1", store.port, None, False) for _ in range(400)]
    threads = [threading.Thread(target=client.wait, args=(["go"],)) for client in clients]
    for thread in threads:
        thread.start()
    store.set("go", "")
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)


def _cpu_of_other_threads():
    """Seconds of processor that all threads of this process but the calling one have used."""
    return time.process_time() - time.thread_time()


def test_two_thousand_meet_and_the_server_sleeps_meanwhile():
    """K74: waits are pushed, so who waits costs nothing."""
    crowd = 2000
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * crowd + 200), hard))
    store = _tcp()
    key = b"/meeting"
    hello = b"\0" + struct.pack("<I", 0x3C85F7CE)
    arrive = b"\x12" + struct.pack("<Q", len(key)) + key + struct.pack("<Q", crowd)
    clients = [socket.create_connection(("127.0.0.1", store.port)) for _ in range(crowd)]
    try:
        for client in clients[1:]:
            client.sendall(hello + arrive)
        while store.add("meeting", 0) < crowd - 1:
            time.sleep(0.01)
        before = _cpu_of_other_threads()
        time.sleep(1)
        assert _cpu_of_other_threads() - before < 0.1
        clients[0].sendall(hello + arrive)
        for client in clients:
            client.settimeout(20)
            assert client.recv(10) == b"\0"
    finally:
        for client in clients:
            client.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_server_without_descriptors_says_so_once():
    code = textwrap.dedent(
        """
        import os, resource, socket, time
        import cdist
        store = cdist.TCPStore("127.0.0.1", 0, None, True, timeout=20)
        client = socket.socket()
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        held = []
        try:
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            client.connect(("127.0.0.1", store.port))
        client.sendall(b"\\0\\xce\\xf7\\x85\\x3c\\x0d1234")
        time.sleep(0.5)  # five attempts
        os.close(held[0])
        client.settimeout(20)
        print(client.recv(10))
        """
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "b'1234'\n", done.stderr
    assert done.stderr.count("cannot accept a connection: Too many open files") == 1
    assert "ulimit -n" in done.stderr


def test_a_server_that_stays_without_descriptors_tells_who_waits():
    code = textwrap.dedent(
        """
        import os, resource, subprocess, sys
        import cdist
        store = cdist.TCPStore("127.0.0.1", 0, None, True, timeout=20)
        join = f"import cdist; cdist.TCPStore('127.0.0.1', {store.port}, None, False, timeout=60)"
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        client = subprocess.Popen([sys.executable, "-c", "input();" + join], stdin=subprocess.PIPE)
        held = []
        try:
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            os.write(client.stdin.fileno(), b"go\\n")
        sys.exit(client.wait())
        """
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "cdist.errors.RefusedError" in done.stderr
    assert "takes no further connection" in done.stderr
    assert "this process may open 64 files: ulimit -n raises it" in done.stderr


def test_file_is_removed_by_the_last(tmp_path):
    path = str(tmp_path / "f")
    first, second = FileStore(path, 2), FileStore(path, 2)
    first.set("k", "v")
    assert second.get("k") == b"v" and second.path == path
    del first
    assert os.path.exists(path)
    del second
    assert not os.path.exists(path)


def _come_and_go(rank, world, folder):
    for i in range(200):
        store = FileStore(f"{folder}/{i}", world)
        barrier()
        del store
    barrier()
    left = os.listdir(folder)
    barrier()
    for i in range(200):
        store = FileStore(f"{folder}/again", world)
        store.set(f"{i}/{rank}", "")
        store.wait([f"{i}/{1 - rank}"], 20)
        del store
    barrier()
    return left + os.listdir(folder)


def test_files_of_two_that_leave_at_once(tmp_path):
    """Both left the file, each in the belief that the other was still there, in 1 of 60 cases."""
    assert run(_come_and_go, 2, str(tmp_path)) == [[], []]


def test_half_written_record_is_cut_off(tmp_path):
    path = tmp_path / "f"
    store = FileStore(str(path), 1)
    store.set("k", "v")
    with open(path, "ab") as file:
        file.write(b"\x05\x00\x00\x00/ab")
    other = FileStore(str(path), -1)
    other.set("l", "w")
    assert store.get("l") == b"w" and other.get("k") == b"v"


# ---- with torch ----

torch_dist = pytest.importorskip("torch.distributed", reason="torch comes with EXTRAS in .ci/run")


def test_torch_client_on_our_server():
    ours = _tcp()
    theirs = torch_dist.TCPStore("127.0.0.1", ours.port, None, False, timedelta(seconds=10))
    theirs.set("a", "1")
    assert ours.get("a") == b"1"
    ours.set("b", "2")
    assert theirs.get("b") == b"2"
    assert theirs.add("n", 3) == 3 and ours.add("n", -1) == 2
    assert theirs.compare_set("c", "", "x") == b"x"
    assert theirs.check(["a", "b"]) and theirs.num_keys() == ours.num_keys()
    theirs.multi_set(["d", "e"], ["4", "5"])
    assert theirs.multi_get(["d", "e"]) == [b"4", b"5"] == ours.multi_get(["d", "e"])
    theirs.append("d", "6")
    assert ours.get("d") == b"46" and ours.delete_key("d") and not theirs.delete_key("d")
    theirs.queue_push("q", "x")
    assert ours.queue_pop("q") == b"x"
    assert sorted(theirs.list_keys()) == sorted(ours.list_keys())
    with pytest.raises(RuntimeError, match="wait timeout after 200ms, keys: /zz"):
        theirs.wait(["zz"], timedelta(milliseconds=200))
    threading.Timer(0.1, ours.set, ("late", "v")).start()
    assert theirs.get("late") == b"v"


@pytest.mark.parametrize("use_libuv", [True, False])
def test_our_client_on_torch_server(use_libuv):
    theirs = torch_dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), use_libuv=use_libuv)
    ours = TCPStore("127.0.0.1", theirs.port, None, False, 10)
    ours.set("a", "1")
    assert ours.get("a") == b"1" == theirs.get("a")
    assert ours.add("n", 3) == 3 and theirs.add("n", -1) == 2
    assert ours.compare_set("c", "z", "x") == b"z" and ours.compare_set("c", "", "x") == b"x"
    assert ours.check(["a", "c"]) and not ours.check(["zz"])
    ours.multi_set(["d", "e"], ["4", "5"])
    assert ours.multi_get(["d", "e"]) == [b"4", b"5"]
    ours.append("d", "6")
    assert ours.get("d") == b"46" and ours.delete_key("d")
    with pytest.raises(errors.DistStoreError, match="wait timeout after 200ms, keys: /zz"):
        ours.wait(["zz"], 0.2)
    threading.Timer(0.1, theirs.set, ("late", "v")).start()
    assert ours.get("late") == b"v"
    assert ours.num_keys() == theirs.num_keys()


def test_torch_and_ours_on_one_file(tmp_path):
    path = str(tmp_path / "f")
    theirs, ours = torch_dist.FileStore(path, 2), FileStore(path, 2)
    theirs.set("a", "1")
    ours.set("b", "2")
    assert ours.get("a") == b"1" and theirs.get("b") == b"2"
    assert ours.add("n", 2) == 2 and theirs.add("n", 2) == 4 and ours.add("n", 0) == 4
    assert theirs.num_keys() == ours.num_keys()
    ours.delete_key("a")
    assert not theirs.check(["a"])
    del theirs
    assert os.path.exists(path)
    del ours
    assert not os.path.exists(path)


def test_torch_process_group_over_our_store():
    store = _tcp()
    code = (
        "import sys, torch, torch.distributed as dist\n"
        "rank = int(sys.argv[1])\n"
        "store = dist.TCPStore('127.0.0.1', int(sys.argv[2]), None, False)\n"
        "dist.init_process_group('gloo', store=store, rank=rank, world_size=2)\n"
        "x = torch.full((4,), float(rank + 1))\n"
        "dist.all_reduce(x)\n"
        "assert x.tolist() == [3.0] * 4\n"
        "dist.barrier()\n"
        "dist.destroy_process_group()\n"
    )
    workers = [subprocess.Popen([sys.executable, "-c", code, str(r), str(store.port)]) for r in range(2)]
    try:
        assert [worker.wait(40) for worker in workers] == [0, 0]
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.send_signal(signal.SIGKILL)
                worker.wait()
