"""The command line of cdistrun: torchrun's flags, each also from the environment as PET_<NAME>."""

import argparse
import os
import signal
import sys

STREAMS = {"stdout": 1, "stderr": 2}
# What mpirun and other launchers call --nproc-per-node.
_OTHERS_NAMES = ("-n", "-np", "--np", "--nprocs", "--num-processes", "--num_processes")


class OptionError(ValueError):
    """A command line that cannot be carried out; the text says what to change."""


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise OptionError(message.replace("script, script_args", "script"))

    def options(self):
        """Return all option names, as they may be written."""
        return list(self._option_string_actions)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Shows one name for each option: those with underscores, which torchrun has too, go without saying."""

    def __init__(self, prog):
        super().__init__(prog, max_help_position=36, width=110)

    def _format_action_invocation(self, action):
        if not action.option_strings:
            return super()._format_action_invocation(action)
        names = [name for name in action.option_strings if "_" not in name]
        value = "" if action.nargs == 0 else " " + self._format_args(action, action.dest.upper())
        return ", ".join(names) + value


def _add(parser, name, metavar, text, short=(), **kw):
    """Add an option under its hyphen and underscore names, with its default from PET_<NAME>."""
    kw |= {"help": text} | ({"metavar": metavar} if metavar else {"action": "store_true"})
    long = "--" + name
    names = [*short, long] + (["--" + name.replace("-", "_")] if "-" in name else [])
    from_env = os.environ.get("PET_" + name.replace("-", "_").upper())
    if from_env is not None:
        kw["default"] = from_env if metavar else from_env.lower() not in ("", "0", "false")
    parser.add_argument(*names, **kw)


# The groups of options, as --help shows them: (name, metavar or None for a switch, help, further arguments).
_GROUPS = {
    "where": [
        ("nproc-per-node", "N", "processes on each node: a number, cpu, gpu or auto (1)", {"default": "1"}),
        ("nnodes", "N", "number of nodes (hosts) (1)", {"default": "1"}),
        ("node-rank", "N", "this node's number, 0 … nnodes − 1 (0)", {"type": int}),
        ("master-addr", "HOST", "address of node 0 (127.0.0.1)", {}),
        ("master-port", "PORT", "port of node 0 (29500; for one node a free one)", {"type": int}),
        ("local-addr", "HOST", "address that this node's ranks tell the others", {}),
        ("standalone", None, "one node, a free port", {}),
        (
            "rdzv-backend",
            "NAME",
            "static, or c10d: the nodes number themselves at the endpoint (static)",
            {"default": "static"},
        ),
        ("rdzv-endpoint", "HOST:PORT", "node 0 (port 29400)", {"default": ""}),
        ("rdzv-id", "NAME", "name of the job, where several share an endpoint", {"default": "none"}),
        (
            "rdzv-conf",
            "K=V,…",
            "seconds (and count): timeout=900,keep_alive_interval=5,keep_alive_max_attempt=3",
            {"default": ""},
        ),
        (
            "bind",
            "WHAT",
            "cores of each worker: none (it may use all), core (a share of its own) or numa (none)",
            {"default": "none", "choices": ["none", "core", "numa"]},
        ),
        ("virtual-local-rank", None, "each worker sees one GPU and is local rank 0", {}),
    ],
    "what": [
        ("module", None, "the script is a module, as in python -m", {"short": ["-m"]}),
        ("no-python", None, "the script is a program of its own", {}),
        ("run-path", None, "run the script with runpy.run_path", {}),
    ],
    "failures": [
        (
            "max-restarts",
            "N",
            "how often all workers are started again after a failure (0)",
            {"default": 0, "type": int},
        ),
        ("shutdown-timeout", "S", "seconds from SIGTERM to SIGKILL (30)", {"default": 30.0, "type": float}),
        (
            "signals-to-handle",
            "NAMES",
            "signals that end the job (%(default)s)",
            {"default": "SIGTERM,SIGINT,SIGHUP,SIGQUIT"},
        ),
    ],
    "output": [
        ("log-dir", "FOLDER", "keep stdout.log and stderr.log of each rank there", {}),
        (
            "redirects",
            "WHAT",
            "to log files only: 1 stdout, 2 stderr, 3 both, or for each local rank: 0:3,1:1",
            {"short": ["-r"], "default": "0"},
        ),
        (
            "tee",
            "WHAT",
            "to log files and, with a prefix, to the console: likewise",
            {"short": ["-t"], "default": "0"},
        ),
        (
            "log-line-prefix-template",
            "TEXT",
            "prefix of a line, of ${role_name} ${local_rank} ${rank} ${hostname}",
            {"default": ""},
        ),
        (
            "local-ranks-filter",
            "RANKS",
            "local ranks that the console shows, by comma (all)",
            {"default": ""},
        ),
        ("role", "NAME", "name of the workers' role", {"default": "default"}),
    ],
    "accepted for torchrun's sake": [
        ("numa-binding", "NAME", "as --bind numa", {}),
        (
            "monitor-interval",
            "S",
            "seconds between looks, where the kernel does not tell by itself (0.1)",
            {"default": 0.1, "type": float},
        ),
        (
            "start-method",
            "NAME",
            "without effect",
            {"default": "spawn", "choices": ["spawn", "fork", "forkserver"]},
        ),
        ("event-log-handler", "NAME", "without effect", {"default": "null"}),
    ],
}
_USE_ENV = "the script reads LOCAL_RANK; without this it is given --local-rank=N as its first argument"


def _parser(is_legacy=False):
    name = "python -m cdist.launch" if is_legacy else "cdistrun"
    parser = _Parser(
        prog=name,
        allow_abbrev=False,
        formatter_class=_Formatter,
        usage=f"{name} [options] script [arguments of the script]",
        description="Start one process a rank, watch over them and end the job as one.",
        epilog=f"example: {name} --nproc-per-node 4 train.py --epochs 3\n"
        "Each option may also be given as PET_<NAME> in the environment.",
    )
    for title, rows in _GROUPS.items():
        group = parser.add_argument_group(title)
        if is_legacy and title == "what":
            _add(group, "use-env", None, _USE_ENV)
        for option, metavar, text, arguments in rows:
            _add(group, option, metavar, text, **arguments)
    parser.add_argument("script", help="the program to run")
    parser.add_argument("script_args", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def parse(argv, is_legacy=False):
    """Return the options of a command line as an object. Errors: OptionError.

    `is_legacy`: the command line is that of torch.distributed.launch, which has --use-env.
    """
    options = _parse_names(_parser(is_legacy), argv)
    if is_legacy and not options.use_env:
        if options.no_python:
            raise OptionError("--no-python needs --use-env: a program is not given --local-rank")
        options.script_args.insert(0, "--local-rank=${local_rank}")
    if options.numa_binding is not None:
        options.bind = "numa"
    options.local_size = _local_size(options.nproc_per_node)
    _settle_nodes(options)
    if options.no_python and (options.module or options.run_path):
        raise OptionError("--no-python goes with neither --module nor --run-path")
    if options.max_restarts < 0:
        raise OptionError(f"--max-restarts should not be negative, as {options.max_restarts} is")
    if options.shutdown_timeout < 0 or options.monitor_interval <= 0:
        raise OptionError("--shutdown-timeout and --monitor-interval should not be negative")
    options.redirects = _per_rank(options.redirects, options.local_size, "--redirects")
    options.tee = _per_rank(options.tee, options.local_size, "--tee")
    options.signals = [_signal(name) for name in options.signals_to_handle.split(",") if name]
    options.shown = _shown(options.local_ranks_filter, options.local_size)
    return options


def check_script(options):
    """Raise OptionError where the script is not there: one line is enough for all ranks.

    On several nodes a worker is to fail of it, since the other nodes are told of that.
    """
    is_file = not (options.module or options.no_python)
    if not is_file or options.nnodes > 1:
        return
    if not os.path.exists(options.script):
        raise OptionError(f"cannot open the script {options.script!r}: there is no such file")
    if os.path.isdir(options.script) and not os.path.exists(os.path.join(options.script, "__main__.py")):
        raise OptionError(f"cannot run {options.script!r}: it is a folder without a __main__.py")


def _parse_names(parser, argv):
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        import difflib

        text = f"unrecognized arguments: {' '.join(unknown)}"
        name = unknown[0].partition("=")[0]
        if name in _OTHERS_NAMES:
            raise OptionError(f"{text}; is --nproc-per-node meant?")
        near = [option for option in parser.options() if len(name) > 4 and option.startswith(name)]
        near = near or difflib.get_close_matches(name, parser.options(), 1, 0.8)
        raise OptionError(text + (f"; is {near[0]} meant?" if near else ""))
    return options


def _local_size(text):
    cores = len(os.sched_getaffinity(0))
    if text.isdigit() and int(text) > 0:
        return int(text)
    if text == "cpu":
        return cores
    if text in ("gpu", "auto"):
        gpus = count_gpus()
        if text == "gpu" and not gpus:
            raise OptionError("--nproc-per-node gpu: Cuda is not available. Give a number, cpu or auto")
        return gpus or cores
    raise OptionError(f"Unsupported nproc_per_node value: {text}; it should be a number, cpu, gpu or auto")


def count_gpus():
    """Count the NVIDIA GPUs that a worker would see, without loading a driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() and name.strip() != "-1"])
    try:
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    except OSError:
        return 0


def _settle_nodes(options):
    if options.standalone:
        options.nnodes, options.node_rank, options.rdzv_endpoint, options.rdzv_backend = "1", 0, "", "static"
        options.master_addr = options.master_port = None
    least, _, most = options.nnodes.partition(":")
    if not least.isdigit() or int(least) < 1 or (most and not most.isdigit()):
        raise OptionError(f"--nnodes should be a positive number, not {options.nnodes!r}")
    if most and most != least:
        raise OptionError(
            f"--nnodes {options.nnodes}: a job with a changing number of nodes is not offered; "
            "give one number"
        )
    options.nnodes = int(least)
    if options.rdzv_backend not in ("static", "c10d"):
        raise OptionError(f"--rdzv-backend should be static or c10d, not {options.rdzv_backend!r}")
    options.dynamic = options.rdzv_backend == "c10d" and options.nnodes > 1
    host, port = _endpoint(options.rdzv_endpoint, 29400 if options.rdzv_backend == "c10d" else 29500)
    options.master_addr = options.master_addr or host or "127.0.0.1"
    if options.master_port is None:
        options.master_port = port if host else 0 if options.nnodes == 1 else 29500
    if not 0 <= options.master_port <= 65535:
        raise OptionError(f"--master-port should be 0 to 65535, not {options.master_port}")
    if options.nnodes > 1 and options.master_port == 0:
        raise OptionError("--master-port 0 is for one node: the others could not know the port")
    if options.dynamic and not host:
        raise OptionError("--rdzv-backend c10d with several nodes needs --rdzv-endpoint HOST:PORT")
    if options.node_rank is None:
        options.node_rank = 0
    if not 0 <= options.node_rank < options.nnodes:
        raise OptionError(f"--node-rank should be 0 to {options.nnodes - 1}, not {options.node_rank}")
    _read_conf(options)


def _endpoint(text, default_port):
    """Return (host, port) of "host:port", "host", "[::1]:port"; ("", default) for ""."""
    if text.startswith("["):
        host, _, port = text[1:].partition("]")
        port = port.removeprefix(":")
    elif text.count(":") > 1:
        host, port = text, ""
    else:
        host, _, port = text.partition(":")
    if port and not port.isdigit():
        raise OptionError(f"--rdzv-endpoint should be HOST:PORT, not {text!r}")
    return host, int(port) if port else default_port


def _read_conf(options):
    """Set `timeout` (to reach node 0) and `lost_after` (a launcher without sign of life), in seconds."""
    values = dict(part.partition("=")[::2] for part in options.rdzv_conf.split(",") if part)
    try:
        options.timeout = float(values.get("timeout", values.get("join_timeout", 900)))
        interval = float(values.get("keep_alive_interval", 5))
        options.lost_after = interval * float(values.get("keep_alive_max_attempt", 3))
    except ValueError:
        raise OptionError(f"--rdzv-conf: times should be numbers of seconds: {options.rdzv_conf!r}") from None


def _per_rank(text, local_size, name):
    """Return the set of streams for each local rank: of "3" or "0:1,1:2"."""
    masks = [0] * local_size
    try:
        if text in ("0", "1", "2", "3"):
            masks = [int(text)] * local_size
        else:
            for part in text.split(","):
                rank, mask = (int(number) for number in part.split(":"))
                if not 0 <= rank < local_size or not 0 <= mask <= 3:
                    raise ValueError
                masks[rank] = mask
    except ValueError:
        raise OptionError(f"{name} should be 0 to 3, or LOCAL_RANK:0-3 by comma, not {text!r}") from None
    return [{stream for stream, bit in STREAMS.items() if mask & bit} for mask in masks]


def _signal(name):
    number = getattr(signal, name.strip(), None)
    if not isinstance(number, signal.Signals) or number in (signal.SIGKILL, signal.SIGSTOP):
        raise OptionError(f"--signals-to-handle: {name!r} is no signal that a process can handle")
    return number


def _shown(text, local_size):
    everything = set(range(local_size))
    try:
        shown = {int(part) for part in text.split(",") if part} if text else everything
    except ValueError:
        raise OptionError(f"--local-ranks-filter should be local ranks by comma, not {text!r}") from None
    if not shown & everything:
        raise OptionError(f"--local-ranks-filter {text}: no such local rank; they are 0 to {local_size - 1}")
    return shown


def command(options, local_rank):
    """Return the argv of a worker."""
    script = options.script
    args = [arg.replace("${local_rank}", str(local_rank)) for arg in options.script_args]
    if options.no_python:
        return [script, *args]
    python = [os.environ.get("PYTHON_EXEC", sys.executable), "-u"]
    if options.run_path:
        run = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
        return [*python, "-c", run, script, *args]
    return [*python, "-m", script, *args] if options.module else [*python, script, *args]
