"""The certificate authority of one run; the launcher makes it and keeps it in memory only.

Its certificate is also what the join service shows. So one fingerprint, in the line that joins
a machine, vouches for the service, and through it for every node of the run.
"""

from __future__ import annotations

import hashlib
import ssl

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from gradstream.errors import RefusedError
from gradstream.run.remote.certificates import Key, certificate_builder, common_name
from gradstream.transport.credentials import Credentials
from gradstream.transport.security import Tls

LAUNCHER = "launcher"
"""The name in the authority's own certificate."""


def fingerprint_of(certificate: bytes) -> str:
    """SHA-256 of a certificate in PEM, as "sha256:…" in hexadecimal."""
    der = ssl.PEM_cert_to_DER_cert(certificate.decode())
    return f"sha256:{hashlib.sha256(der).hexdigest()}"


class CertificateAuthority:
    """Signs the certificates of one run.

    Attributes:
        certificate: its own, PEM.
        fingerprint: of that, "sha256:…".
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
        made = certificate_builder(common_name(name), self._name, public, [name], is_authority=False)
        return made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
