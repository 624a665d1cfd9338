"""What other programs read: Chrome traces, and TensorBoard's event files by a reader of its own."""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.report.lanes import trace_json
from gradstream.run.result import Run
from gradstream.runtime.simulation import Cost, SimulationConfig
from gradstream.testing.runs import least_squares
from gradstream.trackers.tensorboard import EventFile, Scalar, Scalars, TensorBoard, crc32c, write_run


@pytest.fixture(scope="module")
def run() -> Run:
    model, data = least_squares(48, 200)
    costs = {"gradient": Cost(base_s=0.1), "apply": Cost(base_s=0.01)}
    config = SimulationConfig(costs=costs, speeds={"worker-1": 0.5})
    options: dict[str, Any] = {"workers": 2, "servers": 2, "steps": 12, "chunk_elems": 64, "batch_size": 2}
    return simulate(
        model, data, strategy="synchronous", optimizer=gs.optim.SGD(lr=0.01), config=config, **options
    )


# ---- Chrome trace -----------------------------------------------------------------------


def test_a_trace_has_a_process_per_node_and_its_tracks(run: Run) -> None:
    records = json.loads(trace_json(run.events))["traceEvents"]
    names = {r["pid"]: r["args"]["name"] for r in records if r["name"] == "process_name"}
    assert {"worker-0", "worker-1", "shard-0", "shard-1"} <= set(names.values())
    tracks = {(names[r["pid"]], r["args"]["name"]) for r in records if r["name"] == "thread_name"}
    assert {
        (worker, t) for worker in ("worker-0", "worker-1") for t in ("compute", "wait", "push", "fetch")
    } <= tracks
    slices = [r for r in records if r["ph"] == "X"]
    drawn = {(names[r["pid"]], r["cat"]) for r in slices}
    assert drawn <= tracks
    assert ("shard-0", "apply") in drawn
    assert all(r["dur"] >= 0 and r["ts"] > -1 for r in slices)
    waits = {r["name"] for r in slices if r["cat"] == "wait" and names[r["pid"]] == "worker-0"}
    assert "waiting for worker-1" in waits


def test_slices_of_a_track_follow_one_another_and_add_up(run: Run) -> None:
    records = [r for r in json.loads(trace_json(run.events))["traceEvents"] if r["ph"] == "X"]
    for kind, key in (("compute", "compute_s"), ("wait", "wait_s")):
        steps = [e for e in run.events if e["event"] == "step" and e["rank"] == 0]
        (pid,) = {r["pid"] for r in records if r["name"] == "waiting for worker-1"}
        own = sorted((r["ts"], r["ts"] + r["dur"]) for r in records if r["pid"] == pid and r["cat"] == kind)
        assert all(before[1] <= after[0] + 1e-2 for before, after in itertools.pairwise(own))
        total_us = sum(end - begin for begin, end in own)
        assert total_us == pytest.approx(1e6 * sum(step[key] for step in steps), rel=1e-3)


# ---- TensorBoard ------------------------------------------------------------------------


def event_class() -> Any:
    """`tensorflow.Event`, as far as it is needed, by google's own protobuf."""
    file = descriptor_pb2.FileDescriptorProto(name="event_for_test.proto", package="test", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto

    def message(name: str, *fields: tuple[str, int, Any, str, bool]) -> None:
        added = file.message_type.add(name=name)
        for field, number, kind, inner, many in fields:
            label = kinds.LABEL_REPEATED if many else kinds.LABEL_OPTIONAL
            added.field.add(name=field, number=number, type=kind, type_name=inner or None, label=label)

    message(
        "Value", ("tag", 1, kinds.TYPE_STRING, "", False), ("simple_value", 2, kinds.TYPE_FLOAT, "", False)
    )
    message("Summary", ("value", 1, kinds.TYPE_MESSAGE, ".test.Value", True))
    message(
        "Event",
        ("wall_time", 1, kinds.TYPE_DOUBLE, "", False),
        ("step", 2, kinds.TYPE_INT64, "", False),
        ("file_version", 3, kinds.TYPE_STRING, "", False),
        ("summary", 5, kinds.TYPE_MESSAGE, ".test.Summary", False),
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("test.Event"))


def masked(data: bytes) -> int:
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def records(path: Path) -> Iterator[Any]:
    """Reads a file as record_reader.cc does, checksums included."""
    data, place, kind = path.read_bytes(), 0, event_class()
    while place < len(data):
        (length,) = struct.unpack_from("<Q", data, place)
        assert struct.unpack_from("<I", data, place + 8)[0] == masked(data[place : place + 8])
        body = data[place + 12 : place + 12 + length]
        assert struct.unpack_from("<I", data, place + 12 + length)[0] == masked(body)
        yield kind.FromString(body)
        place += 16 + length


def test_checksum_of_the_standard() -> None:
    """RFC 3720, B.4, and the check value of the polynomial's catalogue."""
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(bytes([0xFF] * 32)) == 0x62A8AB43


def test_points_are_read_back(tmp_path: Path) -> None:
    with EventFile(tmp_path / "new", 1_795_000_000.0) as file:
        file.add([Scalar("loss/train", 0.5, 300, 1.5), Scalar("accuracy/val", 0.875, 1 << 40, 2.0)])
    version, loss, accuracy = records(file.path)
    assert version.file_version == "brain.Event:2"
    assert (loss.step, loss.wall_time, loss.summary.value[0].tag) == (300, 1_795_000_001.5, "loss/train")
    assert (accuracy.step, accuracy.summary.value[0].simple_value) == (1 << 40, 0.875)


def test_a_run_has_the_usual_tags(run: Run, tmp_path: Path) -> None:
    evaluated = {"event": "evaluated", "node": "worker-0", "time_s": 2.0, "samples": 40, "accuracy": 0.5}
    events = [*run.events, {**evaluated, "loss": None, "metrics": {"top5": 0.75}}]
    points = [
        (e.summary.value[0].tag, e.step, e.summary.value[0].simple_value)
        for e in records(write_run(events, {}, tmp_path))
        if e.summary.value
    ]
    tags = {tag for tag, _, _ in points}
    assert {"loss/train", "accuracy/val", "metrics/top5", "perf/samples_per_second"} <= tags
    assert {"system/cpu_cores/worker-0", "system/memory_bytes/shard-1"} <= tags
    assert "loss/val" not in tags
    assert ("accuracy/val", 40, 0.5) in points
    assert max(samples for _, samples, _ in points) == run.summary["samples"]


def test_loss_and_rate_are_means_over_time() -> None:
    scalars = Scalars(every_s=1.0)

    def step(time_s: float, loss: float | None, samples: int) -> list[Scalar]:
        record = {
            "event": "step",
            "time_s": time_s,
            "samples": samples,
            "loss": loss,
            "compute_s": 0.25,
            "wait_s": 0.25,
        }
        return scalars.update(record)

    assert step(0.5, 4.0, 10) == []
    assert step(1.0, 1.0, 30) == [
        Scalar("loss/train", 1.75, 40, 1.0),
        Scalar("perf/samples_per_second", 40.0, 40, 1.0),
    ]
    assert step(1.5, None, 5) == []
    assert scalars.update({"event": "finished", "time_s": 1.5}) == [
        Scalar("perf/samples_per_second", 10.0, 45, 1.5)
    ]
    assert scalars.update({"event": "joined", "time_s": 1.5}) == []


def test_a_callback_writes_while_the_run_goes_on(run: Run, tmp_path: Path) -> None:
    board = TensorBoard()
    board.on_start({"time_s": 0.0, "run_dir": str(tmp_path), "name": "net"})
    (file,) = (tmp_path / "tensorboard").glob("events.out.tfevents.*.net")
    sizes = [file.stat().st_size]
    for event in run.events:
        if event["event"] == "step":
            board.on_step(event)
            sizes.append(file.stat().st_size)
    assert sizes[len(sizes) // 2] > sizes[0]  # flushed, for who looks on
    board.on_end(run)
    tags = {e.summary.value[0].tag for e in records(file) if e.summary.value}
    assert {"loss/train", "system/cpu_cores/shard-0"} <= tags
    board.on_end(run)  # over is over


def test_a_board_has_a_folder_of_its_own_and_serves_a_second_run(run: Run, tmp_path: Path) -> None:
    board = TensorBoard(tmp_path / "boards")
    for name in ("one", "two"):
        board.on_start({"time_s": 0.0, "run_dir": None, "name": name})
        board.on_evaluate({"event": "evaluated", "time_s": 1.0, "samples": 4, "accuracy": 0.5, "loss": None})
        board.on_end(run)
    files = sorted((tmp_path / "boards").iterdir(), key=lambda path: path.suffix)
    assert [path.suffix for path in files] == [".one", ".two"]
    assert all(any(e.step == 4 for e in records(path)) for path in files)


def test_a_file_of_the_same_name_is_kept_unless_replaced(tmp_path: Path) -> None:
    files = [EventFile(tmp_path, 10.0, "net", replace=replace) for replace in (False, False, True)]
    assert [file.path.name for file in files] == [
        f"events.out.tfevents.10.net{end}" for end in ("", ".1", "")
    ]
    for file in files:
        file.close()
        file.close()


def test_a_simulated_run_tells_the_callback(tmp_path: Path) -> None:
    model, data = least_squares(48, 8)
    simulate(model, data, steps=4, batch_size=2, workers=2, callbacks=[TensorBoard(tmp_path)])
    (file,) = tmp_path.iterdir()
    tags = {e.summary.value[0].tag for e in records(file) if e.summary.value}
    assert {"loss/train", "perf/samples_per_second", "system/memory_bytes/worker-0"} <= tags
