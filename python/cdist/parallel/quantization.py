"""Communication hooks that send gradients as 8-bit integers, each rank with its own scale.

What the integers stand for is averaged.
"""

import torch

import cdist
from cdist.parallel.hooks import Later
from cdist.parallel.values import GradBucket

__all__ = ["quantization_perchannel_hook", "quantization_pertensor_hook"]

LEVELS = 255


def _scale_and_zero(rows):
    """Return, for each row, the scale and the level of zero: [min, max] and zero spread over 0…255."""
    low = rows.amin(dim=1).clamp(max=0)
    high = rows.amax(dim=1).clamp(min=0)
    scale = ((high - low) / float(LEVELS)).clamp(min=torch.finfo(torch.float32).eps)
    zero = (0 - torch.round(low / scale).to(torch.int)).clamp(0, LEVELS)
    return torch.stack((scale, zero.to(torch.float32)))


def _average_rows(group, rows):
    """Return a future of the mean over ranks of the rows (float32), which are sent as uint8."""
    world = cdist.get_world_size(group)
    mine = _scale_and_zero(rows)
    levels = torch.round(rows / mine[0][:, None]) + mine[1][:, None]
    levels = levels.clamp_(0, LEVELS).to(torch.uint8)
    scales = mine.new_empty((world, *mine.shape))
    everything = levels.new_empty((world, *levels.shape))
    cdist.all_gather_into_tensor(scales, mine, group=group)
    work = cdist.all_gather_into_tensor(everything, levels, group=group, async_op=True)

    def mean():
        total = torch.zeros_like(rows)
        for (scale, zero), part in zip(scales, everything, strict=True):
            total += scale[:, None] * (part.to(torch.float32) - zero[:, None])
        return total / world

    return Later(work, mean)


def quantization_pertensor_hook(process_group, bucket: GradBucket):
    """Send each bucket as bytes with one scale: a quarter of the traffic, 8 bits of each gradient."""
    buffer = bucket.buffer()
    future = _average_rows(process_group, buffer.to(torch.float32).view(1, -1))
    return future.then(lambda done: done.value().view(-1).to(buffer.dtype))


def quantization_perchannel_hook(process_group, bucket: GradBucket, bucket_size=512):
    """Send each bucket as bytes with a scale for each `bucket_size` elements: finer than one for all."""
    buffer = bucket.buffer()
    missing = bucket_size - buffer.numel() % bucket_size
    rows = torch.nn.functional.pad(buffer.to(torch.float32), (0, missing)).view(-1, bucket_size)
    future = _average_rows(process_group, rows)
    return future.then(lambda done: done.value().view(-1)[: buffer.numel()].to(buffer.dtype))
