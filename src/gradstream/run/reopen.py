"""Opens a run directory again: the job that it was made from, and parameters that it has kept."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path

from safetensors import SafetensorError

from gradstream.checkpoint import newest, verify
from gradstream.checkpoint.folder import FOLDER
from gradstream.checkpoint.model_file import load_file
from gradstream.data.base import Dataset
from gradstream.errors import ConfigError, DataError
from gradstream.job.code import changed, kept_code, users_code
from gradstream.job.job import Job, build_model
from gradstream.run.files import HOSTS
from gradstream.run.launches import checked
from gradstream.run.node_spec import NodeSpec
from gradstream.run.planning import metrics_of
from gradstream.run.result import FINAL_MODEL, Run
from gradstream.runtime.storage import DiskStorage
from gradstream.untrusted import TEXT_BYTES, escaped
from gradstream.untrusted.names import check_name
from gradstream.worker.final_model import BEST_MODEL


def reopen(path: Path, *, checkpoint: str | None = None, data: Dataset | None = None) -> tuple[Run, Path]:
    """The run with its model and data, ready for `evaluate`, and the file of its parameters.

    Args:
        path: a run directory; the run may have failed, if it has kept a checkpoint.
        checkpoint: "final", "best", or the name of a checkpoint: "step-00000120". None takes the final
            parameters, or else the newest checkpoint.
        data: another data set than the job's.

    Raises:
        ConfigError: this is not a run directory, its job cannot be read again, or there are no parameters.
    """
    run = Run.load(path)
    file = kept_parameters(path, checkpoint)
    try:
        parameters = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error
    job = job_of_run(path)
    for edited in changed(kept_code(path), users_code(job.spec)):
        text = escaped(str(edited), TEXT_BYTES)
        warnings.warn(f"{text} was edited after {path} had begun, and is used as it is now", stacklevel=2)
    if job.device != "cpu":  # it may have been trained on another machine
        job = dataclasses.replace(job, device="auto")
    return dataclasses.replace(
        run,
        parameters=parameters,
        model=build_model(job),
        data=data or job.data,
        metrics=metrics_of(job),
    ), file


def job_of_run(path: Path) -> Job:
    """The job of a run directory, read again from its file. Raises ConfigError if that cannot be."""
    return spec_of_run(path).load_again()


def spec_of_run(path: Path) -> NodeSpec:
    """The description of a run's plan, to be executed. Raises ConfigError as `described`, and as `checked`."""
    return checked(path, described(path))


def described(path: Path) -> NodeSpec:
    """The description of a run's plan, to be read alone. Raises ConfigError without a run, or for another version's."""
    try:
        spec = NodeSpec.read(path / "nodes.json")
    except FileNotFoundError:
        if (path / HOSTS).is_file():
            raise ConfigError(
                f"{path}: this run goes on on other machines: gradstream status, attach and stop take it"
            ) from None
        raise ConfigError(f"{path} is not the directory of a run: it has no nodes.json") from None
    check_name(spec.id, f"{path / 'nodes.json'}: the run's id")
    return spec


def kept_parameters(path: Path, checkpoint: str | None = None) -> Path:
    """The file of a run's final parameters, or of a checkpoint, which is verified first.

    Where the newest checkpoint was torn or altered, the one before is taken, with a warning.

    Args:
        path, checkpoint: see `reopen`.

    Raises:
        ConfigError: there is no checkpoint, or none of this name.
        DataError: the checkpoint of this name was torn or altered, or all of them were.
    """
    storage = DiskStorage(path)
    if checkpoint is None and (path / FINAL_MODEL).is_file():
        return path / FINAL_MODEL
    if checkpoint is None:
        damaged: list[DataError] = []
        found = newest(storage, damaged.append)
        if found is None and damaged:
            named = "".join(f"\n  {error}" for error in damaged)
            raise DataError(f"{path} has no parameters: all of its checkpoints are damaged:{named}")
        for error in damaged:
            warnings.warn(f"{escaped(str(error), TEXT_BYTES)}; the one before is used", stacklevel=2)
        if found is None and not (path / "run.json").is_file():
            raise ConfigError(f"{path} is not a run directory: it has no run.json")
        if found is None:
            raise ConfigError(
                f"{path} has no parameters: the run did not finish, and it has no checkpoint; run the job again, with "
                "checkpoint_every= to keep checkpoints"
            )
        return path / found[0] / FINAL_MODEL.name
    there = {kept.parent.name: kept for kept in sorted((path / FOLDER).glob("[!.]*/model.safetensors"))}
    name = checkpoint.rstrip("/").rpartition("/")[2]
    if name not in there:
        raise ConfigError(
            f"{path / FOLDER} has no checkpoint {checkpoint!r}; it has: {', '.join(there) or 'none'}"
        )
    if there[name] not in (path / FINAL_MODEL, path / BEST_MODEL):
        verify(storage, f"{FOLDER}/{name}")
    return there[name]
