"""`state.json`: what a checkpoint is, in one small file that is written last.

A folder without it, or whose files are not of the sizes and SHA-256 that it tells, is no checkpoint.

    line 1            {"sha256": "<64 hexadecimal digits>",
    lines 2 to last   the other keys, which these digits are the SHA-256 of, byte for byte

So the file tells of itself whether it was altered: no second file can be lost or exchanged, and the
folder's rename makes both appear at once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradstream.data.progress import DataProgress
from gradstream.errors import ConfigError, DataError
from gradstream.untrusted import MismatchError, check_record, parse_json

__all__ = ["FORMAT", "STATE", "Evaluated", "FileEntry", "Manifest", "Resume", "seal_of"]

FORMAT = 2
"""Of `state.json`; a reader refuses others."""

STATE = "state.json"

_SEAL = b'{"sha256": "%s",\n'
_SEAL_BYTES = len(_SEAL % (64 * b"0"))
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")
MAX_BYTES, MAX_VALUES = 64 << 20, 8 << 20
"""Of `state.json`: it has a number for each chunk, of millions at most."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Size and SHA-256 of a file beside `state.json`."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The latest evaluation before a checkpoint. Accuracy counts before loss, as far as known."""

    step: int
    accuracy: float | None
    loss: float | None

    @property
    def rank(self) -> tuple[float, float]:
        """Larger is better."""
        no = float("-inf")
        return (no if self.accuracy is None else self.accuracy, no if self.loss is None else -self.loss)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Contents of `state.json`.

    Args:
        step: rounds of a synchronous run, minibatches over all workers of another.
        rounds: minibatches of each worker: `step` itself, or the mean over the workers.
        steps: by worker, its own count of minibatches.
        done: which samples are in the model.
        versions: of each chunk.
        model: fingerprint, elems, dtype, chunk_elems: what it belongs to; and the update rule, where workers
            bring it.
        optimizer, strategy, seed, workers, servers, num_samples: of the run that wrote it.
        evaluated: the latest evaluation, if there was any.
        files: of the folder, by name.
        dropped: by data epoch, how many of the samples done are not in the model: updates were made
            without them.
        shares: samples of a round that each worker takes, where they follow its measured speed.
        software: version of gradstream.
        samples: by worker, how many it has gone through, where workers bring data of their own.
    """

    step: int
    rounds: int
    steps: Mapping[str, int]
    done: DataProgress
    versions: Sequence[int]
    model: Mapping[str, Any]
    optimizer: str
    strategy: str
    seed: int
    workers: int
    servers: int
    num_samples: int | None
    software: str
    evaluated: Evaluated | None = None
    samples: Mapping[str, int] = field(default_factory=dict)
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    shares: Sequence[int] = ()
    dropped: Mapping[str, int] = field(default_factory=dict)

    def encode(self) -> bytes:
        """As JSON that carries the SHA-256 of itself."""
        record = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}
        record["done"] = self.done.as_json()
        record["files"] = {name: dataclasses.asdict(entry) for name, entry in self.files.items()}
        record["evaluated"] = None if self.evaluated is None else dataclasses.asdict(self.evaluated)
        body = json.dumps({"format": FORMAT, **record}, indent=1).encode()[2:] + b"\n"  # without "{\n"
        return seal_of(body) + body

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """What `encode` has made. Raises DataError for anything else: another format, or one bit altered."""
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
                raise DataError(f"{STATE} has format {number}, this gradstream reads {FORMAT}: install newer")
            check_record(cls, {**record, "done": {"epochs": 0}})
            record["done"] = DataProgress.of_json(record["done"])
            record["files"] = {_checked(name): FileEntry(**entry) for name, entry in record["files"].items()}
            if record["evaluated"] is not None:
                record["evaluated"] = Evaluated(**record["evaluated"])
            return cls(**record)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{STATE} cannot be read: {error!r}") from error


def seal_of(body: bytes) -> bytes:
    """The first line of a `state.json` that goes on with `body`."""
    return _SEAL % hashlib.sha256(body).hexdigest().encode()


def _checked(name: str) -> str:
    """The name of a file inside the checkpoint's own folder. Raises DataError for any other path."""
    if not _FILE_NAME.fullmatch(name):
        raise DataError(f"{STATE} tells of a file {name!r}: expected a plain name in its own folder")
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """What the nodes of a resumed run are told: where it goes on.

    Args:
        folder: of the checkpoint, in the run directory.
        step, rounds, steps, done, model, seed, num_samples, samples, shares, dropped: of its
            manifest.
        time_s: of the run's events so far: theirs go on from here.
    """

    folder: str
    step: int
    rounds: int
    steps: Mapping[str, int]
    done: DataProgress
    model: Mapping[str, Any]
    seed: int
    num_samples: int | None
    samples: Mapping[str, int] = field(default_factory=dict)
    time_s: float = 0.0
    shares: Sequence[int] = ()
    dropped: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def at(cls, folder: str, manifest: Manifest, *, time_s: float = 0.0) -> Resume:
        """Where a checkpoint goes on."""
        return cls(
            folder=folder,
            step=manifest.step,
            rounds=manifest.rounds,
            steps=manifest.steps,
            done=manifest.done,
            model=manifest.model,
            seed=manifest.seed,
            num_samples=manifest.num_samples,
            samples=manifest.samples,
            time_s=time_s,
            shares=manifest.shares,
            dropped=manifest.dropped,
        )

    def step_of(self, worker: str) -> int:
        """The number of a worker's next minibatch; a new one goes on from the furthest."""
        return self.steps.get(worker, max(self.steps.values(), default=0))

    def as_json(self) -> dict[str, Any]:
        """As JSON holds it."""
        record = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}
        return {**record, "done": self.done.as_json()}

    @classmethod
    def of_json(cls, record: Mapping[str, Any]) -> Resume:
        """What `as_json` has made. Raises ConfigError for anything else."""
        done = DataProgress.of_json(record.get("done", {}))
        try:
            check_record(cls, {**record, "done": {"epochs": 0}})
        except MismatchError as error:
            raise ConfigError(f"not where a run goes on: {error}") from None
        return cls(**{**record, "done": done})
