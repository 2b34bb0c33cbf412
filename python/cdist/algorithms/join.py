"""Join, Joinable and JoinHook under the path that torch gives them."""

from cdist.parallel.join import Join, Joinable, JoinHook

__all__ = ["Join", "JoinHook", "Joinable"]
