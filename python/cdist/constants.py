"""Reductions, time limits, debug levels and the option structures of torch.distributed."""

import enum
import os
import warnings
from datetime import timedelta

from cdist import _core

default_pg_timeout = timedelta(minutes=30)
"""Default time limit of operations."""
default_pg_nccl_timeout = timedelta(minutes=10)
"""The same for a backend that is exactly "nccl"."""


class RedOpType(enum.IntEnum):
    """Numbers of the reductions (torch's)."""

    SUM = 0
    AVG = 1
    PRODUCT = 2
    MIN = 3
    MAX = 4
    BAND = 5
    BOR = 6
    BXOR = 7
    PREMUL_SUM = 8

    def __str__(self):
        return f"RedOpType.{self.name}"

    @property
    def op(self):
        """Itself."""
        return self


class _ReduceOpMeta(type):
    def __instancecheck__(cls, thing):  # ReduceOp.SUM is a RedOpType, and yet a ReduceOp
        return isinstance(thing, RedOpType) or type.__instancecheck__(cls, thing)


class ReduceOp(_core.ReduceOp, metaclass=_ReduceOpMeta):
    """A reduction: ``ReduceOp.SUM`` and so on.

    The others are ``AVG``, ``PRODUCT``, ``MIN``, ``MAX``, ``BAND``, ``BOR``, ``BXOR`` and ``PREMUL_SUM``.
    ``ReduceOp(op, factor)`` carries the factor of ``PREMUL_SUM``: every input is multiplied by it before
    the sum.
    """

    RedOpType = RedOpType
    SUM = RedOpType.SUM
    AVG = RedOpType.AVG
    PRODUCT = RedOpType.PRODUCT
    MIN = RedOpType.MIN
    MAX = RedOpType.MAX
    BAND = RedOpType.BAND
    BOR = RedOpType.BOR
    BXOR = RedOpType.BXOR
    PREMUL_SUM = RedOpType.PREMUL_SUM

    @property
    def op(self) -> RedOpType:
        """The reduction without its factor."""
        return RedOpType(self._number)

    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self

    def __str__(self):
        return str(self.op)

    def __repr__(self):
        factor = f", factor={self.factor}" if self.op == RedOpType.PREMUL_SUM else ""
        return f"<ReduceOp {self.op}{factor}>"


def _make_nccl_premul_sum(factor: float) -> ReduceOp:
    """Return the reduction that multiplies every input by ``factor`` and sums; on every device."""
    return ReduceOp(ReduceOp.PREMUL_SUM, factor)


class _DeprecatedReduceOp:
    """``reduce_op.SUM`` and so on, the names before ReduceOp."""

    def __getattr__(self, name):
        if name not in RedOpType.__members__:
            raise AttributeError(name)
        warnings.warn("`reduce_op` is deprecated, please use `ReduceOp` instead", FutureWarning, stacklevel=2)
        return RedOpType[name]


reduce_op = _DeprecatedReduceOp()


def supports_complex(reduceOp) -> bool:
    """Return whether the reduction is defined for complex numbers."""
    return _core._reduces(reduceOp, "complex64")


_MOVES = frozenset(
    [
        "broadcast",
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_single",
        "gather",
        "scatter",
        "all_to_all",
        "all_to_all_single",
        "send",
        "recv",
        "isend",
        "irecv",
        "barrier",
    ]
)
_REDUCTIONS = frozenset(
    ["all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single"]
)


def supports(op, dtype, device="cpu") -> bool:
    """Return whether an operation is offered for a dtype on a device.

    Args:
        op: a ReduceOp (for the reducing operations), or the name of an operation ("broadcast").
        dtype: anything that numpy.dtype takes, a torch dtype, or a name ("bfloat16").
        device: "cpu" or "cuda".

    """
    kind = str(getattr(device, "type", device)).partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, not {device!r}")
    if isinstance(op, str):
        if op in _MOVES:
            return True
        if op not in _REDUCTIONS:
            raise ValueError(f"unknown operation {op!r}")
        op = ReduceOp.SUM
    return _core._reduces(op, dtype) and (kind == "cpu" or _core._gpu_reduces(op, dtype))


class DebugLevel(enum.IntEnum):
    """How much is checked and said."""

    OFF = 0
    INFO = 1
    DETAIL = 2

    def __str__(self):
        return f"DebugLevel.{self.name}"


def _level_from_env() -> DebugLevel:
    for variable in ("CDIST_DEBUG", "TORCH_DISTRIBUTED_DEBUG"):
        name = os.environ.get(variable)
        if name:
            try:
                return DebugLevel[name.upper()]
            except KeyError:
                raise ValueError(f"{variable}={name!r} is none of OFF, INFO, DETAIL") from None
    return DebugLevel.OFF


_debug_level: DebugLevel | None = None


def get_debug_level() -> DebugLevel:
    """Return the debug level: what was set, or else what the environment says.

    CDIST_DEBUG goes before TORCH_DISTRIBUTED_DEBUG. ValueError where it is none of OFF, INFO, DETAIL.
    """
    return _level_from_env() if _debug_level is None else _debug_level


def set_debug_level(level: DebugLevel) -> None:
    """Set the debug level: OFF, or INFO or DETAIL for extra checks."""
    global _debug_level
    _debug_level = DebugLevel(level)


def set_debug_level_from_env() -> None:
    """Set the debug level from the environment again. ValueError as in get_debug_level."""
    set_debug_level(_level_from_env())


class _Options:
    """A structure of torch's low-level calls: attributes with defaults, given by keyword or set later."""

    _fields: dict = {}

    def __init__(self, **fields):
        unknown = fields.keys() - self._fields.keys()
        if unknown:
            raise TypeError(
                f"{type(self).__name__}() got an unexpected keyword argument {sorted(unknown)[0]!r}"
            )
        for name, default in self._fields.items():
            setattr(self, name, fields.get(name, default))

    def __repr__(self):
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in vars(self).items())})"


_UNSET = timedelta(milliseconds=-1)  # "the group's"


def _options(name, **fields):
    fields |= {"timeout": _UNSET, "asyncOp": True}
    about = {"_fields": fields, "__module__": __name__, "__doc__": f"Options of {name[:-7]}."}
    return type(name, (_Options,), about)


AllreduceOptions = _options("AllreduceOptions", reduceOp=ReduceOp.SUM, sparseIndices=None)
AllreduceCoalescedOptions = _options("AllreduceCoalescedOptions", reduceOp=ReduceOp.SUM)
BroadcastOptions = _options("BroadcastOptions", rootRank=0, rootTensor=0)
ReduceOptions = _options("ReduceOptions", reduceOp=ReduceOp.SUM, rootRank=0, rootTensor=0)
AllgatherOptions = _options("AllgatherOptions")
GatherOptions = _options("GatherOptions", rootRank=0)
ScatterOptions = _options("ScatterOptions", rootRank=0)
ReduceScatterOptions = _options("ReduceScatterOptions", reduceOp=ReduceOp.SUM)
AllToAllOptions = _options("AllToAllOptions")
BarrierOptions = _options("BarrierOptions", device_ids=None, device=None)
