"""The default group: set-up, tear-down, and questions about it."""

import atexit
import contextlib
import io
import os
import sys
import time
from datetime import timedelta
from numbers import Integral, Real

from cdist import _core, backends, dump_signal
from cdist.backends import Backend, BackendConfig
from cdist.constants import get_debug_level
from cdist.errors import DistError, DistStoreError, PeerLostError
from cdist.process_group import GroupMember, ProcessGroup

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
    "get_group_rank",
    "get_global_rank",
    "get_process_group_ranks",
]


# How long a rank that leaves lets its queued operations and messages go out.
DRAIN_SECONDS = 2.0


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
    """Return whether the default group is there."""
    return _core._get_default_group() is not None


def is_torchelastic_launched() -> bool:
    """Return whether cdistrun or torchrun started this process."""
    return os.environ.get("TORCHELASTIC_RUN_ID") is not None


def _as_timeout(timeout):
    if isinstance(timeout, timedelta):
        return timeout
    if isinstance(timeout, Real) and not isinstance(timeout, bool):
        return timeout if isinstance(timeout, (int, float)) else float(timeout)  # NumPy's numbers too
    raise TypeError(
        f"Expected timeout argument to be of type datetime.timedelta, or a number of seconds, got {timeout!r}"
    )


def _bind_device(device_id):
    """Check a device_id: an int, a torch device, "cuda:1", or a device of another library."""
    if device_id is None:
        return None
    if isinstance(device_id, Integral):
        index = int(device_id)
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
        return Backend("nccl"), BackendConfig("undefined")
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
    """Meet the other ranks and make the default group. Every rank calls it.

    Args:
        backend: "gloo" (CPU), "nccl" (GPU alone: arrays in host memory are refused), "cpu:gloo,cuda:nccl", or
            None: what the machine has.
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
        enable_reconfigure: accepted, not needed.

    Raises:
        ValueError: called twice; a rank or world size that cannot be; bad device_id.
        AssertionError: arguments that exclude each other; unknown backend.
        RuntimeError: a backend that this machine does not have.
        RefusedError: two processes with one rank, other world sizes, wrong secret.
        DistTimeoutError, DistStoreError: others did not come in time.

    """
    if is_initialized():
        raise ValueError(
            "trying to initialize the default process group twice! Call destroy_process_group() in between"
        )
    device = _bind_device(device_id)
    name, config = _pick_backend(backend, device)
    limit = backends.default_timeout(name) if timeout is None else _as_timeout(timeout)
    try:
        made, store, rank = _meet(init_method, store, world_size, rank, limit)
    except (DistError, ValueError) as error:
        raise _as_the_callers(error) from error.__cause__
    made._use(name, config, store)
    made.group_name, made.group_desc, made.bound_device_id = "0", "default_pg", device_id
    _registry.groups = [made]
    _registry.made = 1
    _core._set_default_group(made)
    _install_hooks(rank)
    if device is not None and made._config.get_device_backend_map().get("cuda") == "nccl":
        _core._gpu_open(made, device)
    if os.environ.get("TORCH_DIST_INIT_BARRIER") == "1":
        _core.barrier()


def _as_the_callers(error):
    """Return an error of set-up without the frames of this package, of which it tells a user nothing."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith("cdist."):
        trace = trace.tb_next
    return error if trace is not None else error.with_traceback(None)


_INVALID_GROUP = "Invalid process group specified: it was destroyed before, or is none of this program's"
_NO_GROUP = "Default process group has not been initialized"


def _explain_mixture(error, trace):
    """Add a word to torch's complaint of a missing group where an import was forgotten."""
    if not isinstance(error, (ValueError, RuntimeError)) or _NO_GROUP not in str(error):
        return
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith("torch.distributed"):
        error.add_note(
            "The process group of this program is cdist's, and this call is torch's: import it from cdist "
            "(cdist.nn.parallel.DistributedDataParallel, cdist.utils.data.distributed.DistributedSampler, …)"
        )


def _torch_has_one():
    torch_distributed = sys.modules.get("torch.distributed")
    return hasattr(torch_distributed, "is_initialized") and torch_distributed.is_initialized()


def _meet(init_method, given, wanted_size, wanted_rank, limit):
    """Find a store and meet the others there; return the group, the store and this rank."""
    seconds = limit.total_seconds() if isinstance(limit, timedelta) else limit
    end = time.monotonic() + seconds
    left = limit
    _core._check_settings()
    get_debug_level()
    secret = _secret()
    from cdist.rendezvous import check_rank

    while True:
        store, rank, world_size = _find_store(init_method, given, wanted_size, wanted_rank, left)
        check_rank(rank, world_size)
        if rank == 0:
            _core._report_unknown_settings()
        try:
            made = ProcessGroup._open(store, rank, world_size, "0", limit, left, secret=secret)
        except DistStoreError:
            # The group before may have met at this address: until its rank 0 closes the server, a rank that
            # is ahead of it finds the old one. Everyone had joined that one already, which tells.
            late = given is None and getattr(_bottom(store), "_joined_late", False)
            left = max(end - time.monotonic(), 0)
            if not late or not left:
                raise
        else:
            return made, store, rank


def _bottom(store):
    return getattr(store, "_underlying_non_prefix_store", store)


def note_uncaught(error, trace):
    """Tell the other ranks and the recorder of an exception that ends this process."""
    _explain_mixture(error, trace)
    world = _core._get_default_group()
    if world is None:
        return
    with contextlib.suppress(Exception):
        lost = error.rank if isinstance(error, PeerLostError) and error.rank is not None else -1
        words = f"rank {world.rank()} ended with {type(error).__name__}: {error}".removesuffix(": ")
        world._announce_death(words[:900], lost)
    if os.environ.get("CDIST_DUMP_DIR"):
        from cdist.recorder import dump_uncaught

        with contextlib.suppress(Exception):
            dump_uncaught(world, error)


def _install_hooks(rank):
    """Peers learn at once when this rank dies of an exception; its traceback says which rank it is."""
    previous = sys.excepthook

    def excepthook(kind, error, trace):
        note_uncaught(error, trace)
        if not issubclass(kind, KeyboardInterrupt) and "TORCHELASTIC_ERROR_FILE" in os.environ:
            from cdist.launch.record import write_error

            write_error(error)  # for the launcher's report, as @record does
        text = io.StringIO()
        with contextlib.redirect_stderr(text):
            previous(kind, error, trace)
        # In one piece, so that the lines of several ranks do not mix.
        lines = text.getvalue().splitlines(keepends=True)
        sys.stderr.write("".join(f"[rank{rank}]: {line}" for line in lines))

    dump_signal.install()
    _registry.excepthook = (previous, excepthook)
    sys.excepthook = excepthook
    if not _registry.teardown:
        _registry.teardown = True
        atexit.register(_teardown)


def _teardown():
    """Close, at exit, what the program left open. Says a word only of operations still under way."""
    with contextlib.suppress(Exception):
        if not is_initialized():
            return
        rank = get_rank()
        try:
            pending = _drain(_registry.groups)
        except KeyboardInterrupt:  # who waits for the end of the program does not want to
            pending = sum(group._pending() for group in _registry.groups)
        _close_all()
        if pending:
            sys.stderr.write(
                f"[rank{rank}]: cdist: {pending} asynchronous operation(s) were not complete when the "
                f"program ended, and were aborted: call wait() on each Work\n"
            )


def _drain(groups):
    """Let what these groups owe the others end: operations that are queued, messages that were sent.

    Not while an exception is on its way (``finally: destroy_process_group()``): the others should know soon.
    Return how many operations did not come to a good end.
    """
    end = time.monotonic() + (DRAIN_SECONDS if sys.exc_info()[0] is None else 0)
    failed = 0
    for group in reversed(groups):
        begun = group._pending()
        failed += group._pending() if group._drain(end - time.monotonic()) else begun
    return failed


def _tell_failed_sends(world):
    """Tell on stderr of sends that failed, unless an error that was raised explains it."""
    count, first = world._untold()
    if count:
        known = f", the first {first}" if first else ""
        sys.stderr.write(
            f"[rank{get_rank()}]: cdist: {count} isend(s) failed and nobody waited for them{known}: "
            f"call wait() on each Work\n"
        )


def destroy_process_group(group=None) -> None:
    """Close a group, or with None (or WORLD) all of them. Local and quick; also after errors.

    In a group without an error, operations that are queued or run on a GPU and messages that were sent get up
    to 2 s to end, so that the other ranks are not left waiting. An ``isend`` that failed and that nobody
    waited for is told on stderr, unless an error that was raised explains it.

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
        raise AssertionError(
            "Process group cannot be None: there is no default group (init_process_group was not called, or "
            "destroy_process_group was called before)"
        )
    if group not in _registry.groups:
        raise ValueError(f"destroy_process_group: {_INVALID_GROUP}")
    if group is not world:
        _registry.groups.remove(group)
        try:
            _drain([group])
        finally:
            group.shutdown()
        return
    try:
        _drain(_registry.groups)
    finally:
        _close_all()


def _close_all():
    _tell_failed_sends(_core._get_default_group())
    for member in reversed(_registry.groups):
        member.shutdown()
    dump_signal.remove()
    _registry.groups = []
    _registry.made = 0
    _core._set_default_group(None)
    previous, mine = _registry.excepthook or (None, None)
    if mine is not None and sys.excepthook is mine:
        sys.excepthook = previous
    _registry.excepthook = None


def _default():
    try:
        return _core._need_default_group("")
    except ValueError as error:
        if not _torch_has_one():
            raise
        raise ValueError(
            f"{error} (torch.distributed has one, cdist has not: import cdist as dist)"
        ) from None


def _given(group):
    if group is None:
        return _default()
    return group


def _known(group):
    group = _given(group)
    if not isinstance(group, ProcessGroup):
        raise ValueError(f"Group {group!r} is not registered, please create group with cdist.new_group")
    return group


def _is_outside(group):
    return isinstance(group, int) and group == GroupMember.NON_GROUP_MEMBER


def _registered(group):
    world = _default()
    group = world if group is None else group
    if not isinstance(group, ProcessGroup) or group not in _registry.groups:
        raise ValueError(_INVALID_GROUP)
    return group


def get_rank(group=None) -> int:
    """Return this process's rank in the group, −1 outside it."""
    _default()
    return -1 if _is_outside(group) else _known(group).rank()


def get_world_size(group=None) -> int:
    """Return the number of ranks of the group, −1 outside it."""
    _default()
    return -1 if _is_outside(group) else _known(group).size()


def get_backend(group=None) -> Backend:
    """Return the name that the group was made with, in lower case."""
    return _registered(group)._backend


def get_backend_config(group=None) -> str:
    """Return the backend of each device: "cpu:gloo,cuda:nccl"."""
    return str(_registered(group)._config)


def get_node_local_rank(fallback_rank=None) -> int:
    """Return LOCAL_RANK of the environment, or `fallback_rank`."""
    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"])
    if fallback_rank is not None:
        return int(fallback_rank)
    raise RuntimeError(
        "LOCAL_RANK is not in the environment. Consider passing fallback_rank to allow `get_node_local_rank` "
        "to work, assuming you are not running in a multi-device context and want the code to run locally "
        "instead."
    )


def get_pg_count() -> int:
    """Return how many groups were made since init_process_group."""
    return _registry.made


def set_timeout(timeout, group=None) -> None:
    """Set the default time limit of later operations: timedelta or seconds."""
    _registered(group).set_timeout(_as_timeout(timeout))


def get_process_group_ranks(group) -> list[int]:
    """Return the global ranks of a group, in the order of group ranks.

    Raises:
        ValueError: no group, or the mark of one that the caller is not in (GroupMember.NON_GROUP_MEMBER).

    """
    group = _given(group)
    if _is_outside(group):
        raise ValueError(
            f"Invalid process group specified: rank {get_rank()} is not in it, and what new_group gave is "
            "the mark NON_GROUP_MEMBER, which does not know the ranks: keep the list that new_group was given"
        )
    return list(_known(group)._ranks)


def get_group_rank(group, global_rank: int) -> int:
    """Return the rank in the group of a global rank."""
    if not isinstance(group, ProcessGroup) or group not in _registry.groups:
        raise ValueError(f"Group {group} is not registered, please create group with cdist.new_group")
    if global_rank not in group._ranks:
        raise ValueError(f"Global rank {global_rank} is not part of group {group}")
    return group._ranks.index(global_rank)


def get_global_rank(group, group_rank: int) -> int:
    """Return the global rank of a rank in the group."""
    if not isinstance(group, ProcessGroup) or group not in _registry.groups:
        raise ValueError(f"Group {group} is not registered, please create group with cdist.new_group")
    if not 0 <= group_rank < group.size():
        raise ValueError(f"Group rank {group_rank} is not part of group {group}")
    return group._ranks[group_rank]
