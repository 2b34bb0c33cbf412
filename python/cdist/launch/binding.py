"""Which cores each worker gets."""

import os


def core_sets(bind, local_size, usable=None):
    """Return the cores of each local rank as a list of sets; None for each where nothing is bound.

    "core": disjoint shares of the usable cores, neighbours together (one core each, by turns, if there are
    too few). "numa": all usable cores of the rank's NUMA node, nodes dealt out in blocks.
    """
    if bind == "none":
        return [None] * local_size
    usable = os.sched_getaffinity(0) if usable is None else usable
    nodes = _numa_nodes(usable)
    if bind == "numa":
        return [nodes[rank * len(nodes) // local_size] for rank in range(local_size)]
    cores = [core for node in nodes for core in sorted(node)]
    if len(cores) < local_size:
        return [{cores[rank % len(cores)]} for rank in range(local_size)]
    edges = [rank * len(cores) // local_size for rank in range(local_size + 1)]
    return [set(cores[begin:end]) for begin, end in zip(edges, edges[1:], strict=False)]


def _numa_nodes(usable):
    """Return the usable cores by NUMA node, without empty nodes."""
    nodes = []
    folder = "/sys/devices/system/node"
    try:
        numbers = [name[4:] for name in os.listdir(folder) if name.startswith("node")]
        for number in sorted(int(number) for number in numbers if number.isdigit()):
            with open(f"{folder}/node{number}/cpulist") as file:
                nodes.append(parse_cores(file.read()) & usable)
    except OSError:
        nodes = []
    nodes = [node for node in nodes if node]
    left = usable.difference(*nodes)
    return [*nodes, left] if left else nodes


def parse_cores(text):
    """Return {0, 1, 2, 8} for "0-2,8"."""
    cores = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
    return cores
