"""DistributedDataParallel over torch modules: which backward passes are reduced, and after whose hooks."""

import warnings
import weakref

from cdist.parallel.torch_parts import tensors_in

BYPASSED = (
    "DistributedDataParallel: the optimizer steps on gradients of this rank alone: the last backward pass "
    "did not come from a forward of DistributedDataParallel. Call ddp(x), not ddp.module(x) nor the module "
    "that was wrapped"
)


class Passes:
    """The part of TorchDataParallel that tells its own backward passes from those of the bare module.

    A forward announces one, and each of its outputs does again when a backward pass comes to it: the second
    pass through one graph is reduced as the first. A pass of the bare module, which perhaps one rank alone
    makes, stays with its rank, and so does one of another DistributedDataParallel over the same module.
    """

    def _expect_no_pass(self):
        """Forget about all forwards; hooks are new."""
        self._expected = self._sync_this = self._bypassed = self._warned_of_bypass = False
        me = weakref.ref(self)

        def announce(gradients):
            ddp = me()
            if ddp is not None:
                ddp.__dict__["_expected"] = True

        self._announce_pass = announce

    def _expect_pass(self):
        """Begin a forward. Under no_sync() its own backward pass is local."""
        self._expected = self._sync_this = self.require_backward_grad_sync
        if sum(map(len, self._hook_tables)) != self._hook_count:
            self._go_last()

    def _watch_outputs(self, output):
        """End a forward of which backward passes are reduced."""
        for node in {tensor.grad_fn for tensor in tensors_in(output)} - {None}:
            node.register_prehook(self._announce_pass)

    def _list_hooks(self):
        """Note how many hooks the parameters have, ours among them."""
        self._hook_tables = [handle.hooks_dict_ref() for handle in self._hook_handles]
        self._hook_count = sum(map(len, self._hook_tables))

    def _go_last(self):
        """Make our hooks run after those that came since: what these make of a gradient is reduced."""
        for handle, table in zip(self._hook_handles, self._hook_tables, strict=True):
            if next(reversed(table)) != handle.id:
                table[handle.id] = table.pop(handle.id)
        self._hook_count = sum(map(len, self._hook_tables))

    def _is_alone(self):
        """Tell that no other DistributedDataParallel wraps the module; its first parameter stands for all."""
        ours = type(self._hook_tables[0][self._hook_handles[0].id])
        return sum(type(hook) is ours for hook in self._hook_tables[0].values()) == 1

    def _warn_of_bypass(self):
        """Say that an optimizer steps after a pass of the bare module."""
        self._bypassed = False
        if not self._warned_of_bypass:
            self._warned_of_bypass = True
            warnings.warn(BYPASSED, UserWarning, stacklevel=5)
