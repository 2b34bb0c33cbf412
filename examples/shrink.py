"""Loses a rank in the middle of an epoch and goes on training from memory.

    python examples/shrink.py

Three processes fit y = 3x - 1. After 40 steps rank 1 kills itself, as a machine that runs out of memory
would. The others get PeerLostError in the operation that they are in, call cdist.shrink(), share out the
data anew and go on from the parameters that they have in memory: no restart, no checkpoint.
"""

import os
import signal

import cdist
import numpy as np

STEPS, LOSES, VICTIM = 200, 40, 1


def gradient(parameters, x, y):
    slope, offset = parameters
    error = slope * x + offset - y
    return np.array([2 * np.mean(error * x), 2 * np.mean(error)])


def train():
    cdist.init_process_group()
    first_rank = cdist.get_rank()
    everything = np.linspace(-1, 1, 300)
    parameters, step = np.zeros(2), 0
    while step < STEPS:
        shard = everything[cdist.get_rank() :: cdist.get_world_size()]
        try:
            step_gradient = gradient(parameters, shard, 3 * shard - 1)
            cdist.all_reduce(step_gradient, op=cdist.ReduceOp.AVG)
            if step == LOSES and first_rank == VICTIM:
                os.kill(os.getpid(), signal.SIGKILL)
        except cdist.PeerLostError as error:
            print(f"rank {first_rank}, step {step}: {error}", flush=True)
            cdist.shrink()
            # A survivor may have finished the step that broke for another: all go on from the one that is
            # furthest behind.
            behind = np.array([step], dtype=np.int64)
            cdist.all_reduce(behind, op=cdist.ReduceOp.MIN)
            root = np.array(
                [cdist.get_rank() if step == behind[0] else cdist.get_world_size()], dtype=np.int64
            )
            cdist.all_reduce(root, op=cdist.ReduceOp.MIN)
            step = int(behind[0])
            cdist.broadcast(parameters, src=int(root[0]))
            print(
                f"rank {first_rank} is now {cdist.get_rank()} of {cdist.get_world_size()}, "
                f"goes on at step {step}",
                flush=True,
            )
            continue
        parameters -= 0.3 * step_gradient
        step += 1
    print(
        f"rank {first_rank}: y = {parameters[0]:.3f} x + {parameters[1]:.3f} after {step} steps", flush=True
    )
    cdist.destroy_process_group()


if __name__ == "__main__":
    # A launcher would end the whole job when a rank dies; here each process is on its own.
    if "RANK" in os.environ:
        train()
    else:
        import subprocess
        import sys

        from cdist.store import TCPStore

        # The store outlives every rank.
        store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        settings = dict(os.environ, WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port),
                        TORCHELASTIC_USE_AGENT_STORE="True")  # fmt: skip
        ranks = [
            subprocess.Popen([sys.executable, __file__], env=dict(settings, RANK=str(rank)))
            for rank in range(3)
        ]
        sys.exit(any(process.wait() for rank, process in enumerate(ranks) if rank != VICTIM))
