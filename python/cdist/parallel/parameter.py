"""Parameters whose values are arrays, and how arrays of any kind are told apart and filled."""

import copy

import numpy as np

import cdist
from cdist import _core
from cdist.parallel.gpu_buckets import framework_of, is_on_gpu


class Parameter:
    """An array with a gradient: what a hand-written layer needs to be trained on several ranks.

    ``data`` is any NumPy or CuPy array of real or complex floats. A backward pass gives its gradient by
    :meth:`accumulate_grad`. Under :class:`~cdist.nn.parallel.DistributedDataParallel` the gradient lives in a
    bucket in shared memory and is averaged over the ranks while the backward pass goes on; reading
    :attr:`grad` waits for that.
    """

    __slots__ = ("data", "name", "requires_grad", "_grad", "_link", "__weakref__")

    def __init__(self, data, name=None, requires_grad=True):
        self.data = data if is_on_gpu(data) else np.asarray(data)
        self.name = name
        self.requires_grad = requires_grad
        self._grad = None
        self._link = None

    @property
    def grad(self):
        """The gradient, or None.

        Under DistributedDataParallel: reading it ends the backward pass (every rank must then come to its
        end), and the array is a view that the next step overwrites. Change it in place (``p.grad *= c``);
        assigning None is :meth:`zero_grad`.
        """
        if self._link is None:
            return self._grad
        owner, index = self._link
        return owner._read_grad(index)

    @grad.setter
    def grad(self, value):
        if value is None:
            self.zero_grad()
        elif self._link is None:
            self._grad = value
        else:
            owner, index = self._link
            if value is not owner._views[index]:
                raise ValueError(
                    f"parameter {owner._names[index]!r}: its gradient lives in a bucket of "
                    "DistributedDataParallel; give a new one by accumulate_grad(g), which has it reduced, or "
                    "change it in place by grad[...] = g"
                )

    def accumulate_grad(self, gradient, ready=True):
        """Add `gradient` (an array of the shape of `data`).

        `ready`: it is then complete for this backward pass. A parameter that is used several times gives
        ``ready=False`` for all but the last.
        """
        if self._link is not None:
            owner, index = self._link
            owner._accumulate(index, gradient, ready)
            return
        if not is_on_gpu(gradient):
            gradient = np.asarray(gradient)
        if gradient.shape != self.data.shape:
            raise ValueError(f"gradient of shape {gradient.shape} for a parameter of shape {self.data.shape}")
        if self._grad is None:
            self._grad = gradient.astype(self.data.dtype)
        else:
            self._grad += gradient

    def zero_grad(self):
        """Forgets the gradient."""
        if self._link is None:
            self._grad = None
        else:
            owner, index = self._link
            owner._forget(index)

    def __reduce__(self):
        """Pickle and copy without the gradient, as torch does, and outside of DistributedDataParallel."""
        return type(self), (self.data, self.name, self.requires_grad)

    def __repr__(self):
        return f"Parameter({self.name or ''}{': ' if self.name else ''}{self.data.dtype} {self.data.shape})"


def dict_like(old, values):
    """Return a dict of the kind of `old`, with its keys in their order and with these values of theirs."""
    if type(old) is dict:
        return {key: values[key] for key in old}
    new = copy.copy(old)  # a kind may want other arguments than items, as defaultdict does
    for key in old:
        new[key] = values[key]
    return new


def unique_parameters(module, ignored=()):
    """(name, parameter) of each distinct parameter, under its first name."""
    seen, found = set(), []
    for name, parameter in module.named_parameters():
        if id(parameter) not in seen and name not in ignored:
            seen.add(id(parameter))
            found.append((name, parameter))
    return found


def _is_producer_only(value):
    """Tell whether a value offers its memory by DLPack and in no way that NumPy would take by itself."""
    return hasattr(value, "__dlpack__") and not hasattr(value, "__array__")


def to_numpy(leaf):
    """Return the values of a leaf as a NumPy array, uncopied if the framework shares it. CPU only."""
    if isinstance(leaf, np.ndarray):
        return leaf
    if framework_of(leaf) == "torch":
        leaf = leaf.detach()
        if str(leaf.dtype) == "torch.bfloat16":
            raise TypeError(
                "torch's bfloat16 has no dtype in NumPy: wrap a torch module, or give such arrays as float32"
            )
        return leaf.numpy()
    if framework_of(leaf) == "tinygrad":
        return leaf.numpy()
    if _is_producer_only(leaf):
        return np.from_dlpack(leaf)
    return np.asarray(leaf)


def is_written_through(value, array):
    """Tell whether writing to `array`, made by to_numpy, changes the value itself."""
    shares = isinstance(value, np.ndarray) or framework_of(value) == "torch" or _is_producer_only(value)
    return shares and array.flags.writeable


def check_dtype(what, dtype):
    """Return the dtype (NumPy's, or its name) in the byte order of this machine, in which sums are taken.

    TypeError unless gradients can be of it.
    """
    if isinstance(dtype, str):
        kind = "f" if dtype == "bfloat16" else np.dtype(dtype).kind
    else:
        dtype = dtype.newbyteorder("=")
        kind = "f" if dtype.name == "bfloat16" else dtype.kind
    if kind == "O":
        raise TypeError(f"{what} is no array of numbers: gradients come in dicts, lists and tuples of arrays")
    if kind not in "fc":
        raise TypeError(
            f"{what} is of {dtype}; gradients are real or complex floats: leave out what is not trained, or "
            "put None in its place"
        )
    return dtype


def broadcast_array(holder, attribute, group, src=0):
    """Give holder.attribute the values of group rank `src`.

    In place where its memory can be written to, also on a GPU.
    """
    value = getattr(holder, attribute)
    if is_on_gpu(value):
        cdist.broadcast(value, group_src=src, group=group)
        return
    array = to_numpy(value)
    if is_written_through(value, array):
        cdist.broadcast(array, group_src=src, group=group)
        return
    copy = np.array(array)
    cdist.broadcast(copy, group_src=src, group=_core._host_side(group))
    setattr(holder, attribute, as_kind_of(value, copy))


def as_kind_of(example, array):
    """`array` (NumPy, not shared with anybody) as the kind of array or number that `example` is."""
    if isinstance(example, np.ndarray):
        return array
    if np.isscalar(example):
        return array[()] if isinstance(example, np.generic) else array.item()
    if framework_of(example) in ("jax", "jaxlib"):
        import jax.numpy

        return jax.numpy.asarray(array)
    if framework_of(example) == "torch":
        import torch

        return torch.from_numpy(array)
    if _is_producer_only(example):
        return array
    try:
        return type(example)(array)
    except TypeError:  # nobody knows how one is made
        return array
