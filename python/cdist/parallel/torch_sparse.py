"""Sparse gradients of torch's embeddings: gathered from all ranks and added up, beside the buckets.

In the buckets such a parameter has one element, which only tells that its gradient is ready.
"""

import numpy as np
import torch
from torch import nn

import cdist
from cdist import _core


class SparseGradients:
    """The part of TorchDataParallel that knows of sparse gradients."""

    def _find_sparse(self):
        """Weights of embeddings made with sparse=True get sparse gradients."""
        kinds = (nn.Embedding, nn.EmbeddingBag)
        ids = {id(m.weight) for m in self.module.modules() if isinstance(m, kinds) and m.sparse}
        self._sparse = [index for index, p in enumerate(self._params) if id(p) in ids]
        if self._sparse and self.reduce == "weights":
            raise RuntimeError("reduce='weights' does not go with sparse gradients (embeddings, sparse=True)")

    def _finish_sparse(self, given=None):
        """Reduce them; collective. `given` tells of which parameters some rank has one; None: of all."""
        if not self._sparse:
            return
        params = [self._params[index] for index in self._sparse]
        divisor = self._sync.divisor or cdist.get_world_size(self.process_group)
        given = given if given is None else [given[index] for index in self._sparse]
        average_sparse(params, given, self.process_group, divisor if self.reduce == "mean" else 1)


def marking_hook(reducer, index):
    """Return what torch calls when the gradient is complete: it counts and moves nothing."""

    def hook(param):
        if reducer.backward or reducer.owner._begin_backward():
            reducer.ready(index)

    return hook


def _parts(p):
    """Return the places (a row for each) and values of p.grad; without one: no rows."""
    if p.grad is None:
        return torch.empty(0, 1, dtype=torch.int64, device=p.device), p.new_empty(0, *p.shape[1:])
    grad = p.grad.detach()
    grad = grad.coalesce() if grad.is_sparse else grad.to_sparse(1)
    return grad.indices().t().contiguous(), grad.values()


def average_sparse(params, given, group, divisor):
    """Replace the gradients by the sum over the ranks, divided by `divisor`. Collective.

    A rank without a gradient takes part with no rows. `given`: which parameters get one where no rank had
    rows of it (None: all).
    """
    parts = [_parts(p) for p in params]
    world = cdist.get_world_size(group)
    rows = np.empty((world, len(params)), np.int64)
    mine = np.array([len(values) for _, values in parts], np.int64)
    cdist.all_gather_into_tensor(rows, mine, group=_core._host_side(group))
    for at, (p, mine) in enumerate(zip(params, parts, strict=True)):
        if rows[:, at].any():
            gathered = [_gather(part, rows[:, at], group) for part in mine]
        elif given is None or given[at]:
            gathered = mine
        else:
            continue
        indices, values = gathered
        total = torch.sparse_coo_tensor(
            indices.t(), values / divisor, p.shape, device=p.device, check_invariants=False
        )
        p.grad = total.coalesce()


def _gather(part, rows, group):
    """Put one under the other what all ranks have."""
    places = [part.new_empty(int(count), *part.shape[1:]) for count in rows]
    cdist.all_gather(places, part.contiguous(), group=group)
    return torch.cat(places)
