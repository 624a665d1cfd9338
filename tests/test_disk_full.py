"""A disk that is full, over its quota, broken or read-only for a while: runs go on, and say what is lost."""

from __future__ import annotations

import errno
import json
import os
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

import gradstream as gs
from gradstream.casting import cast_of
from gradstream.config import build_model, make_job
from gradstream.errors import DiskError
from gradstream.events import StepEvent, encode
from gradstream.runtime.event_log import DISK_ERRORS, EventLog
from gradstream.runtime.storage import DiskStorage, MemoryStorage
from gradstream.runtime.world import Cost, World
from gradstream.simulate.cluster import SimulatedCluster
from gradstream.testing.runs import QUICK, least_squares
from gradstream.testing.storage import FailingStorage

ERRORS = pytest.mark.parametrize("number", sorted(DISK_ERRORS), ids=lambda number: errno.errorcode[number])


def step(number: int) -> bytes:
    event = StepEvent(rank=0, step=number, epoch=0, samples=1, loss=None, compute_s=0.0, wait_s=0.0)
    return encode(event, node="worker-0", time_s=float(number))


class Watch:
    """An event log with a clock that a test moves, and what it told."""

    def __init__(self, storage: Any, room_bytes: int = 1 << 20) -> None:
        self.now_s = 0.0
        self.told: list[str] = []
        self.log = EventLog(
            storage, "events.jsonl", node="coordinator", now=lambda: round(self.now_s * 1e9),
            tell=self.told.append, room_bytes=room_bytes,
        )  # fmt: skip

    def append(self, lines: bytes) -> None:
        self.now_s += 1.0
        self.log.append(lines)


def events_in(storage: Any) -> list[dict[str, Any]]:
    data = storage.read("events.jsonl")
    assert data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]


# ---- the file of events ---------------------------------------------------------------------


@ERRORS
@pytest.mark.parametrize("fits", [0, 1])
def test_events_wait_for_room_and_none_is_lost_or_torn(number: int, fits: int) -> None:
    storage = FailingStorage()
    watch = Watch(storage)
    for count in range(30):
        storage.error = number if 10 <= count < 20 else 0
        storage.fits = fits if count == 10 else 0
        watch.append(step(2 * count) + step(2 * count + 1))
    assert storage.num_failed > 0
    events = events_in(storage)
    assert [event["step"] for event in events if event["event"] == "step"] == list(range(60))
    (over,) = [event for event in events if event["event"] == "disk"]
    assert over["error"].startswith(errno.errorcode[number])
    assert (over["from_s"], over["to_s"]) == (20.0 + fits, 41.0)
    assert (over["late_events"], over["lost_events"], over["lost_bytes"]) == (22 - fits, 0, 0)
    assert len(watch.told) == 1
    assert errno.errorcode[number] in watch.told[0]


def test_what_does_not_fit_into_memory_is_counted() -> None:
    storage = FailingStorage()
    watch = Watch(storage, room_bytes=4000)
    storage.error = errno.ENOSPC
    important = encode(gs_failed(), node="coordinator", time_s=99.0)
    for count in range(100):
        watch.append(step(count))
    watch.append(important)
    storage.error = 0
    watch.append(step(100))
    events = events_in(storage)
    kinds = Counter(event["event"] for event in events)
    (over,) = [event for event in events if event["event"] == "disk"]
    assert over["lost_events"] > 50
    assert kinds["step"] + over["lost_events"] == 101
    assert over["late_events"] == kinds["step"] + 1
    assert kinds["failed"] == 1  # it came last, and steps had left room for it
    there = {event["step"] for event in events if event["event"] == "step"}
    assert over["lost_bytes"] == sum(len(step(count)) for count in range(101) if count not in there)


def gs_failed() -> Any:
    from gradstream.events import FailedEvent

    return FailedEvent(culprit="worker-0", error="E", message="m", traceback="")


def test_the_checker_of_lost_events_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """An append that may leave a torn record, as before, does not pass."""
    storage = FailingStorage()

    def torn(path: str, *records: bytes) -> int:
        data = b"".join(records)
        part = data[: len(data) // 2] if storage.error else data
        storage.files[path] = storage.files.get(path, b"") + part
        if storage.error:
            raise OSError(storage.error, "full")
        return len(records)

    monkeypatch.setattr(storage, "append", torn)
    with pytest.raises((AssertionError, ValueError)):
        check_one_outage(storage)
    check_one_outage(FailingStorage())


def check_one_outage(storage: FailingStorage) -> None:
    watch = Watch(storage)
    for count in range(3):
        storage.error = errno.ENOSPC if count == 1 else 0
        watch.append(step(count))
    assert [event["step"] for event in events_in(storage) if event["event"] == "step"] == [0, 1, 2]


class Short:
    """Stands for a file of a disk that takes so many bytes, and then none."""

    def __init__(self, room_bytes: int, number: int) -> None:
        self.room_bytes = room_bytes
        self.number = number
        self.num_short = 0
        self._open = open

    def __call__(self, path: Any, *arguments: Any, **options: Any) -> Any:
        file = self._open(path, *arguments, **options)
        if "events" not in str(path) or arguments[:1] != ("ab",):
            return file
        short = self

        class File:
            def __enter__(self) -> Any:
                return self

            def __exit__(self, *_: object) -> None:
                file.close()

            def write(self, data: memoryview) -> int:
                part = data[: short.room_bytes]
                if not len(part):
                    raise OSError(short.number, os.strerror(short.number))
                short.num_short += len(part) < len(data)
                short.room_bytes -= len(part)
                return int(file.write(part))

            def __getattr__(self, name: str) -> Any:
                return getattr(file, name)

        return File()


@ERRORS
def test_a_short_write_never_tears_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    records = [step(count) for count in range(4)]
    whole = b"".join(records)
    for room_bytes in range(len(whole) + 1):
        storage = DiskStorage(tmp_path / str(room_bytes))
        short = Short(room_bytes, number)
        monkeypatch.setattr("builtins.open", short)
        fits = max(count for count in range(5) if len(b"".join(records[:count])) <= room_bytes)
        if fits:
            assert storage.append("events.jsonl", *records) == fits
        else:
            with pytest.raises(OSError, match=os.strerror(number)):
                storage.append("events.jsonl", *records)
        monkeypatch.undo()
        assert short.num_short == (0 if room_bytes in (0, len(whole)) else 1)
        assert storage.read("events.jsonl") == b"".join(records[:fits])
        storage.append("events.jsonl", b"next\n")
        assert storage.read("events.jsonl") == b"".join(records[:fits]) + b"next\n"


def test_a_torn_record_that_cannot_be_taken_back_at_once_is_taken_back_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, first = DiskStorage(tmp_path), step(0)
    storage.append("events.jsonl", first)
    with monkeypatch.context() as patched:
        patched.setattr("builtins.open", Short(10, errno.EIO))

        def broken(*_: object) -> None:
            raise OSError(errno.EIO, "broken")

        patched.setattr("os.ftruncate", broken)
        with pytest.raises(OSError, match="Input/output"):
            storage.append("events.jsonl", step(1))
    assert storage.read("events.jsonl") == first + step(1)[:10]  # the fault fired
    storage.append("events.jsonl", step(2))
    assert storage.read("events.jsonl") == first + step(2)


# ---- whole runs on virtual time -------------------------------------------------------------

MODEL, DATA = least_squares(60, 200, whole=False, dtype="float32", reduction="mean")
WORLD = World(costs={"gradient": Cost(base_s=0.1)})
JOB: dict[str, Any] = {
    "optimizer": gs.SGD(lr=0.05), "workers": 2, "servers": 2, "batch_size": 4, "epochs": 32,
    "chunk_elems": 64, "deadlines": QUICK, "checkpoint_every": "2s", "record": True,
}  # fmt: skip


Script = Callable[[SimulatedCluster], Coroutine[Any, Any, None]]


def simulated(
    storage: MemoryStorage, script: Script, told: list[str] | None = None, **options: Any
) -> tuple[SimulatedCluster, list[str]]:
    """A run whose events are on its storage, as those of processes are; and what it told its launcher."""
    job = make_job(MODEL, DATA, **{**JOB, **options})
    cast, told = cast_of(job, "simulation", keeps=True), [] if told is None else told
    cluster = SimulatedCluster(cast, build_model(job), DATA, WORLD, lambda lines: log.append(lines), storage)
    clock = cluster.virtual.clock
    log = EventLog(storage, "events.jsonl", node="coordinator", now=lambda: clock.now_ns, tell=told.append)
    cluster.run(script)
    log.flush()
    return cluster, told


async def nothing(cluster: SimulatedCluster) -> None:
    del cluster


def full_between(storage: FailingStorage, number: int, from_s: float, to_s: float) -> Script:
    async def script(cluster: SimulatedCluster) -> None:
        director = cluster.virtual.runtime("director")
        await director.sleep(from_s)
        storage.error = number
        await director.sleep(to_s - from_s)
        storage.error = 0

    return script


@ERRORS
@pytest.mark.parametrize("strategy", ["synchronous", "downpour"])
def test_a_disk_that_fails_for_ten_seconds_in_mid_run(number: int, strategy: str) -> None:
    quiet = FailingStorage()
    simulated(quiet, nothing, strategy=strategy)
    storage = FailingStorage()
    cluster, told = simulated(storage, full_between(storage, number, 5.0, 15.0), strategy=strategy)
    assert storage.num_failed > 0
    assert {name: error for name, error in cluster.outcomes.items() if error is not None} == {}
    events = events_in(storage)
    (over,) = [event for event in events if event["event"] == "disk"]
    assert over["lost_events"] == 0
    steps = [event for event in events if event["event"] == "step"]
    assert len(steps) == len([event for event in events_in(quiet) if event["event"] == "step"])
    assert len(told) == 1
    failed = [event for event in events if event["event"] == "checkpoint_failed"]
    made = [event["time_s"] for event in events if event["event"] == "checkpoint"]
    assert failed
    assert min(at_s for at_s in made if at_s > 15.0) <= 15.0 + 2 * 2.0 + 0.5  # and what a cut takes
    assert not [name for name in storage.names("checkpoints") if name.startswith(".")]
    assert events[-1]["event"] == "finished" or any(event["event"] == "finished" for event in events)
    if strategy == "synchronous":
        final = "checkpoints/final/model.safetensors"
        assert storage.read(final) == quiet.read(final)


@ERRORS
def test_final_parameters_wait_for_room(number: int) -> None:
    storage, told = FailingStorage(), list[str]()

    async def script(cluster: SimulatedCluster) -> None:
        director = cluster.virtual.runtime("director")
        await director.sleep(20.0)
        storage.error = number
        while not any("final parameters wait for room" in text for text in told):
            await director.sleep(0.1)
        await director.sleep(10.0)
        storage.error = 0

    cluster, _ = simulated(storage, script, told, strategy="synchronous")
    assert storage.num_failed > 1
    assert {name: error for name, error in cluster.outcomes.items() if error is not None} == {}
    assert "checkpoints/final/model.safetensors" in storage.files
    assert errno.errorcode[number] in next(text for text in told if "final parameters" in text)


def test_final_parameters_that_find_no_room_are_an_error_that_names_the_disk() -> None:
    storage = FailingStorage()
    cluster, _ = simulated(storage, full_between(storage, errno.ENOSPC, 20.0, 1000.0), strategy="synchronous")
    error = cluster.outcomes["worker-0"]
    assert isinstance(error, DiskError)
    assert "bytes) are lost" in str(error)
    assert "ENOSPC: No space left on device" in str(error)
    assert "after 60 s" in str(error)
    assert "resume the run from its newest checkpoint" in str(error)
    assert "checkpoints/final/model.safetensors" not in storage.files
