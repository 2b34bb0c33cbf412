"""Types of the C extension. Docstrings are on the functions themselves."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

Array = Any  # numpy.ndarray, torch.Tensor, or anything with DLPack, an array interface or the buffer protocol
Arrays = Sequence[Array]
Rank = int | None
Timeout = float | timedelta | None

class ProcessGroup:
    def rank(self) -> int: ...
    def size(self) -> int: ...
    def abort(self, why: str | None = None, /) -> None: ...
    def shutdown(self) -> None: ...
    def set_timeout(self, timeout: float | timedelta, /) -> None: ...
    @property
    def _ranks(self) -> tuple[int, ...]: ...
    @property
    def _transport(self) -> str: ...
    @property
    def _sequence(self) -> int: ...
    @property
    def _timeout(self) -> float: ...

class Work:
    def wait(self, timeout: Timeout = None) -> bool: ...
    def is_completed(self) -> bool: ...
    def is_success(self) -> bool: ...
    def exception(self) -> Exception | None: ...
    def result(self) -> list[Array]: ...
    def get_future(self) -> Any: ...
    def source_rank(self) -> int: ...
    def synchronize(self) -> None: ...
    def block_current_stream(self) -> None: ...
    def boxed(self) -> Work: ...
    def unbox(self) -> Work: ...
    def _source_rank(self) -> int: ...
    def _get_op_type(self) -> str: ...
    def _get_sequence_number(self) -> int: ...
    def _get_duration(self) -> float: ...

class ReduceOp:
    def __init__(self, op: Any, factor: float | None = None) -> None: ...
    @property
    def factor(self) -> float: ...

Group = ProcessGroup | int | None  # int: outside of the group
Result = Work | None  # a Work with async_op=True

def all_reduce(
    tensor: Array, op: Any = 0, group: Group = None, async_op: bool = False, timeout: Timeout = None
) -> Result: ...
def broadcast(
    tensor: Array,
    src: Rank = None,
    group: Group = None,
    async_op: bool = False,
    group_src: Rank = None,
    timeout: Timeout = None,
) -> Result: ...
def reduce(
    tensor: Array,
    dst: Rank = None,
    op: Any = 0,
    group: Group = None,
    async_op: bool = False,
    group_dst: Rank = None,
    timeout: Timeout = None,
) -> Result: ...
def all_gather(
    tensor_list: Arrays, tensor: Array, group: Group = None, async_op: bool = False, timeout: Timeout = None
) -> Result: ...
def all_gather_into_tensor(
    output_tensor: Array,
    input_tensor: Array,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Result: ...
def gather(
    tensor: Array,
    gather_list: Arrays | None = None,
    dst: Rank = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: Rank = None,
    timeout: Timeout = None,
) -> Result: ...
def scatter(
    tensor: Array,
    scatter_list: Arrays | None = None,
    src: Rank = None,
    group: Group = None,
    async_op: bool = False,
    group_src: Rank = None,
    timeout: Timeout = None,
) -> Result: ...
def reduce_scatter(
    output: Array,
    input_list: Arrays,
    op: Any = 0,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Result: ...
def reduce_scatter_tensor(
    output: Array,
    input: Array,
    op: Any = 0,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Result: ...
def all_to_all(
    output_tensor_list: Arrays,
    input_tensor_list: Arrays,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Result: ...
def all_to_all_single(
    output: Array,
    input: Array,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Result: ...
def barrier(
    group: Group = None, async_op: bool = False, device_ids: Any = None, timeout: Timeout = None
) -> Result: ...
def send(
    tensor: Array,
    dst: Rank = None,
    group: Group = None,
    tag: int = 0,
    group_dst: Rank = None,
    timeout: Timeout = None,
) -> None: ...
def recv(
    tensor: Array,
    src: Rank = None,
    group: Group = None,
    tag: int = 0,
    group_src: Rank = None,
    timeout: Timeout = None,
) -> int: ...
def isend(
    tensor: Array,
    dst: Rank = None,
    group: Group = None,
    tag: int = 0,
    group_dst: Rank = None,
    timeout: Timeout = None,
) -> Work | None: ...
def irecv(
    tensor: Array,
    src: Rank = None,
    group: Group = None,
    tag: int = 0,
    group_src: Rank = None,
    timeout: Timeout = None,
) -> Work | None: ...

_all_gather_base = all_gather_into_tensor
_reduce_scatter_base = reduce_scatter_tensor

def __getattr__(name: str) -> Any: ...  # the rest is private
def _gpu_open(group: Any, index: int) -> dict[str, Any]: ...
def _gpu_alloc(group: Any, bytes: int, plain: bool = False) -> int: ...
def _gpu_facts(array: Any) -> tuple[int, str, tuple[int, ...], int, int] | None: ...
def _gpu_pack(
    group: Any, arrays: list[Any], addresses: list[int], bytes: list[int], stream: int, back: bool
) -> None: ...
def _gpu_release(group: Any, address: int) -> None: ...
def _gpu_coalesce_begin(group: Any, tensor: Any) -> bool: ...
def _gpu_coalesce_end(group: Any) -> None: ...
