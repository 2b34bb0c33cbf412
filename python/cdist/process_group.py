"""ProcessGroup: the object, with the methods of torch's low-level calls."""

from datetime import timedelta

from cdist import _core
from cdist.backends import Backend, BackendConfig
from cdist.constants import ReduceOp

__all__ = ["ProcessGroup", "group", "GroupMember", "GroupName"]

GroupName = str


class ProcessGroup(_core.ProcessGroup):
    """A set of ranks that communicate. Made by init_process_group and new_group, not by hand.

    The methods named like torch's low-level calls (``allreduce``, ``broadcast``, …) start an operation and
    return its Work.
    """

    _backend = Backend("gloo")
    _config: BackendConfig | None = None
    group_name = ""
    group_desc = ""
    bound_device_id = None
    _store = None

    def _use(self, backend, config, store):
        """Say what the group was made with; arrays on devices that `config` does not name are refused."""
        self._backend, self._config, self._store = backend, config, store
        named = config.get_device_backend_map()
        _core._serve(self, "cpu" in named, "cuda" in named)

    def name(self) -> str:
        """Backend's name."""
        return str(self._backend)

    def get_group_store(self):
        """Return the store that the group was made through."""
        return self._store

    def _get_backend(self, device):
        return self

    @property
    def _device_types(self) -> list:
        return list(self._config.get_device_backend_map()) if self._config else ["cpu"]

    def __repr__(self):
        name = self.group_desc if self.group_desc not in (None, "", "undefined") else self.group_name
        return f"<ProcessGroup {name}: rank {self.rank()} of {self.size()}, {self._transport}>"

    def __reduce__(self):
        raise TypeError("a ProcessGroup cannot be pickled: it belongs to its process")

    @staticmethod
    def _one(tensors, method):
        if isinstance(tensors, (list, tuple)):
            if len(tensors) != 1:
                raise ValueError(
                    f"ProcessGroup.{method}: expected one tensor, or a list of one, got a list of "
                    f"{len(tensors)}: call it for each tensor"
                )
            return tensors[0]
        return tensors

    @staticmethod
    def _list_of(tensors):
        """Return the list of a rank's tensors, which torch wraps in another list."""
        return tensors[0] if tensors and isinstance(tensors[0], (list, tuple)) else tensors

    @staticmethod
    def _limit(options, timeout=None):
        limit = getattr(options, "timeout", timeout)
        return None if isinstance(limit, timedelta) and limit < timedelta(0) else limit

    @classmethod
    def _either(cls, given, field, timeout):
        """Return (value, time limit) of an argument that may be an options structure with that field."""
        return getattr(given, field, given), cls._limit(given, timeout)

    def allreduce(self, tensors, op=ReduceOp.SUM, timeout=None):
        """Start all_reduce of a tensor (or a list of one). `op` may be AllreduceOptions."""
        op, timeout = self._either(op, "reduceOp", timeout)
        return _core.all_reduce(self._one(tensors, "allreduce"), op, self, True, timeout)

    def broadcast(self, tensors, root=0, timeout=None):
        """Start broadcast from the group rank `root` (or BroadcastOptions)."""
        root, timeout = self._either(root, "rootRank", timeout)
        return _core.broadcast(
            self._one(tensors, "broadcast"), group=self, async_op=True, group_src=root, timeout=timeout
        )

    def reduce(self, tensors, root=0, op=ReduceOp.SUM, timeout=None):
        """Start reduce to the group rank `root` (or ReduceOptions)."""
        op = getattr(root, "reduceOp", op)
        root, timeout = self._either(root, "rootRank", timeout)
        return _core.reduce(
            self._one(tensors, "reduce"), op=op, group=self, async_op=True, group_dst=root, timeout=timeout
        )

    def allgather(self, output_tensors, input_tensor, timeout=None):
        """Start all_gather; both may be wrapped in lists of one as in torch."""
        if output_tensors and isinstance(output_tensors[0], (list, tuple)):
            output_tensors = self._one(output_tensors, "allgather")
        return _core.all_gather(
            output_tensors, self._one(input_tensor, "allgather"), self, True, self._limit(timeout, timeout)
        )

    def _allgather_base(self, output, input, options=None):
        """Start all_gather_into_tensor; also all_gather_single."""
        return _core.all_gather_into_tensor(output, input, self, True, self._limit(options))

    def gather(self, output_tensors, input_tensors, root=0, timeout=None):
        """Start gather to the group rank `root` (or GatherOptions)."""
        root, timeout = self._either(root, "rootRank", timeout)
        tensor, outputs = self._one(input_tensors, "gather"), self._list_of(output_tensors) or None
        return _core.gather(tensor, outputs, group=self, async_op=True, group_dst=root, timeout=timeout)

    def scatter(self, output_tensors, input_tensors, root=0, timeout=None):
        """Start scatter from the group rank `root` (or ScatterOptions)."""
        root, timeout = self._either(root, "rootRank", timeout)
        tensor, inputs = self._one(output_tensors, "scatter"), self._list_of(input_tensors) or None
        return _core.scatter(tensor, inputs, group=self, async_op=True, group_src=root, timeout=timeout)

    def reduce_scatter(self, output_tensors, input_tensors, op=ReduceOp.SUM, timeout=None):
        """Start reduce_scatter. `op` may be ReduceScatterOptions."""
        op, timeout = self._either(op, "reduceOp", timeout)
        inputs = self._list_of(input_tensors)
        return _core.reduce_scatter(
            self._one(output_tensors, "reduce_scatter"), inputs, op, self, True, timeout
        )

    def _reduce_scatter_base(self, output, input, options=None):
        """Start reduce_scatter_tensor; also reduce_scatter_single."""
        op = getattr(options, "reduceOp", ReduceOp.SUM)
        return _core.reduce_scatter_tensor(output, input, op, self, True, self._limit(options))

    def alltoall(self, output_tensors, input_tensors, options=None):
        """Start all_to_all."""
        return _core.all_to_all(output_tensors, input_tensors, self, True, self._limit(options))

    def alltoall_base(self, output, input, output_split_sizes, input_split_sizes, options=None):
        """Start all_to_all_single."""
        limit = self._limit(options)
        return _core.all_to_all_single(
            output, input, output_split_sizes, input_split_sizes, self, True, limit
        )

    def allreduce_coalesced(self, tensors, options=None):
        """Start all_reduce of several tensors; a Future of the list."""
        from cdist.collectives import all_reduce_coalesced

        return all_reduce_coalesced(tensors, getattr(options, "reduceOp", ReduceOp.SUM), self, True)

    def allgather_coalesced(self, output_tensor_lists, input_tensors, options=None):
        """Start all_gather of several tensors; a Future of the lists."""
        from cdist.collectives import all_gather_coalesced

        return all_gather_coalesced(output_tensor_lists, input_tensors, self, True)

    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base

    def split_group(self, ranks, timeout=None, opts=None, group_name=None, group_desc=None):
        """Make a group of some ranks of this one, given as ranks in it. Only they call it."""
        from cdist.subgroups import split_group

        return split_group(self, [list(ranks)], timeout, opts, group_desc)

    def boxed(self):
        """Return itself."""
        return self

    def unbox(self):
        """Return itself."""
        return self

    def barrier(self, options=None, timeout=None):
        """Start a barrier."""
        return _core.barrier(self, True, None, self._limit(options, timeout))

    def monitored_barrier(self, timeout=None, wait_all_ranks=False):
        """As cdist.monitored_barrier."""
        self._monitored_barrier(timeout, wait_all_ranks)

    def send(self, tensors, dst_rank, tag=0):
        """Start to send to a group rank."""
        return _core.isend(self._one(tensors, "send"), group=self, tag=tag, group_dst=dst_rank)

    def recv(self, tensors, src_rank, tag=0):
        """Start to receive from a group rank."""
        return _core.irecv(self._one(tensors, "recv"), group=self, tag=tag, group_src=src_rank)

    def recv_anysource(self, tensors, tag=0):
        """Start to receive from whoever sends first."""
        return _core.irecv(self._one(tensors, "recv_anysource"), group=self, tag=tag)


class _WorldProperty(type):
    @property
    def WORLD(cls):  # noqa: N802
        """The default group, None before init_process_group."""
        return _core._get_default_group()

    @WORLD.setter
    def WORLD(cls, value):  # noqa: N802
        _core._set_default_group(value)


class group(metaclass=_WorldProperty):  # noqa: N801
    """``group.WORLD`` is the default group."""


class GroupMember(metaclass=_WorldProperty):
    """``GroupMember.WORLD``, and what new_group gives to ranks outside: ``GroupMember.NON_GROUP_MEMBER``."""

    NON_GROUP_MEMBER = -100
