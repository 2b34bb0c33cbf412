"""Runs the workers of this node: starts them, watches, passes on their output, and ends them as one."""

import contextlib
import errno
import functools
import os
import selectors
import signal
import socket
import sys
import time

from cdist.launch import options as opt
from cdist.launch.binding import core_sets
from cdist.launch.dumps import Dumps
from cdist.launch.exits import INTERRUPT_GRACE, MemoryWatch, shell_code, signal_name
from cdist.launch.guard import Guard
from cdist.launch.host import HostError, StoreHost, is_ephemeral
from cdist.launch.interrupts import summary
from cdist.launch.logs import Console, Stream, fill_template
from cdist.launch.report import Failure, compose, describe, first_cause
from cdist.launch.worker import Worker

# After the first failure the other ranks may end by themselves for this long, so that theirs is not blamed
# on SIGTERM and a cause that is slow to end is still found.
AFTERMATH = 1.0
# Where all went well but that output was lost; that of Python itself where it cannot write its output.
LOST_OUTPUT = 120
# A launcher that knows the cause has told the others of it after this long: 0.4 s at most, where nobody
# waits for a core.
NEWS = 1.0


class FolderError(RuntimeError):
    """The folder of the logs cannot be made."""


class Agent:
    """One job on this node."""

    def __init__(self, options):
        self.options = options
        self.hostname = socket.gethostname()
        self.workers = []
        self.streams = []
        self.signals = []  # that came and were not acted upon yet
        self.is_blocked = False  # in a call that looks at no list of signals
        self.attempt = 0
        self.remote = None  # a failure that another node reported in this attempt
        self.all_done = False  # on all nodes
        self.has_lost = False  # output that a log file should have
        self.is_cut_off = False  # from the other nodes
        self.is_interrupted = False  # Ctrl-C: whoever waits wants to be gone within a second
        # Taken out of this process' environment: the store that it hosts speaks the plain protocol, which
        # torch's clients understand too; the secret is for the connections between ranks.
        self.secret = os.environ.pop("CDIST_JOB_SECRET", None)
        if not self.secret and options.nnodes == 1:
            self.secret = os.urandom(32).hex()
        self.run_id = options.rdzv_id
        if options.nnodes == 1 and self.run_id == "none":
            self.run_id = os.urandom(8).hex() if options.standalone else "none"

    def run(self):
        """Run the job and return the launcher's exit code; nothing of the workers' groups is left."""
        self.memory = MemoryWatch()
        self.consoles = {"stdout": Console(1, self._say), "stderr": Console(2)}
        temporary = self._make_folder()
        self.guard = Guard(temporary)
        self.host = self.nodes = None
        self.selector = selectors.DefaultSelector()
        handlers = self._install_handlers()
        try:
            self._host_store()
            self._join_nodes()
            return self._run_attempts()
        except HostError as error:
            self._say(f"cdistrun: {error}\n")
            return 1
        except _Stopped as stopped:
            return self._end_by_signal(stopped.number)
        finally:
            # From here on a signal would only get in the way of the end.
            for number in handlers:
                signal.signal(number, signal.SIG_IGN)
            self._reap_all()
            if self.nodes:
                self.nodes.leave(0.5 if self.is_interrupted else 3.0)
            if self.host:
                self.host.close()
            self.guard.close()
            for console in self.consoles.values():
                console.drain(1.0)
            signal.set_wakeup_fd(-1)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            self.selector.close()

    def has_lost_output(self):
        """Tell whether a console or a log file could not be written; one whose reader left lost nothing."""
        return self.has_lost or any(console.has_failed for console in self.consoles.values())

    def _say(self, text):
        self.consoles["stderr"].write(text.encode())

    # -- before the workers

    def _make_folder(self):
        """Make the folder of this run's files; returns it if it is to be removed at the end."""
        log_dir = self.options.log_dir
        self.keeps_logs = log_dir != os.devnull if log_dir else any(self.options.redirects)
        if not self.keeps_logs:
            try:
                self.folder = _make_temporary("cdistrun_", None)
            except OSError as error:
                raise FolderError(f"cannot make a temporary folder (see TMPDIR): {error}") from None
            return self.folder
        try:
            if log_dir:
                os.makedirs(log_dir, exist_ok=True)
            self.folder = _make_temporary(f"{self.run_id}_".replace("/", "_"), log_dir)
        except OSError as error:
            raise FolderError(f"--log-dir {log_dir}: cannot write there: {error.strerror}") from None
        if not log_dir:
            self._say(f"cdistrun: logs are in {self.folder}\n")
        return None

    def _install_handlers(self):
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        self.selector.register(read_end, selectors.EVENT_READ, self._on_bell)
        # Under nohup a hang-up is to stay ignored.
        wanted = set(self.options.signals)
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
            wanted.discard(signal.SIGHUP)
        return {number: signal.signal(number, self._on_signal) for number in wanted}

    def _on_signal(self, number, _frame):
        if self.is_blocked:
            raise _Stopped(number)
        self.signals.append(number)

    @contextlib.contextmanager
    def _blocked(self):
        """Around calls that may wait long: there a signal raises _Stopped at once."""
        self.is_blocked = True
        try:
            if self.signals:
                raise _Stopped(self.signals.pop(0))
            yield
        finally:
            self.is_blocked = False

    def _host_store(self):
        options = self.options
        self.address, self.port = options.master_addr, options.master_port
        if options.dynamic:
            with self._blocked():
                self.host = _host_if_possible(self.address, self.port)
        elif options.node_rank == 0:
            with self._blocked():
                self.host = StoreHost(self.address, self.port, options.nnodes > 1)
            if self.port and is_ephemeral(self.port):
                self._say(
                    f"cdistrun: warning: port {self.port} lies in the kernel's range for outgoing "
                    "connections (ip_local_port_range); now and then it will be taken\n"
                )
        if self.host:
            self.port = self.host.port

    def _join_nodes(self):
        options = self.options
        if options.nnodes == 1:
            return
        if self.host:
            with self._blocked():
                self.host.serve()
        from cdist.launch.nodes import Nodes

        self.nodes = Nodes(options, self.host is not None)
        self.selector.register(self.nodes.descriptor, selectors.EVENT_READ, self._on_nodes)
        self.node_rank = None if options.dynamic else options.node_rank
        while self.node_rank is None:
            self._turn()

    # -- attempts

    def _run_attempts(self):
        for attempt in range(self.options.max_restarts + 1):
            self.attempt, self.remote = attempt, None
            if self.nodes:
                self.nodes.begin_attempt(attempt)
            self._start_workers(attempt)
            if attempt == 0 and self.host and not self.nodes:
                with self._blocked():
                    self.host.serve()  # after the start, so that loading it and starting Python overlap
            code = self._watch(attempt)
            if code == 0:
                return 0
            if self.is_cut_off:
                break
            if attempt < self.options.max_restarts:
                self._say(
                    f"cdistrun: restarting all workers ({attempt + 1} of {self.options.max_restarts})\n"
                )
        return code

    def _start_workers(self, attempt):
        options = self.options
        cores = core_sets(options.bind, options.local_size)
        self.workers, self.streams = [], []
        self.dumps = Dumps(os.path.join(self.folder, f"attempt_{attempt}"))
        for local in range(options.local_size):
            rank = self._node_rank() * options.local_size + local
            folder = os.path.join(self.folder, f"attempt_{attempt}", str(rank))
            os.makedirs(folder)
            env = self._environment(attempt, rank, local, cores[local], folder)
            argv = opt.command(options, local)
            try:
                worker = Worker(rank, local, argv, env, cores[local], self.guard)
            except OSError as error:
                raise HostError(f"cannot start {argv[0]}: {error.strerror}{_limit_of(error)}") from None
            self.workers.append(worker)
            if worker.exit_descriptor is not None:
                self.selector.register(worker.exit_descriptor, selectors.EVENT_READ, self._on_exit)
            self._open_streams(worker, folder)

    def _node_rank(self):
        return self.node_rank if self.nodes else 0

    def _environment(self, attempt, rank, local, cores, folder):
        options = self.options
        world = options.nnodes * options.local_size
        usable = len(cores or os.sched_getaffinity(0))
        error_file = os.path.join(folder, "error.json")
        env = {
            "OMP_NUM_THREADS": str(usable if cores else max(1, usable // options.local_size)),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        }
        if options.local_size == 1 and not cores:
            del env["OMP_NUM_THREADS"]  # libraries take all usable cores by themselves
        if options.local_addr:
            env["CDIST_SOCKET_IFNAME"] = options.local_addr + ("/128" if ":" in options.local_addr else "/32")
        env.update(os.environ)  # the user's values win
        env.update(
            {
                "RANK": rank,
                "LOCAL_RANK": local,
                "WORLD_SIZE": world,
                "LOCAL_WORLD_SIZE": options.local_size,
                "GROUP_RANK": self._node_rank(),
                "GROUP_WORLD_SIZE": options.nnodes,
                "ROLE_RANK": rank,
                "ROLE_WORLD_SIZE": world,
                "ROLE_NAME": options.role,
                "MASTER_ADDR": self.address,
                "MASTER_PORT": self.port,
                "TORCHELASTIC_RESTART_COUNT": attempt,
                "TORCHELASTIC_MAX_RESTARTS": options.max_restarts,
                "TORCHELASTIC_RUN_ID": self.run_id,
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "CDIST_AGENT": f"{self.port}:{error_file}",
                "TORCHELASTIC_ERROR_FILE": error_file,
                "TORCHELASTIC_SIGNALS_TO_HANDLE": options.signals_to_handle,
            }
        )
        env["CDIST_DUMP_DIR"] = self.dumps.folder
        if self.secret:
            env["CDIST_JOB_SECRET"] = self.secret
        if options.virtual_local_rank:
            visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
            env.update(LOCAL_RANK=0, CUDA_VISIBLE_DEVICES=visible[local] if local < len(visible) else local)
        return {name: str(value) for name, value in env.items()}

    def _open_streams(self, worker, folder):
        options = self.options
        local = worker.local_rank
        template = options.log_line_prefix_template
        for name, descriptor in (("stdout", worker.stdout), ("stderr", worker.stderr)):
            is_teed, is_redirected = name in options.tee[local], name in options.redirects[local]
            shown = local in options.shown and (is_teed or not is_redirected)
            prefix = template or ("[${hostname}:${rank}] " if is_teed else "")
            prefix = fill_template(prefix, worker.rank, local, options.role, self.hostname)
            log_path = os.path.join(folder, f"{name}.log") if self.keeps_logs else None
            console = self.consoles[name] if shown else None
            stream = Stream(worker.rank, name, descriptor, console, prefix.encode(), log_path, self._say)
            self.streams.append(stream)
            on_output = functools.partial(self._on_output, stream)
            self.selector.register(descriptor, selectors.EVENT_READ, on_output)

    def _watch(self, attempt):
        """Wait until the attempt has ended everywhere; returns 0 or the exit code of the first failure."""
        done_told = False
        while not self.all_done:
            failed = [w for w in self.workers if not w.is_running() and w.returncode != 0]
            if failed or self.remote:
                return self._end_failed(attempt)
            if not done_told and not any(w.is_running() for w in self.workers):
                if not self.nodes:
                    return 0
                self.nodes.report_done()
                done_told = True
            self._turn()
        return 0

    def _end_failed(self, attempt):
        end = time.monotonic() + AFTERMATH
        while time.monotonic() < end and any(w.is_running() for w in self.workers):
            self._turn(end - time.monotonic())
        failures = self._failures()
        if self.nodes and all(failure.is_consequence for failure in failures):
            # Another node has the cause and is about to tell: it may itself be waiting for it.
            end = time.monotonic() + AFTERMATH + NEWS
            while not self.remote and time.monotonic() < end:
                self._turn(end - time.monotonic())
        if failures and self.nodes:
            cause = first_cause(failures).worker
            self.nodes.report_failure(attempt, shell_code(cause.returncode), describe(cause, self.hostname))
        self.dumps.ask({worker.pid for worker in self.workers if worker.is_running()})
        self._stop(signal.SIGTERM, self.options.shutdown_timeout)
        self._reap_all()
        is_kept = self.keeps_logs or "CDIST_DUMP_DIR" in os.environ
        table = self.dumps.report(is_kept)
        text = compose(failures, self.workers, self.hostname, self.memory, table) if failures else ""
        if self.remote and all(failure.is_consequence for failure in failures):
            self._say(f"{text}cdistrun: on node {self.remote['node']}: {self.remote['text']}\n")
            return self.remote["code"]
        self._say(text)
        return shell_code(first_cause(failures).worker.returncode)

    def _failures(self):
        failures = []
        for worker in self.workers:
            if not worker.is_running() and worker.returncode != 0:
                stream = next(s for s in self.streams if s.rank == worker.rank and s.name == "stderr")
                while stream.descriptor is not None and stream.read(time.monotonic()):
                    pass
                failures.append(Failure(worker, stream.tail))
        return failures

    # -- the end

    def _end_by_signal(self, number):
        self._say(f"cdistrun: {signal_name(number)}: stopping all workers\n")
        if self.nodes:
            self.nodes.report_failure(self.nodes.attempt, 128 + number, f"stopped by {signal_name(number)}")
        self.is_interrupted = number == signal.SIGINT
        grace = INTERRUPT_GRACE if self.is_interrupted else self.options.shutdown_timeout
        if self.is_interrupted and len(self.workers) > 1:
            for stream in self.streams:
                if stream.name == "stderr":
                    stream.hold()
        with contextlib.suppress(_Stopped):  # asked twice: no grace
            self._stop(number, grace)
        self._reap_all()
        self._say(summary({stream.rank: stream.place for stream in self.streams if stream.place}))
        return 128 + number

    def _stop(self, number, grace):
        """Signal the groups of all running workers and wait for their leaders, then no longer."""
        for worker in self.workers:
            if worker.is_running():
                worker.send(number)
                worker.send(signal.SIGCONT)  # one that is stopped cannot act on it
        end = time.monotonic() + grace
        while any(w.is_running() for w in self.workers) and time.monotonic() < end:
            self._turn(end - time.monotonic())

    def _reap_all(self):
        for worker in self.workers:
            if worker.exit_descriptor is not None:
                self._unregister(worker.exit_descriptor)
            worker.reap()
        self._finish_streams()

    def _finish_streams(self):
        """Take what dead workers left in their pipes; a stranger that still holds one is not waited for."""
        for stream in self.streams:
            if stream.descriptor is not None:
                self._unregister(stream.descriptor)
                while stream.read(time.monotonic()):
                    if stream.console and stream.console.is_full():
                        stream.console.drain(1.0)
                stream.close()
            self.has_lost |= stream.has_failed

    # -- the loop

    def _turn(self, longest=None):
        """Wait for events and act on them once. Raises _Stopped when a signal has come."""
        timeout = 3600.0 if longest is None else max(0.0, longest)
        if any(w.exit_descriptor is None for w in self.workers):
            timeout = min(timeout, self.options.monitor_interval)
        now = time.monotonic()
        waiting = [s.show_at for s in self.streams if s.show_at is not None]
        if waiting:
            timeout = min(timeout, max(0.0, min(waiting) - now))
        if any(console.backlog_bytes for console in self.consoles.values()):
            timeout = min(timeout, 0.005)
        for key, _ in self.selector.select(timeout):
            key.data(key)
        now = time.monotonic()
        for stream in self.streams:
            if stream.show_at is not None and now >= stream.show_at:
                stream.show_rest()
        for console in self.consoles.values():
            console.flush()
        if self.signals:
            raise _Stopped(self.signals.pop(0))

    def _on_bell(self, key):
        while True:
            try:
                if not os.read(key.fd, 4096):
                    return
            except BlockingIOError:
                return

    def _on_exit(self, key):
        self._unregister(key.fd)

    def _on_output(self, stream, key):
        if stream.console and stream.console.is_full():
            time.sleep(0.005)  # the worker waits, as it would if it wrote to the console itself
            return
        if stream.read(time.monotonic()) is None:
            self._unregister(key.fd)

    def _on_nodes(self, key):
        os.read(key.fd, 1)
        kind, *rest = self.nodes.events.get()
        if kind == "rank":
            self.node_rank = rest[0]
        elif kind == "failed":
            if rest[0] == self.attempt:  # and not the echo of what this node reported of the one before
                self.remote = rest[1]
        elif kind == "done":
            self.all_done = True
        elif kind == "seeking":
            where = f"{self.options.master_addr}:{self.options.master_port}"
            self._say(
                f"cdistrun: waiting for node 0: no store answers at {where} so far; the limit is "
                f"{self.options.timeout:g} s\n"
            )
        elif kind == "waiting":
            self._say(
                f"cdistrun: {rest[0]} of {self.options.nnodes} nodes have come so far; the others are to be "
                f"started with the address {self.address}:{self.port}\n"
            )
        elif kind == "refused" and not self.workers:
            raise HostError(rest[0])
        elif kind == "refused":
            self.is_cut_off = True
            self.remote = {"node": self.node_rank, "code": 1, "text": rest[0]}
        elif not self.workers:
            raise HostError(
                f"no connection to node 0 at {self.options.master_addr}:{self.options.master_port}: {rest[0]}"
            )
        else:
            self.is_cut_off = True
            what = "lost: its store does not answer" if self.nodes.is_connected else "not reached"
            self.remote = {"node": 0, "code": 1, "text": f"{what}: {rest[0]}"}

    def _unregister(self, descriptor):
        with contextlib.suppress(KeyError):
            self.selector.unregister(descriptor)


def _host_if_possible(address, port):
    """Return the store on the endpoint's address, or None: whoever can listen there is its host.

    Two launchers of one host that listen in the same instant are both refused by Linux, which sees each as
    the other's rival (6 of 400 pairs that were made to); they come again, at times of their own.
    """
    for _ in range(3):
        with contextlib.suppress(HostError):
            return StoreHost(address, port, True)
        time.sleep(os.urandom(1)[0] / 255 * 0.05)
    return None


def _limit_of(error):
    """Return the limit that the error comes from, and what lifts it, for those that have one."""
    if error.errno == errno.EMFILE:
        import resource

        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f" (this process may open {most}: ulimit -n raises it)"
    return " (see ulimit -u, and pids.max of the container)" if error.errno == errno.EAGAIN else ""


def _make_temporary(prefix, folder):
    """Make a folder with a name of its own; tempfile.mkdtemp, without the time to load that module.

    Where none is given: in TMPDIR, or if that cannot be written to where tempfile would put it.
    """
    name = prefix + os.urandom(6).hex()
    path = os.path.join(folder or os.environ.get("TMPDIR") or "/tmp", name)
    try:
        os.mkdir(path, 0o700)
    except OSError:
        if folder:
            raise
        import tempfile

        path = os.path.join(tempfile.gettempdir(), name)
        os.mkdir(path, 0o700)
    return path


class _Stopped(Exception):
    def __init__(self, number):
        super().__init__(number)
        self.number = number


def run(options):
    """Run a job; returns the launcher's exit code."""
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: was closed
        stream.flush()
    try:
        agent = Agent(options)
        return agent.run() or (LOST_OUTPUT if agent.has_lost_output() else 0)
    except FolderError as error:
        print(f"cdistrun: {error}", file=sys.stderr)
        return 1
