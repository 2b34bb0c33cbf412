"""Messages between two ranks."""

from cdist import _core
from cdist._core import irecv, isend, recv, send
from cdist.collectives import _member, _one_launch

__all__ = ["send", "recv", "isend", "irecv", "P2POp", "batch_isend_irecv"]


class P2POp:
    """One message of a batch.

    Args:
        op: ``cdist.isend`` or ``cdist.irecv``.
        tensor: what is sent or received into.
        peer: global rank of the other, or ``group_peer``: its rank in the group.
        group: None is the default group.
        tag: messages are matched by it.

    """

    def __init__(self, op, tensor, peer=None, group=None, tag=0, group_peer=None):
        if op is not isend and op is not irecv:
            raise ValueError(
                "Invalid ``op``. Expected ``op`` to be of type ``torch.distributed.isend`` or "
                "``torch.distributed.irecv`` (here: cdist.isend, cdist.irecv)."
            )
        if peer is not None and group_peer is not None:
            raise ValueError("P2POp: Can't specify both group_rank and global_rank: give peer or group_peer")
        if peer is None and group_peer is None:
            raise ValueError("P2POp: Must specify global_rank or group_rank: give peer or group_peer")
        self.op = op
        self.tensor = tensor
        self.group = group if group is not None else _core._get_default_group()
        ranks = getattr(self.group, "_ranks", None)
        if ranks is not None:
            if peer is None:
                peer = ranks[group_peer]
            else:
                if peer not in ranks:
                    raise ValueError(f"P2POp: Global rank {peer} is not part of group {list(ranks)}")
                group_peer = ranks.index(peer)
        self.peer = peer
        self.tag = tag
        self.group_peer = group_peer

    def __repr__(self):
        return f"P2POp({self.op.__name__}, peer={self.peer}, tag={self.tag})"


def batch_isend_irecv(p2p_op_list) -> list[_core.Work]:
    """Start all messages of the list and return their Works, in the same order.

    Each can be waited for alone. Receives are started first, so that messages which are here already go
    straight into their arrays.

    Args:
        p2p_op_list: a list of P2POp of one group; may be empty.

    Raises:
        ValueError: no list, other things in it, several groups.

    """
    if not isinstance(p2p_op_list, list) or not all(isinstance(op, P2POp) for op in p2p_op_list):
        raise ValueError("Invalid ``p2p_op_list``. Each op is expected to be of type ``P2POp``.")
    if not p2p_op_list:
        return []
    group = p2p_op_list[0].group
    if any(op.group is not group for op in p2p_op_list):
        raise ValueError("batch_isend_irecv: All ops need to use the same group: call it once for each group")
    if _member(group, "batch_isend_irecv") is None:
        return []
    works = [None] * len(p2p_op_list)
    # On GPUs a send waits for its receive: only as one launch can two ranks send to each other.
    with _one_launch(group, p2p_op_list[0].tensor):
        for kind, name in ((irecv, "group_src"), (isend, "group_dst")):
            for i, op in enumerate(p2p_op_list):
                if op.op is kind:
                    works[i] = kind(op.tensor, group=group, tag=op.tag, **{name: op.group_peer})
    return works
