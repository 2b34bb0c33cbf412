"""The soak, for twenty seconds, and its operations at every level of debugging."""

import os
import socket
from collections import Counter

import cdist
import pytest
import soak
from cdist.testing import run


def test_soak():
    summary = soak.soak(20, 1)
    assert summary["operations"] > 500
    assert summary["faults_survived"] > 3
    assert summary["ranks"]["went on"] > 0


def test_jobs_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(soak.tempfile, "tempdir", None)

    class Options:
        seconds, ranks, jobs = 0, 3, 2

    summary = soak.soak_in_jobs(Options, 8)
    assert summary["jobs"] == summary["worlds"] == 2
    assert summary["seeds"] == [[8, 8], [8 + soak.SEEDS_PER_JOB] * 2]
    assert not os.listdir(tmp_path)


def _connections():
    """Sockets that lead to anywhere but the store, whose client opens some for calls that must wait."""
    store, count = cdist.group.WORLD.get_group_store(), 0
    port = getattr(store, "_underlying_non_prefix_store", store).port
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as end:
                count += end.getpeername()[1:] != (port,)
        except OSError:  # no socket, or one that listens
            continue
    return count


def _operations(rank, world):
    done = Counter()
    soak._some_operations(5, 100, done)
    return dict(done), _connections()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_no_debug_level_changes_what_is_done(transport):
    """K20: the same operations with the same results, and no further connection."""
    found = [
        run(_operations, 3, transport=transport, environ={"CDIST_DEBUG": level})
        for level in ("OFF", "INFO", "DETAIL")
    ]
    assert found[0] == found[1] == found[2]
    assert sum(found[0][0][0].values()) > 50
