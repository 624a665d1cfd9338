"""The certificate authority of one run; the launcher makes it and keeps it in memory only.

Its certificate is also what the join service shows. So one fingerprint, in the line that joins
a machine, vouches for the service, and through it for every node of the run.
"""

from __future__ import annotations

import datetime
import hashlib
import ssl

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from gradstream.errors import RefusedError
from gradstream.transport.credentials import Credentials
from gradstream.transport.security import Tls

LAUNCHER = "launcher"
"""The name in the authority's own certificate."""

LIFE = datetime.timedelta(days=30)
SKEW = datetime.timedelta(hours=1)  # clocks of machines differ


def fingerprint_of(certificate: bytes) -> str:
    """SHA-256 of a certificate in PEM, as "sha256:…" in hexadecimal."""
    der = ssl.PEM_cert_to_DER_cert(certificate.decode())
    return f"sha256:{hashlib.sha256(der).hexdigest()}"


class Key:
    """A key pair that a machine makes for its own nodes. The private half does not leave it."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())

    @property
    def pem(self) -> bytes:
        """The private key."""
        return self._key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )

    def request(self) -> bytes:
        """A certificate signing request: proof of having the key. The names are the authority's to give."""
        request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
        return request.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


class CertificateAuthority:
    """Signs the certificates of one run.

    Attributes:
        certificate: its own, PEM.
        fingerprint: of that, "sha256:…".
    """

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(LAUNCHER)
        public = self._key.public_key()
        made = _builder(self._name, self._name, public, [LAUNCHER], is_authority=True)
        self.certificate = made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        self.fingerprint = fingerprint_of(self.certificate)

    @property
    def join_service_tls(self) -> Tls:
        """The join service's side of TLS. Callers need no certificate: they come to get one."""
        key = self._key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return Tls(authority=self.certificate, certificate=self.certificate, key=key, mutual=False)

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
        """The certificate, PEM, of the node `name` with the key of a signing request.

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
        made = _builder(_name(name), self._name, public, [name], is_authority=False)
        return made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    names: list[str],
    *,
    is_authority: bool,
) -> x509.CertificateBuilder:
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
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), False)
    )
