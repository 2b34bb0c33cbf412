"""Going on after a rank was lost, without restarting.

``cdist.elastic.multiprocessing.errors`` holds ``record``, under torch's path.
"""

import contextlib
import importlib
import json
import os
import tempfile
import time
from datetime import timedelta

from cdist import _core
from cdist.errors import AbortedError, DistError, DistStoreError, DistTimeoutError, PeerLostError

__all__ = ["shrink"]

# How often a survivor looks who else came.
_LOOK = 0.005


def _seconds(timeout):
    return timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)


class _Meeting:
    """One round in which the survivors of a world agree on who is left.

    Everyone writes its own key and looks who else did. The lowest rank that is not gone decides when all
    that are not gone have come, or when the grace is over: then who has not come is left out. The decision
    is one compare-and-set, so that there is one only, even if two ranks believe that they are the lowest.
    """

    def __init__(self, world, store, round_name, grace, deadline):
        self.world, self.store, self.name = world, store, round_name
        self.rank, self.size = world.rank(), world.size()
        self.grace, self.deadline = time.monotonic() + grace, deadline

    def _key(self, what):
        return f"{self.name}/{what}"

    def _present(self):
        """Ranks that are not gone, and those of them that came."""
        gone = _core._gone(self.world)
        alive = [r for r in range(self.size) if r == self.rank or not gone[r]]
        came = [r for r in alive if r == self.rank or self.store.check([self._key(r)])]
        return alive, came

    def _decided(self):
        if self.store.check([self._key("members")]):
            with contextlib.suppress(PeerLostError):  # of a wait that a busy store kept for long
                return json.loads(self.store.get(self._key("members")))
        return None

    def agree(self):
        """Return the list of survivors, the same on all of them."""
        self.store.set(self._key(self.rank), b"here")
        while True:
            members = self._decided()
            if members is not None:
                return members
            alive, came = self._present()
            complete = len(came) == len(alive)
            if min(came) == self.rank and (complete or time.monotonic() >= self.grace):
                self.store.compare_set(self._key("members"), "", json.dumps(came))
                continue
            if time.monotonic() >= self.deadline:
                late = sorted(set(alive) - set(came))
                raise DistTimeoutError(
                    f"shrink: ranks {late} are not gone and did not call shrink in time", operation="shrink"
                )
            time.sleep(_LOOK)


def _lives(store):
    """Whether the store still answers: it may have died with the rank that hosted it."""
    if store is None:
        return False
    try:
        store.check(["cdist/alive"])
    except DistStoreError:
        return False
    return True


def _host_new_store(world, name, deadline):
    """Open a store for survivors on one host: the lowest of them hosts it and tells the port by a file."""
    from cdist.store import TCPStore

    path = os.path.join(tempfile.gettempdir(), name)
    while time.monotonic() < deadline:
        gone = _core._gone(world)
        lowest = min(r for r in range(world.size()) if r == world.rank() or not gone[r])
        if lowest == world.rank():
            store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
            part = f"{path}.{os.getpid()}"
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(str(store.port))
            os.replace(part, path)
            return store, path
        with contextlib.suppress(OSError, ValueError, DistStoreError):
            if os.stat(path).st_uid == os.getuid():
                with open(path) as file:
                    port = int(file.read())
                # A file that an earlier job left names a port at which nobody answers.
                return TCPStore(
                    "127.0.0.1", port, None, False, timedelta(seconds=1), wait_for_workers=False
                ), None
        time.sleep(_LOOK)
    raise DistTimeoutError(
        "shrink: the store is lost and no other rank of this host offered a new one", operation="shrink"
    )


def _call_the_others(world, registered):
    """End all groups, so that a survivor who waits in one without the lost rank comes to the meeting too."""
    why, lost = _core._group_info(world)[2] or "some ranks were lost or late", -1
    try:
        world._check()
    except PeerLostError as error:
        lost = -1 if error.rank is None else error.rank
    except DistError:
        pass
    for group in registered:
        group._fail(f"rank {world.rank()} goes on without this group (cdist.shrink()): {why}"[:900], lost)


def _prefix(store, name):
    from cdist.store import PrefixStore

    return PrefixStore(name, store)


def shrink(timeout=60, grace=5):
    """Go on with the ranks that are left after one was lost, as a new default group.

    Every survivor calls it, typically on PeerLostError or DistTimeoutError. All groups of the old world
    are destroyed; who waits in one that the lost rank is not in gets PeerLostError too. The survivors keep
    their order and are numbered anew from 0; arrays and models in memory stay as they are, but what a failed
    operation was writing to is undefined. Call again whenever a further rank is lost.

    The survivors meet through the store that the group was made with. If that was hosted by a rank that
    died, and all survivors are on one host, the lowest of them hosts a new one.

    Args:
        timeout: seconds or timedelta until which the survivors must have met and connected.
        grace: seconds that a rank which is neither gone nor here is waited for; then it is left out (a
            frozen process).

    Returns:
        The new default group.

    Raises:
        ValueError: there is no process group.
        AbortedError: the others have gone on without this rank.
        DistTimeoutError: not all came in time.

    """
    from cdist import groups

    world = _core._get_default_group()
    if world is None:
        raise ValueError(
            "Default process group has not been initialized, please make sure to call init_process_group."
        )
    deadline = time.monotonic() + _seconds(timeout)
    _call_the_others(world, groups._registry.groups)
    shrunk = getattr(world, "_shrunk", 0) + 1
    base, path = getattr(world, "_base_store", None) or world._store, None
    if world.size() > 1 and not _lives(base):
        base, path = _host_new_store(world, f"cdist-shrink-{_core._group_info(world)[3]}-{shrunk}", deadline)
    backend, limit, rank = world._backend, world._timeout, world.rank()
    try:
        if world.size() > 1:
            members = _Meeting(world, base, f"cdist/shrink/{shrunk}", _seconds(grace), deadline).agree()
        else:
            members = [rank]
        if rank not in members:
            text = f"shrink: ranks {members} have gone on without rank {rank}, which came too late"
            raise AbortedError(text, rank=rank, operation="shrink")
        groups.destroy_process_group()
        left = max(deadline - time.monotonic(), 0.1)
        store = _prefix(base, f"cdist/shrunk/{shrunk}") if base is not None else None
        if store is None:
            from cdist.store import HashStore

            store = HashStore()
        groups.init_process_group(
            str(backend), store=store, rank=members.index(rank), world_size=len(members), timeout=left
        )
    finally:
        if path is not None:
            with contextlib.suppress(OSError):
                os.unlink(path)
    made = _core._get_default_group()
    made.set_timeout(limit)
    made._shrunk, made._base_store = shrunk, base
    return made


def __getattr__(name):
    if name == "multiprocessing":
        return importlib.import_module("cdist.elastic.multiprocessing")
    raise AttributeError(f"module 'cdist.elastic' has no attribute {name!r}")
