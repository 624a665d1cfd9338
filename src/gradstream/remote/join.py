"""A machine that takes part in a run that another has started: `gradstream join`.

It shows the token, and gets what the nodes are told (as JSON), names for its shards and workers and
their certificates. Code and data are its own: it reads its own job file, and is refused where that differs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gradstream.cluster import LocalCluster, node_environment
from gradstream.cluster.machine import num_cores
from gradstream.config import Job
from gradstream.errors import ConfigError, JoinRefusedError, PeerLostError, RefusedError
from gradstream.jobfile import load_job
from gradstream.names import check_name
from gradstream.remote.address import Address, local_address, new_token
from gradstream.remote.authority import ENROLMENT, Key
from gradstream.remote.enrolment import JOB
from gradstream.remote.facts import facts_of, file_hash
from gradstream.remote.reach import reach
from gradstream.run import FINAL_MODEL
from gradstream.runtime.real import RealRuntime
from gradstream.runtime.resources import free_memory_bytes
from gradstream.transport.base import Identity, Priority, Stream
from gradstream.transport.credentials import Credentials
from gradstream.transport.grpc import GrpcEndpoint
from gradstream.transport.security import Tls
from gradstream.untrusted import check_value, parse_json
from gradstream.wire import v1

__all__ = ["Joining", "join"]

"""The launcher says every few seconds what it waits for."""

POLL_S = 0.05
EXPECTED = (0, 3, 75)
"""Exit statuses of a node that ended well, because of another node, or because the run was stopped."""

NO_NAME = r"[^\w.-]"
LEAVE_S = 10.0

OnNote = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """How a machine joins.

    Args:
        address: of the launcher, as it has printed it.
        job: spec of this machine's own job file.
        arguments: what the file is run with, as on the launcher's machine.
        token: of the run.
        fingerprint: of the launcher's certificate, as it has printed it; not needed with `insecure`.
        machine: what this machine is called; None is its host name.
        insecure: plain text, where the launcher does that too.
        run_dir: for logs; None makes runs/<utc>-<machine>.
    """

    address: Address
    job: str
    token: str
    fingerprint: str | None = None
    arguments: Sequence[str] = ()
    machine: str | None = None
    insecure: bool = False
    run_dir: Path | None = None


def join(joining: Joining, on_note: OnNote) -> int:
    """Takes part in a run to its end, and returns the exit status of its launcher.

    Args:
        on_note: is told, in sentences, what is going on.

    Raises:
        ConfigError: of the arguments, or of the job file.
        JoinRefusedError: the launcher does not want this machine, and says why; or it is not the one meant.
        PeerLostError, DeadlineError: the launcher cannot be reached, or is gone.

        After any of these, and after Ctrl-C, no process of the run is left on this machine.
    """
    name = check_name(joining.machine or socket.gethostname(), "this machine's name (--name)")
    joining = replace(joining, machine=name)
    reached = reach(joining.address, fingerprint=joining.fingerprint, insecure=joining.insecure)
    job = load_job(joining.job, argv=[joining.job, *joining.arguments])
    return asyncio.run(_Machine(joining, job, reached.certificate, on_note).run())


class _Machine:
    """This machine, as a part of the run."""

    def __init__(self, joining: Joining, job: Job, authority: bytes | None, on_note: OnNote) -> None:
        self._joining = joining
        self._job = job
        self._authority = authority
        self._note = on_note
        self._name = joining.machine or socket.gethostname()
        self._address = local_address(joining.address)
        self._key = Key()
        self._over: v1.Over | None = None
        self._errors: dict[str, dict[str, Any]] = {}
        self._runtime = RealRuntime(self._name)

    async def run(self) -> int:
        """Enrols, waits, starts nodes and follows them."""
        security = Tls(authority=self._authority, mutual=False) if self._authority else None
        identity = Identity(JOB, f"machine-{self._name}", int.from_bytes(os.urandom(8), "little"))
        identity.secret = new_token(self._joining.token).encode()
        endpoint = GrpcEndpoint(
            identity,
            self._runtime,
            security=security,
            connection_s=self._job.deadlines.connection_s,
        )
        endpoint.know(ENROLMENT, str(self._joining.address))
        try:
            stream = await endpoint.open(ENROLMENT, "enrol", self._request(), priority=Priority.CONTROL)
            try:
                grant = (await self._first_order(stream)).grant
                return await self._take_part(stream, grant)
            except BaseException as error:
                stream.cancel(f"left: {type(error).__name__}")
                raise
        finally:
            await endpoint.close()
            self._runtime.close()

    async def _first_order(self, stream: Stream) -> v1.Order:
        try:
            return await self._order(stream)
        except RefusedError as error:
            text = error.reason
            if error.code == "BAD_SECRET":
                text = "the token is not this run's: copy the line that the launcher has printed anew"
            raise JoinRefusedError(ENROLMENT, error.code, text) from None

    def _request(self) -> v1.Enrol:
        return v1.Enrol(
            machine=self._name,
            facts=facts_of(self._job),
            request=self._key.request(),
            cores=num_cores(),
            memory_bytes=free_memory_bytes() or 0,
            address=self._address,
        )

    async def _order(self, stream: Stream) -> v1.Order:
        try:
            received = await stream.recv(self._job.deadlines.patience_s)
        except PeerLostError as error:
            raise PeerLostError(ENROLMENT, f"is gone, and the run with it ({error})") from error
        if received is None:
            raise PeerLostError(ENROLMENT, "hung up before the run was over")
        return v1.Order.FromString(received.frame.body.data)

    async def _take_part(self, stream: Stream, grant: v1.Grant) -> int:
        names = [node.name for node in grant.nodes]
        self._note(f"in as {grant.machine}, with {', '.join(names)}; {grant.waiting}")
        run_dir = self._make_run_dir(grant.machine)
        (run_dir / "nodes.json").write_text(json.dumps(self._spec(grant, run_dir), indent=2) + "\n")
        num_workers = sum(name.startswith("worker") for name in names)
        shards = any(name.startswith("shard") for name in names)
        with LocalCluster(run_dir / "logs", node_environment(num_workers, shards=shards)) as cluster:
            order = await self._order(stream)
            if order.HasField("go"):
                coordinator = self._joining.address.at(order.go.port)
                self._note(f"everybody is there: starting {', '.join(names)}; logs in {run_dir / 'logs'}")
                for node in grant.nodes:
                    cluster.start(node.name, self._arguments(node, run_dir, coordinator))
                await self._runtime.gather(self._await_end(stream), self._follow(stream, cluster))
            else:
                self._over = order.over
        assert self._over is not None
        await stream.end()
        self._note(self._over.message)
        final = run_dir / FINAL_MODEL
        if final.is_file():  # the launcher's own workers were lost
            self._note(f"the final parameters are in {final}")
        return self._over.status

    def _arguments(self, node: v1.Certified, run_dir: Path, coordinator: Address) -> list[str]:
        credentials = Credentials(self._joining.token.encode())
        if self._authority is not None:
            pem = {"authority": self._authority, "certificate": node.certificate, "key": self._key.pem}
            credentials = dataclasses.replace(credentials, **pem)
        spec = str(run_dir / "nodes.json")
        return [
            *("--spec", spec, "--name", node.name, "--coordinator", str(coordinator)),
            *("--listen", str(Address(self._address, node.port)), "--credentials", str(credentials)),
            *(["--insecure"] if self._authority is None else []),
        ]

    def _spec(self, grant: v1.Grant, run_dir: Path) -> dict[str, Any]:
        """What the nodes of this machine are told: the run's, with this machine's own paths."""
        try:
            spec: dict[str, Any] = parse_json(grant.spec, max_bytes=len(grant.spec.encode()), max_depth=32)
            for part in ("plain", "strategy", "optimizer"):
                check_value(spec[part], Mapping[str, Any], part)
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"the job that the launcher tells cannot be read: {error}") from error
        spec |= {"job": self._job.spec, "run_dir": str(run_dir), "earlier": [], "elsewhere": True}
        spec["plain"]["run_dir"] = None
        spec["plain"]["argv"] = [str(self._job.spec), *(spec["plain"].get("argv") or ())[1:]]
        for described in (spec["strategy"], spec["optimizer"]):
            file, _, name = str(described.get("class", "")).rpartition(":")
            if file.endswith(".py"):
                described["class"] = f"{self._own_file(Path(file).name, grant)}:{name}"
        return spec

    def _own_file(self, name: str, grant: v1.Grant) -> Path:
        """This machine's copy of a file of the user's that the run needs: beside the job file."""
        path = Path(str(self._job.spec).partition(".py")[0] + ".py").with_name(name)
        here = file_hash(path) if path.is_file() else "no such file"
        if here != grant.files.get(name, "not told"):
            raise JoinRefusedError(
                ENROLMENT,
                "BAD_JOB_FILE",
                f"the run needs {name} with SHA-256 {grant.files.get(name)}; {path}: {here}. "
                "Copy it from the launcher's machine to beside the job file",
            )
        return path

    def _make_run_dir(self, machine: str) -> Path:
        stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
        called = check_name(machine, "the name that the launcher gives this machine")
        path = (self._joining.run_dir or Path("runs") / f"{stamp}-{called}").resolve()
        if path.exists() and any(path.iterdir()):
            raise ConfigError(f"run directory {path} exists and is not empty: name a new one")
        path.mkdir(parents=True, exist_ok=True)
        return path

    # ---- following ----------------------------------------------------------------------

    async def _await_end(self, stream: Stream) -> None:
        """Returns when the launcher says that the run is over; raises when it is gone."""
        self._over = (await self._order(stream)).over

    async def _follow(self, stream: Stream, cluster: LocalCluster) -> None:
        """Passes on what becomes of the nodes; gives those that are left at the end time to leave."""
        waited_s = 0.0
        while self._over is None or (cluster.running and waited_s < LEAVE_S):
            message = cluster.message(0)
            if message is None:
                await self._runtime.sleep(POLL_S)
                waited_s += POLL_S if self._over is not None else 0.0
            elif "error" in message:
                self._errors[message["from"]] = message
            elif "exited" in message and self._over is None:
                await self._report(stream, cluster, message["exited"], message["status"])

    async def _report(self, stream: Stream, cluster: LocalCluster, who: str, status: int) -> None:
        said = self._errors.get(who)
        if said is not None:
            report = v1.Report(
                error=said["error"],
                message=said["message"],
                traceback=said["traceback"],
                who=who,
                status=status,
            )
        elif status not in EXPECTED:
            how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
            message = f"its process on {self._name} {how}; the end of its log:\n{cluster.log_tail(who, 5)}"
            report = v1.Report(error="PeerLostError", message=message, who=who, status=status)
        else:
            report = v1.Report(who=who, status=status)
        self._note(f"{who} has ended" + (f": {report.error}: {report.message}" if report.error else ""))
        await stream.send(v1.Frame(body=v1.Body(data=report.SerializeToString())))
