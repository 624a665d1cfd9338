"""A node's part of a recording as a file: blocks that are only ever added, each with its length and CRC.

    block 0                     what the node was: JSON
    blocks 1, 2, ...            entries, compressed

    block = length (4 bytes, little endian) · CRC-32 of what follows (4 bytes) · zlib of the content

A node that is killed leaves a torn block at most, at the end: it is cut off when the file is read.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradstream.errors import DataError
from gradstream.recording.entries import Entry, decode, encode
from gradstream.runtime.base import Storage
from gradstream.untrusted import parse_json, say

__all__ = ["FOLDER", "JOB_FILE", "Log", "LogPart", "LogReader", "read_log"]

FOLDER = "recording"
"""In a run directory: a folder for each part of the run, named by the id of its nodes."""

JOB_FILE = "job.json"
"""Beside the parts: which job file it was, and its SHA-256."""

FORMAT = 2
BLOCK_BYTES = 1 << 16
"""A block is written when its entries have so many bytes, and when its node says so."""
HEAD_BYTES = 8
ROOM_BYTES = 16 << 20
"""Of blocks that may wait while the disk is full."""
MAX_BLOCK_BYTES = 64 << 20
"""Of a block's content: a flood in few bytes is refused."""


class Log:
    """Writes entries, into a new file. Of a killed node only what came since the last `flush` is lost.

    A disk that is full or broken does not end the run: blocks wait in memory, and are written once there is
    room. Where more than `ROOM_BYTES` wait, the recording ends. Either is said on stderr, once.

    Args:
        storage: of the node.
        path: of the file: below `FOLDER`.
        header: what the node is: JSON.
    """

    def __init__(self, storage: Storage, path: str, header: Mapping[str, Any]) -> None:
        self._storage = storage
        self._path = path
        self.ended = False  # nothing is written any more
        self._waiting: list[bytes] = []  # whole blocks that the disk has not taken
        try:
            storage.remove(path)
        except OSError as error:
            self.ended = True
            say(f"{path}: nothing is recorded: {error}")
        self._pending = bytearray()
        self.num_entries = 0
        self.size_bytes = 0  # of the file
        self._write(json.dumps({"format": FORMAT, **header}).encode())

    def add(self, entry: Entry) -> None:
        """Notes an entry."""
        self._pending += encode(entry)
        self.num_entries += 1
        if len(self._pending) >= BLOCK_BYTES:
            self.flush()

    def flush(self) -> None:
        """What was noted is in the file from here on."""
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
                say(f"{self._path}: the recording waits for room on the disk: {error}")


@dataclass(frozen=True, slots=True)
class LogPart:
    """One node's part, as it was read.

    Args:
        node: its name.
        header: what the node was.
        entries: in order.
        torn_bytes: at its end, that belong to no whole block.
    """

    node: str
    header: Mapping[str, Any]
    entries: Sequence[Entry]
    torn_bytes: int = 0


class LogReader:
    """Takes a file apart.

    Args:
        data: its content.
        name: of the file, for messages.
    """

    def __init__(self, data: bytes, name: str) -> None:
        self._data = data
        self._name = name
        self.torn_bytes = 0

    def blocks(self) -> Iterator[bytes]:
        """Contents of its blocks. Raises DataError where one is not what was written."""
        data, at = self._data, 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 4], "little")
            stop = at + HEAD_BYTES + size
            if stop > len(data):
                self.torn_bytes = len(data) - at
                return
            packed = data[at + HEAD_BYTES : stop]
            if zlib.crc32(packed) != int.from_bytes(data[at + 4 : at + HEAD_BYTES], "little"):
                if stop == len(data):  # a power cut may leave the length and not all of what it counts
                    self.torn_bytes = stop - at
                    return
                raise DataError(
                    f"{self._name}: the block at byte {at} was altered: its CRC-32 is another; put the file "
                    "back from a copy: a recording that was altered cannot be replayed"
                )
            try:
                content = zlib.decompressobj().decompress(packed, MAX_BLOCK_BYTES)
            except zlib.error as error:
                raise DataError(f"{self._name}: the block at byte {at} cannot be read: {error}") from error
            if len(content) == MAX_BLOCK_BYTES:
                raise DataError(f"{self._name}: the block at byte {at} has more than {MAX_BLOCK_BYTES} bytes")
            yield content
            at = stop


def read_log(data: bytes, name: str) -> LogPart:
    """One node's part of a recording; what was torn off at its end is counted.

    Args:
        data: of the file.
        name: of the file.

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
        raise DataError(f"{name} has format {number}, this gradstream reads {FORMAT}")
    entries = [entry for block in blocks for entry in decode(block)]
    return LogPart(node, header, entries, reader.torn_bytes)
