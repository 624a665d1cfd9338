"""The environment of the nodes on this machine: arithmetic threads, and how memory is kept."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from gradstream.errors import ConfigError
from gradstream.machine.description import interfaces, num_cores
from gradstream.run.remote.address import TOKEN
from gradstream.transport.offers import is_loopback

# ---- environment -------------------------------------------------------------------------


def python_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a Python process that finds this package: our own, with these values of some variables.

    Without the token of runs on several machines: this process has it, and no other process needs it.
    """
    source = str(Path(__file__).resolve().parents[3])  # the folder of the package
    path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    inherited = {name: value for name, value in os.environ.items() if name != TOKEN}
    return {**inherited, **environment, "PYTHONPATH": path}


def there(cwd: str | None) -> str | None:
    """The working directory for a process; None, for that of this process, if it no longer exists."""
    return cwd if cwd and os.path.isdir(cwd) else None


SWITCH_INTERVAL_S = 2e-4
"""Seconds for which a computing thread keeps Python's GIL while the event loop waits for it.

With the default of 5 ms, nearly every hop of a message would take 5 ms longer.
"""

# Vectors of hundreds of MB are allocated and freed at every step. If they went back to the kernel each time,
# it would zero their pages again: at 75 M parameters that costs the plain loop 13 %.
KEEP_PAGES = {
    # A thread's own arena keeps no more than 64 MiB: the arithmetic thread would get the pages of a step from
    # the system anew each time (a convolutional network: 0.42 s a step instead of 0.26 s).
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 40),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(64 << 20),
}

# Arithmetic threads wait for each other by spinning, which is best if each has a core. A shard and a worker
# together have more threads than cores: one then spins on the core that another needs (a worker and a shard
# on two cores, over TCP: 460 samples/s spinning, 830 yielding; a worker alone: 3,400 and 2,750).
YIELD = {"OMP_WAIT_POLICY": "PASSIVE"}

# gRPC's own fork handlers end the processes that a data loader forks from a node. They use no gRPC.
NO_FORK_HANDLERS = {"GRPC_ENABLE_FORK_SUPPORT": "0"}


def hash_seed() -> str:
    """PYTHONHASHSEED of the nodes of a new run: with one seed, sets have the same order in all of them."""
    seed = os.environ.get("PYTHONHASHSEED", "random")
    return "0" if seed == "random" else seed


def node_environment(workers: int, *, shards: bool = False) -> dict[str, str]:
    """Variables that must be set before a node loads numpy, torch or gRPC.

    Each worker gets an equal part of the cores for arithmetic threads, at least one. Variables that the user
    has set are kept.

    Args:
        workers: number of workers that share the cores of this machine.
        shards: whether shards of the server share them, too.
    """
    threads = str(max(1, num_cores() // max(1, workers)))
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
    wanted = dict.fromkeys(names, threads) | KEEP_PAGES | NO_FORK_HANDLERS | (YIELD if shards else {})
    return {
        **{name: os.environ.get(name, value) for name, value in wanted.items()},
        "PYTHONHASHSEED": hash_seed(),
    }


# ---- ranks -------------------------------------------------------------------------------
# Sets the environment of a script: its rank, and the rendezvous address of torch.distributed.
#
# The variables are those of torchrun, so that the script's own `init_process_group` and libraries work alike.


def hold_port(host: str, port: int = 0) -> socket.socket:
    """Reserves a port for the process group of a script for as long as the returned socket is open.

    The socket does not listen, so worker 0 can listen there: torch reuses addresses, as servers do.

    Args:
        host: an address of this machine.
        port: the port; 0 takes a free one.

    Raises:
        ConfigError: the port is in use.
    """
    family, kind, proto, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    held = socket.socket(family, kind, proto)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind(place)
    except OSError as error:
        held.close()
        raise ConfigError(
            f"port {port} of {host} cannot be reserved for the script's own torch.distributed "
            f"({error.strerror}): name another port with --listen, or give --listen no port"
        ) from None
    return held


def set_environment(rank: int, size: int, per_machine: int, master: tuple[str, int], own: str) -> None:
    """Sets the variables of one worker, in its process.

    Args:
        rank: rank of the worker.
        size: number of workers.
        per_machine: number of workers on each machine; the first machine has the lowest ranks.
        master: host and port at which rank 0 listens if the script makes a process group.
        own: host at which the others reach this worker.
    """
    machine, local = divmod(rank, per_machine)
    values = {
        "RANK": rank,
        "LOCAL_RANK": local,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": per_machine,
        "GROUP_RANK": machine,
        "GROUP_WORLD_SIZE": size // per_machine,
        "NODE_RANK": machine,
        "MASTER_ADDR": master[0],
        "MASTER_PORT": master[1],
    }
    os.environ.update({name: str(value) for name, value in values.items()})
    # A torchrun that started the launcher sets it, but its store is not at MASTER_ADDR.
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    names = [name for name, address in interfaces().items() if address == own and not is_loopback(own)]
    if names:
        # Without it gloo takes the address of the host name, which on many systems no other machine reaches.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])


# ---- signals -----------------------------------------------------------------------------
# Handles Ctrl-C and SIGTERM during a run: the first asks it to stop, the second ends it at once.
#
# A further SIGTERM changes nothing: the processes of the run are already being ended.
#
# The launcher passes the stop on to nodes as `stop_signal`. Slurm sends SIGTERM to all processes of a step at once,
# nodes included; there they ignore it, and wait for the launcher's decision.

NUMBERS = (signal.SIGINT, signal.SIGTERM)


def stop_signal() -> signal.Signals:
    """The signal by which a launcher asks a coordinator to stop and a worker to leave, in this environment."""
    return signal.SIGUSR1 if "SLURM_STEP_NUM_TASKS" in os.environ else signal.SIGTERM


def sigterm_of_nodes() -> signal.Handlers:
    """How a node reacts to SIGTERM before it has its own handler."""
    return signal.SIG_DFL if stop_signal() is signal.SIGTERM else signal.SIG_IGN


class StopSignals:
    """Handles the two signals of this process. Use it as a context manager, in the main thread.

    In another thread, where Python does not allow signal handlers, it does nothing. A signal that was
    ignored before (a script under `nohup`, or in the background of a shell) stays ignored.

    Attributes:
        asked: whether a signal has come.
    """

    def __init__(self) -> None:
        self.asked = False
        self._ended = False
        self._is_held = False
        self._late: int | None = None  # a postponed signal
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in NUMBERS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Postpones a second signal, which ends this process, to the end of the context."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        if self._late is not None:
            self._handle(self._late, None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if not self.asked:
            self.asked = True
        elif self._is_held:
            self._late = number
        elif number != signal.SIGTERM:
            raise KeyboardInterrupt
        elif not self._ended:
            self._ended = True
            raise SystemExit(128 + number)
