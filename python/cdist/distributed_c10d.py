"""The module behind torch.distributed's names, for programs that name it: ``dist.distributed_c10d``.

All public names of cdist, and of the private ones those that utilities of well-known repositories use.
"""

import sys

import cdist
from cdist import *  # noqa: F403
from cdist import backends, groups

__all__ = list(cdist.__all__)


def _get_default_group():
    return groups._default()


def _get_default_store():
    return groups._default().get_group_store()


def _get_default_timeout(backend):
    return backends.default_timeout(backend)


def _rank_not_in_group(group):
    return group is not None and groups._is_outside(group)


def _get_group_size(group):
    return cdist.get_world_size(group)


def _get_global_rank(group, rank):
    return cdist.get_global_rank(group, rank)


def _get_object_coll_device(group=None):
    types = groups._known(group)._device_types
    return types[0] if len(types) == 1 else "cpu"


def _get_pg_default_device(group=None):
    """Return a torch.device: the caller has torch, or has no use for the answer."""
    import torch

    return torch.device(_get_object_coll_device(group))


def __getattr__(name):
    if name.startswith("_"):
        raise AttributeError(
            f"module 'cdist.distributed_c10d' has no attribute {name!r}: of torch's private names only a few "
            "are here (docs/torch-names.md)",
            name=name,
            obj=sys.modules[__name__],
        )
    return getattr(cdist, name)
