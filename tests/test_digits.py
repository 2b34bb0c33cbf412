"""The main job: examples/digits.py under cdistrun, as a user runs it."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "digits.py"


def command(ranks, *options):
    launcher = [sys.executable, "-m", "cdist.run", "--nproc-per-node", str(ranks)]
    return [*launcher, str(EXAMPLE), *map(str, options)]


def output(ranks, checkpoint, *options):
    line = command(ranks, "--checkpoint", checkpoint, *options)
    done = subprocess.run(line, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    return done


def train(ranks, checkpoint, *options):
    text = output(ranks, checkpoint, *options).stdout
    assert "going on from there" not in text
    return float(re.search(r"test accuracy: ([\d.]+)%", text)[1])


def losses(checkpoint):
    with np.load(checkpoint) as file:
        return file["losses"]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    checkpoint = tmp_path_factory.mktemp("digits") / "one.npz"
    assert train(1, checkpoint) >= 97
    return losses(checkpoint)


@pytest.mark.parametrize(("ranks", "options"), [(2, ()), (4, ()), (2, ("--accumulate", 3))])
def test_every_world_size_gives_the_same_curve(reference, tmp_path, ranks, options):
    assert train(ranks, tmp_path / "many.npz", *options) >= 97
    np.testing.assert_allclose(losses(tmp_path / "many.npz"), reference, rtol=0, atol=1e-9)


def test_a_run_goes_on_from_a_checkpoint_at_another_world_size(reference, tmp_path):
    # The learning rate falls by epoch / epochs, so the first part stops before that happens either way.
    train(2, tmp_path / "part.npz", "--epochs", 20, "--every", 10)
    with np.load(tmp_path / "part.npz") as file:
        kept = {name: file[name] for name in file.files}
    np.testing.assert_allclose(kept["losses"][:15], reference[:15], rtol=0, atol=1e-9)
    assert kept["epoch"] == 19
    said = f"{tmp_path / 'part.npz'} holds 20 epochs: going on from there"
    assert output(1, tmp_path / "part.npz", "--epochs", 30).stdout.count(said) == 1
    assert len(losses(tmp_path / "part.npz")) == 30
    np.testing.assert_array_equal(losses(tmp_path / "part.npz")[:20], kept["losses"])
    again = output(2, tmp_path / "part.npz", "--epochs", 30)
    assert "holds 30 epochs" in again.stdout
    assert "test accuracy: 9" in again.stdout
    assert "epoch" not in again.stderr  # no bar of no epochs
    assert train(1, tmp_path / "part.npz", "--epochs", 2, "--fresh") > 80


def workers_of(launcher):
    """Process ids by rank: the launcher's descendants that have a RANK."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
            arguments = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        values = dict(item.split(b"=", 1) for item in environment if b"=" in item)
        is_of_job = values.get(b"CDIST_TEST_JOB") == str(launcher).encode()
        if is_of_job and b"RANK" in values and b"digits.py" in arguments:
            found[int(values[b"RANK"])] = int(entry.name)
    return found


def test_a_killed_rank_ends_the_job_and_is_named(tmp_path):
    job = f"digits-{os.getpid()}"
    launcher = subprocess.Popen(
        command(3, "--epochs", 100000, "--checkpoint", tmp_path / "none.npz", "--every", 1000000),
        env={**os.environ, "CDIST_TEST_JOB": job},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 30
        while len(workers_of(job)) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(1.5)
        os.kill(workers_of(job)[1], signal.SIGKILL)
        _, text = launcher.communicate(timeout=20)
    finally:
        launcher.kill()
    assert launcher.returncode == 128 + signal.SIGKILL
    assert re.search(r"rank 1\b", text), text
    assert "SIGKILL" in text
    assert not workers_of(job)
