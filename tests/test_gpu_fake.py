"""The GPU path from Python to NCCL's entry points, on a driver and a NCCL that need no GPU."""

import contextlib
import ctypes
import os
import signal
import socket
import threading
import time
import weakref
from datetime import timedelta

import cdist
import fake_gpu
import gpu_cases
import numpy as np
import pytest
from cdist import _core
from cdist.testing import run
from tally import Tally


@pytest.fixture(scope="module")
def fakes(tmp_path_factory):
    return fake_gpu.build(tmp_path_factory.mktemp("fakes"))


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("case", gpu_cases.ALL, ids=lambda case: case.__name__)
def test_case(fakes, case, world):
    run(
        lambda rank, size: case(fake_gpu.Module(rank), rank, size),
        world,
        environ=fakes,
        check_leftovers=False,
    )


@pytest.mark.parametrize("case", gpu_cases.ALL, ids=lambda case: case.__name__)
def test_case_with_attributes_alone(fakes, case):
    def body(rank, size):
        xp = fake_gpu.Cupy(rank)
        case(xp, rank, size)
        return xp.asked

    assert all(asked > 0 for asked in run(body, 2, environ=fakes, check_leftovers=False))


@pytest.mark.parametrize("case", gpu_cases.ALL, ids=lambda case: case.__name__)
def test_case_with_getters_in_c(fakes, case):
    def body(rank, size):
        xp = fake_gpu.CompiledCupy(rank)
        case(xp, rank, size)
        return xp.asked, xp.asked_objects

    for asked, asked_objects in run(body, 2, environ=fakes, check_leftovers=False):
        assert asked > 0
        assert asked_objects == 0


def test_attributes_that_do_not_fit_raise(fakes):
    def body(rank, size):
        xp = fake_gpu.Cupy(rank)
        good, short, deep = (xp.put(np.ones(3)) for _ in range(3))
        cdist.all_reduce(good)
        short.strides = ()
        deep.shape = (1,) * 65
        return [outcome(lambda x=x: cdist.all_reduce(x)) for x in (short, deep)]

    for (kind, text), (deep_kind, deep_text) in run(body, 2, environ=fakes, check_leftovers=False):
        assert kind is TypeError
        assert "0 strides for 1 dimensions" in text
        assert deep_kind is ValueError
        assert "65 dimensions" in deep_text


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def outcome(function):
    try:
        function()
    except Exception as error:
        return type(error), str(error)
    return None, ""


def test_two_ranks_on_one_gpu_both_raise(fakes):
    def body(rank, world):
        x = fake_gpu.Module(0).put(np.ones(3))
        return outcome(lambda: cdist.all_reduce(x))

    for kind, text in run(body, 2, environ=fakes, check_leftovers=False):
        assert issubclass(kind, ValueError)
        assert "ranks 0 and 1 both use the GPU" in text


def shared_gpu(fakes, version, told):
    """What ranks get that share a GPU, told[rank] in NCCL's variable."""

    def body(rank, world):
        if told[rank] is not None:
            os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = told[rank]
        xp = fake_gpu.Module(0)
        x = xp.put(np.full(3, rank + 1.0))
        kind, text = outcome(lambda: cdist.all_reduce(x))
        return kind, text, xp.get(x).tolist()

    return run(body, 2, environ={**fakes, "FAKE_NCCL_VERSION": version}, check_leftovers=False)


def test_two_ranks_share_a_gpu_where_nccl_is_told_so(fakes):
    assert shared_gpu(fakes, "23007", ["1", "1"]) == [(None, "", [3.0] * 3)] * 2


@pytest.mark.parametrize(
    ("version", "told"),
    [
        ("22907", ["1", "1"]),
        ("23007", ["1", "0"]),
        ("23007", [None, "1"]),
    ],
)
def test_two_ranks_do_not_share_a_gpu_otherwise(fakes, version, told):
    for kind, text, value in shared_gpu(fakes, version, told):
        assert issubclass(kind, ValueError)
        assert "NCCL_MULTI_RANK_GPU_ENABLE=1 is set on all ranks" in text
        assert value != [3.0] * 3


def test_ranks_with_another_nccl_are_refused_on_all(fakes):
    def body(rank, world):
        os.environ["FAKE_NCCL_VERSION"] = "22907" if rank else "22807"
        x = fake_gpu.Module(rank).put(np.ones(3))
        return outcome(lambda: cdist.all_reduce(x))

    for kind, text in run(body, 2, environ=fakes, check_leftovers=False):
        assert issubclass(kind, TypeError)
        assert "rank 0 has NCCL 22807, rank 1 has 22907: all ranks need the same" in text


def test_no_nccl_says_where_it_was_looked_for(fakes):
    def body(rank, world):
        x = fake_gpu.Module(rank).put(np.ones(3))
        return outcome(lambda: cdist.all_reduce(x))

    for kind, text in run(
        body, 2, environ={**fakes, "CDIST_NCCL_LIB": "/nowhere/libnccl.so"}, check_leftovers=False
    ):
        assert issubclass(kind, TypeError)
        assert "CDIST_NCCL_LIB names /nowhere/libnccl.so" in text


def test_arrays_on_another_gpu_are_refused(fakes):
    def body(rank, world):
        mine, other = fake_gpu.Module(rank), fake_gpu.Module(rank + 2)
        x = mine.put(np.ones(3))
        cdist.all_reduce(x)
        wrong = outcome(lambda: cdist.all_reduce(other.put(np.ones(3))))
        cdist.all_reduce(x)
        return wrong, float(mine.get(x)[0])

    for rank, ((kind, text), value) in enumerate(run(body, 2, environ=fakes, check_leftovers=False)):
        assert issubclass(kind, ValueError)
        assert f"GPU {rank + 2}" in text
        assert value == 4.0


def test_bad_calls_raise_on_the_calling_rank_before_anything_is_launched(fakes):
    def body(rank, world):
        mine, other = fake_gpu.Module(rank), fake_gpu.Module(rank + 2)
        x, far, host, short = (
            mine.put(np.ones(3)),
            other.put(np.ones(3)),
            np.ones(3),
            mine.put(np.ones(3, "int16")),
        )
        cdist.all_reduce(x)
        calls = [
            lambda: cdist.all_gather([mine.put(np.ones(3)), far], x),
            lambda: cdist.all_gather_into_tensor(other.put(np.ones(6)), x),
            lambda: cdist.all_reduce(far, async_op=True),
            lambda: cdist.all_gather([mine.put(np.ones(3)), host], x),
            lambda: cdist.all_gather_into_tensor(np.ones(6), x),
            lambda: cdist.all_reduce(short),
            lambda: cdist.all_reduce(short, async_op=True),
            lambda: cdist.reduce_scatter_tensor(mine.put(np.ones(1, "int16")), mine.put(np.ones(2, "int16"))),
        ]
        outcomes = (
            [outcome(call) for call in calls] if rank == 0 else []
        )  # the other rank waits for none of it
        cdist.all_reduce(x)
        return outcomes, mine.get(x).tolist()

    (outcomes, value), (_, other_value) = run(body, 2, environ=fakes, check_leftovers=False)
    assert value == other_value == [4.0] * 3
    for kind, text in outcomes[:3]:
        assert issubclass(kind, ValueError)
        assert "lies on GPU 2, but this rank's part of the group runs on GPU 0" in text
    for kind, text in outcomes[3:5]:
        assert issubclass(kind, ValueError)
        assert "different devices (CPU and CUDA)" in text
    for kind, text in outcomes[5:]:
        assert issubclass(kind, TypeError)
        assert "NCCL does not reduce int16" in text


def test_a_rank_without_a_gpu_is_named_on_all_ranks(fakes):
    def body(rank, world):
        x = fake_gpu.Module(rank).put(np.ones(3))
        if rank == 1:
            os.environ["FAKE_CUDA_DEVICES"] = "0"
        wrong = outcome(lambda: cdist.all_reduce(x))
        y = np.ones(3)
        cdist.all_reduce(y)  # in host memory all is as before
        return wrong, y.tolist()

    outcomes = run(body, 2, environ=fakes, check_leftovers=False)
    for (kind, text), value in outcomes:
        assert issubclass(kind, TypeError)
        assert "the CUDA driver sees no GPU" in text
        assert value == [2.0] * 3
    assert "rank 1 on " in outcomes[0][0][1]


def calls_with(x, out):
    """Each way an array comes to a group, as calls of one rank."""
    return [
        lambda: cdist.all_reduce(x),
        lambda: cdist.all_reduce(x, async_op=True),
        lambda: cdist.all_gather([out, out], x),
        lambda: cdist.all_gather_into_tensor(out, x),
        lambda: cdist.broadcast(x, 0),
        lambda: cdist.send(x, 1),
        lambda: cdist.irecv(x, 1),
        lambda: cdist.batch_isend_irecv([cdist.P2POp(cdist.isend, x, 1)]),
        lambda: cdist.all_reduce_coalesced([x]),
    ]


@pytest.mark.parametrize(
    ("backend", "refused"), [("nccl", "cpu"), ("cuda:nccl", "cpu"), ("cpu:gloo", "cuda")]
)
def test_arrays_that_no_backend_was_named_for_are_refused_before_anything_is_sent(fakes, backend, refused):
    def body(rank, world):
        xp = fake_gpu.Module(rank)
        host, gpu = (np.ones(3), np.ones(6)), (xp.put(np.ones(3)), xp.put(np.ones(6)))
        bad, good = (host, gpu) if refused == "cpu" else (gpu, host)
        outcomes = [outcome(call) for call in calls_with(*bad)] if rank == 0 else []
        cdist.all_reduce(good[0])  # the other rank waits for none of it
        if refused == "cpu":  # the ranks agree on shapes first
            outcomes += [outcome(lambda: cdist.all_gather_v(bad[0]))]
        return outcomes, (xp.get(good[0]) if refused == "cpu" else good[0]).tolist()

    (outcomes, value), (_, other_value) = run(body, 2, backend=backend, environ=fakes, check_leftovers=False)
    assert value == other_value == [2.0] * 3
    for kind, text in outcomes:
        assert kind is TypeError, (kind, text)
        assert f"No backend type associated with device type {refused}" in text
        assert "backend='cpu:gloo,cuda:nccl'" in text


@pytest.mark.parametrize("options", [{"backend": "cpu:gloo,cuda:nccl"}, {"backend": None}, {"device_id": 0}])
def test_arrays_in_host_memory_are_reduced_beside_those_of_gpus(fakes, options):
    def body(rank, world):
        if "device_id" in options:
            options["device_id"] = rank
        cdist.init_process_group(**options)
        x, y = np.full(3, rank + 1.0), fake_gpu.Module(rank).put(np.full(3, rank + 1.0))
        half = cdist.split_group(split_ranks=[[0, 1]])
        for group in (None, half, cdist.new_group([0, 1])):
            cdist.all_reduce(x, group=group)
            cdist.all_reduce(y, group=group)
        return x.tolist(), fake_gpu.Module(rank).get(y).tolist()

    environ = {**fakes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    outcomes = run(body, 2, init=False, environ=environ, check_leftovers=False)
    assert outcomes == [([12.0] * 3, [12.0] * 3)] * 2


def test_modules_in_host_memory_are_refused_in_a_group_for_gpus_alone():
    class Module:
        def __init__(self):
            self.weight = cdist.Parameter(np.ones(3))

        def named_parameters(self):
            return [("weight", self.weight)]

    def body(rank, world):
        x = np.full(3, rank + 1.0)
        cdist.GradientReducer(x).reduce(x)  # by way of buckets in host memory, as JAX's on GPUs
        return x.tolist(), outcome(lambda: cdist.DistributedDataParallel(Module()))

    for value, (kind, text) in run(body, 2, backend="nccl", environ={"CDIST_CUDA_LIB": "/nowhere"}):
        assert value == [1.5] * 3
        assert kind is TypeError
        assert "No backend type associated with device type cpu" in text


def test_what_cdist_itself_keeps_in_host_memory_moves_in_a_group_for_gpus_alone(fakes):
    def body(rank, world):
        part = cdist.new_group([0, 1])
        for group in (None, part):
            everyone = [None] * world
            cdist.all_gather_object(everyone, np.full(20_000, rank), group=group)
            assert [int(x[0]) for x in everyone] == [0, 1]
            cdist.gather_object(rank, everyone if rank == 0 else None, group=group)
            box = [(rank, np.full(20_000, rank))]
            cdist.broadcast_object_list(box, 1, group=group)
            assert box[0][0] == 1
            cdist.scatter_object_list(box, ["a", np.zeros(20_000)] if rank == 0 else None, group=group)
            if rank == 0:
                assert box == ["a"]
                cdist.send_object_list([np.ones(20_000)], 1, group=group)
            else:
                cdist.recv_object_list(box, 0, group=group)
                assert box[0][0] == 1
            cdist.barrier(group=group)
            cdist.barrier(group=group, async_op=True).wait()
            cdist.monitored_barrier(group=group)

    run(body, 2, backend="nccl", environ=fakes, check_leftovers=False)


def beside_a_killed_rank(fakes, call):
    """What call(module, array) returns on rank 0 after rank 1 was killed, both connected by an all_reduce."""

    through = Tally()

    def body(rank, world):
        xp = fake_gpu.Module(rank)
        x = xp.put(np.ones(3))
        cdist.all_reduce(x)
        xp.get(x)
        through.note(rank)
        if rank == 1:
            through.wait_for(world)
            os.kill(os.getpid(), signal.SIGKILL)
        return call(xp, x)

    kind, text = run(body, 2, environ=fakes, allow_failures=True, check_leftovers=False, timeout=25)[0]
    assert kind is cdist.PeerLostError  # and not the timeout of the group, 30 s
    assert "rank 1" in text


def test_a_killed_rank_raises_on_the_other(fakes):
    def call(xp, x):
        cdist.all_reduce(x)
        xp.get(x)  # ends because the communicator is aborted
        return outcome(lambda: cdist.all_reduce(x))

    beside_a_killed_rank(fakes, call)


def test_a_rank_that_dies_before_the_first_collective_raises_on_the_other(fakes):
    beside_a_killed_rank(fakes, lambda xp, x: outcome(lambda: cdist.broadcast(x, 0)))  # connects anew


def beside_a_late_rank(fakes, call):
    """What call(xp, x) returns on rank 0 when rank 1 stays away after the first collective."""

    def body(rank, world):
        xp = fake_gpu.Module(rank)
        x = xp.put(np.ones(3))
        cdist.all_reduce(x)
        xp.get(x)
        if rank == 1:
            time.sleep(3)
            return None
        return call(xp, x)

    return run(body, 2, environ=fakes, allow_failures=True, check_leftovers=False)[0]


def test_a_rank_that_does_not_come_to_connect_times_out(fakes):
    kind, text = beside_a_late_rank(fakes, lambda xp, x: outcome(lambda: cdist.broadcast(x, 0, timeout=0.5)))
    assert kind is cdist.DistTimeoutError
    assert "rank 1 is behind" in text
    assert "missing ranks: [1]" in text


def test_a_dropped_work_keeps_its_array_until_it_is_through(fakes):
    def body(rank, world):
        xp = fake_gpu.Module(rank)
        x = xp.put(np.ones(3))
        cdist.all_reduce(x)
        y = xp.put(np.full(3, rank + 1.0))
        kept = weakref.ref(y)
        store = cdist.group.WORLD.get_group_store()
        if rank == 1:
            store.get("looked")
        cdist.all_reduce(y, async_op=True)
        del y
        early = kept() is not None
        store.set("looked", "")
        for _ in range(2):  # the first is through behind y's, the second sweeps
            cdist.all_reduce(x, async_op=True).wait()
            xp.get(x)
        return early, kept() is None

    for rank, (early, late) in enumerate(run(body, 2, environ=fakes, check_leftovers=False)):
        assert early or rank == 1  # rank 1 comes last: its part may be over at once
        assert late


def test_a_coalesced_operation_is_missed_at_its_deadline(fakes):
    def call(xp, x):
        with cdist._coalescing_manager():
            cdist.all_reduce(x, timeout=0.5)
        xp.get(x)  # ends because the communicator is aborted
        return outcome(lambda: cdist.all_reduce(x))

    kind, text = beside_a_late_rank(fakes, call)
    assert kind is cdist.DistTimeoutError
    assert "all_reduce" in text


@contextlib.contextmanager
def ctrl_c_soon():
    """Without another thread, which would need the interpreter lock for it."""
    signal.signal(signal.SIGALRM, lambda *args: signal.raise_signal(signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    yield


@pytest.mark.parametrize("async_op", [False, True])
def test_ctrl_c_ends_the_wait_to_connect(fakes, async_op):
    def call(xp, x):
        with pytest.raises(KeyboardInterrupt), ctrl_c_soon():  # and not what rank 1's end would raise
            cdist.broadcast(x, 0, timeout=20, async_op=async_op)
        return outcome(lambda: cdist.broadcast(x, 0))

    kind, text = beside_a_late_rank(fakes, call)
    assert kind is cdist.AbortedError
    assert "rank 0 was interrupted in broadcast" in text


@pytest.mark.parametrize("async_op", [False, True])
def test_ctrl_c_in_the_making_of_a_communicator_ends_the_group_on_all_ranks(fakes, async_op):
    def body(rank, world):
        x = fake_gpu.Module(rank).put(np.ones(3))
        if rank == 0:
            with pytest.raises(KeyboardInterrupt), ctrl_c_soon():
                cdist.all_reduce(x, async_op=async_op)
        return [outcome(lambda: cdist.all_reduce(x)), outcome(lambda: cdist.all_reduce(np.ones(3)))]

    for outcomes in run(body, 2, environ={**fakes, "FAKE_NCCL_INIT_MS": "30000"}, check_leftovers=False):
        for kind, text in outcomes:
            assert kind is cdist.AbortedError
            assert "rank 0 was interrupted while the group's GPUs were connected" in text


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "int16", "bool", "complex64", "float8_e4m3fn", "longdouble"]
)
def test_supports_is_what_the_backend_takes(dtype):
    def told(name):
        return cdist.supports(getattr(cdist.ReduceOp, name), dtype, "cuda")

    lacks = dtype in ("int16", "longdouble")
    assert told("SUM") is not lacks
    assert told("PRODUCT") is not (lacks or dtype == "complex64")
    assert told("BAND") is (dtype == "bool")
    assert told("BXOR") is False


def test_destroying_a_group_lets_the_work_on_the_gpu_end(fakes):
    """Its result is there on the rank that goes first, and the other is not left alone."""

    def body(rank, world):
        xp = fake_gpu.Module(rank)
        x = xp.put(np.full(3, rank + 1.0))
        cdist.all_reduce(x)
        if rank == 1:
            xp.get(x)
            time.sleep(0.5)
        cdist.all_reduce(x)
        cdist.destroy_process_group()
        return xp.get(x).tolist()

    assert run(body, 2, environ=fakes, check_leftovers=False) == [[6.0] * 3] * 2


def test_registered_memory_within_a_coalesced_group(fakes):
    """The lock is its owner's, who allocates and, when an array is dropped, gives back."""

    def body(rank, world):
        xp = fake_gpu.Module(rank)
        x, dropped = xp.put(np.ones(3)), cdist.empty(4, device="cuda")
        with cdist._coalescing_manager(device="cuda"):
            cdist.all_reduce(dropped)
            del dropped
            made = cdist.empty(4, device="cuda")
            cdist.all_reduce(x)
        value = float(xp.get(x)[0])
        del made
        return value

    assert run(body, 2, environ=fakes, check_leftovers=False) == [2.0, 2.0]


def test_a_coalesced_group_waits_for_that_of_another_thread(fakes):
    def body(rank, world):
        xp = fake_gpu.Module(rank)
        x, y = xp.put(np.ones(3)), xp.put(np.ones(3))
        cdist.all_reduce(x)

        def coalesce(array, within=None):
            with cdist._coalescing_manager(device="cuda"):
                cdist.all_reduce(array)
                if within:
                    within.start()
                    time.sleep(0.3)

        other = threading.Thread(target=coalesce, args=(y,))
        coalesce(x, other)
        other.join()
        return xp.get(x).tolist(), xp.get(y).tolist()

    assert run(body, 2, environ=fakes, check_leftovers=False) == [([4.0] * 3, [2.0] * 3)] * 2


def test_registered_memory_while_another_thread_waits_to_connect(fakes):
    """Whoever allocates waits for it without the interpreter lock, which the waiting one wants."""

    def body(rank, world):
        xp = fake_gpu.Module(rank)
        x = xp.put(np.ones(3))
        cdist.all_reduce(x)
        if rank == 0:
            allocating = threading.Timer(0.3, lambda: cdist.empty(4, device="cuda"))
            allocating.start()
        else:
            time.sleep(1)
        cdist.broadcast(x, 0)
        if rank == 0:
            allocating.join()
        return float(xp.get(x)[0])

    assert run(body, 2, environ=fakes, check_leftovers=False) == [2.0, 2.0]


def test_registered_memory(fakes):
    def body(rank, world):
        x = cdist.empty((4, 3), "float64", device="cuda")
        xp = fake_gpu.Module(rank)
        address = x.__cuda_array_interface__["data"][0]
        memory = np.frombuffer((ctypes.c_char * 96).from_address(address), "float64").reshape(4, 3)
        memory[...] = rank + 1
        cdist.all_reduce(x)
        return x.device.id, xp.get(fake_gpu.Array(memory, rank)).tolist()

    outcomes = run(body, 2, environ=fakes, check_leftovers=False)
    assert outcomes == [(rank, [[3.0] * 3] * 4) for rank in range(2)]


def test_memory_is_not_given_back_while_the_gpu_works_with_it(fakes):
    """NCCL takes it away under the kernels: whoever allocates much waits for them first."""

    def body(rank, world):
        xp = fake_gpu.Module(rank)
        left = ctypes.CDLL(fakes["CDIST_CUDA_LIB"]).fake_cuda_left
        left.restype = ctypes.c_long
        x = xp.put(np.ones(3))
        cdist.all_reduce(x)
        xp.get(x)
        used = cdist.empty(3, "float64", device="cuda")
        if rank == 1:
            time.sleep(0.5)
        came = time.monotonic()
        cdist.all_reduce(used)
        before = left()
        del used
        kept = left() >= before
        for _ in range(5):
            cdist.empty(1 << 26, "uint8", device="cuda")
        return kept, came, time.monotonic(), float(xp.get(x)[0])

    first, second = run(body, 2, environ=fakes, check_leftovers=False)
    assert first[0]
    assert second[0]
    assert first[2] > second[1]
    assert (first[3], second[3]) == (2.0, 2.0)


def test_memory_outlives_its_group(fakes):
    def body(rank, world):
        left = ctypes.CDLL(fakes["CDIST_CUDA_LIB"]).fake_cuda_left
        left.restype = ctypes.c_long
        x = cdist.empty(3, "float64", device="cuda")
        memory = (ctypes.c_double * 3).from_address(x.__cuda_array_interface__["data"][0])
        memory[:] = [rank + 1.0] * 3
        cdist.all_reduce(x)
        cdist.destroy_process_group()
        values, there = list(memory), left()
        del x
        return values, there > left()

    assert run(body, 2, environ=fakes, check_leftovers=False) == [([3.0] * 3, True)] * 2


class Reducer:
    """One gradient in the fake GPU's memory, whose reducer launches as soon as it is ready."""

    def __init__(self):
        group = cdist.group.WORLD
        _core._gpu_open(group, -1)
        address, self.owner = _core._gpu_alloc(group, 12, True)
        self.values = np.frombuffer((ctypes.c_char * 12).from_address(address), "float32")
        self.values[:] = 1
        self.reducer = _core.Reducer(group, [3], ["float32"], [0], "sum", "cuda", [address])
        self.reducer.begin(1)

    def ready(self):
        self.reducer.ready(0)

    def finish(self, xp):
        assert self.reducer.finish(False)
        return xp.get(fake_gpu.Array(self.values, xp.device)).tolist()


class MissingGradient(Reducer):
    """Launched by finish, which puts zeros in its place."""

    def ready(self):
        self.reducer.finish(True)


class Coalesced:
    """An all_reduce that is launched when its group ends."""

    def __init__(self):
        self.xp = fake_gpu.Module(cdist.get_rank())
        self.array = self.xp.put(np.ones(3, "float32"))
        _core._gpu_open(cdist.group.WORLD, -1)

    def ready(self):
        with cdist._coalescing_manager(device="cuda"):
            cdist.all_reduce(self.array)

    def finish(self, xp):
        return xp.get(self.array).tolist()


@pytest.mark.parametrize("launching", [Reducer, MissingGradient, Coalesced])
def test_other_threads_go_on_while_a_launch_waits_for_the_other_rank(fakes, launching):
    """Rank 1 comes when a thread of rank 0 has seen rank 0 wait inside NCCL, and says so."""

    def body(rank, world):
        waiting = ctypes.CDLL(fakes["CDIST_NCCL_LIB"]).fake_nccl_waiting
        store = cdist.group.WORLD.get_group_store()
        launch = launching()

        def tell():
            while not waiting():
                time.sleep(0.001)
            store.set("inside", "")

        if rank == 1:
            store.wait(["inside"], timedelta(seconds=15))
            launch.ready()
        else:
            teller = threading.Thread(target=tell)
            teller.start()
            launch.ready()
            teller.join()
        return launch.finish(fake_gpu.Module(rank))

    first, second = run(body, 2, environ=fakes, check_leftovers=False)
    assert first == second == [2.0] * 3


def test_ctrl_c_ends_a_launch_of_the_reducer(fakes):
    def body(rank, world):
        launch = Reducer()
        if rank == 0:
            with pytest.raises(KeyboardInterrupt), ctrl_c_soon():
                launch.ready()
        return outcome(lambda: cdist.all_reduce(np.ones(3)))

    for kind, text in run(body, 2, environ=fakes, check_leftovers=False):
        assert kind is cdist.AbortedError
        assert "rank 0 was interrupted in all_reduce" in text


def test_allocating_behind_work_that_does_not_end_stops_at_the_deadline(fakes):
    """And destroying the group, and dropping the last array, go on without it."""

    def body(rank, world):
        xp = fake_gpu.Module(rank)
        x = cdist.empty(1, device="cuda")
        much = cdist.empty(300 << 20, "uint8", device="cuda")
        xp.cuda.cuCtxPushCurrent_v2(xp.context)
        xp.cuda.fake_stream_hold(None)
        xp.cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
        del much
        cdist.group.WORLD.set_timeout(timedelta(seconds=0.3))
        late = outcome(lambda: cdist.empty(1, device="cuda"))
        cdist.group.WORLD.set_timeout(timedelta(seconds=60))
        with pytest.raises(KeyboardInterrupt), ctrl_c_soon():
            cdist.empty(1, device="cuda")
        cdist.destroy_process_group()
        del x
        xp.cuda.fake_streams_let_go()
        return late

    ((kind, text),) = run(body, 1, environ=fakes, check_leftovers=False, timeout=25)
    assert kind is cdist.DistTimeoutError
    assert "rank 0: an allocation on GPU 0 waited to its deadline" in text
