"""The fault matrix (matrix.py): a quick part always, all of it in the slow run."""

import itertools
import sys

import pytest
from matrix import CALLS, FAULTS, WORLD, run_cell, table

TRANSPORTS = ("shm", "tcp")
_times: dict = {}


def _check(transport, fault, calls, victims):
    problems = []
    for call, victim in itertools.product(calls, victims):
        cell = {"transport": transport, "fault": fault, "call": call, "victim": victim}
        found, times = run_cell(cell)
        problems += [f"{call}, victim {victim}: {text}" for text in found]
        if times and fault != "SIGSTOP":
            _times[transport, fault] = [*_times.get((transport, fault), []), *times.values()]
    assert not problems, "\n".join(problems)


@pytest.fixture(scope="module", autouse=True)
def _print_table():
    yield
    if _times:
        sys.stderr.write("\nfrom the fault to the exception:\n" + table(_times) + "\n")


QUICK_CALLS = ("all_reduce 32 B", "all_reduce 4 MiB", "isend and recv in a ring")


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("fault", FAULTS)
def test_quick(transport, fault):
    _check(transport, fault, QUICK_CALLS if fault != "SIGSTOP" else QUICK_CALLS[:1], [1])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("fault", FAULTS)
def test_all(transport, fault):
    _check(transport, fault, CALLS, [0, WORLD - 1] if fault != "SIGSTOP" else [0])
