"""The launcher's side of a run on several machines: what `train` knows about the others."""

from __future__ import annotations

import shlex
import socket
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from gradstream.config import Job
from gradstream.errors import exit_code
from gradstream.remote.address import new_token
from gradstream.remote.authority import Authority
from gradstream.remote.enrolment import Enrolment, Invitation
from gradstream.remote.facts import facts_of, file_hash
from gradstream.remote.listening import Listening
from gradstream.remote.roster import Roster

__all__ = ["Gathering", "files_of"]


class Gathering:
    """The other machines of one run. A context manager: enrolment is open while it is.

    Args:
        listening: where, and for how many.
        job: what is run; its spec is filled in.
        spec: of its nodes, JSON.
        files: that the nodes read besides the job file.
        on_message: see `Enrolment`.
    """

    def __init__(
        self,
        listening: Listening,
        job: Job,
        spec: str,
        files: list[Path],
        on_message: Callable[[dict[str, Any]], None],
    ) -> None:
        self._listening = listening
        self._job = job
        self._authority = None if listening.insecure else Authority()
        self._token = new_token(listening.token)
        self.machine = socket.gethostname()
        self.roster = Roster(
            self.machine,
            machines=listening.machines,
            workers_per_machine=listening.workers_per_machine,
            facts=facts_of(job),
            token=self._token,
        )
        invitation = Invitation(spec, {path.name: file_hash(path) for path in files})
        self.enrolment = Enrolment(listening.address, self._authority, self.roster, invitation, on_message)
        self._folder = tempfile.TemporaryDirectory(prefix="gradstream-")

    def __enter__(self) -> Gathering:
        try:
            self.enrolment.__enter__()
        except BaseException:
            self._folder.cleanup()
            raise
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
        try:
            self.enrolment.__exit__(kind, error, trace)
        finally:
            self._folder.cleanup()

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
        return shlex.join(words)

    def is_here(self, name: str) -> bool:
        """Whether a node runs on this machine."""
        return not name.startswith("worker") or name in self.roster.workers_of(0)

    def arguments(self, name: str) -> list[str]:
        """What a node of this machine is told about its network."""
        listen = ["--listen", str(self.enrolment.address.at(self._port(name)))]
        if self._authority is None:
            return [*listen, "--insecure"]
        self._authority.issue(name).save(Path(self._folder.name), name)
        return [*listen, "--security", self._folder.name]

    def _port(self, name: str) -> int:
        first = self._listening.address.port
        role, _, rank = name.partition("-")
        if not first or role == "worker":
            return 0
        return first + 1 if role == "coordinator" else first + 2 + int(rank)

    def _job_argument(self) -> str:
        """The job, as somebody types it who stands beside the file."""
        spec = str(self._job.spec)
        return spec[spec.rfind("/") + 1 :]


def files_of(described: Mapping[str, Any]) -> list[Path]:
    """The file of the user's in which a strategy or an update rule is defined, if it is in one."""
    file = str(described["class"]).rpartition(":")[0]
    return [Path(file)] if file.endswith(".py") else []
