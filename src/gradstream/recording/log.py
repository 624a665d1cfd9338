"""A node's part of a recording as a file of blocks, to which blocks are only ever added.

    block 0                     header of the node: JSON
    blocks 1, 2, ...            entries, compressed

    block = length (4 bytes, little endian) · CRC-32 of the rest (4 bytes) · zlib of the content

A node that is killed leaves at most one incomplete block, at the end. The reader drops it.
"""

from __future__ import annotations

import json
import platform
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from gradstream.errors import DataError
from gradstream.recording.entries import Entry, decode, encode
from gradstream.runtime.base import Storage
from gradstream.runtime.storage import disk_remedy
from gradstream.untrusted import parse_json, say

# ---- log ---------------------------------------------------------------------------------

FOLDER = "recording"
"""Folder in a run directory; it has a folder for each part of a resumed run, named by the id of the part."""

JOB_FILE = "job.json"
"""File beside the parts, with the name of the job file and its SHA-256."""

FORMAT = 4
BLOCK_BYTES = 1 << 16
"""A block is written when its entries have so many bytes, or when its node calls `flush`."""
HEAD_BYTES = 8
ROOM_BYTES = 16 << 20
"""Most bytes of blocks that wait in memory while the disk is full."""
MAX_BLOCK_BYTES = 64 << 20
"""Most bytes of a block's content; a small block that unpacks to more is refused."""


class Log:
    """Writes entries into a new file. If the node is killed, the entries since the last `flush` are lost.

    A disk that is full or broken does not end the run: blocks wait in memory until they can be written. If more
    than `ROOM_BYTES` wait, the recording ends. A message on stderr reports each of the two, once.

    Args:
        path: path of the file, below `FOLDER`.
        header: header of the node; must fit into JSON.
    """

    def __init__(self, storage: Storage, path: str, header: Mapping[str, Any]) -> None:
        self._storage = storage
        self._path = path
        self.ended = False  # nothing is written any more
        self._waiting: list[bytes] = []  # blocks that are not on the disk yet
        try:
            storage.remove(path)
        except OSError as error:
            self.ended = True
            say(f"{path}: nothing is recorded: {error}")
        self._pending = bytearray()
        self.num_entries = 0
        self.size_bytes = 0  # size of the file
        self._write(json.dumps({"format": FORMAT, **header}).encode())

    def add(self, entry: Entry) -> None:
        """Adds an entry."""
        self._pending += encode(entry)
        self.num_entries += 1
        if len(self._pending) >= BLOCK_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes all entries so far to the file."""
        if self._pending:
            content, self._pending = bytes(self._pending), bytearray()
            self._write(content)

    def _write(self, content: bytes) -> None:
        if self.ended:
            return
        packed = zlib.compress(content, 1)
        head = len(packed).to_bytes(4, "little") + zlib.crc32(packed).to_bytes(4, "little")
        waited = bool(self._waiting)
        self._waiting.append(head + packed)
        try:
            while self._waiting:
                done = self._storage.append(self._path, *self._waiting)
                self.size_bytes += sum(map(len, self._waiting[:done]))
                del self._waiting[:done]
        except OSError as error:
            if sum(map(len, self._waiting)) > ROOM_BYTES:
                self.ended, self._waiting = True, []
                say(f"{self._path}: the recording ends here: {error}")
            elif not waited:
                say(f"{self._path}: the recording waits for the disk: {error}; {disk_remedy(error)}")


@dataclass(frozen=True, slots=True)
class LogPart:
    """One node's part of a recording.

    Args:
        header: header of the node; see `origin_of`.
        entries: the entries, in order.
        torn_bytes: number of bytes at the end of the file that are no complete block.
    """

    node: str
    header: Mapping[str, Any]
    entries: Sequence[Entry]
    torn_bytes: int = 0


class LogReader:
    """Reads the blocks of a file.

    Args:
        name: name of the file, for messages.
    """

    def __init__(self, data: bytes, name: str) -> None:
        self._data = data
        self._name = name
        self.torn_bytes = 0

    def blocks(self) -> Iterator[bytes]:
        """The contents of the blocks. Raises DataError if a block was altered."""
        data, at = self._data, 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 4], "little")
            stop = at + HEAD_BYTES + size
            if stop > len(data):
                self.torn_bytes = len(data) - at
                return
            packed = data[at + HEAD_BYTES : stop]
            if zlib.crc32(packed) != int.from_bytes(data[at + 4 : at + HEAD_BYTES], "little"):
                if stop == len(data):  # after a power cut the end of the last block may be missing
                    self.torn_bytes = stop - at
                    return
                raise DataError(
                    f"{self._name}: the block at byte {at} was altered: its CRC-32 differs; put the file "
                    "back from a copy: an altered recording cannot be replayed"
                )
            try:
                content = zlib.decompressobj().decompress(packed, MAX_BLOCK_BYTES)
            except zlib.error as error:
                raise DataError(
                    f"{self._name}: the block at byte {at} cannot be read: {error}; put the file back from a copy"
                ) from error
            if len(content) == MAX_BLOCK_BYTES:
                raise DataError(
                    f"{self._name}: the block at byte {at} has more than {MAX_BLOCK_BYTES} bytes: no recording has; "
                    "put the file back from a copy"
                )
            yield content
            at = stop


def read_log(data: bytes, name: str) -> LogPart:
    """Reads one node's part of a recording.

    Args:
        name: name of the file, for messages.

    Raises:
        DataError: it is not a recording, was altered, or was written by a newer gradstream.
    """
    reader = LogReader(data, name)
    blocks = reader.blocks()
    first = next(blocks, b"")
    try:
        header = parse_json(first)
        number, node = header.pop("format"), header["node"]
        if not isinstance(node, str):
            raise ValueError("the node has no name")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise DataError(
            f"{name} is not a recording, or nothing of it was written; put it back from a copy"
        ) from error
    if number != FORMAT:
        raise DataError(
            f"{name} has format {number}, but this version of gradstream reads format {FORMAT}: use the version "
            "that made the recording"
        )
    entries = [entry for block in blocks for entry in decode(block, name)]
    return LogPart(node, header, entries, reader.torn_bytes)


# ---- origin ------------------------------------------------------------------------------
# The packages, processor and threads that computed a run: besides the job, the bits of its result depend on them.

PACKAGES = ("gradstream", "torch", "numpy")


def origin_of(node: str, job: str) -> dict[str, Any]:
    """The header of a node's recording: its name, its job, and the software and processor that it computed with."""
    return {
        "node": node,
        "job": job,
        "arithmetic": {
            "python": platform.python_version(),
            **{package: _version(package) for package in PACKAGES},
            "instructions": torch.backends.cpu.get_cpu_capability(),
        },
        "threads": torch.get_num_threads(),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The differences between two such sets of versions, such as "torch 2.12.0, here 2.13.0"."""
    return [
        f"{name} {then.get(name, 'unknown')}, here {now.get(name, 'unknown')}"
        for name in {**then, **now}
        if then.get(name) != now.get(name)
    ]
