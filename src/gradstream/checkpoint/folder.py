"""The folders of checkpoints: finds, verifies, reads and removes them. `draft.py` writes them."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from gradstream.checkpoint.format import MAX_HEADER_BYTES, TensorSpec, parse
from gradstream.checkpoint.manifest import STATE, Evaluated, FileEntry, Manifest
from gradstream.checkpoint.own_state import OwnState, worker_file
from gradstream.errors import ConfigError, DataError
from gradstream.runtime.base import Storage

FOLDER = "checkpoints"
MODEL = "model.safetensors"

_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_OWN = re.compile(r"worker-\d+\.safetensors")
_DRAFT = re.compile(r"\.step-.*\.tmp")
PIECE_BYTES = 1 << 22
"""Most bytes of a file to read at once."""


def file_of(vector: str) -> str:
    """Returns the name of the file with a vector: "" for the parameters, otherwise an optimizer's state."""
    return f"optimizer-{vector}.safetensors" if vector else MODEL


def verify(storage: Storage, folder: str) -> Manifest:
    """Reads every file of a checkpoint, and returns its manifest.

    Raises:
        DataError: files are damaged. The message names each of them with its fault.
    """
    manifest = _manifest_in(storage, folder)
    damaged = [
        fault
        for name, entry in manifest.files.items()
        if (fault := _fault(storage, f"{folder}/{name}", entry))
    ]
    if damaged:
        raise DataError("; ".join(damaged))
    return manifest


def _manifest_in(storage: Storage, folder: str) -> Manifest:
    """Reads `state.json`, and checks that it belongs to this folder. Raises DataError."""
    try:
        manifest = Manifest.decode(storage.read(f"{folder}/{STATE}"))
    except FileNotFoundError:
        raise DataError(f"{folder} has no {STATE}") from None
    except OSError as error:
        raise DataError(f"{folder}/{STATE} cannot be read: {error}") from error
    except DataError as error:
        raise DataError(f"{folder}: {error}") from None
    if MODEL not in manifest.files:
        raise DataError(f"{folder}/{STATE} lists no {MODEL}")
    match = _NAME.fullmatch(folder.rpartition("/")[2])
    if match is not None and int(match[1]) != manifest.step:
        raise DataError(f"{folder}/{STATE} is of step {manifest.step}: it belongs to another checkpoint")
    return manifest


def _fault(storage: Storage, path: str, entry: FileEntry) -> str:
    """Returns the fault of a file; "" if it agrees with `state.json`."""
    digest = hashlib.sha256()
    try:
        size_bytes = storage.size(path)
        if size_bytes != entry.size_bytes:
            how = "was cut short" if size_bytes < entry.size_bytes else "has grown"
            return f"{path} has {size_bytes} bytes, {STATE} says {entry.size_bytes}: it {how}"
        for start, size in pieces_of(0, size_bytes):
            digest.update(storage.read_at(path, start, size))
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} cannot be read: {error}"
    if digest.hexdigest() == entry.sha256:
        return ""
    return f"{path} was altered: its SHA-256 is {digest.hexdigest()[:16]}…, {STATE} says {entry.sha256[:16]}…"


def newest(storage: Storage, refused: Callable[[DataError], None]) -> tuple[str, Manifest] | None:
    """Returns the folder and the manifest of the newest sound checkpoint; None if there is none.

    Args:
        refused: called with the fault of each newer checkpoint.
    """
    for folder in reversed(_folders(storage)):
        try:
            return folder, verify(storage, folder)
        except DataError as error:
            refused(error)
    return None


def to_resume(
    storage: Storage, refused: Callable[[DataError], None], *, from_start: bool = False
) -> tuple[str, Manifest] | None:
    """Returns the checkpoint to resume from, as `newest` does; None if the run starts over.

    Args:
        refused: called with the fault of each newer checkpoint.
        from_start: whether to start over if every checkpoint is damaged; the files stay as they are.

    Raises:
        DataError: every checkpoint is damaged, and `from_start` is not set.
        ConfigError: `from_start` is set, and there is a sound checkpoint.
    """
    damaged: list[DataError] = []
    checkpoint = newest(storage, damaged.append)
    if from_start and checkpoint is not None:
        raise ConfigError(
            f"from_start (--from-start): expected a run whose checkpoints are all damaged, but {checkpoint[0]} is "
            "good; leave it out to go on from there, or begin a run of its own"
        )
    if checkpoint is None and damaged and not from_start:
        named = "".join(f"\n  {error}" for error in damaged)
        raise DataError(
            f"every checkpoint of this run is damaged:{named}\nput one back from a copy, or begin again from "
            "the start with from_start=True (gradstream resume --from-start); the damaged files are left as "
            "they are"
        )
    for error in damaged:
        refused(error)
    return checkpoint


def kept(storage: Storage) -> Iterator[KeptCheckpoint]:
    """Yields the checkpoints whose `state.json` is sound, oldest first. It does not read their other files."""
    for folder in _folders(storage):
        try:
            manifest = _manifest_in(storage, folder)
        except DataError:
            continue
        yield KeptCheckpoint(folder, manifest.step, manifest.evaluated)


def prune(storage: Storage, policy: Policy, *, fresh: str = "") -> None:
    """Removes the checkpoints that the policy does not keep.

    A checkpoint loses its name first, so that readers never find a part of one. Damaged checkpoints stay,
    since parts of them may be of use, and do not count as kept. To detect them, every file is read if there are
    more checkpoints than the policy keeps.

    Args:
        policy: which checkpoints are kept.
        fresh: folder of a checkpoint whose files were just read back.
    """
    there = list(kept(storage))
    if not policy.superfluous(there):
        return
    sound = [
        checkpoint
        for checkpoint in there
        if checkpoint.folder == fresh or _is_sound(storage, checkpoint.folder)
    ]
    for checkpoint in policy.superfluous(sound):
        doomed = f"{FOLDER}/.{checkpoint.folder.rpartition('/')[2]}.old.tmp"
        storage.remove(doomed)
        storage.rename(checkpoint.folder, doomed)
        storage.remove(doomed)


def _is_sound(storage: Storage, folder: str) -> bool:
    try:
        verify(storage, folder)
    except DataError:
        return False
    return True


def sweep(storage: Storage, but: Collection[str] = ()) -> None:
    """Removes abandoned drafts. Only the process that owns the run directory may call it.

    Args:
        but: folders of drafts that are being written.
    """
    for name in storage.names(FOLDER):
        if _DRAFT.fullmatch(name) and f"{FOLDER}/{name}" not in but:
            storage.remove(f"{FOLDER}/{name}")


def pieces_of(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yields (offset, size) of the pieces in which a range of bytes is read."""
    for first in range(start, stop, PIECE_BYTES):
        yield first, min(PIECE_BYTES, stop - first)


def data_offset(storage: Storage, path: str) -> int:
    """Returns the offset of the data of a safetensors file. Raises DataError."""
    return _parsed(storage, path)[0]


def _parsed(storage: Storage, path: str) -> tuple[int, Mapping[str, tuple[TensorSpec, int]]]:
    """Parses the header of a file. Reads at most the largest valid header, whatever the file says."""
    size_bytes = storage.size(path)
    length = int.from_bytes(storage.read_at(path, 0, min(8, size_bytes)), "little")
    return parse(storage.read_at(path, 0, min(8 + min(length, MAX_HEADER_BYTES), size_bytes)))


def read_own(storage: Storage, folder: str, worker: str) -> OwnState | None:
    """Reads a worker's own state from a checkpoint; a new worker gets the mean of all workers.

    Returns None if the checkpoint is not on this worker's disk.
    """
    path = f"{folder}/{worker_file(worker)}"
    try:
        return OwnState.decode(storage.read(path))
    except FileNotFoundError:
        path = f"{folder}/{MODEL}"
    own = next((name for name in storage.names(folder) if _OWN.fullmatch(name)), None)
    if own is None:
        return None
    wanted = OwnState.decode(storage.read(f"{folder}/{own}")).buffers
    return OwnState(0, read_tensors(storage, path, wanted))


def read_tensors(storage: Storage, path: str, names: Iterable[str]) -> dict[str, np.ndarray[Any, Any]]:
    """Reads the named tensors of a safetensors file. Raises DataError if one is missing."""
    offset_bytes, tensors = _parsed(storage, path)
    out = {}
    for name in names:
        if name not in tensors:
            raise DataError(f"{path} has no tensor {name!r}: is it a checkpoint of this model?")
        spec, start = tensors[name]
        data = storage.read_at(path, offset_bytes + start, spec.size_bytes)
        if len(data) != spec.size_bytes:
            raise DataError(f"{path} ends inside tensor {name!r}: it was cut short")
        out[name] = np.frombuffer(data, spec.numpy_dtype).reshape(spec.shape).copy()
    return out


def _folders(storage: Storage) -> list[str]:
    """Returns the folders with the name of a checkpoint, oldest first."""
    folders = []
    for name in storage.names(FOLDER):
        if match := _NAME.fullmatch(name):
            folders.append((int(match[1]), int(match[2] or 0), f"{FOLDER}/{name}"))
    return [folder for _, _, folder in sorted(folders)]


# ---- policy ------------------------------------------------------------------------------
# `Policy`: when checkpoints are made, and which are kept. Pure.

FIRST_S = 60.0
"""Seconds after which the first checkpoint is due, if the interval is a longer time."""

_SECONDS = {"s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class Every:
    """An interval between checkpoints, in steps, data epochs or seconds."""

    amount: float
    unit: Literal["steps", "epochs", "seconds"]


def parse_every(value: int | str | None) -> Every | None:
    """Parses an interval: 500, "epoch", "90s", "10min", "2h"; None for none.

    Raises:
        ConfigError: `value` is something else.
    """
    if value is None:
        return None
    if value == "epoch":
        return Every(1, "epochs")
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return Every(value, "steps")
    if isinstance(value, str) and (match := re.fullmatch(r"(\d+(?:\.\d+)?) ?([a-z]+)", value)):
        seconds = float(match[1]) * _SECONDS.get(match[2], math.nan)
        if seconds > 0:
            return Every(seconds, "seconds")
    raise ConfigError(
        f"checkpoint_every={value!r}: expected a number of steps of at least 1, 'epoch', a time such as "
        "'90s', '10min' or '2h', or None for no checkpoint before the run is stopped"
    )


@dataclass(frozen=True, slots=True)
class KeptCheckpoint:
    """A checkpoint in the run directory."""

    folder: str
    step: int
    evaluated: Evaluated | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """When a checkpoint is due, and which are kept.

    An interval of time is not longer than the run had been going on at its last checkpoint, or `FIRST_S`: a run that
    dies young loses at most half of its time.

    Args:
        every: interval between checkpoints; None makes one only when the run is stopped.
        keep_last: number of the newest checkpoints to keep, at least 1.
        keep_best: whether to also keep the checkpoint with the best evaluation.
    """

    every: Every | None = None
    keep_last: int = 2
    keep_best: bool = True

    def due(self, *, steps: int, epochs: int, seconds: float, before_s: float = math.inf) -> bool:
        """Whether a checkpoint is due.

        Args:
            steps, epochs, seconds: since the last checkpoint.
            before_s: how long the run had been going on at that time.
        """
        if self.every is None or steps <= 0:
            return False
        if self.every.unit == "seconds":
            return seconds >= min(self.every.amount, max(FIRST_S, before_s))
        return {"steps": steps, "epochs": epochs}[self.every.unit] >= self.every.amount

    def __str__(self) -> str:
        """When checkpoints are made, in words."""
        if self.every is None:
            return "a checkpoint is made when the run is stopped, and at no other time"
        amount, unit = self.every.amount, self.every.unit
        if unit == "seconds" and amount > FIRST_S:
            return f"the first checkpoint comes after {FIRST_S:g} s, later ones at most {_time(amount)} apart"
        every = _time(amount) if unit == "seconds" else f"{amount:g} {unit}" if amount > 1 else unit[:-1]
        return f"a checkpoint comes every {every}"

    def superfluous(self, there: Sequence[KeptCheckpoint]) -> list[KeptCheckpoint]:
        """Returns the checkpoints of `there` that are not kept. `there` is sorted, oldest first."""
        wanted = {checkpoint.folder for checkpoint in there[-max(1, self.keep_last) :]}
        judged = [checkpoint for checkpoint in there if checkpoint.evaluated is not None]
        if self.keep_best and judged:
            # Several may have the same evaluation; the oldest was made closest to it.
            best = max(
                judged,
                key=lambda checkpoint: checkpoint.evaluated.rank if checkpoint.evaluated else (0.0, 0.0, 0.0),
            )
            wanted.add(best.folder)
        return [checkpoint for checkpoint in there if checkpoint.folder not in wanted]


def _time(seconds: float) -> str:
    """A time in words: "10 min"."""
    units = {"h": 3600.0, "min": 60.0, "s": 1.0}
    name = next((name for name, unit_s in units.items() if seconds >= unit_s), "s")
    return f"{seconds / units[name]:g} {name}"
