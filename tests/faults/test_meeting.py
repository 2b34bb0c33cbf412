"""init_process_group after all ranks have come: connections are made between hosts.

What keeps one rank from it ends it on all, at once and with that rank's reason, and not at the deadline.
"""

import os
import re
import signal
import threading

import cdist
import pytest
from hosts import hosts, needs_hosts, world

LIMIT_S = 30  # of init; an error that comes at the deadline fails the test's own limit, or is of another type


def _meet(rank, size):
    cdist.init_process_group("gloo", timeout=LIMIT_S)
    return "met"


def _meet_or_die(rank, size, victim):
    if rank == victim:
        threading.Timer(1, os.kill, [os.getpid(), signal.SIGKILL]).start()
    return _meet(rank, size)


@needs_hosts
@pytest.mark.parametrize("per_host", [1, 2])
def test_a_rank_that_another_one_turns_away_ends_it_on_all(per_host):
    """A firewall rejects what comes from another host: who dials hears it, all wait for that connection."""
    with hosts(3) as places:
        places[1].run(
            ["iptables", "-w", "-A", "INPUT", "-p", "tcp", "-s", places[2].address,
             "-j", "REJECT", "--reject-with", "tcp-reset"]
        )  # fmt: skip
        options = {"per_host": per_host, "init": False, "allow_failures": True, "timeout": 20}
        outcomes = world(places, _meet, **options)
    for error in outcomes:
        assert isinstance(error, cdist.DistNetworkError), outcomes
        assert re.search(
            r"rank \d \(pid \d+ on host2\): no connection to rank \d at 10\.1\.0\.2", str(error)
        ), outcomes
        assert "CDIST_SOCKET_IFNAME" in str(error)


@needs_hosts
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_dies_while_others_connect_is_named(victim):
    """Rank 2 dials rank 1 in vain when it dies, or when rank 0 does, which has all its connections."""
    with hosts(3) as places:
        places[1].block(places[2])
        options = {"init": False, "allow_failures": True, "timeout": 20}
        outcomes = world(places, _meet_or_die, victim, **options)
    for rank, error in enumerate(outcomes):
        if rank != victim:
            assert isinstance(error, cdist.PeerLostError), outcomes
            assert str(error).startswith(f"rank {victim} was lost while the ranks were connecting"), outcomes
            assert error.rank == victim
