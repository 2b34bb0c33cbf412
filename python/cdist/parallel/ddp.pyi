"""What type checkers see of DistributedDataParallel: the class over torch modules.

It has the methods of the one over array modules beside them. At run time the class is chosen by the module.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal, TypeVar

import torch

from cdist.device_mesh import DeviceMesh
from cdist.parallel.join import Joinable, JoinHook
from cdist.parallel.values import MixedPrecision
from cdist.process_group import ProcessGroup

_Batch = TypeVar("_Batch")

def is_torch_module(module: object) -> bool: ...
def concrete(cls: type, implementation: type) -> type: ...

class DistributedDataParallel(torch.nn.Module, Joinable):
    module: Any
    process_group: ProcessGroup
    require_backward_grad_sync: bool
    def __init__(
        self,
        module: Any,
        device_ids: Any = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: MixedPrecision | None = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        reduce: Literal["mean", "sum", "weights"] = "mean",
    ) -> None: ...
    def train(self, mode: bool = True) -> Any: ...
    def forward(self, *inputs: Any, **kwargs: Any) -> Any: ...
    def no_sync(self) -> AbstractContextManager[None]: ...
    def accumulate(self, steps: int, batches: Iterable[_Batch] | None = None) -> Iterator[Any]: ...
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> AbstractContextManager[Any]: ...
    def join_hook(self, **kwargs: Any) -> JoinHook: ...
    @property
    def join_device(self) -> Any: ...
    @property
    def join_process_group(self) -> ProcessGroup: ...
    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None: ...
    def set_weight(self, weight: float) -> None: ...
    def set_trainable(self, names: Iterable[str]) -> None: ...
    def broadcast_parameters(self, src: int = 0) -> None: ...
    def broadcast_buffers_now(self, src: int = 0) -> None: ...
    def will_sync_module_buffers(self) -> bool: ...
    @property
    def logger(self) -> None: ...
    @property
    def bucket_bytes_cap(self) -> int: ...
    @property
    def bucket_bytes_cap_default(self) -> bool: ...
    @property
    def bucket_bytes_cap_list(self) -> list[int]: ...
    @property
    def named_module_buffers(self) -> dict[str, torch.Tensor]: ...
    @property
    def modules_buffers(self) -> list[torch.Tensor]: ...
    # Over array modules alone.
    def synchronize(self) -> None: ...
    def optimizer_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any: ...
