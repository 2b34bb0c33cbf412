"""Going on after a rank was lost, without restarting.

``cdist.elastic.multiprocessing.errors`` holds ``record``, under torch's path.
"""

import contextlib
import importlib
import json
import os
import tempfile
import time
import warnings
import weakref
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

    Everyone writes its own key and looks who else did. The lowest rank that came decides, with those who are
    there, as soon as all have come that are neither gone nor frozen; so does whoever's time is over. The
    decision is one compare-and-set, so that there is one only, whoever makes it.

    A rank that is busy, or whose machine is loaded, comes late and is waited for; a process that was stopped
    may not come at all. The ranks of its host see the difference and tell the others.
    """

    def __init__(self, world, store, round_name, grace, deadline):
        self.world, self.store, self.name = world, store, round_name
        self.rank, self.size = world.rank(), world.size()
        self.grace, self.deadline = grace, deadline
        self.stopped_since = {}

    def _key(self, what):
        return f"{self.name}/{what}"

    def _present(self):
        """Ranks that are not gone, and those of them that came."""
        gone = _core._gone(self.world)
        alive = [r for r in range(self.size) if r == self.rank or not gone[r]]
        came = [r for r in alive if r == self.rank or self.store.check([self._key(r)])]
        return alive, came

    def _is_frozen(self, rank):
        """Whether its process has been stopped for the grace, as any rank of its host sees it."""
        if not _core._is_stopped(self.world, rank):
            self.stopped_since.pop(rank, None)
        elif time.monotonic() - self.stopped_since.setdefault(rank, time.monotonic()) >= self.grace:
            self.store.set(self._key(f"frozen/{rank}"), b"")
            return True
        return self.store.check([self._key(f"frozen/{rank}")])

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
            # All are asked: who sees one stopped must tell the others.
            awaited = [r for r in set(alive) - set(came) if not self._is_frozen(r)]
            if (min(came) == self.rank and not awaited) or time.monotonic() >= self.deadline:
                self.store.compare_set(self._key("members"), "", json.dumps(came))
                continue
            time.sleep(_LOOK)

    def tell_who_is_left_out(self, members):
        """Warn, once for all, of ranks whose processes live and without which the others go on."""
        if self.rank != min(members):
            return
        alive, _ = self._present()
        for rank in sorted(set(alive) - set(members)):
            frozen = self._is_frozen(rank)
            why = "its process is stopped" if frozen else "it lives, but did not call shrink in time"
            doing = "" if frozen else _core._describe_rank(self.world, rank)
            warnings.warn(
                f"shrink: ranks {members} go on without rank {rank}: {why}{doing and f' ({doing})'}",
                stacklevel=3,
            )


def _lives(store):
    """Whether the store still answers: it may have died with the rank that hosted it."""
    if store is None:
        return False
    try:
        store.check(["cdist/alive"])
    except DistStoreError:
        return False
    return True


class _File:
    """Removes a file when it is collected."""

    def __init__(self, path):
        weakref.finalize(self, _remove, path, os.getpid())


def _remove(path, owner):
    if os.getpid() == owner:  # not in a forked child
        with contextlib.suppress(OSError):
            os.unlink(path)


def _host_new_store(world, name, deadline):
    """Open a store for survivors on one host: the lowest of them hosts it and tells the port by a file.

    Return (store, what removes the file when it is collected, or None). The file is to stay as long as the
    store: who comes late finds it, and learns that the others have gone on.
    """
    from cdist.store import TCPStore

    path = os.path.join(tempfile.gettempdir(), name)
    while True:
        with contextlib.suppress(OSError, ValueError, DistStoreError):
            if os.stat(path).st_uid == os.getuid():
                with open(path) as file:
                    port = int(file.read())
                # A file that an earlier job left names a port at which nobody answers.
                brief = timedelta(seconds=1)
                return TCPStore("127.0.0.1", port, None, False, brief, wait_for_workers=False), None
        gone = _core._gone(world)
        lowest = min(r for r in range(world.size()) if r == world.rank() or not gone[r])
        if lowest == world.rank():
            store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
            part = f"{path}.{os.getpid()}"
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(str(store.port))
            os.replace(part, path)
            return store, _File(path)
        if time.monotonic() >= deadline:
            raise DistTimeoutError(
                f"shrink: the store is lost, and rank {lowest}, the lowest that is not gone, offered no new "
                "one: has it called shrink, and is it on this host?",
                rank=lowest,
                operation="shrink",
            )
        time.sleep(_LOOK)


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
        timeout: seconds or timedelta for which a rank that lives and has not called it is waited for: more
            than what a rank computes between two operations. To connect there is as much time again.
        grace: seconds that a rank whose process is stopped (SIGSTOP, a debugger) is waited for, where a rank
            of the same host sees it.

    Returns:
        The new default group.

    Raises:
        ValueError: there is no process group.
        AbortedError: the others have gone on without this rank, or this process was forked from a rank.
        DistTimeoutError: the survivors did not meet or connect in time.

    Warns:
        UserWarning: on the new rank 0, for each rank that lives and was left out.

    """
    from cdist import groups

    world = _core._need_default_group("shrink")
    world._check_fork()
    deadline = time.monotonic() + _seconds(timeout)
    _call_the_others(world, groups._registry.groups)
    shrunk = getattr(world, "_shrunk", 0) + 1
    base, file = getattr(world, "_base_store", None) or world._store, getattr(world, "_base_file", None)
    if world.size() > 1 and not _lives(base):
        base, file = _host_new_store(world, f"cdist-shrink-{_core._group_info(world)[3]}-{shrunk}", deadline)
    backend, limit, rank = world._backend, world._timeout, world.rank()
    members = [rank]
    if world.size() > 1:
        meeting = _Meeting(world, base, f"cdist/shrink/{shrunk}", _seconds(grace), deadline)
        members = meeting.agree()
        meeting.tell_who_is_left_out(members)
    if rank not in members:
        text = f"shrink: ranks {members} have gone on without rank {rank}, which came too late"
        raise AbortedError(text, rank=rank, operation="shrink")
    groups.destroy_process_group()
    store = _prefix(base, f"cdist/shrunk/{shrunk}") if base is not None else None
    if store is None:
        from cdist.store import HashStore

        store = HashStore()
    groups.init_process_group(
        str(backend),
        store=store,
        rank=members.index(rank),
        world_size=len(members),
        timeout=_seconds(timeout),
    )
    made = _core._get_default_group()
    made.set_timeout(limit)
    made._shrunk, made._base_store, made._base_file = shrunk, base, file
    return made


def __getattr__(name):
    if name == "multiprocessing":
        return importlib.import_module("cdist.elastic.multiprocessing")
    raise AttributeError(f"module 'cdist.elastic' has no attribute {name!r}")
