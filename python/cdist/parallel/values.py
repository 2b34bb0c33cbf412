"""Values that users of DistributedDataParallel over torch modules give and get; there without torch too."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["GradBucket", "MixedPrecision"]


@dataclass
class MixedPrecision:
    """Dtypes for DistributedDataParallel(…, mixed_precision=MixedPrecision(…)); None leaves a dtype as it is.

    Attributes:
        param_dtype: of parameters and of floating point inputs during forward and backward. Outside of them,
            for the optimizer and in checkpoints, parameters keep their own dtype.
        reduce_dtype: in which gradients are reduced; None: param_dtype. Gradients then get the parameters'
            own dtype.
        buffer_dtype: floating point buffers are cast to it once, at construction.

    """

    param_dtype: "torch.dtype | None" = None
    reduce_dtype: "torch.dtype | None" = None
    buffer_dtype: "torch.dtype | None" = None


class GradBucket:
    """What a communication hook gets: the gradients of one bucket, as one flat tensor and one by one."""

    def __init__(self, index, buffer, gradients, parameters, is_last):
        self._index = index
        self._buffer = buffer
        self._gradients = gradients
        self._parameters = parameters
        self._is_last = is_last

    def index(self):
        """Return the number of the bucket: 0 holds the gradients that are ready first."""
        return self._index

    def buffer(self):
        """Return all gradients of the bucket, one behind the other, as a flat tensor."""
        return self._buffer

    def set_buffer(self, tensor):
        """Replace the flat tensor (of the same size)."""
        self._buffer = tensor

    def gradients(self):
        """Return the gradients as views into the flat tensor."""
        return self._gradients

    def parameters(self):
        """Return the parameters, in the order of the gradients."""
        return self._parameters

    def is_last(self):
        """Return whether this is the last bucket of the step."""
        return self._is_last
