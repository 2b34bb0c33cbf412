"""Figures about a DistributedDataParallel over a torch module, under the names that torch gives them."""

import os
import time

import cdist
from cdist.parallel.torch_parts import name_of


class StepTimes:
    """When the parts of a step began and ended (monotonic ns), in the first ten steps and every `rate`-th."""

    FIRST = 10
    PARTS = ("forward_compute", "backward_compute", "backward_comm", "backward_compute_comm_overlap")

    def __init__(self):
        self.rate = 100
        self.iteration = 0
        self.samples = 0
        self.at = {}
        self.last = {}
        self.total = dict.fromkeys(self.PARTS, 0)
        self._taking = False

    def forward_begins(self):
        """Begin an iteration and decide whether its times are taken."""
        self.iteration += 1
        self._taking = self.iteration <= self.FIRST or self.iteration % self.rate == 0
        self.at = {"forward": time.perf_counter_ns()} if self._taking else {}

    def forward_ends(self):
        """Note the end of the forward pass."""
        if self._taking:
            self.at["forward_end"] = time.perf_counter_ns()

    def backward_begins(self, reduced):
        """Note the first gradient; a pass that is not reduced is not a sample."""
        self._taking = self._taking and reduced
        if self._taking and "backward" not in self.at:
            self.at["backward"] = time.perf_counter_ns()

    def hook_begins(self, number):
        """Note that a communication hook is called for the first bucket."""
        if self._taking and number == 0:
            self.at["comm"] = time.perf_counter_ns()

    def backward_ends(self):
        """Note the end of the engine's work."""
        if self._taking:
            self.at["backward_end"] = time.perf_counter_ns()

    def communication_ends(self, first_launch_ns):
        """Complete a sample. `first_launch_ns`: when the reducer began to send, 0 if it did not."""
        if not self._taking or "backward_end" not in self.at:
            return
        self._taking = False
        at = self.at
        end = time.perf_counter_ns()
        comm = first_launch_ns or at.get("comm", at["backward_end"])
        values = (
            at.get("forward_end", at["backward"]) - at["forward"],  # a forward may hold its backward pass
            at["backward_end"] - at["backward"],
            end - comm,
            max(0, at["backward_end"] - comm),
        )
        self.last = {f"{part}_time": value for part, value in zip(self.PARTS, values, strict=True)}
        self.last |= {
            "forward_compute_time_start": at["forward"],
            "backward_compute_time_start": at["backward"],
            "backward_compute_time_end": at["backward_end"],
            "backward_comm_time_start": comm,
            "backward_comm_time_end": end,
        }
        self.samples += 1
        for part, value in zip(self.PARTS, values, strict=True):
            self.total[part] += value

    def figures(self):
        """Return times in ns under torch's names: those of the last sample and averages over all."""
        averages = {f"avg_{part}_time": total // max(1, self.samples) for part, total in self.total.items()}
        return {**averages, **self.last}


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
        "bucket_cap_bytes": ddp.bucket_bytes_cap,
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
        "unused_parameter_size": sum(
            ddp._params[i].numel() * ddp._params[i].element_size() for i in getattr(ddp, "_static_unused", ())
        ),
        "has_rebuilt_buckets": int(sync.replanned),
        "num_buckets_reduced": len(sync.bucket_bytes) if sync.steps else 0,
        "prev_iteration_grad_ready_order_indices": ", ".join(map(str, sync.reducer.ready_order())),
    }
    data |= ddp._times.figures()
    if sync.replanned:
        members = [
            " ".join(str(i) for i in sync.order if sync.bucket_of[i] == k)
            for k in range(len(sync.bucket_bytes))
        ]
        data["rebuilt_bucket_sizes"] = data["bucket_sizes"]
        data["rebuilt_per_bucket_param_indices"] = ", ".join(members)
    return data
