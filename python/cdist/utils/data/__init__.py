"""``DistributedSampler`` under torch's paths; everything else of torch.utils.data is torch's own."""

import importlib


def __getattr__(name):
    if name == "DistributedSampler":
        from cdist.sampler import DistributedSampler

        return DistributedSampler
    if name == "distributed":
        return importlib.import_module("cdist.utils.data.distributed")
    raise AttributeError(
        f"module 'cdist.utils.data' has no attribute {name!r}: only DistributedSampler is here, "
        "the rest of torch.utils.data is torch's own"
    )
