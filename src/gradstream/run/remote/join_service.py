"""The join service of a launcher: admits machines to a run, and sends them orders until it ends.

It has its own thread and event loop for as long as the run takes.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from gradstream._version import __version__
from gradstream.coordinator.nodes import COORDINATOR
from gradstream.errors import DeadlineError, GradstreamError, PeerLostError, RefusedError, exit_code
from gradstream.job.losses import losses_of_all
from gradstream.job.plan import RunPlan
from gradstream.run.followed_events import FollowedEvents
from gradstream.run.remote.address import Address, files_of, new_token
from gradstream.run.remote.certificate_authority import JOB, LAUNCHER, CertificateAuthority, Invitation
from gradstream.run.remote.listening import Listening
from gradstream.run.remote.members import MachineMembers, RankMembers, Seat, facts_of, file_hash, name_of_rank
from gradstream.run.remote.reach import serve_measure
from gradstream.runtime.real import RealRuntime
from gradstream.runtime.tasks import Throttle, Wakeup
from gradstream.telemetry.events import Event, InsecureEvent, MachineEvent, WaitingEvent
from gradstream.transport.base import Identity, Stream
from gradstream.transport.grpc.endpoint import GrpcEndpoint
from gradstream.transport.proof import Credentials
from gradstream.untrusted import LINE_BYTES, counted, escaped, tell
from gradstream.wire import v1
from gradstream.wire.frames import MAX_HEADER_BYTES

BEAT_S = 5.0
SILENT_LEASES = 2
"""A machine that is silent for so many times `lease_s` has left: by then all of its nodes count as lost."""

START_S = 10.0
LEAVE_S = 30.0
LOUD_S = 60.0
"""Seconds between two warnings that a run uses plain text."""

LEFT = "LEFT"
"""Code for the end of a machine that closed its connection in good order."""

REFUSED_BYTES, HEAD_BYTES = 16, 120
"""Longest name and address of a refused machine; bytes of the other fields of its event line."""

OnMessage = Callable[[dict[str, Any]], None]


@dataclass(slots=True, eq=False)
class _Machine:
    """A connected machine.

    Args:
        seat: its place in the run.
        request: its certificate signing request.
        bell: set when there may be an order for it.
        again: lost workers that it is to start again.
    """

    seat: Seat
    request: bytes
    bell: Wakeup = field(default_factory=Wakeup)
    again: list[str] = field(default_factory=list)


class JoinService:
    """Admits machines to a run. A context manager: machines can join while it is open.

    Args:
        listen: the address to listen at.
        authority: signs certificates; None for a run in plain text.
        invitation: the description of the run for them.
        on_message: called from the service's thread with these messages:
            {"machine": name, "state": "joined" | "left" | "refused", "address", "nodes", "reason"},
            {"from": node, "error", "message", "traceback"}, {"exited": node, "status": code}, and
            {"insecure": address} while the run uses plain text.
        secret: the token of the run; a machine has to prove that it knows it.
    """

    def __init__(
        self,
        listen: Address,
        authority: CertificateAuthority | None,
        members: MachineMembers,
        invitation: Invitation,
        on_message: OnMessage,
        secret: bytes,
    ) -> None:
        self._secret = secret
        self.address = listen
        self._authority = authority
        self._members = members
        self._invitation = invitation
        self._on_message = on_message
        self._go: v1.Go | None = None
        self._over: v1.Over | None = None
        self._there: dict[_Machine, None] = {}
        self._loop = asyncio.new_event_loop()
        self._ready: Future[None] = Future()
        self._closing = asyncio.Event()
        self._refusals: Throttle[tuple[Seat, str]] | None = None
        self._thread = threading.Thread(target=self._serve, name="join-service", daemon=True)

    def __enter__(self) -> JoinService:
        self._thread.start()
        wait([self._ready], START_S)
        if not self._ready.done():
            raise DeadlineError(LAUNCHER, f"cannot listen on {self.address}: not done in {START_S:g} s")
        if (error := self._ready.exception()) is not None:
            self._thread.join()
            raise error
        return self

    def __exit__(self, *exception: object) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(LEAVE_S)

    def go(self, port: int) -> None:
        """Orders every machine to start its nodes, including later ones; `port` is the coordinator's."""
        self._order(lambda: setattr(self, "_go", v1.Go(port=port)))

    def start_again(self, name: str) -> None:
        """Orders the machine of a worker to start it again; does nothing if that machine has left."""

        def note() -> None:
            for machine in self._there:
                machine.again += [name] * (name in machine.seat.nodes)

        self._order(note)

    def over(self, status: int, message: str) -> None:
        """Reports to every machine that the run is over, and how it ended."""
        self._order(lambda: setattr(self, "_over", v1.Over(status=status, message=message)))

    def _order(self, change: Callable[[], None]) -> None:
        def carry_out() -> None:
            change()
            for machine in self._there:
                machine.bell.ring()

        self._loop.call_soon_threadsafe(carry_out)

    # ---- the thread ---------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._main())
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(error)

    async def _main(self) -> None:
        runtime = RealRuntime(LAUNCHER)
        endpoint = GrpcEndpoint(
            Identity(JOB, LAUNCHER, 1, secret=self._secret),
            runtime,
            listen=str(self.address),
            security=self._authority.join_service_tls if self._authority else None,
            insecure=self._authority is None,
            connection_s=self._invitation.deadlines.connection_s,
            max_message_bytes=MAX_HEADER_BYTES,
        )
        self._runtime = runtime
        self._refusals = Throttle(runtime, self._report_refused)
        endpoint.on_stranger = self._refuse_stranger
        endpoint.serve("hello", self._hello, model=False)
        endpoint.serve("enrol", self._enrol, model=False)
        endpoint.serve("measure", self._measure, model=False)
        try:
            await endpoint.start()
            self.address = self.address.at(int(endpoint.address.rpartition(":")[2]))
            self._ready.set_result(None)
            if self._authority is None:
                shouting = runtime.spawn(self._shout(), name="insecure")
            await self._closing.wait()
            if self._authority is None:
                shouting.cancel()
            await self._let_leave()
        finally:
            await endpoint.close()
            self._refusals.close()
            runtime.close()

    async def _shout(self) -> None:
        while True:
            self._on_message({"insecure": str(self.address)})
            await self._runtime.sleep(LOUD_S)

    async def _let_leave(self) -> None:
        """Waits up to BEAT_S for the machines to close their streams, once the run is over."""
        waited_s = 0.0
        while self._over is not None and self._there and waited_s < BEAT_S:
            await self._runtime.sleep(0.02)
            waited_s += 0.02

    # ---- methods ------------------------------------------------------------------------

    def _refuse_stranger(self, address: str) -> None:
        assert self._refusals is not None
        self._refusals.tell((Seat("a machine", address, ()), "it has not proved that it knows the token"))

    async def _hello(self, stream: Stream) -> None:
        welcome = v1.Welcome(software=__version__, state=self._members.state, clock_s=time.time())
        await stream.send(_body(welcome))

    async def _measure(self, stream: Stream) -> None:
        request = v1.Measure.FromString(stream.opened.body)
        await serve_measure(stream, request)

    async def _enrol(self, stream: Stream) -> None:
        request = v1.Enrol.FromString(stream.opened.body)
        seat = self._members.enrol(request)
        if isinstance(seat, v1.Refuse):
            assert self._refusals is not None
            self._refusals.tell((Seat(request.machine, request.address, ()), seat.message))
            stream.refuse(seat.code, seat.message)
            return
        machine = _Machine(seat, request.request)
        self._there[machine] = None
        reason = ""
        try:
            grant = self._invitation.grant(seat, request.request, self._authority, self._members.state)
            self._report(seat, "joined")
            await self._send(stream, v1.Order(grant=grant))
            await self._runtime.gather(self._listen(stream, seat), self._tell(stream, machine))
        except GradstreamError as error:
            left = isinstance(error, RefusedError) and error.code == LEFT
            reason = "its processes have ended" if left else str(error).removeprefix(f"{stream.peer}: ")
            raise
        finally:
            del self._there[machine]
            if self._over is None:
                self._members.left(seat)
                self._report(seat, "left", reason or "it closed the connection")

    async def _tell(self, stream: Stream, machine: _Machine) -> None:
        """Sends orders as they come, and at least every BEAT_S a heartbeat with the state of the run.

        Raises:
            PeerLostError: nothing was heard of the machine for twice `lease_s`, after which its nodes are lost.
        """
        begun_ns: int | None = None
        lease_s = self._invitation.deadlines.lease_s
        while True:
            if self._go is not None and begun_ns is None:
                begun_ns = self._runtime.now()
                await self._send(stream, v1.Order(go=self._go))
            if begun_ns is not None and self._over is None:
                heard_ns = max(begun_ns, stream.heard_ns)
                if self._runtime.left_s(heard_ns, SILENT_LEASES * lease_s) <= 0:
                    raise PeerLostError(stream.peer, f"was silent for {SILENT_LEASES * lease_s:g} s")
            while machine.again and self._over is None:
                assert self._go is not None
                name = machine.again.pop(0)
                again = self._invitation.certified(name, machine.request, self._authority)
                await self._send(stream, v1.Order(go=v1.Go(port=self._go.port, again=again)))
            if self._over is not None:
                await self._send(stream, v1.Order(over=self._over))
                return
            await stream.waiting([self._members.state])
            await machine.bell.rung(self._runtime, min(BEAT_S, self._invitation.deadlines.notice_s))

    async def _send(self, stream: Stream, order: v1.Order) -> None:
        order.age_ns = self._invitation.age_ns(self._runtime.now())
        await stream.send(_body(order))

    async def _listen(self, stream: Stream, seat: Seat) -> None:
        """Passes on the machine's reports on its nodes, until it closes the stream."""
        while (received := await stream.recv()) is not None:
            report = v1.Report.FromString(received.frame.body.data)
            if not report.who:
                continue  # a heartbeat
            if report.who not in seat.nodes:
                raise RefusedError(
                    LAUNCHER,
                    "BAD_REQUEST",
                    f"{seat.machine} reported the end of {report.who[:80]!r}, which runs on another machine",
                )
            if self._members.seat_of(report.who) is not seat:
                continue  # a shard that was rescued: the process there is an earlier one
            if report.error:
                self._on_message(
                    {
                        "from": report.who,
                        "error": report.error,
                        "message": report.message,
                        "traceback": report.traceback,
                    }
                )
            self._on_message({"exited": report.who, "status": report.status})
        if self._over is None:
            raise RefusedError(stream.peer, LEFT, "it has left the run")

    def _report_refused(self, refused: tuple[Seat, str], more: int) -> None:
        seat, reason = refused
        named = Seat(escaped(seat.machine, REFUSED_BYTES), escaped(seat.address, REFUSED_BYTES), ())
        left_bytes = limit_bytes = LINE_BYTES - HEAD_BYTES - len(json.dumps(named.machine + named.address))
        while len(json.dumps(counted(reason, more, limit_bytes))) > left_bytes and limit_bytes > 32:
            limit_bytes -= 8
        self._report(named, "refused", counted(reason, more, limit_bytes))

    def _report(self, seat: Seat, state: str, reason: str = "") -> None:
        self._on_message(
            {
                "machine": seat.machine,
                "state": state,
                "address": seat.address,
                "nodes": list(seat.nodes),
                "reason": reason,
            }
        )


def _body(message: Any) -> v1.Frame:
    return v1.Frame(body=v1.Body(data=message.SerializeToString()))


# ---- machine rendezvous ------------------------------------------------------------------
# Waits at the launcher for the other machines of a run, and records when they join and leave.

REMIND_S = 30.0
"""Seconds between two events that say for how many machines a run waits."""

REASON_BYTES = 512
"""Longest reason for leaving that is recorded, in bytes."""

INVITE = "on each other machine, beside its own copy of the job file:\n\n    {}\n\n"


class MachineRendezvous:
    """The other machines of one run. A context manager: machines can join while it is open.

    Args:
        listening: the address, and the number of machines.
        plan: plan of the run, whose job names its file (`Job.spec`).
        spec: description of the plan for the nodes, as JSON.
        on_message: see `JoinService`; the caller passes messages about machines to `note`.
        events: the run's events, to which this adds, and its clock.

    Attributes:
        absent: names of the nodes without which training begins, since their machines may come later.
    """

    def __init__(
        self,
        listening: Listening,
        plan: RunPlan,
        spec: Mapping[str, Any],
        on_message: Callable[[dict[str, Any]], None],
        events: FollowedEvents,
    ) -> None:
        self._listening = listening
        self._emit: Callable[[Event], None] = events.emit
        self._job = job = plan.job
        self._authority = None if listening.insecure else CertificateAuthority()
        self._token = new_token(listening.token)
        by_rank = listening.on_open is not None
        self.machine = name_of_rank(0, socket.gethostname()) if by_rank else socket.gethostname()
        self.members = (RankMembers if by_rank else MachineMembers)(
            self.machine,
            machines=listening.machines,
            workers_per_machine=listening.workers_per_machine,
            parts=plan.parts,
            facts=facts_of(job),
            shards=plan.most_servers,
            servers_on=listening.servers_on,
            losses=losses_of_all(plan),
        )
        self.absent: list[str] = []
        hashes = {path.name: file_hash(path) for path in files_of(spec)}
        invitation = Invitation(
            json.dumps(spec), hashes, job.deadlines, listening.port_of, lambda: events.zero_ns
        )
        self.join_service = JoinService(
            listening.own, self._authority, self.members, invitation, on_message, self._token.encode()
        )

    def __enter__(self) -> MachineRendezvous:
        self.join_service.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended = (
            "the run has finished"
            if error is None
            else f"the run has ended: {str(error) or type(error).__name__}"
        )
        self.join_service.over(0 if error is None else exit_code(error), ended)
        self.join_service.__exit__(kind, error, trace)

    @property
    def invitation(self) -> str:
        """The command line that joins another machine."""
        words = [
            "gradstream",
            "join",
            str(self.join_service.address),
            self._job_argument(),
            "--token",
            self._token,
        ]
        words += ["--insecure"] if self._authority is None else ["--fingerprint", self._authority.fingerprint]
        arguments = list(self._job.argv or ())[1:]
        return shlex.join([*words, "--", *arguments] if arguments else words)

    def wait(self, handle: Callable[[], None]) -> None:
        """Prints the invitation, and returns once enough machines have joined for the training to begin.

        Args:
            handle: waits for a moment, and handles messages.

        Raises:
            DeadlineError: too few machines joined in time.
        """
        if self._listening.on_open is not None:
            assert self._authority is not None
            self._listening.on_open(str(self.join_service.address), self._authority.fingerprint)
        elif self._listening.on_invitation is not None:
            self._listening.on_invitation(self.invitation)
        else:
            tell(INVITE.format(self.invitation))
        begun = reminded = time.monotonic()
        self._emit(WaitingEvent(state=self.members.state))
        while self.members.here < self._listening.fewest:
            handle()
            now = time.monotonic()
            if now > begun + self._listening.wait_s:
                text = f"gave up after {self._listening.wait_s:g} s {self.members.state}"
                raise DeadlineError(LAUNCHER, text)
            if now > reminded + REMIND_S:
                reminded = now
                self._emit(WaitingEvent(state=self.members.state))
        self.absent = self.members.begin()

    def note(self, message: Mapping[str, Any]) -> dict[str, dict[str, str]]:
        """Records a message of the join service about a machine.

        Returns:
            Once training has begun: the nodes that were lost with the machine, each with its error; or the nodes that
            came with it, each with {}.
        """
        if "insecure" in message:
            self._emit(InsecureEvent(address=message["insecure"]))
            return {}
        fields = {name: message[name] for name in ("state", "address", "nodes", "reason")}
        fields["reason"] = escaped(fields["reason"], REASON_BYTES)
        self._emit(MachineEvent(who=message["machine"], **fields))
        if message["state"] == "joined":
            return {str(node): {} for node in message["nodes"]}
        if message["state"] != "left" or not self.members.begun:
            return {}
        text = f"machine {message['machine']} ({message['address']}) has left: {message['reason']}"
        lost = {"error": "PeerLostError", "message": text, "traceback": ""}
        return {str(node): lost for node in message["nodes"] if not self.is_here(node)}

    def start_again(self, name: str) -> bool:
        """Makes the machine of a lost worker start it again, under a new certificate. False if the machine is gone."""
        there = self.members.is_there(name)
        if there:
            self.join_service.start_again(name)
        return there

    def is_here(self, name: str) -> bool:
        """Whether a node runs on this machine."""
        return name == COORDINATOR or name in self.members.nodes_of(0)

    def place_of(self, name: str) -> str:
        """The machine and address of a node that runs on another machine; "" for a node of this machine."""
        seat = None if self.is_here(name) else self.members.seat_of(name)
        return "" if seat is None else f"machine {seat.machine} ({seat.address})"

    def arguments(self, name: str) -> list[str]:
        """The network arguments of a node of this machine."""
        listen = ["--listen", str(self.join_service.address.at(self._listening.port_of(name)))]
        secret = self._token.encode()
        if self._authority is None:
            return [*listen, "--insecure", "--credentials", str(Credentials(secret))]
        return [*listen, "--credentials", str(self._authority.credentials(name, secret))]

    def _job_argument(self) -> str:
        """The job as a user names it from the folder of its file."""
        spec = str(self._job.spec)
        return spec[spec.rfind("/") + 1 :]
