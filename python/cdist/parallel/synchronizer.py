"""What all kinds of data parallelism share: gradients in buckets, their plan, errors that name parameters."""

import warnings
from dataclasses import dataclass

import numpy as np

import cdist
from cdist import _core
from cdist.constants import DebugLevel, get_debug_level
from cdist.parallel.verify import broadcast_ints

LOCAL, REDUCE, HAND_OUT = 0, 1, 2
MIB = 1 << 20
FIRST_BUCKET_BYTES = MIB
BUCKET_BYTES = 25 * MIB
MODES = ("mean", "sum", "weights")


def debugging():
    """Tell whether the debug level asks for extra checks."""
    return get_debug_level() is not DebugLevel.OFF


@dataclass(frozen=True)
class Gradient:
    """A gradient's place in the buckets.

    Its name (for errors), number of elements, dtype as NumPy names it, bytes of one element.
    """

    name: str
    count: int
    dtype: str
    item_bytes: int

    @classmethod
    def of(cls, name, array):
        """Of a NumPy array, or of the Facts of one in GPU memory."""
        if isinstance(array.dtype, str):
            return cls(name, array.size, array.dtype, array.item_bytes)
        return cls(name, array.size, array.dtype.name, array.itemsize)


def bucket_caps(bucket_cap_mb=None, bucket_cap_mb_list=None):
    """Caps in bytes, the last repeats.

    As torch's: 1 MiB first, then 25 MiB; a given cap holds for all buckets.
    """
    if bucket_cap_mb_list:
        return [max(1, int(cap * MIB)) for cap in bucket_cap_mb_list]
    if bucket_cap_mb is not None and bucket_cap_mb > 0:
        return [max(1, int(bucket_cap_mb * MIB))]
    return [FIRST_BUCKET_BYTES, BUCKET_BYTES]


class Synchronizer:
    """Gradients of one model in the buckets of one group.

    Life of a step: ``begin(step)`` → ``reducer.ready(i)`` for each gradient → ``finish()``. The object that
    owns it gives three callables: ``on_backward()`` is called by a hook that finds no step going on (true: go
    on), ``on_bucket(k)`` when bucket k is full in a step of kind HAND_OUT. `what`: its name, for errors.
    """

    def __init__(
        self,
        group,
        gradients,
        *,
        reduce="mean",
        caps=None,
        device="cpu",
        memory=None,
        order=None,
        on_backward=None,
        on_bucket=None,
        what="cdist.nn.parallel.DistributedDataParallel",
    ):
        if reduce not in MODES:
            raise ValueError(f"reduce must be one of {', '.join(MODES)}, not {reduce!r}")
        self.group = group
        self.gradients = list(gradients)
        self.reduce = reduce
        self.caps = caps or bucket_caps()
        self.device = device
        self.memory = memory
        self.on_backward = on_backward
        self.on_bucket = on_bucket
        self.what = what
        self.divisor = None
        self.uses = None
        self.weight = None
        self.steps = 0
        self.replanned = False
        count = len(self.gradients)
        self.plan(list(range(count))[::-1] if order is None else order)

    # ---- plan

    def assign(self, order):
        """Bucket of each gradient, when gradients become ready in this order."""
        counts = [gradient.count for gradient in self.gradients]
        dtypes = [gradient.dtype for gradient in self.gradients]
        return _core.assign_buckets(counts, dtypes, self.caps, order)

    def plan(self, order):
        """Make new buckets for this order. Local; all ranks must give the same order."""
        self.order = order
        self.bucket_of = self.assign(order)
        self.bucket_bytes = [0] * (max(self.bucket_of, default=-1) + 1)
        for gradient, bucket in zip(self.gradients, self.bucket_of, strict=True):
            self.bucket_bytes[bucket] += gradient.count * gradient.item_bytes
        memory = self.memory(self.bucket_bytes) if self.memory else None
        self.reducer = _core.Reducer(
            self.group,
            [gradient.count for gradient in self.gradients],
            [gradient.dtype for gradient in self.gradients],
            self.bucket_of,
            "mean" if self.reduce == "mean" else "sum",
            self.device,
            memory,
            order,
        )
        self.reducer.owner = self
        if self.divisor is not None:
            self.reducer.set_divisor(self.divisor)
        if self.uses is not None:
            self.reducer.set_uses(self.uses)

    def wants_replan(self):
        """Tell whether a new plan is due: once, after the first reduced step."""
        return not self.replanned and self.steps > 0

    def agree_on_order(self):
        """Return the order in which gradients became ready on group rank 0 in the last step; collective.

        None if the buckets for it are the present ones.
        """
        self.replanned = True
        seen = self.reducer.ready_order()
        known = set(seen)
        seen += [i for i in self.order if i not in known]
        order = broadcast_ints(seen, self.group)
        if self.assign(order) != self.bucket_of:
            return order
        self.order = order
        return None

    # ---- a step

    def begin(self, step):
        """Start a step. With reduce='weights' agree on the sum of weights first (collective)."""
        if step != LOCAL and self.reduce == "weights":
            self._apply_weight()
        self.reducer.begin(step)

    def _apply_weight(self):
        if self.weight is None:
            raise ValueError(
                "reduce='weights' needs set_weight(number of local samples) before each backward pass, or "
                "weight= of GradientReducer.reduce"
            )
        total = np.array([self.weight], np.float64)
        cdist.all_reduce(total, group=_core._host_side(self.group))
        if not total[0] > 0:
            raise ValueError("reduce='weights': the weights of all ranks are zero")
        self.reducer.set_scale(self.weight / total[0])
        self.weight = None

    def finish(self, *, expected=False):
        """Wait until all gradients are reduced.

        A gradient that is missing on any rank raises RuntimeError on all, unless it was `expected` that some
        are (then zeros take part).
        """
        if self.device == "cuda" and not expected and self.reducer.step == REDUCE and self.reducer.unready:
            self.fail_for_all()
        complete = self.reducer.finish(expected)
        self.steps += self.reducer.step != LOCAL
        if not complete:
            raise RuntimeError(self.missing_text())

    def fail_for_all(self):
        """Gradients are missing on this rank: end the group.

        Buckets in GPU memory carry no flag that would tell the others.
        """
        uses = self.uses or [1] * len(self.gradients)
        missing = [index for index, count in enumerate(uses) if self.reducer.seen(index) < count]
        text = self.missing_text({cdist.get_rank(self.group): missing})
        (self.group or cdist.group.WORLD).abort(text)
        raise RuntimeError(text)

    def set_divisor(self, divisor):
        """Divides by this instead of the group's size (mean only); None: the group's size again."""
        self.divisor = divisor
        self.reducer.set_divisor(divisor or cdist.get_world_size(self.group))

    def set_uses(self, uses):
        """How often each gradient is marked in a step before it is complete."""
        self.uses = list(uses)
        self.reducer.set_uses(self.uses)

    # ---- called by hooks (csrc/py/reducer.c)

    def _begin_backward(self):
        return self.on_backward()

    def _hand_out(self):
        while (bucket := self.reducer.next_full()) >= 0:
            self.on_bucket(bucket)

    def _twice(self, index):
        if self.uses is not None:
            raise RuntimeError(
                "static_graph=True: your training graph has changed in this iteration: parameter at index "
                f"{index} with name {self.gradients[index].name} got its gradient more often than in the "
                "first iteration, in which it may have been unused. Use find_unused_parameters=True instead."
            )
        raise RuntimeError(
            f"Expected to mark a variable ready only once. Parameter at index {index} with name "
            f"{self.gradients[index].name} has been marked as ready twice. Causes: (1) the parameter is used "
            "outside of the wrapped module's forward, or by two forward passes that share it; (2) backward "
            "ran twice without the gradients of the first pass being synchronised (array modules: read .grad "
            "or call synchronize() after each), e.g. re-entrant activation checkpointing of the same layer: "
            "use static_graph=True; (3) the gradient was given twice: pass ready=False for all but the last; "
            "(4) an exception left the backward pass before this in the middle, and no forward came since."
        )

    # ---- errors

    def missing_text(self, missing=None):
        """Return the text of the error for missing gradients, with names and ranks.

        `missing`: {rank: indices}; None: asks all ranks (collective).
        """
        if missing is None:
            table = np.frombuffer(self.reducer.missing(), np.uint8).reshape(-1, len(self.gradients))
            missing = {rank: np.flatnonzero(row).tolist() for rank, row in enumerate(table)}
        said = []
        for rank, which in missing.items():
            if which:
                names = ", ".join(repr(self.gradients[i].name) for i in which[:20])
                more = f" and {len(which) - 20} more" if len(which) > 20 else ""
                said.append(
                    f"Parameter indices which did not receive grad for rank {rank}: "
                    f"{' '.join(map(str, which))} ({names}{more})."
                )
        if self.uses is not None:
            return (
                "Expected to have finished reduction in the prior iteration before starting a new one. This "
                "error indicates that your training graph has changed in this iteration: a parameter got its "
                "gradient less often than in the first iteration, which static_graph=True does not allow. "
                "Use find_unused_parameters=True instead. " + " ".join(said)
            )
        return (
            "Expected to have finished reduction in the prior iteration before starting a new one. This "
            "error indicates that your module has parameters that were not used in producing loss. You can "
            "enable unused parameter detection by passing the keyword argument `find_unused_parameters=True` "
            f"to `{self.what}`, and by making sure all `forward` function outputs participate in calculating "
            "loss. " + " ".join(said)
        )


def warn(text):
    """Give a UserWarning at the caller's place."""
    warnings.warn(text, stacklevel=3)
