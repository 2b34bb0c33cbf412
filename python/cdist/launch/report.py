"""What the launcher says when a job failed: who was first, why, and at the very end that rank's traceback."""

import re
import signal

from cdist.launch.exits import ending, mebibytes
from cdist.launch.record import read_error

# An exception that tells of another rank's end is a consequence, not the cause.
_CONSEQUENCE = re.compile(r"^(\w+\.)*(PeerLostError|AbortedError)\b", re.MULTILINE)
# What init_process_group puts before the lines of an uncaught exception.
_RANK = re.compile(r"^\[rank\d+\]: ", re.MULTILINE)
_TRACEBACK = "Traceback (most recent call last)"
_LINKS = ("direct cause of the following exception:", "another exception occurred:")


class Failure:
    """One worker that failed by itself."""

    def __init__(self, worker, stderr_tail):
        self.worker = worker
        written = read_error(worker.error_file)
        self.time = written[0] if written and written[0] is not None else worker.ended_at
        text = written[1] if written else _last_lines(_RANK.sub("", stderr_tail.decode(errors="replace")))
        self.text = text.strip("\n")
        self.is_consequence = bool(_CONSEQUENCE.search(self.text[-2000:]))


def first_cause(failures):
    """Return the failure that the others follow from."""
    return min(failures, key=lambda failure: (failure.is_consequence, failure.time))


def _last_lines(text):
    """Return the last traceback in a text with those that it follows from, or the last 20 lines."""
    begin = text.rfind(_TRACEBACK)
    if begin < 0:
        return "\n".join(text.rstrip("\n").split("\n")[-20:])
    while begin > 0 and text[:begin].rstrip().endswith(_LINKS):
        begin = text.rfind(_TRACEBACK, 0, begin)
    return text[max(begin, 0) :]


def describe(worker, hostname):
    """Return "rank 1 (host h, local rank 1, pid 5) ended with exit code 7 after 3.2 s, peak memory 9 MiB"."""
    return (
        f"rank {worker.rank} (host {hostname}, local rank {worker.local_rank}, pid {worker.pid}) "
        f"ended with {ending(worker.returncode)} after {worker.ended_at - worker.started_at:.1f} s"
        + (f", peak memory {mebibytes(worker.peak_bytes)}" if worker.peak_bytes else "")
    )


def compose(failures, workers, hostname, memory, table=()):
    """Return the report's text, the first cause's traceback last; `table`: lines about all ranks."""
    cause = first_cause(failures)
    lines = [f"cdistrun: {describe(cause.worker, hostname)}: the first failure"]
    if cause.worker.returncode == -signal.SIGKILL:
        lines.append(f"cdistrun: {memory.hint()}")
    for failure in failures:
        if failure is not cause:
            lines.append(
                f"cdistrun: {describe(failure.worker, hostname)}"
                + (": a consequence" if failure.is_consequence else "")
            )
    stopped = [str(worker.rank) for worker in workers if worker.was_signalled]
    if stopped:
        lines.append(f"cdistrun: stopped for it: rank {', '.join(stopped)}")
    lines += table
    if cause.text:
        lines += [f"cdistrun: the last words of rank {cause.worker.rank}:", cause.text]
    return "\n".join(lines) + "\n"
