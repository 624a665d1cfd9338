"""The coordinator's store: fences, checked reading, and a restored state that equals the one that was stored."""

from __future__ import annotations

import random
import sqlite3
from collections import deque
from pathlib import Path
from typing import Any

import pytest

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.coordinator.durable import (
    STORE,
    KeptState,
    StateError,
    StateStore,
    SupersededError,
    decode,
    encode,
    missing_lines,
)
from gradstream.coordinator.lifecycle import Boundary
from gradstream.coordinator.membership import Membership
from gradstream.data.feed import QueuePlan
from gradstream.data.leases import AssignableBatches, Leases, Receipts
from gradstream.data.ledger import Ledger
from gradstream.data.shares import WorkerSpeed
from gradstream.run.nodes import _membership, _started
from gradstream.run.simulated import SimulatedCluster
from gradstream.runtime.simulation import Cost, Exponential, SimulationConfig
from gradstream.testing.runs import QUICK, Tokens, numbered
from gradstream.wire import v1


def test_values_come_back_as_they_were() -> None:
    speed = WorkerSpeed(1.5, 2.0, 0.1, 0.2)
    pieces = AssignableBatches(total=9, low=2, ahead={4, 6}, fresh=7, returned=[(3, 1)])
    for value in (
        None,
        True,
        -3,
        0.1,
        "é",
        b"\0\xff",
        [1],
        (1, (2,)),
        {(0, 1): {2: 3}},
        {1, 2},
        deque([1]),
        pieces,
        speed,
    ):
        found = decode(encode(value))
        assert found == value and type(found) is type(value)
    node = v1.Node(name="worker-0", incarnation=1 << 63)
    assert decode(encode({"worker-0": node})) == {"worker-0": node}
    with pytest.raises(TypeError):
        encode(Receipts())  # not in the table


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nan",
        '{"set":1}',
        '{"os.system":["true"]}',
        '{"WorkerSpeed":[1]}',
        '{"Node":"%"}',
        '{"a":1,"b":2}',
        "[" * 99,
    ],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(StateError):
        decode(text)


def test_an_earlier_process_that_wakes_writes_nothing(tmp_path: Path) -> None:
    old = StateStore(tmp_path / STORE, "job")
    assert old.rule() == ({}, b"") and old.ruling == 1
    old.write({"ledger.low": "1"}, b"a\n")
    new = StateStore(tmp_path / STORE, "job")
    assert new.rule() == ({"ledger.low": "1"}, b"a\n") and new.ruling == 2
    with pytest.raises(SupersededError, match=r"the 2\. has taken its place"):
        old.write({"ledger.low": "7"}, b"b\n")
    new.write({}, b"c\n")
    assert StateStore(tmp_path / STORE, "job").rule() == ({"ledger.low": "1"}, b"c\n")


def test_files_of_another_run_or_program_are_refused_by_name(tmp_path: Path) -> None:
    StateStore(tmp_path / STORE, "job").close()
    with pytest.raises(StateError, match=r"coordinator\.db"):
        StateStore(tmp_path / STORE, "another")
    (tmp_path / "text.db").write_bytes(b"no database, but long enough to be read as one" * 100)
    with pytest.raises(StateError, match=r"text\.db"):
        StateStore(tmp_path / "text.db", "job")
    other = sqlite3.connect(tmp_path / STORE)
    other.execute("INSERT INTO state VALUES ('k', x'00')")
    other.commit()
    with pytest.raises(StateError, match="rows"):
        StateStore(tmp_path / STORE, "job").rule()


def test_events_of_the_last_transaction_are_added_once() -> None:
    assert missing_lines(b"a\nb\nc\n", b"x\na\nb\n") == b"c\n"
    assert missing_lines(b"", b"x\n") == b""


def _equal(one: Any, other: Any, seen: set[tuple[int, int]], where: str) -> None:
    """Compares two objects with all that they hold, except functions and what every process makes anew."""
    if (id(one), id(other)) in seen or callable(one):
        return
    seen.add((id(one), id(other)))
    if isinstance(other, list):
        one = list(one)  # a repeated field of a message
    assert type(one) is type(other) or isinstance(one, list | tuple), f"{where}: {type(one)} {type(other)}"
    if isinstance(one, dict):
        assert list(one) == list(other), where
        for key in one:
            _equal(one[key], other[key], seen, f"{where}[{key}]")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for index, pair in enumerate(zip(one, other, strict=True)):
            _equal(*pair, seen, f"{where}[{index}]")
    elif type(one).__module__.startswith("gradstream.") and not hasattr(one, "DESCRIPTOR"):
        slots = [name for cls in type(one).__mro__ for name in getattr(cls, "__slots__", ())]
        for name in slots or vars(one):
            if name not in ("_cut_short", "current", "_left", "_counted", *getattr(one, "CACHES", ())):
                _equal(getattr(one, name), getattr(other, name), seen, f"{where}.{name}")
    elif not hasattr(one, "shape"):
        assert one == other, where


def _queue(again: bool) -> Ledger:
    """A ledger; `again`, with a minibatch that another worker had before, and one whose gradient was refused."""
    ledger = Ledger(QueuePlan(12, 2, 3), epochs=1)
    if again:
        ledger.leases.hand_out(2, 1)
        ledger.lost(2)
        ledger.refuse(ledger.leases.hand_out(0, 2)[1], 2)
    return ledger


def test_what_workers_have_is_in_the_rows_of_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of the rows are a part of the format of the store."""
    stored = KeptState({"ledger": _queue(again=True)}).rows()
    names = "_again _counts _leased _left_out _lost _refused _sequences"
    numbers = "num_complete num_receipts num_samples num_workers"
    assert sorted(stored) == [f"ledger.{name}" for name in f"{names} {numbers}".split()]
    found = _queue(again=False)
    KeptState({"ledger": found}).restore(stored)
    _equal(_queue(again=True), found, set(), "ledger")
    for name in Leases.KEPT:  # planted: an attribute that is not kept
        monkeypatch.setattr(Leases, "KEPT", [one for one in Leases.KEPT if one != name])
        forgetful = _queue(again=False)
        KeptState({"ledger": forgetful}).restore(KeptState({"ledger": _queue(again=True)}).rows())
        with pytest.raises(AssertionError):
            _equal(_queue(again=True), forgetful, set(), "ledger")
        monkeypatch.undo()


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("downpour", {"dies": True}),
        ("synchronous", {"dies": True}),
        ("downpour", {"shares": "measured"}),
        ("synchronous", {"shares": "measured", "batch_size": 4}),
        ("synchronous", {"strategy": gs.Synchronous(backup=1)}),
        ("allreduce", {"servers": None}),
    ],
)
def test_nothing_that_changes_is_forgotten(strategy: str, options: dict[str, Any]) -> None:
    """A machine that is restored from the rows equals the one that wrote them, in every attribute at any instant."""
    compared: list[int] = []
    dies = options.get("dies", False)

    async def script(cluster: SimulatedCluster) -> None:
        director, rng = cluster.virtual.runtime("director"), random.Random(1)
        for number in range(12):
            await director.sleep(rng.uniform(0, 0.05))
            assert cluster.coordinator is not None
            if number == 5 and dies:
                cluster.kill("worker-1")
            live: Membership = cluster.coordinator.membership
            if live.life.over:
                return
            ledger = cluster.plan.ledger()
            fresh = _membership(cluster.plan, ledger, _started(cluster.plan, ledger), Boundary())
            KeptState(fresh.parts()).restore(KeptState(live.parts()).rows())
            _equal(live, fresh, set(), "membership")
            compared.append(number)

    given = {"strategy": strategy, "servers": 2, "batch_size": 2, **options}
    simulate(
        Tokens(num_chunks=2),
        numbered(24),
        workers=3,
        epochs=4,
        chunk_elems=64,
        deadlines=QUICK,
        optimizer=gs.optim.SGD(lr=1.0),
        config=SimulationConfig(costs={"gradient": Cost(base_s=0.03, jitter=Exponential())}),
        script=script,
        **{name: value for name, value in given.items() if value is not None and name != "dies"},
    )
    assert len(compared) >= 5
