"""Reduction of bare gradients: arrays in any nest of dicts, lists and tuples, from whatever computes them."""

import sys
from typing import TypeVar

import numpy as np

import cdist
from cdist import _core
from cdist.parallel.gpu_buckets import GpuBuckets, empty, facts_of, framework_of, is_on_gpu, same_place
from cdist.parallel.parameter import as_kind_of, check_dtype, dict_like, is_written_through, to_numpy
from cdist.parallel.synchronizer import REDUCE, Gradient, Synchronizer, bucket_caps
from cdist.parallel.verify import agree_on_parameters

Gradients = TypeVar("Gradients")  # an array, or a nest of them


def _sorted_keys(tree):
    """Keys of a dict in an order that all ranks have; those that do not compare by their type and text."""
    try:
        return sorted(tree)
    except TypeError:
        return sorted(tree, key=lambda key: (type(key).__name__, str(key)))


def flatten(tree, path=""):
    """[(path, leaf)…] in an order that does not depend on how dicts were filled. None is a leaf."""
    if isinstance(tree, dict):
        return [item for key in _sorted_keys(tree) for item in flatten(tree[key], f"{path}[{key!r}]")]
    if isinstance(tree, (list, tuple)):
        return [item for number, part in enumerate(tree) for item in flatten(part, f"{path}[{number}]")]
    if _is_foreign_tree(tree):
        leaves = sys.modules["jax"].tree_util.tree_flatten_with_path(tree)[0]
        return [(path + sys.modules["jax"].tree_util.keystr(key), leaf) for key, leaf in leaves]
    return [(path or "gradient", tree)]


def rebuild(tree, leaves):
    """Return the same nest with other leaves, taken from an iterator in the order of :func:`flatten`."""
    if isinstance(tree, dict):
        return dict_like(tree, {key: rebuild(tree[key], leaves) for key in _sorted_keys(tree)})
    if isinstance(tree, (list, tuple)):
        parts = [rebuild(part, leaves) for part in tree]
        if hasattr(tree, "_fields"):
            return type(tree)(*parts)
        return type(tree)(parts)
    if _is_foreign_tree(tree):
        jax = sys.modules["jax"]
        count = len(jax.tree_util.tree_leaves(tree))
        structure = jax.tree_util.tree_structure(tree)
        return jax.tree_util.tree_unflatten(structure, [next(leaves) for _ in range(count)])
    return next(leaves)


def _is_foreign_tree(tree):
    """Tell whether only JAX knows how to take a node apart (its registered containers)."""
    jax = sys.modules.get("jax")
    if (
        jax is None
        or tree is None
        or hasattr(tree, "__array__")
        or np.isscalar(tree)
        or not hasattr(jax, "tree_util")
    ):
        return False
    return not jax.tree_util.all_leaves([tree])


def _facts_like(name, leaf, dtype):
    """Facts of a gradient in GPU memory, which is of its parameter's dtype; None of None."""
    if leaf is None:
        return None
    if not is_on_gpu(leaf):
        raise TypeError(f"gradient {name} lies in host memory, its parameter on a GPU")
    facts = facts_of(leaf)
    if facts.dtype != dtype:
        raise TypeError(f"gradient {name} is {facts.dtype}, its parameter {dtype}: on a GPU they are alike")
    return facts


class GradientReducer:
    """Averages gradients over the ranks, for code that computes them itself.

    With JAX, HIPS autograd, tinygrad, or by hand::

        reducer = cdist.GradientReducer(params)
        while ...:
            grads = grad_function(params, batch)
            grads = reducer.reduce(grads)

    `params`: arrays, or any nest of dicts, lists and tuples of arrays (JAX's registered containers too), that
    have the structure, shapes and dtypes of the gradients; only these are used. None stands for no parameter,
    and its gradient is None. All ranks must give the same; a difference raises RuntimeError on every rank
    (not with init_sync=False). `reduce`: 'mean', 'sum', or 'weights' (see :meth:`reduce`).
    """

    def __init__(
        self,
        params,
        process_group=None,
        *,
        reduce="mean",
        bucket_cap_mb=None,
        find_unused_parameters=False,
        init_sync=True,
    ):
        self.process_group = process_group
        self.find_unused_parameters = find_unused_parameters
        tree = flatten(params)
        self._places = [(name, leaf is not None) for name, leaf in tree]
        leaves = [(name, leaf) for name, leaf in tree if leaf is not None]
        gpu = same_place(leaves)
        arrays = [to_numpy(leaf) if gpu is None else facts_of(leaf) for _, leaf in leaves]
        self._names = [name for name, _ in leaves]
        self._frameworks = [framework_of(leaf) for _, leaf in leaves]
        self._shapes = [array.shape for array in arrays]
        self._dtypes = [
            check_dtype(f"GradientReducer: {name}", array.dtype)
            for name, array in zip(self._names, arrays, strict=True)
        ]
        where = "" if gpu is None else " on a GPU"
        if init_sync:
            agree_on_parameters(
                [f"{name}: {a.dtype} {a.shape}{where}" for name, a in zip(self._names, arrays, strict=True)],
                process_group,
            )
        gradients = [Gradient.of(name, array) for name, array in zip(self._names, arrays, strict=True)]
        self._gpu = None if gpu is None else GpuBuckets(process_group, gpu)
        order = list(range(len(gradients)))  # bare gradients come all at once, first to last
        self._sync = Synchronizer(
            process_group,
            gradients,
            reduce=reduce,
            caps=bucket_caps(bucket_cap_mb),
            order=order,
            device="cpu" if gpu is None else "cuda",
            memory=self._gpu and self._gpu.allocate,
            what="cdist.GradientReducer",
        )
        reducer = self._sync.reducer
        if self._gpu:
            self._gpu.lay_out(reducer, gradients)
            return
        buckets = [reducer.bucket(k) for k in range(reducer.buckets)]
        self._views = []
        for index, (shape, dtype) in enumerate(zip(self._shapes, self._dtypes, strict=True)):
            bucket, offset = reducer.place(index)
            self._views.append(np.ndarray(shape, dtype, buffer=buckets[bucket], offset=offset))

    def reduce(self, grads: Gradients, weight: float | None = None) -> Gradients:
        """Reduce gradients; collective.

        `grads` has the structure of the parameters; a leaf may be None if find_unused_parameters is set (it
        counts as zeros; None on all ranks stays None), otherwise RuntimeError on every rank.

        Returns the same structure. Writable NumPy arrays, torch's tensors, objects that offer their memory by
        DLPack alone and arrays in GPU memory (CuPy and whatever else has a CUDA array interface or DLPack;
        where the parameters lie there too) are reduced in place and returned; for other leaves new arrays of
        the same kind (NumPy's where that is not known), for numbers numbers. JAX's and tinygrad's go through
        host memory. On GPUs the call returns at once: the results are in order with the current stream, and a
        gradient that is missing on another rank is told by the next call.

        `weight`: with reduce='weights' this rank's number of samples (tokens, …); the result is the weighted
        mean, exact for uneven batches.
        """
        leaves = self._leaves(grads)
        if self._gpu:
            arrays = list(map(_facts_like, self._names, leaves, self._dtypes))
        else:
            arrays = [None if leaf is None else to_numpy(leaf) for leaf in leaves]
        for name, array, shape, dtype in zip(self._names, arrays, self._shapes, self._dtypes, strict=True):
            if array is None:
                continue
            if array.shape != shape:
                raise ValueError(f"GradientReducer: {name} has shape {array.shape}, its parameter {shape}")
            if not self._gpu and not np.can_cast(array.dtype, dtype, "same_kind"):
                raise TypeError(f"GradientReducer: {name} is of {array.dtype}, its parameter of {dtype}")
        if weight is not None:
            if self._sync.reduce != "weights":
                raise ValueError(f"weight is for reduce='weights', not {self._sync.reduce!r}")
            if not 0 <= weight < np.inf:
                raise ValueError(f"weight must be a number from 0 on, not {weight}")
            self._sync.weight = float(weight)
        if self._gpu:
            results = iter(self._run_on_gpu(leaves, arrays))
        else:
            used = self._run(arrays)
            results = iter(
                [self._result(index, leaf, arrays[index], used[index]) for index, leaf in enumerate(leaves)]
            )
        return rebuild(grads, iter([next(results) if is_there else None for _, is_there in self._places]))

    def _leaves(self, grads):
        """Return the gradients of the parameters, in their order."""
        leaves = flatten(grads)
        theirs, mine = [name for name, _ in leaves], [name for name, _ in self._places]
        if theirs != mine:
            raise ValueError(
                "gradients do not have the structure of the parameters: "
                f"missing {sorted(set(mine) - set(theirs))[:5]}, "
                f"unknown {sorted(set(theirs) - set(mine))[:5]}"
            )
        extra = [
            name
            for (name, leaf), (_, is_there) in zip(leaves, self._places, strict=True)
            if leaf is not None and not is_there
        ]
        if extra:
            raise ValueError(f"gradients where the parameter is None: {extra[:5]}")
        return [leaf for (_, leaf), (_, is_there) in zip(leaves, self._places, strict=True) if is_there]

    def _run_on_gpu(self, leaves, facts):
        stream = next((f.stream for f in facts if f is not None), 0)
        reducer = self._sync.reducer
        reducer.set_stream(stream)
        self._sync.begin(REDUCE)
        self._gpu.pack(leaves, stream)
        for index, leaf in enumerate(leaves):
            if leaf is not None:
                reducer.ready(index)
        used = self._finish(leaves)
        results = [
            leaf
            if leaf is not None
            else empty(
                self._frameworks[index],
                self._shapes[index],
                self._dtypes[index],
                self._gpu.index,
                self.process_group,
            )
            if used[index]
            else None
            for index, leaf in enumerate(leaves)
        ]
        self._gpu.unpack(results, stream)
        return results

    def _run(self, arrays):
        self._sync.begin(REDUCE)
        reducer = self._sync.reducer
        for index, array in enumerate(arrays):
            if array is not None:
                np.copyto(self._views[index], array, casting="same_kind")
                reducer.ready(index)
        return self._finish(arrays)

    def _finish(self, arrays):
        """End the step; tell which gradients some rank has given."""
        used = np.array([array is not None for array in arrays], np.uint8)
        self._sync.finish(expected=self.find_unused_parameters)
        if self.find_unused_parameters and used.size:
            cdist.all_reduce(used, op=cdist.ReduceOp.MAX, group=_core._host_side(self.process_group))
        return used

    def _result(self, index, leaf, array, used):
        if not used:
            return None
        view = self._views[index]
        if (
            leaf is not None
            and is_written_through(leaf, array)
            and np.can_cast(view.dtype, array.dtype, "same_kind")
        ):
            array[...] = view
            return leaf
        return view.copy() if leaf is None else as_kind_of(leaf, view.copy())
