"""Ports, addresses, interfaces and names: what happens on hosts that are not this one.

Hosts are network namespaces (tests/hosts.py), so that any port is free, any interface may be missing, and no
name resolves.
"""

import contextlib
import ipaddress
import os
import random
import re
import socket
import subprocess
import sys
import textwrap
import time

import cdist
import numpy as np
import pytest
from cdist import errors
from cdist.store import TCPStore
from cdist.testing import run
from collective_cases import MOVING, REDUCING, failures
from hosts import hosts, needs_hosts, python, world

LAUNCH = [sys.executable, "-m", "cdist.run"]


def _sum(rank, size):
    x = np.full(1000, rank + 1.0)
    cdist.all_reduce(x)
    return x[0]


def _script(folder, body):
    path = folder / "script.py"
    path.write_text(textwrap.dedent(body))
    return path


SUM = """
    import os
    import cdist
    import numpy as np
    cdist.init_process_group("gloo", timeout=30)
    x = np.full(1000, cdist.get_rank() + 1.0)
    cdist.all_reduce(x)
    print(x[0], os.environ["MASTER_ADDR"])
"""


# ---- ports


@needs_hosts
def test_launches_at_once_do_not_clash(tmp_path):
    """K31: without a port option each launch finds one by itself."""
    script = _script(tmp_path, SUM)
    with hosts(1) as (host,):
        for _ in range(4):
            jobs = [
                host.start([*LAUNCH, "--nproc-per-node", 2, script], stdout=subprocess.PIPE, text=True)
                for _ in range(5)
            ]
            for job in jobs:
                assert job.communicate(timeout=60)[0] == "3.0 127.0.0.1\n" * 2
                assert job.returncode == 0


@needs_hosts
def test_the_usual_port_may_be_taken(tmp_path):
    """K32: the default does not need 29500; who asks for it is told that it is taken."""
    script = _script(tmp_path, SUM)
    taken = "import socket, sys; s = socket.create_server(('', 29500)); print(flush=True); sys.stdin.read()"
    with hosts(1) as (host,):
        holder = host.start(
            [sys.executable, "-c", taken], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        holder.stdout.readline()
        done = host.run([*LAUNCH, "--nproc-per-node", 2, script])
        assert done.stdout == "3.0 127.0.0.1\n" * 2
        done = host.run([*LAUNCH, "--nproc-per-node", 2, "--master-port", 29500, script], check=False)
        assert done.returncode == 1
        assert "29500: Address already in use" in done.stderr


def _reconnect(rank, size, port):
    for _ in range(100):
        TCPStore("127.0.0.1", port, None, False, 10).set("k", "v")
    return "ok"


def test_connections_pin_no_port():
    """K34: a hundred connections to one port, one after the other, with an interface named."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    options = {"init": False, "environ": {"CDIST_SOCKET_IFNAME": "lo"}}
    assert run(_reconnect, 2, store.port, **options) == ["ok"] * 2


def _sockets():
    """Sockets of this process, and connections of the host in TIME_WAIT."""
    mine = sum(os.readlink(f"/proc/self/fd/{n}").startswith("socket:") for n in _open_numbers())
    with open("/proc/net/tcp") as table:
        return mine, sum(line.split()[3] == "06" for line in table.readlines()[1:])


def _open_numbers():
    return [n for n in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{n}")]


def _many_subgroups(rank, size):
    cdist.barrier()
    before = _sockets()
    x = np.ones(10)
    for i in range(200):
        group = cdist.new_group([rank % 2, rank % 2 + 2] if i % 2 else None)
        cdist.all_reduce(x, group=group)
        cdist.destroy_process_group(group)
    after = _sockets()
    cdist.barrier()
    return after[0] - before[0], after[1] - before[1]


@needs_hosts
def test_subgroups_open_no_connections():
    """K44: two hundred subgroups go over the connections that are there."""
    with hosts(2) as places:
        for grown, waiting in world(places, _many_subgroups, per_host=2):
            assert grown == 0
            assert waiting < 10


# ---- who is who


def _claims(index, size, port, ranks, sizes):
    store = TCPStore("127.0.0.1", port, None, False, 10)
    start = time.monotonic()
    try:
        cdist.init_process_group("gloo", store=store, rank=ranks[index], world_size=sizes[index], timeout=1.5)
    except (errors.DistError, ValueError) as error:
        assert time.monotonic() - start < 10
        return type(error).__name__, str(error)
    time.sleep(1)  # the one that is too many must find us at work
    return None


@pytest.mark.parametrize(
    ("ranks", "sizes", "refused", "text"),
    [
        ([0, 0], [2, 2], 2, "two processes claim rank 0"),
        ([0, 1, 1], [3, 3, 3], 1, "two processes claim rank 1"),
        ([0, 1], [2, 3], 2, "world sizes differ"),
        ([0, 1, 2], [2, 2, 2], 1, "rank 2 does not fit world size 2"),
    ],
)
def test_conflicting_claims_are_named(ranks, sizes, refused, text):
    """K46: two processes of one rank, other world sizes, a rank beyond the world."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    outcomes = run(
        _claims, len(ranks), store.port, ranks, sizes, init=False, allow_failures=True, check_leftovers=False
    )
    named = [outcome for outcome in outcomes if outcome and text in outcome[1]]
    assert len(named) >= refused, outcomes


# ---- interfaces and addresses


def _with_unknown_interface(rank, size, port):
    store = TCPStore("127.0.0.1", port, None, False, 10)
    with pytest.raises(ValueError) as caught:
        cdist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=5)
    return str(caught.value)


def test_an_unknown_interface_is_answered_with_those_that_exist():
    """K40."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    options = {"init": False, "environ": {"CDIST_SOCKET_IFNAME": "nope0"}}
    for text in run(_with_unknown_interface, 2, store.port, **options):
        assert "CDIST_SOCKET_IFNAME='nope0'" in text
        assert "lo (127.0.0.1)" in text


def _over(rank, size):
    """Bytes that each card of this host received during a sum of 8 MB."""

    def received(card):
        with open(f"/sys/class/net/{card}/statistics/rx_bytes") as file:
            return int(file.read())

    cdist.barrier()
    before = [received("eth0"), received("eth1")]
    cdist.all_reduce(np.ones(1_000_000))
    cdist.barrier()
    return [received("eth0") - before[0], received("eth1") - before[1]]


@needs_hosts
def test_the_network_named_by_its_block_is_used_and_told(capfd):
    """K41: data goes over the named network although the master is reached by another."""
    environ = {"CDIST_SOCKET_IFNAME": "10.2.0.0/16", "CDIST_LOG": "info"}
    with hosts(2, networks=2) as places:
        for slow, fast in world(places, _over, environ=environ):
            assert fast > 8_000_000
            assert slow < 100_000
        told = re.findall(r"rank (\d) listens on (\S+) port \d+ \((\S+), ", capfd.readouterr().err)
        assert sorted(told) == [("0", "10.2.0.1", "eth1"), ("1", "10.2.0.2", "eth1")]
        environ = {"CDIST_LOG": "info"}
        for first, second in world(places, _over, environ=environ):
            assert first > 8_000_000
            assert second < 100_000


@needs_hosts
def test_the_route_to_the_master_chooses_the_interface():
    """K47: only an overlay reaches the master; what looks like the default network leads nowhere."""
    with hosts(2, networks=2) as places:
        for host in places:
            host.ip("route add default via 10.1.0.77 dev eth0")
            host.cut(0)
        assert world(places, _sum, per_host=2, master=places[0].addresses[1]) == [10.0] * 4


@needs_hosts
def test_ipv6_alone():
    """K35: hosts that have no IPv4 address but loopback's."""
    with hosts(2) as places:
        if places[0].address6 is None:
            pytest.skip("this kernel has no IPv6")
        for host in places:
            host.run(["ip", "-4", "addr", "flush", "dev", "eth0"])
        assert world(places, _sum, per_host=2, master=places[0].address6) == [10.0] * 4


@needs_hosts
def test_ipv6_without_any_ipv4(tmp_path):
    """Not even loopback's: the launcher's usual address is not there, and it says which is."""
    script = _script(tmp_path, SUM)
    with hosts(1) as (host,):
        if host.address6 is None:
            pytest.skip("this kernel has no IPv6")
        for card in ("eth0", "lo"):
            host.run(["ip", "-4", "addr", "flush", "dev", card])
        done = host.run([*LAUNCH, "--nproc-per-node", 2, script], check=False)
        assert "--master-addr names an address of this host (::1 where it has no IPv4)" in done.stderr
        done = host.run([*LAUNCH, "--nproc-per-node", 2, "--master-addr", "::1", script])
        assert done.stdout == "3.0 ::1\n" * 2


@needs_hosts
@pytest.mark.parametrize("address", ["127.0.0.1", "10.1.0.1", "::1"])
def test_a_loopback_interface_that_is_down_is_said_at_once(tmp_path, address):
    """As in a new network namespace: nothing that such a host sends to itself arrives."""
    script = _script(tmp_path, SUM)
    with hosts(1) as (host,):
        host.ip("link set lo down")
        done = host.run([*LAUNCH, "--nproc-per-node", 2, "--master-addr", address, script], 20, check=False)
        assert done.returncode == 1
        if address != "::1":  # which goes with the interface
            assert "ip link set lo up" in done.stderr


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_a_store_at_any_loopback(host):
    """K35."""
    server = TCPStore(host, 0, None, True, wait_for_workers=False)
    client = TCPStore(host, server.port, None, False, 5)
    client.set("k", "v")
    assert server.get("k") == b"v"


@needs_hosts
def test_ipv6_wildcard_is_reached_by_both():
    """K35: '::' listens for IPv4, too."""
    server = "from cdist.store import TCPStore; s = TCPStore('::', 7000, None, True, wait_for_workers=False)"
    client = "import sys, cdist; cdist.TCPStore(sys.argv[1], 7000, None, False, 10).set('k', 'v')"
    with hosts(2) as (a, b):
        holder = a.start(
            [sys.executable, "-c", f"{server}; print(flush=True); input()"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert holder.stdout.readline() == "\n"
        for address in filter(None, (a.address, a.address6)):
            b.run([sys.executable, "-c", client, address])


# ---- names


@needs_hosts
@pytest.mark.parametrize("dynamic", [False, True])
def test_host_names_need_not_resolve(tmp_path, dynamic):
    """K38: two hosts whose names nobody knows, started by an address; the workers get an address too."""
    script = _script(tmp_path, SUM)
    with hosts(2) as places:
        jobs = []
        for host in places:
            where = ["--node-rank", host.index, "--master-addr", places[0].address, "--master-port", 7000]
            if dynamic:
                where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{places[0].address}:7000"]
            command = [*LAUNCH, "--nnodes", 2, "--nproc-per-node", 2, *where, script]
            jobs.append(host.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        for job in jobs:
            out, err = job.communicate(timeout=60)
            assert job.returncode == 0, err
            assert re.fullmatch(r"(10.0 10\.1\.0\.\d+\n){2}", out)


@needs_hosts
def test_no_name_is_looked_up():
    """K37: with a resolver that never answers, a world of four meets without having asked it anything."""
    with hosts(2) as places:
        for host in places:
            host.replace("/etc/resolv.conf", "nameserver 10.1.0.99\n")
            host.replace("/etc/hosts", "127.0.0.1 localhost\n")
            host.run(["iptables", "-w", "-A", "OUTPUT", "-p", "udp", "--dport", "53", "-j", "DROP"])
        assert world(places, _sum, per_host=2) == [10.0] * 4
        for host in places:
            counted = host.run(["iptables", "-w", "-nvxL", "OUTPUT"]).stdout
            assert re.search(r"^\s+0\s+0 DROP ", counted, re.MULTILINE), counted


# A host's own name as Debian's installer leaves it: loopback there, and the real address everywhere else.
DEBIAN = "127.0.0.1 localhost\n127.0.1.1 host0\n"


def _debian_hosts(stack):
    places = stack.enter_context(hosts(2))
    places[0].replace("/etc/hosts", DEBIAN)
    places[1].replace("/etc/hosts", f"127.0.0.1 localhost\n{places[0].address} host0\n")
    return places


def _listening():
    """Addresses on which this host listens; IPv6's as they stand in the kernel's table."""
    found = set()
    for name in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(FileNotFoundError), open(name) as file:
            rows = [line.split() for line in list(file)[1:]]
            found |= {row[1].partition(":")[0] for row in rows if row[3] == "0A"}
    return {str(ipaddress.ip_address(bytes.fromhex(a)[::-1])) if len(a) == 8 else a for a in found}


def _sum_and_listening(rank, size):
    cdist.barrier()
    seen = _listening()
    cdist.barrier()
    return _sum(rank, size), seen


@needs_hosts
def test_a_master_whose_name_means_loopback_on_its_own_host(capfd):
    """Rank 0 listens on what the other hosts reach too, never on all addresses, and says so."""
    with contextlib.ExitStack() as stack:
        places = _debian_hosts(stack)
        outcomes = world(places, _sum_and_listening, per_host=2, master="host0")
        assert [total for total, _ in outcomes] == [10.0] * 4
        assert outcomes[0][1] == {"127.0.1.1", places[0].address}
        assert outcomes[2][1] == {places[1].address}
    said = capfd.readouterr().err
    assert said.count("'host0' means 127.0.1.1 on this host") == 1
    assert f"listening on {places[0].address} too" in said


@needs_hosts
def test_an_interface_that_is_named_is_listened_on():
    with hosts(2, networks=2) as places:
        places[0].replace("/etc/hosts", DEBIAN)
        places[1].replace("/etc/hosts", f"127.0.0.1 localhost\n{places[0].addresses[1]} host0\n")
        outcomes = world(places, _sum_and_listening, master="host0", environ={"CDIST_SOCKET_IFNAME": "eth1"})
        assert [total for total, _ in outcomes] == [3.0] * 2
        assert outcomes[0][1] == {"127.0.1.1", places[0].addresses[1]}


@needs_hosts
def test_ranks_of_one_host_listen_on_loopback_alone(tmp_path):
    """The launcher says that all ranks are here: then the name may well mean loopback."""
    script = _script(tmp_path, SUM + "    sys.path.append(os.environ['TESTS'])\n").read_text()
    script = "import sys\n" + script + "from test_network import _listening\nprint(*_listening())\n"
    path = _script(tmp_path, script)
    with contextlib.ExitStack() as stack:
        host = _debian_hosts(stack)[0]
        where = dict(RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="host0", MASTER_PORT="7000")
        env = {**os.environ, **where, "TESTS": os.path.dirname(__file__)}
        assert host.run([sys.executable, path], env=env).stdout == "1.0 host0\n127.0.1.1\n"


@needs_hosts
@pytest.mark.parametrize("dynamic", [False, True])
def test_launchers_meet_at_a_name_that_means_loopback_there(tmp_path, dynamic):
    script = _script(tmp_path, SUM)
    probe = "import socket; socket.create_connection(('host0', 7000), 5)"
    with contextlib.ExitStack() as stack:
        jobs = []
        for host in _debian_hosts(stack):
            where = ["--node-rank", host.index, "--master-addr", "host0", "--master-port", 7000]
            if dynamic:
                where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "host0:7000"]
            command = [*LAUNCH, "--nnodes", 2, "--nproc-per-node", 2, *where, script]
            jobs.append(host.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
            if not jobs[1:]:
                while host.run([sys.executable, "-c", probe], check=False).returncode:
                    assert jobs[0].poll() is None, jobs[0].communicate()[1]
        for job in jobs:
            out, err = job.communicate(timeout=60)
            assert job.returncode == 0, err
            assert out == "10.0 host0\n" * 2


@needs_hosts
def test_a_name_that_means_oneself_on_another_host_is_said():
    """localhost as MASTER_ADDR of several hosts: each asks itself, and is told that."""
    with hosts(2) as places:
        ask = python("from cdist import TCPStore; TCPStore('localhost', 7000, timeout=0.3)")
        text = places[1].run(ask, check=False).stderr
    assert text.rstrip().endswith(
        "That address is this very host; where rank 0 is on another one, MASTER_ADDR is wrong"
    )


# ---- memory is shared within a host only


def _memory(rank, size):
    x = np.full(100, rank + 1.0)
    cdist.all_reduce(x)
    assert x[0] == 10
    with open("/proc/self/maps") as maps:
        shared = {line.split()[4] for line in maps if "/memfd:" in line}
    assert shared
    kinds = REDUCING + MOVING
    cases = [{"kind": kind, "name": "float32", "shape": (n,)} for kind in kinds for n in (1, 5000)]
    return shared, failures(cases, rank, size)


@needs_hosts
def test_hosts_share_no_memory_although_their_ranks_count_alike():
    """K166: two network namespaces with two local ranks each; results are those of any other transport."""
    with hosts(2) as places:
        outcomes = world(places, _memory, per_host=2)
    assert [wrong for _, wrong in outcomes] == [[]] * 4
    maps = [shared for shared, _ in outcomes]
    assert maps[0] & maps[1]
    assert maps[2] & maps[3]
    assert not (maps[0] | maps[1]) & (maps[2] | maps[3])


@needs_hosts
@pytest.mark.parametrize("seed", range(3))
def test_uneven_numbers_of_ranks_on_hosts(seed):
    """K166: where ranks of a host are not neighbours, the host's memory still serves them alone."""
    order = [0, 0, 1, 1, 2]
    random.Random(seed).shuffle(order)
    with hosts(3) as places:
        outcomes = world([places[i] for i in order], _sum)
    assert outcomes == [15.0] * 5


def test_the_name_of_this_machine_is_not_resolved(monkeypatch):
    """K38: Python's own look-ups fail, and a world of two still meets."""

    def refuse(*args, **kwargs):
        raise OSError("no name is known here")

    for name in ("gethostbyname", "getfqdn", "gethostbyaddr", "getaddrinfo"):
        monkeypatch.setattr(socket, name, refuse)
    assert run(_sum, 2) == [3.0] * 2
