"""Collectives of Python objects.

Objects are pickled (protocol 5) before anything is sent. What is sent first is a *slot* of fixed size: it
tells the sizes and holds the pickle itself if there is room, so that a small object takes one operation.
Buffers of 64 KiB and more, such as the memory of NumPy arrays, stay outside the pickle and are sent from and
received into their own memory. A rank that cannot pickle its object tells the others: every rank raises.
"""

import io
import pickle
import struct

import numpy

from cdist import _core
from cdist.collectives import _member
from cdist.errors import DistError

__all__ = [
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
    "set_allow_pickle",
]

_OUT_OF_BAND_BYTES = _core._OUT_OF_BAND_BYTES
_TAG = -5131  # of object messages between two ranks: apart from the user's, which have tag 0 and up
_OK, _FAILED = 0, 1
_HEAD = struct.Struct("<5q")
_SLOT = 1024
_INLINE = _SLOT - _HEAD.size  # longest stream that travels in the slot

_allow_pickle = True


def set_allow_pickle(allow: bool) -> None:
    """Forbid (False) or allow (True, the default) to unpickle objects from other ranks in this process.

    With False every function of this module that receives raises RuntimeError, except with
    ``weights_only=True``.
    """
    global _allow_pickle
    _allow_pickle = bool(allow)


_SAFE = {
    "cdist._core": {"_array_of"},
    "builtins": {"complex", "set", "frozenset", "bytearray", "slice", "range"},
    "collections": {"OrderedDict"},
    "numpy": {"ndarray", "dtype"},
    "numpy.core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy.core.numeric": {"_frombuffer"},
    "numpy._core.numeric": {"_frombuffer"},
}


def _encode(text, encoding="latin1"):
    """Return bytes as pickles before protocol 3 hold them; the codec of another name would be imported."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"weights_only=True does not allow the encoding {encoding!r}")
    return text.encode("latin1")


class _SafeUnpickler(pickle.Unpickler):
    """Builds numbers, text, containers and NumPy arrays, and refuses everything else."""

    def find_class(self, module, name):
        if (module, name) == ("_codecs", "encode"):
            return _encode
        if name in _SAFE.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"weights_only=True does not allow {module}.{name}")


def _check_allowed(function, weights_only):
    if not _allow_pickle and not weights_only:
        raise RuntimeError(
            f"{function}: pickle was switched off by set_allow_pickle(False); weights_only=True still works"
        )


class _Pickler(pickle.Pickler):
    """Writes small plain arrays in a form of our own, which takes half the time of NumPy's."""

    reducer_override = staticmethod(_core._reduce_array)

    def __init__(self):
        self.file, self.buffers = io.BytesIO(), []
        super().__init__(self.file, 5, buffer_callback=self._keep)

    def _keep(self, buffer):
        raw = buffer.raw()
        if raw.nbytes < _OUT_OF_BAND_BYTES:
            return True
        self.buffers.append(numpy.frombuffer(raw, numpy.uint8))
        return False

    def write(self, thing):
        """Return the stream and the buffers beside it."""
        self.dump(thing)
        stream, buffers = self.file.getvalue(), self.buffers
        self.clear_memo()
        self.file.seek(0)
        self.file.truncate()
        self.buffers = []
        return stream, buffers


_idle_picklers = []  # making one takes a microsecond; as many as threads ever pickled at the same time


class _Message:
    """A pickled object: a stream and the large buffers beside it; or why it could not be pickled."""

    __slots__ = ("stream", "buffers", "status")

    def __init__(self, thing):
        try:
            pickler = _idle_picklers.pop()
        except IndexError:
            pickler = _Pickler()
        try:
            self.stream, self.buffers = pickler.write(thing)
        except Exception as error:
            self.status, self.buffers = _FAILED, []
            self.stream = f"{type(error).__name__}: {error}".encode()[:_INLINE]
            return
        _idle_picklers.append(pickler)
        self.status = _OK
        if self.buffers:
            sizes = numpy.array([b.size for b in self.buffers], numpy.int64)
            self.stream = sizes.tobytes() + self.stream

    def rest(self):
        """Return the stream if it is too long for a slot."""
        return numpy.frombuffer(self.stream, numpy.uint8) if len(self.stream) > _INLINE else _EMPTY

    def slot(self, note=0, more=0):
        """Return what goes out first: a head, and the stream if there is room for it."""
        stream = self.stream
        head = _HEAD.pack(self.status, len(stream), len(self.buffers), note, more)
        slot = head + stream if len(stream) <= _INLINE else head
        return numpy.frombuffer(slot.ljust(_SLOT, b"\0"), numpy.uint8)


def _open(slots, at=0):
    """Return what the slot there tells and the stream in it, None if that follows."""
    head = _HEAD.unpack_from(slots, at)
    at += _HEAD.size
    return head, slots[at : at + head[1]] if head[1] <= _INLINE else None


def _load(stream, buffers, weights_only):
    data = memoryview(stream)[8 * len(buffers) :] if buffers else stream
    if weights_only:
        return _SafeUnpickler(io.BytesIO(data), buffers=buffers).load()
    return pickle.loads(data, buffers=buffers)


def _sizes_in(stream, count):
    return numpy.frombuffer(stream, numpy.int64, count).tolist() if count else ()


def _room(size):
    return numpy.empty(size, numpy.uint8)


_EMPTY = _room(0)


def _raise_failure(function, group, rank, text):
    """Raise what all ranks raise when this rank of the group could not pickle."""
    rank = group._ranks[rank]
    raise DistError(
        f"{function}: rank {rank} could not pickle its object: {bytes(text).decode(errors='replace')}",
        rank=rank,
        operation=function,
    )


def _meet(message, group, function):
    """Exchange the slots of all ranks: (heads, streams); raises on all ranks when one could not pickle."""
    slots = _room(group.size() * _SLOT)
    _core.all_gather_into_tensor(slots, message.slot(), _core._host_side(group))
    slots = memoryview(slots)
    heads, streams = [], []
    for rank in range(group.size()):
        head, stream = _open(slots, rank * _SLOT)
        if head[0] != _OK:
            _raise_failure(function, group, rank, stream)
        heads.append(head)
        streams.append(stream)
    return heads, streams


def _fetch_rest(message, heads, streams, is_taker, move):
    """Receive what did not fit into the slots: streams are completed, the buffers of each rank are returned.

    `move(outputs, input)` moves one array a rank to all takers.
    """
    buffers = [[] for _ in heads]
    if not any([head[1] > _INLINE or head[2] for head in heads]):  # small objects: nothing is left
        return buffers
    ranks = range(len(heads))
    if any(stream is None for stream in streams):
        rooms = [_room(heads[r][1] if streams[r] is None else 0) for r in ranks] if is_taker else None
        move(rooms, message.rest())
        if is_taker:
            streams[:] = [rooms[r] if streams[r] is None else streams[r] for r in ranks]
    most = max(head[2] for head in heads)
    if not most:
        return buffers
    sizes = [_sizes_in(streams[r], heads[r][2]) for r in ranks] if is_taker else None
    for i in range(most):
        rooms = [_room(of[i] if i < len(of) else 0) for of in sizes] if is_taker else None
        move(rooms, message.buffers[i] if i < len(message.buffers) else _EMPTY)
        for rank, room in enumerate(rooms or []):
            if i < len(sizes[rank]):
                buffers[rank].append(room)
    return buffers


def _check_places(function, name, places, group):
    if not isinstance(places, list):
        raise TypeError(
            f"{function}: {name} must be a list with a place for each rank ([None] * {group.size()}), not "
            f"{type(places).__name__}"
        )
    size = group.size()
    if len(places) < size:
        raise ValueError(
            f"{function}: {name} has {len(places)} places for {size} ranks: pass [None] * {size}"
        )


def _load_all(streams, buffers, weights_only):
    return [_load(stream, parts, weights_only) for stream, parts in zip(streams, buffers, strict=True)]


def all_gather_object(object_list, obj, group=None, weights_only=False) -> None:
    """Gather a picklable object of each rank into the list of all.

    Args:
        object_list: a list with a place for each rank, filled in rank order; further places stay as they are.
        obj: this rank's object.
        group: the ranks that take part; None is the default group.
        weights_only: unpickle numbers, text, containers and NumPy arrays only.

    Raises:
        ValueError: the list is too short.
        DistError: a rank's object cannot be pickled; on every rank, and the group stays usable.

    """
    group = _member(group, "all_gather_object")
    if group is None:
        return
    side = _core._host_side(group)
    _check_allowed("all_gather_object", weights_only)
    _check_places("all_gather_object", "object_list", object_list, group)
    message = _Message(obj)
    heads, streams = _meet(message, group, "all_gather_object")
    buffers = _fetch_rest(
        message, heads, streams, True, lambda outputs, mine: _core.all_gather(outputs, mine, side)
    )
    object_list[: group.size()] = _load_all(streams, buffers, weights_only)


def _group_root(group, rank, group_rank, function):
    if rank is not None and group_rank is not None:
        raise ValueError("Can't specify both group_rank and global_rank")
    if group_rank is not None:
        if not 0 <= group_rank < group.size():
            raise ValueError(f"{function}: Group rank {group_rank} is not part of a group of {group.size()}")
        return group_rank
    rank = 0 if rank is None else rank
    if rank not in group._ranks:
        raise ValueError(f"{function}: Global rank {rank} is not part of group {list(group._ranks)}")
    return group._ranks.index(rank)


def gather_object(
    obj, object_gather_list=None, dst=None, group=None, group_dst=None, weights_only=False
) -> None:
    """Gather a picklable object of each rank into the list of rank `dst`.

    Args:
        obj: this rank's object.
        object_gather_list: on `dst` only: a list with a place for each rank. None or [] elsewhere.
        dst: global rank (0 if neither is given), or `group_dst`: rank in the group.
        group: the ranks that take part; None is the default group.
        group_dst: see dst.
        weights_only: as in all_gather_object.

    """
    group = _member(group, "gather_object")
    if group is None:
        return
    side = _core._host_side(group)
    _check_allowed("gather_object", weights_only)
    root = _group_root(group, dst, group_dst, "gather_object")
    is_root = group.rank() == root
    if is_root and not object_gather_list:
        raise ValueError("Argument ``object_gather_list`` must be specified on destination rank.")
    if not is_root and object_gather_list:
        raise ValueError("Argument ``object_gather_list`` must NOT be specified on non-destination ranks.")
    if is_root:
        _check_places("gather_object", "object_gather_list", object_gather_list, group)
    message = _Message(obj)
    heads, streams = _meet(message, group, "gather_object")

    def move(outputs, mine):
        _core.gather(mine, outputs, group=side, group_dst=root)

    buffers = _fetch_rest(message, heads, streams, is_root, move)
    if is_root:
        object_gather_list[: group.size()] = _load_all(streams, buffers, weights_only)


def broadcast_object_list(
    object_list, src=None, group=None, device=None, group_src=None, weights_only=False
) -> None:
    """Replace the objects of the list on every rank by those of rank `src`.

    Args:
        object_list: a list of picklable objects, equally long on all ranks.
        src: global rank (0 if neither is given), or `group_src`: rank in the group.
        group: the ranks that take part; None is the default group.
        device: accepted, not needed.
        group_src: see src.
        weights_only: as in all_gather_object.

    """
    group = _member(group, "broadcast_object_list")
    if group is None:
        return
    side = _core._host_side(group)
    _check_allowed("broadcast_object_list", weights_only)
    root = _group_root(group, src, group_src, "broadcast_object_list")
    is_root = group.rank() == root
    if not isinstance(object_list, list):
        raise TypeError(
            "broadcast_object_list: object_list must be a list (one object: [x]), not "
            f"{type(object_list).__name__}"
        )
    message = _Message(list(object_list)) if is_root else None
    slot = message.slot(len(object_list)) if is_root else _room(_SLOT)
    _core.broadcast(slot, group=side, group_src=root)
    (status, size, count, places, _), stream = _open(slot)
    if status != _OK:
        _raise_failure("broadcast_object_list", group, root, stream)
    if stream is None:
        stream = message.rest() if is_root else _room(size)
        _core.broadcast(stream, group=side, group_src=root)
    buffers = message.buffers if is_root else [_room(size) for size in _sizes_in(stream, count)]
    for buffer in buffers:
        _core.broadcast(buffer, group=side, group_src=root)
    if is_root:
        return
    if places != len(object_list):
        raise ValueError(
            f"broadcast_object_list: this rank's list has {len(object_list)} places, the source's {places}"
        )
    object_list[:] = _load(stream, buffers, weights_only)


def scatter_object_list(
    scatter_object_output_list,
    scatter_object_input_list=None,
    src=None,
    group=None,
    group_src=None,
    weights_only=False,
) -> None:
    """Give each rank its object of the list of rank `src`.

    Args:
        scatter_object_output_list: a list of at least one place; the first gets the object.
        scatter_object_input_list: on `src`: one object for each rank.
        src: global rank (0 if neither is given), or `group_src`: rank in the group.
        group: the ranks that take part; None is the default group.
        group_src: see src.
        weights_only: as in all_gather_object.

    """
    group = _member(group, "scatter_object_list")
    if group is None:
        return
    side = _core._host_side(group)
    _check_allowed("scatter_object_list", weights_only)
    if not isinstance(scatter_object_output_list, list) or len(scatter_object_output_list) < 1:
        raise ValueError("Expected argument scatter_object_output_list to be a list of size at least 1.")
    root = _group_root(group, src, group_src, "scatter_object_list")
    is_root = group.rank() == root
    size = group.size()
    if is_root and scatter_object_input_list is None:
        raise ValueError("source rank must provide non-None scatter_object_input_list")
    if is_root and len(scatter_object_input_list) != size:
        raise ValueError(f"scatter_object_list: {len(scatter_object_input_list)} objects for {size} ranks")
    messages = [_Message(thing) for thing in scatter_object_input_list] if is_root else None
    slot, slots = _room(_SLOT), None
    if is_root:
        failed = [m for m in messages if m.status != _OK]
        notes = max(len(m.rest()) for m in messages), max(len(m.buffers) for m in messages)
        slots = [m.slot(*notes) for m in (failed[:1] * size or messages)]
    _core.scatter(slot, slots, group=side, group_src=root)
    (status, mine, count, longest, most), stream = _open(slot)
    if status != _OK:
        _raise_failure("scatter_object_list", group, root, stream)
    if longest:
        rest = _room(mine if stream is None else 0)
        _core.scatter(rest, [m.rest() for m in messages] if is_root else None, group=side, group_src=root)
        stream = rest if stream is None else stream
    sizes = _sizes_in(stream, count)
    buffers = []
    for i in range(most):
        part = _room(sizes[i] if i < len(sizes) else 0)
        parts = [m.buffers[i] if i < len(m.buffers) else _EMPTY for m in messages] if is_root else None
        _core.scatter(part, parts, group=side, group_src=root)
        if i < len(sizes):
            buffers.append(part)
    scatter_object_output_list[0] = _load(stream, buffers, weights_only)


def send_object_list(
    object_list, dst=None, group=None, device=None, group_dst=None, use_batch=False, weights_only=False
) -> None:
    """Send picklable objects to rank `dst`, which calls recv_object_list with a list of the same length.

    Args:
        object_list: the objects.
        dst: global rank, or `group_dst`: rank in the group.
        group: None is the default group.
        device: accepted, not needed.
        group_dst: see dst.
        use_batch: accepted, not needed.
        weights_only: accepted, not needed here.

    """
    group = _member(group, "send_object_list")
    if group is None:
        return
    side = _core._host_side(group)
    if dst is None and group_dst is None:
        raise ValueError("Must specify global_rank or group_rank")
    peer = _group_root(group, dst, group_dst, "send_object_list")
    if peer == group.rank():
        raise ValueError(
            "Invalid destination rank: destination rank should not be the same as the rank of the current "
            "process."
        )
    message = _Message(list(object_list))
    _core.send(message.slot(len(object_list)), group=side, tag=_TAG, group_dst=peer)
    if message.status != _OK:
        _raise_failure("send_object_list", group, group.rank(), message.stream)
    if len(message.stream) > _INLINE:
        _core.send(message.rest(), group=side, tag=_TAG, group_dst=peer)
    for buffer in message.buffers:
        _core.send(buffer, group=side, tag=_TAG, group_dst=peer)


def recv_object_list(
    object_list, src=None, group=None, device=None, group_src=None, use_batch=False, weights_only=False
) -> int:
    """Receive objects sent by send_object_list; returns the global rank of the sender.

    Args:
        object_list: a list as long as the sender's; replaced in place.
        src: global rank, or `group_src`: rank in the group; neither: from whoever sends first.
        group: None is the default group.
        device: accepted, not needed.
        group_src: see src.
        use_batch: accepted, not needed.
        weights_only: as in all_gather_object.

    """
    group = _member(group, "recv_object_list")
    if group is None:
        return -1
    side = _core._host_side(group)
    _check_allowed("recv_object_list", weights_only)
    anyone = src is None and group_src is None
    peer = None if anyone else _group_root(group, src, group_src, "recv_object_list")
    slot = _room(_SLOT)
    source = _core.recv(slot, group=side, tag=_TAG, group_src=peer)
    peer = group._ranks.index(source)
    (status, size, count, places, _), stream = _open(slot)
    if status != _OK:
        _raise_failure("recv_object_list", group, peer, stream)
    if stream is None:
        stream = _room(size)
        _core.recv(stream, group=side, tag=_TAG, group_src=peer)
    buffers = [_room(size) for size in _sizes_in(stream, count)]
    for buffer in buffers:
        _core.recv(buffer, group=side, tag=_TAG, group_src=peer)
    if places != len(object_list):
        raise ValueError(
            f"recv_object_list: the list has {len(object_list)} places, rank {source} sent {places}"
        )
    object_list[:] = _load(stream, buffers, weights_only)
    return source
