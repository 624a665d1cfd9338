"""The curves of a run in TensorBoard, over samples of all workers.

Tags: loss/train, loss/val, accuracy/val, metrics/<name>, log/<name>, perf/samples_per_second,
system/cpu_cores/<node>, system/memory_bytes/<node>.
"""

from __future__ import annotations

import datetime
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self

from gradstream.report.staleness import StalenessRow
from gradstream.telemetry.events import EventDict

if TYPE_CHECKING:
    from gradstream.run.result import Run


# ---- tfevents ----------------------------------------------------------------------------
# TensorBoard's event files, written without TensorBoard and without TensorFlow.
#
# A file is a sequence of records, each framed as
#
#     length: uint64 | masked crc32c of length: uint32 | data | masked crc32c of data: uint32
#
# in little-endian, where masked(c) = ((c >> 15) | (c << 17)) + 0xa282ead8 mod 2³². The data of a record is a protobuf
# message `tensorflow.Event`, of which three fields are needed: wall_time = 1 (double), step = 2 (int64), and either
# file_version = 3 (string) or summary = 5, {value = 1: {tag = 1 (string), simple_value = 2 (float)}}.
#
# References: TensorFlow's record_writer.cc and event.proto; RFC 3720 for crc32c.


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


# ---- tensorboard -------------------------------------------------------------------------

EVERY_S = 0.25
"""Loss, throughput and logged figures are means over this many seconds; more points are of no use."""


class Scalars:
    """Turns the events of a run into points, one event at a time.

    Args:
        every_s: loss/train, log/<name> and perf/samples_per_second are means over this many seconds of the run.
    """

    def __init__(self, every_s: float = EVERY_S) -> None:
        self._every_s = every_s
        self._samples = 0
        self._since_s = 0.0
        self._gathered = 0  # samples since `_since_s`
        self._losses: list[tuple[int, float]] = []  # (samples, loss) since `_since_s`
        self._logged: dict[str, list[float]] = {}  # values since `_since_s`
        self._cpu: dict[str, tuple[float, float]] = {}  # node -> (time_s, CPU seconds)

    def update(self, event: EventDict) -> list[Scalar]:
        """The points that this event completes."""
        now_s = event["time_s"]
        match event["event"]:
            case "step":
                return self._step(event, now_s)
            case "log":
                for name, value in event["values"].items():
                    self._logged.setdefault(f"log/{name}", []).append(math.nan if value is None else value)
                return self._take(now_s) if now_s - self._since_s >= self._every_s else []
            case "evaluated":
                named = {f"{key}/val": event.get(key) for key in ("loss", "accuracy")}
                named |= {f"metrics/{key}": value for key, value in (event.get("metrics") or {}).items()}
                return self._points(named, now_s, event["samples"])
            case "exchange" if event["staleness"]:
                counts = {int(tau): count for tau, count in event["staleness"].items()}
                mean = StalenessRow("", "", counts).mean
                return self._points({f"staleness/{event['node']}": mean}, now_s)
            case "cpu":
                return self._cores(event, now_s)
            case "memory":
                size_bytes = event.get("own_bytes") or event["peak_own_bytes"]
                return self._points({f"system/memory_bytes/{event['node']}": size_bytes}, now_s)
            case "finished" | "failed":
                return self._take(max(now_s, self._since_s))
        return []

    def _points(
        self, named: Mapping[str, float | None], now_s: float, samples: int | None = None
    ) -> list[Scalar]:
        at = self._samples if samples is None else samples
        return [Scalar(tag, float(value), at, now_s) for tag, value in named.items() if value is not None]

    def _step(self, event: EventDict, now_s: float) -> list[Scalar]:
        if not self._samples:
            self._since_s = max(0.0, now_s - event["compute_s"] - event["wait_s"])
        self._samples += event["samples"]
        self._gathered += event["samples"]
        if event["loss"] is not None and event["samples"]:
            self._losses.append((event["samples"], event["loss"]))
        return self._take(now_s) if now_s - self._since_s >= self._every_s else []

    def _take(self, now_s: float) -> list[Scalar]:
        weight = sum(samples for samples, _ in self._losses)
        passed_s = now_s - self._since_s
        rate = self._gathered / passed_s if self._gathered and passed_s > 0 else None
        loss = sum(samples * loss for samples, loss in self._losses) / weight if weight else None
        logged = {tag: math.fsum(values) / len(values) for tag, values in self._logged.items()}
        self._since_s, self._gathered, self._losses, self._logged = now_s, 0, [], {}
        return self._points({"loss/train": loss, "perf/samples_per_second": rate, **logged}, now_s)

    def _cores(self, event: EventDict, now_s: float) -> list[Scalar]:
        used_s = event["user_s"] + event["system_s"]
        then_s, before_s = self._cpu.get(event["node"], (now_s, used_s))
        self._cpu[event["node"]] = (now_s, used_s)
        if now_s <= then_s:
            return []
        return self._points(
            {f"system/cpu_cores/{event['node']}": (used_s - before_s) / (now_s - then_s)}, now_s
        )


def write_run(events: Sequence[EventDict], info: Mapping[str, Any], folder: Path) -> Path:
    """Writes the events of a whole run, and returns the file.

    Args:
        events: events of the run.
        info: contents of its `run.json`, which has the time of its begin.
        folder: folder for the file; TensorBoard shows each folder as a run.
    """
    scalars = Scalars()
    began_unix_s, name = float(info.get("began_unix_s") or 0.0), str(info.get("name") or "run")
    with EventFile(folder, began_unix_s, name, replace=True) as file:
        for event in sorted(events, key=lambda event: event["time_s"]):
            file.add(scalars.update(event))
    return file.path


class TensorBoard:
    """A callback that writes a run's curves for TensorBoard: `train(..., callbacks=[TensorBoard()])`.

    Loss, accuracy, throughput and logged values are written during the run; staleness and the nodes' CPU and memory
    are written at its end. The callback runs in the launching process, so it cannot stop or slow down training. If
    writing fails (the disk is full, say), gradstream reports the error once, and training continues.

    Args:
        folder: folder for the event files; None takes `tensorboard` in the run directory.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self._folder = None if folder is None else Path(folder)
        self._file: EventFile | None = None
        self._scalars = Scalars()

    def on_start(self, info: Mapping[str, Any]) -> None:
        """Begins a file."""
        folder = self._folder or Path(info.get("run_dir") or ".") / "tensorboard"
        began_unix_s = datetime.datetime.now(datetime.UTC).timestamp() - info["time_s"]
        self._scalars = Scalars()
        self._file = EventFile(folder, began_unix_s, str(info.get("name") or "run"))

    def on_step(self, event: EventDict) -> None:
        """Writes the points that an event completes, and adds to the means of others."""
        points = self._scalars.update(event)
        if points and self._file is not None:
            self._file.add(points)
            self._file.flush()

    on_evaluate = on_log = on_step

    def on_end(self, run: Run) -> None:
        """Writes the remaining points and the figures of the machines, and closes the file."""
        for event in run.events:
            if event["event"] in ("cpu", "memory", "exchange", "finished", "failed"):
                self.on_step(event)
        if self._file is not None:
            self._file.close()
            self._file = None
