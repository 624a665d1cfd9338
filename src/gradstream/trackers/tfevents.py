"""TensorBoard's event files, written without TensorBoard and without TensorFlow.

A file is a sequence of records, each framed as

    length: uint64 | masked crc32c of length: uint32 | data | masked crc32c of data: uint32

in little-endian, where masked(c) = ((c >> 15) | (c << 17)) + 0xa282ead8 mod 2³². The data of a record
is a protobuf message `tensorflow.Event`, of which three fields are needed: wall_time = 1 (double),
step = 2 (int64), and either file_version = 3 (string) or summary = 5, {value = 1: {tag = 1 (string),
simple_value = 2 (float)}}.

References: TensorFlow's record_writer.cc and event.proto; RFC 3720 for crc32c.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self


@dataclass(frozen=True, slots=True)
class Scalar:
    """A point of a curve, after `samples` of all workers and `time_s` seconds of training."""

    tag: str
    value: float
    samples: int
    time_s: float


class EventFile:
    """One file of events; a context manager.

    Args:
        folder: folder for the file; it is made if it does not exist.
        began_unix_s: wall time of the begin of training, in seconds since 1970.
        name: last part of the file name, such as a host or a run.
        replace: whether to overwrite a file of the same name, instead of writing another one beside it.

    Raises:
        OSError: the file cannot be made or written. The part written before stays readable.
    """

    def __init__(
        self, folder: Path, began_unix_s: float, name: str = "gradstream", *, replace: bool = False
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._began_unix_s = began_unix_s
        self.path = folder / f"events.out.tfevents.{int(began_unix_s)}.{name}"
        count = 0
        while not replace and self.path.exists():
            count += 1
            self.path = self.path.with_name(f"events.out.tfevents.{int(began_unix_s)}.{name}.{count}")
        self._file: BinaryIO = open(self.path, "wb")  # noqa: SIM115  # closed by `close`
        self._write(_double(1, began_unix_s) + _bytes(3, b"brain.Event:2"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def add(self, points: Iterable[Scalar]) -> None:
        """Writes points. Readers see them after `flush`."""
        for point in points:
            value = _bytes(1, point.tag.encode()) + _float(2, point.value)
            event = _double(1, self._began_unix_s + point.time_s) + _varint_field(2, point.samples)
            self._write(event + _bytes(5, _bytes(1, value)))

    def flush(self) -> None:
        """Passes the written records to the system."""
        self._file.flush()

    def close(self) -> None:
        """Closes the file. Idempotent."""
        self._file.close()

    def _write(self, data: bytes) -> None:
        length = struct.pack("<Q", len(data))
        self._file.write(length + _masked(length) + data + _masked(data))


# ---- protobuf ---------------------------------------------------------------------------


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _varint_field(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _double(number: int, value: float) -> bytes:
    return _varint(number << 3 | 1) + struct.pack("<d", value)


def _bytes(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _float(number: int, value: float) -> bytes:
    return _varint(number << 3 | 5) + struct.pack("<f", value)


# ---- checksums --------------------------------------------------------------------------


def _table() -> list[int]:
    """CRC of each byte, by Castagnoli's polynomial, reflected."""
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return table


_CRC = _table()


def crc32c(data: bytes) -> int:
    """Castagnoli's CRC with 32 bits, RFC 3720."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
