"""Starts the nodes of a run on this machine, receives their messages, and leaves no node running."""

from __future__ import annotations

import json
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from typing_extensions import override

from gradstream.errors import InternalError
from gradstream.run.local.link import ForkserverLink
from gradstream.runtime.storage import private_folder

NODE, SCRIPT = "gradstream.run.node:main", "gradstream.run.placement:main"
"""Main functions of processes: a node, and a worker that is a script with its own training loop."""

HANG_UP_S = 5.0


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
    """Nodes as processes, forked from one warm process, the forkserver.

    Args:
        logs: folder for the output of nodes; made when missing.
        environment: environment variables of the nodes (see `node_environment`).
        shards: whether nodes exchange through servers, whose code is then imported before forking.
        modules: what else is imported before forking; see `modules_of`.
        cwd: working directory of the nodes; None, or a missing directory, means that of this process.
        link: to an existing forkserver; None starts a forkserver, whose nodes end with this process.
    """

    def __init__(
        self,
        logs: Path,
        environment: Mapping[str, str],
        *,
        shards: bool = False,
        modules: Sequence[str] = (),
        cwd: str | None = None,
        link: ForkserverLink | None = None,
    ) -> None:
        super().__init__(logs)
        self.link = link or ForkserverLink.started(
            logs / "forkserver.log", environment, shards=shards, modules=modules, cwd=cwd
        )
        self._listener = threading.Thread(target=self._listen, name="forkserver-replies", daemon=True)
        self._listener.start()

    def start(self, name: str, argv: Sequence[str], *, main: str = NODE) -> None:
        """See `Cluster.start`; the process also gets a file descriptor for messages."""
        log = str(self.logs / f"{name}.log")
        self.link.order(start=name, main=main, argv=list(argv), log=log)

    @override
    def signal(self, name: str, number: int) -> None:
        self.link.order(signal=name, number=number)

    def message(self, timeout_s: float) -> dict[str, Any] | None:
        """See `Cluster.message`. With an existing forkserver, {"entered": true} follows its earlier messages.

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
        self.link.close()
        self._listener.join(HANG_UP_S)
        if self._listener.is_alive():
            self.link.kill()
            self._listener.join(HANG_UP_S)
        if self.link.process is not None:
            self.link.process.wait()
        self.running.clear()

    def _listen(self) -> None:
        try:
            with self.link.replies as replies:
                for line in replies:
                    self._messages.put(json.loads(line))
        finally:
            self._messages.put({"gone": True})
