"""The exchange of changed rows has the bits of whole chunks, over seeds, networks and interruptions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradstream as gs
from gradstream.cli.report import figures
from gradstream.ext.replay import replay
from gradstream.job.files import load_job
from gradstream.memory import Vector
from gradstream.report.figures import figures_of
from gradstream.report.sections import links
from gradstream.run.result import Run
from gradstream.runtime.simulation import SimulationConfig
from gradstream.server.client.fetch import SparseDelta
from gradstream.server.rows import ChangedRows, RowMap, RowPart, RowTable, pack
from gradstream.server.shard.event_schedule import UpdateDue
from gradstream.server.shard.executor import ShardExecutor
from gradstream.strategies.base import RowExchange
from gradstream.testing.runs import QUICK, Tokens, check_exactly_once, numbered
from gradstream.testing.trials import bad_world, trial
from gradstream.wire import v1
from gradstream.wire.chunks import ChunkMap
from gradstream.worker.server.replica import ServerReplica
from gradstream.worker.server.rows import OwnSteps, RowReplica, RowSum
from whole_runs import same

VOCABULARY, WIDTH = 700, 5


@dataclass(frozen=True)
class Whole(gs.Downpour):
    """Downpour that exchanges whole chunks of every model."""

    def rows(self, tables: bool) -> RowExchange | None:
        """Never."""
        return None


def model() -> Any:
    """Two tables whose rows meet no edge of a chunk, with layers before, between and after them."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Embedding(VOCABULARY, WIDTH, sparse=True)
            self.middle = nn.Linear(WIDTH, 3)
            self.second = nn.EmbeddingBag(90, 3, sparse=True)
            self.last = nn.Linear(3, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.middle(self.first(x[:, :2]).sum(1)) + self.second(x[:, 2:] % 90)
            out: torch.Tensor = self.last(torch.tanh(hidden))
            return out

    return gs.from_torch(Net, nn.functional.cross_entropy)


def data() -> Any:
    rng = np.random.default_rng(1)
    return gs.from_arrays(rng.integers(0, VOCABULARY, (96, 4)), rng.integers(0, 4, 96))


def run_of(strategy: gs.Strategy, **options: Any) -> Run:
    job: dict[str, Any] = {
        "workers": 3,
        "servers": 2,
        "batch_size": 4,
        "epochs": 2,
        "chunk_elems": 256,
        "optimizer": gs.optim.SGD(lr=0.3),
    }
    return gs.simulate(model(), data(), strategy=strategy, **(job | options))


@pytest.mark.parametrize(
    ("options", "optimizer"),
    [
        ({}, gs.optim.SGD(lr=0.3)),
        ({"overlap": False}, gs.optim.Adagrad(lr=0.1, initial_accumulator=0.01)),
        ({"push_every": 3, "fetch_every": 2}, gs.optim.Adagrad(lr=0.1, initial_accumulator=0.01)),
        ({"push_every": 2, "fetch_every": 3, "overlap": False, "local_lr": 0.1}, gs.optim.SGD(lr=0.3)),
    ],
    ids=str,
)
def test_one_worker_has_the_bits_of_whole_chunks(options: dict[str, Any], optimizer: Any) -> None:
    runs = [
        run_of(strategy(**options), workers=1, optimizer=optimizer, seed=3, epochs=1)
        for strategy in (gs.Downpour, Whole)
    ]
    assert same(*runs)
    sent, whole = (run.summary["pushed_bytes"] + run.summary["fetched_bytes"] for run in runs)
    assert sent < whole / 2


def watched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Checks at each swap that every chunk of the replica has the shard's bits of that version.

    Returns a list that gets, at each swap, the number of chunks that came whole.
    """
    kept: dict[tuple[int, int], torch.Tensor] = {}
    applied, swap_in = ShardExecutor._applied, RowReplica.swap_in
    swapped: list[int] = []

    def noting(self: ShardExecutor, update: UpdateDue) -> Any:
        kept[update.due.chunk, update.due.step] = update.parameters.clone()
        return applied(self, update)

    async def checking(self: RowReplica, arrival: Any) -> None:
        await swap_in(self, arrival)
        for chunk, version in enumerate(arrival.versions):
            start, stop = self.server.chunks.bounds(chunk)
            assert torch.equal(self.parameters.tensor[start:stop], kept[chunk, version]), (chunk, version)
        swapped.append(sum(isinstance(change, torch.Tensor) for change in arrival._changed.values()))

    monkeypatch.setattr(ShardExecutor, "_applied", noting)
    monkeypatch.setattr(RowReplica, "swap_in", checking)
    return swapped


STRATEGIES: list[gs.Strategy] = [
    gs.Downpour(),
    gs.Downpour(overlap=False, fetch_every=2),
    gs.Downpour(push_every=3, fetch_every=2),
    gs.Downpour(significance=0.05, push_every=2),
    gs.Downpour(significance=0.01, significance_of="absolute", block_elems=1),
    gs.Synchronous(sparse=True, backup=1),
]


@pytest.mark.parametrize("seed", range(len(STRATEGIES)))
def test_a_swapped_in_replica_has_the_bits_of_the_server(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """With several workers, on a network that loses, duplicates and delays frames."""
    swapped = watched(monkeypatch)
    run = run_of(
        STRATEGIES[seed],
        seed=seed,
        epochs=1,
        config=bad_world(3, 2),
        deadlines=QUICK,
    )
    assert run.summary["samples_accounted"] + run.summary["samples_dropped"] == 96
    assert run.summary["retries"] > 0
    assert sum(whole == 0 for whole in swapped) > len(swapped) / 3


@pytest.mark.parametrize("fault", ["steps are kept", "changes are overlooked", "rows are mixed up"])
def test_a_fault_in_it_would_be_noticed(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    if fault == "steps are kept":
        monkeypatch.setattr(OwnSteps, "take_back", lambda self, parameters: None)
    elif fault == "changes are overlooked":
        since = ChangedRows.since
        monkeypatch.setattr(ChangedRows, "since", lambda self, chunk, known: since(self, chunk, known + 1))
    else:
        note = ChangedRows.note
        monkeypatch.setattr(
            ChangedRows,
            "note",
            lambda self, chunk, rows, version: note(
                self, chunk, rows if rows is None else (rows - 1).clamp(min=0), version
            ),
        )
    watched(monkeypatch)
    with pytest.raises(Exception, match=r"\("):
        run_of(gs.Downpour(), epochs=1)


def test_stopped_and_resumed_and_one_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    swapped = watched(monkeypatch)
    options: dict[str, Any] = {"workers": 3, "servers": 2, "batch_size": 4, "epochs": 2, "chunk_elems": 256}
    outcome = trial(gs.Downpour(significance=0.05), model(), data(), stop=0.02, seed=1, **options)
    assert outcome.run is not None
    assert outcome.count("resumed") == 1
    assert outcome.run.summary["samples_accounted"] == 192
    outcome = trial(gs.Downpour(), model(), data(), kill=("worker-1", 0.02), seed=1, **options)
    assert outcome.run is not None
    assert outcome.lost == ["worker-1"]
    assert swapped


def test_what_is_sent_and_what_is_left_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sample adds 1 to its own elements. A worker sends an element once it has reached 3, or at the end."""
    strategy = gs.Downpour(significance=2.5, significance_of="absolute", block_elems=1)
    job: dict[str, Any] = {
        "servers": 2,
        "batch_size": 4,
        "chunk_elems": 64,
        "epochs": 5,
        "optimizer": gs.optim.SGD(lr=1.0),
    }
    run = gs.simulate(Tokens(4), numbered(32), strategy=strategy, workers=1, **job)
    check_exactly_once(run, 32, 5)
    # Of 5 ones, 3 are sent together and 2 at the end, each time with the row number. The first push sends all.
    assert run.summary["pushed_bytes"] == 4 * 64 * 4 + 2 * 4 * 32 * (4 + 4)
    assert run.summary["whole_pushed_bytes"] == 4 * 64 * 4 * run.summary["pushes"]
    for seed in range(2):
        run = gs.simulate(Tokens(4), numbered(32), strategy=strategy, workers=3, seed=seed, **job)
        check_exactly_once(run, 32, 5)
    monkeypatch.setattr(RowReplica, "_flush", ServerReplica._flush)
    lost = gs.simulate(Tokens(4), numbered(32), strategy=strategy, workers=1, **job)
    with pytest.raises(AssertionError, match="was applied 3 times"):
        check_exactly_once(lost, 32, 5)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"optimizer": gs.optim.Adam()}, "Adam.* moves every parameter.*use SGD without momentum or Adagrad"),
        ({"optimizer": gs.optim.SGD(lr=0.1, weight_decay=0.1)}, "without weight decay"),
        (
            {"groups": [{"match": "last.*", "momentum": 0.0}], "optimizer": gs.optim.Momentum(0.1)},
            "would give this group other state",
        ),
        ({"strategy_options": {"local_momentum": 0.5}}, "local_momentum=0.5"),
    ],
)
def test_an_optimizer_that_moves_every_parameter_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(gs.errors.GradstreamError, match=says):
        run_of("downpour", **options)  # type: ignore[arg-type]  # by name: it has options


def test_groups_apply_to_rows() -> None:
    groups = [{"match": "second.*", "lr_scale": 0.5}, {"match": "last.*", "lr_scale": 0.0}]
    runs = [run_of(strategy(), workers=1, groups=groups, epochs=1) for strategy in (gs.Downpour, Whole)]
    assert same(*runs)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda payload: payload.view(torch.int32).fill_(7), "do not grow"),
        (lambda payload: payload.view(torch.int32)[:1].fill_(-5), "rows -5 to"),
        (lambda payload: payload[-1:].fill_(torch.nan), "NON_FINITE"),
    ],
)
def test_hostile_pushes_are_refused(monkeypatch: pytest.MonkeyPatch, change: Any, says: str) -> None:
    take = RowSum.take

    def wrong(self: RowSum, *args: Any, **options: Any) -> Any:
        pieces = take(self, *args, **options)
        change(next(piece for piece in pieces.values() if piece.num_rows > 1).payload.tensor)
        return pieces

    monkeypatch.setattr(RowSum, "take", wrong)
    with pytest.raises(gs.errors.RefusedError, match=says):
        run_of(gs.Downpour(), epochs=1)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [(gs.optim.SGD(lr=0.3), {"overlap": False}), (gs.optim.Adagrad(lr=0.1), {})],
    ids=["sgd", "adagrad"],
)
def test_synchronous_rounds_have_the_bits_of_whole_chunks(optimizer: Any, options: dict[str, Any]) -> None:
    """Also of sums over workers, for rows that several workers have and rows that one worker has."""
    runs = [
        run_of(gs.Synchronous(sparse=sparse, **options), optimizer=optimizer, epochs=1, seed=2)
        for sparse in (True, False)
    ]
    assert same(*runs)
    assert runs[0].summary["pushed_bytes"] < runs[1].summary["pushed_bytes"] / 2


def test_a_strategy_that_cannot_send_rows_makes_them_whole() -> None:
    """Synchronous SGD with Adam trains this model by exchanging whole chunks."""
    run = run_of(gs.Synchronous(), optimizer=gs.optim.Adam(lr=0.01), epochs=1)
    assert run.summary["pushed_bytes"] == run.summary["whole_pushed_bytes"] > 0


def test_the_example_learns() -> None:
    job = load_job(f"{Path(__file__).parents[2]}/examples/embeddings.py")
    run = gs.simulate(job, epochs=None, steps=100, batch_size=512)
    before = float(np.mean(job.data.test_targets**2))  # type: ignore[attr-defined]
    assert (run.evaluate().loss or before) < 0.8 * before
    assert run.summary["pushed_bytes"] < 0.3 * run.summary["whole_pushed_bytes"]


def test_bytes_are_in_the_report_beside_what_whole_chunks_would_be() -> None:
    run = run_of(gs.Downpour(), epochs=1)
    sent, whole = run.summary["fetched_bytes"], run.summary["whole_fetched_bytes"]
    assert 0 < sent < whole
    assert sum(event["whole_fetched_bytes"] for event in run.events if event["event"] == "exchange") == whole
    assert "whole chunks would have been" in links(figures_of(run.events))
    assert "whole chunks would" not in links(figures_of(run_of(Whole(), epochs=1).events))
    assert "had all of every chunk been sent" in dict(figures(run.summary))["instead of"]


@pytest.mark.parametrize("significance", [0.0, 0.05])
def test_a_recorded_run_is_replayed_to_the_bit(significance: float) -> None:
    run = run_of(gs.Downpour(significance=significance), epochs=1, record=True)
    again = replay(run)
    assert sum(bool(update.batches) for update in again) == 24
    assert same(again, run)  # type: ignore[arg-type]  # it has parameters, too


def test_a_shape_only_run_shows_what_memory_it_takes() -> None:
    run = run_of(gs.Downpour(), epochs=1, config=SimulationConfig(shape_only=True))
    held = next(e["vectors_bytes"] for e in run.events if e["event"] == "memory" and e["node"] == "worker-0")
    tables = (VOCABULARY * WIDTH + 90 * 3) * 4
    whole = sum(array.nbytes for array in run_of(gs.Downpour(), epochs=1).parameters.values())
    assert held["parameters"] == whole
    assert all(size == whole - tables for name, size in held.items() if name not in ("parameters", "spare"))
    assert held["spare"] == 0


def patch_of() -> SparseDelta:
    """A fetch of two chunks; the reader knows version 3 of the first."""
    rows = RowMap(ChunkMap(100, 64, 1), [RowTable(0, 20, 5)], 16)
    return SparseDelta(rows, [3, -1], torch.float32, Vector("nothing", torch.empty(0)))


@pytest.mark.parametrize(
    ("chunk", "num_rows", "numbers", "elems", "says"),
    [
        (0, 2, [3, 99], 10, "rows 3 to 99; expected rows from 0 to 12"),
        (0, 2, [4, 4], 10, "do not grow"),
        (0, 1, [4], 900, "expected 6"),
        (1, 1, [4], 5, "not asked for"),
        (1, 0, [4], 5, "expected 36 of torch.float32"),
    ],
)
def test_hostile_answers_are_refused(
    chunk: int, num_rows: int, numbers: list[int], elems: int, says: str
) -> None:
    patch, payload = patch_of(), pack(RowPart(torch.tensor(numbers), torch.zeros(elems)))
    header = v1.Chunk(index=chunk, rows=num_rows, elems=len(payload), version=5)
    bounds = (64 * chunk, min(64 * chunk + 64, 100))
    place = patch.place(header, *bounds)
    assert place is None or len(place) <= 64
    with pytest.raises(gs.errors.RefusedError, match=says):
        patch.take("shard-0", header, *bounds, payload, False)
    with pytest.raises(gs.errors.RefusedError, match="unchanged, of which this worker has no version"):
        patch.unchanged("shard-0", 1, 4)


def test_a_step_moves_what_its_rows_weigh() -> None:
    """100 rows of 16 elements a step: pushes have their bytes, fetches those of both workers, within 10 %."""
    numbers = np.random.default_rng(0).integers(0, 20_000, (800, 5))
    table = gs.from_torch(
        lambda: nn.Sequential(nn.Embedding(20_000, 16, sparse=True), nn.Flatten(), nn.Linear(80, 1)),
        nn.functional.mse_loss,
    )
    samples = gs.from_arrays(numbers, np.ones((800, 1), "float32"))
    job: dict[str, Any] = {"strategy": "downpour", "optimizer": gs.optim.SGD(lr=0.1), "batch_size": 20}
    moved = []
    for steps in (5, 20):  # both have the costs of the start and the end of a run
        run = gs.simulate(table, samples, steps=steps, chunk_elems=1 << 20, **job)
        moved.append([run.summary["pushed_bytes"], run.summary["fetched_bytes"]])
    up, down = (np.array(moved[1]) - moved[0]) / (2 * 15)
    rows_bytes, rest_bytes = 100 * 16 * 4, 81 * 4 * 17 / 16
    assert 0.97 < (up - rest_bytes) / rows_bytes < 1.10
    assert 0.97 < (down - rest_bytes) / (2 * rows_bytes) < 1.10
