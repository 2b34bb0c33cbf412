"""Set-up, tear-down, subgroups, rank translation, backends, meshes."""

import datetime
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import time

import cdist
import numpy as np
import pytest
from cdist import ReduceOp, errors
from cdist.testing import run
from collective_cases import TRANSPORTS
from threads import count_threads

transports = pytest.mark.parametrize("transport", TRANSPORTS)


def _translation(rank, world):
    group = cdist.new_group([3, 1])
    if rank not in (1, 3):
        assert group == cdist.GroupMember.NON_GROUP_MEMBER == -100
        assert cdist.get_rank(group) == cdist.get_world_size(group) == -1
        cdist.barrier()
        return None
    assert cdist.get_process_group_ranks(group) == [1, 3]
    assert cdist.get_rank(group) == group.rank() == (0 if rank == 1 else 1)
    assert cdist.get_group_rank(group, 3) == 1
    assert cdist.get_global_rank(group, 0) == 1
    for root in ({"src": 3}, {"group_src": 1}):
        x = np.full(3, float(rank))
        cdist.broadcast(x, group=group, **root)
        assert x[0] == 3
    x = np.full(3, float(rank))
    cdist.reduce(x, dst=3, group=group)
    assert x[0] == (4 if rank == 3 else 1)
    out = [None]
    cdist.scatter_object_list(out, ["a", "b"] if rank == 3 else None, src=3, group=group)
    assert out == ["a" if rank == 1 else "b"]
    out = [None] * 2 if rank == 3 else None
    cdist.gather_object(rank, out, dst=3, group=group)
    assert out in (None, [1, 3])
    if rank == 1:
        cdist.send(np.ones(2), 3, group=group)
        cdist.send(np.ones(2), group=group, group_dst=1)
    else:
        assert cdist.recv(np.zeros(2), 1, group=group) == 1
        assert cdist.recv(np.zeros(2), group=group) == 1
    with pytest.raises(ValueError, match="Global rank 0 is not part of group"):
        cdist.broadcast(x, 0, group=group)
    with pytest.raises(ValueError, match="Global rank 2 is not part of group"):
        cdist.get_group_rank(group, 2)
    with pytest.raises(ValueError, match="Group rank 2 is not part of group"):
        cdist.get_global_rank(group, 2)
    unsorted = cdist.new_group([3, 1], sort_ranks=False)
    assert unsorted.rank() == (0 if rank == 3 else 1)
    x = np.full(2, float(rank))
    cdist.broadcast(x, group_src=0, group=unsorted)
    assert x[0] == 3
    cdist.barrier()
    return "member"


@transports
def test_ranks_in_subgroups(transport):
    """K112."""
    assert run(_translation, 4, transport=transport) == [None, "member", None, "member"]


def _members_only(rank, world):
    mine = [0, 1] if rank < 2 else [2, 3]
    group = cdist.new_group(mine)  # the others make another one at this moment
    x = np.full(3, float(rank))
    cdist.all_reduce(x, group=group)
    assert x[0] == sum(mine)
    if rank == 0:
        cdist.new_group([0])
    if rank < 2:
        again = [cdist.new_group([0, 1]) for _ in range(2)]  # the same set: separate traffic
        works = []
        xs = [np.full(5, float(rank + 10 * i)) for i in range(2)]
        order = again if rank == 0 else again[::-1]  # in different order on different ranks
        for g in order:
            works.append(cdist.all_reduce(xs[again.index(g)], group=g, async_op=True))
        for work in works:
            work.wait()
        assert [v[0] for v in xs] == [1.0, 21.0]
    avg = np.full(2, -1 - rank, "i4")
    cdist.all_reduce(avg, ReduceOp.AVG, group=group)
    assert avg[0] == (-1 if rank < 2 else -3)
    cdist.barrier()
    return "ok"


@transports
def test_creation_is_among_the_members(transport):
    """K115, K116, K118."""
    assert run(_members_only, 4, transport=transport) == ["ok"] * 4


def _disagree(rank, world):
    store = cdist.group.WORLD.get_group_store()
    text = None
    if rank < 2:
        with pytest.raises(errors.DistTimeoutError) as caught:
            cdist.new_group([0, 1] if rank == 0 else [0, 1, 2], timeout=1)
        text = str(caught.value)
        store.set(f"{rank} is told", "")
    store.wait(["0 is told", "1 is told"])  # nobody leaves before the others have timed out
    return text


def test_disagreement_on_members_names_the_lists():
    """K115."""
    for text in run(_disagree, 3)[:2]:
        assert "[0, 1]" in text
        assert "[0, 1, 2]" in text


def _two_threads(rank, world):
    groups = [cdist.new_group() for _ in range(2)]
    wrong = []

    def body(group, number):
        for i in range(300):
            x = np.full(3, float(i + number))
            cdist.all_reduce(x, group=group)
            if x[0] != world * (i + number):
                wrong.append((number, i, x[0]))

    threads = [threading.Thread(target=body, args=(g, n)) for n, g in enumerate(groups)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return wrong


@transports
def test_groups_in_two_threads(transport):
    """K118."""
    assert run(_two_threads, 2, transport=transport) == [[], []]


def _many(rank, world):
    x = np.ones(1)
    for _ in range(50):
        group = cdist.new_group()
        cdist.all_reduce(x, group=group)
        cdist.destroy_process_group(group)
        with pytest.raises(ValueError, match="Invalid process group specified"):
            cdist.destroy_process_group(group)
    with pytest.raises((ValueError, RuntimeError)):
        cdist.all_reduce(x, group=group)
    return len(os.listdir("/proc/self/fd"))


@transports
def test_groups_come_and_go(transport):
    counts = run(_many, 2, transport=transport)
    assert max(counts) < 60


def _subgroups(rank, world):
    mine, made = cdist.new_subgroups(2)
    assert len(made) == 2
    assert mine.size() == 2
    mine, made = cdist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    x = np.full(1, float(rank))
    cdist.all_reduce(x, group=mine)
    assert x[0] == (2 if rank in (0, 2) else 4)
    part = cdist.split_group(split_ranks=[[0, 3], [1]])
    assert (part is None) == (rank == 2)
    if part:
        assert part.size() == (1 if rank == 1 else 2)
    for call, text in [
        (lambda: cdist.new_subgroups(0), "must be positive"),
        (lambda: cdist.new_subgroups(5), "must not exceed the world size"),
        (lambda: cdist.new_subgroups(3), "must be divisible by"),
        (lambda: cdist.new_subgroups_by_enumeration([]), "cannot be empty"),
        (lambda: cdist.new_subgroups_by_enumeration([[0], [0]]), "Rank 0 has appeared in both subgroup"),
        (lambda: cdist.new_group([0, 0]), "new_group: duplicate ranks are not allowed, name each rank once"),
        (lambda: cdist.new_group([]), "new_group: a group needs at least one rank; ranks=None is all"),
        (lambda: cdist.new_group([0, 9]), r"Rank 9 is out of range. Valid ranks are 0 to 3 \(world_size=4\)"),
        (lambda: cdist.new_group(range(9)), "the new group's world size should be less or equal"),
        (
            lambda: cdist.split_group(split_ranks=[[0], [0]]),
            "split_group: .* duplicate ranks; a rank is in one",
        ),
        (
            lambda: cdist.group.WORLD.allreduce([1, 2]),
            "ProcessGroup.allreduce: expected one tensor, .* list of 2: call it for each",
        ),
    ]:
        with pytest.raises(ValueError, match=text):
            call()
    with pytest.raises(TypeError, match="new_group: ranks must be a sequence of integers such as .*not 'ab'"):
        cdist.new_group("ab")
    with pytest.raises(TypeError, match="datetime.timedelta"):
        cdist.new_group([0], timeout="1")
    if rank < 3:
        smaller = cdist.shrink_group([3])
        assert smaller.size() == 3
    cdist.barrier()
    return "ok"


def test_several_subgroups_at_once():
    assert run(_subgroups, 4) == ["ok"] * 4


def _mesh(rank, world):
    mesh = cdist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert (mesh.shape, mesh.size(), mesh.size(0), mesh.ndim) == ((2, 2), 4, 2, 2)
    assert mesh.get_coordinate() == (rank // 2, rank % 2)
    assert mesh.get_local_rank("tp") == rank % 2
    x = np.full(1, float(rank))
    cdist.all_reduce(x, group=mesh.get_group("dp"))
    assert x[0] == 2 * (rank % 2) + 2
    assert mesh["tp"].mesh.tolist() == [2 * (rank // 2), 2 * (rank // 2) + 1]
    assert mesh["tp"].get_group() is mesh.get_group(1)
    assert mesh._flatten("all").get_group().size() == 4
    with pytest.raises(KeyError):
        mesh["pp"]
    with pytest.raises(RuntimeError, match="unique"):
        cdist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "a"))
    with pytest.raises(RuntimeError, match="bigger than default world size"):
        cdist.init_device_mesh("cpu", (3, 2))
    with pytest.raises(RuntimeError, match="without an index"):
        cdist.init_device_mesh("cuda:0", (4,))
    return "ok"


def test_device_mesh():
    assert run(_mesh, 4) == ["ok"] * 4


def _short_forms(rank, world):
    pg = cdist.group.WORLD
    x = np.full(2, rank + 1.0)
    pg.allreduce(x).wait()
    pg.allreduce([x], cdist.AllreduceOptions(reduceOp=ReduceOp.MAX)).wait()
    assert x[0] == 3
    pg.broadcast(x, 1).wait()
    pg.barrier().wait()
    outs = [[np.zeros(2), np.zeros(2)]]
    pg.allgather(outs, [x]).wait()
    assert outs[0][1][0] == 3
    out = np.zeros(1)
    pg.reduce_scatter([out], [[x[:1], x[1:]]]).wait()
    assert out[0] == 6
    if rank == 0:
        pg.send([x], 1, 7).wait()
    else:
        pg.recv([x], 0, 7).wait()
    pg._allgather_base(np.zeros(4), x).wait()
    assert (pg.name(), pg.group_name, pg.group_desc) == ("gloo", "0", "default_pg")
    assert pg._get_backend("cpu") is pg
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(pg)
    with pytest.raises(TypeError):
        cdist.ProcessGroup()
    return "ok"


def test_methods_of_a_group():
    assert run(_short_forms, 2) == ["ok"] * 2


def _cycles(rank, world):
    from cdist.store import TCPStore

    port = int(os.environ["TEST_PORT"])
    before = None
    for i in range(8):
        time.sleep(0.01 * ((rank + i) % 3))
        store = TCPStore("127.0.0.1", port, None, False)
        cdist.init_process_group(
            "gloo", store=cdist.PrefixStore(str(i), store), rank=rank, world_size=world, timeout=20
        )
        x = np.full(3, rank + 1.0)
        cdist.all_reduce(x)
        cdist.all_reduce(x, async_op=True).wait()
        assert x[0] == 2 * 3
        cdist.destroy_process_group()
        assert not cdist.is_initialized()
        assert cdist.group.WORLD is None
        del store
        counts = len(os.listdir("/proc/self/fd")), count_threads()
        before = before or counts
        assert counts == before
    return "ok"


@transports
def test_init_and_destroy_again_and_again(transport):
    from cdist.store import TCPStore

    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    assert run(_cycles, 2, transport=transport, init=False, environ={"TEST_PORT": server.port}) == ["ok"] * 2


def _queries(rank, world):
    assert cdist.is_initialized()
    assert (cdist.get_rank(), cdist.get_world_size()) == (rank, world)
    assert cdist.get_backend() == "gloo"
    assert "cpu:gloo" in cdist.get_backend_config()
    assert cdist.get_pg_count() == 1
    assert cdist.get_node_local_rank() == rank
    assert cdist.group.WORLD is cdist.GroupMember.WORLD
    with pytest.raises(ValueError, match="trying to initialize the default process group twice!"):
        cdist.init_process_group("gloo")
    with pytest.raises(ValueError, match="Invalid process group specified"):
        cdist.get_backend(cdist.GroupMember.NON_GROUP_MEMBER)
    cdist.destroy_process_group(cdist.GroupMember.NON_GROUP_MEMBER)
    cdist.set_timeout(datetime.timedelta(seconds=7))
    assert cdist.group.WORLD._timeout == 7
    return "ok"


def test_questions():
    assert run(_queries, 2) == ["ok"] * 2


def test_wrong_ways_to_init():
    from cdist.store import HashStore

    store = HashStore()
    for kind, text, arguments in [
        (
            AssertionError,
            "Cannot specify both",
            {"init_method": "env://", "store": store, "rank": 0, "world_size": 1},
        ),
        (AssertionError, "world_size must be positive", {"store": store, "rank": 0}),
        (AssertionError, "rank must be non-negative", {"store": store, "world_size": 1}),
        (
            AssertionError,
            "Unknown backend type",
            {"backend": "pigeon", "store": store, "rank": 0, "world_size": 1},
        ),
        (RuntimeError, "doesn't have MPI built in", {"backend": "mpi"}),
        (TypeError, "datetime.timedelta", {"timeout": "soon"}),
        (ValueError, "device_id", {"device_id": -1}),
        (ValueError, "rank 3 does not fit world size 2", {"store": store, "rank": 3, "world_size": 2}),
    ]:
        with pytest.raises(kind, match=text):
            cdist.init_process_group(**arguments)
        assert not cdist.is_initialized()
    with pytest.raises(AssertionError, match="Process group cannot be None"):
        cdist.destroy_process_group()


def test_backend_names():
    assert cdist.Backend("GLOO") == "gloo" == cdist.Backend.GLOO
    with pytest.raises(ValueError, match="string-ish"):
        cdist.Backend(3)
    assert str(cdist.BackendConfig("cpu:gloo,cuda:nccl")) == "cpu:gloo,cuda:nccl"
    for bad in ("cpu:gloo,cuda", "cpu:gloo:x"):
        with pytest.raises(ValueError, match="Invalid device:backend pairing"):
            cdist.BackendConfig(bad)
    with pytest.raises(ValueError, match="Duplicate device type cpu"):
        cdist.BackendConfig("cpu:gloo,cpu:nccl")
    assert cdist.is_backend_available("gloo")
    assert not cdist.is_backend_available("mpi")
    assert cdist.get_default_backend_for_device("cuda:1") == "nccl"
    with pytest.raises(ValueError, match="not registered"):
        cdist.get_default_backend_for_device("toaster")


def test_reduce_ops_are_values():
    assert ReduceOp.SUM == 0
    assert str(ReduceOp.SUM) == "RedOpType.SUM"
    assert isinstance(ReduceOp.SUM, ReduceOp)
    premul = cdist._make_nccl_premul_sum(0.5)
    again = pickle.loads(pickle.dumps(premul))
    assert again == premul
    assert (again.op, again.factor) == (ReduceOp.PREMUL_SUM, 0.5)
    assert premul != cdist._make_nccl_premul_sum(0.25)
    assert pickle.loads(pickle.dumps(ReduceOp.MAX)) is ReduceOp.MAX
    assert ReduceOp(ReduceOp.MAX) == ReduceOp.MAX
    assert hash(ReduceOp(ReduceOp.MAX)) == hash(ReduceOp.MAX)
    with pytest.warns(FutureWarning, match="deprecated"):
        assert cdist.reduce_op.SUM == ReduceOp.SUM
    assert not cdist.supports_complex(ReduceOp.MAX)
    assert cdist.supports_complex(ReduceOp.SUM)


SCRIPT = """
import os, sys, time
import numpy as np
import cdist
from cdist.store import TCPStore
rank = int(os.environ["RANK"])
store = TCPStore("127.0.0.1", int(os.environ["TEST_PORT"]), None, False)
cdist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=20)
x = np.full(3, rank + 1.0)
cdist.all_reduce(x)
"""


def _two_scripts(body):
    from cdist.store import TCPStore

    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    script = SCRIPT + textwrap.dedent(body)
    start = time.monotonic()
    children = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env={**os.environ, "RANK": str(rank), "TEST_PORT": str(server.port)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outcomes = []
    for child in children:
        try:
            out, err = child.communicate(timeout=30)
        finally:
            child.kill()
        outcomes.append((child.returncode, out, err))
    return outcomes, time.monotonic() - start


@pytest.mark.parametrize("ending", ["", "sys.exit(0)"])
def test_quiet_exit_without_destroy(ending):
    outcomes, _ = _two_scripts(ending)
    assert outcomes == [(0, "", "")] * 2


def test_an_uncaught_exception_reaches_the_peers_at_once():
    outcomes, seconds = _two_scripts(
        """
        if rank == 0:
            raise ValueError("out of cheese")
        try:
            cdist.barrier()
        except cdist.PeerLostError as error:
            assert error.rank == 0, error.rank
            assert "out of cheese" in str(error), error
            print("seen")
        """
    )
    assert outcomes[0][0] == 1
    assert outcomes[0][2].splitlines()[-1] == "[rank0]: ValueError: out of cheese"
    assert all(line.startswith("[rank0]: ") for line in outcomes[0][2].splitlines())
    assert outcomes[1] == (0, "seen\n", "")
    assert seconds < 15


def test_finally_destroy_is_safe_when_one_rank_fails():
    outcomes, seconds = _two_scripts(
        """
        try:
            if rank == 1:
                raise ValueError("only here")
            cdist.barrier()
        finally:
            cdist.destroy_process_group()
        """
    )
    assert [code for code, _, _ in outcomes] == [1, 1]
    assert "only here" in outcomes[1][2]
    assert "PeerLostError" in outcomes[0][2]
    assert seconds < 15


def test_import_changes_nothing_in_the_process():
    script = """
        import os, signal, sys, threading, numpy
        def look():
            handlers = [signal.getsignal(n) for n in signal.valid_signals()]
            threads = len(os.listdir("/proc/self/task"))
            return os.sched_getaffinity(0), dict(os.environ), handlers, threads, sys.excepthook
        before = look()
        import cdist
        assert look() == before
        heavy = {"multiprocessing", "torch", "asyncio", "cdist.objects", "cdist.parallel.ddp"}
        heavy &= set(sys.modules)
        assert not heavy, heavy
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60)
