"""Runs with HOGWILD!: users handle them like any other run."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

import gradstream as gs
from gradstream import sparse
from gradstream.checkpoint.folder import Policy
from gradstream.coordinator.lead import Emit, Lost
from gradstream.coordinator.lost_work import OrphanedPushes
from gradstream.coordinator.nodes import Nodes
from gradstream.coordinator.progress import SampleProgress
from gradstream.coordinator.snapshot_rounds import Discard, SnapshotRounds
from gradstream.data.ledger import Ledger
from gradstream.data.plan import PartitionPlan, epoch_order
from gradstream.errors import ConfigError, GradstreamError, UnknownNameError
from gradstream.job.files import load_job
from gradstream.run.local import LocalCluster
from gradstream.run.local.environment import node_environment
from gradstream.run.planning import plan_run
from gradstream.sparse import SparseDataset, SparseModel
from gradstream.strategies import SharedMemoryWorker
from gradstream.telemetry.events import CheckpointFailedEvent
from gradstream.testing import check_strategy
from gradstream.testing.properties import BrokenPropertyError, complete
from gradstream.testing.runs import least_squares
from gradstream.wire import v1
from gradstream.worker.shared.exchange import Waits
from gradstream.worker.shared.replica import SharedWords
from killing import Killer
from whole_runs import train

pytest.importorskip("numba", reason="numba is not installed: pip install 'gradstream[fast]'")


def test_it_obeys_the_laws_and_with_one_worker_is_plain_sgd_bit_for_bit() -> None:
    report = check_strategy("hogwild")
    assert "'atomic'" in str(report)


@dataclasses.dataclass(frozen=True)
class Twice(gs.Hogwild):
    """Adds every gradient twice, which the properties have to notice."""

    async def train(self, worker: SharedMemoryWorker) -> None:
        async for batch in worker.batches():
            gradient = await worker.gradient(batch)
            for _ in range(2):
                await worker.shared.add(gradient, self.update)


def test_the_laws_see_an_update_that_is_made_twice() -> None:
    with pytest.raises(BrokenPropertyError, match="too many"):
        complete(Twice())


def job(**options: object) -> gs.Job:
    model, data = least_squares(32, 3)
    return gs.Job(model, data, **{"strategy": "hogwild", "epochs": 1, **options})  # type: ignore[arg-type]


def test_what_it_cannot_do_is_said_before_anything_is_started() -> None:
    plan_run(job(), "x")
    for options, match in (
        ({"servers": 1}, "through shared memory"),
        ({"optimizer": "adam"}, "expected gradstream.optim.SGD"),
        ({"optimizer": gs.optim.SGD(0.1, momentum=0.9)}, "expected gradstream.optim.SGD"),
        ({"optimizer": gs.optim.SGD(0.1, weight_decay=0.1)}, "expected gradstream.optim.SGD"),
        ({"groups": [{"match": "w", "lr_scale": 2.0}], "optimizer": gs.optim.SGD(0.1)}, "with groups"),
    ):
        with pytest.raises(ConfigError, match=match):
            plan_run(job(**options), "x")
    with pytest.raises(UnknownNameError, match="did you mean 'atomic'"):
        gs.Hogwild(update="atomik")


def test_what_only_a_worker_can_know_ends_the_run_with_words() -> None:
    data = sparse.from_csr([0, 1, 2], [0, 1], [1.0, 1.0], [0.5, 1.5])
    model = sparse.linear(2, loss="squared")

    def touched(table: Any, i: int, where: Any) -> int:
        return len(unknown)  # type: ignore[name-defined]  # noqa: F821

    broken = sparse.from_samples([("w", (2,))], touched, lambda w, t, i, where, count, into: 0.0, most=1)
    for model_, data_, options, match in (
        (model, data, {"clip_norm": 1.0}, "is not clipped"),
        (model, gs.from_arrays(np.ones((4, 2)), np.ones(4)), {}, "needs sparse data"),
        (broken, data, {}, r"worker-0, step 0 .* the model raised TypingError"),
        (model, data, {"optimizer": gs.optim.SGD(1e30), "epochs": 5}, "the loss is"),
    ):
        options = {"epochs": 1, "optimizer": gs.optim.SGD(0.1), **options}
        with pytest.raises(GradstreamError, match=match):
            gs.simulate(model_, data_, strategy="hogwild", workers=1, batch_size=1, **options)  # type: ignore[arg-type]


def test_without_a_compiler_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'gradstream\[fast\]'"):
        plan_run(job(), "x")


def two_workers(shards: int) -> tuple[SnapshotRounds, Nodes]:
    nodes = Nodes(2, shards)
    for rank in range(shards):
        nodes.add(v1.Node(name=f"shard-{rank}", role="shard", rank=rank))
    for rank in range(2):
        nodes.add(v1.Node(name=f"worker-{rank}", role="worker", rank=rank))
    ledger = Ledger(PartitionPlan(8, 2, 2, seed=0), epochs=1)
    progress = SampleProgress(ledger, None, None)
    return SnapshotRounds(progress, nodes, Policy(), OrphanedPushes(progress, nodes, redoes=False)), nodes


GONE = Lost(v1.Node(name="worker-1", role="worker", rank=1), "", "worker-1", {})


def test_a_worker_lost_while_it_writes_a_checkpoint_ends_the_cut_and_not_the_run() -> None:
    cuts, nodes = two_workers(shards=0)
    cuts.begin(0.0)
    cut = cuts.current
    assert cut is not None
    cut.stage = v1.Snapshot.WRITE
    nodes.remove("worker-1")
    (discard, event, _) = cuts.on_lost(GONE, 1.0)
    assert isinstance(discard, Discard)
    assert isinstance(event, Emit) and isinstance(event.event, CheckpointFailedEvent)
    # Where there are shards, these write, and no worker is needed for it.
    cuts, nodes = two_workers(shards=1)
    cuts.begin(2.0)
    assert cuts.current is not None
    cuts.current.stage = v1.Snapshot.WRITE
    nodes.remove("worker-1")
    assert cuts.on_lost(GONE, 3.0) == []


# ---- real processes ---------------------------------------------------------------------------

MEMFD = "memfd:gradstream"

JOB = """
import numpy as np

import gradstream as gs
from gradstream import sparse

N, D = 3000, 70_000

def data():
    return sparse.synthetic(N, D, 20, num_test_samples=200, task="numbers", seed=5)

def job(update="atomic", workers=2, epochs=3):
    return gs.Job(
        sparse.linear(D, loss="squared"), data(), strategy=gs.Hogwild(update=update),
        optimizer=gs.optim.SGD(lr=gs.schedules.StepDecay(0.5, every=1, factor=0.9)), workers=workers, batch_size=100,
        epochs=epochs, evaluate_every="epoch", checkpoint_every=20, chunk_elems=16_384, seed=3,
        deadlines=gs.Deadlines(join_s=60, silence_s=10, lease_s=3, retry_s=5),
    )

def short_lock():
    return job("short_lock", epochs=40)

def round_robin():
    return job("round_robin", epochs=40)

def alone():
    return job("component_locks", workers=1)
"""


@pytest.fixture(scope="module")
def job_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hogwild") / "wild.py"
    path.write_text(JOB)
    return path


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """One forkserver for all runs."""
    with LocalCluster(tmp_path_factory.mktemp("logs"), node_environment(2)) as cluster:
        yield cluster


def objectives(run: gs.Run) -> tuple[float, float]:
    """Before the run and after it."""
    assert isinstance(run.model, SparseModel) and isinstance(run.data, SparseDataset)
    w = run.parameters["w"]
    return run.model.objective(np.zeros_like(w), run.data), run.model.objective(w, run.data)


@pytest.fixture
def before() -> frozenset[int]:
    """Segments that other tests of this process have left for the garbage collector."""
    return segments()


def check_nothing_is_left(cluster: LocalCluster, before: frozenset[int]) -> None:
    """Segments have no names. They are gone when no process of the run is left, and this one holds none."""
    assert not cluster.running
    assert segments() <= before


def segments() -> frozenset[int]:
    """Inodes of the segments that this process has mapped or open."""
    mapped = [line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines() if MEMFD in line]
    links = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    opened = [os.stat(link).st_ino for link in links if os.path.lexists(link) and MEMFD in os.readlink(link)]
    return frozenset([*map(int, mapped), *opened])


def test_a_run_is_a_run_like_others(
    job_file: Path, warm: LocalCluster, tmp_path: Path, before: frozenset[int]
) -> None:
    run = train(f"{job_file}:job", tmp_path / "run", warm)
    assert run.summary["samples"] == 9000
    assert run.summary["samples_accounted"] == 9000
    assert run.summary["servers"] == 0
    assert (run.summary["pushes"], run.summary["pushed_bytes"]) == (90, 0)
    assert "shared" in run.summary["group"]
    losses = [event["loss"] for event in run.events if event["event"] == "evaluated"]
    assert 1 <= len(losses) <= 3  # worker 0 looks, if it has minibatches: the other may have had them all
    kept = sorted((tmp_path / "run/checkpoints").glob("step-*"))
    assert kept
    start, end = objectives(run)
    assert end < 0.8 * start
    check_nothing_is_left(warm, before)


def test_one_worker_is_serial_sgd_bit_for_bit(job_file: Path, warm: LocalCluster, tmp_path: Path) -> None:
    run = train(f"{job_file}:alone", tmp_path / "run", warm)
    table = load_job(f"{job_file}:alone").data.tables[0]  # type: ignore[attr-defined]
    w = np.zeros(70_000, np.float32)
    for epoch in range(3):
        rate = np.float32(0.5 * 0.9**epoch)
        for i in epoch_order(3000, 3, epoch):
            row = slice(table.indptr[i], table.indptr[i + 1])
            where, x, margin = table.indices[row], table.values[row], 0.0
            for product in w[where] * x:
                margin += float(product)
            w[where] -= rate * (np.float32(margin - float(table.targets[i])) * x)
    assert run.parameters["w"].tobytes() == w.tobytes()


@pytest.mark.parametrize("update", ["short_lock", "round_robin"])
def test_a_killed_worker_stops_nobody_and_leaves_no_memory_behind(
    update: str, job_file: Path, warm: LocalCluster, tmp_path: Path, before: frozenset[int]
) -> None:
    killer = Killer(warm, "step", 30, "worker-1")  # of 1,200: the event may come late
    run = train(f"{job_file}:{update}", tmp_path / "run", warm, on_event=killer)
    killer.bury()
    assert run.summary["workers_lost"] == ["worker-1"]
    assert run.summary["samples_accounted"] == 40 * 3000
    start, end = objectives(run)
    assert end < 0.5 * start
    check_nothing_is_left(warm, before)


def test_a_network_of_torch_is_trained_on_the_live_vector() -> None:
    x = np.random.default_rng(0).standard_normal((400, 3)).astype("float32")
    model = gs.from_torch(
        lambda: torch.nn.Linear(3, 1), lambda outputs, y: torch.nn.functional.mse_loss(outputs[:, 0], y)
    )
    data = gs.from_arrays(x, x @ np.array([2, -1, 0.5], np.float32))
    run = gs.train(model, data, strategy="hogwild", workers=2, batch_size=10, epochs=15, processes=False)
    np.testing.assert_allclose(run.parameters["weight"], [[2, -1, 0.5]], atol=0.05)


# ---- locks ------------------------------------------------------------------------------------


class Clock:
    """A runtime in which time passes by sleeping."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> int:
        return int(self.now_s * 1e9)

    def left_s(self, since_ns: int, seconds: float) -> float:
        return since_ns / 1e9 + seconds - self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class There:
    """A member that knows of these workers."""

    def __init__(self, *ranks: int) -> None:
        self.notice = v1.Notice(
            nodes=[v1.Node(name=f"worker-{rank}", role="worker", rank=rank) for rank in ranks]
        )


def waits(member: There, board: SharedWords) -> Any:
    return Waits(cast(Any, Clock()), cast(Any, member), board, silence_s=1.0)


async def waits_for(rank: int, member: There) -> int:
    """Asks for a lock that this rank holds until it is free; returns the number of attempts."""
    board = SharedWords(torch.zeros(64, dtype=torch.int64), torch.zeros(20, dtype=torch.int32), rank=0)
    board.locks[7] = rank + 1
    asked, one = 0, waits(member, board)
    while board.owner(7) >= 0:
        await one.unlock(7, halt=0)
        asked += 1
    return asked


async def asks_at_every_halt(times: int) -> None:
    """Stops `times` times, each time for half of the time for which a lock may be held."""
    board = SharedWords(torch.zeros(64, dtype=torch.int64), torch.zeros(20, dtype=torch.int32), rank=0)
    board.locks[7] = 2
    one = waits(There(0, 1), board)
    for halt in range(times):
        for _ in range(500):  # of a millisecond
            await one.unlock(7, halt)


def test_a_lock_is_taken_from_the_dead_and_who_keeps_one_is_named() -> None:
    assert asyncio.run(waits_for(1, There(0))) == 1
    with pytest.raises(gs.errors.DeadlineError, match=r"worker-1: has kept lock 7 .* for 1 s"):
        asyncio.run(waits_for(1, There(0, 1)))


def test_who_gave_a_lock_back_and_took_it_again_has_not_kept_it() -> None:
    asyncio.run(asks_at_every_halt(5))
