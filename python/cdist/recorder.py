"""What every rank did last: ``dump()`` writes it, SIGUSR2 asks for it, ``python -m cdist.doctor`` reads it.

The recorder itself is always on: the last 256 operations of each rank lie in the memory that the ranks of
a host share, so a rank can tell also what a dead or frozen neighbour was at.
"""

import contextlib
import os
import sys
import threading
import time
import traceback

from cdist import _core

__all__ = ["dump"]

# Other ranks notice a mismatch at about the same moment; how long to wait for the line that they call from.
_SITE_WAIT = 0.05
_NOT_THE_PROGRAM = (__name__, "cdist.dump_signal")


def _is_ours(frame):
    name = frame.f_globals.get("__name__", "")
    return name == "cdist" or name.startswith("cdist.")


def _stack(frame):
    """Frames from the innermost one outwards."""
    summary = traceback.extract_stack(frame)
    return [
        {"file": item.filename, "line": item.lineno, "function": item.name, "text": item.line or ""}
        for item in reversed(summary)
    ]


def _threads(skip):
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    found = []
    for ident, frame in sys._current_frames().items():
        # The frames of dump() itself, and of the signal handler that called it, tell nothing.
        while ident == skip and frame is not None and frame.f_globals.get("__name__") in _NOT_THE_PROGRAM:
            frame = frame.f_back
        found.append(
            {"name": names.get(ident, "?"), "id": ident, "main": ident == main, "stack": _stack(frame)}
        )
    found.sort(key=lambda thread: not thread["main"])
    return found


def _group_table(registry):
    table = []
    for group in registry.groups:
        context, sequence, broken, _ = _core._group_info(group)
        table.append(
            {
                "name": group.group_name,
                "description": group.group_desc,
                "ranks": list(group._ranks),
                "context": context,
                "sequence": sequence,
                "transport": group._transport,
                "timeout": group._timeout if group._timeout != float("inf") else None,
                "broken": broken,
            }
        )
    return table


def collect(reason="asked"):
    """Return what dump() writes, as a dict of plain values."""
    from cdist.groups import _registry

    world = _core._need_default_group("dump")
    rank = world.rank()
    gone = _core._gone(world)
    peers = [_core._records(world, other, 16) for other in range(len(gone)) if other != rank]
    own = _core._records(world, rank)
    return {
        "cdist_dump": 1,
        "reason": reason,
        "rank": rank,
        "world_size": world.size(),
        "pid": os.getpid(),
        "host": os.uname().nodename,
        "time": time.time(),
        "monotonic": time.monotonic(),
        "argv": list(sys.argv),
        "groups": _group_table(_registry),
        "operations": own["operations"],
        "peers": [peer for peer in peers if peer],
        "gone": [other for other, is_gone in enumerate(gone) if is_gone],
        "known": {str(r): _core._describe_rank(world, r) for r in range(len(gone)) if r != rank},
        "threads": _threads(threading.get_ident()),
    }


def dump(path=None, reason="asked", failed_at=None) -> str:
    """Write what this rank did last, and where each of its threads is, as JSON.

    The file holds the table of groups, this rank's last 256 operations (kind, dtype, reduction, bytes,
    sequence, state, and the times in seconds on the monotonic clock at which each was queued, started and
    done), the last 16 of each other rank of the host, and the Python stacks of all threads. Local: no
    other rank is needed.

    Args:
        path: file to write, or None: ``cdist-rank<rank>-pid<pid>.json`` in CDIST_DUMP_DIR or the temporary
            folder.
        reason: free text for the file.
        failed_at: for the file too: the line of the exception that ends this rank.

    Returns:
        The path.

    Raises:
        ValueError: there is no process group.
        OSError: the file cannot be written.

    """
    import json  # here and below: set-up is quicker without what only a dump needs

    found = collect(reason) | ({"failed_at": failed_at} if failed_at is not None else {})
    if path is None:
        import tempfile

        folder = os.environ.get("CDIST_DUMP_DIR") or tempfile.gettempdir()
        path = os.path.join(folder, f"cdist-rank{found['rank']}-pid{found['pid']}.json")
    path = os.fspath(path)
    part = f"{path}.part"
    with open(part, "w") as file:
        json.dump(found, file)
    os.replace(part, path)
    return path


def dump_uncaught(world, error):
    """Write the dump of a rank that ends with this exception, unless it wrote one for the error's cause."""
    from cdist.errors import AbortedError, PeerLostError

    if not isinstance(error, (PeerLostError, AbortedError)) or getattr(world, "_dumped", None) is None:
        frames = list(reversed(traceback.extract_tb(error.__traceback__)))
        package = os.path.dirname(os.path.abspath(__file__)) + os.sep
        own = next((f for f in frames if not f.filename.startswith(package)), None)
        place = f"{os.path.basename(own.filename)}:{own.lineno} in {own.name}" if own else ""
        dump(reason=f"{type(error).__name__}: {error}"[:500], failed_at=place)


def _sites(world):
    """Return where the other ranks of this host are in the operation that failed here, after a moment."""
    end = time.monotonic() + _SITE_WAIT
    others = [rank for rank in range(world.size()) if rank != world.rank()]
    mine = _core._records(world, world.rank(), 1)["operations"]
    place = [(o["group"], o["sequence"]) for o in mine]
    while True:
        known = [record for record in (_core._records(world, rank, 1) for rank in others) if record]
        found = {
            record["rank"]: record["site"]
            for record in known
            if record["site"] and [(o["group"], o["sequence"]) for o in record["operations"]] == place
        }
        if len(found) >= len(known) or time.monotonic() >= end:
            return found
        time.sleep(0.002)


def _on_failure(error):
    """Add what is known to an exception that ends a group; the core calls it before it raises."""
    world = _core._get_default_group()
    if world is None:
        return
    from cdist.errors import MismatchError, PeerLostError

    _core._note_site(world)
    lost = error.rank if isinstance(error, PeerLostError) else None
    world._note_raised(-1 if lost is None else lost)
    cause = str(error)
    if isinstance(error, MismatchError):
        found = _sites(world)
        if found:
            said = ", ".join(f"rank {rank} at {site}" for rank, site in sorted(found.items()))
            error.args = (f"{error.args[0]}; {said}",)
    elif isinstance(error, PeerLostError):
        # The cause reads alike on all ranks; where this one was, and what can be done, is added to it.
        place = f" (seen by rank {world.rank()} in {error.operation})" if error.operation else ""
        remedy = "cdist.shrink() goes on without it, destroy_process_group() lets all begin anew"
        error.args = (f"{error.args[0]}{place}; {remedy}",)
    if os.environ.get("CDIST_DUMP_DIR") and getattr(world, "_dumped", None) != cause:
        world._dumped = cause
        with contextlib.suppress(OSError, ValueError):
            dump(reason=f"{type(error).__name__}: {error}")
