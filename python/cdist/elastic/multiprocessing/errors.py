"""``record`` under torch's path."""

from cdist.launch.record import record

__all__ = ["record"]
