"""Cuts and resumed runs on virtual time: stopped at any instant, a run ends as one that never stopped."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.checkpoint import Manifest, newest, snapshot, verify
from gradstream.checkpoint.folder import Policy
from gradstream.coordinator.lead import Lost
from gradstream.coordinator.lost_work import OrphanedPushes
from gradstream.coordinator.nodes import Nodes
from gradstream.coordinator.progress import SampleProgress
from gradstream.coordinator.snapshot_rounds import SnapshotRounds
from gradstream.data import Ledger, PartitionPlan
from gradstream.errors import Interrupted
from gradstream.runtime.simulation import Cost, SimulationConfig
from gradstream.runtime.storage import MemoryStorage
from gradstream.testing.runs import (
    QUICK,
    UNSTEADY,
    Tokens,
    check_exactly_once,
    least_squares,
    numbered,
    token_counts,
)
from gradstream.wire import v1
from whole_runs import same, unexpected

MODEL, DATA = least_squares(101, 200, seed=1, whole=False, dtype="float32", reduction="mean")
JOB: dict[str, Any] = {
    "optimizer": gs.optim.Adam(lr=0.05), "workers": 3, "servers": 2, "batch_size": 4, "epochs": 6,
    "chunk_elems": 64, "deadlines": QUICK, "config": UNSTEADY, "checkpoint_every": None,
}  # fmt: skip
TOKENS: dict[str, Any] = {
    "strategy": "downpour", "optimizer": gs.optim.SGD(lr=1.0), "workers": 3, "servers": 2, "batch_size": 2,
    "epochs": 4, "chunk_elems": 64, "deadlines": QUICK, "config": UNSTEADY, "checkpoint_every": None,
}  # fmt: skip
NUM_TOKENS = 24


@functools.cache
def undisturbed(optimizer: Any) -> gs.Run:
    """The run that is not stopped."""
    return simulate(MODEL, DATA, **{**JOB, "optimizer": optimizer})


def stop_at(seconds: float, kill: str | None = None) -> Callable[[Any], Coroutine[Any, Any, None]]:
    """Asks the run to stop; with a name, that node dies a moment later, in the middle of the snapshot."""

    async def script(cluster: Any) -> None:
        director = cluster.virtual.runtime("director")
        await director.sleep(seconds)
        cluster.stop()
        if kill is not None:
            await director.sleep(0.01)
            cluster.kill(kill)

    return script


@pytest.mark.parametrize(
    ("optimizer", "seconds", "servers"),
    [
        (gs.optim.Adam(lr=0.05), 0.02, 2),
        (gs.optim.Adam(lr=0.05), 0.9, 3),
        (gs.optim.Momentum(lr=0.01), 1.6, 3),
    ],
    ids=["adam-early", "adam", "momentum"],
)
def test_synchronous_run_stopped_anywhere_ends_with_the_same_bytes(
    optimizer: Any, seconds: float, servers: int
) -> None:
    job, storage = {**JOB, "optimizer": optimizer}, MemoryStorage()
    with pytest.raises(Interrupted) as caught:
        simulate(MODEL, DATA, storage=storage, script=stop_at(seconds), **job)
    assert caught.value.code == 75
    manifest = verify(storage, caught.value.checkpoint)
    assert manifest.step == manifest.rounds == min(manifest.versions) == max(manifest.versions)
    resumed = simulate(MODEL, DATA, storage=storage, resume=True, **{**job, "servers": servers})
    assert same(resumed, undisturbed(optimizer))
    assert resumed.summary["samples_accounted"] == 6 * 101


def test_a_run_stopped_again_and_again_ends_with_the_same_bytes() -> None:
    whole, storage = undisturbed(JOB["optimizer"]), MemoryStorage()
    stops = 0
    while True:
        try:
            run = simulate(MODEL, DATA, storage=storage, resume=True, script=stop_at(0.6), **JOB)
        except Interrupted:
            stops += 1
            continue
        break
    assert stops > 2
    assert same(run, whole)


def test_checkpoints_on_the_way_change_no_bit_and_are_plain_safetensors() -> None:
    whole, storage = undisturbed(JOB["optimizer"]), MemoryStorage()
    run = simulate(MODEL, DATA, storage=storage, **{**JOB, "checkpoint_every": "epoch", "keep_last": 3})
    assert same(run, whole)
    made = [event for event in run.events if event["event"] == "checkpoint"]
    assert len(made) >= 4
    found = newest(storage, unexpected)
    assert found is not None
    folder, manifest = found
    assert folder == made[-1]["folder"]
    assert len([name for name in storage.names("checkpoints") if name.startswith("step-")]) == 3
    arrays = load(storage.read(f"{folder}/model.safetensors"))
    assert {name: array.shape for name, array in arrays.items()} == {"w": (200,)}
    resumed = simulate(MODEL, DATA, storage=storage, resume=True, **JOB)
    assert same(resumed, whole)
    (event,) = [event for event in resumed.events if event["event"] == "resumed"]
    assert event["samples"] == manifest.done.count(101)


@pytest.mark.parametrize("workers", [2, 5])
def test_another_number_of_workers_goes_on_at_the_right_sample(workers: int) -> None:
    """Synchronous: no sample of an epoch is repeated, none is left out."""
    model, data = Tokens(num_chunks=3), numbered(NUM_TOKENS)
    # A round's update is the mean over its samples: the weight of a sample counts, so only where it is 0.
    job = {**TOKENS, "strategy": "synchronous", "batch_size": 3}
    for seconds in (0.1, 0.25, 0.4):
        storage = MemoryStorage()
        with pytest.raises(Interrupted) as caught:
            simulate(model, data, storage=storage, script=stop_at(seconds), **job)
        done = verify(storage, caught.value.checkpoint).done
        resumed = simulate(model, data, storage=storage, resume=True, **{**job, "workers": workers})
        trained = sum(event["samples"] for event in resumed.events if event["event"] == "step")
        assert trained + done.count(NUM_TOKENS) == 4 * NUM_TOKENS
        assert resumed.summary["samples_accounted"] == 4 * NUM_TOKENS
        assert (token_counts(resumed, NUM_TOKENS) > 0).all()


@pytest.mark.parametrize("strategy", [gs.Downpour(), gs.Downpour(overlap=False, push_every=3, fetch_every=2)])
def test_downpour_resumed_has_every_sample_once(strategy: gs.Strategy) -> None:
    model, data = Tokens(num_chunks=3), numbered(NUM_TOKENS)
    rng, stopped = random.Random(1), 0
    for seed in range(3):
        job = {**TOKENS, "strategy": strategy, "seed": seed}
        storage = MemoryStorage()
        try:
            simulate(model, data, storage=storage, script=stop_at(rng.uniform(0.0, 0.5)), **job)
        except Interrupted:
            workers = rng.choice([1, 3, 4])
            run = simulate(model, data, storage=storage, resume=True, **{**job, "workers": workers})
            check_exactly_once(run, NUM_TOKENS, 4)
            assert run.summary["samples_accounted"] == 4 * NUM_TOKENS
            stopped += 1
    assert stopped > 1


def test_checker_notices_a_cut_that_does_not_wait_for_pushes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a worker reports that it is quiesced although its last push is not in the model."""
    from gradstream.worker.server.replica import ServerReplica

    async def hasty(self: Any) -> None:
        pass

    monkeypatch.setattr(ServerReplica, "_flush", hasty)
    wrong = 0
    for seed in range(3):
        storage = MemoryStorage()
        job = {**TOKENS, "seed": seed, "strategy": gs.Downpour(push_every=3)}
        try:
            simulate(Tokens(3), numbered(NUM_TOKENS), storage=storage, script=stop_at(0.2), **job)
        except Interrupted:
            folder = newest(storage, unexpected)
            assert folder is not None
            counts = load(storage.read(f"{folder[0]}/model.safetensors"))["tokens"]
            wrong += counts.sum() != 3 * folder[1].done.count(NUM_TOKENS)
    assert wrong


def test_cut_of_downpour_holds_what_its_ledger_says() -> None:
    for seed in range(6):
        storage = MemoryStorage()
        job = {**TOKENS, "seed": seed, "strategy": gs.Downpour(push_every=3)}
        with pytest.raises(Interrupted):
            simulate(Tokens(3), numbered(NUM_TOKENS), storage=storage, script=stop_at(0.2), **job)
        folder = newest(storage, unexpected)
        assert folder is not None
        counts = load(storage.read(f"{folder[0]}/model.safetensors"))["tokens"]
        assert counts.sum() == 3 * folder[1].done.count(NUM_TOKENS)


def test_a_worker_lost_in_the_middle_of_a_cut_ends_the_cut_and_not_the_run() -> None:
    aborted = 0
    for seed in range(5):
        job, storage, events = {**TOKENS, "seed": seed}, MemoryStorage(), list[Any]()
        with pytest.raises(Interrupted):
            simulate(
                Tokens(3), numbered(NUM_TOKENS), storage=storage, script=stop_at(0.2, kill="worker-1"),
                on_event=events.append, **job,
            )  # fmt: skip
        aborted += any(event["event"] == "checkpoint_failed" for event in events)
        run = simulate(Tokens(3), numbered(NUM_TOKENS), storage=storage, resume=True, **job)
        assert (token_counts(run, NUM_TOKENS) >= 4).all()
    assert aborted


def test_another_seed_is_refused() -> None:
    storage = MemoryStorage()
    with pytest.raises(Interrupted):
        simulate(MODEL, DATA, storage=storage, script=stop_at(0.5), **JOB)
    with pytest.raises(gs.errors.ConfigError, match=r"seed=1.*expected 0"):
        simulate(MODEL, DATA, storage=storage, resume=True, **{**JOB, "seed": 1})


def test_a_cut_that_takes_too_long_is_given_up_and_training_goes_on() -> None:
    import dataclasses

    deadlines = dataclasses.replace(QUICK, cut_s=0.001, lease_s=0.2)
    storage = MemoryStorage()
    job = {**JOB, "deadlines": deadlines, "checkpoint_every": 3}
    run = simulate(MODEL, DATA, storage=storage, **job)
    assert same(run, undisturbed(JOB["optimizer"]))
    failed = [event for event in run.events if event["event"] == "checkpoint_failed"]
    assert failed
    assert "within 0.001 s" in failed[0]["message"]


def test_steps_go_on_counting() -> None:
    job = {**JOB, "epochs": None, "steps": 20, "optimizer": gs.optim.SGD(lr=gs.schedules.Linear(0.1, 0.0))}
    whole, storage = simulate(MODEL, DATA, **job), MemoryStorage()
    with pytest.raises(Interrupted):
        simulate(MODEL, DATA, storage=storage, script=stop_at(0.5), **job)
    resumed = simulate(MODEL, DATA, storage=storage, resume=True, **job)
    assert same(resumed, whole)
    before = newest(storage, unexpected)
    assert before is not None
    steps = sorted({event["step"] for event in resumed.events if event["event"] == "step"})
    assert steps == list(range(before[1].step, 20))


def test_manifest_survives_json() -> None:
    storage = MemoryStorage()
    with pytest.raises(Interrupted) as caught:
        simulate(MODEL, DATA, storage=storage, script=stop_at(0.5), **JOB)
    data = storage.read(f"{caught.value.checkpoint}/state.json")
    assert Manifest.decode(data).encode() == data


def batches(rank: int, config: int, epoch: int, seed: int) -> Any:
    rng = np.random.default_rng([rank, epoch, seed])
    for _ in range(9):
        inputs = rng.standard_normal((4, 200)).astype("float32")
        yield inputs, inputs.sum(1)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("length", "end"), [(9, {"epochs": 3}), (None, {"epochs": None, "steps": 14})], ids=["counted", "endless"]
)
def test_a_stream_goes_on_behind_what_was_read(length: int | None, end: Any, accumulate: int) -> None:
    data = gs.from_stream(batches, batches=length)
    job = {**JOB, **end, "workers": 2, "accumulate": accumulate}
    whole, storage = simulate(MODEL, data, **job), MemoryStorage()
    with pytest.raises(Interrupted):
        simulate(MODEL, data, storage=storage, script=stop_at(0.2), **job)
    resumed = simulate(MODEL, data, storage=storage, resume=True, **job)
    assert same(resumed, whole)
    assert min(event["step"] for event in resumed.events if event["event"] == "step") > 0


def test_without_memory_for_a_copy_workers_stand_until_all_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow_disk = SimulationConfig(
        costs={**UNSTEADY.costs, "write": Cost(base_s=0.5)}, network=UNSTEADY.network
    )
    job = {**JOB, "config": slow_disk, "checkpoint_every": 8, "epochs": 3}
    whole = simulate(MODEL, DATA, **{**job, "checkpoint_every": None})
    stood = []
    for free_bytes in (None, 0):  # nobody knows: copied; nothing: written where it is
        monkeypatch.setattr(snapshot, "free_memory_bytes", lambda found=free_bytes: found)
        storage = MemoryStorage()
        run = simulate(MODEL, DATA, storage=storage, **job)
        assert same(run, whole)
        checkpoints = [event for event in run.events if event["event"] == "checkpoint"]
        stood.append([event["paused_s"] for event in checkpoints])
        found = newest(storage, unexpected)
        assert found is not None and found[0] == checkpoints[-1]["folder"]
        resumed = simulate(MODEL, DATA, storage=storage, resume=True, **job)
        assert same(resumed, whole)
    assert max(stood[0]) < 1.0 <= min(stood[1])  # either way the coordinator's folder takes 0.5 s


def test_a_worker_that_is_lost_when_the_run_has_done_enough_is_no_reason_to_keep_anything() -> None:
    nodes = Nodes(2, 1)
    nodes.add(v1.Node(name="shard-0", role="shard"))
    for rank in range(2):
        nodes.add(v1.Node(name=f"worker-{rank}", role="worker", rank=rank))
    ledger = Ledger(PartitionPlan(4, 2, 2), epochs=1)
    progress = SampleProgress(ledger, None, None)
    rounds = SnapshotRounds(progress, nodes, Policy(), OrphanedPushes(progress, nodes, redoes=False))
    rounds.finish(0.0)
    for kind in (v1.SnapshotReport.BEGUN, v1.SnapshotReport.REACHED):
        for node in nodes.workers:
            rounds.on_report(node, "snapshot", v1.SnapshotReport(number=1, kind=kind), 0.0)
    assert rounds.current is not None
    assert rounds.current.stage == v1.Snapshot.ENDED
    gone = nodes.remove("worker-1")
    assert gone is not None
    assert rounds.on_lost(Lost(gone, "", "worker-1", {}), 0.0) == []
