"""Parts of a launcher without processes: what a forkserver remembers, signals, events that are read late."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from gradstream.run import followed_events
from gradstream.run.followed_events import FollowedEvents
from gradstream.run.local.environment import StopSignals
from gradstream.run.local.forkserver import MESSAGES, History
from gradstream.telemetry.events import StoppedEvent, encode


def test_another_launcher_hears_of_the_living_first_and_of_no_earlier_process() -> None:
    history = History()
    for name in ("coordinator", "worker-0", "worker-1"):
        history.note({"started": name, "pid": 1})
        history.note({"from": name, "address": f"of {name}"})
        history.note({"from": name, "output": "a warning"})
    history.note({"exited": "coordinator", "status": -9})
    history.note({"exited": "worker-0", "status": -9})
    history.note({"started": "worker-0", "pid": 2})
    history.note({"ready": 7})
    history.kept = {"credentials": "secret"}
    assert history.told({"worker-0", "worker-1"}) == [
        {"kept": {"credentials": "secret"}, "pid": os.getpid()},
        {"started": "worker-0", "pid": 2},
        {"started": "worker-1", "pid": 1},
        {"from": "worker-1", "address": "of worker-1"},
        {"started": "coordinator", "pid": 1},
        {"from": "coordinator", "address": "of coordinator"},
        {"exited": "coordinator", "status": -9},
        {"entered": True},
    ]


def test_a_node_that_says_much_is_remembered_in_bounded_memory() -> None:
    history = History()
    history.note({"started": "worker-0", "pid": 1})
    for number in range(10 * MESSAGES):
        history.note({"from": "worker-0", "disk": number})
    history.note({"exited": "worker-0", "status": 1})
    told = history.told(set())
    assert len(told) == MESSAGES + 3 and told[-2] == {"exited": "worker-0", "status": 1}


def test_a_second_signal_ends_the_process_once_and_waits_where_it_must() -> None:
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGTERM)
        assert signals.asked
        held = signals.held()
        held.__enter__()
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(SystemExit):
            held.__exit__(None, None, None)
        signal.raise_signal(signal.SIGTERM)  # nodes are being ended
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_events_are_read_from_where_a_part_begins_and_a_line_without_end_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followed_events, "PIECE_BYTES", 256)
    lines = [encode(StoppedEvent(step=n, folder=""), node="coordinator", time_s=1.0) for n in range(9)]
    data = b"".join(lines[:8]) + b"x" * 1000 + b"\n" + lines[8]
    (tmp_path / "events.jsonl").write_bytes(data)
    seen: list[Any] = []
    events = FollowedEvents(tmp_path, seen.append, from_bytes=len(lines[0]))
    events.read()
    assert [event["step"] for event in seen] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert events.read_bytes == len(data) and "lines" in events.skipped
    beyond = FollowedEvents(tmp_path, seen.append, from_bytes=1 << 60)
    beyond.read()
    assert beyond.read_bytes == len(data)
