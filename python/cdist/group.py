"""Process groups: set-up, tear-down, subgroups, ranks."""

import atexit
import contextlib
import hashlib
import io
import os
import sys
import warnings
from datetime import timedelta

from cdist import _core, backends
from cdist.backends import Backend, BackendConfig
from cdist.constants import ReduceOp

__all__ = [
    "is_available",
    "init_process_group",
    "destroy_process_group",
    "is_initialized",
    "is_torchelastic_launched",
    "get_rank",
    "get_world_size",
    "get_backend",
    "get_backend_config",
    "get_node_local_rank",
    "get_pg_count",
    "set_timeout",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "split_group",
    "shrink_group",
    "get_group_rank",
    "get_global_rank",
    "get_process_group_ranks",
    "ProcessGroup",
    "group",
    "GroupMember",
    "GroupName",
]

SHRINK_DEFAULT = 0
SHRINK_ABORT = 1

GroupName = str


class ProcessGroup(_core.ProcessGroup):
    """A set of ranks that communicate. Made by init_process_group and new_group, not by hand.

    The methods named like torch's low-level calls (``allreduce``, ``broadcast``, …) start an operation and return its Work.
    """

    _backend = Backend("gloo")
    _config: BackendConfig | None = None
    group_name = ""
    group_desc = ""
    bound_device_id = None
    _store = None

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
        return f"<ProcessGroup {self.group_desc or self.group_name}: rank {self.rank()} of {self.size()}, {self._transport}>"

    def __reduce__(self):
        raise TypeError("a ProcessGroup cannot be pickled: it belongs to its process")

    @staticmethod
    def _one(tensors):
        if isinstance(tensors, (list, tuple)):
            if len(tensors) != 1:
                raise ValueError(f"expected one tensor, got a list of {len(tensors)}")
            return tensors[0]
        return tensors

    @staticmethod
    def _timeout(options, timeout=None):
        limit = getattr(options, "timeout", timeout)
        return None if isinstance(limit, timedelta) and limit < timedelta(0) else limit

    def allreduce(self, tensors, op=ReduceOp.SUM, timeout=None):
        """Start all_reduce of a tensor (or a list of one). `op` may be AllreduceOptions."""
        timeout = self._timeout(op, timeout)
        op = getattr(op, "reduceOp", op)
        return _core.all_reduce(self._one(tensors), op, self, True, timeout)

    def broadcast(self, tensors, root=0, timeout=None):
        """Starts broadcast from the group rank `root` (or BroadcastOptions)."""
        timeout = self._timeout(root, timeout)
        root = getattr(root, "rootRank", root)
        return _core.broadcast(self._one(tensors), group=self, async_op=True, group_src=root, timeout=timeout)

    def reduce(self, tensors, root=0, op=ReduceOp.SUM, timeout=None):
        """Start reduce to the group rank `root` (or ReduceOptions)."""
        timeout = self._timeout(root, timeout)
        op = getattr(root, "reduceOp", op)
        root = getattr(root, "rootRank", root)
        return _core.reduce(
            self._one(tensors), op=op, group=self, async_op=True, group_dst=root, timeout=timeout
        )

    def allgather(self, output_tensors, input_tensor, timeout=None):
        """Starts all_gather; both may be wrapped in lists of one as in torch."""
        if output_tensors and isinstance(output_tensors[0], (list, tuple)):
            output_tensors = self._one(output_tensors)
        return _core.all_gather(
            output_tensors, self._one(input_tensor), self, True, self._timeout(timeout, timeout)
        )

    def _allgather_base(self, output, input, options=None):
        return _core.all_gather_into_tensor(output, input, self, True, self._timeout(options))

    def gather(self, output_tensors, input_tensors, root=0, timeout=None):
        """Start gather to the group rank `root` (or GatherOptions)."""
        timeout = self._timeout(root, timeout)
        root = getattr(root, "rootRank", root)
        outputs = (
            output_tensors[0]
            if output_tensors and isinstance(output_tensors[0], (list, tuple))
            else output_tensors
        )
        return _core.gather(self._one(input_tensors), outputs or None, group=self, async_op=True, group_dst=root,
                            timeout=timeout)  # fmt: skip

    def scatter(self, output_tensors, input_tensors, root=0, timeout=None):
        """Starts scatter from the group rank `root` (or ScatterOptions)."""
        timeout = self._timeout(root, timeout)
        root = getattr(root, "rootRank", root)
        inputs = (
            input_tensors[0]
            if input_tensors and isinstance(input_tensors[0], (list, tuple))
            else input_tensors
        )
        return _core.scatter(self._one(output_tensors), inputs or None, group=self, async_op=True, group_src=root,
                             timeout=timeout)  # fmt: skip

    def reduce_scatter(self, output_tensors, input_tensors, op=ReduceOp.SUM, timeout=None):
        """Start reduce_scatter. `op` may be ReduceScatterOptions."""
        timeout = self._timeout(op, timeout)
        op = getattr(op, "reduceOp", op)
        inputs = (
            input_tensors[0]
            if input_tensors and isinstance(input_tensors[0], (list, tuple))
            else input_tensors
        )
        return _core.reduce_scatter(self._one(output_tensors), inputs, op, self, True, timeout)

    def _reduce_scatter_base(self, output, input, options=None):
        op = getattr(options, "reduceOp", ReduceOp.SUM)
        return _core.reduce_scatter_tensor(output, input, op, self, True, self._timeout(options))

    def alltoall(self, output_tensors, input_tensors, options=None):
        """Start all_to_all."""
        return _core.all_to_all(output_tensors, input_tensors, self, True, self._timeout(options))

    def alltoall_base(self, output, input, output_split_sizes, input_split_sizes, options=None):
        """Starts all_to_all_single."""
        return _core.all_to_all_single(output, input, output_split_sizes, input_split_sizes, self, True,
                                       self._timeout(options))  # fmt: skip

    def barrier(self, options=None, timeout=None):
        """Start a barrier."""
        return _core.barrier(self, True, None, self._timeout(options, timeout))

    def monitored_barrier(self, timeout=None, wait_all_ranks=False):
        """As cdist.monitored_barrier."""
        self._monitored_barrier(timeout, wait_all_ranks)

    def send(self, tensors, dst_rank, tag=0):
        """Start to send to a group rank."""
        return _core.isend(self._one(tensors), group=self, tag=tag, group_dst=dst_rank)

    def recv(self, tensors, src_rank, tag=0):
        """Starts to receive from a group rank."""
        return _core.irecv(self._one(tensors), group=self, tag=tag, group_src=src_rank)

    def recv_anysource(self, tensors, tag=0):
        """Start to receive from whoever sends first."""
        return _core.irecv(self._one(tensors), group=self, tag=tag)


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


class _Registry:
    """The groups of this process."""

    def __init__(self):
        self.made = 0
        self.groups: list[ProcessGroup] = []
        self.excepthook = None
        self.teardown = False


_registry = _Registry()


def is_available() -> bool:
    """Return True."""
    return True


def is_initialized() -> bool:
    """Returns whether the default group is there."""
    return _core._get_default_group() is not None


def is_torchelastic_launched() -> bool:
    """Return whether cdistrun or torchrun started this process."""
    return os.environ.get("TORCHELASTIC_RUN_ID") is not None


def _as_timeout(timeout):
    if isinstance(timeout, timedelta) or (
        isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    ):
        return timeout
    raise TypeError(f"Expected timeout argument to be of type datetime.timedelta, got {timeout!r}")


def _bind_device(device_id):
    """Check a device_id: an int, a torch device, "cuda:1", or a device of another library."""
    if device_id is None:
        return None
    if isinstance(device_id, int):
        index = device_id
    else:
        text = str(getattr(device_id, "type", device_id)).partition(":")[0]
        index = getattr(device_id, "index", getattr(device_id, "id", None))
        if isinstance(device_id, str) and ":" in device_id and device_id.partition(":")[2].isdigit():
            index = int(device_id.partition(":")[2])
        if text == "cpu":
            raise ValueError(
                f"init_process_group device_id parameter must be an accelerator, got {device_id!r}"
            )
        if not isinstance(index, int):
            raise ValueError(
                f"init_process_group device_id parameter must be a device with an index, got {device_id!r}"
            )
    if index < 0:
        raise ValueError(f"init_process_group device_id parameter must not be negative, got {device_id!r}")
    return index


def _secret():
    text = os.environ.get("CDIST_JOB_SECRET")
    if not text:
        return None
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        secret = b""
    if len(secret) != 32:
        raise ValueError("CDIST_JOB_SECRET must be 64 hexadecimal digits")
    return secret


def _pick_backend(backend, device):
    if backend is not None:
        name = str(Backend(str(backend)))
        backends.check(name)
        return Backend(name), BackendConfig(name)
    if device is not None:
        return Backend("nccl"), BackendConfig("nccl")
    return Backend("gloo"), BackendConfig("undefined" if backends.is_nccl_available() else "gloo")


def _find_store(init_method, store, world_size, rank, limit):
    """Return (store, rank, world_size)."""
    if store is not None:
        if init_method is not None:
            raise AssertionError("Cannot specify both init_method and store.")
        if world_size <= 0:
            raise AssertionError("world_size must be positive if using store")
        if rank < 0:
            raise AssertionError("rank must be non-negative if using store")
        return store, rank, world_size
    from cdist.rendezvous import rendezvous
    from cdist.store import PrefixStore

    iterator = rendezvous(init_method or "env://", rank, world_size, timeout=limit)
    store, rank, world_size = next(iterator)
    store.set_timeout(limit if isinstance(limit, timedelta) else timedelta(seconds=limit))
    return PrefixStore("default_pg", store), rank, world_size


def init_process_group(
    backend=None,
    init_method=None,
    timeout=None,
    world_size=-1,
    rank=-1,
    store=None,
    group_name="",
    pg_options=None,
    device_id=None,
    _ranks=None,
    enable_reconfigure=False,
) -> None:
    """Meet the other ranks and makes the default group. Every rank calls it.

    Args:
        backend: "gloo" (CPU), "nccl" (GPU), "cpu:gloo,cuda:nccl", or None: what the machine has.
        init_method: "env://" (the default: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), "tcp://host:port",
            "file:///path".
        timeout: of the set-up and, by default, of every operation: timedelta or seconds. None is 30 minutes
            (10 for a backend that is exactly "nccl").
        world_size: number of ranks; with `store`, or where the URL does not tell.
        rank: of this process; likewise.
        store: a Store to meet through, instead of `init_method`.
        group_name: accepted, not needed.
        pg_options: accepted, not needed.
        device_id: GPU of this rank (an index or a device): connects NCCL at once.

    Raises:
        ValueError: called twice; a rank or world size that cannot be; bad device_id.
        AssertionError: arguments that exclude each other; unknown backend.
        RuntimeError: a backend that this machine does not have.
        RefusedError: two processes with one rank, other world sizes, wrong secret.
        DistTimeoutError, DistStoreError: others did not come in time.

    """
    if is_initialized():
        raise ValueError("trying to initialize the default process group twice!")
    device = _bind_device(device_id)
    name, config = _pick_backend(backend, device)
    limit = backends.default_timeout(name) if timeout is None else _as_timeout(timeout)
    store, rank, world_size = _find_store(init_method, store, world_size, rank, limit)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} does not fit world size {world_size}: ranks are 0 to {world_size - 1}")
    made = ProcessGroup._open(
        store, rank, world_size, "0", limit, limit, secret=_secret(),
        force_tcp=os.environ.get("CDIST_TRANSPORT", "auto").lower() == "tcp",
    )  # fmt: skip
    made._backend, made._config, made._store = name, config, store
    made.group_name, made.group_desc, made.bound_device_id = "0", "default_pg", device_id
    _registry.groups = [made]
    _registry.made = 1
    _core._set_default_group(made)
    _install_hooks(rank)
    if os.environ.get("TORCH_DIST_INIT_BARRIER") == "1":
        _core.barrier()


def _install_hooks(rank):
    """Peers learn at once when this rank dies of an exception; its traceback says which rank it is."""
    previous = sys.excepthook

    def excepthook(kind, error, trace):
        world = _core._get_default_group()
        if world is not None:
            with contextlib.suppress(Exception):
                world._announce_death(f"rank {rank} ended with {kind.__name__}: {error}"[:900])
        text = io.StringIO()
        with contextlib.redirect_stderr(text):
            previous(kind, error, trace)
        for line in text.getvalue().splitlines(keepends=True):
            sys.stderr.write(f"[rank{rank}]: {line}")

    _registry.excepthook = (previous, excepthook)
    sys.excepthook = excepthook
    if not _registry.teardown:
        _registry.teardown = True
        atexit.register(_teardown)


def _teardown():
    """At exit: closes what the program left open, without a word."""
    with contextlib.suppress(Exception):
        if is_initialized():
            destroy_process_group()


def destroy_process_group(group=None) -> None:
    """Closes a group, or with None (or WORLD) all of them. Local and quick; also after errors.

    Raises:
        AssertionError: there is no default group.
        ValueError: the group was destroyed before.

    """
    if group is GroupMember.NON_GROUP_MEMBER or (
        isinstance(group, int) and group == GroupMember.NON_GROUP_MEMBER
    ):
        return
    world = _core._get_default_group()
    if group is None:
        group = world
    if group is None:
        raise AssertionError("Process group cannot be None")
    if group not in _registry.groups:
        raise ValueError("Invalid process group specified")
    if group is not world:
        _registry.groups.remove(group)
        group.shutdown()
        return
    for member in reversed(_registry.groups):
        member.shutdown()
    _registry.groups = []
    _registry.made = 0
    _core._set_default_group(None)
    previous, mine = _registry.excepthook or (None, None)
    if mine is not None and sys.excepthook is mine:
        sys.excepthook = previous
    _registry.excepthook = None


def _default():
    world = _core._get_default_group()
    if world is None:
        raise ValueError(
            "Default process group has not been initialized, please make sure to call init_process_group."
        )
    return world


def _given(group):
    if group is None:
        return _default()
    return group


def _is_outside(group):
    return isinstance(group, int) and group == GroupMember.NON_GROUP_MEMBER


def _registered(group):
    world = _default()
    group = world if group is None else group
    if not isinstance(group, ProcessGroup) or group not in _registry.groups:
        raise ValueError("Invalid process group specified")
    return group


def get_rank(group=None) -> int:
    """Return this process's rank in the group, −1 outside it."""
    _default()
    return -1 if _is_outside(group) else _given(group).rank()


def get_world_size(group=None) -> int:
    """Returns the number of ranks of the group, −1 outside it."""
    _default()
    return -1 if _is_outside(group) else _given(group).size()


def get_backend(group=None) -> Backend:
    """Return the name that the group was made with, in lower case."""
    return _registered(group)._backend


def get_backend_config(group=None) -> str:
    """Returns the backend of each device: "cpu:gloo,cuda:nccl"."""
    return str(_registered(group)._config)


def get_node_local_rank(fallback_rank=None) -> int:
    """Return LOCAL_RANK of the environment, or `fallback_rank`."""
    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"])
    if fallback_rank is not None:
        return int(fallback_rank)
    raise RuntimeError(
        "LOCAL_RANK is not in the environment. Consider passing fallback_rank to allow `get_node_local_rank` to work, "
        "assuming you are not running in a multi-device context and want the code to run locally instead."
    )


def get_pg_count() -> int:
    """Returns how many groups were made since init_process_group."""
    return _registry.made


def set_timeout(timeout, group=None) -> None:
    """Set the default time limit of later operations: timedelta or seconds."""
    _registered(group).set_timeout(_as_timeout(timeout))


def get_process_group_ranks(group) -> list:
    """Returns the global ranks of a group, in the order of group ranks."""
    return list(_given(group)._ranks)


def get_group_rank(group, global_rank: int) -> int:
    """Return the rank in the group of a global rank."""
    if not isinstance(group, ProcessGroup) or group not in _registry.groups:
        raise ValueError(
            f"Group {group} is not registered, please create group with torch.distributed.new_group API"
        )
    if global_rank not in group._ranks:
        raise ValueError(f"Global rank {global_rank} is not part of group {group}")
    return group._ranks.index(global_rank)


def get_global_rank(group, group_rank: int) -> int:
    """Returns the global rank of a rank in the group."""
    if not isinstance(group, ProcessGroup) or group not in _registry.groups:
        raise ValueError(
            f"Group {group} is not registered, please create group with torch.distributed.new_group API"
        )
    if not 0 <= group_rank < group.size():
        raise ValueError(f"Group rank {group_rank} is not part of group {group}")
    return group._ranks[group_rank]


def _check_ranks(ranks, world):
    if not isinstance(ranks, (list, tuple, range)) and not hasattr(ranks, "__iter__"):
        raise TypeError("ranks must be a sequence of integers")
    try:
        ranks = [rank.__index__() for rank in ranks]
    except AttributeError:
        raise TypeError("ranks must be a sequence of integers") from None
    size = world.size()
    if len(ranks) > size:
        raise ValueError(
            f"the new group's world size should be less or equal to the world size set by init_process_group "
            f"({len(ranks)} ranks given, world_size={size})"
        )
    for rank in ranks:
        if not 0 <= rank < size:
            raise ValueError(
                f"Rank {rank} is out of range. Valid ranks are 0 to {size - 1} (world_size={size})"
            )
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"duplicate ranks are not allowed: {ranks}")
    if not ranks:
        raise ValueError("a group needs at least one rank")
    return ranks


def new_group(
    ranks=None,
    timeout=None,
    backend=None,
    pg_options=None,
    use_local_synchronization=False,
    group_desc=None,
    device_id=None,
    sort_ranks=True,
):
    """Make a group of some ranks. Only its members meet; for the others the call returns at once.

    Members must make equal sets in the same order, nothing else: a set that is made twice gives two groups.

    Args:
        ranks: global ranks; None is all of them.
        timeout: default of the group's operations: timedelta or seconds; None is the default group's.
        backend: as in init_process_group; None is the default group's.
        pg_options: accepted, not needed.
        use_local_synchronization: accepted: creation is always among the members only.
        group_desc: a name for texts.
        device_id: as in init_process_group.
        sort_ranks: group ranks follow the order of global ranks; otherwise that of `ranks`.

    Returns:
        A ProcessGroup, or GroupMember.NON_GROUP_MEMBER (−100) where the caller is not in `ranks`.

    Raises:
        ValueError, TypeError: ranks that are doubled, out of range or no integers.
        DistTimeoutError: members disagree about the set; names the lists.

    """
    world = _default()
    chosen = list(range(world.size())) if ranks is None else _check_ranks(ranks, world)
    if sort_ranks:
        chosen.sort()
    limit = None if timeout is None else _as_timeout(timeout)
    if backend is not None:
        name = Backend(str(backend))
        backends.check(name)
        config = BackendConfig(name)
    else:
        name, config = world._backend, world._config
    _registry.made += 1
    if world.rank() not in chosen:
        return GroupMember.NON_GROUP_MEMBER
    number = str(_registry.made - 1)
    made = ProcessGroup._create(world, tuple(chosen), limit, limit)
    made._backend, made._config, made._store = name, config, world._store
    made.group_name = number
    if use_local_synchronization:
        digest = hashlib.sha1("_".join(map(str, chosen)).encode(), usedforsecurity=False).hexdigest()
        made.group_name = f"{digest}_{number}"
    made.group_desc = group_desc or "undefined"
    made.bound_device_id = device_id if device_id is not None else world.bound_device_id
    _registry.groups.append(made)
    return made


def _accelerators() -> int:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return torch.cuda.device_count()
    return sum(1 for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdigit())


def new_subgroups(group_size=None, group=None, timeout=None, backend=None, pg_options=None, group_desc=None):
    """Cut the default group in consecutive groups of `group_size` ranks (None: as many as a host has GPUs).

    Returns:
        (the group of this rank, list of all groups; −100 stands for those of others).

    """
    if group_size is None:
        group_size = _accelerators()
        if group_size == 0:
            raise ValueError(
                "Default group size only takes effect when accelerators are there: give group_size"
            )
    if group_size <= 0:
        raise ValueError(f"The arg 'group_size' ({group_size}) must be positive")
    size = get_world_size()
    if group_size > size:
        raise ValueError(f"The arg 'group_size' ({group_size}) must not exceed the world size ({size})")
    if size % group_size:
        raise ValueError(f"The world size ({size}) must be divisible by 'group_size={group_size}'")
    lists = [list(range(first, first + group_size)) for first in range(0, size, group_size)]
    return new_subgroups_by_enumeration(lists, timeout, backend, pg_options, group_desc)


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list, timeout=None, backend=None, pg_options=None, group_desc=None
):
    """Make several groups that share no rank.

    Args:
        ranks_per_subgroup_list: one list of global ranks for each group.
        timeout: as in new_group.
        backend: as in new_group.
        pg_options: accepted, not needed.
        group_desc: a name for texts.

    Returns:
        (the group of this rank or None, list of all groups; −100 stands for those of others).

    """
    if not ranks_per_subgroup_list:
        raise ValueError("The arg 'ranks_per_subgroup_list' cannot be empty")
    seen: dict = {}
    for ranks in ranks_per_subgroup_list:
        for rank in ranks:
            if rank in seen:
                raise ValueError(f"Rank {rank} has appeared in both subgroup {seen[rank]} and {ranks}")
            seen[rank] = ranks
    mine = None
    made = []
    for ranks in ranks_per_subgroup_list:
        made.append(new_group(ranks, timeout, backend, pg_options, group_desc=group_desc))
        if get_rank() in ranks:
            mine = made[-1]
    return mine, made


def split_group(
    parent_pg=None, split_ranks=None, timeout=None, pg_options=None, group_desc=None, backend=None
):
    """Cut a group in parts: `split_ranks` lists the ranks *in the parent* of each part.

    Returns:
        The group of this rank, or None where it is in no part.

    """
    parent = _registered(parent_pg)
    if not split_ranks:
        raise ValueError("split_ranks cannot be None or empty")
    if len(split_ranks) > parent.size():
        raise ValueError(
            "the split group's size should be less or equal to the world_size set by init_process_group"
        )
    if len({rank for part in split_ranks for rank in part}) != sum(map(len, split_ranks)):
        raise ValueError("the split group cannot have duplicate ranks")
    for part in split_ranks:
        if any(not 0 <= rank < parent.size() for rank in part):
            raise ValueError(f"split ranks must be ranks of the parent, 0 to {parent.size() - 1}: {part}")
        if parent.rank() in part:
            ranks = [parent._ranks[rank] for rank in sorted(part)]
            return new_group(
                ranks,
                timeout,
                backend or parent._backend,
                pg_options,
                group_desc=group_desc,
                sort_ranks=False,
            )
    return None


def shrink_group(ranks_to_exclude, group=None, shrink_flags=SHRINK_DEFAULT, pg_options=None):
    """Return a group of the ranks that are not excluded; only they call it.

    Args:
        ranks_to_exclude: global ranks.
        group: None is the default group.
        shrink_flags: SHRINK_ABORT first ends what runs on `group`.
        pg_options: accepted, not needed.

    """
    parent = _registered(group)
    if not isinstance(ranks_to_exclude, (list, tuple, set)):
        raise TypeError("ranks_to_exclude must be a list of integers")
    out = set(ranks_to_exclude)
    if not out:
        raise ValueError("ranks_to_exclude cannot be empty")
    for rank in out:
        if rank not in parent._ranks:
            raise ValueError(f"Global rank {rank} is not part of group {parent}")
    if parent.rank() >= 0 and parent._ranks[parent.rank()] in out:
        raise RuntimeError("an excluded rank must not call shrink_group")
    if shrink_flags & SHRINK_ABORT:
        warnings.warn("shrink_group: running operations of the group end with AbortedError", stacklevel=2)
        parent.abort("shrink_group")
    left = [rank for rank in parent._ranks if rank not in out]
    return new_group(left, backend=parent._backend, sort_ranks=False)
