"""Communication hooks of DistributedDataParallel over torch modules, under the paths that torch has."""

from cdist.parallel.hooks import DDPCommHookType, register_ddp_comm_hook

__all__ = ["DDPCommHookType", "register_ddp_comm_hook"]
