"""DistributedDataParallel over torch modules: smaller things that torch's class has."""

import warnings

import cdist
from cdist.parallel.torch_log import logging_data


class TorchNames:
    """The part of TorchDataParallel that scripts and libraries look at, under torch's names."""

    @property
    def logger(self):
        """Return None: figures are in _get_ddp_logging_data()."""
        return None

    @property
    def bucket_bytes_cap(self):
        """Return the most bytes of a bucket: `bucket_cap_mb`, or the largest of `bucket_cap_mb_list`."""
        return max(self._caps)

    @property
    def bucket_bytes_cap_list(self):
        """Return the caps in bytes that `bucket_cap_mb_list` gave, or an empty list."""
        return list(self._caps) if self._has_cap_list else []

    @property
    def bucket_bytes_cap_default(self):
        """Return whether caps are the default ones."""
        return not self._has_cap_list and len(self._caps) > 1

    @property
    def named_module_buffers(self):
        """Return the buffers of the module that are made equal, by name."""
        named = self.module.named_buffers()
        return {name: buffer for name, buffer in named if name not in self.parameters_to_ignore}

    @property
    def modules_buffers(self):
        """Return the buffers of the module that are made equal."""
        return list(self.named_module_buffers.values())

    @property
    def _module_parameters(self):
        return [p for _, p in self._named()]

    @property
    def _distributed_rank(self):
        return cdist.get_rank(self.process_group)

    @property
    def _has_rebuilt_buckets(self):
        return self._sync.replanned

    def _get_ddp_logging_data(self):
        return logging_data(self)

    def _set_static_graph(self):
        self.static_graph = True
        self._counting = True
        self._warn_of_needless_search(3)

    def _warn_of_needless_search(self, depth):
        if self.static_graph and self.find_unused_parameters:
            warnings.warn(
                "You passed find_unused_parameters=True to DistributedDataParallel with a static graph, of "
                "which the first step tells the unused parameters: find_unused_parameters is not needed, "
                "and these parameters must stay unused in all steps.",
                stacklevel=depth,
            )

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate):
        """Take times in every `sample_rate`-th iteration (and in the first ten); default 100."""
        if sample_rate < 1:
            raise ValueError("DDP runtime logging sample rate should be equal or greater than 1")
        self._times.rate = sample_rate

    def _set_ddp_sink_clone(self, val):
        """Do nothing: outputs are not passed through a function of torch's DDP, which may clone them."""

    def _check_reducer_finalized(self):
        return not self._open

    def _get_data_parallel_params(self, module, named_params=False):
        for name, p in self._named():
            yield (name, p) if named_params else p

    def _update_process_group(self, new_process_group):
        self.process_group = new_process_group
        self._adopt(list(zip(self._names, self._params, strict=True)))

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module, params_and_buffers_to_ignore):
        module._ddp_params_and_buffers_to_ignore = list(params_and_buffers_to_ignore)
