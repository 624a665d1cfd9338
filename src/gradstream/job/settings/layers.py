"""Applies layers of settings to a job. Pure, except that it imports the named classes."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradstream.errors import ConfigError
from gradstream.job.job import RIVALS, Job
from gradstream.job.phase_jobs import AUTO
from gradstream.job.registry import STRATEGIES, class_of, find_codec, find_optimizer, find_strategy
from gradstream.job.settings.values import MisfitError, Word, fields_of, fit, record_in, shown
from gradstream.untrusted import DocumentError, parse_toml

FAMILIES = ("strategy", "optimizer", "codec")
NAME = ("", "name", "class")
"""`strategy = "downpour"` and `strategy.name = "downpour"` are the same."""

OF_THE_JOB = frozenset({"argv", "callbacks", "cwd", "model", "data", "spec", "origins", "strategy_options"})
"""Fields of a job that are not settings."""


def apply(job: Job, layers: Iterable[Sequence[Setting]]) -> Job:
    """The job with these settings; its `origins` hold the origin of each value.

    A layer that names a strategy or an optimizer starts from its defaults: options in weaker layers were meant for
    another strategy. A key that is no field of a job may be a field of the strategy.

    Args:
        job: as its file defines it.
        layers: from the weakest to the strongest. Within a layer, the last of equal keys counts; otherwise
            the order does not matter.

    Raises:
        ConfigError: an unknown key, with the nearest one, or a value of the wrong type; with its origin.
    """
    draft = _Draft(job)
    for layer in layers:
        draft.take(layer)
    return draft.finished()


class _Draft:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._hints = _hints_of_a_job()
        self._values: dict[str, Setting] = {}  # by field of the job
        self._parts: dict[
            str, dict[str, Setting]
        ] = {}  # by field of the job that is a record, and its own field
        self._cleared: set[str] = set()
        self._origins = dict(job.origins)

    def take(self, layer: Sequence[Setting]) -> None:
        if any(setting.key in RIVALS for setting in layer):
            self._cleared |= RIVALS
            for rival in RIVALS:
                self._values.pop(rival, None)
        for setting in sorted(layer, key=lambda setting: not _names(setting)):
            head, _, tail = setting.key.partition(".")
            if _names(setting):
                self._check_meant(head)
                self._values[head] = setting
                self._parts[head] = {}
                self._forget(head)
            elif head in self._hints and (tail or head in FAMILIES):
                self._parts.setdefault(head, {})[tail] = setting
            elif head in self._hints:
                self._values[head] = setting
            elif tail or head in OF_THE_JOB:
                raise self._unknown(setting)
            else:
                self._parts.setdefault("strategy", {})[head] = setting

    def _check_meant(self, head: str) -> None:
        """Raises ConfigError if an option that is dropped with its strategy belongs to no strategy: it is misspelt."""
        chosen = self._values.get(head)
        own = _fields(head, chosen.value if chosen else getattr(self._job, head))
        known = (
            {field for name in STRATEGIES for field in _fields(head, name)}
            if head == "strategy"
            else set(own)
        )
        for field, setting in self._parts.get(head, {}).items():
            if own and field not in known | set(own):
                raise self._unknown(setting)

    def finished(self) -> Job:
        fields: dict[str, Any] = dict.fromkeys(self._cleared)
        for key, setting in self._values.items():
            fields[key] = self._fit(setting, str if key in FAMILIES else self._hints[key])
            self._origins[key] = setting.origin
        for head in self._parts.keys() - set(FAMILIES):
            fields[head] = self._record(head, fields.get(head, getattr(self._job, head)))
        if "strategy" in fields:
            fields["strategy_options"] = {}
        job = dataclasses.replace(self._job, **fields)
        if options := self._options("strategy", job.strategy):
            job = dataclasses.replace(job, strategy_options={**job.strategy_options, **options})
        if self._parts.get("optimizer"):
            job = dataclasses.replace(job, optimizer=self._optimizer(job))
        if self._parts.get("codec") and job.codec is not None:
            codec = find_codec(job.codec, self._options("codec", job.codec))
            job = dataclasses.replace(job, codec=codec)
        return dataclasses.replace(job, origins=self._origins)

    def _optimizer(self, job: Job) -> Any:
        """The job's optimizer, or else the strategy's own, with the options that were set."""
        base: Any = job.optimizer
        if base is None:
            strategy = find_strategy(
                "allreduce" if job.strategy == AUTO else job.strategy, job.strategy_options
            )
            base = strategy.optimizer()
            self._origins["optimizer"] = f"default of {type(strategy).__name__}"
        return find_optimizer(base, self._options("optimizer", base))

    def _options(self, head: str, spec: Any) -> dict[str, Any]:
        """The options set for the strategy or optimizer, converted to the types of its fields."""
        settings = self._parts.get(head)
        if settings and head == "strategy" and spec == AUTO:
            raise self._unknown(next(iter(settings.values())))
        return self._fitted(head, settings, class_of(head, spec)) if settings else {}

    def _record(self, head: str, value: Any) -> Any:
        """The value of a field that is a record, with the settings of its own fields."""
        kind: Any = type(value) if dataclasses.is_dataclass(value) else record_in(self._hints[head])
        if kind is None:
            raise self._unknown(next(iter(self._parts[head].values())))
        fields = self._fitted(head, self._parts[head], kind)
        return dataclasses.replace(value, **fields) if isinstance(value, kind) else kind(**fields)

    def _fitted(
        self, head: str, settings: Mapping[str, Setting], made_by: Callable[..., Any]
    ) -> dict[str, Any]:
        hints = fields_of(made_by)
        fitted = {}
        for tail, setting in settings.items():
            if tail not in hints:
                raise self._unknown(setting)
            fitted[tail] = self._fit(setting, hints[tail])
            self._origins[f"{head}.{tail}"] = setting.origin
        return fitted

    def _fit(self, setting: Setting, hint: Any) -> Any:
        try:
            return fit(setting.value, hint)
        except MisfitError as error:
            raise ConfigError(
                f"{setting.key} = {shown(setting.value)} in {setting.origin}: expected {error.expected}"
            ) from None

    def _forget(self, head: str) -> None:
        for key in [key for key in self._origins if key.startswith(f"{head}.")]:
            del self._origins[key]

    def _unknown(self, setting: Setting) -> ConfigError:
        known = set(self._hints) - set(FAMILIES)
        for head in FAMILIES:
            chosen = self._values.get(head)
            spec = chosen.value if chosen else getattr(self._job, head)
            known |= {head, *(f"{head}.{field}" for field in _fields(head, spec))}
        for head, hint in self._hints.items():
            if kind := record_in(hint):
                known |= {f"{head}.{field}" for field in fields_of(kind)}
        head, _, field = setting.key.partition(".")
        owners = [name for name in STRATEGIES if head == "strategy" and field in _fields(head, name)]
        if owners:
            chosen = self._values.get(head)
            spec = chosen.value if chosen else self._job.strategy
            name = spec if isinstance(spec, str) else type(spec).__name__
            has = f"the strategy, {name}, has no {field!r}; it is an option of {', '.join(owners)}"
            return ConfigError(f"{setting.origin}: {has}")
        if head == "strategy" and setting.key not in known:
            known |= {f"strategy.{field}" for name in STRATEGIES for field in _fields("strategy", name)}
        near = _nearest(setting.key, known)
        if near:
            return ConfigError(f"unknown key `{setting.key}` (did you mean `{near}`?) in {setting.origin}")
        return ConfigError(
            f"unknown key `{setting.key}` in {setting.origin}; known: {', '.join(sorted(known))}"
        )


@functools.cache
def _hints_of_a_job() -> Mapping[str, Any]:
    """Annotations by setting. Cached: resolving them takes longer than applying all settings."""
    return {key: hint for key, hint in typing.get_type_hints(Job).items() if key not in OF_THE_JOB}


def _names(setting: Setting) -> bool:
    """Whether a setting names the strategy or the optimizer."""
    head, _, tail = setting.key.partition(".")
    return head in FAMILIES and tail in NAME


def _fields(head: str, spec: Any) -> list[str]:
    try:
        return [] if spec is None else list(fields_of(class_of(head, spec)))
    except ConfigError:
        return []  # the name is wrong as well


def _nearest(key: str, known: Iterable[str]) -> str | None:
    """The key that was probably meant: one that ends with `key`, or else one with a similar spelling."""
    ends = [name for name in sorted(known) if name.endswith(f".{key}")]
    near = ends or difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.6)
    return near[0] if near else None


# ---- sources -----------------------------------------------------------------------------
# Reads settings from a TOML file, the environment and the command line.

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
