"""Keys and certificates: what a certificate authority makes them of. Imports nothing of the network."""

from __future__ import annotations

import datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LIFE = datetime.timedelta(days=30)
SKEW = datetime.timedelta(hours=1)  # clocks of machines differ


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


def self_signed(name: str) -> tuple[bytes, bytes]:
    """Certificate and key, PEM, of a server that vouches for itself: whoever gets the certificate trusts it alone."""
    key = ec.generate_private_key(ec.SECP256R1())
    who = common_name(name)
    made = certificate_builder(who, who, key.public_key(), [name], is_authority=True)
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM), pem


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
    """A certificate that is to be signed.

    Args:
        subject: whose it is.
        issuer: who signs it.
        key: the public key of the subject.
        names: names of nodes that it vouches for.
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
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), False)
    )
