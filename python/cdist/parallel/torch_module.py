"""DistributedDataParallel over torch.nn.Module. Imported only when the caller's module is torch's.

How it hangs on torch: a C callable per parameter runs when its gradient is complete
(register_post_accumulate_grad_hook), copies it to its place in a bucket and counts; full buckets are reduced
while backward goes on; a callback at the end of backward waits for them. The engine's graph is walked in
Python for unused parameters.
"""

import sys
import weakref
from itertools import chain

import numpy as np
import torch
from torch import nn
from torch.autograd import Variable
from torch.nn.parameter import is_lazy

import cdist
from cdist import _core
from cdist.parallel.array_module import accumulate, no_sync
from cdist.parallel.join import Join, Joinable, _JoinConfig
from cdist.parallel.mixed_precision import LowPrecision, cast_floats
from cdist.parallel.synchronizer import (
    HAND_OUT,
    LOCAL,
    REDUCE,
    Gradient,
    Synchronizer,
    bucket_caps,
    debugging,
    warn,
)
from cdist.parallel.torch_comm import CommHooks
from cdist.parallel.torch_fit import Fitness, unfit
from cdist.parallel.torch_join import TorchJoinHook
from cdist.parallel.torch_log import StepTimes
from cdist.parallel.torch_names import TorchNames
from cdist.parallel.torch_optim import BackwardOptimizers
from cdist.parallel.torch_parts import (
    all_reduce_max,
    bucket_tensors,
    group_of,
    index_of,
    name_of,
    reached_parameters,
    remove_hooks,
    tensors_in,
    to_device,
    untraced,
    view_like,
)
from cdist.parallel.torch_passes import Passes
from cdist.parallel.torch_sparse import SparseGradients, marking_hook
from cdist.parallel.torch_state import ModelState
from cdist.parallel.verify import agree_on_parameters

NOTHING_TO_TRAIN = (
    "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient."
)
DIRECT_BYTES = 256 << 10  # up to here a call of torch's copy costs more than the copying


def _copy_all(targets, sources):
    try:
        torch._foreach_copy_(targets, sources)
    except RuntimeError:  # a gradient is a lazy negation or conjugate, which torch writes to one by one only
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)


class TorchDataParallel(
    BackwardOptimizers,
    CommHooks,
    Fitness,
    ModelState,
    Passes,
    SparseGradients,
    TorchNames,
    nn.Module,
    Joinable,
):
    """DistributedDataParallel over torch modules; takes the arguments of torch's class.

    Beyond them: ``reduce='mean' | 'sum' | 'weights'``, ``accumulate(n)``, ``set_weight``, ``set_trainable``,
    ``broadcast_parameters``, ``broadcast_buffers_now``. A parameter without gradient raises on every rank: at
    the latest when an optimizer steps on this module's parameters or the next forward begins.
    """

    def __init__(
        self,
        module,
        device_ids=None,
        output_device=None,
        dim=0,
        broadcast_buffers=None,
        init_sync=True,
        process_group=None,
        bucket_cap_mb=None,
        find_unused_parameters=False,
        check_reduction=False,
        gradient_as_bucket_view=False,
        static_graph=False,
        delay_all_reduce_named_params=None,
        param_to_hook_all_reduce=None,
        mixed_precision=None,
        device_mesh=None,
        skip_all_reduce_unused_params=False,
        bucket_cap_mb_list=None,
        batched_grad_copy=False,
        forward_sync_buffers=None,
        *,
        reduce="mean",
    ):
        nn.Module.__init__(self)
        self._join_config = _JoinConfig()
        if bool(delay_all_reduce_named_params is not None) != bool(param_to_hook_all_reduce is not None):
            raise ValueError(
                "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time."
            )
        self.module = module
        self.process_group = group_of(process_group, device_mesh)
        self.device_mesh = device_mesh
        self.dim = dim
        self.reduce = reduce
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.broadcast_buffers = broadcast_buffers is None or bool(broadcast_buffers)
        self.forward_sync_buffers = self.broadcast_buffers and (
            forward_sync_buffers is None or bool(forward_sync_buffers)
        )
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", []))
        self._delayed = [p for _, p in delay_all_reduce_named_params or []]
        self.parameters_to_ignore |= {name for name, _ in delay_all_reduce_named_params or []}
        self._caps = bucket_caps(bucket_cap_mb, bucket_cap_mb_list)
        self._has_cap_list = bool(bucket_cap_mb_list)
        self.batched_grad_copy = batched_grad_copy
        named = self._named()
        self._check_module(named)
        self.device = next((p.device for _, p in named), torch.device("cpu"))
        self._check_devices({p.device for _, p in named}, device_ids, output_device)
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self._hook = self._buffer_hook = self._kept_buffers = None
        self._has_buffers = bool(self._buffers_to_sync())
        self.mixed_precision = mixed_precision
        trainable = [(name, p) for name, p in named if p.requires_grad]
        if init_sync:
            self._compare_models(named)
        if not trainable and not self._delayed:
            raise RuntimeError(NOTHING_TO_TRAIN)
        if init_sync:
            self.broadcast_parameters()
            if self.broadcast_buffers:
                self._broadcast_buffers(0)
        self._times = StepTimes()
        self._set_up_precision()
        self._adopt(trainable)
        self._warn_of_needless_search(4)

    def _set_up_precision(self):
        self._low = None
        if self.mixed_precision is not None:
            me = weakref.proxy(self)
            self._low = LowPrecision(self.mixed_precision, lambda: me._named(), self._buffers_to_sync())

    def _gradient_dtype(self, p):
        return p.dtype if self._low is None else self._low.gradient_dtype(p)

    # ---- checks at construction

    def _named(self):
        return [
            (name, p) for name, p in self.module.named_parameters() if name not in self.parameters_to_ignore
        ]

    def _check_module(self, named):
        if any(is_lazy(t) for t in chain((p for _, p in named), self._buffers_to_sync())):
            raise RuntimeError(
                "Modules with uninitialized parameters can't be used with `DistributedDataParallel`. Run a "
                "dummy forward pass to correctly initialize the modules"
            )
        empty = [name for name, p in named if p.is_meta]
        if len(empty) == len(named) > 0:
            raise RuntimeError(
                "DistributedDataParallel: parameters are on the meta device, without values: "
                f"{empty[0]!r} and {len(empty) - 1} more. Give the module memory and values on every rank "
                "first: module.to_empty(device='cpu'), then initialise it or load a state_dict"
            )
        if any(isinstance(m, nn.SyncBatchNorm) for m in self.module.modules()):
            raise ValueError(
                "torch.nn.SyncBatchNorm layers talk through torch.distributed (and SyncBatchNorm layers only "
                "work with GPU modules there): convert with "
                "cdist.nn.SyncBatchNorm.convert_sync_batchnorm(module)"
            )
        kinds = {p.device.type for _, p in named}
        if len(kinds) > 1:
            raise ValueError(
                "DistributedDataParallel's input module must be on the same type of devices, but input "
                f"module parameters locate in {kinds}."
            )

    def _check_devices(self, devices, device_ids, output_device):
        if device_ids is not None and len(device_ids) > 1:
            raise ValueError("device_ids can only be None or contain a single element.")
        self.is_multi_device_module = len(devices) > 1
        self.device_type = self.device.type
        if self.device_type == "cpu" or self.is_multi_device_module:
            if device_ids or output_device:
                raise ValueError(
                    "DistributedDataParallel device_ids and output_device arguments only work with "
                    "single-device/multiple-device GPU modules or CPU modules, but got device_ids "
                    f"{device_ids}, output_device {output_device}, and module parameters {devices}."
                )
            device_ids = output_device = None
        self.device_ids = device_ids and [torch.device(self.device_type, index_of(d)) for d in device_ids]
        self.output_device = output_device if output_device is not None else (device_ids or [None])[0]

    def _compare_models(self, named):
        lines = []
        for name, p in named:
            frozen = "" if p.requires_grad else ", frozen"
            lines.append(f"{name!r}: {name_of(p.dtype)} {tuple(p.shape)} strides {p.stride()}{frozen}")
        buffers = self.named_module_buffers.items() if self.broadcast_buffers else ()
        told = [f"{name!r}: {name_of(b.dtype)} {tuple(b.shape)}" for name, b in buffers if not b.is_meta]
        agree_on_parameters(lines, self.process_group, told)

    # ---- buckets

    def _adopt(self, trainable):
        """Make buckets for these parameters and hang hooks on them."""
        self._names = [name for name, _ in trainable]
        self._params = [p for _, p in trainable]
        if getattr(self, "_hook_handles", None) is None:
            self._hook_handles = []
            # The parameters may live longer, and be wrapped again.
            weakref.finalize(self, remove_hooks, self._hook_handles).atexit = False
        self._remove_autograd_hooks()
        if self._low is not None:
            self._low.leave()
        dtypes = [self._gradient_dtype(p) for p in self._params]
        self._find_sparse()
        counts = [1 if index in self._sparse else p.numel() for index, p in enumerate(self._params)]
        gradients = [
            Gradient(name, count, name_of(dtype), dtype.itemsize)
            for name, count, dtype in zip(self._names, counts, dtypes, strict=True)
        ]
        self._memory = self._kept_buffers = None
        me = weakref.proxy(self)
        myself = weakref.ref(self)
        self._sync = Synchronizer(
            self.process_group,
            gradients,
            reduce=self.reduce,
            caps=self._caps,
            device=self.device.type,
            memory=self._allocate if self.device.type == "cuda" else None,
            on_backward=lambda: myself() is not None and me._begin_backward(),
            on_bucket=lambda k: me._run_hook(k),
        )
        self._open = False
        self._expect_no_pass()
        self._counting = self.static_graph
        self._unused = None
        self._warned = self._warned_of_graph = False
        self._used = np.zeros(len(self._params), np.uint8)
        self._marked = set()
        self._futures = []
        self._buffer_futures = []
        self._stepping = None
        self._unchecked, self._warned_of_strays = True, False
        self.__dict__["_iterations"] = 0
        self._hang_hooks()

    def _allocate(self, sizes):
        self._memory = [torch.zeros(size, dtype=torch.uint8, device=self.device) for size in sizes]
        return [memory.data_ptr() for memory in self._memory]

    def _hang_hooks(self):
        reducer = self._sync.reducer
        members = [[] for _ in range(reducer.buckets)]
        for index in self._sync.order:
            members[self._sync.bucket_of[index]].append(index)
        self._members = members
        dtypes = [self._gradient_dtype(self._params[inside[0]]) for inside in members]
        self._bucket_tensors = bucket_tensors(reducer, dtypes, self._memory)
        self._views = []
        # Where torch has threads for it, it copies what is large.
        direct = DIRECT_BYTES if torch.get_num_threads() > 1 else sys.maxsize
        for index, p in enumerate(self._params):
            bucket, offset = reducer.place(index)
            flat = self._bucket_tensors[bucket]
            start = offset // flat.element_size()
            if index in self._sparse:
                self._views.append(flat[start : start + 1])
                hook = marking_hook(reducer, index)
                self._hook_handles.append(p.register_post_accumulate_grad_hook(hook))
                continue
            self._views.append(view_like(flat[start : start + p.numel()], p.detach()))
            link = self.gradient_as_bucket_view and self._low is None
            hook = reducer.hook(index, self._views[index], link, direct if p.device.type == "cpu" else 0)
            self._hook_handles.append(p.register_post_accumulate_grad_hook(hook))
        self._list_hooks()

    def _remove_autograd_hooks(self):
        remove_hooks(self._hook_handles)

    def _replan(self):
        order = self._sync.agree_on_order()
        if order is None:
            return
        old = self._views
        self._remove_autograd_hooks()
        self._sync.plan(order)
        self._hang_hooks()
        for p, before, view in zip(self._params, old, self._views, strict=True):
            if p.grad is before:
                p.grad = view.copy_(before)

    # ---- forward

    def forward(self, *inputs, **kwargs):
        """Call the module; see torch.nn.Module.forward."""
        inputs, kwargs = self._begin_forward(inputs, kwargs)
        output = self.module(*inputs, **kwargs) if self._low is None else self._run_low(inputs, kwargs)
        self._end_forward(output)
        return output

    @untraced
    def _begin_forward(self, inputs, kwargs):
        """Do what comes before the module's forward; return its arguments."""
        grad = torch.is_grad_enabled()
        if grad and self._sync.reducer.backward:
            self._leave_broken_step()
        if grad:
            self._check_fit()
            self._expect_pass()
            self._times.forward_begins()
            if self._unchecked:
                self._look_for_strays()
            if self._stepping is None:
                self._take_over_optimizers()
        self._announce()
        if grad and self.require_backward_grad_sync and self._sync.wants_replan() and self._may_replan():
            self._replan()
        self._sync_buffers(after=False)
        if self.device_ids:
            inputs, kwargs = to_device(inputs, self.device_ids[0]), to_device(kwargs, self.device_ids[0])
        return inputs, kwargs

    @untraced
    def _end_forward(self, output):
        """Do what comes after the module's forward."""
        self._sync_buffers(after=True)
        if not torch.is_grad_enabled():
            self.require_forward_param_sync = (
                False  # as torch: one broadcast of buffers for all of an evaluation
            )
            return
        self.require_forward_param_sync = self.require_backward_grad_sync
        if self.require_backward_grad_sync:
            self._watch_outputs(output)
        self._iterations += 1
        if self.find_unused_parameters and not self.static_graph:
            reached = reached_parameters(output)
            unused = {index for index, p in enumerate(self._params) if id(p) not in reached}
            self._unused = unused if self._unused is None else self._unused & unused
        self._times.forward_ends()

    def _run_low(self, inputs, kwargs):
        """Call the module with parameters of low precision, which stay so until backward has ended."""
        grad = torch.is_grad_enabled()
        dtype = self._low.param_dtype
        if dtype is not None:
            inputs, kwargs = cast_floats(inputs, dtype), cast_floats(kwargs, dtype)
        keep = self._low.entered
        self._low.enter()
        try:
            output = self.module(*inputs, **kwargs)
            keep = keep or grad
        finally:
            if not keep:
                self._low.leave()
        if grad:
            self._low.enter_for_backward(tensors_in(output))
        return output

    def _may_replan(self):
        return self.static_graph or not self.find_unused_parameters

    # ---- backward

    @untraced
    def _begin_backward(self):
        """Begin a step; the first hook of a backward pass calls it."""
        Variable._execution_engine.queue_callback(self._end_backward)
        sync = self._sync
        self._reduces = self._open or self._expected
        self._bypassed = self._sync_this and not self._reduces and self._is_alone()
        self._times.backward_begins(self._reduces)
        if torch.is_grad_enabled() and not self._warned_of_graph:
            self._warned_of_graph = True
            warn(
                "backward(create_graph=True) over DistributedDataParallel: gradients of gradients are not "
                "synchronised across ranks, and nothing is differentiated through the reduction"
            )
        if not self._open:
            reduces = HAND_OUT if self._hook else REDUCE
            step = reduces if self._reduces and not self._counting else LOCAL
            if self.device.type == "cuda":
                sync.reducer.set_stream(torch._C._cuda_getCurrentRawStream(self.device.index))
            sync.begin(step)
            self._marked.clear()
            self._open = step != LOCAL
        sync.reducer.backward = True
        if self._open and self.static_graph:
            self._mark_unused(self._static_unused)
        elif self._open and self._unused is not None:
            self._mark_unused(self._unused)
            self._unused = None
        return True

    def _mark_unused(self, unused):
        """Gradients that will not come take part with what has gathered locally, or with zeros."""
        if not unused and not self._warned and self.find_unused_parameters:
            self._warned = True
            warn(
                "find_unused_parameters=True was specified in DDP constructor, but did not find any unused "
                "parameters in the forward pass. This flag results in an extra traversal of the autograd "
                "graph every iteration, which can adversely affect performance."
            )
        self._marked.update(unused)
        for index in sorted(unused):
            grad = self._params[index].grad
            view = self._views[index]
            if grad is None or index in self._sparse:
                view.zero_()
            elif grad is not view:
                view.copy_(grad.detach())
                if self.gradient_as_bucket_view and view.dtype == grad.dtype:
                    self._params[index].grad = view
            self._sync.reducer.ready(index)

    @untraced
    def _end_backward(self):
        """End a step; the engine calls it at the end of a backward pass."""
        reducer = self._sync.reducer
        reducer.backward = False
        reducer.flush()
        self._times.backward_ends()
        futures, self._buffer_futures = self._buffer_futures, []
        for future in futures:
            future.wait()
        if not self._open:
            if self._counting and self._reduces:
                self._finish_counting()
            elif self._low is not None:
                self._low.leave()
            if self.find_unused_parameters:
                self._used[[i for i in reducer.ready_order() if self._params[i].grad is not None]] = 1
            if self._bypassed or not self._sync_this and debugging():
                unfit.add(self)
            return
        if reducer.unready:
            if not self.find_unused_parameters or self.static_graph:
                unfit.add(self)  # another backward pass may bring the rest
                return
            # Reached by an output of the forward, which has no part in the loss.
            self._mark_unused([i for i in range(len(self._params)) if not reducer.seen(i)])
        self._finish()

    def _given(self):
        """Which parameters have a gradient on this rank."""
        return [p.grad is not None for p in self._params]

    def _any_used(self):
        """Which parameters some rank has used since the last reduction; collective. Begins to count anew."""
        given = self._given()  # a hook is called, too, for a parameter to which autograd gives no gradient
        used = [before or given[i] and i not in self._marked for i, before in enumerate(self._used.tolist())]
        self._used[:] = 0
        return all_reduce_max(used, self.process_group)

    def _finish(self, given=None):
        """Wait for all buckets, give each parameter its gradient. `given`: which get one; None: all."""
        self._open = self._expected = False
        unfit.discard(self)
        reducer = self._sync.reducer
        if reducer.step == HAND_OUT:
            self._finish_hooks()
        else:
            with self._explaining_mismatch():
                self._sync.finish()
        self._times.communication_ends(reducer.first_launch_ns)
        if self.static_graph:
            given = self._static_given
        elif self.find_unused_parameters:
            given = self._any_used()
        if self._low is not None:
            self._low.leave()
        if given is not None or reducer.linked < len(self._params):
            self._hand_back(given)
        self._finish_sparse(given)
        for p in self._delayed:
            if p.grad is not None:
                cdist.all_reduce(p.grad, op=cdist.ReduceOp.AVG, group=self.process_group)
        if self._stepping:
            self._step_in_backward()

    def _hand_back(self, given):
        targets, sources = [], []
        for index, p in enumerate(self._params):
            grad, view = p.grad, self._views[index]
            if index in self._sparse:
                continue
            if grad is view or not (given is None or given[index]):
                continue
            if self.gradient_as_bucket_view and view.dtype == p.dtype:
                p.grad = view
            elif grad is None:
                p.grad = view.to(p.dtype, copy=True)
            else:
                targets.append(grad.detach() if grad.requires_grad else grad)
                sources.append(view)
        if targets:
            with torch.no_grad():
                _copy_all(targets, sources)

    def _finish_counting(self):
        """static_graph: the first pass counted how often each gradient is given; all is reduced now."""
        reducer = self._sync.reducer
        seen = [reducer.seen(index) for index in range(len(self._params))]
        self._counting = False
        self._sync.begin(HAND_OUT if self._hook else REDUCE)
        self._open = True
        given = self._given()
        self._static_given = all_reduce_max(given, self.process_group)
        self._static_unused = {index for index, count in enumerate(seen) if not count}
        self._mark_unused(range(len(self._params)))
        self._finish(given)
        self._sync.set_uses([max(1, count) for count in seen])

    # ---- which passes are synchronised

    def no_sync(self):
        """Context manager: gradients of forward passes inside only add up locally.

        The next synchronised pass reduces the sum.
        """
        return no_sync(self)

    def accumulate(self, steps, batches=None):
        """Accumulate gradients, synchronising the right micro-batch; see cdist.DistributedDataParallel."""
        return accumulate(self, steps, batches)

    def set_weight(self, weight):
        """With reduce='weights': this rank's number of samples in the next synchronised pass."""
        if self.reduce != "weights":
            raise ValueError(f"set_weight is for reduce='weights', not {self.reduce!r}")
        if not 0 <= weight < np.inf:
            raise ValueError(f"weight must be a number from 0 on, not {weight}")
        self._sync.weight = float(weight)

    # ---- uneven inputs

    def join(self, divide_by_initial_world_size=True, enable=True, throw_on_early_termination=False):
        """Context manager for ranks with different numbers of steps; see cdist.algorithms.join.Join."""
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def _announce(self):
        if not self._join_config.enable:
            return
        Join.notify_join_context(self)
        flags = np.array([1, self.require_backward_grad_sync, self.will_sync_module_buffers()], np.int64)
        cdist.all_reduce(flags, group=_core._host_side(self.process_group))
        self._sync.set_divisor(None if self._divide_by_all else float(flags[0]))

    def join_hook(self, **kwargs):
        """Return what a rank without data does in the place of its steps."""
        self._divide_by_all = kwargs.get("divide_by_initial_world_size", True)
        return TorchJoinHook(self)

    @property
    def join_device(self):
        """Device of the collectives."""
        return self.device

    @property
    def join_process_group(self):
        """Group of the collectives."""
        return self.process_group
