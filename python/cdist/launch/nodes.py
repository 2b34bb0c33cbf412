"""How the launchers of several nodes know of each other's end.

Everything between them goes through keys of node 0's store under "cdist.agent/<job>/". Each launcher has
one thread for it, which reports to the main loop through a queue and a descriptor; a single node needs
neither keys nor thread.
"""

import json
import math
import os
import queue
import socket
import threading
import time
from datetime import timedelta

from cdist.launch.host import HostError

_LOOK_EVERY = 0.2
_BEAT_EVERY = 1.0
# A launcher of the same rank that has shown no sign of life for so long was killed.
_LIVES = 2.5 * _BEAT_EVERY
# After how many seconds it is said, once, who has not come: by the host of others, by them of the host.
_SAY_AFTER = 10.0


class Nodes:
    """The thread of this launcher that talks to those of the other nodes.

    It puts into `events`, with a byte into `descriptor` each: ("rank", node_rank), ("failed", attempt, dict
    with node, code and text), ("done",), ("seeking",), ("waiting", how many have come), ("refused", text),
    ("lost", text).
    """

    def __init__(self, options, is_host):
        self.events = queue.SimpleQueue()
        self.descriptor, self._bell = os.pipe()
        self._options = options
        self._is_host = is_host
        self._prefix = f"cdist.agent/{options.rdzv_id}/"
        self._orders = queue.SimpleQueue()
        self.is_connected = False
        self.attempt = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cdistrun-nodes", daemon=True)
        self._thread.start()

    def report_failure(self, attempt, code, text):
        """Tell all nodes that an attempt failed here."""
        self._orders.put(("failed", attempt, code, text))

    def report_done(self):
        """Tell all nodes that this one's workers have all ended well."""
        self._orders.put(("done",))

    def begin_attempt(self, attempt):
        """Look for failures of this attempt from now on."""
        self._orders.put(("attempt", attempt))

    def leave(self, seconds):
        """End the thread. The host waits up to `seconds` for the others to have seen the outcome."""
        self._leave_by = time.monotonic() + seconds
        self._stop.set()
        if self.is_connected:  # a thread that still tries to connect ends with the process
            self._thread.join(seconds + 0.2)

    def _post(self, *event):
        self.events.put(event)
        os.write(self._bell, b"e")

    def _run(self):
        try:
            self._store = self._connect()
            self.is_connected = True
            self._rank = self._options.node_rank
            if not self._options.dynamic:
                self._claim()
            self._store.add(self._prefix + "joined", 1)
            if self._options.dynamic:
                self._rank = self._store.add(self._prefix + "nodes", 1) - 1
                if self._rank >= self._options.nnodes:
                    raise HostError(f"--nnodes {self._options.nnodes}: that many nodes are there already")
                self._post("rank", self._rank)
            self._store.add(self._prefix + f"beat/{self._rank}", 1)  # who ends from now on is missed
            self._watch()
            self._say_goodbye()
        except HostError as error:
            self._post("refused", str(error))
        except Exception as error:
            if not self._stop.is_set():
                self._post("lost", f"{type(error).__name__}: {error}")

    def _claim(self):
        """Take this launcher's rank; nothing that it reports may end the job of another that has it.

        One that comes again after it was killed takes its place.
        """
        key, beat = self._prefix + f"owner/{self._rank}", self._prefix + f"beat/{self._rank}"
        me = f"pid {os.getpid()} on {socket.gethostname()}"
        owner = self._store.compare_set(key, "", me).decode()
        if owner == me:
            return
        beats, end = self._store.add(beat, 0), time.monotonic() + _LIVES
        while time.monotonic() < end:
            time.sleep(_LOOK_EVERY)
            if self._store.add(beat, 0) != beats:
                raise HostError(
                    f"--node-rank {self._rank} is that of another launcher, which is at work ({owner}): each "
                    "node needs a rank of its own"
                )
        self._store.set(key, me)

    def _connect(self):
        from cdist import TCPStore

        options = self._options
        timeout = timedelta(seconds=options.timeout)
        word = threading.Timer(_SAY_AFTER, self._say_seeking)
        word.daemon = True
        word.start()
        try:
            return TCPStore(options.master_addr, options.master_port, None, False, timeout, False)
        finally:
            word.cancel()

    def _say_seeking(self):
        if not self._stop.is_set():
            self._post("seeking")

    def _watch(self):
        seen = {}  # node → (beats, when they last changed)
        next_beat = 0.0
        say_at = time.monotonic() + _SAY_AFTER if self._is_host else math.inf
        told = -1
        while not self._stop.wait(_LOOK_EVERY):
            while not self._orders.empty():
                self._carry_out(*self._orders.get())
            key = self._prefix + f"failed/{self.attempt}"
            if told < self.attempt and self._store.check([key]):
                told = self.attempt
                self._post("failed", self.attempt, json.loads(self._store.get(key)))
            if self._store.add(self._prefix + f"done/{self.attempt}", 0) == self._options.nnodes:
                self._post("done")
                return
            if time.monotonic() >= say_at:
                say_at = math.inf
                joined = self._store.add(self._prefix + "joined", 0)
                if joined < self._options.nnodes:
                    self._post("waiting", joined)
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + _BEAT_EVERY
                self._store.add(self._prefix + f"beat/{self._rank}", 1)
                if self._is_host:
                    self._look_for_lost(seen)

    def _carry_out(self, order, *args):
        if order == "attempt":
            self.attempt = args[0]
        elif order == "done":
            self._store.add(self._prefix + f"done/{self.attempt}", 1)
        else:
            attempt, code, text, *node = args
            value = json.dumps({"node": node[0] if node else self._rank, "code": code, "text": text})
            self._store.compare_set(self._prefix + f"failed/{attempt}", "", value)

    def _look_for_lost(self, seen):
        now = time.monotonic()
        for node in range(self._options.nnodes):
            beats = self._store.add(self._prefix + f"beat/{node}", 0)
            last, since = seen.get(node, (0, now))
            if beats != last or beats == 0:
                seen[node] = (beats, now)
            elif now - since > self._options.lost_after:
                text = f"lost: no sign of life from its launcher for {self._options.lost_after:g} s"
                self._carry_out("failed", self.attempt, 1, text, node)
                seen[node] = (beats, now)

    def _say_goodbye(self):
        self._stop.wait()
        while not self._orders.empty():
            self._carry_out(*self._orders.get())
        self._store.add(self._prefix + "left", 1)
        while self._is_host and time.monotonic() < self._leave_by:
            if self._store.add(self._prefix + "left", 0) >= self._store.add(self._prefix + "joined", 0):
                return
            time.sleep(0.02)
