"""Init methods: env://, tcp://, file://, and who launched the process."""

import importlib
import os
import re
import socket
import subprocess
import sys

import cdist
import numpy
import pytest
from cdist.rendezvous import find_launcher, register_rendezvous_handler, rendezvous
from cdist.store import PrefixStore, TCPStore

module = importlib.import_module("cdist.rendezvous")

PACKAGE = os.path.dirname(os.path.dirname(cdist.__file__))
VARIABLES = [
    *("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    *(name for names in module._LAUNCHERS.values() for name in names),
]


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_env(monkeypatch):
    for name, value in dict(RANK=0, WORLD_SIZE=1, MASTER_ADDR="127.0.0.1", MASTER_PORT=_free_port()).items():
        monkeypatch.setenv(name, str(value))
    iterator = rendezvous("env://")
    store, rank, world = next(iterator)
    assert (rank, world) == (0, 1)
    store.set("k", "v")
    assert store.get("k") == b"v"
    with pytest.raises(RuntimeError, match="Unable to perform .*rendezvous using env:// method"):
        next(iterator)


def test_env_query_goes_first(monkeypatch):
    for name, value in dict(RANK=5, WORLD_SIZE=9, MASTER_ADDR="127.0.0.1", MASTER_PORT=_free_port()).items():
        monkeypatch.setenv(name, str(value))
    assert next(rendezvous("env://?rank=0&world_size=1"))[1:] == (0, 1)
    assert next(rendezvous("env://", 0, 1))[1:] == (0, 1)


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_env_names_what_is_missing(monkeypatch, missing):
    for name, value in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500").items():
        if name != missing:
            monkeypatch.setenv(name, value)
    with pytest.raises(
        ValueError, match=f"environment variable {missing} expected, but not set: start .* cdistrun"
    ):
        next(rendezvous("env://"))


def test_agent_store_is_joined_and_keys_are_of_the_attempt(monkeypatch):
    agent = TCPStore("127.0.0.1", 0, None, True)
    for name, value in dict(RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=agent.port).items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    store = next(rendezvous("env://"))[0]
    assert isinstance(store, PrefixStore)
    store.set("k", "v")
    assert agent.get("/worker/job/attempt_3/k") == b"v"
    # Another endpoint is the workers' own, also under an agent.
    private = next(rendezvous(f"tcp://127.0.0.1:{_free_port()}?rank=0&world_size=1"))[0]
    assert isinstance(private, TCPStore)


def test_tcp():
    store, rank, world = next(rendezvous(f"tcp://127.0.0.1:{_free_port()}?rank=0&world_size=1"))
    assert (rank, world, store.add("n", 1)) == (0, 1, 1)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("tcp://127.0.0.1?rank=0&world_size=1", "port number missing"),
        ("tcp://127.0.0.1:23456?world_size=1", "rank parameter missing"),
        ("tcp://127.0.0.1:23456?rank=0", "world size parameter missing"),
        ("tcp://127.0.0.1:70000?rank=0&world_size=1", "0 to 65535"),
        ("file://?rank=0&world_size=1", "path missing"),
        ("file:///tmp/x?rank=0", "world size parameter missing"),
        ("env://?rank=zero", "must be a number"),
    ],
)
def test_bad_urls(url, text):
    with pytest.raises(ValueError, match=text):
        next(rendezvous(url))


@pytest.mark.parametrize(
    ("rank", "world", "text"),
    [
        (2, 2, "rank 2 does not fit world size 2: ranks are 0 to 1"),
        (-1, 1, "rank -1 does not"),
        (0, 0, "world size should be at least 1, not 0"),
    ],
)
@pytest.mark.parametrize("place", ["tcp://127.0.0.1:29999", "file:///tmp/nothing-comes-there", "env://"])
def test_a_rank_that_cannot_be_is_refused_before_anybody_is_asked(monkeypatch, place, rank, world, text):
    for name, value in dict(RANK=rank, WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT=29999).items():
        monkeypatch.setenv(name, str(value))
    query = "" if place == "env://" else f"?rank={rank}&world_size={world}"
    with pytest.raises(ValueError, match=text):
        next(rendezvous(place + query))
    assert not os.path.exists("/tmp/nothing-comes-there")


SET_UP = """
import cdist
import numpy
cdist.init_process_group(timeout=1)
"""


@pytest.mark.parametrize(
    ("variables", "last"),
    [
        ({}, "ValueError: .* environment variable RANK expected, but not set: start .* cdistrun"),
        (
            {"RANK": 0},
            "DistTimeoutError: 1 of 2 ranks did not come in time: missing ranks .1.; rank 0 waited",
        ),
        ({"RANK": 1}, "DistNetworkError: The client socket has timed out .* does rank 0 run.*"),
        ({"RANK": 7}, "ValueError: rank 7 does not fit world size 2"),
        (
            {"RANK": 0, "MASTER_ADDR": "192.0.2.99"},
            "DistNetworkError: .*rank 0 belongs on the host that MASTER",
        ),
        (
            {"RANK": 0, "CDIST_TRANSPORT": "udp"},
            "ValueError: CDIST_TRANSPORT='udp' is none of auto, tcp",
        ),
    ],
)
def test_a_mistake_in_set_up_is_one_sentence(tmp_path, variables, last):
    """The traceback ends at the user's call and in init_process_group, and not deep in the package."""
    script = tmp_path / "script.py"
    script.write_text(SET_UP)
    where = dict(WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=_free_port(), PYTHONPATH=PACKAGE)
    env = {k: v for k, v in os.environ.items() if k not in VARIABLES}
    env |= {k: str(v) for k, v in (where | variables).items()}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert re.search(rf"^(cdist\.errors\.)?{last}", done.stderr.splitlines()[-1]), done.stderr
    assert done.stderr.count('  File "') == 2, done.stderr


def test_unknown_scheme_and_double_rank():
    with pytest.raises(RuntimeError, match="No rendezvous handler for foo://"):
        rendezvous("foo://")
    with pytest.raises(AssertionError, match="already"):
        rendezvous("tcp://127.0.0.1:1?rank=0", rank=0)


def test_file(tmp_path):
    path = tmp_path / "f"
    first = next(rendezvous(f"file://{path}", 0, 2))
    second = next(rendezvous(f"file://{path}", 1, 2))
    first[0].set("k", "v")
    assert second[0].get("k") == b"v"
    assert second[1:] == (1, 2)


def test_own_handler(monkeypatch):
    monkeypatch.setattr(module, "_handlers", dict(module._handlers))
    register_rendezvous_handler("own", lambda url, **kwargs: iter([(url, kwargs["timeout"], 0)]))
    assert next(rendezvous("own://x", timeout=3)) == ("own://x", 3, 0)
    with pytest.raises(RuntimeError, match="already"):
        register_rendezvous_handler("own", None)


@pytest.mark.parametrize("name", module._LAUNCHERS)
def test_launchers_stand_in_for_rank(monkeypatch, name):
    for variable, value in zip(module._LAUNCHERS[name], ["0", "1", "0", "1"], strict=True):
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("SLURM_STEP_NODELIST", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(_free_port()))
    assert find_launcher() == dict(name=name, rank=0, world_size=1, local_rank=0, local_world_size=1)
    store, rank, world = next(rendezvous("env://"))
    assert (rank, world, store.add("n", 1)) == (0, 1, 1)


@pytest.mark.parametrize(
    ("nodes", "first"), [("a", "a"), ("a01,b", "a01"), ("n[03-07,9],m", "n03"), ("n[5]", "n5")]
)
def test_first_host_of_slurm(monkeypatch, nodes, first):
    monkeypatch.setenv("SLURM_STEP_NODELIST", nodes)
    assert module._first_slurm_host() == first


def test_numbers_of_numpy():
    """Ranks, sizes and seconds are often taken from arrays."""
    cdist.init_process_group(
        init_method=f"tcp://127.0.0.1:{_free_port()}",
        rank=numpy.int64(0),
        world_size=numpy.int32(1),
        timeout=numpy.float32(9),
    )
    try:
        assert cdist.group.WORLD._timeout == 9
        for timeout in (numpy.float32(2.5), numpy.int64(2), numpy.uint8(2), numpy.float16(2), 2):
            cdist.barrier(timeout=timeout)
        for timeout in ("2", b"2", [2], numpy.timedelta64(2, "s")):
            with pytest.raises(TypeError, match="timeout must be a timedelta or a number of seconds, not "):
                cdist.barrier(timeout=timeout)
        with pytest.raises(ValueError, match="non-negative"):
            cdist.barrier(timeout=numpy.float32(-1))
        assert cdist.empty(numpy.int64(3)).shape == (3,)
    finally:
        cdist.destroy_process_group()
