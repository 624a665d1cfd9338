"""What a recording holds, and what becomes of one that is torn or altered."""

from __future__ import annotations

import errno
from typing import Any

import pytest

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.data.base import BatchRef
from gradstream.errors import DataError
from gradstream.recording import (
    FOLDER,
    BatchesAssigned,
    Changed,
    Closed,
    Decided,
    FetchAsked,
    Log,
    LogPart,
    Pushed,
    Read,
    SnapshotReached,
    Summed,
    read_log,
)
from gradstream.recording.entries import Entry, decode, encode
from gradstream.runtime.simulation import Cost, Exponential, Link, Network, SimulationConfig
from gradstream.runtime.storage import MemoryStorage
from gradstream.testing.runs import least_squares
from kit.faults import FailingStorage

WORLD = SimulationConfig(
    costs={"gradient": Cost(base_s=0.03, jitter=Exponential()), "apply": Cost(base_s=1e-3)},
    network=Network(link=Link(latency_s=1e-3, jitter_s=5e-3)),
)
ENTRIES: list[Entry] = [
    Pushed(0, 3, 1, 0, base_version=0, version=-1, assign=True),
    Pushed(300, 0, 70_000, 1 << 40, base_version=90, version=100, absent=True),
    FetchAsked(1, 2, 3, 4),
    Read(1, 2, 300, 1, 5, clock=1 << 62),
    Changed("enter", (2,), 17, 20, ((0, 4), (2, 5))),
    Decided(300, (0, 2), ((1, 5), (3, 400))),
    Summed(7, 65, 0xFFFFFFFF),
    BatchesAssigned((BatchRef(1, 2, 3), BatchRef(0, 200, 0, 16)), complete=False),
    BatchesAssigned((), complete=True),
    SnapshotReached(129, ends=True),
    Closed(),
]


def log_of(entries: list[Entry]) -> bytes:
    storage = MemoryStorage()
    storage.append("one.rec", b"of an earlier run")
    log = Log(storage, "one.rec", {"node": "shard-0"})
    for entry in entries:
        log.add(entry)
        log.flush()
    assert log.size_bytes == len(storage.files["one.rec"])
    return storage.files["one.rec"]


def test_entries_come_back_as_they_were() -> None:
    assert list(decode(b"".join(map(encode, ENTRIES)))) == ENTRIES
    part = read_log(log_of(ENTRIES), "one.rec")
    assert (part.node, part.entries, part.torn_bytes) == ("shard-0", ENTRIES, 0)


def test_the_incomplete_block_of_a_killed_node_is_dropped() -> None:
    whole = log_of(ENTRIES)
    last = len(whole) - len(log_of(ENTRIES[:-1]))
    for torn in range(1, last):
        part = read_log(whole[:-torn], "one.rec")
        assert part.entries == ENTRIES[:-1]
        assert part.torn_bytes == last - torn


@pytest.mark.parametrize("room_bytes", [1 << 20, 100])
def test_a_full_disk_delays_a_recording_or_ends_it_and_not_the_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, room_bytes: int
) -> None:
    monkeypatch.setattr("gradstream.recording.log.ROOM_BYTES", room_bytes)
    storage = FailingStorage()
    log, before, meanwhile, after = Log(storage, "one.rec", {"node": "shard-0"}), 5, 20, 5
    for number in range(before + meanwhile + after):
        storage.error = errno.ENOSPC if before <= number < before + meanwhile else 0
        for entry in ENTRIES:
            log.add(entry)
        log.flush()
    assert storage.num_failed > 0
    part = read_log(storage.files["one.rec"], "one.rec")
    waits = "one.rec: the recording waits for the disk: [Errno 28] No space left on device: 'one.rec'; make room\n"
    if room_bytes > 100:
        assert part.entries == 30 * ENTRIES
        assert capsys.readouterr().err == waits
    else:
        assert log.ended
        assert part.entries == before * ENTRIES
        assert "the recording ends here" in capsys.readouterr().err
    assert part.torn_bytes == 0
    assert log.size_bytes == len(storage.files["one.rec"])


def test_a_block_that_was_altered_is_refused() -> None:
    data = bytearray(log_of(ENTRIES))
    data[len(log_of([])) + 10] ^= 1  # in the content of the first block of entries
    with pytest.raises(DataError, match="altered"):
        read_log(bytes(data), "one.rec")
    with pytest.raises(DataError, match="not a recording"):
        read_log(b"", "one.rec")
    with pytest.raises(DataError, match="format"):
        read_log(_with_format(1), "one.rec")


def _with_format(number: int) -> bytes:
    storage = MemoryStorage()
    Log(storage, "one.rec", {"node": "shard-0", "format": number})
    return storage.files["one.rec"]


def recorded(**options: Any) -> tuple[gs.Run, dict[str, LogPart]]:
    model, data = least_squares(48, 300, whole=False, dtype="float32")
    storage = MemoryStorage()
    run = simulate(
        model,
        data,
        optimizer=gs.optim.SGD(lr=2.0**-9),
        workers=3,
        servers=2,
        batch_size=4,
        epochs=3,
        chunk_elems=64,
        config=WORLD,
        storage=storage,
        **options,
    )
    names = storage.names(f"{FOLDER}/simulation")
    parts = [read_log(storage.read(f"{FOLDER}/simulation/{name}"), name) for name in names]
    return run, {part.node: part for part in parts}


def test_recording_changes_nothing_and_has_every_contribution_and_every_read() -> None:
    plain, nothing = recorded(strategy=gs.Downpour(), record=False)
    run, parts = recorded(strategy=gs.Downpour(), record=True)
    assert (run.parameters["w"] == plain.parameters["w"]).all() and not nothing
    assert sorted(parts) == ["shard-0", "shard-1", "worker-0", "worker-1", "worker-2"]
    entries = [entry for part in parts.values() for entry in part.entries]
    pushed = [entry for entry in entries if isinstance(entry, Pushed)]
    assert len(pushed) == 5 + 36 * 5  # initial parameters, then every minibatch on every chunk
    assert sum(entry.assign for entry in pushed) == 5
    read = sum(isinstance(entry, Read) for entry in entries)
    assert read == 5 * run.summary["fetches"]
    assert {entry.done for entry in entries if isinstance(entry, Summed)} == {1, 37}  # first and last


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"strategy": "allreduce", "servers": None}, "no server"),
        ({"strategy": gs.Synchronous(), "shares": "measured"}, "clock"),
    ],
)
def test_runs_that_cannot_be_replayed_are_not_recorded(options: dict[str, Any], why: str) -> None:
    model, data = least_squares(48, 3)
    with pytest.raises(gs.errors.ConfigError, match=f"record=True.*{why}"):
        simulate(model, data, workers=3, epochs=1, record=True, **options)
