"""Starts the nodes of a run on this machine, receives their messages, and leaves no node running."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from typing_extensions import override

from gradstream.errors import InternalError
from gradstream.job.job import Job, is_script
from gradstream.run.local.environment import python_environment, there
from gradstream.runtime.storage import private_folder

NODE, SCRIPT = "gradstream.run.node:main", "gradstream.run.placement:main"
"""Main functions of processes: a node, and a worker that is a script with its own training loop."""

HANG_UP_S = 5.0

OF_SERVERS = "gradstream.run.shard", "gradstream.worker.server.exchange"
"""Modules of the nodes of a run with servers."""

OF_PARTS = "gradstream.worker.parts", "gradstream.split.cut", "torch._dynamo"
OF_LOOPS = "gradstream.session", "gradstream.session.node", "torch.utils.data", "torch._dynamo"
"""Modules of the nodes of split models, and of scripts. torch imports the last of them, in 2 to 4 s, to work out
shapes, and with the first optimizer that a process makes."""


def modules_of(job: Job) -> tuple[str, ...]:
    """What the workers of a job need besides what all nodes need, and would each import by themselves."""
    return (OF_PARTS if job.split > 1 else ()) + (OF_LOOPS if is_script(job) else ())


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
