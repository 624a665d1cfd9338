"""Waits at the launcher for the other machines of a run, and records when they join and leave."""

from __future__ import annotations

import json
import shlex
import socket
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from gradstream.coordinator.nodes import COORDINATOR
from gradstream.errors import DeadlineError, exit_code
from gradstream.job.losses import losses_of_all
from gradstream.job.plan import RunPlan
from gradstream.run.followed_events import FollowedEvents
from gradstream.run.remote.address import files_of, new_token
from gradstream.run.remote.certificate_authority import LAUNCHER, CertificateAuthority, Invitation
from gradstream.run.remote.facts import facts_of, file_hash
from gradstream.run.remote.join_service import JoinService
from gradstream.run.remote.listening import Listening
from gradstream.run.remote.members import MachineMembers, RankMembers, name_of_rank
from gradstream.telemetry.events import Event, InsecureEvent, MachineEvent, WaitingEvent
from gradstream.transport.proof import Credentials
from gradstream.untrusted import escaped, tell

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
