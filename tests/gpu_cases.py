"""Bodies of the GPU tests, for any array module: real ones (torch, CuPy) and a fake one over the fake driver.

A module offers ``put(numpy array)`` → GPU array, ``get(GPU array)`` → numpy array (both in order with the
current stream), ``view(array, index)`` → a view, ``name``.
"""

import cdist
import numpy as np
import pytest
from cdist import ReduceOp

DTYPES = ["float32", "float64", "float16", "int32", "int64", "uint8", "int8"]


def values(rank, count, dtype):
    """Small whole numbers, so that sums are exact in every dtype."""
    return ((np.arange(count) * 7 + rank * 3) % 5 + 1).astype(dtype)


def equal(what, got, wanted):
    if got.dtype != wanted.dtype or not np.array_equal(got, wanted):
        raise AssertionError(
            f"{what}: got {got.ravel()[:8]} {got.dtype}, wanted {wanted.ravel()[:8]} {wanted.dtype}"
        )


def reductions(xp, rank, world):
    for dtype in DTYPES:
        for count in (1, 1000, 70_000):
            inputs = [values(r, count, dtype) for r in range(world)]
            total = np.add.reduce(inputs, dtype=dtype)
            x = xp.put(inputs[rank])
            cdist.all_reduce(x)
            equal(f"all_reduce {dtype} {count}", xp.get(x), total)
            for op, function in [
                (ReduceOp.MAX, np.maximum),
                (ReduceOp.MIN, np.minimum),
                (ReduceOp.PRODUCT, np.multiply),
            ]:
                x = xp.put(inputs[rank])
                cdist.all_reduce(x, op=op)
                equal(f"{op} {dtype}", xp.get(x), function.reduce(inputs).astype(dtype))
            for root in range(world):
                x = xp.put(inputs[rank])
                cdist.reduce(x, root)
                equal(f"reduce {dtype}", xp.get(x), total if rank == root else inputs[rank])
    x = xp.put(np.full(10, rank * 2.0, "float32"))
    cdist.all_reduce(x, op=ReduceOp.AVG)
    equal("AVG", xp.get(x), np.full(10, world - 1.0, "float32"))
    flags = np.arange(6) % world == rank
    x = xp.put(flags)
    cdist.all_reduce(x)
    equal("or", xp.get(x), np.ones(6, bool))


def moves(xp, rank, world):
    for dtype in [*DTYPES, "int16", "bool"]:
        blocks = [values(r, 12, dtype).reshape(3, 4) for r in range(world)]
        for root in range(world):
            x = xp.put(blocks[rank])
            cdist.broadcast(x, root)
            equal(f"broadcast {dtype}", xp.get(x), blocks[root])
            outs = [xp.put(np.zeros_like(blocks[0])) for _ in range(world)] if rank == root else None
            cdist.gather(xp.put(blocks[rank]), outs, dst=root)
            for r in range(world if outs else 0):
                equal(f"gather {dtype}", xp.get(outs[r]), blocks[r])
            out = xp.put(np.zeros_like(blocks[0]))
            cdist.scatter(out, [xp.put(b) for b in blocks] if rank == root else None, src=root)
            equal(f"scatter {dtype}", xp.get(out), blocks[rank])
        outs = [xp.put(np.zeros_like(blocks[0])) for _ in range(world)]
        cdist.all_gather(outs, xp.put(blocks[rank]))
        for r in range(world):
            equal(f"all_gather {dtype}", xp.get(outs[r]), blocks[r])
        out = xp.put(np.zeros((3 * world, 4), dtype))
        cdist.all_gather_into_tensor(out, xp.put(blocks[rank]))
        equal(f"all_gather_into_tensor {dtype}", xp.get(out), np.concatenate(blocks))
        out = xp.put(np.zeros((world, 2), dtype))
        cdist.all_to_all_single(
            out, xp.put(np.stack([np.full(2, rank + r) for r in range(world)]).astype(dtype))
        )
        equal(
            f"all_to_all_single {dtype}",
            xp.get(out),
            np.stack([np.full(2, r + rank) for r in range(world)]).astype(dtype),
        )


def scattered(xp, rank, world):
    inputs = [values(r, 8 * world, "float32").reshape(2 * world, 4) for r in range(world)]
    total = np.add.reduce(inputs)
    out = xp.put(np.zeros((2, 4), "float32"))
    cdist.reduce_scatter_tensor(out, xp.put(inputs[rank]))
    equal("reduce_scatter_tensor", xp.get(out), total[2 * rank : 2 * rank + 2])
    cdist.reduce_scatter(
        out, [xp.put(inputs[rank][2 * r : 2 * r + 2]) for r in range(world)], op=ReduceOp.MAX
    )
    equal("reduce_scatter", xp.get(out), np.maximum.reduce(inputs)[2 * rank : 2 * rank + 2])


def strided(xp, rank, world):
    base = values(rank, 60, "float32").reshape(5, 4, 3)
    wanted = np.add.reduce([values(r, 60, "float32").reshape(5, 4, 3) for r in range(world)])
    for index in [np.s_[:, 1:3], np.s_[::2, :, 1], np.s_[:, ::3, ::2], np.s_[1:4]]:
        whole = xp.put(base)
        cdist.all_reduce(xp.view(whole, index))
        after = base.copy()
        after[index] = wanted[index]
        equal(f"strided {index}", xp.get(whole), after)


def asynchronous(xp, rank, world):
    arrays = [xp.put(np.full(1000 * (i + 1), float(rank), "float32")) for i in range(20)]
    works = [cdist.all_reduce(x, async_op=True) for x in arrays]
    for work in works:
        work.wait()
    for x in arrays:
        got = xp.get(x)
        equal("async", got, np.full(got.size, world * (world - 1) / 2, "float32"))
    assert all(work.is_completed() for work in works)


def ring(xp, rank, world):
    x, y = xp.put(np.full(50_000, rank, "int32")), xp.put(np.zeros(50_000, "int32"))
    ops = [cdist.P2POp(cdist.isend, x, (rank + 1) % world), cdist.P2POp(cdist.irecv, y, (rank - 1) % world)]
    for work in cdist.batch_isend_irecv(ops):
        work.wait()
    equal("ring", xp.get(y), np.full(50_000, (rank - 1) % world, "int32"))


def messages(xp, rank, world):
    x, y = xp.put(np.full(50_000, rank, "int32")), xp.put(np.zeros(50_000, "int32"))
    with pytest.raises(TypeError, match="named rank"):  # that is NCCL's need, not the CPU's
        cdist.recv(y)
    if rank == 0:
        for peer in range(1, world):
            cdist.send(x, peer)
            cdist.recv(y, peer)
            equal("echo", xp.get(y), np.full(50_000, peer, "int32"))
    else:
        assert cdist.recv(y, 0) == 0
        equal("recv", xp.get(y), np.zeros(50_000, "int32"))
        cdist.isend(x, 0).wait()
        xp.get(x)
    total = np.ones(3)
    cdist.all_reduce(total)  # in host memory: messages of some ranks leave the order of all as it was
    equal("after messages", total, np.full(3, float(world)))


def coalesced(xp, rank, world):
    arrays = [xp.put(np.full(100 * (i + 1), rank + i, "float32")) for i in range(4)]
    sums = [np.full(100 * (i + 1), sum(r + i for r in range(world)), "float32") for i in range(4)]
    cdist.all_reduce_coalesced(arrays)
    for got, wanted in zip(arrays, sums, strict=True):
        equal("all_reduce_coalesced", xp.get(got), wanted)
    with cdist._coalescing_manager(async_ops=True) as manager:
        for x in arrays[:2]:
            cdist.all_reduce(x)
        for x in arrays[2:]:
            manager.append(cdist.all_reduce(x, async_op=True))
    manager.wait()
    for got, before in zip(arrays, sums, strict=True):
        equal("_coalescing_manager", xp.get(got), before * world)
    outs = [[xp.put(np.zeros(3, "int32")), xp.put(np.zeros(5, "int32"))] for _ in range(world)]
    inputs = [xp.put(np.full(3, rank, "int32")), xp.put(np.full(5, -rank, "int32"))]
    cdist.all_gather_coalesced(outs, inputs)
    for r in range(world):
        equal("all_gather_coalesced", xp.get(outs[r][0]), np.full(3, r, "int32"))
        equal("all_gather_coalesced", xp.get(outs[r][1]), np.full(5, -r, "int32"))

    def interrupted():
        with cdist._coalescing_manager(device="cuda"):
            cdist.all_reduce(arrays[0])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interrupted()
    cdist.all_reduce(arrays[1])  # the group's launch was closed
    equal("after an error", xp.get(arrays[1]), sums[1] * world * world)


def subgroups(xp, rank, world):
    x = xp.put(np.full(3, rank + 1.0))
    cdist.broadcast(x, 0)
    xp.get(x)  # connected and idle: the groups are made from the world's communicator
    alone = [cdist.new_group([r]) for r in range(world)]
    everybody = cdist.new_group(list(range(world)))
    backwards = cdist.new_group(list(range(world))[::-1], sort_ranks=False)
    x = xp.put(np.full(3, rank + 1.0))
    cdist.all_reduce(x, group=alone[rank])
    equal("alone", xp.get(x), np.full(3, rank + 1.0))
    cdist.all_reduce(x, group=everybody)
    equal("everybody", xp.get(x), np.full(3, world * (world + 1) / 2))
    outs = [xp.put(np.zeros(2, "int32")) for _ in range(world)]
    cdist.all_gather(outs, xp.put(np.full(2, rank, "int32")), group=backwards)
    for i, out in enumerate(outs):
        equal("backwards", xp.get(out), np.full(2, world - 1 - i, "int32"))
    for size in range(2, world):
        some = cdist.new_group(range(size))
        if rank < size:
            cdist.all_reduce(x, group=some)
            equal("some", xp.get(x), np.full(3, world * (world + 1) / 2 * size))
    cdist.barrier()


def refusals(xp, rank, world):
    x = xp.put(np.ones(4, "int16"))
    for op in (ReduceOp.SUM, ReduceOp.BAND):
        with pytest.raises(TypeError, match="NCCL"):
            cdist.all_reduce(x, op=op)
    y = xp.put(np.ones(4, "float32"))
    cdist.all_reduce(y)
    equal("after refusals", xp.get(y), np.full(4, world, "float32"))


ALL = [reductions, moves, scattered, strided, asynchronous, ring, messages, coalesced, subgroups, refusals]
