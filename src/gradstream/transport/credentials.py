"""`Credentials`: what proves a node's identity: the run's secret, and under TLS its certificate and key.

A launcher hands them to its nodes in memory, so they appear neither in `ps` nor in a log, and a killed run
leaves none behind. Only where another program starts the workers (torchrun), a file that no other user can
read holds them until all workers have joined.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from gradstream.errors import ConfigError

FILE = ".credentials"
"""Name of the file in the run directory."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """The credentials of one node.

    Args:
        secret: secret of the run.
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
        path.unlink(missing_ok=True)  # left by a run that was killed, and is resumed
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(str(self))
        return path

    @classmethod
    def read(cls, run_dir: Path) -> Credentials:
        """Reads the file that `save` has written.

        Raises:
            ConfigError: there is no file, or another user could have written or read it.
        """
        path = run_dir / FILE
        try:
            # Without O_NONBLOCK, a pipe of another user could make this wait for ever.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                found = os.fstat(descriptor)
                mine = found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o077
                if not (mine and stat.S_ISREG(found.st_mode)):
                    raise ConfigError(f"{path}: expected a file of this user that nobody else can read")
                return cls.parse(os.read(descriptor, 1 << 16).decode(errors="replace"))
            finally:
                os.close(descriptor)
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; a run that has begun takes nobody in") from None
