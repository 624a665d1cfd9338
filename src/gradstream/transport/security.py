"""TLS between the nodes of a run, and the streams that each node's certificate allows.

Every run has its own certificate authority (`gradstream.run.remote.certificate_authority`); nodes trust no
other. A node's certificate carries its name, "worker-3", as common name and as DNS name, so

* a node that dials `shard-0` reaches the holder of the certificate of `shard-0`, at any address;
* a node that opens a stream as `worker-3` holds the certificate of `worker-3`;
* the part before the dash is the role, and `methods.METHODS` lists the methods that a role may call.

A node checks the certificate again for each stream: if it has expired since the connection was made, or
was revoked, the stream is refused.
"""

from __future__ import annotations

import datetime
import os
import ssl
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.x509.oid import NameOID

from gradstream.transport.proof import Credentials
from gradstream.wire import v1

_FORGET = 256  # number of parsed certificates to keep


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """The TLS settings of one node. Certificates and key are PEM.

    Args:
        authority: certificate of the run's own certificate authority. This node accepts only peers whose
            certificates this authority has signed.
        certificate, key: certificate and key of this node; None for a node that only opens connections, and
            proves its identity in another way.
        mutual: whether this node also demands a certificate from each peer that connects to it (mutual TLS).
            It then checks that the peer's certificate has the name that the peer claims.
    """

    authority: bytes
    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)
    mutual: bool = True

    @classmethod
    def of(cls, credentials: Credentials) -> Tls | None:
        """The TLS settings from a node's credentials; None for a run in plain text."""
        if credentials.authority is None:
            return None
        return cls(authority=credentials.authority, certificate=credentials.certificate, key=credentials.key)

    def server_credentials(self) -> grpc.ServerCredentials:
        """Credentials with which gRPC listens."""
        assert self.certificate is not None
        assert self.key is not None
        pair = (self.key, self.certificate)
        if not self.mutual:
            return grpc.ssl_server_credentials([pair])
        return grpc.ssl_server_credentials([pair], root_certificates=self.authority, require_client_auth=True)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials with which gRPC connects to a peer."""
        return grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)

    def context(self, *, calls: bool) -> ssl.SSLContext:
        """The same settings for `ssl`, for one side of mutual TLS.

        Args:
            calls: whether this side calls; it then checks the name in the certificate of the called side.
        """
        assert self.mutual
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if calls else ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers("ECDHE+AESGCM")  # of TLS 1.2
        context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION
        if not calls:
            context.num_tickets = 0  # no session is resumed: each connection shows its certificates
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self.authority.decode())
        if self.certificate is not None and self.key is not None:
            # `ssl` reads these from files alone; a pipe leaves nothing on a disk.
            with _piped(self.certificate) as certificate, _piped(self.key) as key:
                context.load_cert_chain(certificate, key)
        return context

    def objection(self, shown: Shown | None, sender: str, revoked: Container[bytes]) -> v1.Refuse | None:
        """The refusal of a caller that may not open a stream; None if it may.

        Args:
            shown: certificate of the caller; None if it has shown none.
            sender: name that the caller claims.
            revoked: SHA-256 digests of certificates that are no longer accepted.
        """
        if not self.mutual:
            return None
        name = "nobody" if shown is None else shown.name
        text = ""
        if shown is None or name != sender:
            text = f"a node with the certificate of {name} says that it is {sender}"
        elif shown.digest in revoked:
            text = f"the certificate of {name} was revoked: it was lost before, and cannot come back with it"
        elif datetime.datetime.now(datetime.UTC) > shown.expires:
            text = f"the certificate of {name} has expired at {shown.expires:%Y-%m-%d %H:%M} UTC"
        return v1.Refuse(code=v1.BAD_CERTIFICATE, message=text) if text else None


@dataclass(frozen=True, slots=True)
class Shown:
    """A certificate that a caller has shown, signed by the run's authority.

    Args:
        digest: SHA-256 of the certificate.
        expires: time after which it is no longer valid.
    """

    name: str
    digest: bytes
    expires: datetime.datetime

    @classmethod
    def read(cls, pem: bytes) -> Shown:
        """Parses a certificate. Raises ValueError for other bytes."""
        if pem not in _read:
            certificate = x509.load_pem_x509_certificate(pem)
            names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
            name = ", ".join(str(name.value) for name in names)
            if len(_read) >= _FORGET:
                _read.clear()
            _read[pem] = cls(name, certificate.fingerprint(hashes.SHA256()), certificate.not_valid_after_utc)
        return _read[pem]


_read: dict[bytes, Shown] = {}


@contextmanager
def _piped(pem: bytes) -> Iterator[str]:
    """A path from which the text can be read once. It is short enough for the buffer of a pipe."""
    reading, writing = os.pipe()
    try:
        with open(writing, "wb") as pipe:
            pipe.write(pem)
        yield f"/dev/fd/{reading}"
    finally:
        os.close(reading)


_SIGNS = (
    (
        "certificate has expired",
        "its certificate has expired by the clock of this machine, which shows {now}",
    ),
    ("not yet valid", "its certificate is not valid yet by the clock of this machine, which shows {now}"),
    ("Hostname mismatch", "its certificate is another node's"),
    ("CERTIFICATE_VERIFY_FAILED", "its certificate was not signed by this run's authority"),
    ("BAD_SIGNATURE", "its certificate was not signed by this run's authority"),
    ("UNKNOWN_CA", "it does not know the authority that has signed this node's certificate"),
    ("CERTIFICATE_REQUIRED", "it asks for a certificate, and this node has shown none"),
    ("Hostname Verification", "its certificate is another node's"),
    ("WRONG_VERSION_NUMBER", "it speaks plain text, this node TLS"),
)


def explain(details: str) -> str:
    """The message of gRPC or OpenSSL about a failed connection, with an explanation if certificates are the cause."""
    for sign, meaning in _SIGNS:
        if sign.lower() in details.lower():
            now = datetime.datetime.now(datetime.UTC)
            clock = "; set the clocks of both machines (`timedatectl`), and begin the run anew" * (
                "{now}" in meaning
            )
            return f"{meaning.format(now=f'{now:%Y-%m-%d %H:%M} UTC')}{clock}. {details}"
    return details


def is_refused(details: str) -> bool:
    """Whether a message of gRPC says that no process listens at the address: there is no code for that."""
    return "connection refused" in details.lower()
