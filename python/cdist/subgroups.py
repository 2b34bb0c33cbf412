"""Groups of some of the ranks."""

import operator
import os
import sys
import warnings

from cdist import backends
from cdist.backends import Backend, BackendConfig
from cdist.groups import _as_timeout, _default, _registered, _registry, get_process_group_ranks, get_rank
from cdist.process_group import GroupMember, ProcessGroup

__all__ = ["new_group", "new_subgroups", "new_subgroups_by_enumeration", "split_group", "shrink_group"]

SHRINK_DEFAULT = 0
SHRINK_ABORT = 1


def _check_ranks(ranks, world):
    try:
        ranks = [operator.index(rank) for rank in ranks]
    except TypeError:
        raise TypeError(
            f"new_group: ranks must be a sequence of integers such as [0, 1], or None for all, not {ranks!r}"
        ) from None
    size = world.size()
    if len(ranks) > size:
        raise ValueError(
            f"the new group's world size should be less or equal to the world size set by init_process_group "
            f"({len(ranks)} ranks given, world_size={size})"
        )
    for rank in ranks:
        if not 0 <= rank < size:
            raise ValueError(
                f"Rank {rank} is out of range. Valid ranks are 0 to {size - 1} (world_size={size})"
            )
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"new_group: duplicate ranks are not allowed, name each rank once: {ranks}")
    if not ranks:
        raise ValueError("new_group: a group needs at least one rank; ranks=None is all of them")
    return ranks


def new_group(
    ranks=None,
    timeout=None,
    backend=None,
    pg_options=None,
    use_local_synchronization=False,
    group_desc=None,
    device_id=None,
    sort_ranks=True,
):
    """Make a group of some ranks. Only its members meet; for the others the call returns at once.

    Members must make equal sets in the same order, nothing else: a set that is made twice gives two groups.

    Args:
        ranks: global ranks; None is all of them.
        timeout: default of the group's operations: timedelta or seconds; None is the default group's.
        backend: as in init_process_group; None is the default group's.
        pg_options: accepted, not needed.
        use_local_synchronization: accepted: creation is always among the members only.
        group_desc: a name for texts.
        device_id: as in init_process_group.
        sort_ranks: group ranks follow the order of global ranks; otherwise that of `ranks`.

    Returns:
        A ProcessGroup, or GroupMember.NON_GROUP_MEMBER (−100) where the caller is not in `ranks`.

    Raises:
        ValueError, TypeError: ranks that are doubled, out of range or no integers.
        DistTimeoutError: members disagree about the set; names the lists.

    """
    world = _default()
    chosen = list(range(world.size())) if ranks is None else _check_ranks(ranks, world)
    if sort_ranks:
        chosen.sort()
    limit = None if timeout is None else _as_timeout(timeout)
    if backend is not None:
        name = Backend(str(backend))
        backends.check(name)
        config = BackendConfig(name)
    else:
        name, config = world._backend, world._config
    _registry.made += 1
    if world.rank() not in chosen:
        return GroupMember.NON_GROUP_MEMBER
    number = str(_registry.made - 1)
    made = ProcessGroup._create(world, tuple(chosen), limit, limit)
    made._use(name, config, world._store)
    made.group_name = number
    if use_local_synchronization:
        import hashlib  # takes as long to load as half of cdist

        digest = hashlib.sha1("_".join(map(str, chosen)).encode(), usedforsecurity=False).hexdigest()
        made.group_name = f"{digest}_{number}"
    made.group_desc = group_desc or "undefined"
    made.bound_device_id = device_id if device_id is not None else world.bound_device_id
    _registry.groups.append(made)
    return made


def _accelerators() -> int:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return torch.cuda.device_count()
    return sum(1 for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdigit())


def new_subgroups(group_size=None, group=None, timeout=None, backend=None, pg_options=None, group_desc=None):
    """Cut a group (None: the default one) in groups of `group_size` consecutive ranks of it.

    Its members alone call it. `group_size` None: as many as a host has GPUs.

    Returns:
        (the group of this rank, list of all groups; −100 stands for those of others).

    """
    if group_size is None:
        group_size = _accelerators()
        if group_size == 0:
            raise ValueError(
                "Default group size only takes effect when accelerators are there: give group_size"
            )
    if group_size <= 0:
        raise ValueError(f"The arg 'group_size' ({group_size}) must be positive")
    members = get_process_group_ranks(group)
    size = len(members)
    if group_size > size:
        raise ValueError(f"The arg 'group_size' ({group_size}) must not exceed the world size ({size})")
    if size % group_size:
        raise ValueError(f"The world size ({size}) must be divisible by 'group_size={group_size}'")
    lists = [members[first : first + group_size] for first in range(0, size, group_size)]
    return new_subgroups_by_enumeration(lists, timeout, backend, pg_options, group_desc)


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list, timeout=None, backend=None, pg_options=None, group_desc=None
):
    """Make several groups that share no rank.

    Args:
        ranks_per_subgroup_list: one list of global ranks for each group.
        timeout: as in new_group.
        backend: as in new_group.
        pg_options: accepted, not needed.
        group_desc: a name for texts.

    Returns:
        (the group of this rank or None, list of all groups; −100 stands for those of others).

    """
    if not ranks_per_subgroup_list:
        raise ValueError("The arg 'ranks_per_subgroup_list' cannot be empty")
    seen: dict = {}
    for ranks in ranks_per_subgroup_list:
        for rank in ranks:
            if rank in seen:
                raise ValueError(f"Rank {rank} has appeared in both subgroup {seen[rank]} and {ranks}")
            seen[rank] = ranks
    mine = None
    made = []
    for ranks in ranks_per_subgroup_list:
        made.append(new_group(ranks, timeout, backend, pg_options, group_desc=group_desc))
        if get_rank() in ranks:
            mine = made[-1]
    return mine, made


def _inherit(made, parent):
    made._use(parent._backend, parent._config, parent._store)
    return made


def split_group(
    parent_pg=None, split_ranks=None, timeout=None, pg_options=None, group_desc=None, backend=None
):
    """Cut a group in parts: `split_ranks` lists the ranks *in the parent* of each part.

    Returns:
        The group of this rank, or None where it is in no part.

    """
    parent = _registered(parent_pg)
    if not split_ranks:
        raise ValueError("split_ranks cannot be None or empty")
    if len(split_ranks) > parent.size():
        raise ValueError(
            "the split group's size should be less or equal to the world_size set by init_process_group"
        )
    if len({rank for part in split_ranks for rank in part}) != sum(map(len, split_ranks)):
        raise ValueError(
            f"split_group: the split group cannot have duplicate ranks; a rank is in one part at most: "
            f"{split_ranks}"
        )
    for part in split_ranks:
        if any(not 0 <= rank < parent.size() for rank in part):
            raise ValueError(f"split ranks must be ranks of the parent, 0 to {parent.size() - 1}: {part}")
        if parent.rank() in part:
            ranks = [parent._ranks[rank] for rank in sorted(part)]
            made = new_group(ranks, timeout, backend, pg_options, group_desc=group_desc, sort_ranks=False)
            return made if backend else _inherit(made, parent)
    return None


def shrink_group(ranks_to_exclude, group=None, shrink_flags=SHRINK_DEFAULT, pg_options=None):
    """Return a group of the ranks that are not excluded; only they call it.

    Args:
        ranks_to_exclude: global ranks.
        group: None is the default group.
        shrink_flags: SHRINK_ABORT first ends what runs on `group`.
        pg_options: accepted, not needed.

    """
    parent = _registered(group)
    if not isinstance(ranks_to_exclude, (list, tuple, set)):
        raise TypeError("ranks_to_exclude must be a list of integers")
    out = set(ranks_to_exclude)
    if not out:
        raise ValueError("ranks_to_exclude cannot be empty")
    for rank in out:
        if rank not in parent._ranks:
            raise ValueError(f"Global rank {rank} is not part of group {parent}")
    if parent.rank() >= 0 and parent._ranks[parent.rank()] in out:
        raise RuntimeError("an excluded rank must not call shrink_group")
    if shrink_flags & SHRINK_ABORT:
        warnings.warn("shrink_group: running operations of the group end with AbortedError", stacklevel=2)
        parent.abort("shrink_group")
    left = [rank for rank in parent._ranks if rank not in out]
    return _inherit(new_group(left, sort_ranks=False), parent)
