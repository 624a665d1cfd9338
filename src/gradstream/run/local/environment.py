"""The environment of the nodes on this machine: threads of arithmetic, and how memory is kept."""

from __future__ import annotations

import os

from gradstream.machine.description import num_cores

SWITCH_INTERVAL_S = 2e-4
"""Seconds for which a computing thread keeps Python's GIL while the event loop waits for it.

With the default of 5 ms, nearly every hop of a message would take 5 ms longer.
"""

# Vectors of hundreds of MB are allocated and freed at every step. If they went back to the kernel each time,
# it would zero their pages again: at 75 M parameters that costs the plain loop 13 %.
KEEP_PAGES = {
    # A thread's own arena keeps no more than 64 MiB: on the arithmetic thread the pages of a step would be
    # taken from the system anew each time (a convolutional network: 0.42 s a step instead of 0.26 s).
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 40),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(64 << 20),
}

# Arithmetic threads wait for each other by spinning, which is best where each has a core. A shard and a worker
# together have more threads than cores: one then spins on the core that another needs (a worker and a shard
# on two cores, over TCP: 460 samples/s spinning, 830 yielding; a worker alone: 3,400 and 2,750).
YIELD = {"OMP_WAIT_POLICY": "PASSIVE"}

# gRPC's own preparations for a fork end the processes that a data loader forks from a node. They use no gRPC.
NO_FORK_HANDLERS = {"GRPC_ENABLE_FORK_SUPPORT": "0"}


def hash_seed() -> str:
    """PYTHONHASHSEED of the nodes of a run that begins here: with one seed, sets have the same order in all of them."""
    given = os.environ.get("PYTHONHASHSEED", "random")
    return "0" if given == "random" else given


def node_environment(workers: int, *, shards: bool = False) -> dict[str, str]:
    """Variables that must be set before a node loads numpy, torch or gRPC.

    Each worker gets an equal part of the cores for arithmetic threads, at least one. Variables that the user
    has set are kept.

    Args:
        workers: number of workers that share the cores of this machine.
        shards: whether shards of the server share them too.
    """
    threads = str(max(1, num_cores() // max(1, workers)))
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
    wanted = dict.fromkeys(names, threads) | KEEP_PAGES | NO_FORK_HANDLERS | (YIELD if shards else {})
    return {
        **{name: os.environ.get(name, value) for name, value in wanted.items()},
        "PYTHONHASHSEED": hash_seed(),
    }
