"""The exceptions of cdist. All survive pickle and copy with their fields.

``DistError`` is a ``RuntimeError``, so code written for torch.distributed catches them as before::

    DistError(RuntimeError)
    ├── DistBackendError
    │   ├── PeerLostError        a rank died, left or was cut off: .rank
    │   ├── MismatchError        ranks called different operations, shapes, dtypes or roots
    │   └── AbortedError         the group was aborted or shut down
    ├── DistNetworkError
    │   └── RefusedError         a peer said no: duplicate rank, other world size, wrong secret
    ├── DistStoreError
    │   ├── QueueEmptyError
    │   └── DistStoreTimeoutError
    └── DistTimeoutError(DistError, TimeoutError)
        └── DistStoreTimeoutError(DistStoreError, DistTimeoutError)

Wrong arguments are ``ValueError`` or ``TypeError``, raised before anything is sent.
"""

__all__ = [
    "DistError",
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "DistTimeoutError",
    "DistStoreTimeoutError",
    "PeerLostError",
    "MismatchError",
    "AbortedError",
    "RefusedError",
    "QueueEmptyError",
]


def _rebuild(cls, args, fields):
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(fields)
    return error


class DistError(RuntimeError):
    """Base of all errors of cdist.

    Attributes:
        rank: world rank at fault, or None.
        operation: name of the function that failed ("all_reduce"), or None.

    """

    def __init__(self, *args, rank: int | None = None, operation: str | None = None):
        super().__init__(*args)
        self.rank = rank
        self.operation = operation

    def __reduce__(self):
        return _rebuild, (type(self), self.args, dict(self.__dict__))


class DistBackendError(DistError):
    """An operation of a group failed; the group is not usable any more."""


class DistNetworkError(DistError):
    """A socket failed, or a connection could not be made."""


class DistStoreError(DistError):
    """The key-value store refused, is closed or is lost."""


class DistTimeoutError(DistError, TimeoutError):
    """A deadline passed. The text names who did not come."""

    def __new__(cls, *args, **fields):
        """Make a TimeoutError: RuntimeError is the first of the bases, but not the larger object."""
        return TimeoutError.__new__(cls, *args)


class DistStoreTimeoutError(DistStoreError, DistTimeoutError):
    """A key did not appear in the store in time."""


class PeerLostError(DistBackendError):
    """A rank died, left or was cut off; ``rank`` says which."""


class MismatchError(DistBackendError):
    """Ranks called different operations, shapes, dtypes, reductions or roots; the text shows both sides."""


class AbortedError(DistBackendError):
    """The group was aborted or shut down while the operation ran or before it began."""


class RefusedError(DistNetworkError):
    """A peer refused this process: duplicate rank, other world size, other version or wrong secret."""


class QueueEmptyError(DistStoreError):
    """``queue_pop(block=False)`` found nothing."""
