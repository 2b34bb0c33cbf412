"""The soak, for twenty seconds, and its operations at every level of debugging."""

import os
from collections import Counter

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


def _operations(rank, world):
    done = Counter()
    soak._some_operations(5, 100, done)
    return dict(done)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_no_debug_level_changes_what_is_done(transport):
    """K20: the same operations, each of which checks its results."""
    found = [
        run(_operations, 3, transport=transport, environ={"CDIST_DEBUG": level})
        for level in ("OFF", "INFO", "DETAIL")
    ]
    assert found[0] == found[1] == found[2]
    assert sum(found[0][0].values()) > 50
