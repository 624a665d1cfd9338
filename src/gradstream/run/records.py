"""The files that the launcher writes into a run directory: configuration, description of the nodes, origin."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradstream.errors import ConfigError
from gradstream.job.code import keep, users_code
from gradstream.job.files import digest_of
from gradstream.machine.description import describe_machine, git_commit
from gradstream.recording import FOLDER, JOB_FILE
from gradstream.run.effective_settings import to_toml
from gradstream.run.files import read_record
from gradstream.run.node_spec import NodeSpec
from gradstream.run.plan import RunPlan
from gradstream.run.seals import seal_of
from gradstream.runtime.storage import DiskStorage
from gradstream.untrusted import say


def write_records(plan: RunPlan, spec: NodeSpec, environment: Mapping[str, str], *, as_threads: bool) -> None:
    """Writes config.toml, nodes.json, a copy of the user's code and, where the run begins, run.json.

    Each file is replaced atomically: a run can be killed here, and resumed.

    Args:
        plan: of the run.
        spec: the description of the plan for the nodes.
        environment: variables that the node processes get besides the launcher's own.
        as_threads: whether nodes are threads of this process.

    Raises:
        OSError: the disk does not take them.
    """
    job, storage = plan.job, DiskStorage(Path(spec.run_dir))
    if job.spec:  # else no other process reads it
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
    """Writes nodes.json with its seal, into the run's folder or another. Raises OSError if the disk does not take it.

    Without a place for the key the run goes on, and a message says what will ask.
    """
    run = run or Path(spec.run_dir)
    try:
        spec = dataclasses.replace(spec, seal=seal_of(run, spec))
    except ConfigError as error:
        say(f"{error}; until then `resume`, `evaluate` and `replay` will ask whether {run} is yours")
    DiskStorage(run).write("nodes.json", _json(dataclasses.asdict(spec)))


def add_to_run_json(run_dir: Path, entries: Mapping[str, Any]) -> None:
    """Adds entries to run.json. Raises OSError if the disk does not take it, ConfigError for a damaged file."""
    info = read_record(run_dir / "run.json") | dict(entries)
    DiskStorage(run_dir).write("run.json", _json(info))


def _json(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, indent=2).encode() + b"\n"
