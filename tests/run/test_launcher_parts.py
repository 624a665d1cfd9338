"""Parts of a launcher without processes: signals, events that are read late."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from gradstream.run import followed_events
from gradstream.run.followed_events import FollowedEvents
from gradstream.run.local.environment import StopSignals
from gradstream.telemetry.events import StoppedEvent, encode


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
