"""Figures about a DistributedDataParallel over a torch module, under the names that torch gives them."""

import os

import cdist
from cdist.parallel.torch_parts import name_of


def logging_data(ddp):
    """Return the dict of ``_get_ddp_logging_data``."""
    sync = ddp._sync
    data = {
        "world_size": cdist.get_world_size(ddp.process_group),
        "rank": cdist.get_rank(ddp.process_group),
        "module_name": type(ddp.module).__name__,
        "iteration": ddp._iterations,
        "num_parameter_tensors": len(ddp._params),
        "total_parameter_size_bytes": sum(p.numel() * p.element_size() for p in ddp._params),
        "dtypes": ", ".join(sorted({name_of(p.dtype) for p in ddp._params})),
        "bucket_cap_bytes": ddp._caps[-1],
        "bucket_sizes": ", ".join(map(str, sync.bucket_bytes)),
        "backend_name": cdist.get_backend(ddp.process_group),
        "device_ids": ", ".join(str(d.index) for d in ddp.device_ids or []),
        "output_device": -1 if ddp.output_device is None else ddp.output_device,
        "broadcast_buffers": int(ddp.forward_sync_buffers),
        "find_unused_parameters": int(ddp.find_unused_parameters),
        "gradient_as_bucket_view": int(ddp.gradient_as_bucket_view),
        "static_graph": int(ddp.static_graph),
        "is_multi_device_module": int(ddp.is_multi_device_module),
        "has_sync_bn": int(any("SyncBatchNorm" in type(m).__name__ for m in ddp.module.modules())),
        "torch_distributed_debug": os.environ.get("TORCH_DISTRIBUTED_DEBUG", "N/A"),
        "master_addr": os.environ.get("MASTER_ADDR", "N/A"),
        "master_port": os.environ.get("MASTER_PORT", "N/A"),
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES", "N/A"),
        "comm_hook": getattr(ddp._hook and ddp._hook[1], "__name__", "") if ddp._hook else "",
        "join_uneven_inputs": int(ddp._join_config.enable),
        "can_set_static_graph": int(not ddp.find_unused_parameters),
        "has_rebuilt_buckets": int(sync.replanned),
        "num_buckets_reduced": sync.reducer.launched[0],
        "prev_iteration_grad_ready_order_indices": ", ".join(map(str, sync.reducer.ready_order())),
    }
    if sync.replanned:
        members = [
            " ".join(str(i) for i in sync.order if sync.bucket_of[i] == k)
            for k in range(len(sync.bucket_bytes))
        ]
        data["rebuilt_bucket_sizes"] = data["bucket_sizes"]
        data["rebuilt_per_bucket_param_indices"] = ", ".join(members)
    return data
