"""Do all ranks mean the same thing? Compared by digest, explained by a diff, raised on every rank alike."""

import hashlib

import numpy as np

import cdist
from cdist import _core


def gather_bytes(data, group=None):
    """Gathers the bytes of all ranks, which may differ in length; a list in group order. Collective."""
    world, side = cdist.get_world_size(group), _core._host_side(group)
    lengths = np.zeros(world, np.int64)
    cdist.all_gather_into_tensor(lengths, np.array([len(data)], np.int64), group=side)
    longest = int(lengths.max())
    if longest == 0:
        return [b""] * world
    mine = np.zeros(longest, np.uint8)
    mine[: len(data)] = np.frombuffer(data, np.uint8)
    everything = np.zeros(world * longest, np.uint8)
    cdist.all_gather_into_tensor(everything, mine, group=side)
    rows = everything.reshape(world, longest)
    return [rows[rank, : lengths[rank]].tobytes() for rank in range(world)]


def broadcast_ints(values, group=None):
    """Return the list of ints of group rank 0, on every rank (lists of equal length). Collective."""
    array = np.array(values, np.int64)
    if array.size:
        cdist.broadcast(array, group_src=0, group=_core._host_side(group))
    return array.tolist()


def agree(lines, group, explain):
    """Raise RuntimeError on every rank unless all ranks give the same list of texts. Collective.

    ``explain(all_lines)`` makes the first sentence of the error from the lists of all ranks; the differences
    follow it.
    """
    text = "\n".join(lines).encode()
    digests = gather_bytes(hashlib.blake2b(text, digest_size=16).digest(), group)
    if all(digest == digests[0] for digest in digests):
        return
    everyone = [data.decode().split("\n") if data else [] for data in gather_bytes(text, group)]
    raise RuntimeError(f"{explain(everyone)}\n" + "\n".join(differences(everyone)))


def differences(everyone, limit=10):
    """Lines that tell which entries of which rank are not as on rank 0; at most `limit` a rank."""
    said = []
    for rank, lines in enumerate(everyone[1:], 1):
        only_zero = [line for line in everyone[0] if line not in set(lines)]
        only_here = [line for line in lines if line not in set(everyone[0])]
        if not only_zero and not only_here and lines != everyone[0]:
            at = next(i for i, pair in enumerate(zip(everyone[0], lines, strict=False)) if pair[0] != pair[1])
            said.append(
                f"  order differs from entry {at} on: rank 0 has {everyone[0][at]}, rank {rank} has "
                f"{lines[at]}"
            )
        for where, extra in (("only on rank 0, not on", only_zero), ("not on rank 0, only on", only_here)):
            said += [f"  {where} rank {rank}: {line}" for line in extra[:limit]]
            if len(extra) > limit:
                said.append(f"  {where} rank {rank}: and {len(extra) - limit} more")
    return said


def agree_on_parameters(entries, group, buffers=()):
    """Compare parameters and buffers (texts "'name': dtype (shape)…") over the ranks. Collective."""
    mark = "buffer "

    def explain(everyone):
        mine = cdist.get_rank(group)
        counts = [sum(not line.startswith(mark) for line in lines) for lines in everyone]
        for rank, count in enumerate(counts):
            if count != counts[mine]:
                return (
                    f"DDP expects same model across all ranks, but Rank {mine} has {counts[mine]} "
                    f"params, while rank {rank} has inconsistent {count} params."
                )
        return (
            "DDP expects same model across all ranks, but parameters or buffers differ in name, order, "
            "shape, dtype or in whether they need a gradient."
        )

    agree([*entries, *(mark + line for line in buffers)], group, explain)
