"""DistributedDataParallel: one name over every kind of module."""

import sys

from cdist.parallel.array_module import ArrayDataParallel


def is_torch_module(module):
    """Tell whether it is a torch.nn.Module; torch is not imported to find out."""
    torch = sys.modules.get("torch")
    return torch is not None and hasattr(torch, "nn") and isinstance(module, torch.nn.Module)


def _implementation(module):
    if is_torch_module(module):
        from cdist.parallel.torch_module import TorchDataParallel

        return TorchDataParallel
    if callable(getattr(module, "named_parameters", None)):
        return ArrayDataParallel
    raise TypeError(
        f"DistributedDataParallel wraps a torch.nn.Module or an object with named_parameters(), not "
        f"{type(module).__name__}; for bare arrays there is cdist.GradientReducer"
    )


def _shown():
    """Return the class whose arguments and methods are shown: over torch modules where torch is loaded."""
    if getattr(sys.modules.get("torch"), "nn", None) is None:
        return ArrayDataParallel
    from cdist.parallel.torch_module import TorchDataParallel

    return TorchDataParallel


class _Init:
    """``__init__`` of DistributedDataParallel: that of the class that fits the module, with its signature."""

    @property
    def __signature__(self):
        import inspect

        return inspect.signature(_shown().__init__)

    def __get__(self, instance, owner=None):
        return self if instance is None else super(DistributedDataParallel, instance).__init__

    def __call__(self, instance, *args, **kwargs):
        self.__get__(instance)(*args, **kwargs)


class _ByModule(type):
    """Makes DistributedDataParallel(module) an object of the class that fits the module.

    Each is a subclass of DistributedDataParallel, and of the user's own subclass where one was called.
    """

    @property
    def __signature__(cls):
        import inspect

        signature = inspect.signature(_shown().__init__)
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    def __getattr__(cls, name):
        """Return a method or function by the name of the class alone: DistributedDataParallel.no_sync."""
        if name.startswith("__"):
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
        return getattr(_shown(), name)

    def __dir__(cls):
        ours = [base for base in _shown().__mro__ if base.__module__.startswith("cdist")]
        names = {name for base in ours for name in vars(base) if not name.startswith("__")}
        return sorted({*super().__dir__(), *names})

    def __call__(cls, module, *args, **kwargs):
        if any(getattr(base, "_is_implementation", False) for base in cls.__mro__):
            return super().__call__(module, *args, **kwargs)
        return super(_ByModule, concrete(cls, _implementation(module))).__call__(module, *args, **kwargs)


def concrete(cls, implementation):
    """Return the class of objects of `cls` (ours or a subclass) over one kind of module."""
    made = cls.__dict__.get("_concrete")
    if made is None:
        made = {}
        type.__setattr__(cls, "_concrete", made)
    if implementation not in made:
        meta = (
            type(f"_ByModuleOf{implementation.__name__}", (_ByModule, type(implementation)), {})
            if not issubclass(_ByModule, type(implementation))
            else _ByModule
        )
        body = {
            "_is_implementation": True,
            "_made_from": cls,
            "__module__": cls.__module__,
            "__doc__": cls.__doc__,
            "__qualname__": cls.__qualname__,
        }
        made[implementation] = meta(cls.__name__, (cls, implementation), body)
    return made[implementation]


class DistributedDataParallel(metaclass=_ByModule):
    """Wraps a module so that its gradients are averaged over a group while the backward pass goes on.

    ``DistributedDataParallel(module, …)`` over a ``torch.nn.Module`` takes all arguments of torch's class and
    behaves like it; the result is a ``torch.nn.Module`` (see :mod:`cdist.parallel.torch_module`).

    Over any other object with ``named_parameters()`` (pairs of name and parameter, where a parameter has
    ``.data`` and ``.grad``) the arguments are ``process_group=None, reduce='mean', init_sync=True,
    broadcast_buffers=True, bucket_cap_mb=None, bucket_cap_mb_list=None, find_unused_parameters=False,
    static_graph=False``.

    * If the parameters are :class:`cdist.Parameter`, the backward pass calls ``p.accumulate_grad(g)``; each
      bucket of gradients is reduced as soon as it is full, and reading ``p.grad`` waits. There is no way to
      read a gradient that should have been reduced and was not.
    * For other parameter classes call ``ddp.synchronize()`` after each backward pass: it reduces their
      ``grad``.

    Data and gradients may lie in GPU memory, all of them on this rank's GPU: CuPy arrays under both kinds of
    parameters, and under classes of your own whatever else has a CUDA array interface or DLPack. They are
    copied into buckets by one kernel and reduced by NCCL in the order of the current stream; the host does
    not wait. A gradient that one rank lacks ends the group there, with names: buckets in GPU memory carry no
    flag that would tell the others in time.

    ``reduce``: 'mean' over ranks, 'sum', or 'weights' (``ddp.set_weight(n)`` before each backward pass; exact
    for uneven batches). Parameters of rank 0 are given to all ranks at construction, after names, order,
    shapes and dtypes were compared; a difference raises RuntimeError on every rank.
    """

    __init__ = _Init()
