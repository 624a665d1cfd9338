"""Reads the small files of a run directory; each error names the file and the remedy.

A file may be damaged by a disk, by a crash of the machine or by hand. The caller then gets a `ConfigError`,
never an exception of the parser.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gradstream.errors import ConfigError
from gradstream.untrusted import parse_json, parse_toml, read_regular

MAX_BYTES, MAX_DEPTH = 16 << 20, 32

JOB = "job"
"""Folder with the files of a job, if the run was on other machines; never read in a run directory."""

HOSTS = "hosts.json"
"""The machines of a run that `gradstream launch --hosts` started, until it is over and collected. For people to
read: what is executed is kept elsewhere, see `launches.py`."""

LOGS = "hosts"
"""Folder in the local folder of such a run: a folder for each machine, with its log and its exit status."""

BROUGHT = (
    "run.json",
    "config.toml",
    "nodes.json",
    "events.jsonl",
    "checkpoints",
    "logs",
    "recording",
    "tensorboard",
)
"""Files and folders of a run directory that come from the machine where the run was. Others belong to its processes, or
are made here, like `report.html`: a page is a program of whoever wrote it."""

_REMEDIES = {
    "run.json": "put it back from a copy, or write {} into it: it only says where and when the run was made",
    "nodes.json": "put it back from a copy: without it the run cannot be resumed, evaluated or replayed; "
    "`gradstream report` does not need it",
    "config.toml": "put it back from a copy, or remove it: only the report shows it",
    "job.json": "put it back from a copy: it says which job file was recorded",
}


def read_record(path: Path) -> dict[str, Any]:
    """Reads the JSON object in a file of a run directory.

    Raises:
        FileNotFoundError: there is no such file.
        ConfigError: the file cannot be read, or does not hold a JSON object.
    """
    try:
        record = parse_json(read_regular(path), max_bytes=MAX_BYTES, max_depth=MAX_DEPTH)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    if not isinstance(record, dict):
        raise _damaged(path, f"got JSON of type {type(record).__name__}, expected an object")
    return record


def read_config(path: Path) -> str:
    """Reads the text of a `config.toml`; "" if there is none. Raises ConfigError if it is not TOML."""
    try:
        text = read_regular(path).decode()
        parse_toml(text)
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    return text


def _damaged(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{path} is damaged: {why}; {_REMEDIES.get(path.name, 'put it back from a copy')}")
