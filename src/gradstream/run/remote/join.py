"""`gradstream join`: this machine joins a run that another one started.

`Entrance` admits it; then it starts the nodes assigned to it, follows them, and starts a worker again when the
launcher says so.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from gradstream.errors import (
    RESUMABLE,
    ConfigError,
    DeadlineError,
    GradstreamError,
    JoinRefusedError,
    PeerLostError,
    RefusedError,
)
from gradstream.job.code import keep, users_code
from gradstream.job.files import load_job
from gradstream.job.job import Job, is_script
from gradstream.machine.description import num_cores
from gradstream.machine.resources import free_memory_bytes
from gradstream.run.failures import how_ended
from gradstream.run.local import NODE, SCRIPT, LocalCluster
from gradstream.run.local.cluster import modules_of
from gradstream.run.local.environment import node_environment, stop_signal
from gradstream.run.remote.address import Address, local_address, moved, new_token
from gradstream.run.remote.certificate_authority import JOB, LAUNCHER, Key
from gradstream.run.remote.members import facts_of, file_hash
from gradstream.run.remote.reach import reach
from gradstream.run.result import FINAL_MODEL
from gradstream.runtime.real import RealRuntime
from gradstream.runtime.storage import private_folder
from gradstream.transport.base import Identity, Priority, Stream
from gradstream.transport.grpc.endpoint import GrpcEndpoint
from gradstream.transport.proof import Credentials
from gradstream.transport.security import Tls
from gradstream.untrusted import check_value, parse_json
from gradstream.untrusted.text import check_name
from gradstream.wire import v1

POLL_S = 0.05
EXPECTED = (0, 3, RESUMABLE)
"""Exit statuses of a node that has finished, ended because of another node, or was stopped."""

LEAVE_S = 10.0
AGAIN_S = 1.0
"""Seconds between two attempts to rejoin."""

OnNote = Callable[[str], None]


class _CutOffError(Exception):
    """The launcher went silent after the nodes of this machine had begun; the cause says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """How a machine joins.

    Args:
        address: address of the launcher, as it has printed it.
        job: place of this machine's copy of the job file.
        fingerprint: fingerprint of the launcher's certificate, as it has printed it; None with `insecure`.
        arguments: command-line arguments of the job file, as on the launcher's machine.
        machine: name of this machine; None takes its host name.
        insecure: whether to use plain text, as the launcher does.
        run_dir: folder for logs; None makes runs/<utc>-<machine>.
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
    """Takes part in a run to its end, and returns the exit status of its launcher; 1 if no worker of it was left here.

    Args:
        joining: how to join.
        on_note: called with sentences on what is going on.

    Raises:
        ConfigError: an argument or the job file is wrong.
        JoinRefusedError: the launcher refuses this machine, and says why; or another launcher answers.
        PeerLostError, DeadlineError: the launcher cannot be reached, or is gone.

        After any of these, and after Ctrl-C, no process of the run is left on this machine.

    A machine that was cut off for so long that its nodes were ended rejoins, if the launcher answers again within
    twice `coordinator_s`, and trains on. The launcher's machine has rescued its shards, or the run ends.

    At SIGTERM the workers of this machine hand in what they have computed and leave; the others go on. A machine that
    holds part of the parameters (a shard) cannot leave that way: SIGTERM ends it, as Ctrl-C does.
    """
    name = check_name(joining.machine or socket.gethostname(), "this machine's name (--name)")
    certificate = reach(joining.address, fingerprint=joining.fingerprint, insecure=joining.insecure)
    job = load_job(joining.job, argv=[joining.job, *joining.arguments])
    with asyncio.Runner() as runner:  # one event loop for all attempts: gRPC still calls an earlier one

        def once(again: bool) -> int:
            return runner.run(_run(joining, job, name, certificate, on_note, again))

        try:
            return once(False)
        except _CutOffError as error:
            return _come_back(once, joining, error, 2 * job.deadlines.patience_s, on_note)


async def _run(
    joining: Joining, job: Job, name: str, authority: bytes | None, on_note: OnNote, again: bool
) -> int:
    async with Entrance(joining.address, job, name, joining.token, authority) as entrance:
        return await _Machine(joining, job, name, entrance, on_note).run(again)


def _come_back(
    once: Callable[[bool], int],
    joining: Joining,
    cut_off: _CutOffError,
    wait_s: float,
    on_note: OnNote,
) -> int:
    """Rejoins once the launcher answers. After `wait_s`, re-raises the cause of `cut_off`."""
    give_up_s, tells, refused = None, False, ""
    while give_up_s is None or time.monotonic() < give_up_s:
        if give_up_s is None:
            on_note(f"{cut_off.__cause__}; the nodes here have ended")
            give_up_s, tells = time.monotonic() + wait_s, True
        try:
            reach(joining.address, fingerprint=joining.fingerprint, insecure=joining.insecure)
            return once(True)
        except _CutOffError as error:
            cut_off, give_up_s = error, None
            continue
        except DeadlineError:
            pass  # it has waited
        except PeerLostError as error:
            if isinstance(error.__context__, ConnectionRefusedError):
                on_note(
                    f"nobody listens at {joining.address} any more: the launcher has ended, and the run with it"
                )
                break
        except JoinRefusedError as error:
            if error.code != "NOT_MEMBER":  # the launcher may not have noticed yet that this machine was gone
                raise
            refused = error.reason
        if tells:
            on_note(f"trying to come back, for {wait_s:g} s at most")
            tells = False
        time.sleep(AGAIN_S)
    if refused:
        on_note(f"the launcher has refused this machine: {refused}")
    assert cut_off.__cause__ is not None
    raise cut_off.__cause__


class _Machine:
    """This machine as a member of the run."""

    def __init__(self, joining: Joining, job: Job, name: str, entrance: Entrance, on_note: OnNote) -> None:
        self._joining = joining
        self._job = job
        self._name = name
        self._entrance = entrance
        self._note = on_note
        self._over: v1.Over | None = None
        self._leaving = False
        self._errors: dict[str, dict[str, Any]] = {}
        self._failed: dict[str, str] = {}  # how a node of this machine has failed, until it starts again

    async def run(self, again: bool) -> int:
        """Joins, waits for the order to start, starts nodes and follows them.

        Args:
            again: whether this machine has been a member before.
        """
        grant = await self._entrance.enrol()
        names = [node.name for node in grant.nodes]
        self._note(f"in as {grant.machine}, with {', '.join(names)}; {grant.waiting}")
        run_dir = self._make_run_dir(grant.machine, again)
        spec = self._entrance.spec(grant, run_dir)
        (run_dir / "nodes.json").write_text(json.dumps(spec, indent=2) + "\n")
        keep(users_code(self._job.spec), run_dir)
        num_workers = sum(name.startswith(("worker", "part")) for name in names)
        shards = any(name.startswith("shard") for name in names)
        environment = node_environment(num_workers, shards=shards)
        environment["PYTHONHASHSEED"] = spec["hash_seed"]
        modules = modules_of(self._job)
        with LocalCluster(run_dir / "logs", environment, shards=shards, modules=modules) as cluster:
            order = await self._entrance.order()
            if order.HasField("go"):
                self._note(f"everybody is there: starting {', '.join(names)}; logs in {run_dir / 'logs'}")
                start = partial(self._start, cluster, run_dir)
                start(grant.nodes, order.go)
                if not shards:
                    ask = partial(self._leave, cluster, names)
                    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ask)
                try:
                    await self._entrance.runtime.gather(self._obey(cluster, start), self._follow(cluster))
                except (PeerLostError, DeadlineError) as error:
                    raise _CutOffError from error
            else:
                self._over = order.over
            assert self._over is not None
            await self._entrance.leave()
            await self._let_leave(cluster, self._over.status)
        self._note(self._over.message)
        final = run_dir / FINAL_MODEL
        if final.is_file():  # the launcher's own workers were lost
            self._note(f"the final parameters are in {final}")
        failed = {who: how for who, how in self._failed.items() if who not in cluster.running}
        workers = [name for name in names if not name.startswith("shard")]
        if self._over.status == 0 and workers and failed.keys() >= set(workers):
            self._note(f"the run went on without this machine: {'; '.join(failed.values())}")
            return GradstreamError.exit_status
        return self._over.status

    def _start(self, cluster: LocalCluster, run_dir: Path, nodes: Iterable[v1.Certified], go: v1.Go) -> None:
        zero_ns = self._entrance.zero_ns
        clock = [] if zero_ns is None else ["--clock", str(zero_ns)]
        for node in nodes:
            arguments = ["--spec", str(run_dir / "nodes.json"), "--name", node.name, *clock]
            arguments += ["--coordinator", self._entrance.coordinator(go), *self._entrance.network(node)]
            is_loop = is_script(self._job) and node.name.startswith("worker")
            self._failed.pop(node.name, None)
            cluster.start(node.name, arguments, main=SCRIPT if is_loop else NODE)

    def _make_run_dir(self, machine: str, again: bool) -> Path:
        stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
        called = check_name(machine, "the name that the launcher gives this machine")
        path = (self._joining.run_dir or Path("runs") / f"{stamp}-{called}").resolve()
        if not again and path.exists() and any(path.iterdir()):
            raise ConfigError(f"run directory {path} exists and is not empty: name another one")
        try:
            private_folder(path)
        except OSError as error:
            raise ConfigError(
                f"cannot make {path}, for logs: {error.strerror}; start in another folder"
            ) from None
        return path

    # ---- following ----------------------------------------------------------------------

    async def _obey(
        self, cluster: LocalCluster, start: Callable[[Iterable[v1.Certified], v1.Go], None]
    ) -> None:
        """Starts workers again as the launcher orders, until the run is over; raises when the launcher is gone."""
        while True:
            waiting = self._entrance.runtime.spawn(self._entrance.order(), name="order")
            while not waiting.done():
                if self._over is not None:
                    waiting.cancel()
                    return
                await asyncio.wait([waiting], timeout=POLL_S)
            order = waiting.result()
            if order.HasField("over"):
                self._over = order.over
                return
            if (name := order.go.again.name) not in cluster.running and not self._leaving:
                self._note(f"starting {name} again")
                start([order.go.again], order.go)

    def _leave(self, cluster: LocalCluster, workers: Sequence[str]) -> None:
        """Asks the workers of this machine to hand in what they have computed, and to leave."""
        self._leaving = True
        self._note("asked to go: the workers of this machine hand in what they have computed")
        for name in workers:
            cluster.signal(name, stop_signal())

    async def _follow(self, cluster: LocalCluster) -> None:
        """Reports to the launcher how nodes ended."""
        while self._over is None:
            message = cluster.message(0)
            if message is None:
                if self._leaving and not cluster.running:
                    self._over = v1.Over(
                        status=RESUMABLE, message="this machine has left the run, which goes on"
                    )
                await self._entrance.runtime.sleep(POLL_S)
            elif "error" in message:
                self._errors[message["from"]] = message
            elif "exited" in message:
                how = how_ended(message["status"], message.get("cause", ""))
                await self._report(cluster, message["exited"], message["status"], how)

    async def _let_leave(self, cluster: LocalCluster, status: int) -> None:
        """Waits until the nodes have ended, up to LEAVE_S; for scripts of a finished run, as long as they take."""
        waited_s, patient = 0.0, is_script(self._job) and status == 0
        while cluster.running and (patient or waited_s < LEAVE_S):
            if cluster.message(0) is None:
                await self._entrance.runtime.sleep(POLL_S)
                waited_s += POLL_S

    async def _report(self, cluster: LocalCluster, who: str, status: int, how: str) -> None:
        said = self._errors.pop(who, None)
        if said is not None:
            report = v1.Report(
                error=said["error"],
                message=said["message"],
                traceback=said["traceback"],
                who=who,
                status=status,
            )
        elif status not in EXPECTED:
            message = f"its process on {self._name} {how}; the end of its log:\n{cluster.log_tail(who, 5)}"
            report = v1.Report(error="PeerLostError", message=message, who=who, status=status)
        else:
            report = v1.Report(who=who, status=status)
        how = f"{who} has ended" + (f": {report.error}: {report.message}" if report.error else "")
        if said is not None:  # else it was killed
            self._failed[who] = how
        self._note(how)
        await self._entrance.report(report)


# ---- entrance ----------------------------------------------------------------------------
# Joins a run at its launcher: proves knowledge of the token, and gets node names, certificates and the job.
#
# Code and data are this machine's own: it reads its own job file, and the launcher refuses it if that differs.

_GO_ON = "; if the run has ended, `gradstream resume` on the launcher's machine continues it"


class Entrance:
    """An asynchronous context manager: this machine is a member of the run while it is open.

    Args:
        address: address of the launcher.
        job: the job as this machine has read it, with its spec.
        name: name of this machine, or of this process.
        authority: the launcher's certificate, which `reach` has verified; None for plain text.

    Attributes:
        zero_ns: see `RunClock`, on this machine's clock; None before training. It is too late by the latency of the
            quickest order.
    """

    def __init__(self, address: Address, job: Job, name: str, token: str, authority: bytes | None) -> None:
        self._address = address
        self._job = job
        self._name = name
        self._token = new_token(token)
        self._authority = authority
        self._host = local_address(address)
        self._key = Key()
        self._stream: Stream | None = None
        self._is_in = False  # the launcher has admitted this machine
        self.runtime = RealRuntime(name)
        self.zero_ns: int | None = None

    async def __aenter__(self) -> Self:
        security = Tls(authority=self._authority, mutual=False) if self._authority else None
        identity = Identity(JOB, f"machine-{self._name}", int.from_bytes(os.urandom(8), "little"))
        identity.secret = self._token.encode()
        self._endpoint = GrpcEndpoint(
            identity, self.runtime, security=security, connection_s=self._job.deadlines.connection_s
        )
        self._endpoint.know(LAUNCHER, str(self._address))
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._stream is not None and kind is not None:
            self._stream.cancel(f"left: {kind.__name__}")
        await self._endpoint.close()
        self.runtime.close()

    async def enrol(self) -> v1.Grant:
        """Asks the launcher to admit this machine.

        Raises:
            JoinRefusedError: the launcher refuses this machine, and says why.
        """
        request = v1.Enrol(
            machine=self._name,
            facts=facts_of(self._job),
            request=self._key.request(),
            cores=num_cores(),
            memory_bytes=free_memory_bytes() or 0,
            address=self._host,
        )
        self._stream = await self._endpoint.open(LAUNCHER, "enrol", request, priority=Priority.CONTROL)
        try:
            grant = (await self.order()).grant
            self._is_in = True
            return grant
        except RefusedError as error:
            text = error.reason
            if error.code == "BAD_SECRET":
                text = "the token is not this run's: copy the line again that the launcher has printed"
            raise JoinRefusedError(LAUNCHER, error.code, text) from None

    async def order(self) -> v1.Order:
        """Waits for the launcher's next order, and tells it meanwhile that this machine is there.

        Raises:
            PeerLostError: the launcher is gone.
        """
        assert self._stream is not None
        beats = self.runtime.spawn(self._beat(self._stream), name="heartbeats of this machine")
        try:
            received = await self._stream.recv(self._job.deadlines.patience_s)
        except PeerLostError as error:
            raise PeerLostError(LAUNCHER, f"is gone, or cannot be reached ({error}){_GO_ON}") from error
        except RefusedError as error:
            if not self._is_in:
                raise
            text = f"has counted this machine as gone ({error.reason}){_GO_ON}"
            raise PeerLostError(LAUNCHER, text) from error
        finally:
            beats.cancel()
        if received is None:
            raise PeerLostError(LAUNCHER, f"closed the connection before the run was over{_GO_ON}")
        order = v1.Order.FromString(received.frame.body.data)
        if order.age_ns:
            zero_ns = self.runtime.now() - order.age_ns
            self.zero_ns = zero_ns if self.zero_ns is None else min(self.zero_ns, zero_ns)
        return order

    async def _beat(self, stream: Stream) -> None:
        with suppress(GradstreamError):  # who waits for an order hears of it
            while True:
                await self.runtime.sleep(self._job.deadlines.beat_s)
                await stream.send(v1.Frame(body=v1.Body(data=v1.Report().SerializeToString())))

    async def report(self, report: v1.Report) -> None:
        """Reports to the launcher how a node ended."""
        assert self._stream is not None
        await self._stream.send(v1.Frame(body=v1.Body(data=report.SerializeToString())))

    async def leave(self) -> None:
        """Closes the stream to the launcher, once the run is over."""
        assert self._stream is not None
        await self._stream.end()

    # ---- arguments of the nodes of this machine -----------------------------------------

    def coordinator(self, go: v1.Go) -> str:
        """The coordinator's address."""
        return str(self._address.at(go.port))

    def network(self, node: v1.Certified) -> list[str]:
        """The network arguments of a node of this machine."""
        listen, credentials = str(Address(self._host, node.port)), Credentials(self._token.encode())
        if self._authority is None:
            return ["--listen", listen, "--credentials", str(credentials), "--insecure"]
        pem = {"authority": self._authority, "certificate": node.certificate, "key": self._key.pem}
        return ["--listen", listen, "--credentials", str(dataclasses.replace(credentials, **pem))]

    def spec(self, grant: v1.Grant, run_dir: Path) -> dict[str, Any]:
        """The launcher's description of the plan, with this machine's paths."""
        try:
            spec: dict[str, Any] = parse_json(grant.spec, max_bytes=len(grant.spec.encode()), max_depth=32)
            for part in ("plain", "strategy", "optimizer"):
                check_value(spec[part], Mapping[str, Any], part)
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"the launcher's description of the run cannot be read: {error}") from error
        spec |= {"run_dir": str(run_dir), "earlier": [], "elsewhere": True, "imports": ""}
        spec["script" if is_script(self._job) else "job"] = self._job.spec or ""
        if spec.get("meeting"):  # at the launcher's address as it is known here
            port = Address.parse(str(spec["meeting"]), "where process groups meet").port
            spec["meeting"] = str(self._address.at(port))
        spec["plain"]["run_dir"] = spec["plain"]["cwd"] = None
        spec["plain"]["argv"] = [str(self._job.spec), *(spec["plain"].get("argv") or ())[1:]]
        return moved(spec, lambda file: self._own_file(file.name, grant))

    def _own_file(self, name: str, grant: v1.Grant) -> Path:
        """This machine's copy, beside the job file, of a user's file that the run needs."""
        job_file = Path(str(self._job.spec).partition(".py")[0] + ".py")
        path, expected = job_file.with_name(name), grant.files.get(name, "not known")
        here = file_hash(path) if path.is_file() else "no such file"
        if here != expected and job_file.is_file() and file_hash(job_file) == expected:
            return job_file  # it has another name here
        if here != expected:
            raise JoinRefusedError(
                LAUNCHER,
                "BAD_JOB_FILE",
                f"the run needs {name} with SHA-256 {expected}; {path}: {here}. "
                "Copy it from the launcher's machine to beside the job file",
            )
        return path
