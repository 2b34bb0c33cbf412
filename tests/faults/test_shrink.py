"""Going on with the ranks that are left."""

import os
import signal
import socket
import threading
import time
import warnings

import cdist
import numpy as np
import pytest
from cdist.testing import run
from hosts import hosts, needs_hosts, world
from tally import Tally


def _sum(rank):
    x = np.full(10, rank + 1.0)
    cdist.all_reduce(x)
    return float(x[0])


def _work_until_a_rank_is_lost():
    try:
        while True:
            cdist.barrier()
    except cdist.PeerLostError:
        return


def _kill_when_all_are_through(rank, victim, through, total=None):
    """The victim is killed when all are through with what comes before."""
    through.note(rank)
    if cdist.get_rank() == victim:
        through.wait_for(total or cdist.get_world_size())
        os.kill(os.getpid(), signal.SIGKILL)


def _die_and_shrink(rank, world, victims, through):
    trail = [_sum(rank)]
    total = 0
    for victim in victims:
        total += cdist.get_world_size()
        _kill_when_all_are_through(rank, victim, through, total)
        _work_until_a_rank_is_lost()
        made = cdist.shrink()
        assert made is cdist.group.WORLD
        trail.append((cdist.get_rank(), cdist.get_world_size(), _sum(rank)))
    return trail


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("victim", [0, 1, 3])
def test_one_rank_dies(victim, transport):
    outcomes = run(_die_and_shrink, 4, [victim], Tally(), allow_failures=True, transport=transport)
    assert outcomes[victim] == -signal.SIGKILL
    left = [rank for rank in range(4) if rank != victim]
    total = float(sum(rank + 1 for rank in left))
    for new, old in enumerate(left):
        assert outcomes[old] == [10.0, (new, 3, total)]


def _wait_in_another_group(rank, world, through):
    pair = cdist.new_group([0, 1]) if rank < 2 else None
    cdist.barrier()
    _kill_when_all_are_through(rank, 2, through)
    with pytest.raises(cdist.PeerLostError) as caught:
        cdist.barrier(group=pair if rank == 1 else None)
    assert caught.value.rank == 2
    cdist.shrink()
    return cdist.get_rank(), cdist.get_world_size(), _sum(rank)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_survivor_waits_in_a_group_without_the_lost_rank(transport):
    """It is told by those that shrink, and does not come too late for their meeting."""
    outcomes = run(_wait_in_another_group, 3, Tally(), allow_failures=True, transport=transport)
    assert outcomes == [(0, 2, 3.0), (1, 2, 3.0), -signal.SIGKILL]


def _reports(caught):
    return [str(warning.message) for warning in caught]


def _come_late(rank, world, through):
    """Rank 1 computes while rank 2 dies and rank 0 shrinks."""
    _sum(rank)
    _kill_when_all_are_through(rank, 2, through)
    if rank == 1:
        time.sleep(1.5)
    _work_until_a_rank_is_lost()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cdist.shrink(grace=0.2)
    return cdist.get_rank(), cdist.get_world_size(), _sum(rank), _reports(caught)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_survivor_that_comes_late_is_waited_for(transport):
    """The grace is for processes that are stopped; who is busy is not left out when it is over."""
    outcomes = run(_come_late, 3, Tally(), allow_failures=True, transport=transport)
    assert outcomes == [(0, 2, 3.0, []), (1, 2, 3.0, []), -signal.SIGKILL]


def _wait_for_file(path):
    while not os.path.exists(path):
        time.sleep(0.01)


def _come_too_late(rank, world, flag, through):
    _sum(rank)
    _kill_when_all_are_through(rank, 2, through)
    if rank == 1:
        _wait_for_file(flag)
    _work_until_a_rank_is_lost()
    if rank == 1:
        with pytest.raises(cdist.AbortedError, match=r"ranks \[0\] have gone on without rank 1"):
            cdist.shrink()
        return None
    with pytest.warns(UserWarning, match=r"go on without rank 1: it lives, but did not call shrink in time"):
        cdist.shrink(timeout=0.5)
    open(flag, "w").close()
    return cdist.get_rank(), cdist.get_world_size(), _sum(rank)


def test_a_survivor_that_comes_when_the_time_is_over_is_told(tmp_path):
    outcomes = run(_come_too_late, 3, str(tmp_path / "flag"), Tally(), allow_failures=True)
    assert outcomes == [(0, 1, 1.0), None, -signal.SIGKILL]


@needs_hosts
@pytest.mark.parametrize("victim", [1, 2, 3])
def test_one_rank_of_two_hosts_dies(victim):
    """Rank 2 is the one that passes news on beside rank 0."""
    with hosts(2) as places:
        outcomes = world(
            places, _die_and_shrink, [victim], Tally(), per_host=2, allow_failures=True, check_leftovers=False
        )
    left = [rank for rank in range(4) if rank != victim]
    total = float(sum(rank + 1 for rank in left))
    assert [outcomes[rank] for rank in left] == [[10.0, (new, 3, total)] for new in range(3)]


def _barriers():
    while True:
        cdist.barrier()


def _lose_a_host(rank, size, flag, through):
    _sum(rank)
    through.note(rank)
    if rank == 0:
        through.wait_for(size)
        open(flag, "w").close()
    with pytest.raises(cdist.PeerLostError) as caught:
        _barriers()
    lost = [2, 3] if rank < 2 else [0, 1]
    assert f"ranks {lost} run there" in str(caught.value)
    assert caught.value.rank in lost
    if rank > 1:  # the store is on the other host
        return None
    cdist.shrink()
    return cdist.get_rank(), cdist.get_world_size(), _sum(rank)


@needs_hosts
def test_the_ranks_of_one_host_go_on_without_the_other(tmp_path):
    flag = tmp_path / "cut"

    def cut():
        while not flag.exists():
            time.sleep(0.01)
        places[1].cut()

    with hosts(2) as places:
        threading.Thread(target=cut, daemon=True).start()
        outcomes = world(
            places, _lose_a_host, str(flag), Tally(), per_host=2, group_timeout=60, check_leftovers=False
        )
    assert outcomes == [(0, 2, 3.0), (1, 2, 3.0), None, None]


def test_down_to_one():
    outcomes = run(_die_and_shrink, 4, [0, 1, 1], Tally(), allow_failures=True)
    # Victims by new ranks: 0 is old 0; of [1, 2, 3] new 1 is old 2; of [1, 3] new 1 is old 3.
    assert [outcomes[r] for r in (0, 2, 3)] == [-9, -9, -9]
    assert outcomes[1] == [10.0, (0, 3, 9.0), (0, 2, 6.0), (0, 1, 2.0)]


def _frozen(rank, world, through):
    _sum(rank)
    through.note(rank)
    if rank == 1:
        through.wait_for(world)
        os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(cdist.DistError):
            _sum(rank)
        with pytest.raises(cdist.AbortedError, match="without rank 1"):
            cdist.shrink()
        return "left behind"
    with pytest.raises(cdist.DistTimeoutError, match=r"missing ranks: \[1\]"):
        cdist.all_reduce(np.ones(3), timeout=0.5)
    pid = cdist._core._records(cdist.group.WORLD, 1, 1)["pid"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cdist.shrink(grace=0.5)
    told = ["shrink: ranks [0, 2] go on without rank 1: its process is stopped"] if rank == 0 else []
    assert _reports(caught) == told
    total = _sum(rank)
    cdist.barrier()
    if rank == 0:
        os.kill(pid, signal.SIGCONT)
    return cdist.get_rank(), total


def test_a_frozen_rank_is_left_out():
    assert run(_frozen, 3, Tally()) == [(0, 4.0), "left behind", (1, 4.0)]


def _frozen_elsewhere(rank, world, through):
    """Rank 3 is stopped on a host where rank 2 alone sees it; rank 0 of the other host decides."""
    _sum(rank)
    store = cdist.group.WORLD.get_group_store()
    through.note(rank)
    if rank == 3:
        store.set("pid", str(os.getpid()))
        through.wait_for(world)
        os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(cdist.DistError):
            _sum(rank)
        with pytest.raises(cdist.AbortedError, match="without rank 3"):
            cdist.shrink()
        store.set("told", "")
        return "left behind"
    with pytest.raises(cdist.DistTimeoutError):
        cdist.all_reduce(np.ones(3), timeout=0.5)
    pid = int(store.get("pid"))
    cdist.shrink(grace=0.5)
    total = _sum(rank)
    if rank == 2:
        os.kill(pid, signal.SIGCONT)
    store.wait(["told"])
    return cdist.get_rank(), total


@needs_hosts
def test_a_rank_that_is_frozen_on_another_host_is_left_out():
    with hosts(2) as places:
        outcomes = world(places, _frozen_elsewhere, Tally(), per_host=2, check_leftovers=False)
    assert outcomes == [(0, 6.0), (1, 6.0), (2, 6.0), "left behind"]


def _store_in_rank_0(rank, world, port, through):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    cdist.init_process_group()
    _sum(rank)
    _kill_when_all_are_through(rank, 0, through)
    _work_until_a_rank_is_lost()
    start = time.monotonic()
    cdist.shrink(timeout=20)
    return cdist.get_rank(), _sum(rank), time.monotonic() - start < 10


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_the_store_dies_with_rank_0():
    outcomes = run(_store_in_rank_0, 3, _free_port(), Tally(), init=False, allow_failures=True)
    assert outcomes[1:] == [(0, 5.0, True), (1, 5.0, True)]


def _late_without_the_store(rank, world, port, flag, over, through):
    """The others have left the old group when rank 3 calls shrink: it must not go on alone."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    cdist.init_process_group()
    _kill_when_all_are_through(rank, 0, through)
    _work_until_a_rank_is_lost()
    if rank == 3:
        _wait_for_file(flag)
        with pytest.raises(cdist.AbortedError, match=r"ranks \[1, 2\] have gone on without rank 3"):
            cdist.shrink()
        open(over, "w").close()
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cdist.shrink(timeout=4)
    total = _sum(rank)
    open(flag, "w").close()
    _wait_for_file(over)
    return cdist.get_rank(), cdist.get_world_size(), total


def test_who_comes_late_where_the_store_died_is_told(tmp_path):
    arguments = (_free_port(), str(tmp_path / "flag"), str(tmp_path / "over"), Tally())
    outcomes = run(_late_without_the_store, 4, *arguments, init=False, allow_failures=True)
    assert outcomes[1:] == [(0, 2, 5.0), (1, 2, 5.0), None]


def test_shrink_needs_a_group():
    with pytest.raises(ValueError, match="init_process_group"):
        cdist.shrink()


def _subgroup(rank, world, through):
    half = cdist.new_group([0, 1])
    if rank < 2:
        cdist.barrier(group=half)  # who shrinks ends the group for a rank that is still making it
    cdist.barrier()
    through.note(rank)
    if rank == 2:
        through.wait_for(world)
        os._exit(0)
    _work_until_a_rank_is_lost()
    cdist.shrink()
    with pytest.raises(cdist.AbortedError, match="destroyed"):
        cdist.barrier(group=half)
    again = cdist.new_group([1, 0])
    x = np.ones(2)
    cdist.all_reduce(x, group=again)
    return float(x[0])


def test_groups_of_the_old_world_are_gone():
    assert run(_subgroup, 3, Tally(), allow_failures=True) == [2.0, 2.0, 0]
