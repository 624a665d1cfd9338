"""Reads settings from a TOML file, the environment and the command line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradstream.errors import ConfigError
from gradstream.job.settings.values import Word
from gradstream.untrusted import DocumentError, parse_toml

PREFIX = "GRADSTREAM_"

PLACE = {
    "GRADSTREAM_HOST",
    "GRADSTREAM_LEAST",
    "GRADSTREAM_NODE",
    "GRADSTREAM_NODES",
    "GRADSTREAM_PORT",
    "GRADSTREAM_RUN",
}  # see `run.place`
OTHER_VARIABLES = frozenset({"GRADSTREAM_DATA", "GRADSTREAM_TOKEN", "GRADSTREAM_TOKEN_FILE", *PLACE})
"""Variables of gradstream that are not settings of a job."""

_OF_SERVICE = re.compile(
    r"\w+_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)=.*|\w+_PORT=\w+://.*"
)
"""Kubernetes documentation, "Discovering services: environment variables"."""

_NAME = re.compile(r"[\w.\-\s\"']+")


@dataclass(frozen=True, slots=True)
class Setting:
    """One value that was set.

    Args:
        key: "workers", or "strategy.push_every".
        value: in the form of TOML, or a `Word` as it was typed.
        origin: where it was set: "gradstream.toml:3", "--workers".
    """

    key: str
    value: Any
    origin: str


def from_toml(path: Path) -> list[Setting]:
    """The settings of a TOML file: keys at the top, and tables such as [strategy].

    Raises:
        ConfigError: the file cannot be read, or is not TOML; the message has the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # not UTF-8
        raise ConfigError(f"{path}: not a TOML file: {error}") from error
    return from_toml_text(text, path)


def from_toml_text(text: str, path: Path) -> list[Setting]:
    """The settings in the text of a TOML file; `path` is for messages. Raises ConfigError."""
    try:
        tree = parse_toml(text)
    except DocumentError as error:
        raise ConfigError(f"{path}: not a TOML file: {error}") from error
    lines = _lines(text)
    settings = []
    for head, value in tree.items():
        inside = {f"{head}.{key}": entry for key, entry in value.items()} if isinstance(value, dict) else {}
        for key, entry in inside.items() or {head: value}.items():
            line = lines.get(key) or lines.get(head)
            settings.append(Setting(key, entry, f"{path.name}:{line}" if line else path.name))
    return settings


def from_environment(environment: Mapping[str, str]) -> list[Setting]:
    """GRADSTREAM_WORKERS=4 is `workers`, GRADSTREAM_STRATEGY__PUSH_EVERY=10 `strategy.push_every`.

    Variables that Kubernetes sets for a service whose name begins with "gradstream" do not count.
    """
    return [
        Setting(name.removeprefix(PREFIX).lower().replace("__", "."), Word(value), name)
        for name, value in sorted(environment.items())
        if name.startswith(PREFIX)
        and name not in OTHER_VARIABLES
        and not _OF_SERVICE.fullmatch(f"{name}={value}")
    ]


def from_texts(texts: Iterable[str], origin: str = "--set") -> list[Setting]:
    """The settings of words like "strategy.push_every=10".

    Raises:
        ConfigError: a word without "=".
    """
    settings = []
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"{origin} {text}: expected key=value, such as strategy.push_every=10")
        settings.append(Setting(key.strip(), Word(value.strip()), f"{origin} {key.strip()}"))
    return settings


def _lines(text: str) -> dict[str, int]:
    """The line of each key, by its dotted name, for messages; tomllib does not report lines."""
    lines: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        key, equals, _ = line.partition("=")
        if line.startswith("["):
            table = _plain(line.partition("#")[0].strip().strip("[]"))
            lines.setdefault(table, number)
            table += "."
        elif equals and _NAME.fullmatch(key):
            lines.setdefault(table + _plain(key), number)
    return lines


def _plain(key: str) -> str:
    return re.sub(r"[\s\"']", "", key)
