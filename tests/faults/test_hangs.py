"""Cases of "hangs instead of errors": each either works, or raises on every rank and says who and why."""

import contextlib
import gc
import os
import random
import signal
import socket
import threading
import time
from datetime import timedelta

import cdist
import numpy as np
import pytest
from cdist.testing import run
from hosts import hosts, needs_hosts, world
from tally import Tally
from threads import ctrl_c_soon

transports = pytest.mark.parametrize("transport", ["shm", "tcp"])


@pytest.fixture
def server():
    return cdist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def _store(port):
    return cdist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)


def _other_sizes(rank, world, counts):
    x = np.full(counts[rank], 1.0)
    with pytest.raises(cdist.MismatchError) as caught:
        cdist.all_reduce(x)
    assert (x == 1).all()
    for count in counts:
        assert str(count) in str(caught.value)
    with pytest.raises(cdist.MismatchError):
        cdist.barrier()
    return "both know"


@transports
@pytest.mark.parametrize("counts", [(100, 200), (409600, 409598), (1, 2)])
def test_other_sizes_raise_on_both_before_data_is_touched(transport, counts):
    """K01."""
    assert run(_other_sizes, 2, counts, transport=transport) == ["both know"] * 2


def _other_dtypes(rank, world):
    with pytest.raises(cdist.MismatchError) as caught:
        cdist.all_reduce(np.ones(8, "f8" if rank == 2 else "f4"))
    return str(caught.value)


@transports
def test_a_mismatch_shows_both_sides(transport):
    """K04."""
    for text in run(_other_dtypes, 3, transport=transport):
        assert "float64" in text
        assert "float32" in text
        assert "rank 2" in text


def _reduce_to_0(rank, world, count):
    x = np.full(count, rank + 1.0)
    cdist.reduce(x, 0)
    return set(x.tolist())


@transports
@pytest.mark.parametrize("count", [2, 125_000, 8_000_000])
def test_reduce_leaves_the_others_inputs(transport, count):
    """K05."""
    assert run(_reduce_to_0, 3, count, transport=transport) == [{6.0}, {2.0}, {3.0}]


def _late_for_a_barrier(rank, world):
    cdist.barrier()
    cdist.set_timeout(1)
    if rank == 1:
        time.sleep(2)
    cdist.barrier(timeout=20)
    if rank == 1:
        time.sleep(2)
    with pytest.raises(cdist.DistTimeoutError, match="rank 1" if rank == 0 else None):
        cdist.barrier()
    return "as asked"


@transports
def test_a_calls_timeout_goes_before_the_groups(transport):
    """K10."""
    assert run(_late_for_a_barrier, 2, transport=transport) == ["as asked"] * 2


def _two_never_call(rank, world):
    store = cdist.group.WORLD.get_group_store()
    cdist.barrier()
    if rank in (1, 3):
        store.wait(["0 is told", "2 is told"])
        return None
    with pytest.raises(cdist.DistTimeoutError) as caught:
        cdist.monitored_barrier(timeout=1, wait_all_ranks=True)
    store.set(f"{rank} is told", "")
    return str(caught.value)


@transports
def test_a_monitored_barrier_names_all_who_are_missing(transport):
    """K13."""
    texts = run(_two_never_call, 4, transport=transport)
    assert "Ranks 1, 3 failed to pass" in texts[0]
    assert texts[2].endswith("missing ranks 1, 3")


def _all_come_then_one_is_late(rank, world, told):
    for _ in range(100):
        cdist.monitored_barrier(wait_all_ranks=True)
    if rank == 2:
        time.sleep(1.5)
    with pytest.raises(cdist.DistTimeoutError):
        cdist.monitored_barrier(timeout=0.5, wait_all_ranks=True)
    told.note(rank)
    told.wait_for(world)  # who leaves first would be a lost peer to the late one
    return "all failed"


@transports
def test_a_monitored_barrier_is_all_or_nothing(transport):
    """K19."""
    assert run(_all_come_then_one_is_late, 4, Tally(), transport=transport) == ["all failed"] * 4


def _init(rank, world, port, timeout):
    cdist.init_process_group(store=_store(port), rank=rank, world_size=world, timeout=timeout)


def _alone(rank, world, port):
    with pytest.raises(cdist.DistTimeoutError) as caught:
        _init(0, 2, port, 1)
    return str(caught.value), caught.value.rank


def test_init_names_who_did_not_come_and_where_it_waited(server):
    """K14."""
    text, rank = run(_alone, 1, server.port, init=False)[0]
    assert "missing ranks [1]" in text
    assert "waited for them on 127.0.0.1 port" in text
    assert rank == 1


def _late_first_call(rank, world):
    cdist.group.WORLD.get_group_store().set_timeout(timedelta(seconds=0.5))
    if rank == 0:
        time.sleep(0.7)
    cdist.barrier()
    if rank == 0:
        time.sleep(4)
    with pytest.raises(cdist.DistTimeoutError) as caught:
        cdist.barrier()
    return caught.value.rank


@transports
def test_the_groups_deadline_holds_and_names_the_late_rank(transport):
    """K16."""
    assert run(_late_first_call, 2, transport=transport, group_timeout=2)[1] == 0


def _connections(port):
    """Return how many TCP connections are open, but for the store's: those of waits that take long come and
    go, and its server's ends are inherited by whoever was forked after them.
    """
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as one:
                    if one.family == socket.AF_INET:
                        found += port not in (one.getsockname()[1], one.getpeername()[1])
    return found


def _send_then_barrier(rank, world, port):
    cdist.init_process_group(store=_store(port), rank=rank, world_size=world, timeout=20)
    if rank == 0:
        cdist.send(np.arange(5.0), 1)
    elif rank == 1:
        x = np.zeros(5)
        cdist.recv(x, 0)
        assert x[4] == 4
    cdist.barrier()
    cdist.all_reduce(np.ones(3), group=cdist.new_group())
    found = _connections(port)
    cdist.barrier()
    return found


def test_no_debug_level_breaks_a_program(server):
    """K20: nor do its checks open further connections."""
    found = [
        run(_send_then_barrier, 3, server.port, transport="tcp", init=False, environ={"CDIST_DEBUG": level})
        for level in ("OFF", "INFO", "DETAIL")
    ]
    assert min(found[0]) >= 2
    assert found[0] == found[1] == found[2]


def _soak(rank, world, rounds, most):
    draw, nap = random.Random(1), random.Random(rank)
    for i in range(rounds):
        x = np.full(draw.randrange(most // 4, most), float(rank + i))
        if nap.random() < 0.02:
            time.sleep(nap.random() / 100)
        cdist.all_reduce(x)
        if x[0] != x[-1] or x[0] != world * i + world * (world - 1) / 2:
            return f"round {i}: {x[0]}, {x[-1]}"
    return rounds


def _small_buffers(places):
    for place in places:
        place.run(["sysctl", "-q", "-w", "net.ipv4.tcp_wmem=4096 4096 4096"])


@needs_hosts
@pytest.mark.parametrize("per_host", [1, 2])
def test_all_reduce_through_small_socket_buffers(per_host):
    """K25."""
    with hosts(3 if per_host == 1 else 2) as places:
        _small_buffers(places)
        assert set(world(places, _soak, 50, 1 << 16, per_host=per_host, check_leftovers=False)) == {50}


@needs_hosts
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_five_thousand_all_reduces_through_small_socket_buffers():
    """K25."""
    with hosts(3) as places:
        _small_buffers(places)
        assert set(world(places, _soak, 5000, 1 << 19, timeout=880, check_leftovers=False)) == {5000}


def _temporary(rank, world):
    work = cdist.all_reduce(np.full(1 << 20, rank + 1.0), async_op=True)
    gc.collect()
    garbage = [np.full(1 << 20, 7.0) for _ in range(4)]
    work.wait()
    result = work.result()[0]
    return set(result.tolist()), len(garbage)


@transports
def test_an_array_lives_as_long_as_its_work(transport):
    """K26."""
    assert run(_temporary, 3, transport=transport) == [({6.0}, 4)] * 3


# ------------------------------------------------------------------------ init, store, chains


def _dies_while_it_waits(rank, world, port, victim):
    if rank == 2:  # never comes, so that the others are still connecting
        return "absent"
    if rank == victim:
        threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGKILL]).start()
    with pytest.raises(cdist.PeerLostError, match=f"rank {victim} was lost") as caught:
        _init(rank, world, port, 30)
    return caught.value.rank


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_during_init_is_named_at_once(server, victim):
    outcomes = run(_dies_while_it_waits, 3, server.port, victim, init=False, allow_failures=True, timeout=20)
    assert outcomes[1 - victim] == victim


def _is_interrupted_and_ends(rank, world, port):
    if rank == 2:
        return "absent"
    if rank == 1:
        with pytest.raises(KeyboardInterrupt), ctrl_c_soon():
            _init(rank, world, port, 30)
        return None
    with pytest.raises(cdist.PeerLostError, match="rank 1 was lost before all ranks had come") as caught:
        _init(rank, world, port, 30)
    return caught.value.rank


def test_a_rank_that_is_interrupted_during_init_and_ends_is_named(server):
    """Until then it could have come again."""
    assert run(_is_interrupted_and_ends, 3, server.port, init=False, timeout=20)[0] == 1


def _gives_up_and_comes_again(rank, world, port):
    if rank == 1:
        with pytest.raises(cdist.DistTimeoutError):
            _init(rank, world, port, 0.5)
    elif rank == 2:
        time.sleep(1.5)
    _init(rank, world, port, 20)
    cdist.barrier()
    return "met"


def test_who_gave_up_may_come_again(server):
    """K92, seen from the rank that waits on."""
    assert run(_gives_up_and_comes_again, 3, server.port, init=False) == ["met"] * 3


def _store_dies_with_rank_0(rank, world, folder):
    port = folder / "port"
    if rank == 0:
        store = cdist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        (folder / "new").write_text(str(store.port))
        (folder / "new").rename(port)
    else:
        while not port.exists():
            time.sleep(0.01)
        store = cdist.TCPStore("127.0.0.1", int(port.read_text()), None, False, wait_for_workers=False)
    cdist.init_process_group(store=store, rank=rank, world_size=world, timeout=30)
    cdist.barrier()
    if rank == 0:
        threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGKILL]).start()
    with pytest.raises(cdist.PeerLostError) as caught:
        store.get("what nobody writes")
    with pytest.raises(cdist.DistError):
        store.get("anything")
    return caught.value.rank


def test_a_store_that_dies_with_its_rank_names_it(tmp_path):
    outcomes = run(_store_dies_with_rank_0, 3, tmp_path, init=False, allow_failures=True)
    assert outcomes[1:] == [0, 0]


def _wait_in_the_store(rank, world, how, through):
    store = cdist.group.WORLD.get_group_store()
    cdist.barrier()
    through.note(rank)
    if rank == 1:
        through.wait_for(world)
        time.sleep(0.1)  # most of the time the others wait by then
        os.kill(os.getpid(), signal.SIGKILL)
    key = "what rank 1 was to write"
    wait = {"get": lambda: store.get(key), "wait": lambda: store.wait([key], timedelta(seconds=25))}
    with pytest.raises(cdist.PeerLostError) as caught:
        wait[how]()
    store.set(f"rank {rank}", b"goes on")  # quick calls work on
    return caught.value.rank, store.get(f"rank {rank}")


@pytest.mark.parametrize("how", ["get", "wait"])
def test_a_wait_in_the_store_ends_with_the_loss_of_a_rank(how):
    outcomes = run(_wait_in_the_store, 3, how, Tally(), allow_failures=True)
    assert outcomes[::2] == [(1, b"goes on")] * 2


def _wait_for_who_left(rank, world):
    store = cdist.group.WORLD.get_group_store()
    cdist.barrier()
    if rank == 1:
        return None
    time.sleep(0.3)
    with pytest.raises(cdist.DistStoreError, match=r"ranks \[(0, )?1(, 2)?\] have left the process group"):
        store.wait(["what rank 1 was to write"], timedelta(seconds=0.5))
    return "named"


def test_a_key_that_does_not_come_names_who_has_left():
    assert run(_wait_for_who_left, 3) == ["named", None, "named"]


def _chain(rank, world, told):
    cdist.barrier()
    if rank == world - 1:
        told.wait_for(world - 1)
        return None
    wait = (
        cdist.irecv(np.zeros(3), 1).wait
        if rank == 0
        else lambda timeout: cdist.recv(np.zeros(3), rank + 1, timeout=timeout)
    )
    with pytest.raises(cdist.DistTimeoutError) as caught:
        wait(timeout=1)
    told.note(rank)
    told.wait_for(world - 1)  # who has left is waited for by nobody
    return caught.value.rank, str(caught.value)


@transports
def test_a_chain_of_waits_blames_its_end(transport):
    outcomes = run(_chain, 4, Tally(), transport=transport)
    assert [outcome[0] for outcome in outcomes[:3]] == [3, 3, 3]
    assert "rank 1 itself waits for rank 2, rank 2 itself waits for rank 3" in outcomes[0][1]


def _cycle(rank, world, told):
    cdist.barrier()
    with pytest.raises(cdist.DistTimeoutError) as caught:
        cdist.recv(np.zeros(3), (rank + 1) % world, timeout=1)
    told.note(rank)
    told.wait_for(world)
    return str(caught.value)


@transports
def test_a_cycle_of_waits_is_told(transport):
    for text in run(_cycle, 3, Tally(), transport=transport):
        assert ": a cycle" in text


def _default_limit_of_a_message(rank, world, told):
    cdist.barrier()
    cdist.set_timeout(1)
    if rank == 1:
        told.wait_for(1)
        return None
    with pytest.raises(cdist.DistTimeoutError) as caught:
        cdist.irecv(np.zeros(3), 1).wait()
    told.note(rank)
    return caught.value.rank


@transports
def test_a_wait_without_limit_for_a_message_has_the_groups(transport):
    assert run(_default_limit_of_a_message, 2, Tally(), transport=transport) == [1, None]
