"""A run directory opened again: the job that it was made from, with parameters that it has kept."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

from safetensors import SafetensorError
from safetensors.numpy import load_file

from gradstream.config import Job, build_model, metrics_of
from gradstream.data.base import Dataset
from gradstream.errors import ConfigError
from gradstream.node import NodeSpec
from gradstream.run import FINAL_MODEL, Run

__all__ = ["job_of_run", "kept_parameters", "reopen"]


def reopen(path: Path, *, checkpoint: str | None = None, data: Dataset | None = None) -> tuple[Run, Path]:
    """The run with its model and data, ready for `evaluate`, and the file of its parameters.

    Args:
        path: a run directory; the run may have failed, if it has kept a checkpoint.
        checkpoint: "final", or the name of a checkpoint: "step-00000120". None takes the final
            parameters, or else the newest checkpoint.
        data: another data set than the job's.

    Raises:
        ConfigError: it is not a run directory, its job cannot be read again, or there are no parameters.
    """
    run = Run.load(path)
    file = kept_parameters(path, checkpoint)
    try:
        parameters = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error
    job = job_of_run(path)
    return dataclasses.replace(
        run,
        parameters=parameters,
        model=build_model(job),
        data=data or job.data,
        metrics=metrics_of(job),
    ), file


def job_of_run(path: Path) -> Job:
    """The job of a run directory, read again from its file. Raises ConfigError where that cannot be."""
    try:
        spec = NodeSpec(**json.loads((path / "nodes.json").read_text()))
    except FileNotFoundError:
        raise ConfigError(f"{path} is not the directory of a run: it has no nodes.json") from None
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{path / 'nodes.json'}: written by another version of gradstream: {error}"
        ) from error
    return spec.load()


def kept_parameters(path: Path, checkpoint: str | None = None) -> Path:
    """The file of parameters that a run has kept; see `reopen`. Raises ConfigError if there is none."""
    folder = path / "checkpoints"
    there = {found.parent.name: found for found in folder.glob("[!.]*/model.safetensors")}
    named = {name: file for name, file in there.items() if re.fullmatch(r"step-\d+(\.\d+)?", name)}
    if checkpoint is not None:
        name = checkpoint.rstrip("/").rpartition("/")[2]
        if name not in there:
            known = ", ".join(sorted(there)) or "none"
            raise ConfigError(f"{folder} has no checkpoint {checkpoint!r}; there: {known}")
        return there[name]
    if (path / FINAL_MODEL).is_file():
        return path / FINAL_MODEL
    if not named:
        raise ConfigError(f"{path} has no parameters: the run did not finish, and no checkpoint was kept")
    return named[max(named, key=_age)]


def _age(name: str) -> list[int]:
    """step-00000120.1 comes after step-00000120, and before step-00000121."""
    return [int(number) for number in re.findall(r"\d+", name)]
