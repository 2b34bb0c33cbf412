"""Minutes of random operations, groups, sizes, dtypes and deaths, every result checked.

    python tests/soak/soak.py --seconds 600 --jobs 4

A round is a world of two to five ranks (--ranks) that do the same random sequence of operations; every rank
knows what every result must be. In most rounds a random rank is struck at a random moment: it is killed,
freezes, raises or leaves. The survivors must all learn of it within the limit; then they shrink and go on, or
the round ends and all start again. Several jobs are as many soaks at once, each with a folder for its
temporary files and seeds of its own.
Prints one line a minute, and what was done. Ends with 1 at the first wrong result or hang, with the doctor's
table of what the ranks last did and the command that does the same round again.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter

import cdist
import numpy as np
from cdist import doctor
from cdist.testing import RankFailedError, run

DTYPES = ["f4", "f8", "i4", "i8", "u1", "c8", "f2"]
MOST_BYTES = 1 << 21
# Seconds in which a death must be known to all; a loaded machine may need some of them.
LIMIT = 15.0
# A round that takes longer hangs; shortly before its end each rank writes down what it does.
ROUND_SECONDS = 4 * LIMIT
RANKS = 5
# Between the seeds of two jobs: more than the rounds of one.
SEEDS_PER_JOB = 1_000_000
FAULTS = ["SIGKILL", "SIGSEGV", "exception", "exit", "freeze"]


def _array(chance, value, count=None):
    """Of a random dtype, size and stride; values are small integers, so that every sum is exact."""
    dtype = np.dtype(chance.choice(DTYPES))
    count = int((MOST_BYTES // dtype.itemsize) ** chance.random()) if count is None else count
    step = chance.choice([1, 1, 1, 2, -1])
    return np.full(count * abs(step), value, dtype)[::step]


def _check(array, value, what):
    if not (array == np.asarray(value).astype(array.dtype)).all():
        raise AssertionError(f"{what}: {array[:4]} and so on, not {value}")


def _all_reduce(chance, group, me, size):
    x = _array(chance, me + 1)
    work = cdist.all_reduce(x, group=group, async_op=chance.random() < 0.3)
    if work:
        work.wait()
    _check(x, size * (size + 1) // 2, "all_reduce")


def _broadcast(chance, group, me, size):
    root = chance.randrange(size)
    x = _array(chance, me + 1)
    cdist.broadcast(x, group=group, group_src=root)
    _check(x, root + 1, "broadcast")


def _reduce(chance, group, me, size):
    root = chance.randrange(size)
    x = _array(chance, me + 1)
    cdist.reduce(x, group=group, group_dst=root, op=cdist.ReduceOp.SUM)
    _check(x, size * (size + 1) // 2 if me == root else me + 1, "reduce")


def _all_gather(chance, group, me, size):
    x = _array(chance, me + 1)
    out = [np.zeros(x.shape, x.dtype) for _ in range(size)]
    cdist.all_gather(out, x, group=group)
    for rank, part in enumerate(out):
        _check(part, rank + 1, "all_gather")


def _reduce_scatter(chance, group, me, size):
    first = _array(chance, me + 1)
    parts = [first] + [np.full(first.shape, me + 1, first.dtype) for _ in range(size - 1)]
    out = np.zeros(first.shape, first.dtype)
    cdist.reduce_scatter(out, parts, group=group)
    _check(out, size * (size + 1) // 2, "reduce_scatter")


def _all_to_all(chance, group, me, size):
    count = int(2000 * chance.random()) + 1
    x = np.repeat(np.arange(size) + 10 * me, count)
    out = np.zeros_like(x)
    cdist.all_to_all_single(out, x, group=group)
    _check(out, np.repeat(10 * np.arange(size) + me, count), "all_to_all_single")


def _ring(chance, group, me, size):
    x = _array(chance, me + 1)
    out = np.zeros(x.shape, x.dtype)
    works = cdist.batch_isend_irecv(
        [
            cdist.P2POp(cdist.isend, x, group=group, group_peer=(me + 1) % size),
            cdist.P2POp(cdist.irecv, out, group=group, group_peer=(me - 1) % size),
        ]
    )
    for work in works:
        work.wait()
    _check(out, (me - 1) % size + 1, "ring")


def _queue(chance, group, me, size):
    arrays = [_array(chance, me + 1) for _ in range(chance.randrange(2, 8))]
    works = [cdist.all_reduce(x, group=group, async_op=True) for x in arrays]
    for work in works:
        work.wait()
    for x in arrays:
        _check(x, size * (size + 1) // 2, "asynchronous all_reduce")


def _behind(chance, group, me, size):
    """An operation that finds others queued before it; nobody keeps the Work of the first."""
    cdist.all_reduce(_array(chance, me + 1), group=group, async_op=True)
    second, third = _array(chance, me + 1), _array(chance, me + 1)
    work = cdist.all_reduce(second, group=group, async_op=True)
    cdist.all_reduce(third, group=group)
    if not work.is_completed():
        raise AssertionError("all_reduce: an operation was complete before the one that is queued before it")
    for x in (second, third):
        _check(x, size * (size + 1) // 2, "all_reduce behind others")


def _objects(chance, group, me, size):
    count = int(50_000 * chance.random())
    out = [None] * size
    cdist.all_gather_object(out, {"rank": me, "array": np.full(count, me)}, group=group)
    if [thing["rank"] for thing in out] != list(range(size)):
        raise AssertionError(f"all_gather_object: {out}")
    for rank, thing in enumerate(out):
        _check(thing["array"], rank, "all_gather_object")


def _barrier(chance, group, me, size):
    cdist.barrier(group=group)


OPERATIONS = [_all_reduce] * 5 + [
    _broadcast, _reduce, _all_gather, _reduce_scatter, _all_to_all, _ring, _queue, _behind, _objects,
    _barrier,
]  # fmt: skip


def _some_operations(seed, count, done):
    """The same on every rank, since all draw the same numbers; `done` counts them as they are complete."""
    chance = random.Random(seed)
    rank, size = cdist.get_rank(), cdist.get_world_size()
    groups = [(None, list(range(size)))]
    for _ in range(count):
        if chance.random() < 0.03:
            members = sorted(chance.sample(range(size), chance.randrange(1, size + 1)))
            made = cdist.new_group(members) if rank in members else None
            groups.append((made, members))
            done["new_group"] += 1
        if len(groups) > 4:
            made, members = groups.pop(1)
            if rank in members:
                cdist.destroy_process_group(made)
        group, members = chance.choice(groups)
        operation = chance.choice(OPERATIONS)
        # All draw the operation's numbers, also those that are not in the group.
        own = random.Random(chance.random())
        if rank in members:
            operation(own, group, members.index(rank), len(members))
            done[operation.__name__[1:]] += 1
    cdist.barrier()


class StruckError(Exception):
    """What the victim's handler raises in the middle of its work."""


def _strike(fault):
    if fault == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "SIGSEGV":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif fault == "exit":
        os._exit(0)
    elif fault == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        raise StruckError


def _arm(chance, fault):
    """At a random moment, in the middle of whatever the main thread does then."""

    def hit(number, frame):
        _strike(fault)

    signal.signal(signal.SIGALRM, hit)
    signal.setitimer(signal.ITIMER_REAL, 0.01 + 0.3 * chance.random())


def _write_down():
    with contextlib.suppress(Exception):  # there may be no group any more
        cdist.dump()


@contextlib.contextmanager
def _black_box():
    """Have this rank write down what it does, before it is killed as hanging and when it fails."""
    alarm = threading.Timer(ROUND_SECONDS - 6, _write_down)
    alarm.daemon = True
    alarm.start()
    try:
        yield
    except StruckError:
        raise
    except Exception:
        _write_down()
        raise
    finally:
        alarm.cancel()


def _round(rank, world, seed, fault, victim, shrinks):
    """Return (operations done by name, how it went on)."""
    with _black_box():
        return _play(rank, world, seed, fault, victim, shrinks)


def _play(rank, world, seed, fault, victim, shrinks):
    chance = random.Random(seed)
    done = Counter()
    if fault is None:
        _some_operations(seed, 300, done)
        return done, "whole"
    if rank == victim:
        _arm(random.Random(-seed - 1), fault)
    start = time.monotonic()
    try:
        while time.monotonic() - start < LIMIT:
            _some_operations(chance.random(), 50, done)
    except StruckError:
        cdist.group.WORLD.abort("struck")
        return done, "struck"
    except cdist.DistError as error:
        if rank == victim:  # thawed, or nobody waited for it
            return done, "left behind"
        expected = (cdist.PeerLostError, cdist.AbortedError, cdist.DistTimeoutError)
        # Struck while it pickled: that call fails on all ranks with the exception's name; the group lives on.
        pickling = f"rank {victim} could not pickle its object: StruckError" in str(error)
        if not isinstance(error, expected) and not pickling:
            raise
    else:
        raise AssertionError(f"rank {rank} heard nothing of the {fault} of rank {victim}")
    if not shrinks or fault in ("exception", "freeze"):
        return done, "told"
    cdist.shrink(timeout=2 * LIMIT)
    if cdist.get_world_size() != world - 1:
        raise AssertionError(f"{cdist.get_world_size()} ranks of {world} are left after one was struck")
    _some_operations(seed, 100, done)
    return done, "went on"


def _judge(outcomes, world, fault, victim):
    """Add up; raises where a rank failed in another way than the fault explains."""
    total, kinds = Counter(), Counter()
    failed = {
        rank: outcome
        for rank, outcome in enumerate(outcomes)
        if not isinstance(outcome, tuple) and (rank != victim or fault is None)
    }
    if failed:
        raise AssertionError(
            "; ".join(f"rank {rank} of {world}: {error!r}" for rank, error in failed.items())
        )
    for outcome in outcomes:
        if not isinstance(outcome, tuple):
            continue
        done, how = outcome
        total += done
        kinds[how] += 1
    return total, kinds


def _table(folder):
    """What the ranks wrote down of themselves, merged."""
    dumps = doctor.load(folder)
    return doctor.render(doctor.diagnose(dumps)) if dumps else "no rank wrote down what it did"


def one_round(seed, ranks=RANKS):
    """Run one world; returns (operations by name, fault or None, how the ranks went on, transport)."""
    chance = random.Random(seed)
    world = chance.randrange(2, ranks + 1)
    fault = chance.choice([None, *FAULTS])
    victim = chance.randrange(world) if fault else None
    transport = chance.choice(["shm", "shm", "tcp"])
    shrinks = chance.random() < 0.7 and world > 2
    arguments = (
        (_freeze, world, seed, victim) if fault == "freeze" else (_round, world, seed, fault, victim, shrinks)
    )
    folder = tempfile.mkdtemp(prefix="soak-dumps-")
    try:
        outcomes = run(
            *arguments, transport=transport, group_timeout=2 if fault == "freeze" else LIMIT,
            timeout=ROUND_SECONDS, allow_failures=True, check_leftovers=False,
            environ={"CDIST_DUMP_DIR": folder},
        )  # fmt: skip
        done, how = _judge(outcomes, world, fault, victim)
    except (AssertionError, RankFailedError) as error:
        where = f"{world} ranks over {transport}, {fault} of rank {victim}"
        again = f"python tests/soak/soak.py --seconds 0 --seed {seed} --ranks {ranks}"
        raise SystemExit(
            f"soak: seed {seed}: {where}: {error}\n{_table(folder)}\nthe same round again: {again}"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return done, fault, how, transport


def _freeze(rank, world, seed, victim):
    """The others name the frozen one at their deadline; it is thawed by the lowest of them and told."""
    store = cdist.group.WORLD.get_group_store()
    if rank == victim:
        store.set("pid", str(os.getpid()))
    pid = int(store.get("pid"))
    try:
        return _round(rank, world, seed, "freeze", victim, False)
    finally:
        if rank == victim:
            signal.setitimer(signal.ITIMER_REAL, 0)
            store.set("awake", "")
        # More than once: on a loaded machine this rank's deadline may have passed before the other froze.
        while rank == (victim + 1) % world and not store.check(["awake"]):
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.05)


def _faults(by_fault):
    return sum(n for name, n in by_fault.items() if not name.startswith("none"))


def soak(seconds, seed, ranks=RANKS, say=print):
    """Rounds until the time is over, at least one; returns the summary that is printed."""
    start = time.monotonic()
    operations, faults, ways, rounds = Counter(), Counter(), Counter(), 0
    next_word = 60
    while not rounds or time.monotonic() - start < seconds:
        done, fault, how, transport = one_round(seed + rounds, ranks)
        rounds += 1
        operations += done
        ways += how
        faults[f"{fault or 'none'} over {transport}"] += 1
        if time.monotonic() - start > next_word:
            say(
                f"soak: {next_word} s: {rounds} worlds, {operations.total()} operations, "
                f"{_faults(faults)} faults; at seed {seed + rounds - 1}",
                flush=True,
            )
            next_word += 60
    return {
        "seconds": round(time.monotonic() - start),
        "seeds": [[seed, seed + rounds - 1]],
        "worlds": rounds,
        "operations": sum(operations.values()),
        "faults_survived": _faults(faults),
        "by_operation": dict(sorted(operations.items())),
        "by_fault": dict(sorted(faults.items())),
        "ranks": dict(sorted(ways.items())),
    }


def _merge(summaries):
    """One summary of several jobs: numbers are added up, seconds are those of the longest."""
    total = {"seconds": max(s["seconds"] for s in summaries), "jobs": len(summaries)}
    total["seeds"] = [pair for s in summaries for pair in s["seeds"]]
    for name in ("worlds", "operations", "faults_survived"):
        total[name] = sum(s[name] for s in summaries)
    for name in ("by_operation", "by_fault", "ranks"):
        total[name] = dict(sorted(sum((Counter(s[name]) for s in summaries), Counter()).items()))
    return total


class _Job:
    """A soak in a process of its own."""

    def __init__(self, number, options, seed, folder):
        self.number, self.folder = number, os.path.join(folder, f"job{number}")
        os.mkdir(self.folder)
        self.output = os.path.join(folder, f"job{number}.out")
        command = [sys.executable, os.path.abspath(__file__), "--seconds", str(options.seconds)]
        command += ["--seed", str(seed + number * SEEDS_PER_JOB), "--ranks", str(options.ranks)]
        with open(self.output, "w") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=dict(os.environ, TMPDIR=self.folder)
            )

    def text(self):
        with open(self.output) as output:
            return output.read()

    def last_word(self):
        words = [line for line in self.text().splitlines() if line.startswith("soak: ")]
        return words[-1] if words else "soak: nothing yet"

    def summary(self):
        text = "\n" + self.text()
        return json.JSONDecoder().raw_decode(text, text.rindex("\n{\n") + 1)[0]


def soak_in_jobs(options, seed, say=print):
    """As soak(), in several processes at once; the first that fails ends all."""
    folder = tempfile.mkdtemp(prefix="soak-jobs-")
    jobs = []
    start, next_word = time.monotonic(), 60
    try:
        jobs += [_Job(number, options, seed, folder) for number in range(options.jobs)]
        while any(job.process.poll() is None for job in jobs):
            failed = [job for job in jobs if job.process.poll()]
            if failed:
                raise SystemExit(f"soak: job {failed[0].number} failed\n{failed[0].text()}")
            if time.monotonic() - start > next_word:
                for job in jobs:
                    say(f"job {job.number}: {job.last_word()}", flush=True)
                next_word += 60
            time.sleep(0.2)
        failed = [job for job in jobs if job.process.returncode]
        if failed:
            raise SystemExit(f"soak: job {failed[0].number} failed\n{failed[0].text()}")
        return _merge([job.summary() for job in jobs])
    finally:
        for job in jobs:
            if job.process.poll() is None:
                job.process.send_signal(signal.SIGINT)  # it takes its ranks with it
        for job in jobs:
            job.process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def main():
    """Parse the command line, soak, print the summary as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600, help="0: one round")
    parser.add_argument("--seed", type=int, default=None, help="of the first world; the others follow it")
    parser.add_argument("--ranks", type=int, default=RANKS, help="at most, of a world (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="soaks at once (default: %(default)s)")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else int.from_bytes(os.urandom(3), "big")
    several = options.jobs > 1
    summary = soak_in_jobs(options, seed) if several else soak(options.seconds, seed, options.ranks)
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    sys.exit(main())
