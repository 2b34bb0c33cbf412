"""cdistrun, the launcher; its workers use ``record``."""

from cdist.launch.record import record

__all__ = ["record"]
