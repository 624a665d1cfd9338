"""A recorded run, done again: the same bits, and whoever alters the recording is found out."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.errors import DataError, DivergedError
from gradstream.ext.replay import ReplayedUpdate, replay
from gradstream.ext.replay.update import at_chunk_version, loss_jump, not_finite, of_step
from gradstream.recording import Log, Pushed, Read, read_log
from gradstream.recording.entries import Entry
from gradstream.run.node_spec import NodeSpec
from gradstream.run.simulated import SimulatedCluster
from gradstream.runtime.simulation import Cost, Exponential, Link, Network, SimulationConfig
from gradstream.runtime.storage import DiskStorage, MemoryStorage
from gradstream.testing.runs import QUICK, kill_at, least_squares

WORLD = SimulationConfig(
    costs={"gradient": Cost(base_s=0.03, jitter=Exponential()), "apply": Cost(base_s=1e-3)},
    network=Network(link=Link(latency_s=1e-3, jitter_s=5e-3)),
)
SHARD = "recording/simulation/shard-0.rec"


def recorded(strategy: Any, seed: int = 0, **options: Any) -> gs.Run:
    model, data = least_squares(48, 300, whole=False, dtype="float32")
    given: dict[str, Any] = {"workers": 3, "epochs": 3, "config": WORLD, "batch_size": 4}
    options = given | {"optimizer": gs.optim.Adagrad(lr=0.01)} | options
    return simulate(
        model,
        data,
        strategy=strategy,
        servers=2,
        chunk_elems=64,
        record=True,
        seed=seed,
        **options,
    )


def same(again: Any, run: gs.Run) -> bool:
    return bool(again.parameters["w"].tobytes() == run.parameters["w"].tobytes())


STRATEGIES = [
    gs.Downpour(push_every=3, fetch_every=2, local_momentum=0.5),
    gs.Synchronous(backup=1),
    gs.SSP(bound=2),
    gs.Softsync(splits=2),
    gs.ElasticAveraging(every=4, synchronous=True),
    gs.strategies.EAMSGD(every=2),
    gs.strategies.DCASGD(),
    gs.DiLoCo(every=5),
    gs.StreamingDiLoCo(every=5, fragments=2),
    gs.Downpour(significance=0.01, block_elems=8),
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_a_replay_ends_with_the_same_bits(strategy: Any) -> None:
    run = recorded(strategy)
    again = replay(run)
    updates = list(again)
    assert again.ended == "the run is over"
    assert same(again, run)
    taus = [tau for update in updates for tau in update.staleness]
    counts = dict(run.summary["staleness"])
    assert {tau: taus.count(tau) for tau in set(taus)} == counts
    steps = [(update.worker, step) for update in updates for step in update.steps]
    assert (
        len(set(steps)) == len(steps) == (24 if strategy == gs.Synchronous(backup=1) else 36)
    )  # minibatches


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        (gs.SSP(bound=2), {"shares": "measured"}),
        (gs.Downpour(push_every=3), {"shares": "measured"}),
        (gs.Downpour(push_every=3), {"assignment": "partitions"}),
        (gs.Downpour(), {"batch_size": [8, 4, 2]}),
    ],
    ids=repr,
)
def test_the_recording_has_the_assignment_of_minibatches(strategy: Any, options: dict[str, Any]) -> None:
    config = dataclasses.replace(WORLD, speeds={"worker-2": 0.3})
    run = recorded(strategy, config=config, epochs=6, **options)
    steps = [event for event in run.events if event["event"] == "step"]
    assert len({sum(step["rank"] == rank for step in steps) for rank in range(3)}) > 1
    again = replay(run)
    list(again)
    assert again.ended == "the run is over"
    assert same(again, run)


def test_seeds_are_different_runs_and_each_is_replayed() -> None:
    runs = [recorded(gs.Downpour(), seed) for seed in range(3)]
    assert len({run.parameters["w"].tobytes() for run in runs}) == 3
    for run in runs:
        again = replay(run, keep=False)
        list(again)
        assert same(again, run)


def test_retries_and_second_copies_are_not_taken_for_others() -> None:
    link = Link(latency_s=1e-3, jitter_s=2e-3, loss=0.004, duplicate=0.3)
    config = dataclasses.replace(WORLD, network=Network(link=link))
    retries = 0
    for seed in range(2):
        run = recorded(gs.Downpour(), seed, config=config, deadlines=QUICK)
        again = replay(run)
        list(again)
        assert same(again, run)
        retries += run.summary["retries"]
    assert retries > 0


@pytest.mark.parametrize(
    "strategy",
    [gs.Downpour(push_every=3), gs.SSP(bound=0), gs.Softsync(), gs.ParameterAveraging(every=3)],
    ids=repr,
)
def test_a_run_whose_worker_was_killed_is_replayed_to_its_end(strategy: Any) -> None:
    reassigned = 0
    for seed, (name, seconds) in enumerate([("worker-1", 0.1), ("worker-0", 0.2)]):
        run = recorded(strategy, seed, script=kill_at(name, seconds), deadlines=QUICK)
        again = replay(run)
        updates = list(again)
        assert again.ended == "the run is over"
        assert same(again, run)
        reassigned += sum(ref.partition != update.worker for update in updates for ref in update.batches)
    assert reassigned > 0


@pytest.mark.parametrize(
    "strategy", [gs.Downpour(push_every=5, fetch_every=2), gs.Softsync()], ids=["downpour", "softsync"]
)
def test_a_replay_repeats_the_flushes_of_snapshots(strategy: Any) -> None:
    storage = MemoryStorage()
    run = recorded(strategy, checkpoint_every=7, storage=storage)
    assert sum(event["event"] == "checkpoint" for event in run.events) >= 2
    again = replay(run)
    list(again)
    assert again.ended == "the run is over"
    assert same(again, run)
    ending = recorded(strategy, until=gs.until(samples=60), epochs=12)
    assert ending.summary["reason"] and ending.summary["samples"] < 12 * 48
    again = replay(ending)
    list(again)
    assert same(again, ending)


def test_a_resumed_run_is_replayed_from_its_checkpoint_on(tmp_path: Path) -> None:
    storage = DiskStorage(tmp_path)

    async def stop(cluster: SimulatedCluster) -> None:
        await cluster.virtual.runtime("director").sleep(0.25)
        cluster.stop()

    with pytest.raises(gs.errors.Interrupted):
        recorded(gs.Downpour(push_every=2), storage=storage, script=stop)
    run = recorded(gs.Downpour(push_every=2), storage=storage, resume=True)
    with pytest.raises(gs.errors.ConfigError, match="simulate it whole"):
        replay(run)
    spec = NodeSpec("simulation", "", (), str(tmp_path), {}, {}, {})
    (tmp_path / "nodes.json").write_text(json.dumps(dataclasses.asdict(spec)))
    (tmp_path / "recording/simulation/job.json").write_text('{"job": "", "sha256": ""}')
    again = replay(tmp_path, job=run.job)
    updates = list(again)
    assert 0 < len(updates) < 18
    assert again.ended == "the run is over"
    assert same(again, run)


def test_rows_of_tables_are_exchanged_alone_in_a_replay_too() -> None:
    rng = np.random.default_rng(0)
    net = gs.from_torch(lambda: nn.EmbeddingBag(600, 3, sparse=True), nn.functional.cross_entropy)
    run = simulate(
        net,
        gs.from_arrays(rng.integers(0, 600, (48, 4)), rng.integers(0, 3, 48)),
        strategy="downpour",
        optimizer=gs.optim.SGD(lr=0.1),
        workers=3,
        servers=2,
        batch_size=4,
        epochs=2,
        chunk_elems=256,
        config=WORLD,
        record=True,
    )
    assert run.summary["pushed_bytes"] < 0.5 * 25 * 600 * 3 * 4  # of whole chunks
    again = replay(run)
    updates = list(again)
    assert again.ended == "the run is over" and len(updates) == 24
    for name, array in run.parameters.items():
        assert np.array_equal(again.parameters[name], array)


@pytest.mark.filterwarnings("ignore:overflow")
def test_a_run_that_broke_shows_the_update_that_broke_it() -> None:
    model, data = least_squares(48, 300, whole=False, dtype="float32")
    job = gs.Job(
        model, data, strategy=gs.Downpour(), optimizer=gs.optim.SGD(lr=0.5), workers=3, servers=2, batch_size=4,
        steps=400, chunk_elems=64, record=True, seed=2, non_finite="error",
    )  # fmt: skip
    storage = MemoryStorage()
    with pytest.raises(gs.errors.GradientError) as raised:
        simulate(job, config=WORLD, storage=storage)
    files = {name: data for name, data in storage.files.items() if name.startswith("recording")}
    with replay(gs.Run(recording=files, job=job)) as again:
        jump = loss_jump()
        updates = []
        first = None
        for update in again:
            updates.append(update)
            first = first or (update if jump(update) else None)
    assert first is not None and first.number < len(updates)
    assert str(raised.value) in {str(error) for error in again.failures.values()}
    assert "could not go on: NonFiniteError: worker-" in again.ended


def test_parameters_before_and_after_each_update_are_there_to_be_looked_at() -> None:
    run = recorded(gs.Downpour(), workers=1, optimizer=gs.optim.SGD(lr=2.0**-6))
    updates = list(replay(run))
    assert len(updates) == 36
    for first, second in pairwise(updates):
        assert np.array_equal(first.after["w"], second.before["w"])
    for update in updates:
        moved = update.after["w"].astype("float64") - update.before["w"]
        assert np.linalg.norm(moved) == pytest.approx(update.update_norm, rel=1e-5)
        assert update.update_norm == pytest.approx(2.0**-6 * update.gradient_norm, rel=1e-3)
        assert len(update.samples or ()) == update.num_samples == 4
    assert not next(iter(replay(run, keep=False))).after
    with replay(run) as again:
        next(again)
    assert again.ended == "closed"


def altered(run: gs.Run, change: Any, path: str = SHARD) -> gs.Run:
    """The run with other entries in a recording that is whole otherwise."""
    part = read_log(run.recording[path], path)
    storage = MemoryStorage()
    log = Log(storage, path, part.header)
    for entry in change(list(part.entries)):
        log.add(entry)
        if log.num_entries % 100 == 0:
            log.flush()
    log.flush()
    return dataclasses.replace(run, recording={**run.recording, **storage.files})


def swapped(entries: list[Entry]) -> list[Entry]:
    """Two contributions of a chunk that came while it was idle, one after the other, change places."""
    pushes = [index for index, entry in enumerate(entries) if isinstance(entry, Pushed) and entry.chunk == 0]
    for first, second in pairwise(pushes[8:]):
        a, b = entries[first], entries[second]
        assert isinstance(a, Pushed) and isinstance(b, Pushed)
        if a.rank != b.rank and a.chunk_time != b.chunk_time and a.base_version <= b.version:
            entries[first] = dataclasses.replace(b, chunk_time=a.chunk_time, version=a.version)
            entries[second] = dataclasses.replace(a, chunk_time=b.chunk_time, version=b.version)
            return entries
    raise AssertionError("no such pair")


def test_two_updates_that_were_swapped_are_noticed() -> None:
    for seed in range(2):
        run = recorded(gs.Downpour(), seed)
        with pytest.raises(DivergedError, match=r"shard-0, chunk 0|shard-\d"):
            list(replay(altered(run, swapped)))


def test_a_fetch_that_was_given_another_version_is_noticed() -> None:
    def earlier(entries: list[Entry]) -> list[Entry]:
        index = next(
            i for i, e in enumerate(entries) if isinstance(e, Read) and e.number == 5 and e.chunk == 0
        )
        read = entries[index]
        assert isinstance(read, Read)
        entries[index] = dataclasses.replace(read, chunk_time=read.chunk_time - 2)
        return entries

    with pytest.raises(DivergedError, match="shard-0, chunk 0"):
        list(replay(altered(recorded(gs.Downpour()), earlier)))


def test_other_data_is_noticed() -> None:
    run = recorded(gs.Downpour())
    model, data = least_squares(48, 300, whole=False, dtype="float32", seed=1)
    other = dataclasses.replace(run.job, model=model, data=data)
    with pytest.raises(DivergedError, match="parameters are not those"):
        list(replay(run, job=other))


def test_a_recording_that_is_cut_off_or_altered_is_noticed() -> None:
    run = altered(recorded(gs.Downpour()), lambda entries: entries)
    data = run.recording[SHARD]
    short = dataclasses.replace(run, recording={**run.recording, SHARD: data[: len(data) - 5]})
    again = replay(short)
    assert 0 < len(list(again)) < 36
    assert again.ended == "the recording ends here: shard-0 was cut off"
    bad = bytearray(data)
    bad[40] ^= 1
    with pytest.raises(DataError, match="altered"):
        replay(dataclasses.replace(run, recording={**run.recording, SHARD: bytes(bad)}))


def test_another_package_is_refused_by_name_unless_one_insists() -> None:
    run = recorded(gs.Downpour())
    part = read_log(run.recording[SHARD], SHARD)
    header = {**part.header, "arithmetic": {**part.header["arithmetic"], "torch": "2.0.1"}}
    storage = MemoryStorage()
    log = Log(storage, SHARD, header)
    for entry in part.entries:
        log.add(entry)
    log.flush()
    other = dataclasses.replace(run, recording={**run.recording, **storage.files})
    with pytest.raises(gs.errors.ConfigError, match=r"shard-0 was recorded with torch 2\.0\.1, here"):
        replay(other)
    again = replay(other, anyway=True)
    list(again)
    assert same(again, run)


def test_a_run_without_a_recording_is_refused() -> None:
    model, data = least_squares(48, 3)
    with pytest.raises(gs.errors.ConfigError, match="record=True"):
        replay(simulate(model, data, epochs=1))


def update(number: int, loss: float, **fields: Any) -> ReplayedUpdate:
    known: dict[str, Any] = {
        "number": number, "worker": 0, "sequence": number, "steps": (number,), "batches": (), "samples": None,
        "num_samples": 1, "lr": 0.1, "loss": loss, "computed_on": (3, 4), "applied_at": (5, 4),
        "gradient_norm": 1.0, "update_norm": 1.0, "finite": True,
    }  # fmt: skip
    return ReplayedUpdate(**{**known, **fields})


def test_the_update_that_is_looked_for_is_found() -> None:
    jump = loss_jump()
    losses = [1.0, 1.1, 0.9, 1.0, 1.2, 0.8, 1.0, 1.0, 2.9, 3.1, 1.0]
    assert [jump(update(n, loss)) for n, loss in enumerate(losses)] == [False] * 9 + [True, False]
    assert [not_finite()(update(0, 1.0, finite=finite)) for finite in (True, False)] == [False, True]
    assert not_finite()(update(0, float("inf")))
    assert of_step(2, 7)(update(0, 1.0, worker=2, steps=(6, 7)))
    assert at_chunk_version(6, 0)(update(0, 1.0)) and not at_chunk_version(6, 1)(update(0, 1.0))
    with pytest.raises(gs.errors.ConfigError, match="chunks 0 to 1"):
        at_chunk_version(6, 2)(update(0, 1.0))
