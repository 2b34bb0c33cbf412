"""One rank of one contestant: measures the cases that collectives.py asks for. Started by it, not by hand.

    contestant.py KIND CASES OUT
        KIND: cdist, cdist-torch, cdist-arena, gloo, mpi4py; CASES: JSON [[op, bytes], …]

`bytes` are those of the whole buffer of a rank (of the larger one where input and output differ), of
the message in send/recv, and of the array inside the object. Rank 0 writes to OUT: {"seconds": {case:
[a call, …]}, "copy_rate": bytes/s of one core, "memory": {case: peak bytes of a rank beyond its
arrays}}, the last two of cdist alone.
"""

import json
import os
import sys
import time

import numpy as np

BATCHES = 5
BATCH_S = 0.03
OUTSTANDING = 64
OUTSTANDING_BYTES = 256 << 20  # of different arrays each way: larger messages share them


def copy_rate():
    """Bytes a second at which one core copies an array of 64 MiB; the best of seven."""
    source, target = np.ones(16 << 20, np.float32), np.ones(16 << 20, np.float32)
    best = 1e9
    for _ in range(7):
        began = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - began)
    return source.nbytes / best


class Memory:
    """Peak memory of this process: private pages, and its share of the pages that it shares."""

    @staticmethod
    def now():
        with open("/proc/self/smaps_rollup") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))

    @staticmethod
    def status(name):
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))

    def begin(self):
        """Call when the arrays are there."""
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        self.before = self.now()

    def end(self):
        """Bytes that the operations took beyond what was there, at the highest."""
        return max(self.now() - self.before, 0) + self.status("VmHWM") - self.status("VmRSS")


def many_arrays(full, bytes):
    """OUTSTANDING arrays; large ones are the same few again and again."""
    different = [full(bytes // 4) for _ in range(min(max(OUTSTANDING_BYTES // bytes, 1), OUTSTANDING))]
    return [different[i % len(different)] for i in range(OUTSTANDING)]


class Torch:
    """torch.distributed's interface, by cdist or by torch: the operations as functions without arguments."""

    def __init__(self, dist, full):
        self.dist, self.full = dist, full
        dist.init_process_group("gloo")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def largest(self, seconds):
        x = self.full(1)
        x[0] = seconds
        self.dist.all_reduce(x, op=self.dist.ReduceOp.MAX)
        return float(x[0])

    def all_reduce(self, bytes):
        x, call = self.full(bytes // 4), self.dist.all_reduce
        return lambda: call(x)

    def broadcast(self, bytes):
        x, call = self.full(bytes // 4), self.dist.broadcast
        return lambda: call(x, 0)

    def all_gather(self, bytes):
        block = max(bytes // 4 // self.world, 1)
        x, y, call = self.full(block), self.full(block * self.world), self.dist.all_gather_into_tensor
        return lambda: call(y, x)

    def reduce_scatter(self, bytes):
        block = max(bytes // 4 // self.world, 1)
        x, y, call = self.full(block * self.world), self.full(block), self.dist.reduce_scatter_tensor
        return lambda: call(y, x)

    def all_to_all(self, bytes):
        count = max(bytes // 4 // self.world, 1) * self.world
        x, y, call = self.full(count), self.full(count), self.dist.all_to_all_single
        return lambda: call(y, x)

    def send_recv(self, bytes):
        """There and back between neighbours; what is reported is half of it."""
        x, y, peer = self.full(bytes // 4), self.full(bytes // 4), self.rank ^ 1
        send, recv = self.dist.send, self.dist.recv
        if self.rank & 1:
            return lambda: (recv(y, peer), send(x, peer))
        return lambda: (send(x, peer), recv(y, peer))

    def outstanding(self, bytes):
        """OUTSTANDING messages each way at once; what is reported is the time for one of each."""
        xs, ys = many_arrays(self.full, bytes), many_arrays(self.full, bytes)
        peer, isend, irecv = self.rank ^ 1, self.dist.isend, self.dist.irecv

        def run():
            works = [irecv(y, peer) for y in ys] + [isend(x, peer) for x in xs]
            for work in works:
                work.wait()

        return run

    def broadcast_object(self, bytes):
        x, call = np.ones(bytes // 4, np.float32), self.dist.broadcast_object_list
        return lambda: call([x if self.rank == 0 else None], src=0)

    def all_gather_object(self, bytes):
        x, call = np.ones(bytes // 4, np.float32), self.dist.all_gather_object
        return lambda: call([None] * self.world, x)

    def gather_object(self, bytes):
        x, call = np.ones(bytes // 4, np.float32), self.dist.gather_object
        return lambda: call(x, [None] * self.world if self.rank == 0 else None, dst=0)

    def scatter_object(self, bytes):
        x, call = np.ones(bytes // 4, np.float32), self.dist.scatter_object_list
        return lambda: call([None], [x] * self.world if self.rank == 0 else None, src=0)

    def send_object(self, bytes):
        """There and back; what is reported is half of it."""
        x, peer = np.ones(bytes // 4, np.float32), self.rank ^ 1
        send, recv = self.dist.send_object_list, self.dist.recv_object_list
        if self.rank & 1:
            return lambda: (recv([None], peer), send([x], peer))
        return lambda: (send([x], peer), recv([None], peer))


class Mpi:
    """The same on Open MPI."""

    def __init__(self):
        from mpi4py import MPI

        self.mpi, self.comm = MPI, MPI.COMM_WORLD
        self.rank, self.world = self.comm.Get_rank(), self.comm.Get_size()

    def largest(self, seconds):
        return self.comm.allreduce(seconds, op=self.mpi.MAX)

    def full(self, count):
        return np.zeros(count, np.float32) + 0

    def all_reduce(self, bytes):
        x, call, place = self.full(bytes // 4), self.comm.Allreduce, self.mpi.IN_PLACE
        return lambda: call(place, x)

    def broadcast(self, bytes):
        x, call = self.full(bytes // 4), self.comm.Bcast
        return lambda: call(x, 0)

    def all_gather(self, bytes):
        block = max(bytes // 4 // self.world, 1)
        x, y, call = self.full(block), self.full(block * self.world), self.comm.Allgather
        return lambda: call(x, y)

    def reduce_scatter(self, bytes):
        block = max(bytes // 4 // self.world, 1)
        x, y, call = self.full(block * self.world), self.full(block), self.comm.Reduce_scatter_block
        return lambda: call(x, y)

    def all_to_all(self, bytes):
        count = max(bytes // 4 // self.world, 1) * self.world
        x, y, call = self.full(count), self.full(count), self.comm.Alltoall
        return lambda: call(x, y)

    def send_recv(self, bytes):
        x, y, peer = self.full(bytes // 4), self.full(bytes // 4), self.rank ^ 1
        send, recv = self.comm.Send, self.comm.Recv
        if self.rank & 1:
            return lambda: (recv(y, peer), send(x, peer))
        return lambda: (send(x, peer), recv(y, peer))

    def outstanding(self, bytes):
        xs, ys = many_arrays(self.full, bytes), many_arrays(self.full, bytes)
        peer, isend, irecv, wait = self.rank ^ 1, self.comm.Isend, self.comm.Irecv, self.mpi.Request.Waitall
        return lambda: wait([irecv(y, peer) for y in ys] + [isend(x, peer) for x in xs])

    def broadcast_object(self, bytes):
        x, call = np.ones(bytes // 4, np.float32), self.comm.bcast
        return lambda: call(x if self.rank == 0 else None)

    def all_gather_object(self, bytes):
        x, call = np.ones(bytes // 4, np.float32), self.comm.allgather
        return lambda: call(x)

    def gather_object(self, bytes):
        x, call = np.ones(bytes // 4, np.float32), self.comm.gather
        return lambda: call(x)

    def scatter_object(self, bytes):
        x, call = np.ones(bytes // 4, np.float32), self.comm.scatter
        return lambda: call([x] * self.world if self.rank == 0 else None)

    def send_object(self, bytes):
        x, peer, send, recv = np.ones(bytes // 4, np.float32), self.rank ^ 1, self.comm.send, self.comm.recv
        if self.rank & 1:
            return lambda: (recv(source=peer), send(x, peer))
        return lambda: (send(x, peer), recv(source=peer))


def make(kind):
    """Return (contestant, function that ends it)."""
    if kind == "mpi4py":
        return Mpi(), lambda: None
    if kind == "gloo":
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        return Torch(dist, torch.zeros), dist.destroy_process_group
    import cdist as dist

    if kind == "cdist-torch":
        import torch

        full = torch.zeros
    elif kind == "cdist-arena":

        def full(count):
            x = dist.empty(count, np.float32)
            x.fill(0)
            return x
    else:

        def full(count):
            return np.zeros(count, np.float32) + 0

    return Torch(dist, full), dist.destroy_process_group


def batch(call, rounds):
    began = time.perf_counter()
    for _ in range(rounds):
        call()
    return (time.perf_counter() - began) / rounds


def measure(contestant, op, bytes, memory):
    """Return (seconds a call in each batch: those of the slowest rank; extra bytes of memory or None)."""
    call = getattr(contestant, op)(bytes)
    if memory:
        memory.begin()
    batch(call, 2)
    # All ranks agree on the number of rounds: they take the same maximum. Twice, since the first is cold.
    for rounds in (2, 5):
        once = contestant.largest(batch(call, rounds))
        if once > BATCH_S:
            break
    rounds = min(max(int(BATCH_S / once), 1), 20000)
    batches = BATCHES if once < 0.25 else 2
    unit = {"send_recv": 2, "send_object": 2, "outstanding": OUTSTANDING}.get(op, 1)
    seconds = [contestant.largest(batch(call, rounds)) / unit for _ in range(batches)]
    # While the arrays are still there: what they give back would count as a peak.
    return seconds, contestant.largest(memory.end()) if memory else None


def main():
    kind, cases, out = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
    contestant, end = make(kind)
    rate = copy_rate() if contestant.rank == 0 and kind == "cdist" else None
    memory = Memory() if kind == "cdist" and os.path.exists("/proc/self/smaps_rollup") else None
    seconds, peaks, kept = {}, {}, 0
    for op, bytes in cases:
        seconds[f"{op} {bytes}"], extra = measure(contestant, op, bytes, memory)
        if memory:
            # Shared memory that an earlier case touched counts for the later ones too.
            kept = max(kept, extra)
            peaks[f"{op} {bytes}"] = kept
    if contestant.rank == 0:
        with open(out, "w") as file:
            json.dump({"seconds": seconds, "copy_rate": rate, "memory": peaks or None}, file)
    contestant.largest(0.0)
    end()


if __name__ == "__main__":
    main()
