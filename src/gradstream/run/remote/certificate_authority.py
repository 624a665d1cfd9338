"""The certificate authority of one run; the launcher makes it and keeps it in memory only.

The join service shows its certificate, too. So one fingerprint, in the command that joins a machine,
vouches for the service, and through it for every node of the run.
"""

from __future__ import annotations

import datetime
import hashlib
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from gradstream.errors import RefusedError
from gradstream.run.remote.members import Seat
from gradstream.runtime.deadlines import Deadlines
from gradstream.transport.proof import Credentials
from gradstream.transport.security import Tls
from gradstream.wire import v1

# ---- certificates ------------------------------------------------------------------------
# Keys and certificates, from which a certificate authority is made. Imports nothing of the network.

LIFE = datetime.timedelta(days=30)
SKEW = datetime.timedelta(hours=1)  # the clocks of machines differ


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


class Key:
    """A key pair that a machine makes for its own nodes. The private half does not leave it."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())

    @property
    def pem(self) -> bytes:
        """The private key."""
        return _pem(self._key)

    def request(self) -> bytes:
        """A certificate signing request: proof of having the key. The authority chooses the names."""
        request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
        return request.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def self_signed(name: str) -> tuple[bytes, bytes]:
    """Certificate and key, PEM, of a server that vouches for itself: whoever has the certificate trusts it alone."""
    key = ec.generate_private_key(ec.SECP256R1())
    who = common_name(name)
    made = certificate_builder(who, who, key.public_key(), [name], is_authority=True)
    return made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM), _pem(key)


def common_name(common: str) -> x509.Name:
    """The subject of a certificate."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def certificate_builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    names: list[str],
    *,
    is_authority: bool,
) -> x509.CertificateBuilder:
    """A certificate that is yet to be signed.

    Args:
        subject: who owns it.
        issuer: who signs it.
        key: the public key of the subject.
        names: names of the nodes that it vouches for.
        is_authority: whether the subject may sign others.
    """
    now = datetime.datetime.now(datetime.UTC)
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + LIFE)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), True)
        .add_extension(usage, True)
        .add_extension(x509.ExtendedKeyUsage(purposes), False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), False)
    )


# ---- certificate authority ---------------------------------------------------------------

LAUNCHER = "launcher"
"""The name in the authority's own certificate."""

JOB = "enrolment"
"""The job id under which machines call this service: they do not know the run's yet."""


def fingerprint_of(certificate: bytes) -> str:
    """SHA-256 of a certificate in PEM, as "sha256:…" in hexadecimal."""
    der = ssl.PEM_cert_to_DER_cert(certificate.decode())
    return f"sha256:{hashlib.sha256(der).hexdigest()}"


class CertificateAuthority:
    """Signs the certificates of one run.

    Attributes:
        certificate: its own, PEM.
        fingerprint: of that certificate, "sha256:…".
    """

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = common_name(LAUNCHER)
        public = self._key.public_key()
        made = certificate_builder(self._name, self._name, public, [LAUNCHER], is_authority=True)
        self.certificate = made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        self.fingerprint = fingerprint_of(self.certificate)

    @property
    def join_service_tls(self) -> Tls:
        """The join service's side of TLS. Callers need no certificate: they come to get one."""
        own = self.certificate
        return Tls(authority=own, certificate=own, key=_pem(self._key), mutual=False)

    def issue(self, name: str) -> Tls:
        """A key and a certificate for a node of the launcher's own machine."""
        key = Key()
        certificate = self.sign(name, key.request())
        return Tls(authority=self.certificate, certificate=certificate, key=key.pem)

    def credentials(self, name: str, secret: bytes) -> Credentials:
        """The credentials of a node of the launcher's own machine."""
        tls = self.issue(name)
        return Credentials(secret, tls.authority, tls.certificate, tls.key)

    def sign(self, name: str, request: bytes) -> bytes:
        """The certificate, PEM, of the node `name` for the key of a signing request.

        Raises:
            RefusedError: the request cannot be read, or is not signed with its own key.
        """
        try:
            asked = x509.load_pem_x509_csr(request)
            if not asked.is_signature_valid:
                raise ValueError("its signature is wrong")
            public = asked.public_key()
            if not isinstance(public, ec.EllipticCurvePublicKey):
                raise ValueError("its key is not on an elliptic curve")
        except (ValueError, InvalidSignature) as error:
            message = f"no certificate can be made of the signing request: {error}"
            raise RefusedError(LAUNCHER, "BAD_REQUEST", message) from None
        made = certificate_builder(common_name(name), self._name, public, [name], is_authority=False)
        # Else OpenSSL takes a certificate for a node with the authority's name, the launcher, for a self-signed one.
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        made = made.add_extension(signer, False)
        return made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


# ---- invitation --------------------------------------------------------------------------
# What a run sends to the machines that join it, and the certificates that it gives to their nodes.


@dataclass(frozen=True, slots=True)
class Invitation:
    """The description of a run for the machines that join it.

    Args:
        spec: description of the plan for the nodes, JSON.
        files: SHA-256 of the user's other files that nodes read, by name.
        port_of: returns the port at which a node listens, by the node's name; 0 takes a free one.
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
        """A node with a certificate that no other process has had: a lost process's certificate is revoked."""
        certificate = authority.sign(name, request) if authority else b""
        return v1.Certified(name=name, certificate=certificate, port=self.port_of(name))

    def age_ns(self, now_ns: int) -> int:
        """Time since training began; 0 before it has."""
        zero_ns = self.zero_ns()
        return 0 if zero_ns is None else max(1, now_ns - zero_ns)
