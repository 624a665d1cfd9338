"""Who may talk to whom: TLS between the nodes of a run, and what each node's certificate allows.

Every run has a certificate authority of its own (`gradstream.remote.authority`); no other is
believed. A node's certificate carries its name, "worker-3", as common name and as DNS name, so

* who dials `shard-0` talks to the holder of the certificate of `shard-0`, at whatever address;
* who opens a stream as `worker-3` holds the certificate of `worker-3`;
* the part before the dash is its role, and `CALLERS` says which methods a role may call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from gradstream.wire import v1

__all__ = ["CALLERS", "Tls", "explain", "role_of"]

CALLERS: Mapping[str, frozenset[str]] = {
    "join": frozenset({"worker", "shard"}),
    "alive": frozenset({"worker", "shard"}),
    "orphans": frozenset({"worker"}),
    "ending": frozenset({"worker"}),
    "shares": frozenset({"worker"}),
    "quorum": frozenset({"shard"}),
    "push": frozenset({"worker"}),
    "fetch": frozenset({"worker"}),
    "command": frozenset({"worker"}),
    "tensor": frozenset({"worker"}),
    "exchange": frozenset({"worker"}),
    "broken": frozenset({"worker"}),
    "state": frozenset({"worker"}),
}
"""The roles that may call a method, besides the coordinator, who may call all of them.

A method that is not listed is the coordinator's alone: forgetting one fails closed.
"""


def role_of(name: str) -> str:
    """The part before the dash: "worker" of "worker-3"."""
    return name.partition("-")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """One node's side of TLS. All of it is PEM.

    Args:
        authority: certificate of the run's authority: what peers are checked against.
        certificate, key: this node's own; None for a node that only dials.
        mutual: callers have to show a certificate as well, and may do what their role may.
        callers: which roles may call which method.
    """

    authority: bytes
    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)
    mutual: bool = True
    callers: Mapping[str, frozenset[str]] = field(default_factory=lambda: CALLERS)

    @classmethod
    def read(cls, folder: Path, name: str) -> Tls:
        """What `save` has left for a node."""
        return cls(
            authority=(folder / "authority.pem").read_bytes(),
            certificate=(folder / f"{name}.pem").read_bytes(),
            key=(folder / f"{name}.key").read_bytes(),
        )

    def save(self, folder: Path, name: str) -> None:
        """Writes the files that `read` reads. The key is for this user's eyes only."""
        assert self.certificate is not None
        assert self.key is not None
        (folder / "authority.pem").write_bytes(self.authority)
        (folder / f"{name}.pem").write_bytes(self.certificate)
        path = folder / f"{name}.key"
        path.touch(mode=0o600)
        path.write_bytes(self.key)

    def server_credentials(self) -> grpc.ServerCredentials:
        """What an endpoint listens with."""
        assert self.certificate is not None
        assert self.key is not None
        pair = (self.key, self.certificate)
        if not self.mutual:
            return grpc.ssl_server_credentials([pair])
        return grpc.ssl_server_credentials([pair], root_certificates=self.authority, require_client_auth=True)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """What an endpoint dials with."""
        return grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)

    def objection(self, names: Iterable[bytes], opened: v1.Open) -> v1.Refuse | None:
        """Why a caller may not open this stream; None if it may.

        Args:
            names: common names of the certificate that the caller has shown.
            opened: what it asks for, and who it says it is.
        """
        if not self.mutual:
            return None
        shown = b", ".join(names).decode(errors="replace")
        if shown != opened.sender:
            text = f"a node with the certificate of {shown or 'nobody'} says that it is {opened.sender}"
            return v1.Refuse(code=v1.BAD_CERTIFICATE, message=text)
        role = role_of(shown)
        if role == "coordinator" or role in self.callers.get(opened.method, frozenset()):
            return None
        text = f"{shown} may not call {opened.method!r}: its certificate is that of a {role}"
        return v1.Refuse(code=v1.FORBIDDEN, message=text)


_SIGNS = (
    ("CERTIFICATE_VERIFY_FAILED", "its certificate was not signed by this run's authority"),
    ("BAD_SIGNATURE", "its certificate was not signed by this run's authority"),
    ("UNKNOWN_CA", "it does not know the authority that has signed this node's certificate"),
    ("CERTIFICATE_REQUIRED", "it asks for a certificate, and this node has shown none"),
    ("Hostname Verification", "its certificate is another node's"),
    ("WRONG_VERSION_NUMBER", "it speaks plain text, this node TLS"),
)


def explain(details: str) -> str:
    """What gRPC says of a connection that failed, with what that means where it is about certificates."""
    for sign, meaning in _SIGNS:
        if sign.lower() in details.lower():
            return f"{meaning}. {details}"
    return details
