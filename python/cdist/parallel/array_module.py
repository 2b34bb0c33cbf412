"""Data parallelism over modules whose parameters are arrays: anything with ``named_parameters()``."""

import contextlib
import threading

import numpy as np

import cdist
from cdist import _core
from cdist.parallel.gpu_buckets import GpuBuckets, empty_like, facts_of, is_on_gpu, same_place
from cdist.parallel.join import Join, Joinable, JoinHook
from cdist.parallel.parameter import (
    Parameter,
    as_kind_of,
    broadcast_array,
    check_dtype,
    is_written_through,
    to_numpy,
    unique_parameters,
)
from cdist.parallel.synchronizer import LOCAL, REDUCE, Gradient, Synchronizer, bucket_caps, debugging
from cdist.parallel.verify import agree, agree_on_parameters


class ArrayDataParallel(Joinable):
    """DistributedDataParallel over array modules; see there."""

    def __init__(
        self,
        module,
        process_group=None,
        *,
        reduce="mean",
        init_sync=True,
        broadcast_buffers=True,
        bucket_cap_mb=None,
        bucket_cap_mb_list=None,
        find_unused_parameters=False,
        static_graph=False,
    ):
        super().__init__()
        self.module = module
        self.process_group = process_group
        self.reduce = reduce
        self.broadcast_buffers_each_forward = broadcast_buffers
        self.find_unused_parameters = find_unused_parameters
        self.static_graph = static_graph
        self.require_backward_grad_sync = True
        self._caps = bucket_caps(bucket_cap_mb, bucket_cap_mb_list)
        self._lock = threading.Lock()
        self._all = unique_parameters(module)
        for name, p in self._all:
            if isinstance(p, np.ndarray) or not hasattr(p, "data"):
                raise TypeError(
                    f"parameter {name!r} is a bare {type(p).__name__}: DistributedDataParallel needs .data "
                    "and .grad, as cdist.Parameter(array) has; for bare arrays there is cdist.GradientReducer"
                )
        self._sync = None
        trainable = [(name, p) for name, p in self._all if getattr(p, "requires_grad", True)]
        if init_sync:
            chosen = {name for name, _ in trainable}
            agree_on_parameters(
                [_describe(name, p.data, name in chosen) for name, p in self._all],
                process_group,
                [_describe(name, value) for name, value in self._buffers()] if broadcast_buffers else (),
            )
            self.broadcast_parameters()
            if broadcast_buffers:
                self.broadcast_buffers()
        self._adopt(trainable)

    # ---- forward

    def __call__(self, *args, **kwargs):
        """Call the module; see :meth:`forward`."""
        return self.forward(*args, **kwargs)

    def forward(self, *args, **kwargs):
        """Call the module. Buffers are broadcast from rank 0 first, if the module has any."""
        self._announce()
        if self.require_backward_grad_sync and self.broadcast_buffers_each_forward:
            self.broadcast_buffers()
        return self.module(*args, **kwargs)

    def named_parameters(self):
        """(name, parameter) of each distinct parameter."""
        return list(self._all)

    def parameters(self):
        """Return the distinct parameters, for optimizers."""
        return [p for _, p in self._all]

    # ---- gradients of cdist.Parameter

    def _adopt(self, trainable):
        """Give each trainable parameter its place in new buckets."""
        held = {}
        for name, p in getattr(self, "_trainable", []):
            if isinstance(p, Parameter):
                index = p._link[1]
                held[name] = self._views[index].copy() if self._has_grad[index] else None
                p._link = None
                p._grad = held[name]
        self._trainable = trainable
        self._names = [name for name, _ in trainable]
        self._automatic = all(isinstance(p, Parameter) for _, p in trainable)
        if not self._automatic and any(isinstance(p, Parameter) for _, p in trainable):
            raise TypeError("a module's parameters are either all cdist.Parameter or none is")
        gpu = same_place([(name, p.data) for name, p in trainable])
        data = [to_numpy(p.data) if gpu is None else facts_of(p.data) for _, p in trainable]
        self._dtypes = [
            check_dtype(f"DistributedDataParallel: parameter {name!r}", d.dtype)
            for name, d in zip(self._names, data, strict=True)
        ]
        gradients = [Gradient.of(name, d) for name, d in zip(self._names, data, strict=True)]
        self._gpu = None if gpu is None else GpuBuckets(self.process_group, gpu)
        self._shapes = [d.shape for d in data]
        self._has_grad = [False] * len(trainable)
        self._fresh = [False] * len(trainable)
        self._unsynced = False
        self._counting = self.static_graph
        self._sync = Synchronizer(
            self.process_group,
            gradients,
            reduce=self.reduce,
            caps=self._caps,
            device="cpu" if gpu is None else "cuda",
            memory=self._gpu and self._gpu.allocate,
        )
        self._make_views()
        for index, (_, p) in enumerate(trainable):
            if not isinstance(p, Parameter):
                continue
            if p._link is not None and p._link[0] is not self:
                raise ValueError(
                    f"parameter {self._names[index]!r} belongs to another DistributedDataParallel"
                )
            if p._grad is not None:
                self._views[index][...] = p._grad
                self._has_grad[index] = True
                p._grad = None
            p._link = (self, index)

    def _make_views(self):
        reducer = self._sync.reducer
        if self._gpu:
            self._gpu.lay_out(reducer, self._sync.gradients)
            self._views = []
            if self._automatic and self._trainable:
                self._views = self._gpu.views(self._shapes, self._dtypes, self._trainable[0][1].data)
            return
        buckets = [reducer.bucket(k) for k in range(reducer.buckets)]
        self._views = []
        for index, (shape, dtype) in enumerate(zip(self._shapes, self._dtypes, strict=True)):
            bucket, offset = reducer.place(index)
            self._views.append(np.ndarray(shape, dtype, buffer=buckets[bucket], offset=offset))

    def _begin_backward(self):
        with self._lock:
            if self._sync.reducer.backward:
                return
            sync = self.require_backward_grad_sync
            if (
                sync
                and self.reduce != "mean"
                and any(has and not new for has, new in zip(self._has_grad, self._fresh, strict=True))
            ):
                raise RuntimeError(
                    f"reduce={self.reduce!r}: the gradients of the last step are still there and would be "
                    "summed again; call zero_grad() first"
                )
            if sync and self._sync.wants_replan():
                self._replan()
            self._begin(REDUCE if sync and not self._counting else LOCAL)
            self._sync.reducer.backward = True
            self._sync_this = sync

    def _begin(self, step):
        if self._gpu:
            # The framework's current stream: what computes the gradients.
            self._stream = facts_of(self._trainable[0][1].data).stream
            self._sync.reducer.set_stream(self._stream)
        self._sync.begin(step)

    def _replan(self):
        order = self._sync.agree_on_order()
        if order is None:
            return
        old = self._views
        self._sync.plan(order)
        self._make_views()
        for has, before, view in zip(self._has_grad, old, self._views, strict=True):
            if has:
                view[...] = before

    def _accumulate(self, index, gradient, ready):
        if not self._gpu:
            gradient = to_numpy(gradient)
        self._check_gradient(index, gradient)
        reducer = self._sync.reducer
        if not reducer.backward:
            self._begin_backward()
            reducer = self._sync.reducer
        view = self._views[index]
        if reducer.step == REDUCE and reducer.seen(index) >= (
            self._sync.uses[index] if self._sync.uses else 1
        ):
            self._sync._twice(index)
        if self._has_grad[index]:
            np.add(view, gradient, out=view, casting="same_kind")
        else:
            np.copyto(view, gradient, casting="same_kind")
            self._has_grad[index] = True
        self._fresh[index] = True
        if ready:
            reducer.ready(index)

    def _read_grad(self, index):
        if self._sync.reducer.backward:
            self.synchronize()
        return self._views[index] if self._has_grad[index] else None

    def _forget(self, index):
        if self._sync.reducer.backward:
            self.synchronize()
        self._has_grad[index] = False
        self._fresh[index] = False
        self._unsynced = False

    def zero_grad(self):
        """Forgets all gradients."""
        for _, p in self._all:
            if isinstance(p, Parameter):
                p.zero_grad()
            else:
                p.grad = None

    def synchronize(self):
        """End the backward pass: wait until all gradients are the reduced ones.

        Reading any ``grad`` of a cdist.Parameter does the same. For other parameter classes this call is what
        reduces their ``grad``, once after each backward pass. Collective, except after a pass under
        no_sync().

        Raises RuntimeError on every rank, with names, if a gradient is missing on any (unless
        find_unused_parameters).
        """
        if not self._automatic:
            self._reduce_foreign()
            return
        reducer = self._sync.reducer
        if not reducer.backward:
            if not self._trainable or not self.require_backward_grad_sync or not self._unsynced:
                return
            self._begin_backward()  # all micro-batches ran under no_sync(): reduce what has gathered
        reducer = self._sync.reducer
        reducer.backward = False
        if not self._sync_this:
            self._unsynced = True
            return
        if self._counting:
            self._finish_counting()
            reducer = self._sync.reducer
        for index, fresh in enumerate(self._fresh):
            if fresh and reducer.seen(index) == 0:
                reducer.ready(index)
        self._finish()

    def _finish(self):
        used = np.array(
            [reducer_seen > 0 for reducer_seen in map(self._sync.reducer.seen, range(len(self._names)))],
            np.uint8,
        )
        self._fresh = [False] * len(self._names)
        self._unsynced = False
        allowed = self.find_unused_parameters or self._joining()
        if self._gpu and allowed:
            self._gpu.zero([index for index, given in enumerate(used) if not given], self._stream)
        self._sync.finish(expected=allowed)
        if self.find_unused_parameters and used.size:
            cdist.all_reduce(used, op=cdist.ReduceOp.MAX, group=_core._host_side(self.process_group))
            self._has_grad = [has or bool(u) for has, u in zip(self._has_grad, used, strict=True)]

    def _finish_counting(self):
        """static_graph: the first pass only counted how often each gradient is given."""
        reducer = self._sync.reducer
        seen = [reducer.seen(index) for index in range(len(self._names))]
        self._counting = False
        self._begin(REDUCE)
        for index, fresh in enumerate(self._fresh):
            if fresh:
                reducer.ready(index)
        self._pending_uses = seen
        self._sync.uses = [max(1, n) for n in seen]
        reducer.set_uses(self._sync.uses)  # holds from the next begin on

    # ---- gradients of other parameter classes

    def _reduce_foreign(self):
        if not self.require_backward_grad_sync:
            return
        if self._sync.wants_replan():
            self._sync.replanned = True
        given = [p.grad for _, p in self._trainable]
        if self._gpu:
            self._reduce_foreign_on_gpu(given)
            return
        arrays = [None if grad is None else to_numpy(grad) for grad in given]
        for index, array in enumerate(arrays):
            self._check_gradient(index, array)
        self._begin(REDUCE)
        reducer = self._sync.reducer
        for index in self._sync.order:
            if arrays[index] is not None:
                np.copyto(self._views[index], arrays[index], casting="same_kind")
                reducer.ready(index)
        self._has_grad = [grad is not None for grad in given]
        self._finish()
        for index, (_, p) in enumerate(self._trainable):
            grad = given[index]
            if grad is not None and is_written_through(grad, arrays[index]):
                arrays[index][...] = self._views[index]
            elif self._has_grad[index]:
                p.grad = as_kind_of(grad if grad is not None else p.data, self._views[index].copy())

    def _reduce_foreign_on_gpu(self, given):
        for index, grad in enumerate(given):
            if grad is None:
                continue
            facts = facts_of(grad) if is_on_gpu(grad) else None
            if facts is None or facts.shape != self._shapes[index] or facts.dtype != self._dtypes[index]:
                what = "in host memory" if facts is None else f"{facts.dtype} {facts.shape}"
                raise ValueError(
                    f"parameter {self._names[index]!r}: gradient {what} for a parameter "
                    f"{self._dtypes[index]} {self._shapes[index]} on a GPU"
                )
        self._begin(REDUCE)
        self._gpu.pack(given, self._stream)
        for index in self._sync.order:
            if given[index] is not None:
                self._sync.reducer.ready(index)
        self._has_grad = [grad is not None for grad in given]
        self._finish()
        for index, (_, p) in enumerate(self._trainable):
            if self._has_grad[index] and given[index] is None:
                given[index] = p.grad = empty_like(p.data)
        self._gpu.unpack(given, self._stream)

    def _check_gradient(self, index, array):
        if array is None:
            return
        if np.shape(array) != self._shapes[index]:
            raise ValueError(
                f"parameter {self._names[index]!r}: gradient of shape {np.shape(array)} for a parameter of "
                f"shape {self._shapes[index]}"
            )
        if not self._gpu and not np.can_cast(array.dtype, self._dtypes[index], "same_kind"):
            raise TypeError(
                f"parameter {self._names[index]!r}: gradient of {array.dtype} for a parameter of "
                f"{self._dtypes[index]}"
            )

    # ---- which passes are synchronised

    def no_sync(self):
        """Context manager: backward passes inside only add to the local gradients.

        The next one outside reduces the sum.
        """
        return no_sync(self)

    def accumulate(self, steps, batches=None):
        """Gradient accumulation that synchronises the right micro-batch.

        ``for i in ddp.accumulate(4)`` runs four, of which only the last communicates. ``for batch, last in
        ddp.accumulate(4, batches)`` goes through all batches and synchronises every fourth and the very last;
        step the optimizer when ``last``. Gradients are summed, not averaged, over micro-batches.
        """
        return accumulate(self, steps, batches)

    def set_weight(self, weight):
        """With reduce='weights': how much this rank's gradient counts in the next synchronised pass.

        `weight` is its number of samples or tokens: the result is sum(weight × gradient) / sum(weight), the
        exact mean over all samples when the local gradient is a mean over the local ones.
        """
        if self.reduce != "weights":
            raise ValueError(f"set_weight is for reduce='weights', not {self.reduce!r}")
        if not 0 <= weight < np.inf:
            raise ValueError(f"weight must be a number from 0 on, not {weight}")
        self._sync.weight = float(weight)

    def optimizer_step(self, step, *args, **kwargs):
        """Synchronise if needed and call ``step(*args, **kwargs)``.

        With CDIST_DEBUG=DETAIL raises RuntimeError when the last backward pass ran under no_sync(), which
        would let the ranks drift apart.
        """
        if self._automatic and self._sync.reducer.backward:
            self.synchronize()
        if debugging() and self._unsynced:
            raise RuntimeError(
                "the optimizer would step on gradients that were not synchronised: the last backward pass "
                "ran under no_sync(); let the last micro-batch run outside of it, or use ddp.accumulate(n)"
            )
        return step(*args, **kwargs)

    # ---- state

    def set_trainable(self, names):
        """From the next step on only these parameters have gradients.

        Collective; raises RuntimeError on all ranks, with the names that differ, unless all give the same.
        Must be called between steps.
        """
        names = list(names)
        known = dict(self._all)
        agree(
            sorted(map(repr, names)),
            self.process_group,
            lambda everyone: "set_trainable: ranks name different parameters.",
        )
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ValueError(f"set_trainable: no such parameters: {', '.join(map(repr, unknown))}")
        if self._automatic and self._sync.reducer.backward:
            self.synchronize()
        chosen = set(names)
        for name, p in self._all:
            if hasattr(p, "requires_grad"):
                p.requires_grad = name in chosen
        self._adopt([(name, p) for name, p in self._all if name in chosen])

    def broadcast_parameters(self, src=0):
        """Give every rank the parameters of group rank `src`. Collective."""
        for _, p in self._all:
            broadcast_array(p, "data", self.process_group, src)

    def _buffers(self):
        return getattr(self.module, "named_buffers", lambda: ())()

    def broadcast_buffers(self, src=0, average=False, copy=False):
        """Give every rank the buffers of group rank `src`, or with `average` their mean.

        They are what the module's ``named_buffers()`` names, looked up anew each time and written only where
        values differ. ``copy=True`` puts a new array in place of the old one, where the module offers
        ``set_buffer(name, array)``. Collective.
        """
        for name, value in self._buffers():
            on_gpu = is_on_gpu(value)
            new = value if on_gpu and not copy else value.copy() if on_gpu else np.array(value)
            group = self.process_group if on_gpu else _core._host_side(self.process_group)
            if average:
                cdist.all_reduce(new, op=cdist.ReduceOp.AVG, group=group)
            else:
                cdist.broadcast(new, group_src=src, group=group)
            if not on_gpu and np.array_equal(new, value):
                continue
            if copy:
                self.module.set_buffer(name, new)
            elif not on_gpu:
                np.copyto(value, new)

    def __reduce__(self):
        raise TypeError(
            "a DistributedDataParallel over an array module belongs to its process: pickle or copy ddp.module"
        )

    # ---- uneven inputs

    def join(self, divide_by_initial_world_size=True, enable=True, throw_on_early_termination=False):
        """Context manager for ranks with different numbers of steps; see :class:`cdist.algorithms.join.Join`.

        A rank that is done takes part in the others' reductions with zeros. `divide_by_initial_world_size`:
        the mean is over all ranks, otherwise over those that still train.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def _joining(self):
        return self._join_config.enable

    def _announce(self):
        if self._join_config.enable:
            Join.notify_join_context(self)
            flags = np.array([1, self.require_backward_grad_sync], np.int64)
            cdist.all_reduce(flags, group=_core._host_side(self.process_group))
            self._sync.set_divisor(None if self._divide_by_all else float(flags[0]))

    def join_hook(self, **kwargs):
        """Return what a rank without data does in the place of its steps."""
        self._divide_by_all = kwargs.get("divide_by_initial_world_size", True)
        return _ArrayJoinHook(self)

    @property
    def join_device(self):
        """Device of the collectives."""
        return "cpu"

    @property
    def join_process_group(self):
        """Group of the collectives."""
        return self.process_group


class _ArrayJoinHook(JoinHook):
    """Shadows the collectives of a step of the ranks that still train."""

    def __init__(self, ddp):
        self.ddp = ddp

    def main_hook(self):
        ddp = self.ddp
        if ddp._sync.reducer.backward:
            ddp.synchronize()
        flags = np.zeros(2, np.int64)
        cdist.all_reduce(flags, group=_core._host_side(ddp.process_group))
        ddp._sync.set_divisor(None if ddp._divide_by_all else float(flags[0]))
        if not flags[1]:
            return
        if ddp.broadcast_buffers_each_forward:
            ddp.broadcast_buffers()
        if ddp._sync.wants_replan():
            ddp._replan()
        if ddp.reduce == "weights":
            ddp._sync.weight = 0.0
        ddp._begin(REDUCE)
        ddp._finish()

    def post_hook(self, is_last_joiner):
        source = np.array([cdist.get_rank(self.ddp.process_group) if is_last_joiner else -1], np.int64)
        side = _core._host_side(self.ddp.process_group)
        cdist.all_reduce(source, op=cdist.ReduceOp.MAX, group=side)
        self.ddp.broadcast_parameters(int(source[0]))
        self.ddp._sync.set_divisor(None)


@contextlib.contextmanager
def no_sync(*modules):
    """Suspends gradient synchronisation of all the given modules (each with its own buckets) at once."""
    before = [module.require_backward_grad_sync for module in modules]
    for module in modules:
        _close_pass(module)
        module.require_backward_grad_sync = False
    try:
        yield
    finally:
        for module, flag in zip(modules, before, strict=True):
            _close_pass(module)
            module.require_backward_grad_sync = flag


def _close_pass(module):
    """End a pass of cdist.Parameters that nobody read the gradients of, since the mode changes."""
    if isinstance(module, ArrayDataParallel) and module._automatic and module._sync.reducer.backward:
        module.synchronize()


def accumulate(module, steps, batches=None):
    """See ArrayDataParallel.accumulate."""
    if steps < 1:
        raise ValueError(f"accumulate needs at least one step, not {steps}")
    return _count_steps(module, steps) if batches is None else _walk_batches(module, steps, batches)


def _count_steps(module, steps):
    for i in range(steps):
        with contextlib.nullcontext() if i == steps - 1 else no_sync(module):
            yield i


def _walk_batches(module, steps, batches):
    coming = iter(batches)
    missing = object()
    batch = next(coming, missing)
    done = 0
    while batch is not missing:
        after = next(coming, missing)
        done += 1
        last = after is missing or done % steps == 0
        with contextlib.nullcontext() if last else no_sync(module):
            yield batch, last
        batch = after


def _describe(name, value, trainable=True):
    on_gpu = is_on_gpu(value)
    data = facts_of(value) if on_gpu else to_numpy(value)
    where = " on a GPU" if on_gpu else ""
    return f"{name!r}: {data.dtype} {data.shape}{where}{'' if trainable else ', frozen'}"
