"""A disk that is full, over its quota, broken or read-only for a while: runs go on, and say what is lost."""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

import gradstream as gs
from gradstream.checkpoint import newest
from gradstream.errors import DiskError
from gradstream.job.job import build_model, make_job
from gradstream.recording import read_log
from gradstream.run.followed_events import FollowedEvents
from gradstream.run.local.forkserver import log_stream
from gradstream.run.node import EVENTS, write_rest
from gradstream.run.planning import plan_run
from gradstream.run.simulated import SimulatedCluster
from gradstream.runtime.simulation import Cost, SimulationConfig
from gradstream.runtime.storage import DISK_ERRORS, DiskStorage, EventLog, MemoryStorage
from gradstream.runtime.virtual import VirtualCluster
from gradstream.telemetry.events import CheckpointFailedEvent, FailedEvent, FinishedEvent, StepEvent, encode
from gradstream.testing.runs import QUICK, least_squares
from kit.faults import FailingStorage

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
    failed = FailedEvent(culprit="worker-0", error="E", message="m", traceback="")
    important = encode(failed, node="coordinator", time_s=99.0)
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

MODEL, DATA = least_squares(60, 100, whole=False, dtype="float32", reduction="mean")
WORLD = SimulationConfig(costs={"gradient": Cost(base_s=0.6)})
JOB: dict[str, Any] = {
    "optimizer": gs.optim.SGD(lr=0.05), "workers": 2, "servers": 2, "batch_size": 4, "epochs": 6,
    "chunk_elems": 64, "deadlines": QUICK, "checkpoint_every": "2s", "record": True,
}  # fmt: skip


Script = Callable[[SimulatedCluster], Coroutine[Any, Any, None]]


def simulated(
    storage: MemoryStorage, script: Script, told: list[str] | None = None, **options: Any
) -> tuple[SimulatedCluster, list[str]]:
    """A run whose events are on its storage, as those of processes are; and what it told its launcher."""
    job = make_job(MODEL, DATA, **{**JOB, **options})
    plan, told = plan_run(job, "simulation", keeps=True), [] if told is None else told
    cluster = SimulatedCluster(plan, build_model(job), WORLD, lambda lines: log.append(lines), storage)
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


@functools.cache
def on_a_good_disk(strategy: str) -> FailingStorage:
    storage = FailingStorage()
    simulated(storage, nothing, strategy=strategy)
    return storage


@pytest.mark.parametrize(
    ("number", "strategy"),
    [(errno.ENOSPC, "synchronous"), (errno.EIO, "downpour")],
    ids=lambda given: errno.errorcode.get(given, given),
)
def test_a_disk_that_fails_for_ten_seconds_in_mid_run(number: int, strategy: str) -> None:
    quiet = on_a_good_disk(strategy)
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


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS], ids=lambda number: errno.errorcode[number])
def test_final_parameters_wait_for_room(number: int) -> None:
    storage, told = FailingStorage(), list[str]()

    async def script(cluster: SimulatedCluster) -> None:
        director = cluster.virtual.runtime("director")
        await director.sleep(5.0)
        storage.error = number
        while not any("final parameters wait for the disk" in text for text in told):
            await director.sleep(0.1)
        await director.sleep(10.0)
        storage.error = 0

    cluster, _ = simulated(storage, script, told, strategy="synchronous", epochs=2)
    assert storage.num_failed > 1
    assert {name: error for name, error in cluster.outcomes.items() if error is not None} == {}
    assert "checkpoints/final/model.safetensors" in storage.files
    assert errno.errorcode[number] in next(text for text in told if "final parameters" in text)


def test_final_parameters_that_find_no_room_are_an_error_that_names_the_disk() -> None:
    storage = FailingStorage()
    full = full_between(storage, errno.ENOSPC, 5.0, 1000.0)
    cluster, _ = simulated(storage, full, strategy="synchronous", epochs=2)
    error = cluster.outcomes["worker-0"]
    assert isinstance(error, DiskError)
    assert "bytes) are lost" in str(error)
    assert "ENOSPC: No space left on device" in str(error)
    assert "after 60 s" in str(error)
    assert "resume the run from its newest checkpoint" in str(error)
    assert "checkpoints/final/model.safetensors" not in storage.files


def test_what_never_finds_room_is_said_and_told_to_the_launcher() -> None:
    storage, said = FailingStorage(), list[dict[str, str]]()
    cluster = VirtualCluster()
    runtime = cluster.runtime("coordinator")
    log = EventLog(storage, "events.jsonl", node="coordinator", now=runtime.now, tell=lambda _: None)
    storage.error = errno.ENOSPC
    finished = encode(FinishedEvent(samples=1, train_s=1.0), node="coordinator", time_s=2.0)
    log.append(step(1) + finished)
    cluster.run(write_rest(log, runtime, 5.0, lambda **message: said.append(message)))
    assert runtime.now() == 5e9
    size_bytes = len(step(1) + finished)
    lacks = (
        f"events.jsonl lacks 2 events ({size_bytes} bytes) from 1.0 s on: ENOSPC: No space left on device\n"
    )
    assert said == [{"output": lacks}, {"unwritten": finished.decode()}]
    storage.error = 0
    said.clear()
    cluster.run(write_rest(log, runtime, 5.0, lambda **message: said.append(message)))
    assert said == []
    assert {event["event"] for event in events_in(storage)} == {"step", "finished", "disk"}


# ---- processes on a disk of 6 MB ------------------------------------------------------------

JOB_FILE = """
import time
from pathlib import Path
import numpy as np
import gradstream as gs

rng = np.random.default_rng(0)
X = rng.standard_normal((64, 40_000)).astype("float32")
Y = X[:, :4].sum(1)

def gradients(p, x, y):
    time.sleep(0.02)
    error = x @ p["w"] - y
    if Path(FINISH).exists():
        return -1e9, {"w": 0 * p["w"]}  # ends the run
    return float(error @ error) / len(y), {"w": 2e-5 * error @ x / len(y)}

def job():
    model = gs.from_functions(
        init=lambda seed: {"w": np.zeros(40_000)}, outputs=lambda p, x: x @ p["w"], gradients=gradients
    )
    return gs.Job(
        model, gs.from_arrays(X, Y), strategy="downpour", workers=2, servers=1, batch_size=8, epochs=100_000,
        optimizer=gs.optim.SGD(lr=0.01), checkpoint_every="1s", record=True,
        until=gs.until(loss=-1.0),
    )
"""

ON_SMALL_DISK = """
import json, os, sys, threading, time
from pathlib import Path
from gradstream._train import train
from gradstream.job.files import load_job

run_dir, full_s = Path(sys.argv[2]), float(sys.argv[3])
made, told, stop = [], {}, threading.Event()

def fill(file):
    try:
        while True:
            file.write(bytes(4096))
    except OSError as error:
        told["filled_with"] = error.errno

def hold():  # nothing that is freed meanwhile is left free
    with open(run_dir / "filler", "wb", buffering=0) as file:
        fill(file)
        told["full_s"] = time.monotonic()
        end_s = told["full_s"] + full_s
        while time.monotonic() < end_s:
            fill(file)
            stop.wait(0.05)
    os.unlink(run_dir / "filler")
    told["room_s"] = time.monotonic()

holder = threading.Thread(target=hold)

def on_event(event):
    if event["event"] != "checkpoint":
        return
    made.append(time.monotonic())
    if len(made) == 2:
        holder.start()
    elif "room_s" in told and made[-1] > told["room_s"] + 1:
        Path(sys.argv[4]).touch()

run = train(load_job(sys.argv[1]), run_dir=run_dir, on_event=on_event)
holder.join()
print(json.dumps({**told, "made": made, "accounted": run.summary["samples_accounted"]}), flush=True)
"""


def small_disk(tmp_path: Path, size: str) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a Python program that sees a disk of this size at `tmp_path/disk`; skips where that cannot be."""
    if not sys.platform.startswith("linux") or shutil.which("unshare") is None:
        pytest.skip("a small disk needs Linux and `unshare`")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size={size} tmpfs {disk}"
    unshare = (
        ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    )
    tried = subprocess.run([*unshare, "sh", "-c", mount], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {tried.stderr.strip()}")

    def run(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        (tmp_path / "program.py").write_text(program)
        words = [sys.executable, str(tmp_path / "program.py"), *map(str, arguments)]
        script = f'{mount} && "$@"; status=$?; cp -r {disk} {tmp_path}/kept; exit $status'
        return subprocess.run([*unshare, "sh", "-c", script, "sh", *words], capture_output=True, text=True)

    return run


@pytest.mark.limit_s(300)
def test_processes_on_a_disk_that_is_full_for_four_seconds(tmp_path: Path) -> None:
    run = small_disk(tmp_path, "6m")
    finish = tmp_path / "finish"
    (tmp_path / "job.py").write_text(textwrap.dedent(JOB_FILE).replace("FINISH", repr(str(finish))))
    ended = run(ON_SMALL_DISK, tmp_path / "job.py", tmp_path / "disk" / "run", 4, finish)
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout.splitlines()[-1])
    assert told["filled_with"] == errno.ENOSPC  # the fault was there
    of_disk = [line for line in ended.stderr.splitlines() if "ENOSPC" in line or "[Errno 28]" in line]
    # Events may find room where the coordinator's state, in pages of 4 KiB, finds none.
    assert {line[:14] for line in of_disk} - {"the disk of th"} == {"no checkpoint "} and len(of_disk) <= 2, (
        ended.stderr
    )
    state = [line for line in ended.stderr.splitlines() if line.startswith("the coordinator's state")]
    assert state == [] or state[-1] == "the coordinator's state is stored again", ended.stderr
    later = [at_s - told["room_s"] for at_s in told["made"] if at_s > told["room_s"]]
    assert later[0] <= 2 * 1.0 + 3.0, (
        "the next checkpoint within two intervals, and what this machine is late"
    )
    kept = tmp_path / "kept" / "run"
    lines = (kept / "events.jsonl").read_bytes()
    assert lines.endswith(b"\n")
    events = [json.loads(line) for line in lines.splitlines()]
    (over,) = [event for event in events if event["event"] == "disk"]
    assert over["error"].startswith("ENOSPC")
    assert over["late_events"] > 0
    assert over["lost_events"] == 0
    for rank in (0, 1):  # none is missing between the first and the last
        steps = [event["step"] for event in events if event["event"] == "step" and event["rank"] == rank]
        assert steps == list(range(len(steps)))
    assert any(event["event"] == "checkpoint_failed" for event in events)
    assert not [path.name for path in (kept / "checkpoints").iterdir() if path.name.startswith(".")]
    (finished,) = [event for event in events if event["event"] == "finished"]
    steps = [event for event in events if event["event"] == "step"]
    assert finished["samples"] == sum(event["samples"] for event in steps) == told["accounted"]
    assert (kept / "checkpoints/final/model.safetensors").stat().st_size > 160_000
    assert newest(DiskStorage(kept), lambda error: pytest.fail(str(error))) is not None
    for part in kept.rglob("*.rec"):
        assert read_log(part.read_bytes(), part.name).torn_bytes == 0


@pytest.mark.limit_s(300)
def test_a_run_directory_without_room_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    run = small_disk(tmp_path, "64k")
    program = """
        import sys
        from pathlib import Path
        from gradstream.cli import main

        disk = Path(sys.argv[1])
        try:
            with open(disk / "filler", "wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        except OSError:
            pass
        main(["train", sys.argv[2], "--run-dir", str(disk / "run")])
        """
    job = textwrap.dedent(JOB_FILE).replace("FINISH", "'nowhere'")
    (tmp_path / "job.py").write_text(job)
    ended = run(textwrap.dedent(program), tmp_path / "disk", tmp_path / "job.py")
    assert ended.returncode in (1, 2), ended.stderr
    assert "run" in ended.stderr and "No space left on device" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "make room" in ended.stderr or "name another" in ended.stderr


# ---- logs -----------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_node_that_prints_to_a_full_disk_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "node.log"
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    full = os.open("/dev/full", os.O_WRONLY)
    stream, kept = log_stream(log, by_line=True), os.dup(log)
    try:
        print("before", file=stream)
        os.dup2(full, log)
        print("lost", file=stream)
        os.dup2(kept, log)
        print("after", file=stream)
        stream.flush()
    finally:
        for descriptor in (log, full, kept):
            os.close(descriptor)
    assert path.read_text() == "before\n\n[5 bytes of this log are lost: ENOSPC]\nafter\n"


@pytest.mark.parametrize("kept", ["checkpoints/step-00000020", ""])
def test_a_checkpoint_that_failed_is_said_beside_the_full_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kept: str
) -> None:
    """Said once: the next one of the same disk is no news."""
    full = OSError(errno.ENOSPC, "No space left on device")
    followed = FollowedEvents(tmp_path, None)
    followed.say_of_disk(f"the disk of the run directory does not take {EVENTS}: ENOSPC")
    for step in (40, 60):
        failed = CheckpointFailedEvent(step=step, who="worker-0", message=f"\x1b[2J {full}", kept=kept)
        followed.take([encode(failed, node="coordinator", time_s=1.0).rstrip()])
    _, *said = capsys.readouterr().err.splitlines()
    what = f"{kept} is kept" if kept else "none is kept yet"
    assert said == [f"no checkpoint of step 40 (worker-0: \\x1b[2J {full}); {what}"]
