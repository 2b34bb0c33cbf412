"""Collectives of Python objects.

Objects are pickled (protocol 5) before anything is sent. Buffers of 64 KiB and more, such as the memory of
NumPy arrays, stay outside the pickle and are sent from and received into their own memory. A rank that cannot
pickle its object tells the others, so that every rank raises.
"""

import io
import pickle

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

_OUT_OF_BAND_BYTES = 65536  # below, a message of its own costs more than the copy
_TAG = -5131  # of object messages between two ranks: apart from the user's, which have tag 0 and up
_OK, _FAILED = 0, 1

_allow_pickle = True


def set_allow_pickle(allow: bool) -> None:
    """Forbid (False) or allow (True, the default) to unpickle objects from other ranks in this process.

    With False every function of this module that receives raises RuntimeError, except with
    ``weights_only=True``.
    """
    global _allow_pickle
    _allow_pickle = bool(allow)


_SAFE = {
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


class _Message:
    """A pickled object: a stream and the large buffers beside it; or why it could not be pickled."""

    def __init__(self, stream, buffers, status=_OK):
        self.stream = numpy.frombuffer(stream, numpy.uint8)
        self.buffers = buffers
        self.status = status

    @classmethod
    def of(cls, thing):
        buffers = []

        def keep(buffer):
            raw = buffer.raw()
            if raw.nbytes < _OUT_OF_BAND_BYTES:
                return True
            buffers.append(numpy.frombuffer(raw, numpy.uint8))
            return False

        try:
            stream = pickle.dumps(thing, 5, buffer_callback=keep)
        except Exception as error:
            return cls(f"{type(error).__name__}: {error}".encode(), [], _FAILED)
        sizes = numpy.array([b.size for b in buffers], numpy.int64)
        return cls(sizes.tobytes() + stream, buffers)

    @property
    def header(self):
        return numpy.array([self.status, self.stream.size, len(self.buffers)], numpy.int64)


def _load(stream, buffers, weights_only):
    data = memoryview(stream)[8 * len(buffers) :]
    if weights_only:
        return _SafeUnpickler(io.BytesIO(data), buffers=buffers).load()
    return pickle.loads(data, buffers=buffers)


def _sizes_in(stream, count):
    return numpy.frombuffer(stream[: 8 * count].tobytes(), numpy.int64)


_EMPTY = numpy.empty(0, numpy.uint8)


def _room(size):
    return numpy.empty(size, numpy.uint8)


def _raise_failures(function, group, headers, texts):
    """Raise on every rank alike when some rank could not pickle."""
    bad = [rank for rank in range(len(headers)) if headers[rank][0] != _OK]
    if bad:
        rank = group._ranks[bad[0]]
        text = bytes(texts[bad[0]]).decode(errors="replace")
        raise DistError(
            f"{function}: rank {rank} could not pickle its object: {text}",
            rank=rank,
            operation=function,
        )


def _all_headers(message, group):
    headers = numpy.empty((group.size(), 3), numpy.int64)
    _core.all_gather_into_tensor(headers, message.header, group)
    return headers


def _outline(message, group, function):
    """All ranks' headers; raises on all ranks when one failed."""
    headers = _all_headers(message, group)
    if (headers[:, 0] != _OK).any():
        texts = [_room(size) for size in headers[:, 1]]
        _core.all_gather(texts, message.stream, group)
        _raise_failures(function, group, headers, texts)
    return headers


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
    _check_allowed("all_gather_object", weights_only)
    _check_places("all_gather_object", "object_list", object_list, group)
    message = _Message.of(obj)
    headers = _outline(message, group, "all_gather_object")
    streams = [_room(size) for size in headers[:, 1]]
    _core.all_gather(streams, message.stream, group)
    sizes = [_sizes_in(stream, count) for stream, count in zip(streams, headers[:, 2], strict=True)]
    buffers = [[] for _ in sizes]
    for i in range(int(headers[:, 2].max())):
        parts = [_room(of[i]) if i < len(of) else _EMPTY.copy() for of in sizes]
        _core.all_gather(parts, message.buffers[i] if i < len(message.buffers) else _EMPTY, group)
        for rank, part in enumerate(parts):
            if i < len(sizes[rank]):
                buffers[rank].append(part)
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
    _check_allowed("gather_object", weights_only)
    root = _group_root(group, dst, group_dst, "gather_object")
    is_root = group.rank() == root
    if is_root and not object_gather_list:
        raise ValueError("Argument ``object_gather_list`` must be specified on destination rank.")
    if not is_root and object_gather_list:
        raise ValueError("Argument ``object_gather_list`` must NOT be specified on non-destination ranks.")
    if is_root:
        _check_places("gather_object", "object_gather_list", object_gather_list, group)
    message = _Message.of(obj)
    headers = _outline(message, group, "gather_object")
    streams = [_room(size) for size in headers[:, 1]] if is_root else None
    _core.gather(message.stream, streams, group=group, group_dst=root)
    sizes = [
        _sizes_in(stream, count)
        for stream, count in zip(streams or [], headers[:, 2] if is_root else [], strict=True)
    ]
    buffers = [[] for _ in sizes]
    for i in range(int(headers[:, 2].max())):
        parts = [_room(of[i]) if i < len(of) else _EMPTY.copy() for of in sizes] if is_root else None
        mine = message.buffers[i] if i < len(message.buffers) else _EMPTY
        _core.gather(mine, parts, group=group, group_dst=root)
        for rank, part in enumerate(parts or []):
            if i < len(sizes[rank]):
                buffers[rank].append(part)
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
    _check_allowed("broadcast_object_list", weights_only)
    root = _group_root(group, src, group_src, "broadcast_object_list")
    is_root = group.rank() == root
    if not isinstance(object_list, list):
        raise TypeError(
            "broadcast_object_list: object_list must be a list (one object: [x]), not "
            f"{type(object_list).__name__}"
        )
    message = _Message.of(list(object_list)) if is_root else None
    header = numpy.append(message.header, len(object_list)) if is_root else numpy.empty(4, numpy.int64)
    _core.broadcast(header, group=group, group_src=root)
    stream = message.stream if is_root else _room(header[1])
    _core.broadcast(stream, group=group, group_src=root)
    if header[0] != _OK:
        headers = [(_OK,)] * root + [header]
        _raise_failures("broadcast_object_list", group, headers, [b""] * root + [stream])
    buffers = message.buffers if is_root else [_room(size) for size in _sizes_in(stream, header[2])]
    for buffer in buffers:
        _core.broadcast(buffer, group=group, group_src=root)
    if is_root:
        return
    if header[3] != len(object_list):
        raise ValueError(
            f"broadcast_object_list: this rank's list has {len(object_list)} places, the source's {header[3]}"
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
    messages = [_Message.of(thing) for thing in scatter_object_input_list] if is_root else None
    headers = numpy.array([m.header for m in messages]) if is_root else numpy.empty((size, 3), numpy.int64)
    _core.broadcast(headers, group=group, group_src=root)
    failed = numpy.flatnonzero(headers[:, 0] != _OK)
    if failed.size:
        text = messages[failed[0]].stream if is_root else _room(headers[failed[0], 1])
        _core.broadcast(text, group=group, group_src=root)
        _raise_failures("scatter_object_list", group, [(_OK,)] * root + [(_FAILED,)], [b""] * root + [text])
    mine = headers[group.rank()]
    stream = _room(mine[1])
    _core.scatter(stream, [m.stream for m in messages] if is_root else None, group=group, group_src=root)
    sizes = _sizes_in(stream, mine[2])
    buffers = []
    for i in range(int(headers[:, 2].max())):
        part = _room(sizes[i]) if i < len(sizes) else _EMPTY.copy()
        parts = [m.buffers[i] if i < len(m.buffers) else _EMPTY for m in messages] if is_root else None
        _core.scatter(part, parts, group=group, group_src=root)
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
    if dst is None and group_dst is None:
        raise ValueError("Must specify global_rank or group_rank")
    peer = _group_root(group, dst, group_dst, "send_object_list")
    if peer == group.rank():
        raise ValueError(
            "Invalid destination rank: destination rank should not be the same as the rank of the current "
            "process."
        )
    message = _Message.of(list(object_list))
    header = numpy.append(message.header, len(object_list))
    for part in (header, message.stream, *message.buffers):
        _core.send(part, group=group, tag=_TAG, group_dst=peer)
    if message.status != _OK:
        headers = [(_OK,)] * group.rank() + [(_FAILED,)]
        _raise_failures("send_object_list", group, headers, [b""] * group.rank() + [message.stream])


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
    _check_allowed("recv_object_list", weights_only)
    anyone = src is None and group_src is None
    peer = None if anyone else _group_root(group, src, group_src, "recv_object_list")
    header = numpy.empty(4, numpy.int64)
    source = _core.recv(header, group=group, tag=_TAG, group_src=peer)
    peer = group._ranks.index(source)
    stream = _room(header[1])
    _core.recv(stream, group=group, tag=_TAG, group_src=peer)
    if header[0] != _OK:
        _raise_failures("recv_object_list", group, [(_OK,)] * peer + [header], [b""] * peer + [stream])
    buffers = [_room(size) for size in _sizes_in(stream, header[2])]
    for buffer in buffers:
        _core.recv(buffer, group=group, tag=_TAG, group_src=peer)
    if header[3] != len(object_list):
        raise ValueError(
            f"recv_object_list: the list has {len(object_list)} places, rank {source} sent {header[3]}"
        )
    object_list[:] = _load(stream, buffers, weights_only)
    return source
