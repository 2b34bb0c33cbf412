"""PowerSGD: sends two thin matrices P and Q with P·Qᵀ ≈ gradient in place of it, with error feedback.

After Vogels et al., 2019.
"""

import math

import numpy as np
import torch

import cdist
from cdist.parallel.hooks import Later, average
from cdist.parallel.values import GradBucket

__all__ = ["PowerSGDState", "batched_powerSGD_hook", "powerSGD_hook"]


class PowerSGDState:
    """What PowerSGD keeps from step to step.

    `matrix_approximation_rank`: columns of P and Q. Until `start_powerSGD_iter` gradients are averaged as
    they are. A matrix is compressed if that saves at least `min_compression_rate`. `use_error_feedback`: what
    a step lost is added to the next. `warm_start`: Q of a step starts from the last one. `random_seed`: of
    the first Q; the same on all ranks.
    """

    def __init__(
        self,
        process_group,
        matrix_approximation_rank=1,
        start_powerSGD_iter=1000,
        min_compression_rate=2,
        use_error_feedback=True,
        warm_start=True,
        orthogonalization_epsilon=0,
        random_seed=0,
        compression_stats_logging_frequency=10000,
        batch_tensors_with_same_shape=False,
    ):
        if (use_error_feedback or warm_start) and start_powerSGD_iter <= 1:
            raise ValueError(
                "Expect `start_powerSGD_iter` > 1 if `use_error_feedback` or `warm_start` is enabled, "
                "because PowerSGD can only be applied after the first two iterations in DDP."
            )
        self.process_group = process_group
        self.matrix_approximation_rank = matrix_approximation_rank
        self.start_powerSGD_iter = start_powerSGD_iter
        self.min_compression_rate = min_compression_rate
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.orthogonalization_epsilon = orthogonalization_epsilon
        self.rng = np.random.RandomState(random_seed)
        self.compression_stats_logging_frequency = compression_stats_logging_frequency
        self.batch_tensors_with_same_shape = batch_tensors_with_same_shape
        self.iter = 0
        self.error_dict = {}
        self.q_memory_dict = {}
        self.elements_before = self.elements_after = 0

    def __getstate__(self):
        """Return what a checkpoint holds: all but the process group, which belongs to its process."""
        return {**self.__dict__, "process_group": None}

    def __setstate__(self, state):
        """Take the default process group; set ``process_group`` afterwards where it was another."""
        self.__dict__.update(state)
        self.process_group = cdist.group.WORLD

    def compression_stats(self):
        """Return (rate, elements before, elements after) of the compressed steps."""
        rate = self.elements_before / self.elements_after if self.elements_after else 0
        return rate, self.elements_before, self.elements_after

    def maybe_increase_iter(self, bucket):
        """Count a step at its last bucket."""
        if bucket.is_last():
            self.iter += 1

    def first_qs(self, matrices):
        """Return a random Q for each matrix: the same on all ranks."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.rng.randint(1_000_000_000))
            sizes = [(m.shape[1], min(self.matrix_approximation_rank, *m.shape)) for m in matrices]
            return [
                torch.randn(size, device="cpu", dtype=m.dtype).to(m.device)
                for size, m in zip(sizes, matrices, strict=True)
            ]


def orthogonalize(matrix, epsilon=0.0):
    """Make the columns orthonormal, in place."""
    if matrix.dtype in (torch.float32, torch.float64) and matrix.shape[1] > 2 and epsilon == 0:
        matrix.copy_(torch.linalg.qr(matrix)[0])
        return
    for i in range(matrix.shape[1]):
        column = matrix[:, i : i + 1]
        norm = torch.norm(column) + epsilon
        if norm > 0:
            column /= norm
        if i + 1 < matrix.shape[1]:
            rest = matrix[:, i + 1 :]
            rest -= torch.sum(column * rest, dim=0) * column


def _worth_it(shape, state):
    rows, columns = shape
    rank = min(rows, columns, state.matrix_approximation_rank)
    return (rows + columns) * rank * state.min_compression_rate < rows * columns


def _with_error(state, key, tensor):
    """Add what the last step lost; return a copy of the sum, or None without error feedback."""
    if not state.use_error_feedback:
        return None
    if key in state.error_dict:
        tensor.add_(state.error_dict[key])
    return tensor.clone()


def _approximate(state, key, matrices):
    """Replace each matrix by the average, over ranks, of its low-rank approximation; two messages for all."""
    known = state.q_memory_dict.get(key) if state.warm_start else None
    if known is None:
        known = state.first_qs(matrices)
    for q in known:
        orthogonalize(q, state.orthogonalization_epsilon)
    world = cdist.get_world_size(state.process_group)
    ps = [m @ q for m, q in zip(matrices, known, strict=True)]
    _sum_together(state, ps)
    for p in ps:
        orthogonalize(p, state.orthogonalization_epsilon)
    qs = [m.t() @ p for m, p in zip(matrices, ps, strict=True)]
    _sum_together(state, qs)
    for matrix, p, q in zip(matrices, ps, qs, strict=True):
        q.div_(world)
        torch.matmul(p, q.t(), out=matrix)
        state.elements_before += matrix.numel()
        state.elements_after += p.numel() + q.numel()
    if state.warm_start:
        state.q_memory_dict[key] = qs


def _sum_together(state, tensors):
    flat = torch.cat([t.reshape(-1) for t in tensors])
    cdist.all_reduce(flat, group=state.process_group)
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def powerSGD_hook(state: PowerSGDState, bucket: GradBucket):
    """Compress each matrix of the bucket that is worth it; average the rest."""
    buffer = bucket.buffer()
    if state.iter < state.start_powerSGD_iter:
        state.maybe_increase_iter(bucket)
        return average(state.process_group, buffer)
    lengths = [g.numel() for g in bucket.gradients()]
    parts = buffer.split(lengths)
    key = bucket.index()
    before = _with_error(state, key, buffer)
    matrices, plain = [], []
    for part, gradient in zip(parts, bucket.gradients(), strict=True):
        rows = gradient.shape[0] if gradient.dim() > 1 else 1
        matrix = part.view(rows, -1) if part.numel() else part
        if gradient.dim() > 1 and part.numel() and _worth_it(matrix.shape, state):
            matrices.append(matrix)
        else:
            plain.append(part)
    waiting = None
    if plain:
        flat = torch.cat([p.reshape(-1) for p in plain])
        state.elements_before += flat.numel()
        state.elements_after += flat.numel()
        waiting = average(state.process_group, flat)
    if matrices:
        _approximate(state, key, matrices)

    def finish():
        if waiting is not None:
            together = waiting.wait()
            for part, mean in zip(plain, together.split([p.numel() for p in plain]), strict=True):
                part.copy_(mean)
        if before is not None:
            state.error_dict[key] = before.sub_(buffer)
        return buffer

    state.maybe_increase_iter(bucket)
    return Later(None, finish)


def batched_powerSGD_hook(state: PowerSGDState, bucket: GradBucket):
    """Compress the whole bucket as one square matrix: faster and less exact."""
    buffer = bucket.buffer()
    if state.iter < state.start_powerSGD_iter:
        state.maybe_increase_iter(bucket)
        return average(state.process_group, buffer)
    side = math.ceil(math.sqrt(buffer.numel()))
    padded = buffer.new_zeros(side * side)
    padded[: buffer.numel()] = buffer
    before = _with_error(state, bucket.index(), padded)
    _approximate(state, bucket.index(), [padded.view(side, side)])
    if before is not None:
        state.error_dict[bucket.index()] = before.sub_(padded)
    buffer.copy_(padded[: buffer.numel()])
    state.maybe_increase_iter(bucket)
    return Later.of(buffer)
