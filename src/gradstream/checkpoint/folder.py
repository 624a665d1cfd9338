"""Checkpoints on a storage: written so that a crash at any instant leaves the old or the new one.

    1  shards, or workers, write their ranges of each file into a hidden folder       durable when they say so
    2  headers, buffers and workers' own state are added                 each file is fsynced
    3  every file is read back: its SHA-256, and each chunk's checksum against what the shard held
    4  state.json, which tells sizes and SHA-256, is written last        fsync of the folder
    5  the folder gets its name (rename)                                 fsync of its parent
    6  old checkpoints that nobody wants any more go

A folder counts from step 5 on, and only as long as its files are what `state.json` says.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any

import numpy as np

from gradstream.checkpoint.format import MAX_HEADER_BYTES, TensorSpec, header_of, parse
from gradstream.checkpoint.manifest import STATE, FileEntry, Manifest
from gradstream.checkpoint.own_state import OwnState
from gradstream.checkpoint.policy import KeptCheckpoint, Policy
from gradstream.errors import ConfigError, DataError
from gradstream.runtime.base import Storage

__all__ = [
    "FOLDER",
    "MODEL",
    "DraftSnapshot",
    "Held",
    "VectorPlace",
    "data_offset",
    "file_of",
    "kept",
    "newest",
    "prune",
    "read_own",
    "read_tensors",
    "sweep",
    "to_resume",
    "verify",
    "worker_file",
]

FOLDER = "checkpoints"
MODEL = "model.safetensors"

_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_OWN = re.compile(r"worker-\d+\.safetensors")
_DRAFT = re.compile(r"\.step-.*\.tmp")
PIECE_BYTES = 1 << 22


def worker_file(worker: str) -> str:
    """Name of the file that holds a worker's own state."""
    return f"{worker}.safetensors"


@dataclass(frozen=True, slots=True)
class VectorPlace:
    """Where a vector of the shards goes: element i at byte offset + i · itemsize of a file.

    Args:
        vector: "" for the parameters, else the name of an optimizer's state vector.
        path: in the run directory.
        offset_bytes: of element 0.
    """

    vector: str
    path: str
    offset_bytes: int


Held = tuple[int, int, int]
"""Elements [start, stop) of a vector, and the CRC-32 of their bytes as the node that has them held them."""


class DraftSnapshot:
    """A checkpoint that is being written. Nobody sees it before `commit` has returned.

    Args:
        storage: the run directory.
        step: names the folder.
        token: tells this draft from one that a process killed before has left.
        tensors: of the flat vector, in its order; none where nobody writes one, and the model's file is made
            of `others` alone.
        others: tensors that are added to the model's file: buffers, frozen ones, second names.
        states: names of the optimizer's state vectors.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        step: int,
        token: str,
        tensors: Sequence[TensorSpec],
        others: Sequence[TensorSpec] = (),
        states: Sequence[str] = (),
    ) -> None:
        self._storage = storage
        self._step = step
        self._tensors, self._others = tensors, others
        self._data_bytes = sum(tensor.size_bytes for tensor in tensors)
        self.folder = f"{FOLDER}/.step-{step:08d}.{token}.tmp"
        self._headers = {"": header_of([*tensors, *others]), **dict.fromkeys(states, header_of(tensors))}
        self.places = tuple(
            VectorPlace(vector, f"{self.folder}/{file_of(vector)}", len(header))
            for vector, header in self._headers.items()
            if tensors
        )

    @property
    def size_bytes(self) -> int:
        """Of the large files together."""
        others_bytes = sum(tensor.size_bytes for tensor in self._others)
        headers_bytes = sum(map(len, self._headers.values()))
        return len(self.places) * self._data_bytes + others_bytes + headers_bytes

    def open(self) -> None:
        """Makes the folder that shards write into."""
        self._storage.mkdir(self.folder)

    def commit(
        self,
        manifest: Manifest,
        *,
        others: Mapping[str, bytes],
        own: Mapping[str, bytes],
        sums: Mapping[str, Sequence[Held]],
        itemsize_bytes: int,
    ) -> str:
        """Steps 2 to 5, once all holders have written. Returns the folder's name.

        Args:
            manifest: what is kept; `files` is filled in here.
            others: bytes of each tensor in `others` that is no second name.
            own: by worker, its own state as safetensors.
            sums: by vector, every piece of it as its holder has held it, in the order of the vector.
            itemsize_bytes: of an element.

        Raises:
            OSError: the disk is full or broken.
            DataError: a file does not hold what a shard has held.
            After either nothing has changed for readers; `discard` removes the rest.
        """
        storage, files = self._storage, {}
        for place in self.places:
            behind = () if place.vector else self._others
            pieces = chain([(0, self._headers[place.vector])], self._behind(place, behind, others))
            storage.patch(place.path, pieces)
            end = place.offset_bytes + self._data_bytes + sum(spec.size_bytes for spec in behind)
            files[file_of(place.vector)] = self._read_back(place, end, sums[place.vector], itemsize_bytes)
        if not self.places:
            data = self._headers[""] + b"".join(others[spec.name] for spec in self._others)
            storage.write(f"{self.folder}/{MODEL}", data)
            files[MODEL] = FileEntry(len(data), hashlib.sha256(data).hexdigest())
        for worker, data in own.items():
            name = worker_file(worker)
            storage.write(f"{self.folder}/{name}", data)
            files[name] = FileEntry(len(data), hashlib.sha256(data).hexdigest())
        storage.write(f"{self.folder}/{STATE}", replace(manifest, files=files).encode())
        storage.sync(self.folder)
        name = self._free_name()
        storage.rename(self.folder, name)
        storage.sync(FOLDER)
        storage.sync("")
        return name

    def discard(self) -> None:
        """Removes what was written. A shard that writes still finds no folder, and says so."""
        self._storage.remove(self.folder)

    def _behind(
        self, place: VectorPlace, specs: Sequence[TensorSpec], others: Mapping[str, bytes]
    ) -> Iterator[tuple[int, bytes]]:
        """What a file has behind the flat vector, by offset. Second names are copied from there."""
        sizes = [spec.size_bytes for spec in self._tensors]
        starts = dict(zip((spec.name for spec in self._tensors), accumulate(sizes, initial=0), strict=False))
        offset = place.offset_bytes + self._data_bytes
        for spec in specs:
            if not spec.same_as:
                yield offset, others[spec.name]
            else:
                first = place.offset_bytes + starts[spec.same_as]
                for start, size in _pieces(0, spec.size_bytes):
                    yield offset + start, self._storage.read_at(place.path, first + start, size)
            offset += spec.size_bytes

    def _read_back(
        self, place: VectorPlace, size_bytes: int, sums: Sequence[Held], itemsize_bytes: int
    ) -> FileEntry:
        storage, path = self._storage, place.path
        if storage.size(path) != size_bytes:
            raise DataError(
                f"{path} has {storage.size(path)} bytes, expected {size_bytes}: not all shards wrote"
            )
        digest = hashlib.sha256(storage.read_at(path, 0, place.offset_bytes))
        end = place.offset_bytes + self._data_bytes
        begin = 0
        for start, stop, crc in sums:
            data = storage.read_at(
                path, place.offset_bytes + start * itemsize_bytes, (stop - start) * itemsize_bytes
            )
            if start != begin or zlib.crc32(data) != crc:
                raise DataError(
                    f"{path}: elements {start} to {stop} are not what their node held; do all nodes write to "
                    "the disk of the run directory?"
                )
            digest.update(data)
            begin = stop
        if begin * itemsize_bytes != self._data_bytes:
            raise DataError(f"{path}: nobody has written the elements from {begin} on")
        for start, size in _pieces(end, size_bytes):
            digest.update(storage.read_at(path, start, size))
        return FileEntry(size_bytes, digest.hexdigest())

    def _free_name(self) -> str:
        """step-00000120; where a resumed run comes by again and does not trust that one, step-00000120.1."""
        there = self._storage.names(FOLDER)
        name, count = f"step-{self._step:08d}", 0
        while name in there:
            count += 1
            name = f"step-{self._step:08d}.{count}"
        return f"{FOLDER}/{name}"


def file_of(vector: str) -> str:
    """The file that holds a vector of the shards: "" is the parameters, else an optimizer's state."""
    return f"optimizer-{vector}.safetensors" if vector else MODEL


def verify(storage: Storage, folder: str) -> Manifest:
    """Reads every file of a checkpoint, and returns what it is.

    Raises:
        DataError: names each file that is damaged, and what about it is wrong.
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
    """What `state.json` says, if it belongs to this folder. Raises DataError."""
    try:
        manifest = Manifest.decode(storage.read(f"{folder}/{STATE}"))
    except FileNotFoundError:
        raise DataError(f"{folder} has no {STATE}") from None
    except OSError as error:
        raise DataError(f"{folder}/{STATE} cannot be read: {error}") from error
    except DataError as error:
        raise DataError(f"{folder}: {error}") from None
    if MODEL not in manifest.files:
        raise DataError(f"{folder}/{STATE} tells of no {MODEL}")
    match = _NAME.fullmatch(folder.rpartition("/")[2])
    if match is not None and int(match[1]) != manifest.step:
        raise DataError(f"{folder}/{STATE} is of step {manifest.step}: it belongs to another checkpoint")
    return manifest


def _fault(storage: Storage, path: str, entry: FileEntry) -> str:
    """What is wrong with a file of a checkpoint; "" where it is what `state.json` says."""
    digest = hashlib.sha256()
    try:
        size_bytes = storage.size(path)
        if size_bytes != entry.size_bytes:
            how = "was cut short" if size_bytes < entry.size_bytes else "has grown"
            return f"{path} has {size_bytes} bytes, {STATE} says {entry.size_bytes}: it {how}"
        for start, size in _pieces(0, size_bytes):
            digest.update(storage.read_at(path, start, size))
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} cannot be read: {error}"
    if digest.hexdigest() == entry.sha256:
        return ""
    return f"{path} was altered: its SHA-256 is {digest.hexdigest()[:16]}…, {STATE} says {entry.sha256[:16]}…"


def newest(storage: Storage, refused: Callable[[DataError], None]) -> tuple[str, Manifest] | None:
    """The newest checkpoint that is what it says, and its folder; None where there is none.

    Args:
        refused: told of each newer one that is not.
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
    """Where a run goes on: see `newest`; None where it begins from the start.

    Args:
        refused: told of each checkpoint that is damaged and newer.
        from_start: begin anew where every checkpoint is damaged; they stay as they are.

    Raises:
        DataError: every checkpoint is damaged, and nobody has said `from_start`.
        ConfigError: a good checkpoint is there, and somebody has.
    """
    damaged: list[DataError] = []
    found = newest(storage, damaged.append)
    if from_start and found is not None:
        raise ConfigError(
            f"from_start (--from-start): expected a run whose checkpoints are all damaged, but {found[0]} is "
            "good; leave it out to go on from there, or begin a run of its own"
        )
    if found is None and damaged and not from_start:
        named = "".join(f"\n  {error}" for error in damaged)
        raise DataError(
            f"every checkpoint of this run is damaged:{named}\nput one back from a copy, or begin again from "
            "the start with from_start=True (gradstream resume --from-start); the damaged files are left as "
            "they are"
        )
    for error in damaged:
        refused(error)
    return found


def kept(storage: Storage) -> Iterator[KeptCheckpoint]:
    """The checkpoints whose `state.json` is sound, oldest first. Their other files are not looked at."""
    for folder in _folders(storage):
        try:
            manifest = _manifest_in(storage, folder)
        except DataError:
            continue
        yield KeptCheckpoint(folder, manifest.step, manifest.evaluated)


def prune(storage: Storage, policy: Policy, *, fresh: str = "") -> None:
    """Step 6. A checkpoint loses its name first, so that half a one is never found.

    A damaged checkpoint is left alone: it takes no place among those that are kept, and somebody may want
    to save something of it. To know, every file is read where there are more checkpoints than are kept.

    Args:
        fresh: folder of a checkpoint whose files were read back just now.
    """
    there = list(kept(storage))
    if not policy.superfluous(there):
        return
    sound = [one for one in there if one.folder == fresh or _is_sound(storage, one.folder)]
    for one in policy.superfluous(sound):
        doomed = f"{FOLDER}/.{one.folder.rpartition('/')[2]}.old.tmp"
        storage.remove(doomed)
        storage.rename(one.folder, doomed)
        storage.remove(doomed)


def _is_sound(storage: Storage, folder: str) -> bool:
    try:
        verify(storage, folder)
    except DataError:
        return False
    return True


def sweep(storage: Storage, but: Collection[str] = ()) -> None:
    """Removes drafts that nobody writes. For who alone has the run directory.

    Args:
        but: folders of drafts that are being written.
    """
    for name in storage.names(FOLDER):
        if _DRAFT.fullmatch(name) and f"{FOLDER}/{name}" not in but:
            storage.remove(f"{FOLDER}/{name}")


def _pieces(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """(offset, size) of the pieces of a range of bytes that is too long to be held at once."""
    for first in range(start, stop, PIECE_BYTES):
        yield first, min(PIECE_BYTES, stop - first)


def data_offset(storage: Storage, path: str) -> int:
    """Where the data of a safetensors file begins. Raises DataError."""
    return _parsed(storage, path)[0]


def _parsed(storage: Storage, path: str) -> tuple[int, Mapping[str, tuple[TensorSpec, int]]]:
    """The header of a file. Reads no more of it than a header may have, whatever its length says."""
    size_bytes = storage.size(path)
    length = int.from_bytes(storage.read_at(path, 0, min(8, size_bytes)), "little")
    return parse(storage.read_at(path, 0, min(8 + min(length, MAX_HEADER_BYTES), size_bytes)))


def read_own(storage: Storage, folder: str, worker: str) -> OwnState | None:
    """A worker's own state in a checkpoint; one that was not there before gets the mean of all.

    None where the checkpoint is not on this worker's disk.
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
    """Some tensors of a safetensors file. Raises DataError where one is not in it."""
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
    """Folders that have the name of a checkpoint, oldest first."""
    found = []
    for name in storage.names(FOLDER):
        if match := _NAME.fullmatch(name):
            found.append((int(match[1]), int(match[2] or 0), f"{FOLDER}/{name}"))
    return [folder for _, _, folder in sorted(found)]
