"""How the processes of a job meet: a URL becomes a store, a rank and a world size.

``env://`` reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun and cdistrun set them; where RANK
is missing, what Open MPI, MPICH or SLURM tell a process. ``tcp://host:port`` and ``file:///path`` take rank
and world size from their query or from the caller.
"""

import os
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from numbers import Integral
from types import SimpleNamespace

from cdist import _core
from cdist.store import DEFAULT_PORT, FileStore, PrefixStore, Store, TCPStore

__all__ = ["rendezvous", "register_rendezvous_handler", "find_launcher"]

_TIMEOUT = timedelta(minutes=30)
_handlers: dict[str, Callable[..., Iterator[tuple[Store, int, int]]]] = {}

# Who starts processes, and where it says rank, world size, rank on the host and processes on the host.
_LAUNCHERS = {
    "Open MPI": tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # Of srun only: a batch script sees SLURM_PROCID too, but is not one of the tasks.
    "SLURM": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
}


def _split(url):
    """Return the parts of a URL.

    urllib costs as much to import as the rest of set-up, so the plain env:// goes without.
    """
    if url == "env://":
        return SimpleNamespace(scheme="env", netloc="", path="", query="", hostname=None, port=None)
    from urllib.parse import urlparse

    return urlparse(url)


def _query(parts):
    if not parts.query:
        return {}
    from urllib.parse import parse_qsl

    return dict(parse_qsl(parts.query))


def register_rendezvous_handler(
    scheme: str, handler: Callable[..., Iterator[tuple[Store, int, int]]]
) -> None:
    """Make ``rendezvous`` call ``handler(url, **kwargs)`` for URLs of this scheme.

    The handler is a generator of (store, rank, world_size). RuntimeError if the scheme has one already.
    """
    if scheme in _handlers:
        raise RuntimeError(f"Rendezvous handler for {scheme}:// already registered")
    _handlers[scheme] = handler


def rendezvous(url: str, rank: int = -1, world_size: int = -1, **kwargs) -> Iterator[tuple[Store, int, int]]:
    """Iterate over (store, rank, world_size), of which the built-in schemes give one.

    Args:
        url: "env://", "tcp://host:port" or "file:///path", rank=, world_size= and use_libuv= in the query.
        rank: of this process, where the URL does not tell; -1: it does, or the environment.
        world_size: number of processes; likewise.
        kwargs: timeout (timedelta or seconds; 30 minutes) and whatever a registered handler takes.

    Raises:
        RuntimeError: no handler for the scheme.
        AssertionError: rank or world size given twice.
        ValueError: rank or world size not given, or a bad port.
        DistNetworkError: the store cannot be reached.
        DistStoreError: others did not come.

    """
    if not isinstance(url, (str, bytes)):
        raise RuntimeError(f"`url` must be a string. {type(url)}: {url}")
    if not isinstance(rank, Integral):
        raise RuntimeError(f"`rank` must be an integer. {rank!r}")
    if not isinstance(world_size, Integral):
        raise RuntimeError(f"`world_size` must be an integer. {world_size!r}")
    url = os.fsdecode(url)
    parts = _split(url)
    query = _query(parts)
    if rank != -1 or world_size != -1:
        if "rank" in query or "world_size" in query:
            raise AssertionError(f"The url: {url} has node-specific arguments(rank, world_size) already.")
        if rank != -1:
            query["rank"] = str(rank)
        if world_size != -1:
            query["world_size"] = str(world_size)
        url = url.partition("?")[0] + "?" + "&".join(f"{k}={v}" for k, v in query.items())
    if parts.scheme not in _handlers:
        raise RuntimeError(
            f"No rendezvous handler for {parts.scheme}://: {url!r} should be env://, tcp://HOST:PORT or file:///PATH"
        )
    return _handlers[parts.scheme](url, **kwargs)


def find_launcher() -> dict[str, int | str] | None:
    """Find who started this process, for want of RANK.

    A dict with name, rank, world_size, local_rank and local_world_size; None where nobody known did. The last
    two are -1 where the launcher does not tell.
    """
    for name, variables in _LAUNCHERS.items():
        values = [os.environ.get(variable, "") for variable in variables]
        if values[0].isdigit() and values[1].isdigit():
            local, local_size = (int(v) if v.isdigit() else -1 for v in values[2:])
            found = dict(name=name, rank=int(values[0]), world_size=int(values[1]))
            return found | dict(local_rank=local, local_world_size=local_size)
    return None


def _first_slurm_host() -> str | None:
    """Return the host of task 0: the first of a list such as "a[01-03,7],b"."""
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST") or ""
    match = re.match(r"([^,\[]+)(?:\[([^,\-\]]+))?", nodes)
    return match.group(1) + (match.group(2) or "") if match else None


def _from_launcher(name: str) -> str | None:
    """Return the value of an env:// variable that is not set, as the launcher implies it."""
    launcher = find_launcher()
    if launcher is None:
        return None
    if name == "MASTER_PORT":
        return str(DEFAULT_PORT)
    if name == "MASTER_ADDR":
        if launcher["name"] == "SLURM":
            return _first_slurm_host()
        return "127.0.0.1" if launcher["local_world_size"] == launcher["world_size"] else None
    return str(launcher["rank" if name == "RANK" else "world_size"])


def _missing(scheme: str, what: str) -> ValueError:
    return ValueError(f"Error initializing torch.distributed using {scheme}:// rendezvous: {what}")


def _port_of(parts, url: str) -> int | None:
    try:
        return parts.port
    except ValueError as error:
        raise ValueError(f"port of {url} must be from 0 to 65535") from error


def _open_tcp(host: str, port: int, rank: int, world_size: int, timeout, use_libuv: bool) -> Store:
    if not 0 <= port < 65536:
        raise ValueError(f"port must have value from 0 to 65535 but was {port}.")
    check_rank(rank, world_size)
    if _core._is_agents_store(host, port):
        # The agent's store outlives restarts: each attempt has keys of its own.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        run = os.environ.get("TORCHELASTIC_RUN_ID", "")
        store = TCPStore(host, port, world_size, False, timeout, wait_for_workers=False)
        return PrefixStore(f"/worker/{run}/attempt_{attempt}", store)
    # Who meets at the store can tell which ranks are missing; the store itself could only count.
    settings = {"multi_tenant": True, "use_libuv": use_libuv, "join_only": True}
    return TCPStore(host, port, world_size, rank == 0, timeout, **settings)


def check_rank(rank: int, world_size: int) -> None:
    """Raise ValueError where there is no such rank."""
    if world_size < 1:
        raise ValueError(f"world size should be at least 1, not {world_size}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} does not fit world size {world_size}: ranks are 0 to {world_size - 1}")


def _number(scheme: str, name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise _missing(scheme, f"{name} must be a number, not {text!r}") from None


def _wants_libuv(query: dict[str, str]) -> bool:
    return query.get("use_libuv", os.environ.get("USE_LIBUV", "1")) in ("1", "True", "true")


def _env_handler(url: str, timeout=_TIMEOUT, **kwargs) -> Iterator[tuple[Store, int, int]]:
    query = _query(_split(url))

    def value(name):
        found = os.environ.get(name) or _from_launcher(name)
        if not found:
            raise _missing(
                "env",
                f"environment variable {name} expected, but not set: start the program with "
                "cdistrun --nproc-per-node N SCRIPT"
                + (", or in a SLURM job with srun," if "SLURM_JOB_ID" in os.environ else ",")
                + " or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
            )
        return found

    rank = _number("env", "rank", query.get("rank") or value("RANK"))
    world_size = _number("env", "world_size", query.get("world_size") or value("WORLD_SIZE"))
    host, port = value("MASTER_ADDR"), _number("env", "MASTER_PORT", value("MASTER_PORT"))
    yield _open_tcp(host, port, rank, world_size, timeout, _wants_libuv(query)), rank, world_size
    raise RuntimeError("Unable to perform re-rendezvous using env:// method")


def _given(scheme: str, query: dict[str, str]) -> tuple[int, int]:
    for name, words in (("rank", "rank"), ("world_size", "world size")):
        if name not in query:
            raise _missing(
                scheme,
                f"{words} parameter missing: give {name}=… to init_process_group, or ?{name}=… in the URL",
            )
    return _number(scheme, "rank", query["rank"]), _number(scheme, "world_size", query["world_size"])


def _tcp_handler(url: str, timeout=_TIMEOUT, **kwargs) -> Iterator[tuple[Store, int, int]]:
    parts = _split(url)
    query = _query(parts)
    port = _port_of(parts, url)
    if port is None:
        raise _missing("tcp", "port number missing: write tcp://HOST:PORT")
    rank, world_size = _given("tcp", query)
    if not parts.hostname:
        raise _missing("tcp", "hostname missing: write tcp://HOST:PORT")
    yield _open_tcp(parts.hostname, port, rank, world_size, timeout, _wants_libuv(query)), rank, world_size
    raise RuntimeError("Unable to perform re-rendezvous using tcp:// method")


def _file_handler(url: str, timeout=_TIMEOUT, **kwargs) -> Iterator[tuple[Store, int, int]]:
    parts = _split(url)
    if not parts.path:
        raise _missing("file", "path missing: write file:///PATH, with three slashes")
    rank, world_size = _given("file", _query(parts))
    check_rank(rank, world_size)
    store = FileStore(parts.path, world_size)
    store.set_timeout(timeout)
    yield store, rank, world_size
    raise RuntimeError("Unable to perform rerendezvous using file:// method")


register_rendezvous_handler("env", _env_handler)
register_rendezvous_handler("tcp", _tcp_handler)
register_rendezvous_handler("file", _file_handler)
