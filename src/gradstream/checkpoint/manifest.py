"""`state.json`: the contents of a checkpoint, in one small file that is written last.

A folder is a checkpoint only if it has this file, and all files have the sizes and SHA-256 that it lists.

    line 1            {"sha256": "<64 hexadecimal digits>",
    lines 2 to last   the other keys; line 1 has the SHA-256 of these bytes

So the file itself shows whether it was altered. A checksum in a second file could be lost or exchanged.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradstream.data.base import DataProgress
from gradstream.errors import ConfigError, DataError
from gradstream.untrusted import MismatchError, check_record, parse_json

FORMAT = 2
"""Version of `state.json`; readers refuse all others."""

STATE = "state.json"

_SEAL = b'{"sha256": "%s",\n'
_SEAL_BYTES = len(_SEAL % (64 * b"0"))
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")
MAX_COUNT = 1 << 53
_NO_COUNTS = frozenset({"seed", "model", "versions", "done", "evaluated"})
"""Entries with numbers that are not counts, or are checked elsewhere. A chunk without parameters has version -1."""

MAX_BYTES, MAX_VALUES = 64 << 20, 8 << 20
"""Limits of `state.json`, which has a number for each chunk: some millions at most."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Size and SHA-256 of a file beside `state.json`."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The latest evaluation before a checkpoint.

    `score` is the figure that `until` monitors, with the sign for which larger is better; None if it monitors nothing.
    """

    step: int
    accuracy: float | None
    loss: float | None
    score: float | None = None

    @property
    def rank(self) -> tuple[float, float, float]:
        """Larger is better. The score counts first, then accuracy, then loss; None and NaN are the worst."""
        no = float("-inf")
        better = (self.score, self.accuracy, None if self.loss is None else -self.loss)
        first, second, third = (no if figure is None or math.isnan(figure) else figure for figure in better)
        return first, second, third


@dataclass(frozen=True, slots=True)
class JobPhase:
    """The phase of its job that a run is in, and where it began; see `job.phases`.

    Args:
        number: number of the phase, from 0.
        over: whether the phase is over, and the run goes on with the next one.
        epochs: number of data epochs that were complete when it began.
        rounds: minibatches of each worker before it (`Manifest.rounds`).
        origin: step of its first minibatch, as the plan of this phase counts steps (`Position.step`).
        accumulate: number of minibatches of a step, if the gradients' variance has set it; 0 if the job does.
        grown: with `over`: this phase itself continues, with this number of minibatches per step; 0 if the next one
            does.
        boundary: number of the run's boundaries so far at which nodes changed to another plan.
        chosen: with `over`, in a phase of strategy "auto": how the next one exchanges (`link_choice.Chosen.as_json`).
    """

    number: int = 0
    over: bool = False
    epochs: int = 0
    rounds: int = 0
    origin: int = 0
    accumulate: int = 0
    grown: int = 0
    boundary: int = 0
    chosen: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPosition:
    """How far a run is, and on what it depends: the part of a checkpoint that a resumed run reads.

    Args:
        step: rounds of a synchronous run, minibatches over all workers of another.
        rounds: minibatches of each worker: `step` itself, or the mean over the workers.
        steps: number of minibatches of each worker, by its name.
        done: which samples are done.
        model: fingerprint, elems, dtype and chunk_elems of the model, and its update rule if workers bring it.
        seed: seed of the run.
        num_samples: samples in a data epoch; None for a stream.
        samples: by worker, how many samples it has gone through, if workers bring their own data.
        shares: by rank, the samples of a round, if shares follow the measured speed.
        dropped: by data epoch, how many of the done samples are not in the model, since updates skipped
            them.
        rule: class of the update rule whose state vectors these are: of the shards, or of the workers of a group.
        strategy: name of the run's strategy.
        phase: the phase of the job.
        predictors: names the predictors of independently trained parts, as `SyntheticGradients.of_parts` does; "" for
            none.
        remainders: names the unsent state of each worker, as `RunPlan.remainders` does; "" for none.
        replicas: names strategy and rule of workers that have their own parameters, as `RunPlan.replicas` does; ""
            for none. The model of the checkpoint is their mean.
        dealt: what of their data users' own loops have left, as JSON: see `Dealing.saved`; "" where they know it.
    """

    step: int
    rounds: int
    steps: Mapping[str, int]
    done: DataProgress
    model: Mapping[str, Any]
    seed: int
    strategy: str
    num_samples: int | None
    samples: Mapping[str, int] = field(default_factory=dict)
    shares: Sequence[int] = ()
    dropped: Mapping[str, int] = field(default_factory=dict)
    rule: str = ""
    phase: JobPhase = field(default_factory=JobPhase)
    predictors: str = ""
    remainders: str = ""
    replicas: str = ""
    dealt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(RunPosition):
    """Contents of `state.json`.

    Args:
        versions: the version of each chunk.
        optimizer: name of the run's optimizer.
        workers: number of workers.
        servers: number of shards.
        software: version of gradstream.
        evaluated: the latest evaluation, if any.
        files: the other files of the folder, by name.
        procedures: the chunks' state of a procedure (`v1.Procedure`, in base64); empty if there is none.
    """

    versions: Sequence[int]
    optimizer: str
    workers: int
    servers: int
    software: str
    evaluated: Evaluated | None = None
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    procedures: Sequence[str] = ()

    def encode(self) -> bytes:
        """Returns the contents of `state.json`."""
        record = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}
        record["done"] = self.done.as_json()
        record["files"] = {name: dataclasses.asdict(entry) for name, entry in self.files.items()}
        record["evaluated"] = None if self.evaluated is None else dataclasses.asdict(self.evaluated)
        record["phase"] = dataclasses.asdict(self.phase)
        body = json.dumps({"format": FORMAT, **record}, indent=1).encode()[2:] + b"\n"  # without "{\n"
        return seal_of(body) + body

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Parses the result of `encode`. Raises DataError for another format, or if one bit was altered."""
        seal, body = data[:_SEAL_BYTES], data[_SEAL_BYTES:]
        if not seal.startswith(b'{"sha256"'):
            raise DataError(
                f"{STATE} does not begin with the SHA-256 of itself: it was altered, or another version of "
                "gradstream wrote it; resume from another checkpoint, or begin anew"
            )
        if seal != seal_of(body):
            raise DataError(f"{STATE} was altered or cut short: it is not what its own SHA-256 says")
        try:
            record = parse_json(data, max_bytes=MAX_BYTES, max_values=MAX_VALUES)
            del record["sha256"]
            number = record.pop("format")
            if number != FORMAT:
                raise DataError(
                    f"{STATE} has format {number}, but this version of gradstream reads format {FORMAT}: "
                    "use the version that wrote the checkpoint"
                )
            check_record(cls, {**record, "done": {"epochs": 0}})
            for name in record.keys() - _NO_COUNTS:
                _check_counts(name, record[name])
            record["done"] = DataProgress.of_json(record["done"])
            record["files"] = {_checked(name): FileEntry(**entry) for name, entry in record["files"].items()}
            if record["evaluated"] is not None:
                record["evaluated"] = Evaluated(**record["evaluated"])
            record["phase"] = JobPhase(**record.get("phase", {}))
            return cls(**record)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{STATE} cannot be read: {error!r}") from error


def seal_of(body: bytes) -> bytes:
    """Returns the first line of a `state.json` whose other lines are `body`."""
    return _SEAL % hashlib.sha256(body).hexdigest().encode()


def _check_counts(name: str, value: Any) -> None:
    """Raises DataError for an impossible count in an entry: below 0, or above what any run reaches."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for entry in value:
            _check_counts(name, entry)
    elif isinstance(value, int) and not 0 <= value <= MAX_COUNT:
        raise DataError(
            f"{STATE} has {name} {value}, expected 0 to {MAX_COUNT}: it was altered; resume from another checkpoint"
        )


def _checked(name: str) -> str:
    """Returns the name of a file in the checkpoint's folder. Raises DataError for any other path."""
    if not _FILE_NAME.fullmatch(name):
        raise DataError(
            f"{STATE} lists a file {name!r}, expected a plain name in its own folder: it was altered; resume from "
            "another checkpoint"
        )
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume(RunPosition):
    """Where a resumed run continues. All its nodes get this.

    Args:
        folder: folder of the checkpoint in the run directory.
        time_s: training time in seconds before the run was resumed. The times of its events continue from it.
    """

    folder: str
    time_s: float = 0.0

    @classmethod
    def at(cls, folder: str, manifest: Manifest, *, time_s: float = 0.0) -> Resume:
        """Returns where a checkpoint is resumed."""
        position = {entry.name: getattr(manifest, entry.name) for entry in dataclasses.fields(RunPosition)}
        return cls(folder=folder, time_s=time_s, **position)

    def step_of(self, worker: str) -> int:
        """Returns the number of a worker's next minibatch; a new worker continues the largest number."""
        return self.steps.get(worker, max(self.steps.values(), default=0))

    def as_json(self) -> dict[str, Any]:
        """Returns the fields as JSON values."""
        record = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}
        return {**record, "done": self.done.as_json(), "phase": dataclasses.asdict(self.phase)}

    @classmethod
    def of_json(cls, record: Mapping[str, Any]) -> Resume:
        """Parses the result of `as_json`. Raises ConfigError for anything else."""
        done = DataProgress.of_json(record.get("done", {}))
        try:
            check_record(cls, {**record, "done": {"epochs": 0}})
        except MismatchError as error:
            raise ConfigError(f"the description of the checkpoint to resume from is wrong: {error}") from None
        return cls(**{**record, "done": done, "phase": JobPhase(**record.get("phase", {}))})
