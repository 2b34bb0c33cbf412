"""One rank of one contestant: measures the cases that collectives.py asks for. Started by it, not by hand.

    contestant.py KIND CASES OUT
        KIND: cdist, cdist-torch, cdist-arena, gloo, mpi4py; CASES: JSON [[op, bytes], …]

`bytes` are those of the whole buffer of a rank (of the larger one where input and output differ), and of the
message in send/recv. Rank 0 writes {"case": [seconds a call, …], "copy_rate": bytes/s of one core} to OUT.
"""

import json
import os
import sys
import time

import numpy as np

BATCHES = 5
BATCH_S = 0.03
OUTSTANDING = 64


def copy_rate():
    """Bytes a second at which one core copies an array of 64 MiB; the best of seven."""
    source, target = np.ones(16 << 20, np.float32), np.ones(16 << 20, np.float32)
    best = 1e9
    for _ in range(7):
        began = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - began)
    return source.nbytes / best


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
        xs = [self.full(bytes // 4) for _ in range(OUTSTANDING)]
        ys = [self.full(bytes // 4) for _ in range(OUTSTANDING)]
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
        xs = [self.full(bytes // 4) for _ in range(OUTSTANDING)]
        ys = [self.full(bytes // 4) for _ in range(OUTSTANDING)]
        peer, isend, irecv, wait = self.rank ^ 1, self.comm.Isend, self.comm.Irecv, self.mpi.Request.Waitall
        return lambda: wait([irecv(y, peer) for y in ys] + [isend(x, peer) for x in xs])

    def broadcast_object(self, bytes):
        x, call = np.ones(bytes // 4, np.float32), self.comm.bcast
        return lambda: call(x if self.rank == 0 else None)

    def all_gather_object(self, bytes):
        x, call = np.ones(bytes // 4, np.float32), self.comm.allgather
        return lambda: call(x)


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


def measure(contestant, op, bytes):
    """Seconds a call in each batch: those of the slowest rank."""
    call = getattr(contestant, op)(bytes)
    batch(call, 2)
    # All ranks agree on the number of rounds: they take the same maximum. Twice, since the first is cold.
    for rounds in (2, 5):
        once = contestant.largest(batch(call, rounds))
        if once > BATCH_S:
            break
    rounds = min(max(int(BATCH_S / once), 1), 20000)
    batches = BATCHES if once < 0.25 else 2
    unit = {"send_recv": 2, "outstanding": OUTSTANDING}.get(op, 1)
    return [contestant.largest(batch(call, rounds)) / unit for _ in range(batches)]


def main():
    kind, cases, out = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
    rate = copy_rate() if os.environ.get("RANK", "0") == "0" and kind == "cdist" else None
    contestant, end = make(kind)
    results = {f"{op} {bytes}": measure(contestant, op, bytes) for op, bytes in cases}
    if contestant.rank == 0:
        with open(out, "w") as file:
            json.dump(dict(results, copy_rate=rate), file)
    contestant.largest(0.0)
    end()


if __name__ == "__main__":
    main()
