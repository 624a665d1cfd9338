"""`DraftSnapshot`: writes a checkpoint so that a crash at any instant leaves the old or the new one.

    1  shards, or workers, write their ranges of each file into a hidden folder     durable when they report it
    2  headers, buffers and workers' own state are added                            each file is fsynced
    3  every file is read back: its SHA-256, and the checksum that its holder computed of each piece
    4  state.json, with all sizes and SHA-256, is written last                      fsync of the folder
    5  the folder gets its name (rename)                                            fsync of its parent
    6  `folder.prune` removes old checkpoints

A folder counts from step 5 on, and only as long as its files agree with `state.json`.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain

from gradstream.checkpoint.folder import FOLDER, MODEL, file_of, pieces_of
from gradstream.checkpoint.format import TensorSpec, header_of
from gradstream.checkpoint.manifest import STATE, FileEntry, Manifest
from gradstream.checkpoint.own_state import worker_file
from gradstream.errors import DataError
from gradstream.runtime.base import Storage


@dataclass(frozen=True, slots=True)
class VectorPlace:
    """Place of a vector in a file: element i lies at byte offset + i · itemsize.

    Args:
        vector: "" for the parameters, otherwise the name of an optimizer's state vector.
        path: path of the file in the run directory.
        offset_bytes: offset of element 0.
    """

    vector: str
    path: str
    offset_bytes: int


PieceSum = tuple[int, int, int]
"""Elements [start, stop) of a vector, and the CRC-32 of their bytes in the memory of their holder."""


class DraftSnapshot:
    """A checkpoint that is being written. Readers do not find it before `commit` has returned.

    Args:
        step: step of the checkpoint, for its name.
        token: distinguishes this draft from drafts of a killed process.
        tensors: tensors of the flat vector, in its order; none if no node writes the vector, so that the
            model's file consists of `others` alone.
        others: further tensors of the model's file: buffers, frozen parameters, and second names of tied tensors.
        states: names of the optimizer's state vectors.

    Attributes:
        folder: the hidden folder.
        places: where the vectors go.
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
        """Bytes of the large files together."""
        others_bytes = sum(tensor.size_bytes for tensor in self._others)
        headers_bytes = sum(map(len, self._headers.values()))
        return len(self.places) * self._data_bytes + others_bytes + headers_bytes

    def open(self) -> None:
        """Makes the folder for the holders of the vectors."""
        self._storage.mkdir(self.folder)

    def commit(
        self,
        manifest: Manifest,
        *,
        others: Mapping[str, bytes],
        own: Mapping[str, bytes],
        sums: Mapping[str, Sequence[PieceSum]],
        itemsize_bytes: int,
    ) -> str:
        """Takes steps 2 to 5 above, once all nodes have written their ranges. Returns the name of the folder.

        After an error nothing has changed for readers, and `discard` removes the draft.

        Args:
            manifest: manifest of the checkpoint; `commit` fills in `files`.
            others: by name, bytes of each further tensor of the model's file, without those that are copies.
            own: by worker, its own state as safetensors.
            sums: by vector, the checksum of each of its pieces, in the order of the vector.
            itemsize_bytes: bytes of an element.

        Raises:
            OSError: the disk is full or broken.
            DataError: a file differs from what its holder had in memory.
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
        """Removes the draft. A holder that still writes finds no folder, and reports that."""
        self._storage.remove(self.folder)

    def _behind(
        self, place: VectorPlace, specs: Sequence[TensorSpec], others: Mapping[str, bytes]
    ) -> Iterator[tuple[int, bytes]]:
        """Yields the tensors after the flat vector with their offsets. Second names are copies from the vector."""
        sizes = [spec.size_bytes for spec in self._tensors]
        starts = dict(zip((spec.name for spec in self._tensors), accumulate(sizes, initial=0), strict=False))
        offset = place.offset_bytes + self._data_bytes
        for spec in specs:
            if not spec.same_as:
                yield offset, others[spec.name]
            else:
                first = place.offset_bytes + starts[spec.same_as]
                for start, size in pieces_of(0, spec.size_bytes):
                    yield offset + start, self._storage.read_at(place.path, first + start, size)
            offset += spec.size_bytes

    def _read_back(
        self, place: VectorPlace, size_bytes: int, sums: Sequence[PieceSum], itemsize_bytes: int
    ) -> FileEntry:
        """Reads a file again, and compares it with the checksums of the holders."""
        storage, path = self._storage, place.path
        if storage.size(path) != size_bytes:
            raise DataError(
                f"{path} has {storage.size(path)} bytes, expected {size_bytes}: not all nodes wrote"
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
                    f"{path}: elements {start} to {stop} differ from what their node had in memory; do all "
                    "nodes write to the disk of the run directory?"
                )
            digest.update(data)
            begin = stop
        if begin * itemsize_bytes != self._data_bytes:
            raise DataError(f"{path}: nobody has written the elements from {begin} on")
        for start, size in pieces_of(end, size_bytes):
            digest.update(storage.read_at(path, start, size))
        return FileEntry(size_bytes, digest.hexdigest())

    def _free_name(self) -> str:
        """Returns step-00000120, or step-00000120.1 if that name is taken by a checkpoint that was not resumed."""
        there = self._storage.names(FOLDER)
        name, count = f"step-{self._step:08d}", 0
        while name in there:
            count += 1
            name = f"step-{self._step:08d}.{count}"
        return f"{FOLDER}/{name}"
