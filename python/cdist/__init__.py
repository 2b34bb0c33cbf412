"""cdist: the interface of torch.distributed on a C library of its own, for NumPy, CuPy, torch and JAX.

Started by ``cdistrun --nproc-per-node 2 script.py``, in every process::

    import numpy as np
    import cdist as dist

    dist.init_process_group()
    x = np.full(4, dist.get_rank() + 1.0)
    dist.all_reduce(x)                # in place: the sum over all processes
    dist.destroy_process_group()

Each name has its own help: ``help(cdist.all_reduce)``. ``python -m cdist.settings`` lists the environment
variables that are read, ``cdistrun --help`` the launcher's options.
"""

import importlib
import sys

from cdist._core import Work
from cdist.backends import (
    Backend,
    BackendConfig,
    get_default_backend_for_device,
    is_backend_available,
    is_gloo_available,
    is_mpi_available,
    is_nccl_available,
    is_ucc_available,
    is_xccl_available,
)
from cdist.collectives import _all_gather_base as _all_gather_base
from cdist.collectives import _coalescing_manager as _coalescing_manager
from cdist.collectives import _reduce_scatter_base as _reduce_scatter_base
from cdist.collectives import (
    all_gather,
    all_gather_coalesced,
    all_gather_into_tensor,
    all_gather_single,
    all_gather_v,
    all_reduce,
    all_reduce_coalesced,
    all_to_all,
    all_to_all_single,
    barrier,
    broadcast,
    gather,
    gather_into_tensor,
    gather_single,
    monitored_barrier,
    reduce,
    reduce_scatter,
    reduce_scatter_single,
    reduce_scatter_tensor,
    scatter,
)
from cdist.constants import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    DebugLevel,
    GatherOptions,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    default_pg_timeout,
    get_debug_level,
    reduce_op,
    set_debug_level,
    set_debug_level_from_env,
    supports,
    supports_complex,
)
from cdist.constants import _make_nccl_premul_sum as _make_nccl_premul_sum
from cdist.errors import (
    AbortedError,
    DistBackendError,
    DistError,
    DistNetworkError,
    DistStoreError,
    DistStoreTimeoutError,
    DistTimeoutError,
    MismatchError,
    PeerLostError,
    QueueEmptyError,
    RefusedError,
)
from cdist.groups import (
    destroy_process_group,
    get_backend,
    get_backend_config,
    get_global_rank,
    get_group_rank,
    get_node_local_rank,
    get_pg_count,
    get_process_group_ranks,
    get_rank,
    get_world_size,
    init_process_group,
    is_available,
    is_initialized,
    is_torchelastic_launched,
    set_timeout,
)
from cdist.p2p import P2POp, batch_isend_irecv, irecv, isend, recv, send
from cdist.process_group import GroupMember, GroupName, ProcessGroup, group
from cdist.rendezvous import register_rendezvous_handler, rendezvous  # eager: the name must stay the function
from cdist.subgroups import new_group, new_subgroups, new_subgroups_by_enumeration, shrink_group, split_group

TYPE_CHECKING = False
if TYPE_CHECKING:  # what _LAZY loads, for editors and type checkers
    from cdist.debugging import breakpoint, record_comm
    from cdist.device_mesh import DeviceMesh, init_device_mesh
    from cdist.elastic import shrink
    from cdist.futures import Future
    from cdist.memory import empty
    from cdist.multiprocessing import spawn
    from cdist.objects import (
        all_gather_object,
        broadcast_object_list,
        gather_object,
        recv_object_list,
        scatter_object_list,
        send_object_list,
        set_allow_pickle,
    )
    from cdist.parallel import (
        DataParallel,
        DistributedDataParallel,
        GradBucket,
        GradientReducer,
        Parameter,
    )
    from cdist.parallel import Join as Join
    from cdist.parallel import Joinable as Joinable
    from cdist.parallel import JoinHook as JoinHook
    from cdist.recorder import dump
    from cdist.sampler import DistributedSampler
    from cdist.store import FileStore, HashStore, PrefixStore, Store, TCPStore

# name → module that is imported when the name is first asked for
_LAZY = {
    **dict.fromkeys(
        [
            "all_gather_object",
            "gather_object",
            "broadcast_object_list",
            "scatter_object_list",
            "send_object_list",
            "recv_object_list",
            "set_allow_pickle",
        ],
        "cdist.objects",
    ),
    "empty": "cdist.memory",
    "Future": "cdist.futures",
    **dict.fromkeys(["DeviceMesh", "init_device_mesh"], "cdist.device_mesh"),
    **dict.fromkeys(["Store", "TCPStore", "FileStore", "HashStore", "PrefixStore"], "cdist.store"),
    "DistributedSampler": "cdist.sampler",
    **dict.fromkeys(
        [
            "DataParallel",
            "DistributedDataParallel",
            "GradientReducer",
            "Parameter",
            "GradBucket",
            "Join",
            "Joinable",
            "JoinHook",
        ],
        "cdist.parallel",
    ),
    **dict.fromkeys(["breakpoint", "record_comm"], "cdist.debugging"),
    "dump": "cdist.recorder",
    "shrink": "cdist.elastic",
    "spawn": "cdist.multiprocessing",
}
_LAZY_MODULES = frozenset(
    [
        "collectives",
        "constants",
        "cuda",
        "debugging",
        "device_mesh",
        "distributed_c10d",
        "doctor",
        "elastic",
        "errors",
        "futures",
        "launch",
        "memory",
        "multiprocessing",
        "nn",
        "objects",
        "optim",
        "p2p",
        "parallel",
        "recorder",
        "run",
        "sampler",
        "settings",
        "store",
        "testing",
        "utils",
        "algorithms",
    ]
)

__version__ = "0.1.0"

__all__ = [
    # set-up
    "is_available",
    "init_process_group",
    "destroy_process_group",
    "is_initialized",
    "is_torchelastic_launched",
    "get_rank",
    "get_world_size",
    "get_node_local_rank",
    "get_backend",
    "get_backend_config",
    "get_pg_count",
    "set_timeout",
    # groups
    "ProcessGroup",
    "group",
    "GroupMember",
    "GroupName",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "split_group",
    "shrink_group",
    "get_group_rank",
    "get_global_rank",
    "get_process_group_ranks",
    "DeviceMesh",
    "init_device_mesh",
    # collectives
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_gather_v",
    "gather",
    "gather_into_tensor",
    "gather_single",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "monitored_barrier",
    "all_reduce_coalesced",
    "all_gather_coalesced",
    "supports",
    "supports_complex",
    "empty",
    # between two ranks
    "send",
    "recv",
    "isend",
    "irecv",
    "P2POp",
    "batch_isend_irecv",
    # objects
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
    "set_allow_pickle",
    # values
    "ReduceOp",
    "reduce_op",
    "Work",
    "Future",
    "AllreduceOptions",
    "AllreduceCoalescedOptions",
    "AllgatherOptions",
    "AllToAllOptions",
    "BarrierOptions",
    "BroadcastOptions",
    "GatherOptions",
    "ReduceOptions",
    "ReduceScatterOptions",
    "ScatterOptions",
    # errors
    "DistError",
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "DistTimeoutError",
    "DistStoreTimeoutError",
    "PeerLostError",
    "MismatchError",
    "AbortedError",
    "RefusedError",
    "QueueEmptyError",
    # stores
    "Store",
    "TCPStore",
    "FileStore",
    "HashStore",
    "PrefixStore",
    "rendezvous",
    "register_rendezvous_handler",
    # training
    "DistributedDataParallel",
    "DataParallel",
    "GradientReducer",
    "Parameter",
    "GradBucket",
    "DistributedSampler",
    "spawn",
    # failures
    "dump",
    "shrink",
    "breakpoint",
    "record_comm",
    # backends and debugging
    "Backend",
    "BackendConfig",
    "is_backend_available",
    "is_gloo_available",
    "is_nccl_available",
    "is_mpi_available",
    "is_ucc_available",
    "is_xccl_available",
    "get_default_backend_for_device",
    "DebugLevel",
    "get_debug_level",
    "set_debug_level",
    "set_debug_level_from_env",
    "default_pg_timeout",
]


def __getattr__(name):
    home = _LAZY.get(name)
    if home is not None:
        value = getattr(importlib.import_module(home), name)
        globals()[name] = value
        return value
    if name in _LAZY_MODULES:
        return importlib.import_module(f"cdist.{name}")
    # With name and object Python can say which one was meant.
    raise AttributeError(f"module 'cdist' has no attribute {name!r}", name=name, obj=sys.modules[__name__])


def __dir__():
    return sorted(set(globals()) | set(_LAZY) | _LAZY_MODULES)
