"""Runs coordinator and servers, or connects to them, when torchrun or a test has started the workers.

Worker 0 is the `Host`, which runs coordinator and servers. On several machines, every other worker is a `Guest`,
which joins with the token and stays until the host announces the end of the run.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import socket
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from gradstream._train import host
from gradstream.errors import PeerLostError
from gradstream.job.job import Job
from gradstream.run.remote.address import Address
from gradstream.run.remote.join import Entrance
from gradstream.run.remote.listening import Listening
from gradstream.run.remote.members import name_of_rank
from gradstream.run.remote.reach import reach
from gradstream.run.result import Run
from gradstream.untrusted import say


class Host:
    """Runs coordinator and servers until the run or this process ends.

    Args:
        job: the run's job, with its number of workers.
        processes: whether coordinator and servers are processes of their own, or threads of this process.
        listening: where workers on other machines join; None without other machines.

    Attributes:
        network: command-line arguments of this worker's node about its network, once the run has begun.
    """

    def __init__(self, job: Job, *, processes: bool = True, listening: Listening | None = None) -> None:
        self.network: Sequence[str] = ()
        self._job = job
        self._processes = processes
        self._listening = listening
        self._ready = threading.Event()
        self._where: tuple[str, str] | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._live, name="gradstream-host", daemon=True)

    def start(self) -> tuple[str, str]:
        """Starts the run. Returns (path of the nodes' specification, address of the coordinator).

        Raises:
            ConfigError, DeadlineError, PeerLostError, JoinRefusedError: the run could not start.
        """
        self._thread.start()
        self._ready.wait()
        if self._where is None:
            assert self._error is not None
            raise self._error
        return self._where

    def join(self, timeout_s: float | None = None) -> None:
        """Waits until the run is over and all nodes have left."""
        self._thread.join(timeout_s)

    @property
    def error(self) -> BaseException | None:
        """The error that ended the run, if any."""
        return self._error

    def _live(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self._error = error  # after the start, the coordinator tells this process's worker instead
        finally:
            self._ready.set()

    def _run(self) -> None:
        run = host(self._job, self._begun, processes=self._processes, listening=self._listening)
        if self._processes:
            say(_result(run))

    def _begun(self, spec: Path, coordinator: str, network: Sequence[str]) -> None:
        self.network = network
        self._where = (str(spec), coordinator)
        self._ready.set()


class Guest(Host):
    """Connects a worker to a host on another machine.

    Args:
        job: the job that this process's script asks for.
        rank: number of the worker.
        token: secret of the run.
        address, fingerprint: address and certificate fingerprint of the host.
    """

    def __init__(self, job: Job, rank: int, token: str, address: Address, fingerprint: str) -> None:
        super().__init__(job)
        self._rank = rank
        self._token = token
        self._address = address
        self._fingerprint = fingerprint
        self._folder = tempfile.TemporaryDirectory(prefix="gradstream-", ignore_cleanup_errors=True)

    def _run(self) -> None:
        certificate = reach(self._address, fingerprint=self._fingerprint, insecure=False)
        asyncio.run(self._take_part(certificate))

    async def _take_part(self, authority: bytes | None) -> None:
        name, path = name_of_rank(self._rank, socket.gethostname()), Path(self._folder.name)
        async with Entrance(self._address, self._job, name, self._token, authority) as entrance:
            grant = await entrance.enrol()
            spec = path / "nodes.json"
            spec.write_text(json.dumps(entrance.spec(grant, path)))
            order = await entrance.order()
            if order.HasField("go"):
                (node,) = grant.nodes
                self._begun(spec, entrance.coordinator(order.go), entrance.network(node))
                order = await entrance.order()
            else:
                raise PeerLostError("worker-0", order.over.message)
            await entrance.leave()


def _result(run: Run) -> str:
    """One line about a finished run."""
    made, time_s = run.summary, run.summary["train_s"]
    done = f"{made['samples']:,} samples in {made['steps']:,} steps"
    took = "" if time_s is None else f", {time_s:.2f} s"
    more = shlex.quote(str(run.path))
    return f"gradstream: the run has finished: {done}{took}; more: gradstream report {more}"
