"""Starts the nodes of a run on this machine, receives their messages, and leaves no node running."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

from typing_extensions import override

from gradstream.errors import InternalError
from gradstream.job.job import Job, is_script
from gradstream.run.local.environment import SWITCH_INTERVAL_S, python_environment, stop_signal, there
from gradstream.runtime.storage import private_folder

NODE, SCRIPT = "gradstream.run.node:main", "gradstream.run.placement:main"
"""Main functions of processes: a node, and a worker that is a script with its own training loop."""

HANG_UP_S = 5.0

OF_SERVERS = "gradstream.run.shard", "gradstream.worker.server.exchange"
"""Modules of the nodes of a run with servers."""

OF_PARTS = "gradstream.worker.parts", "gradstream.split.cut", "torch._dynamo"
OF_LOOPS = "torch.utils.data", "torch._dynamo"
"""Modules of the nodes of split models, and of scripts. torch imports the last of them, in 2 to 4 s, to work out
shapes, and with the first optimizer that a process makes."""


def modules_of(job: Job) -> tuple[str, ...]:
    """What the workers of a job need besides what all nodes need, and would each import by themselves."""
    of_loops = (type(job.data).__module__, *OF_LOOPS) if is_script(job) else ()  # the session's
    return (OF_PARTS if job.split > 1 else ()) + of_loops


class Cluster(ABC):
    """The nodes of one run on this machine. Use it as a context manager.

    Args:
        logs: folder for the logs of nodes; made when missing.

    Attributes:
        running: process id of each node that runs.
    """

    def __init__(self, logs: Path) -> None:
        private_folder(logs.parent)
        logs.mkdir(exist_ok=True)
        self.logs = logs
        self.running: dict[str, int] = {}
        self._messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @abstractmethod
    def start(self, name: str, argv: Sequence[str], *, main: str = NODE) -> None:
        """Starts a node with these arguments; {"started": name} follows."""

    @abstractmethod
    def signal(self, name: str, number: int) -> None:
        """Sends a signal to a node, if it still runs."""

    @abstractmethod
    def close(self) -> None:
        """Ends every node that still runs. Idempotent."""

    def post(self, message: dict[str, Any]) -> None:
        """Adds a message from elsewhere, which `message` returns in its turn. Thread-safe."""
        self._messages.put(message)

    def message(self, timeout_s: float) -> dict[str, Any] | None:
        """The next message, or None after `timeout_s`.

        It is {"started": name, "pid": n}, {"exited": name, "status": code or -signal, ...}, or a message of a
        node, with {"from": name}.
        """
        try:
            message = self._messages.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if "started" in message:
            self.running[message["started"]] = message["pid"]
        elif "exited" in message:
            self.running.pop(message["exited"], None)
        return message

    def log_tail(self, name: str, num_lines: int = 30) -> str:
        """The last lines of a node's log."""
        path = self.logs / f"{name}.log"
        if not path.is_file():
            return ""
        return "\n".join(path.read_text(errors="replace").splitlines()[-num_lines:])


class LocalCluster(Cluster):
    """Nodes as processes, forked from one warm process, the forkserver. They end with this process.

    Args:
        logs: folder for the output of nodes; made when missing.
        environment: environment variables of the nodes (see `node_environment`).
        shards: whether nodes exchange through servers, whose code is then imported before forking.
        modules: what else is imported before forking; see `modules_of`.
        cwd: working directory of the nodes; None, or a missing directory, means that of this process.

    Attributes:
        forkserver: the warm process; it takes orders on its standard input.
    """

    def __init__(
        self,
        logs: Path,
        environment: Mapping[str, str],
        *,
        shards: bool = False,
        modules: Sequence[str] = (),
        cwd: str | None = None,
    ) -> None:
        super().__init__(logs)
        modules = (*(OF_SERVERS if shards else ()), *modules)
        # Replies have a pipe of their own: the start-up output of an interpreter would look like a reply.
        self._replies, their_end = os.pipe()
        try:
            with open(logs / "forkserver.log", "ab") as output:
                self.forkserver = subprocess.Popen(
                    [sys.executable, "-P", "-m", "gradstream.run.local.forkserver", str(their_end), *modules],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    pass_fds=[their_end],
                    cwd=there(cwd),
                    env=python_environment(environment),
                    start_new_session=True,  # Ctrl-C in the terminal signals the launcher only
                )
        except BaseException:
            os.close(self._replies)
            raise
        finally:
            os.close(their_end)
        self._listener = threading.Thread(target=self._listen, name="forkserver-replies", daemon=True)
        self._listener.start()

    def start(self, name: str, argv: Sequence[str], *, main: str = NODE) -> None:
        """See `Cluster.start`; the process also gets a file descriptor for messages."""
        log = str(self.logs / f"{name}.log")
        self._order(start=name, main=main, argv=list(argv), log=log)

    @override
    def signal(self, name: str, number: int) -> None:
        self._order(signal=name, number=number)

    def message(self, timeout_s: float) -> dict[str, Any] | None:
        """See `Cluster.message`.

        Raises:
            InternalError: the forkserver itself has ended, and with it all nodes.
        """
        message = super().message(timeout_s)
        if message is not None and "gone" in message:
            raise InternalError(
                f"the forkserver has ended; the end of {self.logs / 'forkserver.log'}:\n{self.log_tail('forkserver')}"
            )
        return message

    def close(self) -> None:
        """Kills every node that still runs. Returns when all are gone. Idempotent."""
        orders = self.forkserver.stdin
        assert orders is not None
        if not orders.closed:
            self._order(close=True)
            with suppress(BrokenPipeError):
                orders.close()
        self._listener.join(HANG_UP_S)
        if self._listener.is_alive():
            self.forkserver.kill()  # the kernel kills the nodes with it
            self._listener.join(HANG_UP_S)
        self.forkserver.wait()
        self.running.clear()

    def _order(self, **order: Any) -> None:
        """Sends an order. If the forkserver is gone, its replies have ended."""
        orders = self.forkserver.stdin
        assert orders is not None
        with suppress(BrokenPipeError):
            orders.write(json.dumps(order).encode() + b"\n")
            orders.flush()

    def _listen(self) -> None:
        try:
            with os.fdopen(self._replies, "rb") as replies:
                for line in replies:
                    self._messages.put(json.loads(line))
        finally:
            self._messages.put({"gone": True})


# ---- threads -----------------------------------------------------------------------------
# Runs all nodes of a run in this process, for code that no other process can find, as in a notebook.
#
# Two threads serve all nodes. One runs the event loop, with a runtime and an endpoint on loopback for each node;
# the other computes for one node after the other. So seeds have the same effect as in processes (torch's
# generator belongs to the process), and each gradient may use all cores. But no two nodes compute at the same
# time, and all share Python's global lock.

THREADS_HANG_UP_S = 10.0
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
        self._thread.join(2 * THREADS_HANG_UP_S)
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
        deadline_s = self._loop.time() + THREADS_HANG_UP_S
        while left := [task for task in self._tasks.values() if not task.done()]:
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=GOODBYE_S)
            if self._loop.time() > deadline_s:
                return
