"""Several hosts on one machine, for tests: network namespaces that a bridge joins.

    with hosts(2) as (a, b):
        b.run(["ping", "-c1", a.address])
        server = a.start([sys.executable, "server.py"], stdout=subprocess.PIPE)
        b.cut()   # the cable: frames vanish, nobody is told
        b.mend()

    outputs = world(hosts_of_a_test, function, per_host=2)   # cdist.testing.run with its ranks on the hosts

A host has network, host name and mounts of its own; process ids, files and /dev/shm are the machine's.
Nothing is named outside: a namespace lives as long as the process that holds it, which ends when its standard
input does, so that even a killed test leaves nothing. The bridges live in a namespace too: the machine's own
network is never touched. Needs root, iproute2, util-linux and (for block()) iptables; CI has them.
"""

import contextlib
import ctypes
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import pytest
from cdist import testing

_libc = ctypes.CDLL(None, use_errno=True)
_NAMESPACES = {"net": 0x40000000, "uts": 0x04000000, "mnt": 0x00020000}
_PORT = 29511  # any: a namespace's ports are its own


@functools.cache
def why_not():
    """Why hosts cannot be made here, or None."""
    if os.geteuid():
        return "network namespaces need root"
    for tool in ("ip", "nsenter", "unshare"):
        if not shutil.which(tool):
            return f"{tool} is not installed"
    probe = ["unshare", "-n", "-u", "-m", "ip", "link", "add", "br0", "type", "bridge"]
    done = subprocess.run(probe, capture_output=True, text=True)
    return f"namespaces are not allowed here: {done.stderr.strip()}" if done.returncode else None


needs_hosts = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


class Namespace:
    """A network, host name and mounts of their own, held by a process."""

    def __init__(self, name):
        self.name = name
        self._started = []
        self._folder = tempfile.TemporaryDirectory(prefix="hosts-")
        script = f"hostname {name} && mount -t sysfs sysfs /sys && ip link set lo up && echo ready; exec cat"
        self._holder = subprocess.Popen(
            ["unshare", "-n", "-u", "-m", "sh", "-c", script],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        self.pid = self._holder.pid
        answer = self._holder.stdout.readline()
        if answer != "ready\n":
            text = answer + (self._holder.stdout.read() if self._holder.poll() is not None else "")
            self.close()
            raise OSError(f"no namespace for {name}: {text}")

    def command(self, arguments):
        """The command line that runs `arguments` here; nsenter becomes it, so the process id is its own."""
        enter = ["nsenter", "-t", str(self.pid), "-n", "-u", "-m", f"--wd={os.getcwd()}", "--"]
        return enter + [str(argument) for argument in arguments]

    def run(self, arguments, timeout=30, check=True, **options):
        """The completed process, with its output as text; raises if it fails, with what it wrote."""
        process = self.start(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            raise AssertionError(f"{arguments} on {self.name} took over {timeout} s:\n{out}{err}") from None
        if check and process.returncode:
            raise AssertionError(f"{arguments} on {self.name} ended with {process.returncode}:\n{out}{err}")
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def start(self, arguments, **options):
        """A Popen in its own session; what is left of it when the hosts go is killed."""
        process = subprocess.Popen(self.command(arguments), start_new_session=True, **options)
        self._started.append(process)
        return process

    def ip(self, *lines):
        """Give these lines to ``ip -batch``."""
        script = "".join(line + "\n" for line in lines)
        command = self.command(["ip", "-batch", "-"])
        done = subprocess.run(command, input=script, capture_output=True, text=True)
        if done.returncode:
            raise OSError(f"ip on {self.name}: {done.stderr.strip()} in\n{script}")

    def enter(self):
        """Move the calling process here; for a process that was forked for this and has one thread."""
        folder = os.getcwd()
        for kind, flag in _NAMESPACES.items():
            fd = os.open(f"/proc/{self.pid}/ns/{kind}", os.O_RDONLY)
            try:
                if _libc.setns(fd, flag):
                    raise OSError(ctypes.get_errno(), f"setns({kind}) to {self.name}")
            finally:
                os.close(fd)
        os.chdir(folder)  # entering mounts moved us to the root

    def replace(self, path, text):
        """Let the file `path` (which exists) have this text here: /etc/hosts, /etc/resolv.conf."""
        mine = os.path.join(self._folder.name, os.path.basename(path))
        with open(mine, "w") as file:
            file.write(text)
        self.run(["mount", "--bind", mine, path])

    def processes(self):
        """Process ids of all that run here, but for the holder."""
        here, found = os.stat(f"/proc/{self.pid}/ns/net").st_ino, []
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if int(entry) != self.pid and os.stat(f"/proc/{entry}/ns/net").st_ino == here:
                    found.append(int(entry))
        return found

    def close(self):
        """Kill all that runs here, and let the namespace go."""
        end = time.monotonic() + 10
        while self._holder.poll() is None and (left := self.processes()) and time.monotonic() < end:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in self._started:
                process.poll()
            time.sleep(0.005)
        for process in self._started:
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe:
                    pipe.close()
            process.wait()
        self._holder.stdin.close()
        self._holder.kill()
        self._holder.wait()
        self._holder.stdout.close()
        self._folder.cleanup()


class Host(Namespace):
    """A host with a card eth<k> in every network k.

    Attributes:
        name: its host name, "host0" and so on; no resolver knows it.
        index: its number from 0.
        address, addresses: of eth0, of all cards: 10.<k+1>.0.<index+1>.
        address6: of eth0 in IPv6: fd00:<k+1>::<index+1>, None where the kernel has no IPv6.

    """

    def __init__(self, index, switch, networks):
        super().__init__(f"host{index}")
        self.index, self._switch = index, switch
        self.addresses = [f"10.{k + 1}.0.{index + 1}" for k in range(networks)]
        self.address = self.addresses[0]
        six = os.path.exists("/proc/sys/net/ipv6")
        self.address6 = f"fd00:1::{index + 1:x}" if six else None
        for k, address in enumerate(self.addresses):
            port = self._port(k)
            switch.ip(
                f"link add {port} type veth peer name eth{k} netns {self.pid}",
                f"link set {port} master br{k} up",
            )
            wide = [f"addr add fd00:{k + 1}::{index + 1:x}/64 dev eth{k} nodad"] if six else []
            self.ip(f"addr add {address}/16 dev eth{k}", *wide, f"link set eth{k} up")

    def _port(self, network):
        return f"p{self.index}-{network}"

    def cut(self, network=0):
        """Frames to and from this host vanish in the switch; its card stays up and nobody is told.

        Names that were resolved meanwhile (ARP) come back a second or so after mend().
        """
        self._switch.ip(f"link set {self._port(network)} nomaster")

    def mend(self, network=0):
        """Undo cut() or unplug()."""
        self._switch.ip(f"link set {self._port(network)} master br{network} up")

    def unplug(self, network=0):
        """The cable is out: the card loses its carrier."""
        self._switch.ip(f"link set {self._port(network)} down")

    def block(self, what):
        """Drop incoming packets that match: a Host (all that it sends), or arguments for iptables."""
        self.run(["iptables", "-w", "-A", "INPUT", *self._match(what), "-j", "DROP"])

    def unblock(self, what):
        """Undo block(what)."""
        self.run(["iptables", "-w", "-D", "INPUT", *self._match(what), "-j", "DROP"])

    @staticmethod
    def _match(what):
        return ["-s", ",".join(what.addresses)] if isinstance(what, Host) else list(what)


@contextlib.contextmanager
def hosts(count, networks=1):
    """A list of `count` hosts joined by `networks` bridges; nothing of them is left, whatever happens."""
    with contextlib.ExitStack() as stack:
        switch = Namespace("switch")
        stack.callback(switch.close)
        switch.ip(*(f"link add br{k} type bridge forward_delay 0" for k in range(networks)))
        switch.ip(*(f"link set br{k} up" for k in range(networks)))
        made = []
        for index in range(count):
            made.append(Host(index, switch, networks))
            stack.callback(made[-1].close)
        yield made


def _on_host(rank, size, places, per_host, master, function, options, arguments):
    host = places[rank // per_host]
    host.enter()
    os.environ.update(
        MASTER_ADDR=master or places[0].address,
        MASTER_PORT=str(_PORT),
        LOCAL_RANK=str(rank % per_host),
        LOCAL_WORLD_SIZE=str(per_host),
    )
    if options is not None:
        import cdist

        cdist.init_process_group("gloo", **options)
    return function(rank, size, *arguments)


def world(places, function, *arguments, per_host=1, init=True, group_timeout=30, master=None, **options):
    """cdist.testing.run with `per_host` ranks on each of the hosts `places`, which meet at the first.

    init=False leaves init_process_group to the function (the environment is that of a launcher); `master` is
    another address for the ranks to meet at; `options` are those of cdist.testing.run.
    """
    settings = {"timeout": group_timeout} if init else None
    fixed = (places, per_host, master, function, settings, arguments)
    return testing.run(_on_host, len(places) * per_host, *fixed, init=None, **options)


def python(text):
    """Arguments that run this Python source with the interpreter of the tests."""
    return [sys.executable, "-c", text]
