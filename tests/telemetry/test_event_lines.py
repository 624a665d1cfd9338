"""Events of members and of files: what is none is dropped, counted, and ends nobody."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gradstream.cli import main
from gradstream.coordinator import Member
from gradstream.coordinator.presence_service import EventGate, in_beats
from gradstream.job.callbacks import Callbacks
from gradstream.report.progress_line import ProgressLine
from gradstream.run.followed_events import FollowedEvents
from gradstream.run.result import Run
from gradstream.telemetry import events
from gradstream.telemetry.event_lines import EventError, parse_event
from gradstream.telemetry.events import EvaluatedEvent, FinishedEvent, StepEvent, encode
from gradstream.trackers.tensorboard import write_run
from gradstream.transport.limits import LIMITS
from gradstream.wire import v1
from membership_cluster import Cluster, diligent, shard, worker

STEP = StepEvent(rank=0, step=1, epoch=0, samples=8, loss=0.5, compute_s=0.1, wait_s=0.0)
LINE = encode(STEP, node="worker-0", time_s=1.5)


def changed(**fields: Any) -> bytes:
    return json.dumps({**json.loads(LINE), **fields}).encode()


ODD = {
    "no JSON": b"hello",
    "cut short": LINE[:40],
    "no object": b"[1]",
    "no class": changed(event="nonsense"),
    "class of a list": changed(event=["step"]),
    "NaN": LINE.replace(b"0.5", b"NaN"),
    "infinite": LINE.replace(b"0.5", b"1e999"),
    "too large": LINE.replace(b"0.5", b"1e101"),
    "text for a number": changed(compute_s="0.1"),
    "a truth for a number": changed(step=True),
    "null for a number": changed(step=None),
    "below 0": changed(step=-1),
    "no rank": changed(rank=1 << 40),
    "no time": changed(time_s=None),
    "a time beyond all": changed(time_s=1e12),
    "a field missing": json.dumps({k: v for k, v in json.loads(LINE).items() if k != "samples"}).encode(),
    "nested": changed(waited_for=json.loads("[" * 12 + "]" * 12)),
    "a name with an escape": changed(node="worker-\x1b[2J"),
}


@pytest.mark.parametrize("line", ODD.values(), ids=ODD)
def test_lines_that_are_no_events(line: bytes) -> None:
    with pytest.raises(EventError):
        parse_event(line)


@pytest.mark.parametrize(
    "line",
    [
        changed(node="worker-1"),
        changed(other=1),
        encode(FinishedEvent(samples=1, train_s=1.0), node="worker-0", time_s=1.0),
        LINE.rstrip() + b"\t",
        changed(waited_for={"é": 1.0}).replace(b"\\u00e9", "é".encode()),
    ],
    ids=["another's name", "an unknown field", "the coordinator's class", "a control character", "not ASCII"],
)
def test_events_that_a_member_cannot_report(line: bytes) -> None:
    parse_event(line)
    with pytest.raises(EventError):
        parse_event(line, member="worker-0")
    assert parse_event(LINE.rstrip(), member="worker-0")["loss"] == 0.5


def test_fields_of_other_versions_are_left_out_or_get_their_defaults() -> None:
    record = {
        key: value for key, value in json.loads(LINE).items() if key not in ("lr", "late", "waited_for")
    }
    event = parse_event(json.dumps({**record, "later": {"x": 1}}).encode())
    assert (event["lr"], event["late"], event["waited_for"]) == (None, False, {})
    assert "later" not in event


def test_numbers_that_json_cannot_hold_become_null() -> None:
    event = EvaluatedEvent(
        step=1, epoch=0, samples=1, accuracy=float("nan"), loss=1e300, metrics={"a": float("inf"), "b": 1.0}
    )
    line = encode(event, node="worker-0", time_s=0.0).rstrip()
    parsed = parse_event(line, member="worker-0")
    assert (parsed["accuracy"], parsed["loss"], parsed["metrics"]) == (None, None, {"a": None, "b": 1.0})


# ---- the gate -----------------------------------------------------------------------------


def test_the_gate_keeps_events_and_counts_other_lines() -> None:
    gate = EventGate("worker-0", 0.0)
    admitted = gate.take(LINE + b"hello\n" + LINE + changed(node="worker-1") + b"\n", 0.0)
    assert admitted.lines == LINE + LINE
    assert (len(admitted.events), admitted.num_refused) == (2, 2)
    assert admitted.why == "step in the name of another node"


def test_bytes_are_bounded_in_a_beat_and_in_a_second() -> None:
    gate = EventGate("worker-0", 0.0)
    assert gate.take(LINE * (LIMITS.beat_events_bytes // len(LINE) + 1), 0.0).num_refused > 1000
    beat = LINE * (LIMITS.beat_events_bytes // len(LINE))
    taken = sum(len(gate.take(beat, 0.0).lines) for _ in range(40))
    assert LIMITS.events_burst_bytes - LIMITS.beat_events_bytes <= taken <= LIMITS.events_burst_bytes
    refused = gate.take(beat, 0.0)
    assert (refused.lines, "a second" in refused.why) == (b"", True)
    taken = sum(len(gate.take(beat, 1.0).lines) for _ in range(40))
    assert (
        LIMITS.events_bytes_s - LIMITS.beat_events_bytes
        <= taken
        <= LIMITS.events_bytes_s + LIMITS.beat_events_bytes
    )


def test_a_member_divides_events_that_are_too_large_for_one_beat() -> None:
    lines = [LINE] * (7 * LIMITS.beat_events_bytes // (2 * len(LINE)))
    beats = list(in_beats(lines))
    assert b"".join(beats) == b"".join(lines)
    assert len(beats) == 4
    assert max(map(len, beats)) <= LIMITS.beat_events_bytes
    assert list(in_beats([])) == [b""]


async def babbles(cluster: Cluster, member: Member) -> None:
    """Does its work, and floods the coordinator with what is no event of its own for three seconds."""
    await member.training()
    for number in range(300):
        rubbish = b"\x1b[2J" * 10 + b"\n" + changed(node="worker-0", step=number) + b"\n{\n"
        assert member._presence is not None
        await member._presence.say(v1.Beat(events=rubbish))
        await cluster.virtual.runtime(member.node.name).sleep(0.01)
    await diligent(cluster, member)


def test_a_member_that_babbles_is_reported_once_a_second_and_the_run_goes_on() -> None:
    cluster = Cluster()
    cluster.run(shard, worker(0, diligent), worker(1, babbles))
    assert cluster.outcome is not None
    assert cluster.outcome.failed is None
    refused = [event for event in cluster.events if event["event"] == "refused_events"]
    assert sum(event["count"] for event in refused) == 900
    assert 3 <= len(refused) <= 6
    assert {event["who"] for event in refused} == {"worker-1"}
    assert all(len(json.dumps(event, separators=(",", ":"))) <= 256 for event in refused)
    assert not any(
        event["event"] == "step" and event["node"] != f"worker-{event['rank']}" for event in cluster.events
    )


# ---- readers ------------------------------------------------------------------------------


@pytest.fixture
def odd_run(tmp_path: Path) -> Path:
    """A run directory whose events were written by hand, by others, and cut short."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text('{"name": "odd", "began_unix_s": 1.0}')
    joined = b'{"event":"started","node":"coordinator","time_s":0,"job":"j","workers":1,"servers":1,'
    joined += b'"strategy":"[/red]","optimizer":"sgd","num_parameters":1,"num_samples":8,"total_steps":1}\n'
    lines = b"\n".join(ODD.values()) + b"\n"
    (tmp_path / "run" / "events.jsonl").write_bytes(joined + LINE + lines + LINE + LINE[:30])
    return tmp_path / "run"


def test_readers_pass_over_odd_lines_and_say_how_many(
    odd_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run.load(odd_run)
    assert run.summary["steps"] == 2
    num_odd = b"\n".join(ODD.values()).count(b"\n") + 1
    assert f"passed over {num_odd} lines" in capsys.readouterr().err
    write_run(run.events, run.info, odd_run / "board")
    progress = ProgressLine()
    for event in run.events:
        progress.update(event)
    assert progress.step == 2
    told = Callbacks([], {}, threads=False).beside(None)
    for event in run.events:
        told(event)


@pytest.mark.parametrize("command", [["report"], ["trace"], ["runs"], ["runs", "--json"]], ids=" ".join)
def test_commands_accept_an_odd_file(odd_run: Path, command: list[str]) -> None:
    folder = odd_run.parent if command[0] == "runs" else odd_run
    done = CliRunner().invoke(main, [command[0], str(folder), *command[1:]])
    assert done.exit_code == 0, done.output
    assert "passed over" in done.output


def test_the_launcher_accepts_an_odd_file_that_grows(odd_run: Path) -> None:
    heard: list[str] = []
    events = odd_run / "events.jsonl"
    before = events.read_bytes()
    events.write_bytes(b"")
    followed = FollowedEvents(odd_run, lambda event: heard.append(event["event"]))
    events.write_bytes(before)
    followed.read()
    with events.open("ab") as file:
        file.write(LINE[30:] + b"\n\x00\xff\n")
    followed.read()
    assert heard == ["started", "step", "step", "step"]
    assert "passed over" in followed.skipped


@pytest.mark.parametrize(
    "info", ["[]", '{"name": 3}', '{"machine": []}', '{"began_unix_s": 1e300}', "[" * 99]
)
def test_an_odd_run_json_is_a_typed_error(odd_run: Path, info: str) -> None:
    (odd_run / "run.json").write_text(info)
    done = CliRunner().invoke(main, ["report", str(odd_run)])
    assert done.exit_code == 2
    assert "run.json" in done.output


def test_text_of_other_nodes_is_escaped() -> None:
    progress = ProgressLine()
    event = {
        "event": "machine", "node": "launcher", "time_s": 0.0, "who": "\x1b[2Jx", "state": "refused",
        "address": "\u202e", "nodes": [], "reason": "a\nb" + "z" * 5000,
    }  # fmt: skip
    progress.update(event)
    said = progress.notice(event)
    assert said.isprintable()
    assert len(said.encode()) <= 1024
    assert said.startswith("machine \\x1b[2Jx")


def test_members_may_report_every_event_that_their_code_makes(repository: Path) -> None:
    """A class that is forgotten would be dropped by the coordinator, and a run would never hear of it."""
    made = set[str]()
    for package in ("worker", "server", "session", "collectives", "checkpoint", "strategies"):
        for path in (repository / "src/gradstream" / package).rglob("*.py"):
            made |= set(re.findall(r"\b([A-Z]\w*Event)\(", path.read_text()))
    assert len(made) >= 8
    assert [name for name in sorted(made) if not getattr(events, name).from_members] == []
