"""What a run tells the machines that join it, and the certificates that it gives to their nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gradstream.run.remote.certificate_authority import CertificateAuthority
from gradstream.run.remote.members import Seat
from gradstream.runtime.deadlines import Deadlines
from gradstream.wire import v1


@dataclass(frozen=True, slots=True)
class Invitation:
    """The description of a run for the machines that join it.

    Args:
        spec: description of the plan for the nodes, JSON.
        files: SHA-256 of the user's other files that nodes read, by name.
        deadlines: deadlines of the run.
        port_of: the port at which a node listens, by the node's name; 0 takes a free one.
        zero_ns: see `RunClock`, on this machine; None before training.
    """

    spec: str
    files: Mapping[str, str]
    deadlines: Deadlines = field(default_factory=Deadlines)
    port_of: Callable[[str], int] = lambda _: 0
    zero_ns: Callable[[], int | None] = lambda: None

    def grant(
        self, seat: Seat, request: bytes, authority: CertificateAuthority | None, waiting: str
    ) -> v1.Grant:
        """Admits a machine.

        Args:
            seat: its place in the run.
            request: its certificate signing request.
            authority: signs certificates; None for a run in plain text.
            waiting: what the run waits for, in words.
        """
        return v1.Grant(
            spec=self.spec,
            files=self.files,
            machine=seat.machine,
            waiting=waiting,
            nodes=[self.certified(name, request, authority) for name in seat.nodes],
        )

    def certified(self, name: str, request: bytes, authority: CertificateAuthority | None) -> v1.Certified:
        """A node with a certificate that no other process has had: that of a lost one is revoked."""
        certificate = authority.sign(name, request) if authority else b""
        return v1.Certified(name=name, certificate=certificate, port=self.port_of(name))

    def age_ns(self, now_ns: int) -> int:
        """Time since training began; 0 before it has."""
        zero_ns = self.zero_ns()
        return 0 if zero_ns is None else max(1, now_ns - zero_ns)
