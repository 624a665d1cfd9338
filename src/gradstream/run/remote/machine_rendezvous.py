"""The launcher's side of a run on several machines: what `train` knows about the others."""

from __future__ import annotations

import json
import shlex
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from gradstream.errors import DeadlineError, exit_code
from gradstream.job.job import Job
from gradstream.run.nodes import COORDINATOR
from gradstream.run.remote.address import new_token
from gradstream.run.remote.certificate_authority import ENROLMENT, CertificateAuthority
from gradstream.run.remote.facts import facts_of, file_hash
from gradstream.run.remote.join_service import Invitation, JoinService
from gradstream.run.remote.listening import Listening
from gradstream.run.remote.members import MachineMembers, RankMembers, name_of_rank
from gradstream.telemetry.events import Event, InsecureEvent, MachineEvent, WaitingEvent
from gradstream.transport.credentials import Credentials
from gradstream.untrusted import escaped

__all__ = ["MachineRendezvous"]

REMIND_S = 30.0
"""How often a run that waits for machines says for how many."""

REASON_BYTES = 512
"""Of what a machine, or its carrier, says about why it left."""

INVITE = "on each other machine, beside its own copy of the job file:\n\n    {}\n\n"


class MachineRendezvous:
    """The other machines of one run. A context manager: enrolment is open while it is.

    Args:
        listening: where, and for how many.
        job: what is run; its spec is filled in.
        spec: what its nodes are told, as JSON holds it.
        shards: of the parameter server.
        on_message: see `JoinService`; what `note` understands is to be handed to it.
        emit: puts a record into the run's events.
    """

    def __init__(
        self,
        listening: Listening,
        job: Job,
        spec: Mapping[str, Any],
        shards: int,
        on_message: Callable[[dict[str, Any]], None],
        emit: Callable[[Event], None],
    ) -> None:
        self._listening = listening
        self._emit = emit
        self._job = job
        self._authority = None if listening.insecure else CertificateAuthority()
        self._token = new_token(listening.token)
        by_rank = listening.on_open is not None
        self.machine = name_of_rank(0, socket.gethostname()) if by_rank else socket.gethostname()
        self.roster = (RankMembers if by_rank else MachineMembers)(
            self.machine,
            machines=listening.machines,
            workers_per_machine=listening.workers_per_machine,
            facts=facts_of(job),
            shards=shards,
            servers_on=listening.servers_on,
        )
        files = [*_files_of(spec["strategy"]), *_files_of(spec["optimizer"])]
        hashes = {path.name: file_hash(path) for path in files}
        invitation = Invitation(json.dumps(spec), hashes, job.deadlines, listening.port_of)
        self.enrolment = JoinService(
            listening.address, self._authority, self.roster, invitation, on_message, self._token.encode()
        )

    def __enter__(self) -> MachineRendezvous:
        self.enrolment.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended = (
            "the run has finished"
            if error is None
            else f"the run has ended: {str(error) or type(error).__name__}"
        )
        self.enrolment.over(0 if error is None else exit_code(error), ended)
        self.enrolment.__exit__(kind, error, trace)

    @property
    def invitation(self) -> str:
        """The line that joins another machine."""
        words = [
            "gradstream",
            "join",
            str(self.enrolment.address),
            self._job_argument(),
            "--token",
            self._token,
        ]
        words += ["--insecure"] if self._authority is None else ["--fingerprint", self._authority.fingerprint]
        arguments = list(self._job.argv or ())[1:]
        return shlex.join([*words, "--", *arguments] if arguments else words)

    def wait(self, hear: Callable[[], None]) -> None:
        """Invites, and returns when all machines are in.

        Args:
            hear: waits for a moment, and handles what happened.

        Raises:
            DeadlineError: they did not all come in time.
        """
        if self._listening.on_open is not None:
            assert self._authority is not None
            self._listening.on_open(str(self.enrolment.address), self._authority.fingerprint)
        elif self._listening.on_invitation is not None:
            self._listening.on_invitation(self.invitation)
        else:
            sys.stderr.write(INVITE.format(self.invitation))
            sys.stderr.flush()
        begun = reminded = time.monotonic()
        self._emit(WaitingEvent(state=self.roster.state))
        while self.roster.missing:
            hear()
            now = time.monotonic()
            if now > begun + self._listening.wait_s:
                text = f"gave up after {self._listening.wait_s:g} s {self.roster.state}"
                raise DeadlineError(ENROLMENT, text)
            if now > reminded + REMIND_S:
                reminded = now
                self._emit(WaitingEvent(state=self.roster.state))
        self.roster.begun = True

    def note(self, message: Mapping[str, Any]) -> dict[str, dict[str, str]]:
        """Records what the enrolment service has said of a machine.

        Returns:
            Nodes that are lost by it, once training has begun, and the error of each.
        """
        if "insecure" in message:
            self._emit(InsecureEvent(address=message["insecure"]))
            return {}
        fields = {name: message[name] for name in ("state", "address", "nodes", "reason")}
        fields["reason"] = escaped(fields["reason"], REASON_BYTES)
        self._emit(MachineEvent(who=message["machine"], **fields))
        if message["state"] != "left" or not self.roster.begun:
            return {}
        text = f"machine {message['machine']} ({message['address']}) has left: {message['reason']}"
        lost = {"error": "PeerLostError", "message": text, "traceback": ""}
        return {str(node): lost for node in message["nodes"]}

    def is_here(self, name: str) -> bool:
        """Whether a node runs on this machine."""
        return name == COORDINATOR or name in self.roster.nodes_of(0)

    def place_of(self, name: str) -> str:
        """The machine of a node that runs on another one than this, in words; "" of all others."""
        seat = None if self.is_here(name) else self.roster.seat_of(name)
        return "" if seat is None else f"machine {seat.machine} ({seat.address})"

    def arguments(self, name: str) -> list[str]:
        """What a node of this machine is told about its network."""
        listen = ["--listen", str(self.enrolment.address.at(self._listening.port_of(name)))]
        secret = self._token.encode()
        if self._authority is None:
            return [*listen, "--insecure", "--credentials", str(Credentials(secret))]
        return [*listen, "--credentials", str(self._authority.credentials(name, secret))]

    def _job_argument(self) -> str:
        """The job, as somebody types it who stands beside the file."""
        spec = str(self._job.spec)
        return spec[spec.rfind("/") + 1 :]


def _files_of(described: Mapping[str, Any]) -> list[Path]:
    """The file of the user's in which a strategy or an update rule is defined, if it is in one."""
    file = str(described["class"]).rpartition(":")[0]
    return [Path(file)] if file.endswith(".py") else []
