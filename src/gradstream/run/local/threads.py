"""Runs all nodes of a run in this process, for code that no other process can find, as in a notebook.

Two threads serve all nodes. One runs the event loop, with a runtime and an endpoint on loopback for each node;
the other computes for one node after the other. So seeds have the same effect as in processes (torch's
generator belongs to the process), and each gradient may use all cores. But no two nodes compute at the same
time, and all share Python's global lock.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from gradstream.run.local.cluster import NODE, Cluster
from gradstream.run.local.environment import SWITCH_INTERVAL_S, stop_signal

HANG_UP_S = 10.0
GOODBYE_S = 2.0  # longer than an endpoint takes to close: if interrupted, it would leave a server behind
CANCELLED = -9
"""Exit status of a node that was cancelled: that of a process killed by SIGKILL."""


class RunNode(Protocol):
    """Runs a node to its end, and returns its exit status; see `run.node.run_node`."""

    def __call__(
        self,
        argv: Sequence[str],
        *,
        say: Callable[..., None],
        log: Path,
        core: Executor,
        when_asked: Callable[[Callable[[], None]], None],
    ) -> Coroutine[Any, Any, int]:
        """Runs the node that `argv` names, with its arithmetic on `core`."""
        ...


class ThreadCluster(Cluster):
    """Runs the nodes of a run as tasks of this process.

    Nodes write to this process's stdout and stderr. A signal to a node ends it, except SIGTERM to the
    coordinator, which asks the run to stop.

    Args:
        logs: folder for the errors that end nodes; it is made if it does not exist.
        run_node: function that runs one node.
    """

    def __init__(self, logs: Path, run_node: RunNode) -> None:
        super().__init__(logs)
        self._run_node = run_node
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stops: dict[str, Callable[[], None]] = {}  # functions that ask nodes to stop
        self._core = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gradstream-compute")
        self._switch_interval_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._ready = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve()), name="gradstream-nodes", daemon=True
        )
        self._thread.start()
        self._ready.wait()

    def start(self, name: str, argv: Sequence[str], *, main: str = NODE) -> None:
        """See `Cluster.start`. Only nodes of a run can be started here."""
        assert main == NODE
        self._loop.call_soon_threadsafe(self._begin, name, list(argv))

    def signal(self, name: str, number: int) -> None:
        """Ends a node, if it still runs; SIGTERM asks the coordinator to stop."""
        stop = self._stops.get(name) if number == stop_signal() else None
        self._loop.call_soon_threadsafe(stop or partial(self._cancel, name))

    def close(self) -> None:
        """Stops every node that still runs, and waits some seconds for the current computation. Idempotent.

        Unlike a process, a thread cannot be killed.
        """
        if self._thread.is_alive() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(2 * HANG_UP_S)
        self._core.shutdown(wait=False, cancel_futures=True)
        sys.setswitchinterval(self._switch_interval_s)
        self.running.clear()

    # ---- on the loop's thread -----------------------------------------------------------

    async def _serve(self) -> None:
        """Runs nodes until the cluster is closed."""
        self._loop = asyncio.get_running_loop()
        self._closing = asyncio.Event()
        self._ready.set()
        await self._closing.wait()
        await self._stop()

    def _begin(self, name: str, argv: list[str]) -> None:
        self._messages.put({"started": name, "pid": os.getpid()})
        self._tasks[name] = self._loop.create_task(self._live(name, argv), name=name)

    async def _live(self, name: str, argv: list[str]) -> None:
        def say(**message: Any) -> None:
            self._messages.put({"from": name, **message})

        status = CANCELLED
        try:
            status = await self._run_node(
                argv,
                say=say,
                log=self.logs / f"{name}.log",
                core=self._core,
                when_asked=partial(self._stops.__setitem__, name),
            )
        finally:
            self._messages.put({"exited": name, "status": status})

    def _cancel(self, name: str) -> None:
        if name in self._tasks:
            self._tasks[name].cancel()

    async def _stop(self) -> None:
        """Cancels all nodes, again every GOODBYE_S until they have ended."""
        deadline_s = self._loop.time() + HANG_UP_S
        while left := [task for task in self._tasks.values() if not task.done()]:
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=GOODBYE_S)
            if self._loop.time() > deadline_s:
                return
