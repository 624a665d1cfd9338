"""The files that the launcher writes into a run directory: configuration, description of the nodes, origin."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradstream.errors import ConfigError
from gradstream.job.code import keep, users_code
from gradstream.job.descriptions import describe, plain
from gradstream.job.files import digest_of
from gradstream.job.overrides import overrides
from gradstream.job.plan import RunPlan
from gradstream.job.registry import find_optimizer, find_strategy
from gradstream.machine.description import describe_machine, git_commit
from gradstream.recording import FOLDER, JOB_FILE
from gradstream.run.files import read_record
from gradstream.run.launches import seal_of
from gradstream.run.node_spec import NodeSpec
from gradstream.runtime.storage import DiskStorage
from gradstream.untrusted import say

# ---- effective settings ------------------------------------------------------------------
# The configuration in effect: every value of a run's job, and where it came from.


@dataclass(frozen=True, slots=True)
class Entry:
    """One value in effect.

    Args:
        key: "workers", or "strategy.push_every".
        value: in the form of JSON.
        origin: "default", the job file's name, "gradstream.toml:3", "GRADSTREAM_WORKERS", "--workers",
            or "argument": one of `train`.
    """

    key: str
    value: Any
    origin: str


def effective(plan: RunPlan) -> list[Entry]:
    """Every value of a planned run, including those of its strategy and optimizer.

    Values of None, which leave a choice open, are omitted.
    """
    job = plan.whole or plan.job
    own = Path(job.spec.partition(":")[0]).name if job.spec else "given"

    def entry(key: str, value: Any, default: Any, otherwise: str = own) -> Entry:
        origin = job.origins.get(key) or ("default" if value == default else otherwise)
        return Entry(key, value, origin)

    entries = []
    defaults = {field.name: plain(_default(field)) for field in dataclasses.fields(job)}
    values = {**overrides(job), "servers": plan.servers_of_part}
    defaults["servers"] = 1 if plan.served is not None else 0
    for name, value in values.items():
        default = defaults[name]
        if isinstance(getattr(job, name), Mapping) or not isinstance(value, Mapping):
            entries.append(entry(name, value, default))
        else:
            inner = default if isinstance(default, Mapping) else {}
            entries += [entry(f"{name}.{key}", part, inner.get(key)) for key, part in value.items()]
    used_by_all: dict[str, object] = {"strategy": find_strategy(job.strategy, job.strategy_options)}
    if plan.whole is None:
        used_by_all["optimizer"] = plan.optimizer
    elif job.optimizer is not None:
        used_by_all["optimizer"] = find_optimizer(job.optimizer)
    for name, used in used_by_all.items():
        described, asked = describe(used), getattr(job, name)
        origin = job.origins.get(name) or ("default" if asked in (None, defaults.get(name)) else own)
        entries.append(Entry(f"{name}.class", described["class"], origin))
        known = described["defaults"]
        entries += [
            entry(f"{name}.{key}", value, known.get(key), origin)
            for key, value in described["fields"].items()
        ]
    return [entry for entry in entries if entry.value is not None]


def to_toml(plan: RunPlan) -> str:
    """The configuration in effect as TOML, with a comment on the origin of each value; --config reads it."""
    job = plan.job
    lines = [
        f"# job: {job.spec or 'not in a file'}",
        f"# data: {job.data.name}, {job.data.num_samples or 'an unknown number of'} samples",
    ]
    if job.chunk_elems is None:
        lines.append("# chunk_elems: automatic, by the size of the model; the event 'started' tells")
    table = ""
    for entry in sorted(effective(plan), key=lambda setting: "." in setting.key):
        head, _, tail = entry.key.rpartition(".")
        if head != table:
            lines += ["", f"[{head}]"]
            table = head
        if tail == "class" and not entry.value:
            lines.append("# class: defined in the job file")
        else:
            lines.append(f"{tail} = {_toml(entry.value)}  # {entry.origin}")
    return "\n".join(lines) + "\n"


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _toml(value: Any) -> str:
    """A TOML value: for strings, numbers, booleans and flat lists, JSON's notation is TOML's."""
    if isinstance(value, Mapping):
        entries = {key: entry for key, entry in value.items() if entry is not None}  # TOML has no null
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(entry)}" for key, entry in entries.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


# ---- records -----------------------------------------------------------------------------


def write_records(plan: RunPlan, spec: NodeSpec, environment: Mapping[str, str], *, as_threads: bool) -> None:
    """Writes config.toml, nodes.json, a copy of the user's code and, if the run is new, run.json.

    Each file is replaced atomically: a run can be killed here, and resumed.

    Args:
        spec: the description of the plan for the nodes.
        environment: variables that the node processes get besides the launcher's own.
        as_threads: whether nodes are threads of this process.

    Raises:
        OSError: the disk fails.
    """
    job, storage = plan.job, DiskStorage(Path(spec.run_dir))
    if job.spec:  # otherwise no other process reads it
        keep(users_code(job.spec), storage.root)
    storage.write("config.toml", to_toml(plan).encode())
    if job.record:
        recorded = {"job": spec.job, "sha256": digest_of(spec.job)}
        storage.write(f"{FOLDER}/{spec.id}/{JOB_FILE}", json.dumps(recorded).encode())
    if plan.resume is None:
        info: dict[str, Any] = {
            "name": job.name,
            "id": spec.id,
            "began_unix_s": datetime.datetime.now(datetime.UTC).timestamp(),
            "nodes": "threads" if as_threads else "processes",
        }
        if job.record_machine:
            info |= {"git_commit": git_commit(Path.cwd()), **describe_machine(environment)}
        storage.write("run.json", _json(info))
    write_spec(spec)


def write_spec(spec: NodeSpec, run: Path | None = None) -> None:
    """Writes nodes.json with its seal, into the run's folder or another. Raises OSError if the disk fails.

    If there is no place for the key, the run goes on, and a message says which commands will ask.
    """
    run = run or Path(spec.run_dir)
    try:
        spec = dataclasses.replace(spec, seal=seal_of(run, spec))
    except ConfigError as error:
        say(f"{error}; until then `resume`, `evaluate` and `replay` will ask whether {run} is yours")
    DiskStorage(run).write("nodes.json", _json(dataclasses.asdict(spec)))


def add_to_run_json(run_dir: Path, entries: Mapping[str, Any]) -> None:
    """Adds entries to run.json. Raises OSError if the disk fails, ConfigError for a damaged file."""
    info = read_record(run_dir / "run.json") | dict(entries)
    DiskStorage(run_dir).write("run.json", _json(info))


def _json(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, indent=2).encode() + b"\n"
