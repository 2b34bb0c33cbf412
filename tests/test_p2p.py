"""Messages between two ranks: order, tags, sizes, any source, batches."""

import time

import cdist
import numpy as np
import pytest
from cdist import errors
from cdist.testing import run
from collective_cases import TRANSPORTS

pairs = pytest.mark.parametrize("transport", TRANSPORTS)


def _exchange(rank, world):
    other = 1 - rank
    for count in (0, 1, 4095, 4096, 4097, 100_000, 4_000_000):  # around eager messages, and far above
        x, y = np.full(count, rank + 1.0, "f4"), np.zeros(count, "f4")
        works = [cdist.isend(x, other), cdist.irecv(y, other)]
        for work in works:
            assert work.wait()
        assert (y == other + 1).all()
        if rank == 0:
            cdist.send(x, 1)
            assert cdist.recv(y, 1) == 1
        else:
            assert cdist.recv(y, 0) == 0
            cdist.send(x, 0)
        assert (y == other + 1).all()
    return "ok"


@pairs
def test_both_ways_and_all_sizes(transport):
    """K104."""
    assert run(_exchange, 2, transport=transport) == ["ok"] * 2


def _order(rank, world):
    other = 1 - rank
    group = cdist.new_group()
    for round_ in range(10):  # digits name sender, group, order and round: nothing may get mixed up
        sends, receives, outs = [], [], []
        for g, number in ((None, 1), (group, 2)):
            for i in range(2):
                x = np.full(7, 1000 * rank + 100 * number + 10 * i + round_)
                sends.append(cdist.isend(x, other, group=g, tag=5))
        for g in (None, group):
            for _ in range(2):
                outs.append(np.zeros(7, int))
                receives.append(cdist.irecv(outs[-1], other, group=g, tag=5))
        for work in receives[::-1] + sends:
            work.wait()
        want = [1000 * other + 100 * n + 10 * i + round_ for n in (1, 2) for i in range(2)]
        assert [out[0] for out in outs] == want
    return "ok"


@pairs
def test_first_in_first_out_per_sender_tag_and_group(transport):
    """K109."""
    assert run(_order, 2, transport=transport) == ["ok"] * 2


def _tags(rank, world):
    if rank == 0:
        for tag in (3, 1, 2):
            cdist.send(np.full(2, tag), 1, tag=tag)
        return "sent"
    out = np.zeros(2, int)
    seen = []
    for tag in (1, 2, 3):
        cdist.recv(out, 0, tag=tag)
        seen.append(int(out[0]))
    return seen


@pairs
def test_tags_choose_the_message(transport):
    assert run(_tags, 2, transport=transport)[1] == [1, 2, 3]


def _any_source(rank, world):
    if rank < 2:
        time.sleep(0.1 * rank)
        cdist.send(np.full(3, rank + 10), 2)
        return None
    seen = {}
    out = np.zeros(3, int)
    for _ in range(2):
        source = cdist.recv(out)
        seen[source] = out.tolist()
    work_out = np.zeros(1)
    with pytest.raises(errors.DistTimeoutError):
        cdist.recv(work_out, timeout=0)  # a poll finds nothing and harms nothing
    return seen


@pairs
def test_any_source(transport):
    """K110."""
    assert run(_any_source, 3, transport=transport)[2] == {0: [10] * 3, 1: [11] * 3}


def _irecv_source(rank, world):
    if rank:
        cdist.send(np.full(1, float(rank)), 0)
        return None
    out = np.zeros(1)
    work = cdist.irecv(out)
    work.wait()
    return work.source_rank(), work._source_rank(), out[0]


@pairs
def test_source_of_an_asynchronous_receive(transport):
    assert run(_irecv_source, 2, transport=transport)[0] == (1, 1, 1.0)


def _ring(rank, world):
    _rings(rank, world, None)
    _rings(rank, world, cdist.new_group())
    assert cdist.batch_isend_irecv([]) == []
    return "ok"


def _rings(rank, world, group):
    for distance in range(1, world):
        out = np.zeros(1000)
        ops = [
            cdist.P2POp(cdist.isend, np.full(1000, float(rank)), (rank + distance) % world, group),
            cdist.P2POp(cdist.irecv, out, (rank - distance) % world, group),
        ]
        for work in cdist.batch_isend_irecv(ops):
            work.wait()
        assert (out == (rank - distance) % world).all()
    if rank in (0, 3):  # one pair only
        out = np.zeros(3)
        peer = 3 - rank
        mine = np.full(3, rank + 1.0)
        ops = [cdist.P2POp(cdist.irecv, out, peer, group), cdist.P2POp(cdist.isend, mine, peer, group)]
        for work in cdist.batch_isend_irecv(ops):
            work.wait()
        assert (out == peer + 1).all()


@pairs
def test_batches(transport):
    """K103: rings of growing distance and one pair alone, as first operation of a group and later."""
    assert run(_ring, 4, transport=transport) == ["ok"] * 4


def _asymmetric(rank, world):
    if rank == 0:
        ops = [cdist.P2POp(cdist.isend, np.full(50_000, float(i)), 1) for i in range(5)]
        for work in cdist.batch_isend_irecv(ops):
            work.wait()
        return "ok"
    outs = [np.zeros(50_000) for _ in range(5)]
    for work in cdist.batch_isend_irecv([cdist.P2POp(cdist.irecv, out, 0) for out in outs[:4]]):
        work.wait()
    assert [out[0] for out in outs] == [0, 1, 2, 3, 0]
    assert np.linalg.norm(outs[1]) > 0  # something else in between
    for work in cdist.batch_isend_irecv([cdist.P2POp(cdist.irecv, outs[4], 0)]):
        work.wait()
    assert outs[4][0] == 4
    return "ok"


@pairs
def test_asymmetric_batches(transport):
    """K106: one batch of five against four and one; the four complete before the fifth is posted."""
    assert run(_asymmetric, 2, transport=transport) == ["ok"] * 2


def _reply_in_between(rank, world):
    x = np.zeros(100)
    if rank == 0:
        cdist.send(x + 1, 2)
    elif rank == 1:
        cdist.recv(x, 2)
        cdist.send(x + 10, 2)
    else:
        first, second = np.zeros(100), np.zeros(100)
        works = cdist.batch_isend_irecv(
            [cdist.P2POp(cdist.irecv, first, 0), cdist.P2POp(cdist.irecv, second, 1)]
        )
        works[0].wait()
        cdist.send(first, 1)
        works[1].wait()
        return second[0]
    return None


@pairs
def test_each_message_of_a_batch_completes_alone(transport):
    """K107."""
    assert run(_reply_in_between, 3, transport=transport)[2] == 11


def _both_send_first(rank, world):
    small = np.zeros(10)
    cdist.send(small, 1 - rank)
    cdist.recv(small, 1 - rank)
    with pytest.raises(errors.DistTimeoutError, match="isend"):
        cdist.send(np.zeros(8_000_000), 1 - rank, timeout=0.5)
    cdist.barrier()
    return "ok"


@pairs
def test_large_blocking_sends_of_both_time_out_with_a_hint(transport):
    """K104."""
    assert run(_both_send_first, 2, transport=transport) == ["ok"] * 2


def _sizes_differ(rank, world):
    if rank == 0:
        cdist.send(np.zeros(10, "f4"), 1)
        return None
    with pytest.raises(errors.MismatchError):
        cdist.recv(np.zeros(5, "f4"), 0)
    return "ok"


@pairs
def test_sizes_must_agree(transport):
    assert run(_sizes_differ, 2, transport=transport)[1] == "ok"


def _units_differ(rank, world):
    seconds = np.array([90, 91], "m8[s]")
    if rank == 0:
        cdist.send(seconds, 1)
        cdist.send(seconds.view(">i8"), 1)
        return None
    got = np.zeros(2, "m8[s]")
    cdist.recv(got, 0)
    assert (got == seconds).all()
    with pytest.raises(errors.MismatchError, match="receives 16 bytes of another unit, byte order or record"):
        cdist.recv(got, 0)
    return "ok"


@pairs
def test_what_bytes_mean_must_agree(transport):
    assert run(_units_differ, 2, transport=transport)[1] == "ok"


def test_what_bytes_mean_must_agree_in_one_call():
    def body(rank, world):
        with pytest.raises(ValueError, match="`output_tensor` have another unit, byte order or fields"):
            cdist.all_gather_into_tensor(np.zeros(2, "m8[ms]"), np.ones(1, "m8[s]"))
        cdist.barrier()
        return "ok"

    assert run(body, 2) == ["ok"] * 2


def _layouts(rank, world):
    x = np.arange(24.0).reshape(4, 6)
    if rank == 0:
        cdist.send(x.T[::2], 1)
        return None
    y = np.zeros((8, 6))
    cdist.recv(y[1:7:2, ::-1][:, 2:], 0)
    return bool((y[1:7:2, ::-1][:, 2:] == x.T[::2]).all() and y.sum() == x.T[::2].sum())


@pairs
def test_strided_arrays(transport):
    assert run(_layouts, 2, transport=transport)[1] is True


def test_p2pop_checks_its_arguments():
    x = np.zeros(1)
    with pytest.raises(
        ValueError, match="Invalid ``op``. Expected ``op`` to be of type ``torch.distributed.isend``"
    ):
        cdist.P2POp(cdist.send, x, 1)
    with pytest.raises(ValueError, match="Can't specify both"):
        cdist.P2POp(cdist.isend, x, 1, group_peer=1)
    with pytest.raises(ValueError, match="Must specify"):
        cdist.P2POp(cdist.isend, x)
    with pytest.raises(ValueError, match="P2POp"):
        cdist.batch_isend_irecv([1])
    with pytest.raises(ValueError, match="P2POp"):
        cdist.batch_isend_irecv(cdist.P2POp(cdist.isend, x, 1))


def _to_itself(rank, world):
    out = np.zeros(4)
    works = [cdist.isend(np.arange(4.0), rank), cdist.irecv(out, rank)]
    for work in works:
        work.wait()
    return out.tolist()


@pairs
def test_asynchronous_messages_to_oneself(transport):
    assert run(_to_itself, 2, transport=transport) == [[0.0, 1.0, 2.0, 3.0]] * 2
