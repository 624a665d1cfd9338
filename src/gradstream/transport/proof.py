"""Proof of the run's secret: both sides of a connection prove that they know it, and neither sends it.

    called side                                 caller
    Challenge(nonce) ─────────────────────────▶
                      ◀───────────────────────── Greeting(nonce, who, proof)
    Proven(proof) ────────────────────────────▶ streams

A proof is HMAC-SHA-256, keyed with the secret, over both nonces and all fields of the greeting, with the job
and the name of the called node, which are not sent. So a proof is valid for one connection to one node, and
a recording of a connection opens no other. The proofs of the two sides differ by a word, so that neither
can be reflected.

A proof does not encrypt: an attacker that can alter packets can take over a connection in plain text.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import stat
import struct
from dataclasses import dataclass, field
from pathlib import Path

from gradstream.errors import ConfigError, RefusedError
from gradstream.transport.base import Identity
from gradstream.wire import v1
from gradstream.wire.frames import PROTOCOL

# ---- proof -------------------------------------------------------------------------------

BAD_SECRET = "the caller has not proved that it knows the secret of this run"
"""The only answer to a caller without the secret."""

NONCE_BYTES = 32
MIN_SECRET_BYTES = 16

_LENGTH = struct.Struct("<I")


def new_secret() -> bytes:
    """A secret for a run: 128 random bits, as hexadecimal digits."""
    return secrets.token_hex(16).encode()


def new_nonce() -> bytes:
    """Random bytes that are used once."""
    return secrets.token_bytes(NONCE_BYTES)


def check_secret(secret: bytes, who: str) -> None:
    """Raises ConfigError if a node's secret is too short."""
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"{who} has a secret of {len(secret)} bytes: expected at least {MIN_SECRET_BYTES}, the same for "
            "all nodes of the run; Identity(..., secret=gradstream.transport.proof.new_secret()) makes one"
        )


def greet(secret: bytes, challenge: v1.Challenge, greeting: v1.Greeting, *, job: str, called: str) -> None:
    """The caller's side: adds nonces and proof to a greeting.

    Args:
        challenge: challenge of the called side.
        greeting: the greeting, complete except for nonces and proof; changed in place.
        called: name of the node that sent the challenge.
    """
    greeting.protocol = PROTOCOL
    greeting.challenge = challenge.nonce
    greeting.nonce = new_nonce()
    greeting.proof = _proof(secret, b"caller", greeting, job, called)


def answer_challenge(identity: Identity, called: str, challenge: v1.Challenge, greeting: v1.Greeting) -> None:
    """The caller's side: checks the protocol of the called node, and then does as `greet`.

    The connection has checksums if either side wants them. The proof covers what the greeting says about them, so
    nobody
    in between can switch them off: `objection` refuses a caller that does not know what the called side wants.

    Raises:
        RefusedError: the called node speaks another protocol.
    """
    if challenge.protocol != PROTOCOL:
        text = f"it speaks protocol {challenge.protocol}, {identity.name} {PROTOCOL}: install one version"
        raise RefusedError(called, "BAD_PROTOCOL", text)
    greeting.checked = greeting.checked or challenge.checked
    greet(identity.secret, challenge, greeting, job=identity.job, called=called)


def check_called(identity: Identity, called: str, greeting: v1.Greeting, proven: v1.Proven) -> None:
    """The caller's side: raises RefusedError unless the called node has proved knowledge of the secret."""
    expected = called_proof(identity.secret, greeting, job=identity.job, called=called)
    if not hmac.compare_digest(proven.proof, expected):
        text = "the program that listens at its address does not know this run's secret"
        raise RefusedError(called, "BAD_SECRET", text)


def objection(
    identity: Identity, challenge: bytes, greeting: v1.Greeting, *, checked: bool = False
) -> v1.Refuse | None:
    """The called side: why a greeting is refused, without details; None if the caller knows the secret.

    Args:
        challenge: nonce of the challenge.
        greeting: the caller's greeting.
        checked: whether this side wants checksums.
    """
    if greeting.protocol != PROTOCOL:
        text = f"the caller speaks protocol {greeting.protocol}, expected {PROTOCOL}: install one version"
        return v1.Refuse(code=v1.BAD_PROTOCOL, message=text)
    if not knows(identity.secret, challenge, greeting, job=identity.job, called=identity.name):
        return v1.Refuse(code=v1.BAD_SECRET, message=BAD_SECRET)
    if checked and not greeting.checked:
        text = "the caller has not heard that this connection needs checksums: try again"
        return v1.Refuse(code=v1.TOO_OLD, message=text)
    return None


def knows(secret: bytes, challenge: bytes, greeting: v1.Greeting, *, job: str, called: str) -> bool:
    """The called side: whether the caller knows the secret, and answers this job, node and challenge."""
    shown, expected = greeting.proof, _proof(secret, b"caller", greeting, job, called)
    fresh = hmac.compare_digest(greeting.challenge, challenge) and len(greeting.nonce) == NONCE_BYTES
    return hmac.compare_digest(shown, expected) and fresh


def called_proof(secret: bytes, greeting: v1.Greeting, *, job: str, called: str) -> bytes:
    """The proof of the called side, which the caller compares."""
    return _proof(secret, b"called", greeting, job, called)


def session_key(secret: bytes, greeting: v1.Greeting, *, job: str, called: str) -> bytes:
    """The key of a session, which only the two sides can compute."""
    return _proof(secret, b"session", greeting, job, called)


def _proof(secret: bytes, side: bytes, greeting: v1.Greeting, job: str, called: str) -> bytes:
    said = (
        side,
        job.encode(),
        called.encode(),
        greeting.challenge,
        greeting.nonce,
        greeting.sender.encode(),
        greeting.line.encode(),
        struct.pack(
            "<IQQII?",
            greeting.protocol,
            greeting.incarnation,
            greeting.link,
            greeting.index,
            greeting.count,
            greeting.checked,
        ),
    )
    # Each field follows its length, so different greetings give different bytes.
    return hmac.digest(secret, b"".join(_LENGTH.pack(len(field)) + field for field in said), "sha256")


# ---- credentials -------------------------------------------------------------------------
# `Credentials`: what proves a node's identity: the run's secret and, under TLS, its certificate and key.
#
# A launcher passes them to its nodes in memory, so they appear neither in `ps` nor in a log, and a killed run leaves
# none behind. Only if another program starts the workers (torchrun), a file that no other user can read holds them
# until all workers have joined.

FILE = ".credentials"
"""Name of the file in the run directory."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """The credentials of one node.

    Args:
        authority, certificate, key: PEM; None for a run in plain text.
    """

    secret: bytes = field(repr=False)
    authority: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)

    @property
    def is_protected(self) -> bool:
        """Whether connections are encrypted."""
        return self.authority is not None

    def __str__(self) -> str:
        """Text that `parse` reads. Not for logs."""
        pem = {"authority": self.authority, "certificate": self.certificate, "key": self.key}
        said = {name: text.decode() for name, text in pem.items() if text is not None}
        return json.dumps({"secret": self.secret.hex(), **said})

    @classmethod
    def parse(cls, text: str) -> Credentials:
        """Reads the text of `str`. Raises ConfigError for other text, without showing it."""
        try:
            said = {str(name): str(value) for name, value in json.loads(text).items()}
            secret = bytes.fromhex(said.pop("secret"))
            return cls(secret, **{name: value.encode() for name, value in said.items()})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise ConfigError("--credentials: expected what the launcher has handed out, as JSON") from None

    def save(self, run_dir: Path) -> Path:
        """Writes them to a file for processes of this user that the launcher does not start."""
        path = run_dir / FILE
        path.unlink(missing_ok=True)  # left by a killed run that is being resumed
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(str(self))
        return path

    @classmethod
    def read(cls, run_dir: Path) -> Credentials:
        """Reads the file that `save` wrote.

        Raises:
            ConfigError: there is no file, or another user could have written or read it.
        """
        path = run_dir / FILE
        try:
            # Without O_NONBLOCK, another user's pipe could make this wait forever.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                status = os.fstat(descriptor)
                mine = status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o077
                if not (mine and stat.S_ISREG(status.st_mode)):
                    raise ConfigError(f"{path}: expected a file of this user that nobody else can read")
                return cls.parse(os.read(descriptor, 1 << 16).decode(errors="replace"))
            finally:
                os.close(descriptor)
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; a run that has begun takes nobody in") from None
