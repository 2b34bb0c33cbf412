"""The hosts that other tests stand on: reach each other, are cut off and mended, and leave nothing."""

import os
import subprocess
import time

import cdist
import numpy as np
import pytest
from hosts import hosts, needs_hosts, python, world

pytestmark = needs_hosts

_SERVER = """
import socket, sys
server = socket.create_server(("0.0.0.0", 7000))
print("ready", flush=True)
while True:
    peer, _ = server.accept()
    peer.sendall(socket.gethostname().encode())
    peer.close()
"""
_CLIENT = """
import socket, sys
peer = socket.create_connection((sys.argv[1], 7000), timeout=float(sys.argv[2]))
print(peer.recv(100).decode())
"""


def _networks():
    return {os.stat(f"/proc/{entry}/ns/net").st_ino for entry in os.listdir("/proc") if entry.isdigit()
            and os.access(f"/proc/{entry}/ns/net", os.F_OK)}  # fmt: skip


def test_hosts_reach_each_other_until_they_are_cut():
    with hosts(2) as (a, b):
        server = a.start(python(_SERVER), stdout=subprocess.PIPE, text=True)
        assert server.stdout.readline() == "ready\n"
        ask, try_it = ([*python(_CLIENT), a.address, patience] for patience in (10, 0.3))
        assert b.run(ask).stdout == "host0\n"
        b.cut()
        assert "timed out" in b.run(try_it, check=False).stderr
        b.mend()
        assert b.run(ask).stdout == "host0\n"
        a.block(b)
        assert "timed out" in b.run(try_it, check=False).stderr
        a.unblock(b)
        b.unplug()
        assert b.run(try_it, check=False).returncode != 0
        b.mend()
        assert b.run(ask).stdout == "host0\n"


def test_a_failed_test_leaves_no_process_and_no_namespace():
    before = _networks()

    def fail():
        with hosts(3, networks=2) as places:
            children.append(places[1].start(["sh", "-c", "trap '' TERM INT; sleep 99 & wait"]))
            while len(places[1].processes()) < 2:
                time.sleep(0.01)
            assert len(_networks() - before) == 4
            return 1 / 0

    children = []
    with pytest.raises(ZeroDivisionError):
        fail()
    stubborn = children[0]
    assert stubborn.poll() is not None
    assert _networks() <= before


def _sum(rank, size):
    x = np.full(1000, rank + 1.0)
    cdist.all_reduce(x)
    return x[0], os.uname().nodename


def test_a_world_over_two_hosts():
    with hosts(2) as places:
        assert world(places, _sum, per_host=2) == [(10.0, "host0")] * 2 + [(10.0, "host1")] * 2
