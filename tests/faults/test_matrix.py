"""The fault matrix (matrix.py): a quick part always, all of it in the slow run."""

import itertools
import sys

import pytest
from hosts import why_not
from matrix import CALLS, FAULTS, WORLD, Place, table

_times: dict = {}
_slow: list = []  # (seconds, where)


@pytest.fixture(scope="module", params=["shm", "tcp", "hosts"])
def place(request):
    if request.param == "hosts" and why_not():
        pytest.skip(why_not())
    made = Place(request.param)
    yield made
    made.close()


@pytest.fixture(scope="module", autouse=True)
def _print_table():
    yield
    if _times:
        sys.stderr.write("\nfrom the fault to the exception:\n" + table(_times) + "\nslowest:\n")
        for seconds, where in sorted(_slow, reverse=True)[:20]:
            sys.stderr.write(f"{seconds * 1e3:6.0f} ms  {where}\n")


def _check(place, fault, calls, victims):
    problems = []
    for call, victim in itertools.product(calls, victims):
        found, times = place.run_cell(fault, call, victim)
        problems += [f"{call}, victim {victim}: {text}" for text in found]
        if times:
            key = place.transport, fault
            _times[key] = [*_times.get(key, []), *times.values()]
            where = f"{place.transport}, {fault}, {call}, victim {victim}"
            _slow.extend((seconds, f"{where}, seen by rank {rank}") for rank, seconds in times.items())
    assert not problems, "\n".join(problems)


STRIKES = [fault for fault in FAULTS if fault != "lost host"]
QUICK_CALLS = ("all_reduce 32 B", "all_reduce 4 MiB", "isend and recv in a ring", "store.get")
LOST_HOST_CALLS = ("all_reduce 32 B", "isend and recv in a ring", "recv from the victim", "new_group")


@pytest.mark.parametrize("fault", STRIKES)
def test_quick(place, fault):
    _check(place, fault, QUICK_CALLS if fault != "SIGSTOP" else QUICK_CALLS[::2], [1])


def test_lost_host(place):
    """Frames vanish, nobody is told: the ranks on both sides learn it from the silence."""
    if place.transport == "hosts":
        _check(place, "lost host", LOST_HOST_CALLS[:1], [1])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", STRIKES)
def test_all(place, fault):
    _check(place, fault, CALLS, range(WORLD) if fault != "delay" else [1])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_lost_host_in_every_kind_of_call(place):
    if place.transport == "hosts":
        _check(place, "lost host", LOST_HOST_CALLS[1:], [1])
