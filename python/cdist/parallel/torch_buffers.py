"""Buffers of torch modules, made equal on all ranks by one message per device."""

from itertools import chain
from operator import attrgetter, is_

import torch

import cdist


def modules_of(module):
    """Return a module and all in it, each once."""
    found, seen, todo = [], {id(module)}, [module]
    while todo:
        inner = todo.pop()
        found.append(inner)
        for child in inner._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                todo.append(child)
    return found


def buffers_of(module):
    """Buffers of a module and of all in it, each once: named_buffers() without the costly names."""
    found = {id(b): b for inner in modules_of(module) for b in inner._buffers.values() if b is not None}
    return list(found.values())


def kinds_of(tensors):
    """Return lists of tensors of one dtype, the largest elements first, so that each kind lies aligned."""
    kinds = {}
    for tensor in tensors:
        kinds.setdefault(tensor.dtype, []).append(tensor)
    return sorted(kinds.values(), key=lambda same: -same[0].element_size())


def broadcast_tensors(tensors, group, src=0):
    """Give every rank the buffers of group rank `src`. Collective.

    One message per device; writes only where values differ. Those on the meta device have none.
    """
    devices = {}
    for tensor in tensors:
        if tensor.is_meta:
            continue
        devices.setdefault(tensor.device, []).append(tensor)
    with torch.no_grad():
        for device, there in devices.items():
            if device.type == "cuda":
                Message(there).broadcast(group, src)
            else:
                _broadcast_together(kinds_of(there), group, src)


# Tensors below the first go together, in messages of at most the second: one by one they cost 20 to 50 µs
# of Python each, together they take memory for copies.
_ALONE_BYTES, _MESSAGE_BYTES = 256 << 10, 16 << 20


def broadcast_many(tensors, group, src=0):
    """Give every rank the tensors of group rank `src`, with little memory beside theirs. Collective.

    Large ones, and those that have no plain memory, by themselves and in place; the others together.
    """
    small, held = [], 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if tensor.is_meta or tensor.layout != torch.strided or size >= _ALONE_BYTES:
            cdist.broadcast(tensor, group_src=src, group=group)
            continue
        if held + size > _MESSAGE_BYTES:
            broadcast_tensors(small, group, src)
            small, held = [], 0
        small.append(tensor)
        held += size
    broadcast_tensors(small, group, src)


def _broadcast_together(kinds, group, src):
    mine = [torch._utils._flatten_dense_tensors(same) for same in kinds]
    parts = [flat.view(torch.uint8) for flat in mine]
    root = cdist.get_rank(group) == src
    together = torch.cat(parts) if len(parts) > 1 else parts[0] if root else parts[0].clone()
    cdist.broadcast(together, group_src=src, group=group)
    if root:
        return
    for same, part, new in zip(kinds, parts, together.split([len(part) for part in parts]), strict=True):
        if not torch.equal(part, new):
            values = new.view(same[0].dtype)
            _overwrite(same, torch._utils._unflatten_dense_tensors(values, same))


def _overwrite(buffers, values):
    """Copy into the buffers unseen by autograd, as torch does.

    An earlier forward whose backward is still to come may have saved them: batch normalisation has, and does
    not use them in training.
    """
    with torch.autograd._unsafe_preserve_version_counter(tuple(buffers)):
        torch._foreach_copy_(buffers, values)


class Message:
    """Tensors of one GPU, and one flat tensor with a place for each.

    Values are not compared, as on the CPU: the look at them would wait for all that is queued on the GPU.
    """

    def __init__(self, tensors):
        self.kinds = kinds_of(tensors)
        sizes = [sum(t.numel() for t in same) * same[0].element_size() for same in self.kinds]
        self.flat = torch.empty(sum(sizes), dtype=torch.uint8, device=tensors[0].device)
        self.places = []
        for same, part in zip(self.kinds, self.flat.split(sizes), strict=True):
            pieces = part.view(same[0].dtype).split([t.numel() for t in same])
            self.places.append([piece.view(t.shape) for piece, t in zip(pieces, same, strict=True)])

    def broadcast(self, group, src):
        """Give every rank the tensors of group rank `src`. Collective; under no_grad."""
        root = cdist.get_rank(group) == src
        for same, places in zip(self.kinds, self.places, strict=True):
            if root:
                torch._foreach_copy_(places, same)
        cdist.broadcast(self.flat, group_src=src, group=group)
        for same, places in zip(self.kinds, self.places, strict=True):
            if not root:
                _overwrite(same, places)


class KeptBuffers:
    """The buffers of a module, for a broadcast in each step: the walk and the memory of the message are kept.

    For those on devices of type `kind`; others take the ordinary way.

    Before each use the module is looked over: it may have another buffer or another module somewhere inside.
    """

    _children, _own = attrgetter("_modules"), attrgetter("_buffers")

    def __init__(self, module, kind="cuda"):
        self.module, self.kind = module, kind
        self._look()

    def _inside(self):
        """All that hangs in the known modules: children, then buffers."""
        tables = chain(map(self._children, self._modules), map(self._own, self._modules))
        return list(chain.from_iterable(map(dict.values, tables)))

    def _look(self):
        self._modules = modules_of(self.module)
        self._held = self._inside()
        buffers = buffers_of(self.module)
        there = [b for b in buffers if b.device.type == self.kind]
        self._others = [b for b in buffers if b.device.type != self.kind]
        self._messages = [
            Message([b for b in there if b.device == device])
            for device in dict.fromkeys(b.device for b in there)
        ]

    def broadcast(self, group, src):
        """Give every rank the buffers of group rank `src`. Collective."""
        inside = self._inside()
        if len(inside) != len(self._held) or not all(map(is_, inside, self._held)):
            self._look()
        with torch.no_grad():
            for message in self._messages:
                message.broadcast(group, src)
        if self._others:
            broadcast_tensors(self._others, group, src)
