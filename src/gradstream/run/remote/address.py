"""Parses and checks addresses host:port, and reads tokens."""

from __future__ import annotations

import ipaddress
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradstream.errors import ConfigError
from gradstream.transport.offers import is_loopback

# ---- address -----------------------------------------------------------------------------

MIN_TOKEN_CHARS = 16
TOKEN, TOKEN_FILE = "GRADSTREAM_TOKEN", "GRADSTREAM_TOKEN_FILE"  # names


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a port. `str` of it is host:port.

    Args:
        host: name or IP address; IPv6 without brackets.
        port: the port; 0 if unset.
    """

    host: str
    port: int = 0

    @classmethod
    def parse(cls, text: str, what: str) -> Address:
        """Reads "10.0.0.1:4000", "node-a", "[fd00::1]:4000".

        Args:
            text: the address.
            what: name of the option or argument, for the message.

        Raises:
            ConfigError: the text is not an address.
        """
        host, port = text, ""
        if text.startswith("["):
            host, _, rest = text[1:].partition("]")
            colon, port = rest[:1], rest[1:]
            fits = colon == ":" if rest else True
        else:
            if text.count(":") == 1:
                host, _, port = text.partition(":")
            fits = ":" not in text or bool(port)
        if (
            not host
            or not fits
            or (port and not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535))
        ):
            raise ConfigError(f"{what} {text[:80]!r}: expected host:port, 10.0.0.1:4000 for example")
        return cls(host, int(port or 0))

    def at(self, port: int) -> Address:
        """The same host at another port."""
        return Address(self.host, port)

    def check_listen(self) -> None:
        """Raises ConfigError for an address at which no other machine reaches this one.

        That is a wildcard address, or a name that leads to loopback; loopback itself, by name or number, is allowed,
        for "machines" that are processes of this one.
        """
        try:
            wildcard = ipaddress.ip_address(self.host).is_unspecified
        except ValueError:
            wildcard = False
        if wildcard:
            raise ConfigError(
                f"--listen {self.host}: name the one address of this machine at which the others reach it, "
                "as `ip address` shows it: nodes listen there and nowhere else"
            )
        asked = "localhost" in self.host or is_loopback(self.host)
        if not asked and is_loopback(own := _resolved(self.host)):
            raise ConfigError(
                f"--listen {self.host}: the name leads to {own} here (see /etc/hosts), which is loopback: there "
                "another "
                "machine reaches itself. Expected the address of this machine in your network, as `ip address` shows "
                f"it: --listen 10.0.0.1, for example; for processes of this machine alone, --listen {own}"
            )

    def check_free(self) -> None:
        """Raises ConfigError if this machine does not have the address, or the port is in use."""
        try:
            family, kind, proto, _, place = socket.getaddrinfo(
                self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            with socket.socket(family, kind, proto) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
                probe.bind(place)
                probe.listen(1)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"--listen: cannot listen on {self} ({why}): name an address of this machine, as "
                "`ip address` shows it, and a port that no other program uses"
            ) from None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def _resolved(host: str) -> str:
    """The address at which this machine would listen; "" if there is none, which `check_free` reports."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][4][0])
    except (OSError, UnicodeError):
        return ""


def local_address(peer: Address) -> str:
    """The address of this machine from which it reaches a peer. Sends nothing."""
    family, _, _, _, target = socket.getaddrinfo(peer.host, peer.port or 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def token_of_environment(environment: Mapping[str, str]) -> str | None:
    """The token in GRADSTREAM_TOKEN, or in the file that GRADSTREAM_TOKEN_FILE names.

    Raises:
        ConfigError: the file cannot be read.
    """
    if environment.get(TOKEN) or not environment.get(TOKEN_FILE):
        return environment.get(TOKEN) or None
    return token_in(Path(environment[TOKEN_FILE]), TOKEN_FILE)


def token_in(file: Path, what: str) -> str:
    """Reads the token in a file. If the file cannot be read, raises ConfigError, which names `what`."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"{what} {file}: {error.strerror}") from None


def new_token(token: str | None = None) -> str:
    """The token of a run: this one, or 128 random bits.

    Raises:
        ConfigError: the token is so short that it could be guessed.
    """
    if token is None:
        return secrets.token_hex(16)
    if len(token) < MIN_TOKEN_CHARS:
        raise ConfigError(
            f"the token has {len(token)} characters, expected at least {MIN_TOKEN_CHARS}; it comes from --token, "
            f"--token-file, {TOKEN} or {TOKEN_FILE}: to join a run, copy the launcher's token whole"
        )
    return token


# ---- places ------------------------------------------------------------------------------
# Places "file.py:name" in the description of a run: each machine has its own copy of the user's files, elsewhere.
#
# The files are those that define strategies, update rules, codecs, schedules and metrics, of the job and of its
# phases.


def moved(spec: Mapping[str, Any], place: Callable[[Path], Path]) -> dict[str, Any]:
    """The description of a run, or a part of it, with other paths of the user's files.

    Args:
        spec: a `NodeSpec` as JSON.
        place: the new path of a file.
    """
    return {key: _moved(key, value, place) for key, value in spec.items()}


def _moved(key: str, value: Any, place: Callable[[Path], Path]) -> Any:
    if isinstance(value, Mapping):
        if key == "metrics":
            return {name: _moved("function", metric, place) for name, metric in value.items()}
        return moved(value, place)
    if isinstance(value, list | tuple):
        return [_moved("", entry, place) for entry in value]
    if key not in ("class", "function") or not isinstance(value, str):
        return value
    file, _, name = value.rpartition(":")
    return f"{place(Path(file))}:{name}" if file.endswith(".py") else value


def files_of(spec: Mapping[str, Any]) -> list[Path]:
    """The user's files that the description of a run names, without `job` and `script`."""
    files: dict[Path, None] = {}

    def note(file: Path) -> Path:
        files[file] = None
        return file

    moved(spec, note)
    return list(files)
